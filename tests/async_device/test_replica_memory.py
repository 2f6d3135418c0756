"""The memory of replicas on other devices stays: copies into it wait for its readers, and take no new memory."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from async_device import C, held, stream
from async_device.faults import Fault
from async_device.tools import BOTH, FIRST, SECOND, current, layers, stalled
from async_device.training import WIDTH, Branches
from helpers.modules import Calls, mlp
from unisono import DataParallel
from unisono.runtime import devices
from unisono.runtime.streams import Copies

NUM_STEPS = 6  # by which the host runs ahead

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _copies_have_been_tested() -> None:
    """The first copy between two devices is followed by a test of it, for which the host waits."""
    devices.copies_arrive(*BOTH)


@torch.no_grad()
def write_through_data(module: nn.Module, number: int) -> None:
    """Change the parameters as some optimizers do, without a version counter that tells."""
    for parameter in module.parameters():
        parameter.data.add_(0.1 * number)


# ---- what is computed ----------------------------------------------------------------------------


def steps_ahead(module: nn.Module, x: Tensor, train: bool) -> list[Tensor]:
    """Return the results of steps between which the parameters change, as tensors on which nothing has waited."""
    found = []
    for number in range(NUM_STEPS):
        write_through_data(module.module if isinstance(module, DataParallel) else module, number)
        with torch.set_grad_enabled(train):
            y = module(x)
        found.append(y.detach())
        if train:
            module.zero_grad()
            y.pow(2).mean().backward()
            found += [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return found


@pytest.mark.parametrize("train", [True, False], ids=["training", "no gradients"])
@pytest.mark.parametrize("output", BOTH, ids=["output on the first", "output on the second"])
def test_a_host_that_runs_ahead_overwrites_nothing_that_is_still_read(train: bool, output: torch.device) -> None:
    module, x = mlp().to(FIRST), torch.randn(12, 5).to(FIRST)
    expected = steps_ahead(copy.deepcopy(module), x, train)
    model = DataParallel(module, BOTH, output_device=output)
    for late in ([], [SECOND], BOTH):
        values = copy.deepcopy(module.state_dict())
        with stalled(*late):
            found = steps_ahead(model, x, train)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.to(FIRST), other, rtol=1e-9, atol=1e-9)
        module.load_state_dict(values)


def assert_nothing_is_overwritten_without_outputs(plant: Callable[[], None] = lambda: None) -> None:
    """Check what is computed where nothing but the replicas' memory makes the first device wait for the second.

    A fault is planted after the first steps, which compare values and would report it as one of the module's.
    """
    found: list[Tensor] = []

    def forward(net: nn.Module, x: Tensor) -> None:
        y = net.layers(x)
        if x.device != FIRST:
            found.append(y)

    module, x = Calls(forward, layers=mlp()).to(FIRST), torch.randn(12, 5).to(FIRST)
    model, expected = DataParallel(module, BOTH), []
    with torch.no_grad():
        for _ in range(2):  # first steps wait for the devices: with an empty list, and with tensors in it
            model(x)
        found.clear()
        C.synchronize_all()
        plant()
        with stalled(SECOND):
            for number in range(NUM_STEPS):
                write_through_data(module, number)
                expected.append(module.layers(x)[6:])
                model(x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(FIRST), other)


def test_a_copy_waits_for_the_readers() -> None:
    assert_nothing_is_overwritten_without_outputs()


def test_a_copy_that_does_not_wait_for_the_readers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(Copies, "fill", "event.let_wait(hop.arrives_on)")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_nothing_is_overwritten_without_outputs(lambda: fault.plant(monkeypatch))


def test_values_that_are_freed_before_they_have_been_copied_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are freed on the stream that made them, and that one waits for the copies."""
    fault = Fault(Copies, "fill", "self._made.append((torch.accelerator.current_stream(source), values))")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_nothing_is_overwritten_without_outputs(lambda: fault.plant(monkeypatch))


@pytest.mark.parametrize("seed", range(1, 6))
def test_branches_on_streams_of_their_own_while_the_host_runs_ahead(seed: int, delays: Callable[[int], None]) -> None:
    module, x = Branches().double(), torch.randn(12, WIDTH)
    expected = steps_ahead(copy.deepcopy(module), x, True)
    delays(seed)
    found = steps_ahead(DataParallel(module.to(FIRST), BOTH), x.to(FIRST), True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-9)


def test_forwards_on_other_streams_of_the_caller() -> None:
    """The second forward's copy waits for the first one's readers, which are on another stream."""
    module, x = mlp().to(FIRST), torch.randn(12, 5).to(FIRST)
    model, own = DataParallel(module, BOTH, output_device=SECOND), torch.Stream(device=SECOND)
    found, expected = [], []
    with contextlib.ExitStack() as stack, torch.no_grad():
        model(x)  # makes the replicas
        C.synchronize_all()
        for number, each in enumerate([current(SECOND), own]):
            write_through_data(module, number)
            expected.append(module(x))
            if number == 0:
                stack.enter_context(held(each))
            with stream(each):
                found.append(model(x))
    C.synchronize_all()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(FIRST), other)


def test_a_model_that_is_deleted_while_its_replicas_still_compute() -> None:
    module, x = mlp().to(FIRST), torch.randn(12, 5).to(FIRST)
    expected = module(x).detach()
    model = DataParallel(module, BOTH, output_device=SECOND)
    with torch.no_grad():
        model(x)  # a first step waits for the devices
    C.synchronize_all()
    with stalled(*BOTH), torch.no_grad():
        found = model(x)
        del model
        others = [torch.full((n,), torch.nan, device=SECOND) for n in (8, 64, 512)]
    assert others
    torch.testing.assert_close(found.to(FIRST), expected)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False], ids=["training", "no gradients"])
def test_parameters_take_no_memory_for_the_steps_by_which_the_host_is_ahead(train: bool) -> None:
    module = layers(4, 64).requires_grad_(False)
    model, x = DataParallel(module, BOTH), torch.randn(8, 64).to(FIRST).requires_grad_(train)
    size = sum(parameter.nbytes for parameter in module.parameters())

    def step() -> None:
        with torch.set_grad_enabled(train):
            y = model(x)
        if train:
            y.pow(2).mean().backward()

    for _ in range(2):
        step()
        C.synchronize_all()
    before = [torch.accelerator.memory_reserved(device) for device in BOTH]
    with stalled(*BOTH):
        for _ in range(NUM_STEPS):
            step()
        after = [torch.accelerator.memory_reserved(device) for device in BOTH]
    assert [now - then for now, then in zip(after, before, strict=True) if now - then > size / 2] == []
