"""Sums made during backward: the right number, in an order that repeats, and soon."""

import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands import DataParallel
from manyhands.autograd.reducer import reduce_early, sum_in_place

LARGE = 1 << 14  # this many float32 numbers are worth summing early
PARTS = (1e8, 1.0, -1e8)  # in float32 their sum depends on the order


def leaves(count: int, size: int = LARGE) -> list[torch.Tensor]:
    return [torch.zeros(size, requires_grad=True) for _ in range(count)]


def give(leaf: torch.Tensor, value: float) -> None:
    (leaf * value).sum().backward()


@pytest.mark.parametrize("arrivals", list(itertools.permutations(range(3))))
def test_the_sum_is_made_in_replica_order(arrivals: tuple[int, ...]) -> None:
    """N1: whoever is first."""
    of_tensor = leaves(3)
    with reduce_early([of_tensor]):
        for replica in arrivals:
            give(of_tensor[replica], PARTS[replica])
            assert of_tensor[replica].grad is None
    expected = torch.tensor(PARTS[0]) + PARTS[1] + PARTS[2]
    assert torch.equal(of_tensor[0].grad, expected.expand(LARGE))
    assert [leaf.grad for leaf in of_tensor[1:]] == [None, None]


@pytest.mark.parametrize("arrivals", sorted(set(itertools.permutations([0, 0, 1, 1, 2]))))
def test_a_leaf_that_receives_twice(arrivals: tuple[int, ...]) -> None:
    """N1: first contributions in replica order, then second ones."""
    values = {0: [1e8, 3.0], 1: [1.0, -1e8], 2: [5.0]}
    of_tensor = leaves(3)
    with reduce_early([of_tensor]):
        for replica in arrivals:
            give(of_tensor[replica], values[replica].pop(0))
    expected = torch.zeros(())
    for value in (1e8, 1.0, 5.0, 3.0, -1e8):
        expected = expected + value
    assert torch.equal(of_tensor[0].grad, expected.expand(LARGE))


def test_gradients_go_as_soon_as_they_are_added() -> None:
    """N10"""
    of_tensor = leaves(3)
    gone: list[weakref.ref[torch.Tensor]] = []
    for leaf in of_tensor:
        leaf.register_post_accumulate_grad_hook(lambda leaf: gone.append(weakref.ref(leaf.grad)))
    with reduce_early([of_tensor]):
        give(of_tensor[0], 1.0)
        give(of_tensor[2], 1.0)
        assert [reference() is None for reference in gone] == [False, False]  # the sum; one that waits for the second
        give(of_tensor[1], 1.0)
        assert [reference() is None for reference in gone] == [False, True, True]
    assert of_tensor[0].grad is gone[0]()


def test_replicas_without_a_gradient() -> None:
    """N2: they hold nothing up; where none has one there is none."""
    some, none = leaves(3), leaves(2)
    with reduce_early([some, none]):
        give(some[2], 2.0)
        give(some[1], 1.0)
    assert torch.equal(some[0].grad, torch.full((LARGE,), 3.0))
    assert [leaf.grad for leaf in none] == [None, None]


def test_what_is_left_alone() -> None:
    """Small tensors, tensors that one replica has, and leaves on several devices."""
    small, single = leaves(2, size=3), [*leaves(1), None]
    elsewhere = [torch.zeros(LARGE, device=device, requires_grad=True) for device in ("cpu", "meta")]
    with reduce_early([small, single, elsewhere]):
        for leaf in (*small, single[0], *elsewhere):
            give(leaf, 1.0)
            assert leaf.grad is not None
    assert all(leaf.grad is not None for leaf in (*small, single[0], *elsewhere))


def test_hooks_go_with_the_block() -> None:
    """N10: a graph that is kept is walked again, with hooks of its own; also after an error."""
    of_tensor = leaves(2)

    def fail() -> None:
        with reduce_early([of_tensor]):
            give(of_tensor[1], 1.0)
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        give(of_tensor[1], 1.0)
        assert of_tensor[1].grad is not None
        of_tensor[1].grad = None


def test_a_hook_that_takes_the_gradient_away() -> None:
    of_tensor = leaves(2)
    of_tensor[0].register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    with reduce_early([of_tensor]):
        give(of_tensor[0], 1.0)
        give(of_tensor[1], 2.0)
    assert torch.equal(of_tensor[0].grad, torch.full((LARGE,), 2.0))


def test_gradients_in_the_callers_memory_are_not_written_into() -> None:
    """N1: a leaf's gradient may be a view of what was given to backward, or share memory with another leaf's."""
    a, b = leaves(2), leaves(2)
    given = [torch.full((LARGE,), 1.0), torch.full((LARGE,), 2.0)]
    with reduce_early([a, b]):
        for i in range(2):
            (a[i].view(-1) + b[i].view(-1)).backward(given[i])
    assert [tensor[0].item() for tensor in given] == [1.0, 2.0]
    assert torch.equal(a[0].grad, torch.full((LARGE,), 3.0))
    a[0].grad.zero_()
    assert torch.equal(b[0].grad, torch.full((LARGE,), 3.0))


def test_sum_in_place() -> None:
    """In the memory of the first, unless somebody else has that too."""
    first = torch.ones(3)
    kept = first.data_ptr()
    total = sum_in_place([first, torch.ones(3), torch.ones(3)])
    assert total.data_ptr() == kept
    assert torch.equal(total, torch.full((3,), 3.0))
    whole = torch.ones(6)
    view = whole[:3]
    assert torch.equal(sum_in_place([view, torch.ones(3)]), torch.full((3,), 2.0))
    assert torch.equal(whole, torch.ones(6))


class Wide(nn.Module):
    """Weights of 256 KiB; one layer is used twice, inside reentrant checkpoints and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(checkpoint(self.a, self.b(x), use_reentrant=True))
        return checkpoint(self.a, self.a(x), use_reentrant=True)


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
@pytest.mark.parametrize("make", [Wide, lambda: nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))])
def test_large_layers(make: Callable[[], nn.Module], num_replicas: int) -> None:
    """N1, R13: the plain module's gradients, the same bits every time, for a kept graph too."""
    torch.manual_seed(0)
    model = make()
    x = torch.randn(13, 256)
    model(x).pow(2).mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    wrapped = DataParallel(model, ["cpu"] * num_replicas)
    seen = []
    for _ in range(10):
        model.zero_grad()
        loss = wrapped(x).pow(2).mean()
        if make is not Wide:  # reentrant checkpoints can be walked once only
            loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
        seen.append([parameter.grad for parameter in model.parameters()])
    for mine, theirs in zip(seen[0], expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for gradients in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients, seen[0], strict=True))
