"""Which shares are fastest: `shares="measured"`, as a state machine that is fed with the times of steps.

    1. A few steps with other shares, whose sizes differ little: so each replica's time is known at several numbers of
       rows, and a line is fitted to it, a + b * rows.
    2. The lines propose candidates: the shares with which all replicas end at once, for all devices, for the fastest
       half of them, and so on. One device alone is always a candidate, and so are the best shares of 1.
    3. The candidates take turns. The one whose whole steps take the shortest is chosen, and frozen. Among equals it is
       the one with the fewest devices.
    4. From then on one step in `PERIOD` is timed. If their times differ from what was measured for long, or if batches
       have other sizes for long, it begins anew.

The lines leave out what a replica costs the others: sums of gradients, the caller's thread, cores and memory that they
share. So they only propose, and the times of whole steps decide.

Other programs make steps slower, never faster. So candidates are compared by the lower quartiles of their steps. A
candidate that is slower is dropped, unless noise may be why: where its fastest step is faster than the slowest one of
the best candidate, both get further turns.

This file knows no clock and no module. Times may be in any unit, and are compared by row, so that batches may differ a
little in size; batches of quite another size are not counted.
"""

import math
import statistics
import threading
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from unisono.primitives.split_sizes import split_rows
from unisono.runtime.errors import log
from unisono.runtime.interrupts import critical

Weights: TypeAlias = tuple[int, ...]

PERIOD = 17  # of the timed steps after the freeze; a prime, so that with two kinds of batches in turn both are seen
_NUM_TIMED = 2  # steps of each turn, after one that is not counted
_SIMILAR_ROWS = 1.25  # batches whose rows differ by no more than this factor are compared
_OTHER_ROWS = 2.0  # batches whose rows differ by more than this factor need shares of their own
_MOST_UNCOUNTED = 16  # steps in a row, while measuring, before their size becomes the one that is measured
_DROPPED = (2.2, 1.2, 1.1)  # after round 1, 2, 3 and later: candidates that are slower by this factor
_MOST_ROUNDS = 8  # of candidates that are about equal, or that noise hides
_EQUAL = 1.02  # candidates within this factor are equal, and the one with the fewest devices is chosen
_WORTH_A_TRIAL = 1.05  # what other shares must gain, by the lines, to become one more candidate
_ROUNDING = 1.02  # what small numbers as weights may cost, by the lines
_LARGEST_TOTAL = 64  # of such weights
_DEPARTED = 1.3  # a step's time has left what was measured if it differs by more than this factor
_PATIENCE = 8  # timed steps in a row that have left it before it is measured again; doubled each time


class StepTime(NamedTuple):
    """One step that was timed.

    Attributes:
        weights: the shares that it had.
        sizes: the rows of each replica, 0 for those that had none.
        replica_s: how long each replica took; empty where that is not known.
        seconds: how long the whole step took.
        most_rows: how many rows each replica can bear.
    """

    weights: Weights
    sizes: Sequence[int]
    replica_s: Sequence[float]
    seconds: float
    most_rows: Sequence[float]


class Line(NamedTuple):
    """The time that a replica takes: `fixed_s + row_s * rows`."""

    fixed_s: float
    row_s: float

    def at(self, rows: float) -> float:
        return self.fixed_s + self.row_s * rows


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """Fit a line to (rows, seconds) by least squares; neither coefficient is negative.

    >>> fit_line([(1, 3.0), (2, 5.0), (3, 7.0)])
    Line(fixed_s=1.0, row_s=2.0)

    A replica whose times fall with its rows has waited for others, so it is faster than these times: then it counts as
    twice as fast as in the fastest of them, and a trial will show it.
    """
    mean_rows = statistics.fmean(rows for rows, _ in points)
    mean_s = statistics.fmean(seconds for _, seconds in points)
    variance = sum((rows - mean_rows) ** 2 for rows, _ in points)
    slope = sum((rows - mean_rows) * (s - mean_s) for rows, s in points) / variance if variance else 0.0
    if variance and slope <= 0:
        return Line(0.0, min(seconds / rows for rows, seconds in points) / 2)
    fixed_s = mean_s - slope * mean_rows
    return Line(fixed_s, slope) if variance and fixed_s >= 0 else Line(0.0, mean_s / mean_rows)


