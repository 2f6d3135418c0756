"""Lists and attributes of replicas on 2, 3 and 8 simulated devices. (test_data_parallel.py has inputs and outputs.)"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.modules import Calls
from unisono import DataParallel
from unisono.testing import simulated_accelerators

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=[2, 3, 8])
def devices(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    with simulated_accelerators(request.param) as devices:
        yield devices


def test_lists_that_replicas_append_to(devices: list[torch.device]) -> None:
    """R6: they persist in every step, also when they hold tensors from the steps before."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.log.append(x.mean().detach())
        return x * model.weight

    model = DataParallel(Calls(forward, weight=nn.Parameter(torch.ones(1)), log=[]).to("sim:0"))
    log = model.module.log
    for step in range(1, 4):
        model(torch.randn(2 * len(devices)))
        assert model.module.log is log
        assert len(log) == step * len(devices)


def test_attributes_follow_their_replica(devices: list[torch.device]) -> None:
    """R7: methods, lists of modules, and tensors in attributes are on the device of their replica."""

    class Devious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(5, 5)]
            self.op = {"run": self.run}
            self.inner = nn.Linear(5, 5)
            self.shift = torch.ones(5)
            self.on_cpu = torch.ones(3)
            self.seen: list[str] = []

        def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Devious":
            self.layers[0]._apply(fn)
            self.shift = fn(self.shift)
            return super()._apply(fn, recurse)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.on_cpu.device.type == "cpu"
            x = self.layers[0](self.op["run"](x))
            self.seen.append(str(x.device))
            return x

    plain = Devious()
    model = DataParallel(copy.deepcopy(plain).to("sim:0"))
    x = torch.randn(2 * len(devices), 5)
    output, expected = model(x), plain(x)
    torch.testing.assert_close(output.cpu(), expected)
    assert sorted(model.module.seen) == [f"sim:{i}" for i in range(len(devices))]
    output.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(model.module.layers[0].weight.grad.cpu(), plain.layers[0].weight.grad)
    torch.testing.assert_close(model.module.inner.weight.grad.cpu(), plain.inner.weight.grad)
