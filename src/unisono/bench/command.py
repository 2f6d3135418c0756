"""The command `unisono bench`: from the words of the command line to tables, files and advice."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from unisono.bench import machine, report
from unisono.bench.contenders import CONTENDERS, Contender
from unisono.bench.results import Results
from unisono.bench.tasks import Task
from unisono.console import options, progress
from unisono.console.errors import DONE, FAILED, OptionError
from unisono.console.files import expect_writable, write
from unisono.console.options import TARGET, folder, number
from unisono.console.targets import module_of
from unisono.runtime.devices import accelerators

WORKLOADS = ("resnet", "mlp", "gpt", "tiny")
_MOST_REPLICAS = 256
_USUAL = {"rounds": 5, "seconds_per_turn": 2.0}
_QUICK = {"rounds": 3, "seconds_per_turn": 0.5}

SUMMARY = "compare the speed of unisono, DDP and the plain model on this machine"

DESCRIPTION = """\
Measure training steps on the cores of this machine: the plain module, torch's DDP, DataParallel in one process
(threads) and under a launcher (torchrun), and the limit: as many processes without communication. All take turns in
one run, so their times can be compared. If the machine is too busy for a clear result, no winner is named.

For each model the result names the fastest number of replicas. Your own model is package.module:build: a function
without arguments, found from the current folder, as for `unisono verify`. It returns (model, inputs), or a dict with
model, inputs, target, criterion, and options of DataParallel.
"""

EXAMPLES = """\
examples:
  unisono bench train:build                           your model
  unisono bench train:build --quick                   a first look
  unisono bench train:build --replicas 2,4,8 --seconds-per-turn 5
  unisono bench mlp tiny                              two built-in models
  unisono bench                                       all built-in models; seven minutes on two cores

built-in models:
  resnet   ResNet-18, 32 pictures of 28 x 28
  mlp      20 million parameters, little to compute
  gpt      a small transformer
  tiny     52 thin layers: only overhead

files in the output folder:
  results.md    the tables, with the machine's description
  results.png   the speeds as bars, if matplotlib is installed
  results.json  all figures

exit status:
  0    measured
  1    a contender failed
  2    nothing was measured: a wrong argument
  130  stopped by Ctrl-C: the turns so far are printed, nothing is saved
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    turn = f"approximate seconds of a turn (default: {_USUAL['seconds_per_turn']:g})"
    quick = f"{_QUICK['rounds']} of {_QUICK['seconds_per_turn']:g} s"
    counts = "numbers of replicas, such as 2 or 2,4,8 (default: 2, 4, 8 and so on, up to the cores and the rows)"
    models = f"{TARGET}, or a built-in model: {', '.join(WORKLOADS)} (default: all built-in models)"
    add("models", nargs="*", metavar="MODEL", help=models)
    add("--replicas", type=_counts, metavar="COUNTS", help=counts)
    add("--seconds-per-turn", type=number(float, 0.01, 60), metavar="S", help=turn)
    add("--quick", action="store_true", help=f"a first look: fewer and shorter turns, {quick}")
    add("--output", type=folder, metavar="DIR", help="the folder for the results (default: runs/bench)")


