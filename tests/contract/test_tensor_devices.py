"""Attributes of replicas on 2, 3 and 8 simulated devices. (test_data_parallel.py has inputs and outputs.)"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from unisono import DataParallel
from unisono.testing import simulated_accelerators

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=[2, 3, 8])
def devices(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    with simulated_accelerators(request.param) as devices:
        yield devices


def test_attributes_follow_their_replica(devices: list[torch.device]) -> None:
    """R6, R7: methods, lists of modules, and tensors in attributes are on the device of their replica.

    What a replica appends to a list persists, also where that holds tensors from the steps before.
    """

    class Devious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(5, 5)]
            self.op = {"run": self.run}
            self.inner = nn.Linear(5, 5)
            self.shift = torch.ones(5)
            self.on_cpu = torch.ones(3)
            self.seen: list[torch.Tensor] = []

        def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Devious":
            self.layers[0]._apply(fn)
            self.shift = fn(self.shift)
            return super()._apply(fn, recurse)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.on_cpu.device.type == "cpu"
            x = self.layers[0](self.op["run"](x))
            self.seen.append(x.detach().mean())
            return x

    plain = Devious()
    model = DataParallel(copy.deepcopy(plain).to("sim:0"))
    x, seen = torch.randn(2 * len(devices), 5), model.module.seen
    for step in range(1, 4):
        output, expected = model(x), plain(x)
        torch.testing.assert_close(output.cpu(), expected)
        assert model.module.seen is seen
        assert sorted(str(mean.device) for mean in seen) == sorted([f"sim:{i}" for i in range(len(devices))] * step)
    output.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(model.module.layers[0].weight.grad.cpu(), plain.layers[0].weight.grad)
    torch.testing.assert_close(model.module.inner.weight.grad.cpu(), plain.inner.weight.grad)
