"""Gradients summed during backward: the right number, in an order that repeats, and soon.

Replicas share the parameters' memory, or have memory of their own, in buckets (tests/autograd/test_broadcast.py).
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.modules import Calls
from unisono import DataParallel
from unisono.autograd import broadcast, reducer
from unisono.autograd.reducer import LeafHooks, Reducer, RunningSums, sums_of
from unisono.runtime import devices
from unisono.runtime.buckets import buckets_of

LARGE = 1 << 14  # this many float32 numbers are worth summing early
CPU = torch.device("cpu")

Leaves = Sequence[Sequence[torch.Tensor]]
Reduce = Callable[[Leaves, Callable[[], None]], dict[int, list[float]]]


def leaves(count: int, size: int = LARGE) -> list[torch.Tensor]:
    return [torch.zeros(size, requires_grad=True) for _ in range(count)]


def give(leaf: torch.Tensor, value: float) -> None:
    (leaf * value).sum().backward()


# ---- in one memory, and in several ---------------------------------------------------------------


def summed(leaves: Leaves, sums: AbstractContextManager[Any], backward: Callable[[], None]) -> dict[int, torch.Tensor]:
    """Return the sums of what a backward adds to `leaves[k][replica]`, by k."""
    with sums as reducers, ExitStack() as stack:
        for i, of_replica in enumerate(zip(*leaves, strict=True)):
            stack.enter_context(LeafHooks(dict(enumerate(of_replica))).handing_to(reducers.of(i)))
        backward()
        return reducers.end()


@pytest.fixture(params=["running", "coalesced"])
def reduce(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reduce:
    """Sum what a backward adds to `leaves[k][replica]`; return the different entries of each sum, by k."""
    monkeypatch.setattr(broadcast, "buckets_of", partial(buckets_of, full_bytes=2 * 4 * LARGE))
    monkeypatch.setattr(devices, "_has_separate_memory", request.param == "coalesced")

    def reduce(leaves: Leaves, backward: Callable[[], None]) -> dict[int, list[float]]:
        num_replicas = len(leaves[0])
        if request.param == "running":
            totals = summed(leaves, nullcontext(RunningSums(num_replicas, range(len(leaves)))), backward)
        else:
            plan = broadcast.ReduceBuckets([of_tensor[0] for of_tensor in leaves])
            reduce = broadcast.CoalescedReduce(plan, [CPU] * num_replicas)
            totals = summed(leaves, reduce, backward)
        assert all(leaf.grad is None for of_tensor in leaves for leaf in of_tensor)
        return {k: total.unique().tolist() for k, total in totals.items()}

    return reduce


ONCE = [[1e8], [1.0], [-1e8]]  # what each replica adds; in float32 the sums depend on the order
TWICE = [[1e8, 3.0], [1.0, -1e8], [5.0]]
ARRIVALS = [(ONCE, order) for order in itertools.permutations(range(3))]
ARRIVALS += [(TWICE, order) for order in sorted(set(itertools.permutations([0, 0, 1, 1, 2])))]


@pytest.mark.parametrize(("values", "arrivals"), ARRIVALS, ids=str)
def test_the_sum_is_made_in_replica_order(reduce: Reduce, values: list[list[float]], arrivals: tuple[int, ...]) -> None:
    """N1: whichever replica is first; where leaves receive twice, first contributions, then second ones."""
    of_tensors = [leaves(3) for _ in range(3)]
    left = [iter(of_replica) for of_replica in values]

    def backward() -> None:
        for replica in arrivals:
            value = next(left[replica])
            for of_tensor in reversed(of_tensors):
                give(of_tensor[replica], value)

    in_order = [value for nth in itertools.zip_longest(*values) for value in nth if value is not None]
    expected = sum(torch.tensor(in_order)).item()
    assert reduce(of_tensors, backward) == {k: [expected] for k in range(3)}


def test_replicas_without_a_gradient(reduce: Reduce) -> None:
    """N2: they hold nothing up; where none has one there is none."""
    of_tensors = [leaves(3) for _ in range(3)]

    def backward() -> None:
        give(of_tensors[0][2], 2.0)
        give(of_tensors[0][1], 1.0)
        give(of_tensors[2][0], 5.0)

    assert reduce(of_tensors, backward) == {0: [3.0], 2: [5.0]}


def test_gradients_in_the_callers_memory_are_not_written_into(reduce: Reduce) -> None:
    """N1: a leaf's gradient may be a view of what was given to backward, or share memory with another leaf's."""
    a, b = leaves(2), leaves(2)
    given = [torch.full((LARGE,), 1.0), torch.full((LARGE,), 2.0)]

    def backward() -> None:
        for i in range(2):
            (a[i].view(-1) + b[i].view(-1)).backward(given[i])

    assert reduce([a, b], backward) == {0: [3.0], 1: [3.0]}
    assert [tensor.unique().item() for tensor in given] == [1.0, 2.0]


def test_hooks_go_with_the_block(reduce: Reduce) -> None:
    """N10: a kept graph runs backward again, with hooks of its own; also after an error."""
    of_tensor = leaves(2)

    def backward() -> None:
        give(of_tensor[1], 1.0)
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            reduce([of_tensor], backward)
        give(of_tensor[1], 1.0)
        assert of_tensor[1].grad is not None
        of_tensor[1].grad = None


def test_a_hook_that_takes_the_gradient_away(reduce: Reduce) -> None:
    of_tensor = leaves(2)
    of_tensor[0].register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))

    def backward() -> None:
        give(of_tensor[0], 1.0)
        give(of_tensor[1], 2.0)

    assert reduce([of_tensor], backward) == {0: [2.0]}


# ---- in one memory -------------------------------------------------------------------------------


def test_gradients_go_as_soon_as_they_are_added() -> None:
    """N10"""
    of_tensor = leaves(3)
    gone: list[weakref.ref[torch.Tensor]] = []
    for leaf in of_tensor:
        leaf.register_post_accumulate_grad_hook(lambda leaf: gone.append(weakref.ref(leaf.grad)))

    def backward() -> None:
        give(of_tensor[0], 1.0)
        give(of_tensor[2], 1.0)
        assert [reference() is None for reference in gone] == [False, False]  # the sum; one that waits for the second
        give(of_tensor[1], 1.0)
        assert [reference() is None for reference in gone] == [False, True, True]

    totals = summed([of_tensor], nullcontext(RunningSums(3, [0])), backward)
    assert totals[0] is gone[0]()


def test_what_is_left_alone() -> None:
    """Small gradients stay in `.grad` until they are summed all at once."""
    small, large = leaves(2, size=3), leaves(2)

    def backward() -> None:
        for leaf in (*small, *large):
            give(leaf, 1.0)
            assert (leaf.grad is None) == (len(leaf) == LARGE)

    assert list(summed([small, large], nullcontext(RunningSums(2, [1])), backward)) == [1]
    (total,) = sums_of([[leaf.grad] for leaf in small])
    assert torch.equal(total, torch.full((3,), 2.0))


def test_sums_in_bulk() -> None:
    """N1, N2: in replica order, whatever is missing or sparse; nothing that was given is written into."""
    sparse = torch.eye(2).to_sparse()
    given = [
        [torch.full((2,), 1e8), None, torch.ones(2, 2), sparse, None],
        [torch.ones(2), torch.ones(1), sparse, sparse, None],
        [torch.full((2,), -1e8), None, None, torch.ones(2, 2), None],
    ]
    before = [[grad if grad is None else grad.clone() for grad in of_replica] for of_replica in given]
    totals = sums_of([[*of_replica] for of_replica in given])
    expected = [torch.zeros(2), torch.ones(1), torch.ones(2, 2) + torch.eye(2), torch.ones(2, 2) + 2 * torch.eye(2)]
    assert totals.pop() is None
    for total, value in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, value, rtol=0, atol=0)
    for of_replica, as_before in zip(given, before, strict=True):
        for grad, value in zip(of_replica, as_before, strict=True):
            assert grad is value is None or torch.equal(grad.to_dense(), value.to_dense())


def wide(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Use one layer twice, inside reentrant checkpoints and outside of them."""
    x = torch.tanh(checkpoint(model.a, model.b(x), use_reentrant=True))
    return checkpoint(model.a, model.a(x), use_reentrant=True)


