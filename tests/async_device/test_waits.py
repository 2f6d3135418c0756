"""Waits between streams where the caller, or the module, has another one current: WAITS.md has all of them.

What has to be waited for stands behind a marker, so what does not wait for it is early each time.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from async_device import C, stream
from async_device.tools import BOTH, FIRST, SECOND, current
from helpers.modules import Calls
from helpers.ranks import own_devices, run_ranks
from unisono import DataParallel
from unisono.inference.lane_choice import LaneChoice
from unisono.runtime import devices, streams
from unisono.runtime.streams import capture_stream, copy_stream

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),  # as is meant
]


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    C.synchronize_all()


# torch has 32 streams, and gives them out again: one of the library's among them must not wait for a marker.
_sides = {device: itertools.cycle([torch.Stream(device) for _ in range(3)]) for device in BOTH}


def side_of(device: torch.device) -> torch.Stream:
    """Return another stream than last time, which waits for the current one."""
    side = next(_sides[device])
    side.wait_stream(current(device))
    return side


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Make another stream current than last time, which waits for the current one, and for which that one waits."""
    here, side = current(device), side_of(device)
    with stream(side):
        yield
    here.wait_stream(side)


def waits(marker: Any, device: torch.device) -> None:
    """Let the calling thread's stream on a device wait for a marker."""
    C.stream_waits(device.index, marker)


# ---- training -------------------------------------------------------------------------------------


def is_early(rank: int, how: str) -> list[tuple[bool, float]]:
    """Train on a rank; return of each step whether a gradient was there before it was computed, and its error."""
    (name,) = own_devices(rank)
    device, markers, found = torch.device(name), list[Any](), list[tuple[bool, float]]()

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = x * net.scale
        y.register_hook(lambda _: waits(markers[-1], device))
        return y

    net = Calls(forward, scale=nn.Parameter(torch.ones(8, dtype=torch.float64))).to(device)
    model, here = DataParallel(net, [device]), current(device)
    x = torch.full((4, 8), rank + 1.0, dtype=torch.float64, device=device)
    for step in range(3):
        markers.append(C.Marker())
        net.scale.grad = None
        if how == "in no_sync":
            with model.no_sync():
                with stream(side_of(device)):
                    loss = model(x).sum()
                loss.backward()
        elif how == "forward" or step == 0:
            with stream(side_of(device)):
                loss = model(x).sum()
            loss.backward()
        else:  # replicas that were made on another stream
            model(x).sum().backward()
        copy = net.scale.grad * 1
        early = here.query()
        markers[-1].set()
        expected = 4.0 * (rank + 1) if how == "in no_sync" else 6.0
        found.append((early, float((copy.cpu() - expected).abs().max())))
    return found


@pytest.mark.parametrize("how", ["forward", "first forward", "in no_sync"])
def test_gradients_of_ranks_with_forward_on_another_stream(how: str) -> None:
    """The all-reduce waited for nothing where a bucket has one contribution: one replica a rank."""
    for steps in run_ranks(2, is_early, how):
        assert steps == [(False, 0.0)] * 3


def on_the_copy_stream(rank: int) -> list[float]:
    """Run a forward on the stream that is the library's for copies; return the error of each gradient, and of a buffer.

    Rank 0's gradients, and what its checkpoint writes into the buffer, come late.
    """
    (name,) = own_devices(rank)
    device = torch.device(name)
    side = next(each for each in (torch.Stream(device) for _ in range(33)) if each == copy_stream(device))
    markers, found = list[Any](), list[float]()

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        def counted(x: Tensor) -> Tensor:
            if markers and rank == 0:
                waits(markers[0], device)
            net.count.add_(1.0)
            return x * net.scale

        output: Tensor = checkpoint(counted, x, use_reentrant=net.reentrant)
        return output

    x = torch.full((4, 8), rank + 1.0, dtype=torch.float64, device=device, requires_grad=True)
    for reentrant in (True, False):
        net = Calls(forward, scale=nn.Parameter(torch.ones(8, dtype=torch.float64))).to(device)
        net.register_buffer("count", torch.zeros((), device=device))
        net.reentrant, model = reentrant, DataParallel(net, [device])
        for step in range(1, 6):
            net.scale.grad = None
            with stream(side):
                loss = model(x).sum()
            markers.append(C.Marker())
            loss.backward()
            copy = net.scale.grad * 1
            markers.pop().set()
            found += [float((copy.cpu() - 6.0).abs().max()), float(net.count.cpu() - 2.0 * step)]
    return found


