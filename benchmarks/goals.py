"""The project's goals for speed, and whether benchmarks/results.json meets each; writes benchmarks/goals.md.

    python benchmarks/goals.py

They are ratios within one run of `unisono bench`, for two replicas on two cores. A goal within the range of a ratio is
neither met nor missed.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from unisono.bench.results import Line, Workload
from unisono.console.tables import table

HERE = Path(__file__).resolve().parent
REPLICAS = CORES = 2
MODELS = ("resnet", "mlp", "gpt", "tiny")
OF_DDP = {
    "threads": {**dict.fromkeys(MODELS, 1.0), "tiny": 0.95},
    "torchrun": dict.fromkeys(MODELS, 0.97),
}


class Verdict(NamedTuple):
    """A goal, what was measured, and whether it is met."""

    goal: str
    measured: str
    word: str


def verdicts(workloads: list[Workload]) -> list[Verdict]:
    """Return the verdict on every goal, including those that were not measured."""
    return [
        verdict(workloads, contender, name, least)
        for contender, goals in OF_DDP.items()
        for name, least in goals.items()
    ]


def verdict(workloads: list[Workload], contender: str, name: str, least: float) -> Verdict:
    goal = f"{contender} on {name}: at least {least:.2f} of ddp's speed"
    workload = next((each for each in workloads if each.name == name and not each.disturbance), Workload(name, []))
    ours, ddp = workload.line(contender, REPLICAS), workload.line("ddp", REPLICAS)
    if ours is None or ddp is None:
        return Verdict(goal, "", "not measured")
    low, high = ours.speed_range_of(ddp)
    word = "met" if low >= least else "missed" if high < least else "lost in noise"
    return Verdict(goal, f"{ours.speed_of(ddp):.2f}", word)


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