@pytest.mark.parametrize("num_replicas", [2, 5])
def test_large_layers(num_replicas: int) -> None:
    """N1, R13: the plain module's gradients, and the same bits every time."""
    model = Calls(wide, a=nn.Linear(256, 256), b=nn.Linear(256, 256))  # weights of 256 KiB
    x = torch.randn(13, 256)
    model(x).pow(2).mean().backward()
    seen = [[parameter.grad for parameter in model.parameters()]]
    wrapped = DataParallel(model, ["cpu"] * num_replicas)
    for _ in range(5):
        model.zero_grad()
        wrapped(x).pow(2).mean().backward()
        seen.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(seen[1], seen[0])
    for gradients in seen[2:]:
        torch.testing.assert_close(gradients, seen[1], rtol=0, atol=0)


def test_gradients_of_branches_on_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: all that a reducer does with them is on one stream; tests/runtime/test_streams.py has what it waits for."""
    current: list[Any] = ["main"]
    seen: list[tuple[int, Any]] = []

    @contextmanager
    def queued_on(stream: Any, gradient: torch.Tensor) -> Iterator[None]:
        before, current[0] = current[0], stream
        yield
        current[0] = before

    class Noting(Reducer):
        numbers = range(2)

        def add(self, number: int, gradient: torch.Tensor) -> bool:
            seen.append((number, current[0]))
            return True

    monkeypatch.setattr("unisono.runtime.devices.has_streams", lambda device: True)
    monkeypatch.setattr(reducer, "current_stream", lambda device: current[0])
    monkeypatch.setattr(reducer, "queued_on", queued_on)
    of_main, of_side = leaves(2, size=3)
    with LeafHooks({0: of_main, 1: of_side}).handing_to(Noting()):
        give(of_main, 1.0)
        current[0] = "side"
        give(of_side, 1.0)
        assert current == ["side"]
    assert seen == [(0, "main"), (1, "main")]
