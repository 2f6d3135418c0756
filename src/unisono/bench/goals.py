"""The project's goals for speed and memory, and whether a run meets each.

They are ratios within one run, for two replicas on two cores.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unisono.bench.results import Results, Workload

REPLICAS = 2
CORES = 2
_WORKLOADS = ("resnet", "mlp", "gpt", "tiny")


@dataclass(frozen=True)
class Verdict:
    """A goal, and the measurement."""

    goal: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        """Met or missed."""
        return "not measured" if self.met is None else "met" if self.met else "missed"


def verdicts(results: Results) -> list[Verdict]:
    """Return the verdict on every goal, including those that were not measured."""
    return [
        *_at_least(
            "processes", "limit", "of the limit's speed", {"resnet": 0.95, "gpt": 0.95, "mlp": 0.85, "tiny": 0.7}
        )(results),
        *_at_least("processes", "ddp", "of DDP's speed", dict.fromkeys(_WORKLOADS, 1.0))(results),
        _geometric_mean(results),
        *_at_least("threads", "ddp", "of DDP's speed", {**dict.fromkeys(_WORKLOADS, 1.0), "tiny": 0.95})(results),
        *_at_least("torchrun", "ddp", "of DDP's speed", dict.fromkeys(_WORKLOADS, 0.97))(results),
        _memory(results),
        _one_device(results),
    ]


def _at_least(
    contender: str, reference: str, of_what: str, goals: dict[str, float]
) -> Callable[[Results], Iterator[Verdict]]:
    def judge(results: Results) -> Iterator[Verdict]:
        for name, least in goals.items():
            goal = f"{contender} on {name}: at least {least:.2f} {of_what}"
            ratio = _ratio(results, name, contender, reference)
            yield _verdict(goal, ratio, None if ratio is None else ratio >= least)

    return judge


def _ratio(results: Results, workload: str, contender: str, reference: str) -> float | None:
    found = _workload(results, workload)
    line, other = (found and found.line(name, REPLICAS) for name in (contender, reference))
    return line.speed_of(other) if line and other else None


def _geometric_mean(results: Results) -> Verdict:
    ratios = [_ratio(results, name, "processes", "ddp") for name in _WORKLOADS]
    known = [ratio for ratio in ratios if ratio is not None]
    mean = math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(ratios) else None
    goal = "processes, geometric mean of the four: at least 1.25 of DDP's speed"
    return _verdict(goal, mean, None if mean is None else mean >= 1.25)


def _memory(results: Results) -> Verdict:
    mlp = _workload(results, "mlp")
    ours, theirs = (mlp and mlp.line(name, REPLICAS) for name in ("processes", "ddp"))
    ratio = (
        ours.memory_bytes / theirs.memory_bytes
        if ours and theirs and ours.memory_bytes and theirs.memory_bytes
        else None
    )
    goal = "processes on mlp: memory at most 0.75 of DDP's"
    return _verdict(goal, ratio, None if ratio is None else ratio <= 0.75)


def _one_device(results: Results) -> Verdict:
    goal = "the wrapper on one device: at most 20 µs a forward"
    if not results.one_device_us:
        return Verdict(goal, "", None)
    most = max(results.one_device_us.values())
    return Verdict(goal, f"{most:.1f} µs", most <= 20)


def _workload(results: Results, name: str) -> Workload | None:
    return next((workload for workload in results.workloads if workload.name == name), None)


def _verdict(goal: str, ratio: float | None, met: bool | None) -> Verdict:
    return Verdict(goal, "" if ratio is None else f"{ratio:.2f}", met)
