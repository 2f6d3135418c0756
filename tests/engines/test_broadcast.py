"""Parameters broadcast to replicas in memory of their own, and gradients reduced: in buckets, in an order that repeats.

The replicas are on the CPU, in separate memory; tests/contract/ runs the whole contract so.
"""

import collections
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_same_gradients
from helpers.late_copies import send_late
from helpers.modules import Calls
from unisono import DataParallel
from unisono.runtime.buckets import Bucket
from unisono.runtime.streams import Copies
from unisono.runtime.thread_pool import replica_path
from unisono.testing import separate_memory


@pytest.fixture(autouse=True)
def _separate_memory() -> Iterator[None]:
    with separate_memory():
        yield


def wrap(module: nn.Module, num_replicas: int) -> DataParallel:
    return DataParallel(module, ["cpu"] * num_replicas, sync_batch_norm=False)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The sizes of what is copied from now on, in order."""
    sizes: list[torch.Size] = []
    to, fill = Copies.to, Copies.fill

    def noting(self: Copies, tensor: torch.Tensor, reader: int) -> torch.Tensor:
        sizes.append(tensor.size())
        return to(self, tensor, reader)

    def noting_all(self: Copies, memories: Any, values: list[torch.Tensor], *others: Any) -> None:
        sizes.extend(value.size() for _ in memories for value in values)
        fill(self, memories, values, *others)

    monkeypatch.setattr(Copies, "to", noting)
    monkeypatch.setattr(Copies, "fill", noting_all)
    return sizes


def test_a_forward_sends_buckets_and_not_tensors(copied: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: one copy for the parameters, one for each dtype of buffers, one a replica for the gradients."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(20)))
    wrapped = wrap(model, 3)
    loss = wrapped(torch.randn(12, 4)).sum()
    num_float = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    # To two replicas: float32, and the int64 of num_batches_tracked, each at a multiple of 16 bytes.
    assert [size.numel() for size in copied] == [num_float, 20 * 2] * 2
    flats, flat = list[int](), Bucket.flat

    def noting(self: Bucket, tensors: Any) -> torch.Tensor:
        flats.append(self.num_entries)
        return flat(self, tensors)

    monkeypatch.setattr(Bucket, "flat", noting)
    loss.backward()
    assert flats == [sum(p.numel() for p in model.parameters())] * 3


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


# ---- the replicas' memory stays ------------------------------------------------------------------


def addresses_of(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in module.state_dict().values()]


class NotesAddresses(nn.Module):
    """Two layers and buffers; notes where its tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted[replica_path()].append(addresses_of(self))
        return self.second(self.norm(self.first(x)).relu())


noted: dict[tuple[int, ...], list[list[int]]] = collections.defaultdict(list)  # by replica


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    noted.clear()


def test_addresses_stay_from_step_to_step_and_are_those_of_all_kinds_of_forward() -> None:
    """N10: training, evaluation and inference share one memory, which is made once."""
    model = wrap(NotesAddresses(), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(12, 4)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
    for replica in ((1,), (2,)):
        assert len(noted[replica]) == 9
        assert all(addresses == noted[replica][0] for addresses in noted[replica])


def test_an_evaluation_between_forward_and_backward_has_other_memory() -> None:
    """R8: the graph still needs the parameters that it has saved."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = wrap(copy.deepcopy(plain), 3)
    x = torch.randn(12, 4).double()
    for _ in range(3):
        for module in (plain, model):
            module.zero_grad()
            loss = module(x).square().sum()
            with torch.no_grad():
                before = [p.clone() for p in module.parameters()]
                for p in module.parameters():
                    p.data.mul_(2)
                evaluated = module(x)
                for p, value in zip(module.parameters(), before, strict=True):
                    p.data.copy_(value)
            loss.backward()
            if module is plain:
                expected = evaluated
        torch.testing.assert_close(evaluated, expected)
        assert_same_gradients(model.module, plain)


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_written_through_data_is_seen(grad: bool) -> None:
    """R8: no version counter tells of it."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double().eval()
    model = wrap(copy.deepcopy(plain), 3)
    x = torch.randn(12, 4).double()
    for number in range(4):
        results = []
        for module in (plain, model):
            versions = [p._version for p in module.parameters()]
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data.add_(number)
            assert [p._version for p in module.parameters()] == versions
            with torch.set_grad_enabled(grad):
                y = module(x)
            if grad:
                module.zero_grad()
                y.square().sum().backward()
            results.append(y.detach())
        torch.testing.assert_close(*results)
        if grad:
            assert_same_gradients(model.module, plain)


def test_a_replica_that_forward_has_written_into_has_the_parameters_in_the_next_one() -> None:
    """R8: the live values. After the first step nothing tells of a write through `.data`; others are an error."""
    has_run: list[int] = []

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if has_run and replica_path() != (0,):  # which has the live parameter's memory
            module.weight.data.mul_(2)
            return x * module.weight / 2
        return x * module.weight

    model = wrap(Calls(forward, weight=nn.Parameter(torch.ones(4))), 3)
    for number in range(1, 5):
        y = model(torch.ones(6, 4))
        assert y.eq(number).all()
        y.sum().backward()
        model.module.weight.data.add_(1)
        has_run.append(number)


def write_in_place(parameters: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)


def write_through_data(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.data.add_(1)


def write_nothing(parameters: list[torch.Tensor]) -> None:
    pass


@pytest.mark.parametrize("later", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", [write_in_place, write_through_data, write_nothing])
def test_a_graph_that_outlives_its_step_is_right_or_an_error(write: Any, later: Any) -> None:
    """R8: a later forward overwrites what a tensor that forward has put aside needs in backward."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and replica_path() != (0,):
            h = x.detach().requires_grad_()
            kept.append((module.first(h).sum(), h))
        return module.second(module.first(x))

    module = Calls(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    model, x = wrap(module, 2), torch.randn(6, 4)
    for _ in range(2):
        kept.clear()
        model(x).sum().backward()
        (aside, h), weight = kept.pop(), module.first.weight.detach().clone()
        write([*module.parameters()])
        (gradient,) = torch.autograd.grad(aside, h, retain_graph=True)  # nothing has been overwritten
        torch.testing.assert_close(gradient, weight.sum(0).expand(3, 4))
        with later():
            model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(aside, h)


def test_forwards_that_wait_for_backward_have_memory_of_their_own() -> None:
    """R8, N10: and at most three are kept."""
    torch.manual_seed(0)
    plain = NotesAddresses().double().eval()
    model = wrap(copy.deepcopy(plain), 2)
    xs = torch.randn(5, 6, 4).double()
    for module in (plain, model):
        losses = []
        for x in xs:
            losses.append(module(x).square().sum())
        for loss in losses:
            loss.backward()
    assert_same_gradients(model.module, plain)
    assert len({addresses[0] for addresses in noted[1,]}) == len(xs)
    assert len(model._step_memory._pool._idle) == 3


def test_maps_copy_once(copied: list[torch.Size]) -> None:
    """N10"""
    model = wrap(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), 3)
    assert len([*model.map([torch.randn(2, 4)] * 9)]) == 9
    assert [size.numel() for size in copied] == [20 * 20] * 2
