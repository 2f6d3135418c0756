"""Pictures on their way to a device: the rows that were asked for, in pinned memory where copies are queued."""

import pytest
import torch

from unisono.runtime import devices
from unisono.training import computation
from unisono.training.computation import rows_on
from unisono.training.run import has_room_for

CPU = torch.device("cpu")


@pytest.mark.parametrize(("num_bytes", "fits"), [(24, True), (25, True), (26, False)])
def test_data_that_take_a_quarter_of_the_free_memory_have_room(monkeypatch, num_bytes, fits):
    assert not has_room_for(CPU, 0), "data on the host stay where they are"
    monkeypatch.setattr(devices, "computes_on_host", lambda device: False)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (100, 1000), raising=False)
    assert has_room_for(torch.device("cuda", 0), num_bytes) == fits


ROWS = torch.tensor([4, 0, 4, 2])


@pytest.mark.parametrize("numbers", [torch.arange(5), torch.rand(5, 1, 3, 2)], ids=["labels", "pictures"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[:0]], ids=len)
def test_rows_for_a_device(sim, monkeypatch, numbers, rows):
    for device in (CPU, sim[1]):
        found = rows_on(device, numbers, rows)
        assert found.device == device
        assert torch.equal(found.cpu(), numbers[rows])
    assert torch.equal(rows_on(sim[1], numbers.to(sim[1]), rows.to(sim[1])).cpu(), numbers[rows])
    for where, device in ((CPU, CPU), (CPU, sim[1]), (sim[1], sim[1])):
        into = torch.zeros_like(numbers[rows], device=device)
        assert rows_on(device, numbers.to(where), rows.to(where), into=into) is into
        assert torch.equal(into.cpu(), numbers[rows])

    asked = []

    def empty(*sizes, dtype, device, pin_memory):
        assert device == "cpu"  # whatever the default device is
        asked.append(pin_memory)
        return torch.zeros(sizes, dtype=dtype)

    monkeypatch.setattr(devices, "has_streams", lambda device: True)
    monkeypatch.setattr(computation.torch, "empty", empty)
    assert torch.equal(rows_on(CPU, numbers, rows), numbers[rows])
    assert asked == [True]
    into = torch.zeros_like(numbers[rows])
    assert rows_on(CPU, numbers, rows, into=into) is into
    assert torch.equal(into, numbers[rows])
