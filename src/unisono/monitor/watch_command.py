"""The command `unisono watch`: what runs now, again and again, on a terminal, as lines, or as JSON."""

import argparse
import contextlib
import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from unisono.console.errors import DONE, OptionError
from unisono.console.options import number
from unisono.monitor.nvml import GpuReader

_EVERY_S = 1.0
_ANY_WIDTH = 1000  # columns, where the output is no terminal

SUMMARY = "show what runs now: GPUs, cores, and each replica's share, times and waits"

DESCRIPTION = """\
Show, once a second, the load, memory, temperature and power of each NVIDIA GPU, the load of the cores, and for every
running DataParallel of this user each replica's share of the rows, its times, and how long it waits for the others. The
replica that the others wait for is marked, with the cause where the figures tell it. Ctrl-C ends it.

A training that takes no steps is only named, on one line at the end, and so is one that was killed. With --pid the
command ends with the process.

On a terminal the table stays in place. Elsewhere each sample is a paragraph; with --json it is a line of JSON.
"""

EXAMPLES = """\
examples:
  unisono watch
  unisono watch --once                     one sample, which takes a second
  unisono watch --pid 4711                 only the training in this process
  unisono watch --json --once | jq '.wrappers[].straggler'
  unisono watch --json --every 10 | tee -a watch.jsonl

A wrapper publishes its last step once a second, in a file that only its user can read, in $XDG_RUNTIME_DIR/unisono
or unisono-UID in the folder for temporary files. UNISONO_PUBLISH=0 in its environment switches that off.

exit status:
  0  shown; also after Ctrl-C, and when the process of --pid has ended
  1  the output cannot be written any more
  2  nothing was shown: the arguments cannot be used
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser; only what was given comes out of it."""
    parser.add_argument("--once", action="store_true", help="show one sample and end")
    parser.add_argument("--pid", metavar="N", help="show only the training in this process")
    parser.add_argument("--json", action="store_true", help="print each sample as a line of JSON")
    every = f"seconds between samples (default: {_EVERY_S:g})"
    parser.add_argument("--every", type=number(float, 0.1, 3600), metavar="S", help=every)


def needed(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the packages that must be installed, by the extra that has them."""
    return {"watch": ("psutil", "rich")}


def run(given: dict[str, Any]) -> int:
    """Take samples and show them; return the exit status."""
    from rich.console import Console
    from rich.live import Live

    from unisono.bench.processes import is_running  # imports psutil, which `needed` has checked
    from unisono.monitor.display import shown
    from unisono.monitor.sample import Sampler

    pid = int(given["pid"]) if given.get("pid", "").isdecimal() else None
    if "pid" in given and (pid is None or not is_running(pid)):
        raise OptionError(
            f"--pid {given['pid']}: there is no such process; expected the number of one that trains, as `unisono "
            "watch` shows it"
        )
    once, as_json = given.get("once", False), given.get("json", False)
    console = Console()
    in_place = not once and not as_json and console.is_terminal and not console.is_dumb_terminal
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    live = Live("one moment ...", console=console, screen=True, auto_refresh=False)
    if in_place:
        for name in ("SIGTERM", "SIGHUP"):  # they leave the terminal as it was, as Ctrl-C does
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        with live if in_place else contextlib.nullcontext():
            sampler = Sampler(GpuReader(), pid)
            while True:
                time.sleep(given.get("every", _EVERY_S))
                has_ended = pid is not None and not is_running(pid)  # asked first, so that the sample knows why
                sample = sampler.take()
                if in_place:
                    live.update(shown(sample), refresh=True)
                elif as_json:
                    print(json.dumps(asdict(sample)), flush=True)
                else:
                    with console.capture() as text:
                        console.print(shown(sample))
                    print(*map(str.rstrip, text.get().splitlines()), sep="\n", end="\n\n", flush=True)
                if once:
                    return DONE
                if has_ended:
                    break
    except KeyboardInterrupt:  # the usual way to end it
        return DONE
    print(*sample.notes, f"process {pid} has ended", sep="\n", file=sys.stderr, flush=True)
    return DONE
