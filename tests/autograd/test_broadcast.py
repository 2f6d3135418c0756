"""Parameters broadcast to replicas in memory of their own, and gradients reduced: in buckets, in an order that repeats.

The replicas are on the CPU with `separate_memory=True`; tests/contract/ runs the engines' whole contract so.
"""

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.late_copies import send_late
from manyhands import DataParallel, data_parallel
from manyhands.autograd import broadcast
from manyhands.autograd.reducer import NOTHING_EARLY
from manyhands.engines.threads import ThreadsEngine
from manyhands.runtime.buckets import buckets_of
from manyhands.runtime.streams import Copies

CPU = torch.device("cpu")
PARTS = (1e8, 1.0, -1e8)  # in float32 their sum depends on the order


def wrap(module: nn.Module, num_replicas: int) -> DataParallel:
    return DataParallel(module, ["cpu"] * num_replicas, engine=ThreadsEngine(separate_memory=True))


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of two of these tests' parameters."""
    monkeypatch.setattr(broadcast, "buckets_of", functools.partial(buckets_of, full_bytes=32))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The sizes of what is copied from now on, in order."""
    sizes: list[torch.Size] = []
    to_add = Copies.to_add

    def noting(self: Copies, tensor: torch.Tensor, reader: int) -> torch.Tensor:
        sizes.append(tensor.size())
        return to_add(self, tensor, reader)

    monkeypatch.setattr(Copies, "to_add", noting)
    return sizes


def leaves(num_parameters: int, num_replicas: int) -> list[list[torch.Tensor]]:
    return [[torch.zeros(4, requires_grad=True) for _ in range(num_replicas)] for _ in range(num_parameters)]


def add(leaf: torch.Tensor, value: float) -> None:
    (leaf * value).sum().backward()


def reduced_gradients(
    of_parameters: Sequence[Sequence[torch.Tensor]], backward: Callable[[], None], emit: Any = NOTHING_EARLY
) -> dict[int, list[float]]:
    totals: dict[int, torch.Tensor] = {}
    homes = [CPU] * len(of_parameters)
    with broadcast.reduce_coalesced(of_parameters, homes, totals, *emit, separate_memory=True):
        backward()
    assert all(leaf.grad is None for of_parameter in of_parameters for leaf in of_parameter)
    return {k: total.tolist() for k, total in totals.items()}


def test_a_forward_sends_buckets_and_not_tensors(copied: list[torch.Size]) -> None:
    """S11: one copy for the parameters, one for each dtype of buffers, one a replica for the gradients."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(20)))
    wrapped = wrap(model, 3)
    loss = wrapped(torch.randn(12, 4)).sum()
    num_float = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    # To two replicas: float32, and the int64 of num_batches_tracked, each at a multiple of 16 bytes.
    assert [size.numel() for size in copied] == [num_float] * 2 + [20 * 2] * 2
    copied.clear()
    loss.backward()
    assert [size.numel() for size in copied] == [sum(p.numel() for p in model.parameters())] * 2


def test_a_replicas_tensors_are_their_own(copied: list[torch.Size]) -> None:
    """R1: what a module writes into one parameter is no write into another that came in the same bucket."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            with torch.no_grad():
                self.second.bias.add_(1)
            return self.second(y)

    torch.manual_seed(0)
    model = wrap(Writes(), 2)
    before = model.module.second.bias.detach().clone()
    x = torch.randn(6, 4)
    model(x).sum().backward()
    assert copied
    assert torch.equal(model.module.second.bias, before + 1)  # the first replica's
    with torch.no_grad():
        model.module.second.bias.copy_(before)
    gradients = [p.grad for p in model.module.parameters()]
    model.module.zero_grad()
    model.module(x).sum().backward()
    for mine, parameter in zip(gradients, model.module.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_a_buffer_that_the_first_replica_writes_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: the others get what it was before the forward, also where it is the only one of its kind."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            written.set()
            return x * self.calls

    written = threading.Event()
    send_late(monkeypatch, not_before=written)
    model = wrap(Counts(), 3)
    for number in (1.0, 2.0):
        assert model(torch.ones(3)).tolist() == [number] * 3
        written.clear()


def test_tensors_are_aligned(copied: list[torch.Size]) -> None:
    """R1: kernels that load several entries at once ask for it, and take others where it is not so."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.weights = nn.ParameterList([torch.ones(3, 5), torch.ones(4, dtype=torch.float16), torch.ones(7)])
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += [p.data_ptr() % 16 for p in self.parameters()]
            return x * self.scale

    model = wrap(Odd(), 3)
    model(torch.ones(3))
    assert copied
    assert model.module.seen == [0] * 4 * 3


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("arrivals", list(itertools.permutations(range(3))))
def test_the_sum_is_made_in_replica_order(arrivals: tuple[int, ...]) -> None:
    """N1: in whatever order the replicas finish."""
    of_parameters = leaves(3, 3)

    def backward() -> None:
        for replica in arrivals:
            for of_parameter in reversed(of_parameters):
                add(of_parameter[replica], PARTS[replica])

    expected = (torch.tensor(PARTS[0]) + PARTS[1] + PARTS[2]).item()
    assert reduced_gradients(of_parameters, backward) == dict.fromkeys(range(3), [expected] * 4)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("arrivals", sorted(set(itertools.permutations([0, 0, 1, 1, 2]))))
