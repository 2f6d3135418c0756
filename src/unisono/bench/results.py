"""The measurements as values, for tables, chart, advice and results.json.

Contenders take turns, and their lower quartiles are compared. Other programs make steps slower, never faster. So the
figure of a contender is the lower quartile of its times, and its range reaches from the fastest one to the upper
quartile. Noise may be why two differ whose ranges overlap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from unisono.primitives.measured_shares import lower_quartile

_T = TypeVar("_T")

NOISE = 0.03  # a smaller gain is not worth a more complex setup


def upper_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of the others are above.

    >>> upper_quartile([5.0, 1.0, 2.0, 4.0, 3.0])
    4.0
    """
    return sorted(values)[math.ceil(3 * (len(values) - 1) / 4)]


def in_turn(contenders: Sequence[_T], rounds: int) -> Iterator[_T]:
    """Yield each contender once a round: there and back again, so that none always follows the same one.

    >>> list(in_turn("abc", 2))
    ['a', 'b', 'c', 'c', 'b', 'a']
    """
    for number in range(rounds):
        yield from contenders if number % 2 == 0 else reversed(contenders)


@dataclass
class Line:
    """The measurements of one contender on one workload."""

    contender: str
    replicas: int
    turns_s: list[float] = field(default_factory=list)  # seconds a step: the lower quartile of each turn's steps
    memory_bytes: int | None = None  # the peak of all its processes together
    failure: str = ""  # why it was not measured; "" if it was

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return lower_quartile(self.turns_s)

    @property
    def range_s(self) -> tuple[float, float]:
        """The fastest turn, and the upper quartile."""
        return min(self.turns_s), upper_quartile(self.turns_s)

    def speed_of(self, other: "Line") -> float:
        """Return how fast this is, relative to another line."""
        return other.step_s / self.step_s

    def speed_range_of(self, other: "Line") -> tuple[float, float]:
        """Return the least and the most that `speed_of` can be within both ranges."""
        (low, high), (others_low, others_high) = self.range_s, other.range_s
        return others_low / high, others_high / low

    def is_lost_in_noise(self, other: "Line") -> bool:
        """Return whether noise may be why this is faster or slower: ranges overlap, by more than would not matter."""
        low, high = self.speed_range_of(other)
        return low < 1 < high and high / low > (1 + NOISE) ** 2


@dataclass
class Workload:
    """One model and batch, and the measurements of every contender."""

    name: str
    lines: list[Line]
    rows: int = 0  # of the batch
    num_parameters: int = 0
    normalises_shards: bool = False  # whether batch norm sees the rows of one replica only
    disturbance: str = ""  # in words, the other programs that kept cores busy meanwhile; "" if there were none

    def line(self, contender: str, replicas: int = 1) -> Line | None:
        """Return the line of a contender, if it was measured; `plain` has one for all numbers of replicas."""
        for line in self.measured():
            if line.contender == contender and (contender == "plain" or line.replicas == replicas):
                return line
        return None

    def measured(self) -> Iterator[Line]:
        """Yield the lines that have figures."""
        return (line for line in self.lines if line.turns_s)

    def replica_counts(self) -> list[int]:
        """Return the numbers of replicas of all lines."""
        return sorted({line.replicas for line in self.lines if line.contender != "plain"}) or [1]


@dataclass
class Results:
    """One run of the benchmark."""

    machine: dict[str, Any]  # its description
    settings: dict[str, Any]  # rounds and seconds of a turn
    memory_kind: str  # PSS or RSS
    workloads: list[Workload]
