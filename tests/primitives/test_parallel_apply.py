"""parallel_apply: module i to input i, all at once."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import parallel_apply, replicate, scatter


def test_outputs_are_in_order() -> None:
    """Different modules, any callables."""
    modules = [nn.Identity(), nn.Flatten(0), lambda x: -x]
    outputs = parallel_apply(modules, [torch.ones(2), torch.ones(2, 2), torch.ones(3)])
    assert [output.tolist() for output in outputs] == [[1.0] * 2, [1.0] * 4, [-1.0] * 3]


def test_calls_are_made_at_the_same_time() -> None:
    """Each in a thread of its own; the first in the caller's."""
    together = threading.Barrier(4)

    def call() -> int:
        together.wait(30)
        return threading.get_ident()

    idents = parallel_apply([call] * 4, [()] * 4)
    assert len(set(idents)) == 4
    assert idents[0] == threading.get_ident()


def describe(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def test_positional_and_keyword_inputs() -> None:
    """A tuple is the arguments; anything else the only one, as in torch; None for no keywords."""
    assert parallel_apply([describe] * 3, [(1, 2), 3, ()]) == [((1, 2), {}), ((3,), {}), ((), {})]
    assert parallel_apply([describe] * 2, [(), ()], [{"a": 1}, None]) == [((), {"a": 1}), ((), {})]
    assert parallel_apply([describe], [None]) == [((None,), {})]
    assert parallel_apply([describe], ["text"]) == [(("text",), {})]


def test_lengths_that_differ_are_refused() -> None:
    """Nothing is dropped silently."""
    with pytest.raises(ValueError, match="expected at least one"):
        parallel_apply([], [])
    with pytest.raises(ValueError, match="2 modules but 1 inputs"):
        parallel_apply([describe] * 2, [()])
    with pytest.raises(ValueError, match="2 modules but 3 kwargs_tup"):
        parallel_apply([describe] * 2, [(), ()], [{}, {}, {}])
    with pytest.raises(ValueError, match="1 modules but 2 devices"):
        parallel_apply([describe], [()], None, ["cpu", "cpu"])
    with pytest.raises(ValueError, match="no accelerator 99"):
        parallel_apply([describe], [()], None, [99])


def test_gradients_flow_through_the_verbs() -> None:
    """The verbs by hand, forward and backward, against the plain module."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    expected = plain(x)
    expected.pow(2).sum().backward()
    grads = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    shards = scatter(x, ["cpu"] * 3)
    outputs = parallel_apply(replicate(plain, ["cpu"] * 3), shards, None, ["cpu"] * 3)
    torch.testing.assert_close(torch.cat(outputs), expected)
    sum(output.pow(2).sum() for output in outputs).backward()
    for grad, parameter in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, grad)


class CodedError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_error_is_the_calls_own(which: int) -> None:
    """F1: the same object, with a note of replica and device."""
    error = CodedError(5, "text")

    def fails(x: torch.Tensor) -> torch.Tensor:
        if x[0] == which:
            raise error
        return x

    with pytest.raises(CodedError) as caught:
        parallel_apply([fails] * 3, [torch.full((2,), float(i)) for i in range(3)])
    assert caught.value is error
    assert error.__notes__ == [f"raised in replica {which} on cpu"]
    assert parallel_apply([nn.Identity()] * 3, [torch.ones(1)] * 3) == [torch.ones(1)] * 3


def test_the_lowest_replicas_error_with_the_others_in_its_notes() -> None:
    """F2"""

    def fails(number: int) -> None:
        raise [ValueError("one"), CodedError(7, "two"), KeyError("three")][number]

    with pytest.raises(ValueError, match="one") as caught:
        parallel_apply([fails] * 3, [(0,), (1,), (2,)])
    notes = "\n".join(caught.value.__notes__)
    for part in ("replica 0", "replica 1", "CodedError", "two", "replica 2", "KeyError", "three"):
        assert part in notes


def test_one_exception_object_raised_by_all() -> None:
    """F2: it is not reported as its own companion; raised again, its note is there once."""
    error = ValueError("shared")

    def fails() -> None:
        raise error

    for _ in range(2):
        with pytest.raises(ValueError, match="shared"):
            parallel_apply([fails] * 3, [()] * 3)
    assert error.__notes__ == ["raised in replica 0 on cpu"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_reach_the_caller(kind: type[BaseException]) -> None:
    """F3: and the next call works."""

    def interrupts(x: int) -> int:
        if x == 1:
            raise kind
        return x

    with pytest.raises(kind):
        parallel_apply([interrupts] * 2, [0, 1])
    assert parallel_apply([interrupts] * 2, [0, 2]) == [0, 2]


def test_the_thread_state_is_the_callers() -> None:
    """R14"""
    with torch.no_grad():
        assert parallel_apply([torch.is_grad_enabled] * 3, [()] * 3) == [False] * 3
    assert parallel_apply([torch.is_grad_enabled] * 3, [()] * 3) == [True] * 3


def test_a_failed_call_leaves_no_cycles() -> None:
    """N10, F1: what it held goes with the exception."""

    class Held:
        pass

    held: list[weakref.ref[Held]] = []

    def fails() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        raise ValueError("no")

    def once() -> bool:
        try:
            parallel_apply([fails] * 3, [()] * 3)
        except ValueError:
            return True
        return False

    assert once()
    parallel_apply([describe] * 3, [()] * 3)
    held.clear()
    gc.collect()
    gc.disable()
    try:
        assert once()
        parallel_apply([describe] * 3, [()] * 3)
        assert [reference() for reference in held] == [None] * 3
        assert gc.collect() == 0
    finally:
        gc.enable()