def balanced_sizes(rows: int, lines: Sequence[Line | None], most_rows: Sequence[float]) -> list[int] | None:
    """Return the sizes whose slowest replica is as fast as possible; None if `rows` are more than replicas can bear.

    >>> balanced_sizes(32, [Line(0, 1), Line(0, 3)], [100, 100]), balanced_sizes(8, [Line(0, 1), Line(9, 1)], [8, 8])
    ([24, 8], [8, 0])

    Args:
        lines: one a replica; None: it is left out.
        most_rows: how many rows each one can bear.
    """
    used = [i for i, line in enumerate(lines) if line is not None]
    if sum(min(rows, most_rows[i]) for i in used) < rows:
        return None

    def sizes_within(seconds: float) -> list[int]:
        sizes = [0] * len(lines)
        for i in used:
            line = lines[i]
            assert line is not None
            if seconds > line.fixed_s:
                can = (seconds - line.fixed_s) / line.row_s if line.row_s > 0 else rows
                sizes[i] = int(min(rows, most_rows[i], can))
        return sizes

    too_short, enough = 0.0, max(line.at(rows) for line in lines if line is not None) * 2 + 1e-9
    for _ in range(60):
        middle = (too_short + enough) / 2
        too_short, enough = (too_short, middle) if sum(sizes_within(middle)) >= rows else (middle, enough)
    sizes = sizes_within(enough)
    for i in reversed(used):  # several may take the last rows in the same time
        excess = sum(sizes) - rows
        sizes[i] -= min(excess, max(0, sizes[i] - sizes_within(too_short)[i]))
    return sizes


def join_single_rows(sizes: Sequence[int]) -> list[int]:
    """Return sizes without a 1, if two rows for each replica are there: batch norm in training needs two.

    >>> join_single_rows([6, 1]), join_single_rows([1, 1])
    ([7, 0], [1, 1])

    The row goes to the replica with the most.
    """
    joined = list(sizes)
    if sum(sizes) < 2 * len(sizes):
        return joined
    largest = joined.index(max(joined))
    for i, size in enumerate(sizes):
        if size == 1 and i != largest:
            joined[i] = 0
            joined[largest] += 1
    return joined


