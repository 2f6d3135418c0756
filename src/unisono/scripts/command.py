"""The command `unisono run script.py [args]`: an unmodified script, with unisono in the place of torch's names."""

import argparse
import atexit
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from traceback import walk_tb
from typing import Any

import torch

from unisono.console.device_option import AUTO, NAMED, choose_devices, describe
from unisono.console.errors import DONE, OptionError
from unisono.console.options import OF_WRAPPERS, add_options_of_wrappers, expect_weights
from unisono.distributed.launchers import launch
from unisono.runtime import devices as _devices
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import text_of
from unisono.scripts import wrapper
from unisono.scripts.activity import ActivityReport
from unisono.scripts.first_step import FirstStepComparison
from unisono.scripts.install import Installation, install
from unisono.scripts.main_program import ProgramError, find_module, find_script, run_program
from unisono.scripts.wrapper import Settings
from unisono.verification.first_call import forwards_through

_COUNT_REPLICAS = ". If it wraps only where there are several GPUs: unisono run --devices 'cpu*2' --count-replicas"

_NEEDS_LAUNCHER = (
    ". It needs several processes: torchrun --nproc-per-node 2 and the script. With unisono.DataParallel in the place "
    "of DistributedDataParallel and its process group it needs none (docs/from-ddp.md)"
)
_SET_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_NO_WRAPPER = (
    "the script used neither torch.nn.DataParallel nor its functions in this process, so unisono changed nothing"
)
_PLAIN = "the CPU, without replicas, because there is no accelerator (--devices 'cpu*2' makes two replicas)"

SUMMARY = "run your script with unisono in place of torch.nn.DataParallel"

DESCRIPTION = """\
Run an unchanged script with unisono's functions in place of torch.nn.DataParallel, data_parallel, replicate, scatter,
parallel_apply and gather. Put options of unisono before the script: they apply to every wrapper that it makes.
Arguments after the script are passed to it. The last line on standard error names the devices, the rows (samples)
per second, and where the time went.
"""