def test_ranks_with_forward_on_the_stream_for_copies() -> None:
    """The all-reduce did not wait for what was made there by the caller, nor buffers of rank 0 for its checkpoint."""
    assert run_ranks(2, on_the_copy_stream) == [[0.0] * 20] * 2


def test_the_librarys_streams_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device gives its 32 streams out in turn, also to others."""
    monkeypatch.setattr(streams, "_streams", {})
    first = copy_stream(FIRST)
    for _ in range(31):
        assert torch.Stream(FIRST) != first
    assert capture_stream(FIRST) != first


def test_grad_of_a_backward_inside_forward_on_another_stream() -> None:
    """`.grad` is there for the stream from which backward was called."""
    marker, early, looks = C.Marker(), list[bool](), []

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        if not looks:
            return x * net.scale
        y = x * net.scale + x * 2 * net.scale
        y.register_hook(lambda _: waits(marker, x.device))
        side = side_of(x.device)
        with stream(side):
            y.sum().backward()
            net.found[x.device.index] = net.scale.grad * 1
        early.append(side.query())
        current(x.device).wait_stream(side)
        return x * net.scale

    net = Calls(forward, scale=nn.Parameter(torch.ones(8)), found={}).to(FIRST)
    model, x = DataParallel(net, BOTH), torch.ones(12, 8, device=FIRST)
    for _ in range(4):  # the first steps look at values
        model(x).sum().backward()
    looks.append(True)
    try:
        with stream(side_of(FIRST)):
            model(x)
    finally:
        marker.set()
    C.synchronize_all()
    assert not any(early)
    assert {i: float(each.cpu().sum()) for i, each in net.found.items()} == {0: 6 * 3 * 8.0, 1: 6 * 3 * 8.0}


class OfSubclass(Tensor):
    """Its gradients are not summed in a flat tensor, and nor are sparse ones, for which the device itself waits."""


@pytest.mark.parametrize("used", [[FIRST] * 2, BOTH], ids=str)
def test_gradients_that_are_in_no_bucket_with_forward_on_another_stream(used: list[torch.device]) -> None:
    markers: list[Any] = []

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = x * net.scale
        if y.device == FIRST:
            y.register_hook(lambda _: waits(markers[-1], FIRST))
        return y

    net = Calls(forward, scale=nn.Parameter(torch.ones(8, device=FIRST).as_subclass(OfSubclass)))
    model, x = DataParallel(net, used), torch.ones(12, 8, device=FIRST)
    here = current(FIRST)
    for _ in range(2):
        markers.append(C.Marker())
        net.scale.grad = None
        C.synchronize_all()
        with stream(side_of(FIRST)):
            loss = model(x).sum()
        C.synchronize_all()
        loss.backward()
        found = net.scale.grad * 1
        early = here.query()
        markers[-1].set()
        assert not early
        assert found.cpu().eq(12).all()


@pytest.mark.parametrize("used", [[FIRST] * 2, BOTH], ids=str)
def test_gradients_of_replicas_stay_until_they_are_joined(used: list[torch.device]) -> None:
    """`torch.autograd.grad` on another stream than forward: the replicas' gradients were freed on forward's."""
    marker, here = C.Marker(), current(FIRST)

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = (x * net.scale).pow(3)
        if y.device == FIRST:
            y.register_hook(hold)
        return y

    def hold(_: Tensor) -> None:
        with stream(here):
            waits(marker, FIRST)

    net = Calls(forward, scale=nn.Parameter(torch.ones(8))).to(FIRST)
    model, x = DataParallel(net, used), torch.ones(12, 8, device=FIRST, requires_grad=True)
    with stream(side := side_of(FIRST)):
        loss = model(x).sum()
    here.wait_stream(side)
    of_x, of_scale = torch.autograd.grad(loss, (x, net.scale))
    marker.set()
    C.synchronize_all()
    assert of_x.cpu().eq(3).all()
    assert of_scale.cpu().eq(36).all()


def test_a_backward_that_is_rescued_on_another_stream_than_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: forward runs again, from copies in memory of forward's stream."""
    monkeypatch.setattr(devices, "free_cached_memory", lambda: None, raising=False)  # this device waits for it
    errors, marker = list[Exception](), C.Marker()

    def fail(_: Tensor) -> None:
        if errors:
            raise errors.pop()

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = x * net.scale * net.factor
        y.register_hook(fail)
        return y

    net = Calls(forward, scale=nn.Parameter(torch.ones(8)))
    net.register_buffer("factor", torch.ones(8))
    model, base = DataParallel(net.to(FIRST), [FIRST] * 2, rescue=True), torch.ones(12, 8, device=FIRST)
    for _ in range(3):  # the first steps look at values, for which the host waits
        model(base).sum().backward()
    C.synchronize_all()
    net.scale.grad = None
    errors.append(torch.OutOfMemoryError("as is meant"))
    side = side_of(FIRST)
    with stream(side):
        waits(marker, FIRST)
        x = base * 3
        net.factor.fill_(2.0)
        loss = model(x).sum()
    loss.backward()
    found = net.scale.grad * 1
    marker.set()
    C.synchronize_all()
    assert found.cpu().eq(72).all()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_forward_on_other_streams_with_batch_norm_over_all_replicas(checkpointed: bool, order: int) -> None:
    """On streams of the caller's, and inside forward on one of the module's own, with kernels that are late."""

    def hidden(net: nn.Module, x: Tensor) -> Tensor:
        return net.norm(net.into(x)).tanh()

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        side = None if x.device.type == "cpu" else side_of(x.device)
        with contextlib.nullcontext() if side is None else stream(side):
            y = checkpoint(hidden, net, x, use_reentrant=False) if checkpointed else hidden(net, x)
        if side is not None:
            here = current(x.device)
            here.wait_stream(side)
            x.record_stream(side)
            y.record_stream(here)
        return net.out(y)

    def backward(net: nn.Module, loss: Tensor) -> None:
        if order == 1:
            loss.backward()
        else:
            gradients = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
            torch.stack([each.pow(2).sum() for each in gradients]).sum().backward()

    plain = Calls(forward, into=nn.Linear(5, 8), norm=nn.BatchNorm1d(8), out=nn.Linear(8, 3))
    module, x = copy.deepcopy(plain).to(FIRST), torch.randn(12, 5)
    model, on_device = DataParallel(module, BOTH, sync_batch_norm=True), x.to(FIRST)
    C.set_delay(500, 40)
    try:
        for seed in range(1, 9):
            C.set_seed(seed)
            for net in (plain, module):
                net.zero_grad()
            backward(plain, plain(x).pow(2).mean())
            with stream(side_of(SECOND)), stream(side_of(FIRST)):
                loss = model(on_device).pow(2).mean()
            backward(module, loss)
            found = [parameter.grad * 1 for parameter in module.parameters()]
            for each, parameter in zip(found, plain.parameters(), strict=True):
                torch.testing.assert_close(each.cpu(), parameter.grad, rtol=1e-8, atol=1e-10)
    finally:
        C.set_delay(0, 30)


