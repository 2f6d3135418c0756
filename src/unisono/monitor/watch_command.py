"""The command `unisono watch`: what runs now, again and again, on a terminal, as lines, or as JSON."""

import argparse
import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.console.errors import DONE, Interrupted, OptionError
from unisono.console.progress import is_terminal
from unisono.monitor.nvml import GpuReader
from unisono.monitor.report import width_of_terminal

_EVERY_S = 1.0
_LEAST_S, _MOST_S = 0.1, 3600.0

SUMMARY = "show what runs now: GPUs, cores, and each replica's share, times and waits"

DESCRIPTION = """\
Show, once a second, the load, memory, temperature and power of each NVIDIA GPU, the load of the cores, and for every
running DataParallel of this user each replica's share of the rows, its times, and how long it waits for the others. The
replica that the others wait for is marked, with the cause where the figures tell it. Ctrl-C ends it.

On a terminal the table stays in place. Elsewhere each sample is a paragraph; with --json it is a line of JSON.
"""

EXAMPLES = """\
examples:
  unisono watch
  unisono watch --once                     one sample, which takes a second
  unisono watch --log watch.jsonl          write every sample to a file, too
  unisono watch --json --once | jq '.wrappers[].straggler'
  unisono watch --every 10 > watch.txt

A wrapper publishes its last step once a second, in a file that only its user can read, in $XDG_RUNTIME_DIR/unisono
or unisono-UID in the folder for temporary files. UNISONO_PUBLISH=0 in its environment switches that off.

exit status:
  0  shown; also after Ctrl-C
  1  what read the output has ended, or the log cannot be written any more
  2  nothing was shown: the arguments cannot be used
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser; only what was given comes out of it."""
    parser.add_argument("--once", action="store_true", help="show one sample and end")
    parser.add_argument("--log", type=_file, metavar="FILE", help="append each sample to a file, as a line of JSON")
    parser.add_argument("--json", action="store_true", help="print each sample as a line of JSON")
    parser.add_argument("--every", type=_seconds, metavar="S", help=f"seconds between samples (default: {_EVERY_S:g})")


def needed(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the packages that must be installed, by the extra that has them."""
    return {"watch": ("psutil", "rich")}


def run(given: dict[str, Any]) -> int:
    """Take samples and show them; return the exit status.

    Raises:
        OptionError: the log cannot be written.
    """
    from unisono.monitor.sample import Sample, Sampler  # imports psutil, which `needed` has checked

    once, as_json = given.get("once", False), given.get("json", False)
    every_s: float = given.get("every", _EVERY_S)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_log(given["log"])) if "log" in given else None
        stack.enter_context(_ending_on_signals())
        sampler = Sampler(GpuReader())
        in_place = not once and not as_json and is_terminal(sys.stdout)
        show: Callable[[Sample], None] = (
            stack.enter_context(_live()) if in_place else _print_json if as_json else _print
        )
        try:
            while True:
                time.sleep(every_s)
                sample = sampler.take()
                if log is not None:
                    log(json.dumps(asdict(sample)))
                show(sample)
                if once:
                    return DONE
        except KeyboardInterrupt:  # the usual way to end it
            return DONE


def _print_json(sample: Any) -> None:
    print(json.dumps(asdict(sample)), flush=True)


def _print(sample: Any) -> None:
    from unisono.monitor.display import styled_lines

    print("\n".join(line for line, _ in styled_lines(sample, width_of_terminal())), end="\n\n", flush=True)


@contextlib.contextmanager
def _live() -> Iterator[Callable[[Any], None]]:
    """Yield what shows a sample in the place of the one before; the terminal is as it was afterwards."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from unisono.monitor.display import fitted, styled_lines

    console = Console()
    with Live(Text("one moment ..."), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()

        def show(sample: Any) -> None:
            text = Text(no_wrap=True, overflow="crop")
            for line, style in fitted(styled_lines(sample, console.width), console.height):
                text.append(f"{line}\n", style=style or None)
            live.update(text, refresh=True)

        yield show


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave the terminal as it was."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number))

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _log(path: Path) -> Iterator[Callable[[str], None]]:
    """Yield what appends a line to a file.

    Raises:
        OptionError: the file cannot be opened.
        OSError: it cannot be written any more.
    """
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--log {path}: cannot be written ({error.strerror}); name another file") from error

    def write(line: str) -> None:
        try:
            file.write(f"{line}\n")
            file.flush()
        except OSError as error:
            raise OSError(f"--log {path}: cannot be written any more ({error.strerror})") from error

    try:
        yield write
    finally:
        with contextlib.suppress(OSError):  # what is left of a line that could not be written
            file.close()


def _file(name: str) -> Path:
    if not name:
        raise argparse.ArgumentTypeError("expected the name of a file, got ''")
    return Path(name)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not _LEAST_S <= value <= _MOST_S:
        raise argparse.ArgumentTypeError(f"expected seconds from {_LEAST_S:g} to {_MOST_S:g}; got {text!r}")
    return value
