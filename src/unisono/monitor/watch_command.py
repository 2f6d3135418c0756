"""The command `unisono watch`: what runs now, again and again, on a terminal, as lines, or as JSON."""

import argparse
import contextlib
import json
import signal
import time
from dataclasses import asdict
from typing import Any

from unisono.console.errors import DONE
from unisono.console.options import number
from unisono.monitor.nvml import GpuReader

_EVERY_S = 1.0
_ANY_WIDTH = 1000  # columns, where the output is no terminal

SUMMARY = "show the load and memory of GPUs and cores, and the processes that use them, live"

DESCRIPTION = """\
Show, once a second, the load, memory, temperature and power of each NVIDIA GPU, the load of the cores, and the
processes of all users that compute on a GPU or use a tenth of a core. Ctrl-C ends it.

In a terminal the table is updated in place. Elsewhere each sample is a paragraph; with --json it is a line of JSON.
"""

EXAMPLES = """\
examples:
  unisono watch
  unisono watch --once                     one sample, which takes a second
  unisono watch --once --json | jq '.gpus[] | {number, load}'
  unisono watch --json --every 10 | tee -a watch.jsonl

exit status:
  0  shown; also after Ctrl-C
  1  the output can no longer be written
  2  a wrong argument
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="show one sample and end")
    parser.add_argument("--json", action="store_true", help="print each sample as a line of JSON")
    every = f"seconds between samples (default: {_EVERY_S:g})"
    parser.add_argument("--every", type=number(float, 0.1, 3600), metavar="S", help=every)


def needed(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages that must be installed."""
    return "psutil", "rich"


def run(given: dict[str, Any]) -> int:
    """Take samples and show them; return the exit status."""
    from rich.console import Console
    from rich.live import Live

    from unisono.monitor.display import shown
    from unisono.monitor.sample import Sampler

    once, as_json = given.get("once", False), given.get("json", False)
    console = Console()
    in_place = not once and not as_json and console.is_terminal and not console.is_dumb_terminal
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    live = Live("one moment ...", console=console, screen=True, auto_refresh=False)
    if in_place:
        for name in ("SIGTERM", "SIGHUP"):  # they leave the terminal as it was, as Ctrl-C does
            if hasattr(signal, name):  # Windows has no SIGHUP
                signal.signal(getattr(signal, name), signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), live if in_place else contextlib.nullcontext():  # the usual end
        sampler = Sampler(GpuReader())
        while True:
            time.sleep(given.get("every", _EVERY_S))
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
                break
    return DONE
