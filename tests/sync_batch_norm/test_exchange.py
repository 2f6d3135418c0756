"""Meetings: everybody gets what everybody gave, and nobody waits for ever."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from helpers.in_time import WAIT_S, in_time
from manyhands.runtime.thread_pool import run_together
from manyhands.sync_batch_norm.exchange import Exchange, LocalExchange, Request, Result

CPU = torch.device("cpu")
BOTH = frozenset({0, 1})


class Visits:
    """Lets replicas visit one meeting, each in a thread of its own, each after a script."""

    def __init__(self, *scripts: Callable[[Exchange, int], Any]) -> None:
        self.exchange = LocalExchange(len(scripts))
        self._scripts = scripts

    def __call__(self) -> list[Any]:
        return in_time(self._run)

    def _run(self) -> list[Any]:
        outcomes = run_together([self._visit(i) for i in range(len(self._scripts))], [CPU] * len(self._scripts))
        return [outcome.error or outcome.value for outcome in outcomes]

    def _visit(self, index: int) -> Callable[[], Any]:
        def wait_for() -> Any:
            failed = True
            try:
                result = self._scripts[index](self.exchange, index)
                failed = False
                return result
            finally:
                self.exchange.withdraw(index, failed=failed)

        return wait_for


def meets(*names: str, places: dict[str, int] | None = None) -> Callable[[Exchange, int], list[dict[int, Any]]]:
    """A replica that exchanges its own number under these names, one after the other."""
    places = places or {}

    def script(exchange: Exchange, index: int) -> list[dict[int, Any]]:
        return [exchange.all_gather(index, name, index, places.get(name, 0)).values for name in names]

    return script


def test_everybody_gets_what_everybody_gave() -> None:
    results = Visits(*[meets("a", "b")] * 4)()
    assert results == [[{0: 0, 1: 1, 2: 2, 3: 3}] * 2] * 4
    assert [list(values) for values in results[3]] == [[0, 1, 2, 3]] * 2, "in replica order"


def test_the_calls_under_one_name_meet_in_order() -> None:
    def script(exchange: Exchange, index: int) -> list[Any]:
        return [exchange.all_gather(index, "a", (index, call)).values for call in range(3)]

    assert Visits(script, script)() == [[{0: (0, call), 1: (1, call)} for call in range(3)]] * 2


def test_who_has_left_is_not_waited_for() -> None:
    assert Visits(meets("a", "b"), meets("a"), meets())() == [[{0: 0, 1: 1}, {0: 0}], [{0: 0, 1: 1}], []]


def test_who_fails_is_not_waited_for() -> None:
    def fails(exchange: Exchange, index: int) -> None:
        exchange.all_gather(index, "a", index)
        raise ValueError("as asked")

    visits = Visits(meets("a", "b"), fails)
    waited, error = visits()
    assert waited == [{0: 0, 1: 1}, {0: 0}]
    assert isinstance(error, ValueError)
    assert visits.exchange.failed
    assert visits.exchange.all_withdrawn


def test_branches_meet_again_behind_themselves() -> None:
    """Of several names that all wait at, the first in order goes on: its branch joins the others sooner or later."""
    places = {"left 1": 0, "left 2": 1, "left 3": 2, "right": 3, "both": 4}
    left = meets("left 1", "left 2", "left 3", "both", places=places)
    right = meets("right", "both", places=places)
    for scripts in ((left, right), (right, left), (right, left, right, left)):
        results = Visits(*scripts)()
        assert [result[-1] for result in results] == [{i: i for i in range(len(scripts))}] * len(scripts)
        for index, (script, result) in enumerate(zip(scripts, results, strict=True)):
            assert result[0] == {i: i for i, other in enumerate(scripts) if other is script}, index


def test_without_an_order_who_is_behind_goes_on() -> None:
    assert Visits(meets("a", "c"), meets("b", "c"))() == [[{0: 0}, {0: 0, 1: 1}], [{1: 1}, {0: 0, 1: 1}]]


def test_names_in_different_orders_do_not_hang() -> None:
    results = Visits(meets("a", "b"), meets("b", "a"), meets("a", "b"))()
    assert all(index in values for index, result in enumerate(results) for values in result)


def test_an_answer_waits_for_those_who_asked() -> None:
    """Of three replicas, two answer to an exchange between two; the third is busy elsewhere."""
    together = threading.Barrier(3)

    def answers(exchange: Exchange, index: int) -> dict[int, Any]:
        values = exchange.all_gather_backward(index, 7, frozenset({0, 2}), index).values
        together.wait(WAIT_S)
        return values

    def is_busy(exchange: Exchange, index: int) -> None:
        together.wait(WAIT_S)

    assert Visits(answers, is_busy, answers)() == [{0: 0, 2: 2}, None, {0: 0, 2: 2}]


def test_answers_go_from_the_latest_to_the_earliest() -> None:
    """A replica that has nothing to answer to the later exchange keeps nobody waiting."""

    def both(exchange: Exchange, index: int) -> list[dict[int, Any]]:
        return [exchange.all_gather_backward(index, number, BOTH, index).values for number in (4, 3)]

    def only_early(exchange: Exchange, index: int) -> list[dict[int, Any]]:
        return [exchange.all_gather_backward(index, 3, BOTH, index).values]

    assert Visits(both, only_early)() == [[{0: 0}, {0: 0, 1: 1}], [{0: 0, 1: 1}]]
    assert Visits(only_early, both)() == [[{0: 0, 1: 1}], [{1: 1}, {0: 0, 1: 1}]]


def test_an_answer_that_comes_too_late_is_an_error() -> None:
    """Not a part of a gradient that is lost without a word."""

    def in_order(exchange: Exchange, index: int) -> list[dict[int, Any]]:
        return [exchange.all_gather_backward(index, number, BOTH, index).values for number in (4, 3)]

    def out_of_order(exchange: Exchange, index: int) -> list[dict[int, Any]]:
        return [exchange.all_gather_backward(index, number, BOTH, index).values for number in (3, 4)]

    _, error = Visits(in_order, out_of_order)()
    assert isinstance(error, RuntimeError)
    assert "different orders" in str(error)


def test_replicas_of_other_processes_are_taken_in_while_one_of_this_process_waits() -> None:
    """In one thread: nobody else would. They are told what the exchange came to before the one here goes on."""
    told: list[tuple[int, Result | None]] = []

    def submit(index: int) -> None:
        wait_for = Request("a", index, participants=None, rank=(0, 0))
        exchange.submit(index, wait_for, lambda result: told.append((index, result)))

    events = iter([lambda: submit(2), lambda: submit(1), lambda: exchange.withdraw(3, failed=True)])

    def serve(enough: Callable[[], bool]) -> None:
        while not enough():
            next(events)()

    exchange = LocalExchange(4, serve)
    result = exchange.all_gather(0, "a", 0)
    assert result.values == {0: 0, 1: 1, 2: 2}
    assert told == [(2, result), (1, result)]
    assert exchange.failed


def test_one_of_another_process_is_told_that_it_comes_too_late() -> None:
    told: list[Result | None] = []
    exchange = LocalExchange(2)
    for index, number in ((0, 4), (1, 3), (1, 4)):  # 4 goes on without 1, which waits elsewhere
        exchange.submit(index, Request(number, index, BOTH, rank=(1, -number)), told.append)
    assert [result and result.values for result in told] == [{0: 0}, None]
