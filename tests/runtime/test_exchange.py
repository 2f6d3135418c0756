"""All-gathers among replicas: all take part in all of them, or one raises an error, and none waits for ever.

Values and failures are in tests/contract/test_sync_batch_norm_exchange.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from helpers.in_time import in_time
from unisono.runtime.exchange import Exchange, Request, Response
from unisono.runtime.thread_pool import run_together
from unisono.sync_batch_norm.over_replicas import StatisticsOfBatchNorm

CPU = torch.device("cpu")

Script = Callable[[Exchange, int], Any]


def run(*scripts: Script) -> list[Any]:
    """Run replica i's script in a thread of its own; return what each returned or raised."""
    exchange = Exchange(len(scripts))

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


def gathers(*names: str | tuple[str, int]) -> Script:
    """A replica that all-gathers its own number, for batch norms or (name, number) their backward, one by one."""
    pairs = [(name, None) if isinstance(name, str) else name for name in names]
    return lambda exchange, index: [
        exchange.all_gather(index, Request(StatisticsOfBatchNorm, name, index, forward)).values
        for name, forward in pairs
    ]


def test_all_get_the_values_of_all_in_replica_order() -> None:
    same = gathers("a", "b", "a", ("a", 2), ("b", 1))
    assert run(same, same, same) == [[{0: 0, 1: 1, 2: 2}] * 5] * 3


OF_A, OF_B, OF_C = (f"called the batch norm of {name}" for name in "abc")
BACKWARD_OF_A, NONE = "called the backward of the batch norm of a", "called no further one"


@pytest.mark.parametrize(
    ("names", "raises", "ways"),
    [
        pytest.param(["a", "b", "a"], 0, f"replicas 0 and 2 {OF_A}, replica 1 {OF_B}", id="another"),
        pytest.param(["", "ab", "ab"], 1, f"replicas 1 and 2 {OF_A}, replica 0 {NONE}", id="none at all"),
        pytest.param(
            *(["ab", "a", "ac", "a"], 0, f"replica 0 {OF_B}, replica 2 {OF_C}, replicas 1 and 3 {NONE}"),
            id="another, and none",
        ),
        pytest.param(["a", "a", "aa"], 2, f"replica 2 {OF_A}, replicas 0 and 1 {NONE}", id="once more"),
        pytest.param(
            *([[("a", 4), ("a", 3)], [("a", 3), ("a", 4)]], 0, f"replica 0 {BACKWARD_OF_A}, replica 1 {BACKWARD_OF_A}"),
            id="backward in another order",
        ),
        pytest.param([[("a", 4)], []], 0, f"replica 0 {BACKWARD_OF_A}, replica 1 {NONE}", id="no backward"),
    ],
)
def test_where_replicas_go_different_ways_one_raises_an_error_and_the_others_go_on(
    names: list[Any], raises: int, ways: str
) -> None:
    results = run(*(gathers(*each) for each in names))
    error = results.pop(raises)
    assert isinstance(error, RuntimeError)
    assert f"but they differ: {ways}. Call the same batch norms" in str(error)
    assert all(isinstance(result, list) for result in results)


def test_after_a_failure_the_others_go_on_with_their_own_values() -> None:
    """Those that wait, and those that come later."""

    def fails(exchange: Exchange, index: int) -> None:
        exchange.all_gather(index, Request(StatisticsOfBatchNorm, "a", index))
        raise MemoryError

    first, failure, last = run(gathers("a", "b", "c"), fails, gathers("a", "d"))
    assert (first, last) == ([{0: 0, 1: 1, 2: 2}, {0: 0}, {0: 0}], [{0: 0, 1: 1, 2: 2}, {2: 2}])
    assert isinstance(failure, MemoryError)


def test_a_replica_that_ends_while_it_waits_submits_nothing() -> None:
    """Ctrl-C interrupts replica 0; its request must not complete an all-gather."""
    responses: list[Response] = []
    exchange = Exchange(3)
    exchange.submit(0, Request(StatisticsOfBatchNorm, "a", 0), responses.append)
    exchange.withdraw(0, failed=True)
    exchange.submit(1, Request(StatisticsOfBatchNorm, "a", 1), responses.append)
    assert exchange.failed
    assert [response.values for response in responses if not isinstance(response, str)] == [{1: 1}]
