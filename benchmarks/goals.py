"""The project's goals for speed and memory, and whether benchmarks/results.json meets each; writes benchmarks/goals.md.

    python benchmarks/goals.py

They are ratios within one run of `unisono bench`, for two replicas on two cores. A goal within the range of a ratio is
neither met nor missed.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

from unisono.bench.results import Line, Workload
from unisono.console.tables import table

HERE = Path(__file__).resolve().parent
REPLICAS = CORES = 2
MODELS = ("resnet", "mlp", "gpt", "tiny")
OF_LIMIT = {"resnet": 0.95, "gpt": 0.95, "mlp": 0.85, "tiny": 0.7}
OF_DDP = {
    "processes": dict.fromkeys(MODELS, 1.0),
    "threads": {**dict.fromkeys(MODELS, 1.0), "tiny": 0.95},
    "torchrun": dict.fromkeys(MODELS, 0.97),
}
MEAN, MEMORY = 1.25, 0.75


class Verdict(NamedTuple):
    """A goal, what was measured, and whether it is met."""

    goal: str
    measured: str
    word: str


def verdicts(workloads: list[Workload]) -> list[Verdict]:
    """Return the verdict on every goal, including those that were not measured."""
    found = [speed(workloads, "processes", "limit", name, least) for name, least in OF_LIMIT.items()]
    for contender, goals in OF_DDP.items():
        found += [speed(workloads, contender, "ddp", name, least) for name, least in goals.items()]
    pairs = [lines(workloads, "processes", "ddp", name) for name in MODELS]
    ratios = [ours.speed_of(ddp) for ours, ddp in pairs if ours and ddp]
    mean = math.prod(ratios) ** (1 / 4) if len(ratios) == len(MODELS) else None
    found.append(verdict(f"processes, geometric mean of the four: at least {MEAN} of ddp's speed", mean, MEAN))
    ours, ddp = lines(workloads, "processes", "ddp", "mlp")
    less = None
    if ours and ddp and ours.memory_bytes and ddp.memory_bytes:
        less = -ours.memory_bytes / ddp.memory_bytes
    found.append(verdict(f"processes on mlp: memory at most {MEMORY} of ddp's", less, -MEMORY))
    return found


def speed(workloads: list[Workload], contender: str, reference: str, name: str, least: float) -> Verdict:
    ours, other = lines(workloads, contender, reference, name)
    goal = f"{contender} on {name}: at least {least:.2f} of {reference}'s speed"
    if ours is None or other is None:
        return verdict(goal, None, least)
    return verdict(goal, ours.speed_of(other), least, ours.speed_range_of(other))


def lines(workloads: list[Workload], contender: str, reference: str, name: str) -> tuple[Line | None, Line | None]:
    workload = next((each for each in workloads if each.name == name and not each.disturbance), Workload(name, []))
    return workload.line(contender, REPLICAS), workload.line(reference, REPLICAS)


def verdict(goal: str, value: float | None, least: float, within: tuple[float, float] | None = None) -> Verdict:
    """Return whether a value, which may be anywhere `within`, is at least so much."""
    if value is None:
        return Verdict(goal, "", "not measured")
    low, high = within or (value, value)
    return Verdict(goal, f"{abs(value):.2f}", "met" if low >= least else "missed" if high < least else "lost in noise")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    workloads = [
        Workload(**each | {"lines": [Line(**line) for line in each["lines"]]}) for each in results["workloads"]
    ]
    text = table(["goal", "measured", ""], verdicts(workloads), text_columns=1)
    if results["machine"]["cores"] != CORES:
        text += f"\n\n(The goals are for {CORES} cores; this machine has {results['machine']['cores']}.)"
    page = f"# Goals\n\nOf the run that [results.md](results.md) shows.\n\n{text}\n"
    (HERE / "goals.md").write_text(page, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
