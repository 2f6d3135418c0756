"""Which shares are fastest: `shares="measured"`, as a state machine that is fed with the times of steps.

    1. The candidates are equal shares for all devices, for the first half of them, and so on down to the first alone.
       They take turns.
    2. After each round, the rows that each replica has computed in a second propose one more candidate: shares in
       proportion. Candidates that are slower are dropped.
    3. The one whose whole steps take the shortest is chosen, and frozen. Among equals it is the one with the fewest
       devices.
    4. From then on one step in `PERIOD` is timed. If times or numbers of rows have left what was measured for long, it
       begins anew.

The speeds of replicas leave out what a replica costs the others: sums of gradients, the caller's thread, cores and
memory that they share. So they only propose, and the times of whole steps decide.

Other programs make steps slower, never faster. So candidates are compared by the lower quartiles of their steps. A
candidate that is slower is dropped, unless noise may be why: where its fastest step is faster than the slowest one of
the best candidate, both get further turns.

This file knows no clock and no module. Times may be in any unit, and are compared by row, so that batches may differ a
little in size; batches of quite another size are not counted.
"""

import math
import threading
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from unisono.primitives.split_sizes import split_rows
from unisono.runtime.errors import log
from unisono.runtime.interrupts import critical

Weights: TypeAlias = tuple[int, ...]

PERIOD = 17  # of the timed steps after the freeze; a prime, so that with two kinds of batches in turn both are seen
_NUM_TIMED = 2  # steps of each turn, after one that is not counted: it has other shapes than the one before
_MOST_ROUNDS = 8  # of candidates that are about equal, or that noise hides
_DROPPED = (2.2, 1.2, 1.1)  # after turn 1, 2, 3 and later: candidates that are slower by this factor
_EQUAL = 1.02  # candidates within this factor are equal, and the one with the fewest devices is chosen
_WORTH_A_TRIAL = 1.02  # what other shares must gain, by the replicas' speeds, to become one more candidate
_LARGEST_TOTAL = 64  # of weights that are not the numbers of rows themselves
_SIMILAR_ROWS = 1.25  # batches whose rows differ by no more than this factor are compared
_DEPARTED = 1.3  # a step's time has left what was measured if it differs by more than this factor
_PATIENCE = 8  # timed steps in a row that have left it before it is measured again; doubled each time


class StepTime(NamedTuple):
    """One step that was timed."""

    weights: Weights  # the shares that it had
    sizes: Sequence[int]  # the rows of each replica, 0 for those that had none
    replica_s: Sequence[float]  # how long each replica took; empty where that is not known
    seconds: float  # how long the whole step took
    most_rows: Sequence[float]  # how many rows fit in each replica's memory


def join_single_rows(sizes: Sequence[int]) -> list[int]:
    """Return sizes without a 1, if two rows for each replica are there: batch norm in training needs two.

    >>> join_single_rows([6, 1]), join_single_rows([1, 1])
    ([7, 0], [1, 1])

    The row goes to the replica with the most.
    """
    if sum(sizes) < 2 * len(sizes):
        return [*sizes]
    joined = [0 if size == 1 else size for size in sizes]
    joined[joined.index(max(joined))] += sum(sizes) - sum(joined)
    return joined


