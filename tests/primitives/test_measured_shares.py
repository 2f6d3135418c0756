"""The measuring of shares, on simulated devices whose speed is known: no clock, no module."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unisono.bench.contenders import STEPS_UNTIL_FROZEN
from unisono.primitives.measured_shares import (
    PERIOD,
    MeasuredShares,
    StepTime,
    join_single_rows,
)

INF = float("inf")


class Line(NamedTuple):
    """The time that a device takes: `fixed_s + row_s * rows`."""

    fixed_s: float
    row_s: float

    def at(self, rows: int) -> float:
        return self.fixed_s + self.row_s * rows


@dataclass
class Machine:
    """Devices of known speed.

    Attributes:
        lines: one a device.
        per_replica_s: what each replica beyond the first costs the whole step.
        noise: the standard deviation of a step's time, as a factor.
        interrupted: the share of steps during which another program doubles the time.
        most_rows: how many rows each device can bear.
    """

    lines: Sequence[Line]
    per_replica_s: float = 0.0
    noise: float = 0.0
    interrupted: float = 0.0
    most_rows: Sequence[float] = ()
    numbers: random.Random = field(default_factory=lambda: random.Random(0))
    borne: list[Sequence[int]] = field(default_factory=list)

    def seconds(self, sizes: Sequence[int]) -> float:
        """Return the true time of a step."""
        used = [line.at(size) for line, size in zip(self.lines, sizes, strict=True) if size]
        return max(used) + self.per_replica_s * (len(used) - 1)

    def step(self, measured: MeasuredShares, rows: int) -> None:
        """Take a step, timed if that is due."""
        sizes = measured.sizes(rows)
        self.borne.append(sizes)
        if not measured.should_time_next():
            return
        factor = self.numbers.lognormvariate(0, self.noise)
        if self.interrupted and self.numbers.random() < self.interrupted:
            factor *= 2
        each = [line.at(size) * factor if size else 0.0 for line, size in zip(self.lines, sizes, strict=True)]
        is_plain = measured.on_first_device
        most_rows = self.most_rows or [INF] * len(self.lines)
        seconds = self.seconds(sizes) * factor
        measured.record(StepTime(measured.weights, sizes, [] if is_plain else each, seconds, most_rows))

    def measured(self) -> MeasuredShares:
        return MeasuredShares(["cpu"] * len(self.lines), "training")

    def frozen(self, rows: int) -> MeasuredShares:
        """Measure until shares are chosen; return them."""
        measured = self.measured()
        until_frozen(measured, self, rows)
        return measured

    def best_of_two(self, rows: int) -> float:
        """Return the time of the fastest split over two devices, one device included."""
        splits = [[first, rows - first] for first in range(rows + 1) if 1 not in (first, rows - first)]
        return min(map(self.seconds, splits))


def until_frozen(measured: MeasuredShares, machine: Machine, rows: int, at_most: int = 1000) -> int:
    """Take steps until the shares are frozen; return how many."""
    for number in range(1, at_most + 1):
        machine.step(measured, rows)
        if measured.is_frozen:
            return number
    raise AssertionError(f"not frozen after {at_most} steps")


lines = st.builds(Line, st.floats(0, 5), st.floats(0.01, 1))


# ---- what is chosen ------------------------------------------------------------------------------


@given(st.floats(0, 3), st.lists(st.floats(0.1, 1), min_size=2, max_size=2), st.floats(0, 5), st.integers(32, 200))
@example(0.0, [0.1, 0.787], 0.0, 40)  # 35.5 and 4.5 rows would be right: of 36 and 4, and 35 and 5, the first is faster
@settings(deadline=None)
def test_of_two_devices_the_choice_is_about_the_fastest_split_of_all(fixed_s, row_s, per_replica_s, rows):
    """S16: with times that are exact, devices that differ in speed, among all splits, one device included."""
    machine = Machine([Line(fixed_s, each) for each in row_s], per_replica_s)
    assert machine.seconds(machine.frozen(rows).sizes(rows)) <= 1.06 * machine.best_of_two(rows)


@pytest.mark.parametrize("are_equal", [True, False])
def test_of_200_noisy_machines_few_choices_are_wrong_by_more_than_three_percent(are_equal):
    """S16: of all splits of two devices; and none is so much slower than one device."""
    ratios, of_one_device = [], []
    for seed in range(200):
        numbers = random.Random(seed)
        fixed_s, rows = numbers.uniform(0, 8), numbers.choice([32, 64, 100, 256])
        each = [1.0, 1.0] if are_equal else [numbers.choice([1, 1.5, 2, 4]) for _ in range(2)]
        machine = Machine(
            [Line(fixed_s, row_s) for row_s in each],
            per_replica_s=numbers.uniform(0, 20) * rows / 32,
            noise=numbers.uniform(0.01, 0.08),
            interrupted=numbers.uniform(0, 0.25),
            numbers=numbers,
        )
        seconds = machine.seconds(machine.frozen(rows).sizes(rows))
        ratios.append(seconds / machine.best_of_two(rows))
        of_one_device.append(seconds / machine.seconds([rows, 0]))
    assert len([ratio for ratio in ratios if ratio > 1.03]) <= 5
    assert max(ratios) <= 1.1
    assert max(of_one_device) <= 1.03


@given(st.lists(lines, min_size=2, max_size=8), st.floats(0, 5), st.integers(1, 100), st.floats(0, 0.5))
@settings(deadline=None)
def test_the_freeze_comes_and_no_row_is_lost(of_devices, per_replica_s, rows, noise):
    """S16: and what is chosen is not slower than one device, if times are exact."""
    machine = Machine(of_devices, per_replica_s, noise)
    measured = machine.measured()
    # Three first turns, then at most eight rounds of six candidates.
    num_steps = until_frozen(measured, machine, rows)
    assert num_steps <= (STEPS_UNTIL_FROZEN if len(of_devices) == 2 else 1 + 3 * 3 + 8 * 3 * 7)
    assert all(sum(sizes) == rows and min(sizes) >= 0 for sizes in machine.borne)
    if not noise:
        alone = [rows] + [0] * (len(of_devices) - 1)
        assert machine.seconds(measured.sizes(rows)) <= 1.021 * machine.seconds(alone)


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 10)), min_size=60, max_size=120), st.integers(2, 5))
@settings(deadline=None, max_examples=50)
def test_any_rows_and_any_times(steps, count):
    """S16: batches of any sizes in any order, with any times: every row has its replica."""
    measured = MeasuredShares(range(count), "training")
    for rows, seconds in steps:
        sizes = measured.sizes(rows)
        assert sum(sizes) == rows
        assert min(sizes) >= 0
        measured.record(StepTime(measured.weights, sizes, [seconds] * count, seconds, [INF] * count))


@pytest.mark.parametrize(
    ("machine", "rows", "weights"),
    [
        pytest.param(Machine([Line(1, 1)] * 4), 64, (1, 1, 1, 1), id="equal devices"),
        pytest.param(Machine([Line(0, 1 / 64)] * 2, 0.5), 64, (1, 0), id="of equals the fewest devices"),
        pytest.param(Machine([Line(1, 1), Line(50, 1)] * 2), 64, (1, 0, 1, 0), id="without those that cost too much"),
        pytest.param(Machine([Line(0, 20), Line(0, 1)], 30), 32, (0, 1), id="without a slow first device"),
    ],
)
def test_the_weights_that_are_chosen(machine, rows, weights):
    """S16: whole numbers, so that the line to paste is short: `shares=[1, 1]`."""
    measured = machine.frozen(rows)
    assert measured.weights == weights
    assert measured.on_first_device == (weights == (1, 0))


def test_no_replica_has_more_rows_than_it_can_bear():
    """S16: one device alone, and shares of the first turns, are left out if the rows do not fit."""
    machine = Machine([Line(0, 1), Line(0, 4)], most_rows=[20, INF])
    measured = machine.frozen(32)
    tried = machine.borne[machine.borne.index([16, 16]) + 4 :]  # what it can bear is known after the first turn
    assert max(first for first, _ in tried) <= 20
    assert measured.sizes(32)[0] in (19, 20)


# ---- after the freeze ----------------------------------------------------------------------------


def test_frozen_shares_stay_under_noise(caplog):
    """S16: hysteresis does not flap. Also where one step in ten takes three times as long."""
    machine = Machine([Line(0, 1 / 64)] * 2, 0.1, noise=0.15)
    measured = machine.frozen(64)
    weights, true = measured.weights, machine.seconds
    for number in range(20_000):
        factor = 3 if number // PERIOD % 10 == 0 else 1
        machine.seconds = lambda sizes, factor=factor: factor * true(sizes)
        machine.step(measured, 64)
        assert measured.is_frozen
    assert measured.weights == weights
    assert len(caplog.records) == 1


def test_a_lasting_change_of_speed_is_measured_again_once(caplog):
    """S16: it says so; then the new shares are kept."""
    machine = Machine([Line(0, 1), Line(0, 1)], noise=0.02)
    measured = machine.frozen(32)
    assert measured.weights == (1, 1)
    machine.lines = [Line(0, 1), Line(0, 4)]
    for _ in range(9 * PERIOD + 40):
        machine.step(measured, 32)
    assert measured.is_frozen
    assert measured.sizes(32) in ([25, 7], [26, 6])
    for _ in range(5000):
        machine.step(measured, 32)
    first, again, second = [record.getMessage() for record in caplog.records]
    assert "shares=[1, 1] is fastest" in first
    assert " ms with shares=[1, 1], batches of 32 rows took 1." in again
    assert again.endswith("Measuring again.")
    assert "shares=[4, 1] is fastest" in second


def test_what_changes_back_and_forth_is_measured_less_and_less_often(caplog):
    """S16"""
    fast, slow = [Line(0, 1), Line(0, 1)], [Line(0, 2), Line(0, 2)]
    machine = Machine(fast, noise=0.02)
    measured = machine.frozen(32)
    for number in range(100_000):
        machine.lines = slow if number // 400 % 2 else fast
        machine.step(measured, 32)
    assert len([record for record in caplog.records if "again" in record.getMessage()]) <= 3


def test_frozen_weights_serve_batches_of_other_sizes():
    """S16: no replica gets a single row, on which batch norm could not train, if there are two for each."""
    machine = Machine([Line(0, 1), Line(0, 4)])
    measured = machine.frozen(32)
    assert measured.weights == (4, 1)
    assert [measured.sizes(rows) for rows in (64, 10, 5, 2, 0)] == [[51, 13], [8, 2], [5, 0], [2, 0], [0, 0]]


# ---- sizes of batches ----------------------------------------------------------------------------


def test_short_batches_do_not_count():
    """S16: with a short last batch in every epoch of five it takes longer, and chooses the same."""
    machine = Machine([Line(3, 1), Line(3, 4)])
    measured = machine.measured()
    for number in range(200):
        machine.step(measured, 3 if number % 5 == 4 else 32)
    assert measured.is_frozen
    assert measured.weights == (4, 1)


def test_batches_of_another_size_for_long_are_measured_again(caplog):
    """S16: with 64 rows two devices are faster, with 4 rows one is."""
    machine = Machine([Line(0, 1)] * 2, per_replica_s=3)
    measured = machine.frozen(64)
    assert measured.weights == (1, 1)
    for _ in range(8 * PERIOD):
        machine.step(measured, 4)
    until_frozen(measured, machine, 4)
    assert measured.weights == (1, 0)
    again = caplog.records[1].getMessage()
    assert "batches of 4 rows now take 5e+03 ms with shares=[1, 1], batches of 64 rows took 3.5e+04 ms" in again


# ---- messages, copies, threads -------------------------------------------------------------------


def test_the_line_to_paste(caplog):
    """S16: with the times of all that was tried; where one device wins, how to name it."""
    for machine in (Machine([Line(0, 0.001), Line(0, 0.003)]), Machine([Line(0, 0.001)] * 2, 1)):
        machine.frozen(32)
    several, one = [record.getMessage() for record in caplog.records]
    begin, end = (
        "measured shares of training, batches of 32 rows: ",
        "These shares are kept. To skip the measurement next time, write ",
    )
    assert several.startswith(
        f"{begin}shares=[3, 1] is fastest, 24 ms per step (one device (cpu) 32 ms; shares=[1, 1] 48 ms). "
    )
    assert several.endswith(f"{end}shares=[3, 1]")
    assert one.startswith(f"{begin}one device (cpu) is fastest, 32 ms per step (shares=")
    assert one.endswith(f"{end}device_ids=['cpu']")


def test_a_step_with_other_shares_than_are_due_does_not_count():
    """S16: one of another thread, which began before."""
    measured = MeasuredShares(range(2), "training")
    for _ in range(100):
        measured.record(StepTime((1, 0), [32, 0], [], 1.0, [INF] * 2))
    assert not measured.is_frozen
    assert measured.weights == (1, 1)


# ---- the parts -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_single_rows_are_joined(sizes):
    """S16"""
    joined = join_single_rows(sizes)
    assert sum(joined) == sum(sizes)
    if sum(sizes) >= 2 * len(sizes):
        assert 1 not in joined
    else:
        assert joined == sizes
