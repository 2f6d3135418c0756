"""Parameters broadcast to replicas in memory of their own, and gradients reduced: in buckets, in an order that repeats.

The replicas are on the CPU, in separate memory; tests/contract/ runs the whole contract so.
"""

import copy
import functools
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from helpers.late_copies import send_late
from helpers.modules import Calls
from helpers.twins import assert_same_gradients
from unisono import DataParallel
from unisono.autograd import broadcast
from unisono.autograd.reducer import LeafHooks
from unisono.runtime.buckets import buckets_of
from unisono.runtime.streams import Copies
from unisono.testing import separate_memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _separate_memory() -> Iterator[None]:
    with separate_memory():
        yield


def wrap(module: nn.Module, num_replicas: int) -> DataParallel:
    return DataParallel(module, ["cpu"] * num_replicas)


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

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = module.first(x)
        with torch.no_grad():
            module.second.bias.add_(1)
        return module.second(y)

    plain = Calls(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    model = wrap(copy.deepcopy(plain), 2)
    x = torch.randn(6, 4)
    for module in (plain, model):
        module(x).sum().backward()
    assert copied
    assert torch.equal(model.module.second.bias, plain.second.bias)  # the first replica's
    assert_same_gradients(model.module, plain, rtol=1e-5, atol=1e-5)


def test_a_buffer_that_the_first_replica_writes_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: the others get what it was before the forward, also where it is the only one of its kind."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.calls.add_(1)
        written.set()
        return x * module.calls

    written = threading.Event()
    send_late(monkeypatch, not_before=written)
    model = wrap(Calls(forward, calls=nn.Buffer(torch.zeros((), dtype=torch.int64))), 3)
    for number in (1.0, 2.0):
        assert model(torch.ones(3)).tolist() == [number] * 3
        written.clear()


def test_tensors_are_aligned(copied: list[torch.Size]) -> None:
    """R1: kernels that load several entries at once ask for it, and take others where it is not so."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.seen.extend(p.data_ptr() % 16 for p in module.parameters())
        return x * module.scale

    weights = nn.ParameterList([torch.ones(3, 5), torch.ones(4, dtype=torch.float16), torch.ones(7)])
    model = wrap(Calls(forward, scale=nn.Parameter(torch.ones(())), weights=weights, seen=[]), 3)
    model(torch.ones(3))
    assert copied
    assert model.module.seen == [0] * 4 * 3


def test_a_bucket_leaves_while_backward_runs(copied: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    """N10, N2: the last parameters first, when a bucket is full; summed when it has arrived from all replicas.

    What is missing is not waited for, and is not copied.
    """
    monkeypatch.setattr(broadcast, "buckets_of", functools.partial(buckets_of, full_bytes=32))  # of two parameters
    leaves = [[torch.zeros(4, requires_grad=True) for _ in range(2)] for _ in range(4)]
    emitted: list[tuple[int, list[float]]] = []

    def add(parameter: int, replica: int) -> None:
        leaves[parameter][replica].sum().backward()

    def emit(parameter: int, total: torch.Tensor) -> None:
        emitted.append((parameter, total.tolist()))

    plan = broadcast.ReduceBuckets([first for first, _ in leaves])
    hooks = [LeafHooks(dict(enumerate(of_replica))) for of_replica in zip(*leaves, strict=True)]
    reduce = broadcast.CoalescedReduce(plan, [CPU] * 2, emit, {1, 3})
    with reduce, hooks[0].handing_to(reduce.of(0)), hooks[1].handing_to(reduce.of(1)):
        add(3, replica=1)
        assert not copied
        add(2, replica=1)
        assert copied == [(8,)]
        add(3, replica=0)
        assert not emitted
        add(2, replica=0)
        assert emitted == [(3, [2.0] * 4)]
        add(0, replica=1)
        totals = reduce.end()
    assert {k: total.tolist() for k, total in totals.items()} == {2: [2.0] * 4, 0: [1.0] * 4}
    assert copied == [(8,), (4,)]


def test_parameters_outside_buckets() -> None:
    """N1, N2, R4: with sparse gradients, without entries, frozen, not used."""

    def forward(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return module.embedding(rows) * module.frozen + module.empty.sum()

    frozen = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
    embedding, empty = nn.Embedding(7, 4, sparse=True), nn.Parameter(torch.empty(0, 3))
    plain = Calls(forward, embedding=embedding, unused=nn.Linear(4, 4), empty=empty, frozen=frozen).double()
    model = wrap(copy.deepcopy(plain), 3)
    rows = torch.randint(7, (11,))
    for module in (plain, model):
        module(rows).pow(2).sum().backward()
    assert_same_gradients(model.module, plain)