def needed(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the package that must be installed."""
    return ("psutil",)


def run(given: dict[str, Any]) -> int:
    """Measure, print and save; return the exit status."""
    if not hasattr(os, "killpg"):
        raise OptionError(
            f"bench needs process groups, which this system ({sys.platform}) does not have: use Linux or macOS"
        )
    names = given.get("models") or WORKLOADS
    for name in names:
        if ":" not in name and name not in WORKLOADS:
            own = f"{module_of(name)}:build" if name.endswith(".py") else TARGET
            raise OptionError(f"{name}: expected a built-in model ({', '.join(WORKLOADS)}), or {own} for your own")
    targets = {name: f"unisono.bench.workloads:{name}" if name in WORKLOADS else name for name in names}
    settings = dict(_QUICK if "quick" in given else _USUAL)
    settings["seconds_per_turn"] = given.get("seconds_per_turn", settings["seconds_per_turn"])
    rounds, seconds = int(settings["rounds"]), settings["seconds_per_turn"]
    output: Path = given.get("output", Path("runs/bench"))
    expect_writable(output)

    from unisono.bench import measure, programs  # they need psutil

    participants, expected_bytes = dict[str, list[Contender]](), 0
    for name, target in targets.items():
        task = Task.of_target(target)  # what it raises is raised before anything is started
        several = [Contender(c, count) for count in _counts_for(task, name, given) for c in CONTENDERS if c != "plain"]
        participants[name] = [Contender("plain", 1), *several]
        expected_bytes = max(expected_bytes, measure.expected_bytes(participants[name], task))
    expected_s = sum(measure.expected_s(contenders, rounds, seconds) for contenders in participants.values())
    num_programs = max(sum(each.num_programs for each in contenders) for contenders in participants.values())
    results = Results(machine.describe(), settings, programs.MEMORY_KIND, [])
    print(machine.in_one_line(results.machine), flush=True)
    print(
        f"this takes {progress.duration(expected_s)}, or longer if a step takes more than {seconds / 4:g} s; "
        f"{num_programs} processes at a time, with {expected_bytes / 2**30:.1f} GiB of memory or more; "
        f"results in {output}",
        flush=True,
    )
    if accelerators():
        print("this machine has accelerators; the benchmark runs on the CPU only", flush=True)
    try:
        with contextlib.closing(progress.for_stdout()) as shown:
            measuring = progress.Task(shown, "measuring", expected_s)
            for name, target in targets.items():
                measure.measure(name, target, participants[name], rounds, seconds, measuring, results.workloads)
    except KeyboardInterrupt:
        _print_turns(results)
        raise
    _conclude(results, output)
    return FAILED if any(line.failure for workload in results.workloads for line in workload.lines) else DONE


def _conclude(results: Results, output: Path) -> None:
    """Save the results, and print the tables."""
    why_no_picture = options.why_no_picture()
    files = {"results.json": (json.dumps(dataclasses.asdict(results), indent=1) + "\n").encode()}
    if not why_no_picture:
        from unisono.bench import chart

        files["results.png"] = chart.png(results)
    text = report.document(results, picture=not why_no_picture)
    files["results.md"] = text.encode()
    write(output, files)
    print(f"\n{text}")
    if why_no_picture:
        print(why_no_picture)


def _print_turns(results: Results) -> None:
    """Print the tables of a benchmark that is stopped."""
    for workload in results.workloads:
        if num_turns := sum(len(line.turns_s) for line in workload.lines):
            print(f"\n{workload.name}, the {num_turns} turns until it was stopped:\n")
            print("\n\n".join(report.speed_tables(workload, results.memory_kind)), flush=True)


def _counts_for(task: Task, name: str, given: dict[str, Any]) -> list[int]:
    """Return the numbers of replicas to measure a model with: those that are given, or those that its rows suffice for.

    Raises:
        OptionError: its batch has too few rows for a number that is given.
    """
    counts, usable = given.get("replicas", _up_to(machine.num_cores())), []
    for count in counts:
        try:
            task.sizes(count)
            usable.append(count)
        except ValueError as error:
            if "replicas" in given:
                raise OptionError(f"--replicas {count}: {name}: {error}") from error
    return usable or counts[:1]  # whose lines then say why there are no figures


def _up_to(cores: int) -> list[int]:
    """Return 2, 4, 8 and so on, and last the number of cores.

    >>> _up_to(6), _up_to(1)
    ([2, 4, 6], [2])
    """
    powers = [2**k for k in range(1, cores.bit_length()) if 2**k < cores]
    return [*powers, max(2, cores)]


def _counts(text: str) -> list[int]:
    return sorted(set(map(number(int, 2, _MOST_REPLICAS), text.split(","))))