class MeasuredShares:
    """The shares of one kind of steps.

    Guarantees
        - Whatever the times, there are weights for the next step, one a device, and one of them is above 0.
        - After the freeze the weights stay, until it is measured again.
        - May be used by several threads; a copy (deepcopy, pickle) has the frozen weights, or begins anew.

    Args:
        devices: as in `device_ids`.
        kind: of steps, in messages.

    Attributes:
        weights: of the next step.
        on_first_device: whether that is the first device alone.
        skip: how many of the next steps need not be timed, minus 1.
        is_frozen: whether the weights are chosen.
    """

    weights: Weights
    on_first_device: bool
    skip: int
    is_frozen: bool

    def __init__(self, devices: Sequence[str | int], kind: str) -> None:
        self._devices, self._kind = list(devices), kind
        self._patience = _PATIENCE
        self._lock = threading.Lock()
        self._begin(0)

    def should_time_next(self) -> bool:
        """Return whether the next step is to be timed and recorded; to be asked once a step."""
        self.skip -= 1
        return self.skip < 0

    def sizes(self, rows: int) -> list[int]:
        """Return the rows of each replica with the weights as they are."""
        found = self._sizes.get(rows)
        if found is None:
            found = self._sizes[rows] = self._split(rows, self.weights)
        return found

    @critical
    def record(self, step: StepTime) -> None:
        """Take note of a step that was timed; `weights` may be others afterwards."""
        rows = sum(step.sizes)
        with self._lock:
            if rows == 0 or step.weights != self.weights:  # the latter: calls from several threads
                return
            if self.is_frozen:
                self.skip = PERIOD - 1
                self._watch(rows, step)
            elif self._rows and self._is_similar(rows):
                self._uncounted = 0
                self._advance(step)
            elif rows > self._rows or self._uncounted >= _MOST_UNCOUNTED:
                self._begin(rows)
                self._advance(step)
            else:
                self._uncounted += 1

    # ---- state ----

    def _begin(self, rows: int) -> None:
        """Begin to measure with batches of `rows` rows; 0: with those of the next step."""
        self._rows, self._uncounted, self._strikes = rows, 0, 0
        self._times: dict[Weights, list[float]] = {}  # of whole steps, by row
        self._points: list[list[tuple[int, float]]] = [[] for _ in self._devices]
        self._most_rows: list[float] = [math.inf] * len(self._devices)
        self.skip = 0
        self.is_frozen = False
        self._measurement = self._measure()
        self._use(next(self._measurement))

    def _use(self, weights: Weights) -> None:
        self.weights = weights
        self.on_first_device = not any(weights[1:])
        self._sizes: dict[int, list[int]] = {}

    def _advance(self, step: StepTime) -> None:
        try:
            self._use(self._measurement.send(step))
        except StopIteration as end:
            self._freeze(end.value)

    def _freeze(self, weights: Weights) -> None:
        self._use(weights)
        self.is_frozen, self.skip = True, PERIOD - 1
        self._expected_s = self._row_s(weights)
        figures = sorted((self._row_s(w) * self._rows, w) for w in self._times if w != weights)
        others = "; ".join(f"{self._name(w)} {1000 * seconds:.3g} ms" for seconds, w in figures)
        log.warning(
            f"measured shares of {self._kind}, batches of {self._rows} rows: {self._name(weights)} is fastest, "
            f"{1000 * self._expected_s * self._rows:.3g} ms a step" + (f" ({others})" if others else "") + ". "
            f"It is kept. To have it at once, write {self._argument(weights)}"
        )

    def _watch(self, rows: int, step: StepTime) -> None:
        """Look at one step after the freeze; begin anew if many in a row have left what was measured."""
        now, before = f"batches of {rows} rows", f"{self._rows}"
        if self._is_similar(rows):
            ratio = step.seconds / rows / self._expected_s if self._expected_s else 1.0
            has_left = not 1 / _DEPARTED <= ratio <= _DEPARTED
            now = f"{1000 * step.seconds:.3g} ms a step"
            before = f"{1000 * self._expected_s * rows:.3g} ms"
        elif self._rows / _OTHER_ROWS <= rows <= self._rows * _OTHER_ROWS:
            return
        else:
            has_left = True
        self._strikes = self._strikes + 1 if has_left else 0
        if self._strikes >= self._patience:
            log.warning(
                f"measured shares of {self._kind}: {now} for some time with {self._name(self.weights)}, where it was "
                f"{before}. They are measured again."
            )
            self._patience *= 2  # so that what changes back and forth is not followed for ever
            self._begin(0)

    # ---- measuring ----

    def _measure(self) -> Generator[Weights, StepTime, Weights]:
        """Measure: yields the weights of each step, is sent its time, returns the weights to keep."""
        yield self._even()  # workers start, memory is allocated
        for weights in self._patterns():
            if self._can_bear(weights):
                yield from self._turn(weights)
        candidates, num_rounds = self._candidates(), 0
        while True:
            for weights in candidates if num_rounds % 2 == 0 else candidates[::-1]:
                if num_rounds > 0 or weights not in self._times:
                    yield from self._turn(weights)
            num_rounds += 1
            best = min(candidates, key=self._row_s)
            factor = _DROPPED[min(num_rounds, len(_DROPPED)) - 1]
            candidates = [weights for weights in candidates if not self._is_slower(weights, best, factor)]
            if num_rounds == 1:
                candidates += self._better_by_the_lines(candidates)
            if (len(candidates) == 1 and num_rounds > 1) or num_rounds == _MOST_ROUNDS:
                equal = [weights for weights in candidates if self._row_s(weights) <= self._row_s(best) * _EQUAL]
                return min(equal, key=lambda weights: (sum(map(bool, weights)), sum(weights)))

    def _turn(self, weights: Weights) -> Generator[Weights, StepTime, None]:
        yield weights  # not counted: other shapes than before
        for _ in range(_NUM_TIMED):
            step = yield weights
            self._times.setdefault(weights, []).append(step.seconds / sum(step.sizes))
            self._most_rows = list(map(min, self._most_rows, step.most_rows))
            for points, size, seconds in zip(self._points, step.sizes, step.replica_s, strict=bool(step.replica_s)):
                if size and seconds:
                    points.append((size, seconds))

    def _even(self) -> Weights:
        return (1,) * len(self._devices)

    def _patterns(self) -> list[Weights]:
        """Return the weights of the first turns: each replica has three numbers of rows with them, if it can."""
        count = len(self._devices)
        patterns = [self._even(), tuple(2 - i % 2 for i in range(count)), tuple(1 + i % 2 for i in range(count))]
        distinct = self._distinct(patterns)
        num_used = self._num_used(distinct[0])
        return [weights for weights in distinct if self._num_used(weights) == num_used]

    def _candidates(self) -> list[Weights]:
        count = len(self._devices)
        lines = self._lines()
        by_speed = sorted(range(count), key=lambda i: (lines[i].at(self._rows / count), i))
        best_alone = min(range(count), key=lambda i: lines[i].at(self._rows))
        found = [self._alone(i) for i in dict.fromkeys([0, best_alone]) if self._most_rows[i] >= self._rows]
        found.append(min(self._times, key=self._row_s))
        num_used = count
        while num_used > 1:
            found += self._balanced(lines, by_speed[:num_used])
            num_used //= 2
        return self._distinct(found)

    def _better_by_the_lines(self, candidates: Sequence[Weights]) -> list[Weights]:
        """Return the shares that the lines propose now that they have more points, if they promise something."""
        lines = self._lines()
        fastest = self._slowest(lines, min(candidates, key=self._row_s))
        found = self._balanced(lines, range(len(self._devices)))
        return [w for w in found if w not in self._times and self._slowest(lines, w) * _WORTH_A_TRIAL <= fastest]

    def _lines(self) -> list[Line]:
        """Return each replica's line; all the same where it is not known how long each one takes."""
        if not all(self._points):
            return [Line(0.0, 1.0)] * len(self._devices)
        return [fit_line(points) for points in self._points]

    def _balanced(self, lines: Sequence[Line], used: Sequence[int]) -> list[Weights]:
        """Return the weights with which all of these replicas end at once; none if they cannot bear the rows."""
        sizes = balanced_sizes(
            self._rows, [line if i in used else None for i, line in enumerate(lines)], self._most_rows
        )
        return [] if sizes is None else [self._small_weights(join_single_rows(sizes), lines)]

    def _small_weights(self, sizes: Sequence[int], lines: Sequence[Line]) -> Weights:
        """Return weights that are small numbers, and give about these sizes."""
        slowest = max(line.at(size) for line, size in zip(lines, sizes, strict=True) if size)
        for total in range(1, _LARGEST_TOTAL):
            weights = tuple(split_rows(total, len(sizes), sizes))
            same_devices = all(bool(weight) == bool(size) for weight, size in zip(weights, sizes, strict=True))
            if same_devices and self._can_bear(weights) and self._slowest(lines, weights) <= slowest * _ROUNDING:
                return weights
        return tuple(sizes)

    def _distinct(self, all_weights: Sequence[Weights]) -> list[Weights]:
        """Return the first of all weights that give the same sizes, in order."""
        found: dict[tuple[int, ...], Weights] = {}
        for weights in all_weights:
            found.setdefault(tuple(self._split(self._rows, weights)), weights)
        return [*found.values()]

    def _num_used(self, weights: Weights) -> int:
        return sum(map(bool, self._split(self._rows, weights)))

    def _slowest(self, lines: Sequence[Line], weights: Weights) -> float:
        sizes = self._split(self._rows, weights)
        return max(line.at(size) for line, size in zip(lines, sizes, strict=True) if size)

    def _can_bear(self, weights: Weights) -> bool:
        sizes = self._split(self._rows, weights)
        return weights == self._even() or all(size <= most for size, most in zip(sizes, self._most_rows, strict=True))

    def _alone(self, index: int) -> Weights:
        return tuple(int(i == index) for i in range(len(self._devices)))

    def _split(self, rows: int, weights: Weights) -> list[int]:
        return join_single_rows(split_rows(rows, len(weights), weights))

    def _row_s(self, weights: Weights) -> float:
        times = sorted(self._times[weights])
        return times[(len(times) - 1) // 4]

    def _is_slower(self, weights: Weights, best: Weights, factor: float) -> bool:
        """Return whether weights are slower than the best ones by a factor, and noise is not why."""
        if min(self._times[weights]) < max(self._times[best]):
            factor = _DROPPED[0]
        return self._row_s(weights) > self._row_s(best) * factor

    def _is_similar(self, rows: int) -> bool:
        return self._rows / _SIMILAR_ROWS <= rows <= self._rows * _SIMILAR_ROWS

    # ---- messages, copies ----

    def _name(self, weights: Weights) -> str:
        if weights == self._alone(0):
            return f"one device ({self._devices[0]})"
        return f"shares={list(weights)}"

    def _argument(self, weights: Weights) -> str:
        if weights == self._alone(0):
            return f"device_ids=[{self._devices[0]!r}]"
        return f"shares={list(weights)}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_measurement")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        if not self.is_frozen:
            self._begin(0)