@pytest.mark.parametrize("used", [[FIRST] * 2, BOTH, BOTH[::-1]], ids=str)
def test_buffers_that_a_checkpoint_changes_in_two_backwards_on_other_streams(
    used: list[torch.device], delays: Callable[..., None]
) -> None:
    """R5, N4: the second backward runs the checkpoint twice, on forward's stream, and puts the buffer back between."""

    def counted(net: nn.Module, x: Tensor) -> Tensor:
        net.count.add_(1)
        return net.into(x) * (1 + net.count % 4 * 0.3)

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net.out(checkpoint(counted, net, x, use_reentrant=False).tanh())

    plain = Calls(forward, into=nn.Linear(4, 4), out=nn.Linear(4, 3), count=nn.Buffer(torch.zeros(())))
    module, x = copy.deepcopy(plain).to(used[0]), torch.randn(2, 4)
    model, given = DataParallel(module, used), {plain: x, module: x.to(used[0])}
    for seed in range(1, 17):
        delays(seed)
        found = []
        for net, called in ((plain, plain), (module, model)):
            net.zero_grad()
            inputs = given[net].clone().requires_grad_()
            with beside(used[0]) if net is module else contextlib.nullcontext():
                loss = called(inputs).pow(2).sum()
            (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
            total = loss + gradient.pow(2).sum()
            with beside(used[0]) if net is module else contextlib.nullcontext():
                total.backward()
            found.append([inputs.grad, net.into.weight.grad, net.count])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(other.cpu(), one, rtol=1e-8, atol=1e-10)


# ---- maps -----------------------------------------------------------------------------------------

LANES = pytest.mark.parametrize("used", [[FIRST], [SECOND], BOTH], ids=str)
IN_THREADS = pytest.mark.parametrize("in_threads", [True, False], ids=["in threads", "in the caller's"])
NUM_BATCHES = 6


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch, in_threads: bool) -> None:
    choice = LaneChoice("", 2, 1000)
    choice.uses_all, choice.is_made = in_threads, True
    monkeypatch.setattr("unisono.ways.choice_for", lambda *_: choice)


