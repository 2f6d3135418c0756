"""Which lanes get a map's batches, on a machine whose times are made up."""

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono import DataParallel
from unisono.inference.lane_choice import LaneChoice, choice_for

AHEAD = 4
TURN = 5 * AHEAD


def machine(all_s: float, one_s: float) -> Callable[[bool], float]:
    """Return how long a batch takes: with all lanes, and with the first one only."""
    return lambda used_all: all_s if used_all else one_s


def run(choice: LaneChoice, seconds_of: Callable[[bool], float], num_batches: int = 1000) -> list[bool]:
    """Run a map until the choice is made; return for each batch whether it could go to any lane."""
    choice.begin_map()
    used: list[bool] = []
    while not choice.is_made and len(used) < num_batches:
        used.append(choice.uses_all)
        choice.record(seconds_of(used[-1]), 1, used_all=used[-1])
    return used


@pytest.fixture
def choice() -> LaneChoice:
    return LaneChoice("Model", 2, AHEAD)


def record(choice: LaneChoice, num_batches: int, seconds: float, *, used_all: bool) -> None:
    for _ in range(num_batches):
        choice.record(seconds, 1, used_all=used_all)


@pytest.mark.parametrize(
    ("all_s", "one_s", "uses_all"),
    [(1.0, 0.35, False), (1.0, 0.9, False), (1.0, 0.97, True), (1.0, 1.0, True), (1.0, 1.3, True), (1.0, 8.0, True)],
)
def test_the_faster_one_is_chosen(choice: LaneChoice, all_s: float, one_s: float, uses_all: bool) -> None:
    """I15: about equal ones stay with all lanes, which begin: no device begins long batches alone. A device that is
    clearly slower is not tried for long: a few batches, of which one may be quick."""
    used = run(choice, machine(all_s, one_s))
    assert (choice.is_made, choice.uses_all) == (True, uses_all)
    assert used == ([True] * TURN + [False] * 3 if one_s == 8.0 else ([True] * TURN + [False] * TURN) * 3)


def test_a_slower_device_of_which_a_batch_is_quick_is_tried_on(choice: LaneChoice) -> None:
    """I15"""
    times = iter([1.0] * TURN + [8.0, 1.0, 8.0] + [8.0] * 1000)
    assert len(run(choice, lambda _: next(times), 40)) == 40


def test_outputs_that_were_ready_make_the_lanes_no_faster(choice: LaneChoice) -> None:
    """I15: a map's thread that had to wait for a core found all that the lanes compute ahead, in no time. The mean of
    so few batches was taken for their speed, and lanes of 0.6 of a loop's speed were chosen."""
    seconds = iter(([1.0] * AHEAD + [0.0] * AHEAD + [1.0] * 3 * AHEAD + [0.7] * TURN) * 3)
    run(choice, lambda _: next(seconds))
    assert choice.is_made
    assert not choice.uses_all


def test_short_maps_make_a_turn_together(choice: LaneChoice) -> None:
    """I15: a validation of a few batches after each epoch; the first batches of each map do not count."""
    num_maps = 0
    while not choice.is_made and num_maps < 100:
        num_maps += 1
        choice.begin_map()
        for number in range(2 * AHEAD):
            of_all = 9.0 if number < AHEAD else 1.0
            choice.record(of_all if choice.uses_all else 0.7, 1, used_all=choice.uses_all)
    assert (num_maps, choice.uses_all) == (24, False)


@given(st.lists(st.floats(1.0, 50.0), min_size=6 * TURN, max_size=6 * TURN), st.data())
def test_noise_in_all_turns_but_one_changes_nothing(noise: list[float], data: st.DataObject) -> None:
    """I15: other programs make batches slower; one quiet turn of each is enough."""
    for way in (0, 1):
        quiet = 2 * data.draw(st.integers(0, 2)) + way
        noise[quiet * TURN : (quiet + 1) * TURN] = [1.0] * TURN
    factors = iter(noise)
    choice = LaneChoice("Model", 2, AHEAD)
    run(choice, lambda used_all: next(factors) * (1.0 if used_all else 0.5))
    assert not choice.uses_all or min(noise[TURN : TURN + 3]) * 0.5 > 1.5  # then it was slower from the start


def test_what_is_pulled_before_a_turn_does_not_count(choice: LaneChoice) -> None:
    """I15: batches that went the other way."""
    record(choice, TURN, 1.0, used_all=True)
    record(choice, AHEAD, 100.0, used_all=True)
    assert not choice.uses_all
    run(choice, machine(1.0, 0.5))
    assert not choice.uses_all


def test_it_is_measured_again_when_a_map_begins(choice: LaneChoice) -> None:
    """I15: after many batches, and then after twice as many."""
    run(choice, machine(1.0, 0.5))
    for num_batches in (1000, 2000):
        record(choice, num_batches - 1, 1.0, used_all=False)
        choice.begin_map()
        assert choice.is_made
        record(choice, 1, 1.0, used_all=False)
        assert choice.is_made
        assert len(run(choice, machine(1.0, 0.5))) == 6 * TURN


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """I15"""
    caplog.set_level(logging.WARNING, logger="unisono")
    for all_s in (0.5, 1.0, 1.0):
        run(LaneChoice("Model", 3, AHEAD), machine(all_s, 0.6))
    [message] = caplog.messages
    assert "map and evaluate of Model: these batches are too short to be worth passing to 3" in message


def test_kinds_of_batches() -> None:
    """I15: each method and each size of the inputs has a choice of its own; so has each wrapper."""
    model, other = (DataParallel(nn.Linear(5, 2), ["cpu"] * 2) for _ in range(2))
    x = torch.zeros(10, 5)
    kinds = [(model, None, x), (other, None, x), (model, "extra_repr", x), (model, None, x[:2]), (model, None, "text")]
    choices = [choice_for(wrapper, method, inputs, 2, AHEAD) for wrapper, method, inputs in kinds]
    assert len({*map(id, choices)}) == len(kinds)
    assert choice_for(model, None, {"x": [x[:9]]}, 2, AHEAD) is choices[0]
