"""From three devices on, parameters and buffers go along a chain: each device sends on what has arrived there.

Here with four, and in pieces so small that there are several: `make test-device` runs this with six devices.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from async_device import C, held
from async_device.faults import Fault
from helpers.modules import Calls, mlp
from unisono import DataParallel
from unisono.runtime import devices, streams
from unisono.runtime.streams import Copies

DEVICES = [torch.device(f"queued:{index}") for index in range(4)]

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(torch.accelerator.device_count() < 4, reason="needs four devices: run `make test-device`"),
]


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PIECE_BYTES", 80)
    for one in DEVICES:
        for other in DEVICES:
            devices.copies_arrive(one, other)  # the host waits for this test of a pair, once


def trained(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Return outputs, parameters and gradients of steps by which the host runs ahead."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = []
    for x in torch.randn(6, 16, 5, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        y = model(x.to(device))
        y.pow(2).mean().backward()
        optimizer.step()
        found.append(y.detach())
    found += [each for p in model.parameters() for each in (p.detach(), p.grad) if each is not None]
    return [each.cpu() for each in found]


@pytest.mark.parametrize("devices", [DEVICES[:3], DEVICES, [*DEVICES[:2], DEVICES[1], DEVICES[3]]])
def test_training_has_one_devices_numbers_and_the_same_bits_each_time(
    devices: list[torch.device], delays: Callable[[int], None]
) -> None:
    module = mlp()
    expected = trained(copy.deepcopy(module), torch.device("cpu"))
    runs = []
    for seed in range(1, 7):
        delays(seed)
        runs.append(trained(DataParallel(copy.deepcopy(module).to(DEVICES[0]), devices), DEVICES[0]))
    for run in runs:
        torch.testing.assert_close(run, expected, rtol=1e-9, atol=1e-11)
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize("number", [2, 3, 4])
def test_each_link_carries_the_parameters_once_each_way(number: int) -> None:
    """N10"""
    model = DataParallel(mlp().to(DEVICES[0]), DEVICES[:number])
    for _ in range(4):
        x = torch.randn(8, 5).to(DEVICES[0])
        C.synchronize_all()
        C.take_link_bytes()
        y = model(x)
        C.synchronize_all()
        forward = C.take_link_bytes()[:number]
        loss = y.sum()
        C.synchronize_all()
        C.take_link_bytes()
        loss.backward()
        C.synchronize_all()
        backward = C.take_link_bytes()[:number]
    size = sum(parameter.nbytes for parameter in model.parameters())
    beside = x.nbytes + y.nbytes + 16 * sum(1 for _ in model.parameters())  # rows, and entries that align
    there = [sent for sent, _ in forward[:-1]] + [received for _, received in forward[1:]]
    back = [received for _, received in backward[:-1]] + [sent for sent, _ in backward[1:]]
    assert all(size <= carried <= size + beside for carried in there + back), (size, beside, there, back)


def assert_a_buffer_is_sent_on_before_it_is_written(plant: Callable[[], None] = lambda: None) -> None:
    """Check what each replica reads from a buffer into which all of them write, while the second sends nothing on."""

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        module.layers.count.add_(1)
        return x + module.layers.count

    model = DataParallel(Calls(forward, layers=Counter()).to(DEVICES[0]), DEVICES)
    x = torch.zeros(8, 2).to(DEVICES[0])
    with torch.no_grad():
        for _ in range(3):  # the first steps wait for the devices
            model(x)
        C.synchronize_all()
        plant()
        with held(streams._send_stream(DEVICES[1])):
            y = model(x)
    C.synchronize_all()
    torch.testing.assert_close(y.cpu(), torch.full((8, 2), 4.0))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(2))


def test_a_buffer_is_sent_on_before_it_is_written() -> None:
    assert_a_buffer_is_sent_on_before_it_is_written()


def test_a_buffer_that_is_written_before_it_is_sent_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(Copies, "_pass_along", "_devices.wait_stream(hop.arrives_on, next_sender)")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_a_buffer_is_sent_on_before_it_is_written(lambda: fault.plant(monkeypatch))
