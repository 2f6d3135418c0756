"""Tests of the layer, one on a single device and one on all devices of the machine.

pytest examples/two_device_tests              one passes; one is skipped where there are not two accelerators
pytest --unisono 2 examples/two_device_tests  both run, the second on two simulated devices
"""

import torch
from pooling import MaskedMean


def test_padding_does_not_count():
    sequences = torch.ones(2, 5, 4)
    sequences[1, 3:] = 100.0
    layer = MaskedMean(4)
    torch.testing.assert_close(*layer(sequences, torch.tensor([5, 3])))


def test_it_trains_on_all_devices(devices):
    layer = torch.nn.DataParallel(MaskedMean(4).to(devices[0]), devices)
    sequences, lengths = torch.randn(6, 5, 4, device=devices[0]), torch.randint(1, 6, (6,), device=devices[0])
    layer(sequences, lengths).square().mean().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
