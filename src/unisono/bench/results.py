"""The measurements as values, for tables, chart, advice and results.json."""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Line:
    """The measurements of one contender on one workload.

    Attributes:
        contender, replicas: which one.
        turns_s: seconds a step, one figure a turn; empty if it failed.
        memory_bytes: the peak of all its processes together.
        losses: of its first steps, over the whole batch.
        failure: why it was not measured; "" if it was.
        differs: how its losses differ from the others'; "" if they do not.
    """

    contender: str
    replicas: int
    turns_s: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    failure: str = ""
    differs: str = ""

    @property
    def step_s(self) -> float:
        """The median seconds a step."""
        return statistics.median(self.turns_s)

    @property
    def spread(self) -> float:
        """The interquartile range of the turns' times, relative to the median."""
        if len(self.turns_s) < 3:
            return (max(self.turns_s) - min(self.turns_s)) / self.step_s
        lower, _, upper = statistics.quantiles(self.turns_s, n=4, method="inclusive")
        return (upper - lower) / self.step_s

    def speed_of(self, other: "Line") -> float:
        """Return how fast this is, relative to another line: the median over rounds, in which both took turns."""
        return statistics.median(theirs / own for own, theirs in zip(self.turns_s, other.turns_s, strict=True))


@dataclass
class Workload:
    """One model and batch, and the measurements of every contender.

    Attributes:
        rows, num_parameters: of the batch, and of the model.
        normalises_shards: whether batch norm sees the rows of one replica only.
    """

    name: str
    lines: list[Line]
    rows: int = 0
    num_parameters: int = 0
    normalises_shards: bool = False

    def line(self, contender: str, replicas: int = 1) -> Line | None:
        """Return the line of a contender, if it was measured; `plain` has one for all numbers of replicas."""
        for line in self.lines:
            if line.contender == contender and (contender == "plain" or line.replicas == replicas) and line.turns_s:
                return line
        return None

    def measured(self) -> Iterator[Line]:
        """Yield the lines that have figures."""
        return (line for line in self.lines if line.turns_s)

    def replica_counts(self) -> list[int]:
        """Return the numbers of replicas of all lines."""
        return sorted({line.replicas for line in self.lines if line.contender != "plain"})


@dataclass
class Results:
    """One run of the benchmark.

    Attributes:
        machine: its description.
        settings: rounds and seconds of a turn.
        memory_kind: PSS or RSS.
        added_replicas: the workload of the table of costs per added replica.
        one_device_us: microseconds that the wrapper adds to a forward on one device, by model.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    memory_kind: str
    workloads: list[Workload]
    added_replicas: Workload | None = None
    one_device_us: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def mean_over_rows(losses: Sequence[Sequence[float]], rows: Sequence[int]) -> list[float]:
    """Return the losses of the whole batch, step by step, from those of each program over its own rows."""
    total = sum(rows) or 1
    weights = [count / total for count in rows] if sum(rows) else [1.0 / len(losses)] * len(losses)
    return [sum(w * loss for w, loss in zip(weights, at, strict=True)) for at in zip(*losses, strict=True)]
