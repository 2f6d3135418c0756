"""The command `unisono bench`: from the words of the command line to tables, files and advice."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.bench.contenders import CONTENDERS, OURS, Contender, Task, is_installed
from unisono.console import progress
from unisono.console.errors import DONE, FAILED, OptionError
from unisono.console.files import expect_writable
from unisono.console.options import TARGET, folder
from unisono.runtime.devices import accelerators

if TYPE_CHECKING:
    from unisono.bench.results import Results

_MODELS = ("resnet", "mlp", "gpt", "tiny")
_ONE_DEVICE, _ADDED_REPLICAS = "one-device", "added-replicas"
WORKLOADS = (*_MODELS, _ONE_DEVICE, _ADDED_REPLICAS)
_ADDED = (1, 2, 4, 8, 16, 32)
_MOST_REPLICAS = 256

SUMMARY = "measure training steps on this machine, ours beside others'"

DESCRIPTION = """\
Measure training steps on the cores of this machine: the plain module, torch DDP, Accelerate and Lightning Fabric if
they are installed, DataParallel with threads and with processes, and the limit: as many processes without any
communication. All take turns in one run, so that figures can be compared. Run nothing else meanwhile.

With package.module:build it measures a model of yours, and says which engine and how many replicas are fastest
here. build is a function without arguments, found from the current folder, as for `unisono verify`: it returns
(model, inputs), or a dict with model, inputs, target, criterion, and options of DataParallel.
"""

EXAMPLES = """\
examples:
  unisono bench                                       everything; a quarter of an hour
  unisono bench --workloads mlp,tiny --rounds 3       a shorter look
  unisono bench --contenders plain,ddp,processes --replicas 2,4
  unisono bench train:build                           a model of yours, and advice
  unisono bench train:build --replicas 2,4,8 --seconds-per-turn 5

workloads:
  resnet          ResNet-18, 32 pictures of 28 x 28
  mlp             20 million parameters and little to compute
  gpt             a small transformer
  tiny            52 thin layers: nothing but overhead
  one-device      what the wrapper costs on one device
  added-replicas  tiny on 1, 2, 4, 8, 16 and 32 replicas

files in the output folder:
  results.md    the tables, with the machine's description; at the end the text of notes.md, if there is one
  results.png   the speeds as bars
  results.json  every figure

exit status:
  0  measured
  1  a contender failed, or its losses differ from the others (not for a model of yours)
  2  nothing was measured: the arguments cannot be used
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser; only what was given comes out of it."""
    parser.add_argument("target", nargs="?", metavar=TARGET, help="a model of yours (default: our own)")
    parser.add_argument(
        "--workloads", type=_names, metavar="NAMES", help=f"which of ours (default: {','.join(WORKLOADS)})"
    )
    parser.add_argument(
        "--contenders",
        type=_names,
        metavar="NAMES",
        help=f"some of {','.join(CONTENDERS)} (default: all that are installed)",
    )
    parser.add_argument(
        "--replicas",
        type=_counts,
        metavar="COUNTS",
        help="replicas, such as 2 or 2,4,8 (default: 2; for a model of yours 2, 4, 8 and so on, up to the cores)",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each contender (default: 5)")
    parser.add_argument("--seconds-per-turn", type=float, metavar="S", help="approximate length of a turn (default: 2)")
    parser.add_argument("--output", type=folder, metavar="DIR", help="the folder for the results (default: runs/bench)")


def needed(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the packages that must be installed, by the extra that has them."""
    return {"train": ("matplotlib", "psutil", "rich")}