def test_a_leaf_that_receives_twice(arrivals: tuple[int, ...]) -> None:
    """N1: first contributions in replica order, then second ones."""
    values = {0: [1e8, 3.0], 1: [1.0, -1e8], 2: [5.0]}
    of_parameters = leaves(1, 3)

    def backward() -> None:
        for replica in arrivals:
            add(of_parameters[0][replica], values[replica].pop(0))

    expected = torch.zeros(())
    for value in (1e8, 1.0, 5.0, 3.0, -1e8):
        expected = expected + value
    assert reduced_gradients(of_parameters, backward) == {0: [expected.item()] * 4}


@pytest.mark.usefixtures("small_buckets")
def test_a_bucket_leaves_while_backward_runs(copied: list[torch.Size]) -> None:
    """N10: the last parameters first, when the bucket is full; and it is given away when it has come from all."""
    of_parameters = leaves(4, 2)
    reduced: list[tuple[int, list[float]]] = []

    def backward() -> None:
        add(of_parameters[3][1], 1.0)
        assert not copied
        add(of_parameters[2][1], 1.0)
        assert copied == [(8,)]
        add(of_parameters[3][0], 1.0)
        assert not reduced
        add(of_parameters[2][0], 1.0)
        assert reduced == [(3, [2.0] * 4)]
        add(of_parameters[0][1], 1.0)

    emit = (lambda k, total: reduced.append((k, total.tolist()))), {1, 3}
    assert reduced_gradients(of_parameters, backward, emit) == {2: [2.0] * 4, 0: [1.0] * 4}


def test_replicas_without_a_gradient(copied: list[torch.Size]) -> None:
    """N2: what is missing is neither waited for nor made up, and does not travel."""
    of_parameters = leaves(3, 3)

    def backward() -> None:
        add(of_parameters[0][2], 2.0)
        add(of_parameters[0][1], 1.0)
        add(of_parameters[2][0], 5.0)

    assert reduced_gradients(of_parameters, backward) == {0: [3.0] * 4, 2: [5.0] * 4}
    assert copied == [(4,), (4,)]


def test_gradients_in_the_memory_of_another_are_left_as_they_are() -> None:
    """N1: a gradient can be what the caller has given to backward."""
    given = torch.ones(4)
    of_parameters = leaves(2, 2)

    def backward() -> None:
        for replica in range(2):
            a, b = (of_parameter[replica] for of_parameter in of_parameters)
            (a.view(-1) + b.view(-1)).backward(given)

    assert reduced_gradients(of_parameters, backward) == {0: [2.0] * 4, 1: [2.0] * 4}
    assert given.tolist() == [1.0] * 4


def test_a_backward_that_fails_leaves_nothing() -> None:
    of_parameters = leaves(1, 2)

    def backward() -> None:
        add(of_parameters[0][1], 1.0)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        reduced_gradients(of_parameters, backward)
    add(of_parameters[0][0], 1.0)
    assert of_parameters[0][0].grad is not None  # no hook is left


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_layers_of_all_kinds(sparse: bool) -> None:
    """N1, N2: reentrant checkpoints, embeddings with sparse gradients, tied weights, one that is not used."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 4, sparse=sparse)
            self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.inner = nn.Linear(4, 4)
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.inner.weight
            self.unused = nn.Linear(4, 4)
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            x = self.embedding(rows) * self.frozen
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True).tanh()
            x = self.conv(x[:, None, None]).mean((2, 3)) + self.empty.sum()
            return self.tied(x)

    torch.manual_seed(0)
    plain = Mixed().double()
    wrapped = wrap(copy.deepcopy(plain), 3)
    rows = torch.randint(7, (11,))
    outputs = [module(rows) for module in (plain, wrapped)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.pow(2).sum().backward()
    for (name, mine), theirs in zip(wrapped.module.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert mine.grad.is_sparse == theirs.grad.is_sparse
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


def test_simulated_accelerators(sim: list[torch.device]) -> None:
    """A12: parameters go to the other devices, and gradients come back to the module's."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double().to(sim[0])
    wrapped = DataParallel(copy.deepcopy(plain), [0, 1, 2])
    x = torch.randn(9, 4, dtype=torch.float64, device=sim[0])
    data_parallel(plain, x, [0, 1, 2]).pow(2).sum().backward()
    wrapped(x).pow(2).sum().backward()
    for mine, theirs in zip(wrapped.module.parameters(), plain.parameters(), strict=True):
        assert mine.grad.device == sim[0]
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad.cpu())