class MeasuredShares:
    """The shares of one kind of call; see the module's docstring.

    Args:
        devices: their names in messages, as `device_ids` has them.
        kind: of the calls, in messages.
    """

    weights: Weights  # those of the next step
    on_first_device: bool  # whether these are the first device's alone
    is_frozen: bool  # whether they are chosen
    skip: int  # how many steps follow that are not timed, minus 1
    _rows: int  # of the batches that are measured; 0 before the first
    _strikes: int  # timed steps in a row that are not like those

    def __init__(self, devices: Sequence[str | int], kind: str) -> None:
        self._devices, self._kind = list(devices), kind
        self._patience = _PATIENCE
        self._lock = threading.Lock()
        self._begin()

    def should_time_next(self) -> bool:
        """Return whether the next step is to be timed and recorded; to be asked once a step."""
        self.skip -= 1
        return self.skip < 0

    def sizes(self, rows: int) -> list[int]:
        """Return the rows of each replica with the weights as they are."""
        return self._split(rows, self.weights)

    @critical
    def record(self, step: StepTime) -> None:
        """Take note of a step that was timed; `weights` may be others afterwards."""
        rows = sum(step.sizes)
        with self._lock:
            if rows == 0 or step.weights != self.weights:  # the latter: calls from several threads
                return
            self._rows = self._rows or rows
            is_similar = self._rows / _SIMILAR_ROWS <= rows <= self._rows * _SIMILAR_ROWS
            has_left = not is_similar or (self.is_frozen and self._has_other_time(rows, step.seconds))
            self._strikes = self._strikes + 1 if has_left else 0
            self.skip = PERIOD - 1 if self.is_frozen else 0
            if self._strikes >= self._patience:
                self._begin_anew(rows, step.seconds)
            elif is_similar and not self.is_frozen:
                try:
                    self._use(self._measurement.send(step))
                except StopIteration as end:
                    self._freeze(end.value)

    # ---- state ----

    def _begin(self) -> None:
        """Begin to measure, with batches like that of the next step."""
        self._rows, self._strikes, self.skip, self.is_frozen = 0, 0, 0, False
        self._times: dict[Weights, list[float]] = {}  # of whole steps, by row
        self._replica_s: dict[Weights, list[Sequence[float]]] = {}
        self._most_rows: list[float] = [math.inf] * len(self._devices)
        self._measurement = self._measure()
        self._use(next(self._measurement))

    def _use(self, weights: Weights) -> None:
        self.weights, self.on_first_device = weights, not any(weights[1:])

    def _freeze(self, weights: Weights) -> None:
        self._use(weights)
        self.is_frozen, self.skip = True, PERIOD - 1
        others = sorted((self._row_s(other), other) for other in self._times if other != weights)
        figures = "; ".join(f"{self._name(other)} {self._ms(self._rows, other)}" for _, other in others)
        to_write = f"device_ids=[{self._devices[0]!r}]" if self.on_first_device else self._name(weights)
        log.warning(
            f"measured shares of {self._kind}, batches of {self._rows} rows: {self._name(weights)} is "
            f"fastest, {self._ms(self._rows, weights)} per step"
            + (f" ({figures})" if figures else "")
            + f". These shares are kept. To skip the measurement next time, write {to_write}"
        )

    def _has_other_time(self, rows: int, seconds: float) -> bool:
        expected_s = rows * self._row_s(self.weights)
        return not expected_s / _DEPARTED <= seconds <= expected_s * _DEPARTED

    def _begin_anew(self, rows: int, seconds: float) -> None:
        if self.is_frozen:
            log.warning(
                f"measured shares of {self._kind}: batches of {rows} rows now take {1000 * seconds:.3g} ms "
                f"with {self._name(self.weights)}, batches of {self._rows} rows took "
                f"{self._ms(self._rows, self.weights)}. Measuring again."
            )
            self._patience *= 2  # so that what changes back and forth is not followed for ever
        self._begin()

    # ---- measuring ----

    def _measure(self) -> Generator[Weights, StepTime, Weights]:
        """Measure: yields the weights of each step, is sent its time, returns the weights to keep."""
        count = num_used = len(self._devices)
        candidates: list[Weights] = []
        while num_used:
            candidates.append((1,) * num_used + (0,) * (count - num_used))
            num_used //= 2
        yield candidates[0]  # workers start, memory is allocated
        for number in range(_MOST_ROUNDS):
            for weights in candidates:
                if self._fits(weights):
                    yield from self._turn(weights)
            best = min(self._times, key=self._row_s)
            candidates = [w for w in candidates if w in self._times and not self._is_slower(w, best)]
            candidates += self._in_proportion()
            if len(candidates) == 1 and number > 0:
                break
        equal = [w for w in candidates if w in self._times and self._row_s(w) <= self._row_s(best) * _EQUAL]
        return min(equal, key=lambda weights: (sum(map(bool, weights)), sum(weights)))

    def _turn(self, weights: Weights) -> Generator[Weights, StepTime, None]:
        yield weights
        for _ in range(_NUM_TIMED):
            step = yield weights
            self._times.setdefault(weights, []).append(step.seconds / sum(step.sizes))
            self._most_rows = list(map(min, self._most_rows, step.most_rows))
            if sum(map(bool, step.replica_s)) > 1:
                self._replica_s.setdefault(weights, []).append(step.replica_s)

    def _in_proportion(self) -> list[Weights]:
        """Return shares that no step has had yet, in proportion to the replicas' speeds; none if they gain nothing."""
        if not self._replica_s:
            return []
        fastest = min(self._replica_s, key=self._row_s)
        sizes = self._split(self._rows, fastest)
        seconds = [lower_quartile(times) for times in zip(*self._replica_s[fastest], strict=True)]
        speeds = [size / max(s, 1e-9) for size, s in zip(sizes, seconds, strict=True)]
        if max(seconds) * sum(speeds) < self._rows * _WORTH_A_TRIAL:
            return []
        alone = tuple(int(speed == max(speeds)) for speed in speeds)
        goal = [int(self._rows * speed / sum(speeds)) for speed in speeds]
        while sum(goal) < self._rows:  # each further row goes where it ends first
            ends = [(size + 1) / speed if speed else math.inf for size, speed in zip(goal, speeds, strict=True)]
            goal[ends.index(min(ends))] += 1
        on_the_way = [  # not all of it where so many rows do not fit in a replica's memory
            self._small([size + part * (to - size) for size, to in zip(sizes, goal, strict=True)])
            for part in (1.0, 0.5, 0.25)
        ]
        found = [alone, *filter(self._fits, on_the_way)][:2]
        tried = [self._split(self._rows, weights) for weights in self._times]
        return [w for w in found if self._split(self._rows, w) not in tried and self._fits(w)]

    def _small(self, sizes: Sequence[float]) -> Weights:
        """Return small numbers as weights, by which no replica gets many more rows than these."""
        exact = join_single_rows(split_rows(self._rows, len(sizes), sizes))
        for total in range(1, _LARGEST_TOTAL):
            weights = tuple(split_rows(total, len(sizes), sizes))
            if all(size <= most * _EQUAL for size, most in zip(self._split(self._rows, weights), exact, strict=True)):
                return weights
        return tuple(exact)

    def _fits(self, weights: Weights) -> bool:
        return all(size <= most for size, most in zip(self._split(self._rows, weights), self._most_rows, strict=True))

    def _split(self, rows: int, weights: Weights) -> list[int]:
        return join_single_rows(split_rows(rows, len(weights), weights))

    def _row_s(self, weights: Weights) -> float:
        return lower_quartile(self._times[weights])

    def _is_slower(self, weights: Weights, best: Weights) -> bool:
        """Return whether weights are slower than the best ones by much, and noise is not why."""
        num_turns = len(self._times[weights]) // _NUM_TIMED
        if min(self._times[weights]) < max(self._times[best]):
            num_turns = 1
        return self._row_s(weights) > self._row_s(best) * _DROPPED[min(num_turns, len(_DROPPED)) - 1]

    # ---- messages, copies ----

    def _name(self, weights: Weights) -> str:
        return f"shares={list(weights)}" if any(weights[1:]) else f"one device ({self._devices[0]})"

    def _ms(self, rows: int, weights: Weights) -> str:
        return f"{1000 * rows * self._row_s(weights):.3g} ms"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_measurement")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        if not self.is_frozen:
            self._begin()


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of the others are below.

    >>> lower_quartile([5.0, 1.0, 2.0, 4.0, 3.0])
    2.0
    """
    return sorted(values)[(len(values) - 1) // 4]