def run(given: dict[str, Any]) -> int:
    """Measure, print and save; return the exit status.

    Raises:
        CommandError: nothing was measured.
    """
    target = given.get("target")
    if target is not None and "workloads" in given:
        raise OptionError(f"--workloads are of our own models: leave out --workloads, or {target}")
    names = _known(given.get("workloads", WORKLOADS), WORKLOADS, "--workloads")
    contenders = _known(given.get("contenders", [c for c in CONTENDERS if is_installed(c)]), CONTENDERS, "--contenders")
    if missing := [name for name in contenders if not is_installed(name)]:
        raise OptionError(f"--contenders {','.join(missing)}: not installed")
    rounds, seconds = given.get("rounds", 5), given.get("seconds_per_turn", 2.0)
    if rounds < 1:
        raise OptionError(f"--rounds {rounds}: expected a whole number from 1 up")
    if not 0 < seconds <= 60:
        raise OptionError(f"--seconds-per-turn {seconds:g}: expected a number above 0, up to 60")
    output: Path = given.get("output", Path("runs/bench"))
    if target is not None:
        Task.of_target(target)  # raises before anything is started

    from unisono.bench import machine, memory, one_device
    from unisono.bench.measure import measure
    from unisono.bench.results import Results

    expect_writable(output)
    output.mkdir(parents=True, exist_ok=True)
    counts = given.get("replicas", [2] if target is None else _up_to(machine.num_cores()))
    settings = {"rounds": rounds, "seconds_per_turn": seconds}
    results = Results(machine.describe(), settings, memory.kind(), [])
    print(f"{machine.in_one_line(results.machine)}; results in {output}", flush=True)
    if accelerators():
        print("this machine has accelerators; the benchmark runs on the CPU only", flush=True)
    shown = progress.for_stdout()
    try:
        participants = _contenders(contenders, counts)
        for name, where in [(target, target)] if target else [(n, _ours(n)) for n in names if n in _MODELS]:
            results.workloads.append(measure(name, where, participants, rounds, seconds, shown))
        if not target and _ONE_DEVICE in names:
            results.one_device_us = one_device.measure(shown)
        if not target and _ADDED_REPLICAS in names:
            participants = [Contender(engine, n) for n in _ADDED for engine in OURS if engine in contenders]
            results.added_replicas = measure("tiny", _ours("tiny"), participants, rounds, seconds, shown)
    finally:
        shown.close()
    _conclude(results, output, advised=target is not None)
    lines = [line for workload in (*results.workloads, results.added_replicas) if workload for line in workload.lines]
    wrong = any(line.failure or line.differs for line in lines)
    return FAILED if wrong and target is None else DONE


def _conclude(results: "Results", output: Path, advised: bool) -> None:
    """Save the results, with advice if `advised`, and print the tables."""
    from unisono.bench import chart, tables
    from unisono.bench.advice import advice

    (output / "results.json").write_text(results.to_json(), encoding="utf-8")
    notes = output / "notes.md"
    said = [line for w in results.workloads for line in advice(w, results.machine["cores"])] if advised else []
    text = tables.document(results, said, notes.read_text(encoding="utf-8") if notes.is_file() else "")
    (output / "results.md").write_text(text, encoding="utf-8")
    if results.workloads:
        chart.draw(output / "results.png", results)
    print(f"\n{text}")


def _ours(name: str) -> str:
    return f"unisono.bench.workloads:{name}"


def _contenders(names: Sequence[str], counts: Sequence[int]) -> list[Contender]:
    """Return the contenders: each with each number of replicas, and the plain module once."""
    several = [Contender(name, count) for count in counts for name in names if name != "plain"]
    return [Contender("plain", 1), *several] if "plain" in names else several


def _up_to(cores: int) -> list[int]:
    """Return 2, 4, 8 and so on, and last the number of cores.

    >>> _up_to(6), _up_to(1)
    ([2, 4, 6], [2])
    """
    powers = [2**k for k in range(1, cores.bit_length()) if 2**k < cores]
    return [*powers, max(2, cores)]


def _known(names: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    for name in names:
        if name not in known:
            raise OptionError(f"{option} {name}: expected some of {', '.join(known)}")
    return [name for name in known if name in names]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    counts = text.split(",")
    if not all(count.strip().isdecimal() and 2 <= int(count) <= _MOST_REPLICAS for count in counts):
        raise argparse.ArgumentTypeError(
            f"expected numbers from 2 to {_MOST_REPLICAS}, such as 2 or 2,4,8; got {text!r}"
        )
    return sorted({int(count) for count in counts})