def mapped(
    used: list[torch.device], forward: Callable[..., Tensor], batches: Iterator[Any]
) -> Iterator[tuple[torch.Stream, Tensor]]:
    """Yield outputs on the first device, but for the first one each on another stream, which is current meanwhile."""
    model = DataParallel(Calls(lambda net, *inputs: forward(*inputs)).to(used[0]), used, output_device=FIRST)
    with model.map(batches) as outputs:
        assert next(outputs).cpu().eq(1).all()
        for _ in range(1, NUM_BATCHES):
            side = side_of(FIRST)
            with stream(side):
                yield side, next(outputs)


@LANES
@IN_THREADS
@pytest.mark.usefixtures("lanes")
def test_outputs_of_a_map_each_on_another_stream(used: list[torch.device]) -> None:
    """I1: of two batches, which a lane may have queued, none is computed before the marker is set."""
    marker, found, early = C.Marker(), list[Tensor](), list[bool]()

    def forward(x: Tensor, number: int) -> Tensor:
        if number >= NUM_BATCHES - 2:
            waits(marker, x.device)
        return x + 1

    batches = ((torch.full((8,), float(i)), i) for i in range(NUM_BATCHES))
    for side, output in mapped(used, forward, batches):
        found.append(output * 1)
        early.append(side.query())
    marker.set()
    C.synchronize_all()
    assert not any(early[-2:])
    for i, each in enumerate(found, 1):
        assert each.cpu().eq(i + 1).all()


@LANES
@IN_THREADS
@pytest.mark.usefixtures("lanes")
def test_outputs_of_a_map_stay_for_another_stream(used: list[torch.device]) -> None:
    """I1: their memory is free when the stream that was current for each is done with it."""
    marker, found = C.Marker(), list[Tensor]()
    batches = (torch.full((8,), float(i)) for i in range(NUM_BATCHES))
    for _, output in mapped(used, lambda x: x + 1, batches):
        waits(marker, FIRST)
        found.append(output * 1)
        del output
    for device in BOTH:
        current(device).synchronize()
    marker.set()
    C.synchronize_all()
    for i, each in enumerate(found, 1):
        assert each.cpu().eq(i + 1).all()


@LANES
@IN_THREADS
@pytest.mark.usefixtures("lanes")
def test_inputs_of_a_map_each_made_on_another_stream(used: list[torch.device], in_threads: bool) -> None:
    """I1: the last batch, or the first of a row, is not there before the marker is set."""
    marker, early, late = C.Marker(), list[bool](), NUM_BATCHES - 1 if in_threads else 1

    def forward(x: Tensor, number: int) -> Tensor:
        y = x + 1
        if number == late:
            early.append(any(current(x.device).query() for _ in range(1000)))
            marker.set()
        return y

    def batches() -> Iterator[Any]:
        for i in range(NUM_BATCHES):
            if i == late:
                waits(marker, FIRST)
            yield torch.full((8,), float(i), device=FIRST) * 1, i

    found = [output * 1 for _, output in mapped(used, forward, batches())]
    C.synchronize_all()
    assert early == [False]
    for i, each in enumerate(found, 1):
        assert each.cpu().eq(i + 1).all()


def of_ranks(rank: int) -> list[bool]:
    """Map on a rank; return whether the outputs are right that arrive in the turn of another stream."""
    (name,) = own_devices(rank)
    device, marker, found = torch.device(name), C.Marker(), list[Tensor]()
    model = DataParallel(Calls(lambda net, x: x + 1).to(device), [device])
    outputs = iter(model.map([torch.full((8,), float(i)) for i in range(NUM_BATCHES)]))
    makes, reads = (torch.Stream(device) for _ in range(2))
    for one in () if rank else [makes, reads] * (NUM_BATCHES // 2):
        with stream(one):
            output = next(outputs)
            if one is reads:
                waits(marker, device)
                found.append(output * 1)
            del output
    assert [*outputs] == []
    makes.synchronize()
    marker.set()
    torch.accelerator.synchronize(device)
    return [bool(each.cpu().eq(2 * i + 2).all()) for i, each in enumerate(found)]


def test_outputs_of_ranks_stay_for_another_stream() -> None:
    """I14: rank 0 has those of a round at once."""
    assert run_ranks(2, of_ranks) == [[True] * (NUM_BATCHES // 2), []]