EXAMPLES = """\
examples:
  unisono run train.py                            on the devices that the script names
  unisono run --devices 'cpu*2' train.py --lr 0.1
  unisono run --devices 2 --sync-batch-norm -m package.train
  unisono run --devices 'cpu*2' --shares measured train.py
  unisono run --in-dims "{'mask': None}" --scalars mean train.py
  unisono run --devices 'cpu*2' --count-replicas tutorial.py
  unisono run --devices 'cpu*2' --verify train.py

exit status:
  the script's own: the status that it gives to sys.exit, 1 after an exception, 130 after Ctrl-C
  2  if nothing was run: the script was not found, or an argument is wrong
  with --verify, after a script that ends with 0:
  1  a first step differs from one device, and no given option explains it
  2  nothing was compared, or a first step could not be
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "unisono run [options] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    program = "a file, a folder with a __main__.py, or -; arguments after it are passed to it"
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help=program)
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument(
        "--devices",
        metavar="WHICH",
        help=(
            f"use these devices for every wrapper, and ignore device_ids. auto: {AUTO}; {NAMED} "
            "(default: device_ids of the script)"
        ),
    )
    add_options_of_wrappers(parser)
    parser.add_argument(
        "--count-replicas",
        action="store_true",
        help=(
            "report the number of --devices as torch.cuda.device_count(), for scripts that wrap only if it is above 1"
        ),
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help=(
            "compare the first steps of each wrapped module with one device, and print the reports; a script's own "
            "unisono.DataParallel is compared too"
        ),
    )


def run(given: dict[str, Any]) -> int:
    """Run the script, and return its exit status; the closing line is printed when the program exits."""
    if not given["program"]:
        raise OptionError("expected a script, or -m module (unisono run --help has examples)")
    name, *arguments = given["program"]
    devices = choose_devices(given["devices"], among_several=_among_several()) if "devices" in given else None
    options = {name: given[name] for name in OF_WRAPPERS if name in given}
    counts_replicas = "count_replicas" in given
    if counts_replicas and devices is None:
        raise OptionError("--count-replicas needs --devices, such as --devices 'cpu*2'")
    if "verify" in given and _among_several():
        raise OptionError("--verify compares within one process: run it without the launcher")
    if devices is not None:
        expect_weights(options, len(devices))
    try:
        installed = install(devices, **options)
    except (TypeError, ValueError) as error:
        raise OptionError(error) from error

    comparison = FirstStepComparison(options) if "verify" in given else None
    wrapper.installed = dataclasses.replace(wrapper.installed or Settings(), comparison=comparison)
    replaced = contextlib.ExitStack()
    replaced.enter_context(installed)
    if comparison is not None:  # the script's own unisono.DataParallel, too
        replaced.enter_context(forwards_through(comparison.around))
    if devices and counts_replicas:
        replaced.enter_context(counted_as_gpus(len(devices)))
    advice = "" if counts_replicas or len(_devices.accelerators()) > 1 else _COUNT_REPLICAS
    ending = _Ending(installed, replaced, advice, comparison)
    atexit.register(ending)  # before the script's own, so it is called after them
    find = find_module if "is_module" in given else find_script
    try:
        status = run_program(partial(find, name), arguments, on_error=ending.advise_on)
    except ProgramError:
        atexit.unregister(ending)
        replaced.close()
        raise
    except SystemExit as end:
        if comparison is None or end.code not in (None, DONE):
            raise
        status = DONE
    with contextlib.suppress(AttributeError, ValueError):  # the script has put None there, or closed it
        sys.stdout.flush()
    return status or (DONE if comparison is None else comparison.exit_status())


class _Ending:
    """What is left for the program's exit: the closing line, and torch's names put back.

    Threads of the script may outlive its last line, and its exit handlers come later still. All of these may make
    wrappers, and what they do counts.
    """

    def __init__(
        self,
        installed: Installation,
        replaced: contextlib.ExitStack,
        advice: str,
        comparison: FirstStepComparison | None,
    ) -> None:
        self._installed, self._replaced, self._advice = installed, replaced, advice
        self._comparison = comparison
        self._process, self._stream = os.getpid(), sys.stderr

    def advise_on(self, error: BaseException) -> None:
        """Let the advice follow from what has ended the script, before or after it would have made a wrapper."""
        self._advice = _NEEDS_LAUNCHER if _lacks_launcher(error) else ""

    def __call__(self) -> None:
        report = self._installed.report()
        self._replaced.close()
        rank, world_size = 0, 1
        with contextlib.suppress(RuntimeError):
            if (process := launch()) is not None:
                rank, world_size = process.rank, process.world_size
        if report is None or os.getpid() != self._process or rank:
            return  # a child that the script has forked, and another rank, have no line of their own
        has_own = self._comparison is not None and self._comparison.has_tried()  # then it lacks no wrapper
        text = f"unisono run: {closing_line(report, world_size, '' if has_own else self._advice)}"
        if self._comparison is not None:
            text += f"; {self._comparison.conclusion()}"
        with contextlib.suppress(AttributeError, ValueError, OSError):
            sys.stdout.flush()  # the closing line comes after all that the script has printed
        with contextlib.suppress(ValueError, OSError):  # the script has closed it, or nothing reads it any more
            print(text, file=self._stream, flush=True)


def _lacks_launcher(error: BaseException) -> bool:
    """Return whether a script has failed for want of what a launcher sets, or of a process group."""
    with contextlib.suppress(RuntimeError):
        if launch() is not None:
            return False
    if isinstance(error, KeyError):
        return error.args[:1] in [(name,) for name in _SET_BY_LAUNCHERS]
    text, raised_in = text_of(error), [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    if not str(raised_in[-1:]).startswith("['torch.distributed."):  # the script's own words mean something else
        return False
    return any(words in text for words in ("rendezvous: environment variable", "process group has not been init"))


def _among_several() -> bool:
    try:
        return launch() is not None
    except RuntimeError as error:
        raise OptionError(error) from error


@contextmanager
def counted_as_gpus(count: int) -> Iterator[None]:
    """Let `device_count()` of torch.cuda and torch.accelerator be `count` for all but torch and unisono.

    Many scripts wrap their model only `if torch.cuda.device_count() > 1:`. To try these on the CPU, the count that a
    script reads can be that of the replicas. `torch.cuda.is_available()` stays true to the machine, and torch itself
    and unisono get the true count.
    """
    true_counts = [(module, module.device_count) for module in (torch.cuda, torch.accelerator)]
    for module, device_count in true_counts:
        module.device_count = _answering(device_count, count)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, device_count in true_counts:
            module.device_count = device_count  # type: ignore[attr-defined]


def _answering(device_count: Callable[[], int], count: int) -> Callable[[], int]:
    @wraps(device_count)
    def answer() -> int:
        asker = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        return device_count() if asker in ("torch", "unisono") else count

    return answer


def closing_line(report: ActivityReport, world_size: int = 1, advice: str = "") -> str:
    """Return one line of plain ASCII for people: that of rank 0; with advice, if the script has made no wrapper."""
    if not report.devices and not report.functions:
        return _NO_WRAPPER + advice
    parts = [f"rank 0 of {world_size}"] if world_size > 1 else []
    several = any(len(devices) > 1 for devices in report.devices)
    if report.devices:
        number = _counted(len(report.devices), "wrapper")
        wheres = [describe(devices) if devices else _PLAIN for devices in report.devices]
        parts.append(f"{number} on {' and '.join(dict.fromkeys(wheres))}")
    if report.functions:
        parts.append("calls of " + ", ".join(f"{name} {count:,}" for name, count in report.functions.items()))
    if report.forwards:
        rate = f", {report.rows / report.seconds:,.0f} rows/s" if report.seconds else ""
        parts.append(f"{_counted(report.rows, 'row')} in {_counted(report.forwards, 'forward')}{rate}")
        parts.append(_phases(report, several))
    elif report.devices:
        parts.append("no forward")
    return "; ".join(filter(None, parts))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _phases(report: ActivityReport, several: bool) -> str:
    """Return the share of each phase in the time since the first forward; of one device backward is not known."""
    rest_s = max(0.0, report.seconds - report.forward_s - report.backward_s)
    rest = "the rest of the script" if several else "backward and the rest of the script"
    seconds = {"forward": report.forward_s, "backward": report.backward_s, rest: rest_s}
    shares = {name: f"{of_phase / sum(seconds.values()):.0%}" for name, of_phase in seconds.items()}
    return ", ".join(f"{name} {share}" for name, share in shares.items() if share != "0%")
