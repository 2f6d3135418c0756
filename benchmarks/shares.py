"""How fast shares="measured" is: against the plain module and fixed shares, and where one replica is four times slower.

    python benchmarks/shares.py                                              # all workloads
    python benchmarks/shares.py --workloads tiny,mlp --rounds 9              # some of them, more turns
    python benchmarks/shares.py --workloads ""                               # only the slow replica

The four models of `unisono bench`. The contenders take turns as there. The warm-up is long enough for the shares to be
frozen. The goal: at least 0.97 of the faster of the plain module and equal shares, which are the
best fixed ones for equal replicas.

Then two replicas, of which one sleeps four times as long for each row as the other: first the best of all fixed splits,
then the steps of shares="measured" from the first one on. The goal: from step 31 on, at most 1.15 of the best.
"""

import argparse
import threading
import time
from typing import Literal

import torch
from torch import nn

import unisono
from unisono.bench.command import WORKLOADS
from unisono.bench.contenders import MEASURED, Contender
from unisono.bench.measure import expected_s, measure
from unisono.console import progress
from unisono.primitives.measured_shares import lower_quartile

GOAL, GOAL_SLOWED = 0.97, 1.15
ROWS, ROW_S, FACTOR = 32, 0.004, 4
STEPS_BEFORE, STEPS_COUNTED = 30, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of the models; '' for none")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--seconds-per-turn", type=float, default=2.0, help="length of a turn (default: %(default)s)")
    options = parser.parse_args()
    names = list(filter(None, options.workloads.split(",")))
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"--workloads: {', '.join(unknown)}: expected some of {', '.join(WORKLOADS)}")
    for name in names:
        compare(name, options.rounds, options.seconds_per_turn)
    slowed()


def compare(name: str, rounds: int, seconds: float) -> None:
    """Print how fast measured shares are on one workload."""
    contenders = [Contender("plain", 1), Contender("threads", 2), Contender(MEASURED, 2)]
    shown = progress.for_stdout()
    try:
        task = progress.Task(shown, name, expected_s(contenders, rounds, seconds))
        found = measure(name, f"unisono.bench.workloads:{name}", contenders, rounds, seconds, task)
    finally:
        shown.close()
    plain, ours, fixed = found.line("plain"), found.line(MEASURED, 2), found.line("threads", 2)
    if ours is None or fixed is None or plain is None:
        print(f"{name}: not measured")
        return
    low, high = ours.speed_range_of(min(plain, fixed, key=lambda line: line.step_s))
    verdict = "met" if low >= GOAL else "missed" if high < GOAL else "no verdict: lost in noise"
    print(
        f"{name}: {ours.speed_of(plain):.2f} of the plain module's speed, {ours.speed_of(fixed):.2f} of equal shares', "
        f"{low:.2f} to {high:.2f} of the faster one's (goal {GOAL}: {found.disturbance or verdict})"
    )


class Sleeper(nn.Module):
    """Sleeps some time for each row; in replica 1, which has a thread of its own, four times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = threading.current_thread() is threading.main_thread()
        time.sleep(len(x) * ROW_S * (1 if is_first else FACTOR))
        output: torch.Tensor = self.layer(x)
        return output


def slowed() -> None:
    """Print how fast measured shares are where one replica is slow."""
    fixed = {first: lower_quartile(steps_s([first, ROWS - first], 5)[2:]) for first in (16, 24, 25, 26, 32)}
    first, best = min(fixed.items(), key=lambda item: item[1])
    steps = steps_s("measured", STEPS_BEFORE + STEPS_COUNTED)
    measured = lower_quartile(steps[STEPS_BEFORE:])
    print(
        f"one of two replicas four times slower: {measured / best:.2f} of the best fixed split's step ([{first}, "
        f"{ROWS - first}], {1000 * best:.1f} ms) after {STEPS_BEFORE} steps; equal shares {fixed[16] / best:.2f} "
        f"(goal {GOAL_SLOWED}: {'met' if measured <= GOAL_SLOWED * best else 'missed'})"
    )


def steps_s(shares: Literal["measured"] | list[int], number: int) -> list[float]:
    """Return how long each of the first steps of a new wrapper takes."""
    model = unisono.DataParallel(Sleeper(), ["cpu"] * 2, shares=shares)
    x, seconds = torch.randn(ROWS, 8), []
    for _ in range(number):
        started = time.perf_counter()
        model(x).sum().backward()
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
