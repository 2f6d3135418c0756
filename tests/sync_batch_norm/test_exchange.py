"""All-gathers among replicas: which of those that wait goes first, and that none waits for ever.

Values, failures and replicas in worker processes are in tests/contract/test_sync_batch_norm_exchange.py.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from helpers.in_time import WAIT_S, in_time
from manyhands.runtime.thread_pool import run_together
from manyhands.sync_batch_norm.exchange import Exchange, LocalExchange, Request, Result

CPU = torch.device("cpu")
BOTH = frozenset({0, 1})

Script = Callable[[Exchange, int], Any]


def run(*scripts: Script) -> list[Any]:
    """Run replica i's script in a thread of its own; return what each returned or raised."""
    exchange = LocalExchange(len(scripts))

    def replica(index: int) -> Any:
        failed = True
        try:
            result = scripts[index](exchange, index)
            failed = False
            return result
        finally:
            exchange.withdraw(index, failed=failed)

    tasks = [partial(replica, index) for index in range(len(scripts))]
    outcomes = in_time(lambda: run_together(tasks, [CPU] * len(tasks)))
    return [outcome.error or outcome.value for outcome in outcomes]


def gathers(*names: str, places: dict[str, int] | None = None) -> Script:
    """A replica that all-gathers its own number under these names, one after the other."""
    places = places or {}
    return lambda exchange, index: [
        exchange.all_gather(index, name, index, places.get(name, 0)).values for name in names
    ]


def gathers_backward(*numbers: int) -> Script:
    return lambda exchange, index: [
        exchange.all_gather_backward(index, number, BOTH, index).values for number in numbers
    ]


def test_no_replica_waits_for_one_that_has_withdrawn() -> None:
    assert run(gathers("a", "b"), gathers("a"), gathers()) == [[{0: 0, 1: 1}, {0: 0}], [{0: 0, 1: 1}], []]


def test_branches_meet_again_behind_themselves() -> None:
    """The lowest rank goes first in the deadlock tie-break, so that the longer branch reaches the common name."""
    places = {"left 1": 0, "left 2": 1, "left 3": 2, "right": 3, "both": 4}
    left = gathers("left 1", "left 2", "left 3", "both", places=places)
    right = gathers("right", "both", places=places)
    for scripts in ((left, right), (right, left), (right, left, right, left)):
        results = run(*scripts)
        assert [result[-1] for result in results] == [{i: i for i in range(len(scripts))}] * len(scripts)
        for index, (script, result) in enumerate(zip(scripts, results, strict=True)):
            assert result[0] == {i: i for i, other in enumerate(scripts) if other is script}, index


def test_of_equal_ranks_the_replica_with_the_fewest_exchanges_goes_first() -> None:
    assert run(gathers("a", "c"), gathers("b", "c")) == [[{0: 0}, {0: 0, 1: 1}], [{1: 1}, {0: 0, 1: 1}]]


def test_backward_waits_for_the_participants_only() -> None:
    """Of three replicas, two were participants in forward; the third is busy with something else."""
    together = threading.Barrier(3)

    def participates(exchange: Exchange, index: int) -> dict[int, Any]:
        values = exchange.all_gather_backward(index, 7, frozenset({0, 2}), index).values
        together.wait(WAIT_S)
        return values

    def is_busy(exchange: Exchange, index: int) -> None:
        together.wait(WAIT_S)

    assert run(participates, is_busy, participates) == [{0: 0, 2: 2}, None, {0: 0, 2: 2}]


def test_backward_goes_from_the_latest_to_the_earliest() -> None:
    """No replica waits, at the later number, for one that has only the earlier."""
    both, only_early = gathers_backward(4, 3), gathers_backward(3)
    assert run(both, only_early) == [[{0: 0}, {0: 0, 1: 1}], [{0: 0, 1: 1}]]
    assert run(only_early, both) == [[{0: 0, 1: 1}], [{1: 1}, {0: 0, 1: 1}]]


def test_a_backward_request_that_comes_too_late_is_an_error() -> None:
    """Else a part of a gradient would be lost in silence."""
    _, error = run(gathers_backward(4, 3), gathers_backward(3, 4))
    assert isinstance(error, RuntimeError)
    assert "different orders" in str(error)


def test_a_late_request_of_another_process_gets_no_result() -> None:
    results: list[Result | None] = []
    exchange = LocalExchange(2)
    for index, number in ((0, 4), (1, 3), (1, 4)):  # 4 completes without 1, which waits at 3
        exchange.submit(index, Request(number, index, BOTH, rank=(1, -number)), results.append)
    assert [result and result.values for result in results] == [{0: 0}, None]
