"""A training step on accelerators is queued: the host waits for no device. Simulated devices count as accelerators."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.as_accelerators import simulated_as_accelerators
from helpers.batch_norm_kernels import use_kernels
from helpers.host_waits import noted_on_simulated_devices
from helpers.modules import Calls
from unisono import DataParallel

pytestmark = pytest.mark.usefixtures("float64")

READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "indices of the host": lambda x: x[torch.tensor([0])],
    "equal": lambda x: torch.equal(x, x),
    "from the host": lambda x: x.copy_(torch.ones(2, 2)),
    "torch.tensor": lambda x: torch.tensor([1.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
}


@pytest.mark.parametrize("name", READS)
def test_what_waits_is_noted(sim: Any, name: str) -> None:
    x = torch.ones(2, 2, device=sim[0])
    with noted_on_simulated_devices() as noted:
        x.mul(2).sum().add_(x.to(sim[1]).mean().to(sim[0])).new_full((1,), 3.0)
        assert not noted.waits
        assert noted.copies == [(sim[0], sim[1]), (sim[1], sim[0])]
        READS[name](x)
    assert len(noted.waits) == 1


def layers() -> nn.Module:
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module.last(checkpoint(module.middle, module.first(x), use_reentrant=False).flatten(1))

    return Calls(
        forward,
        first=nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)),
        middle=nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh()),
        last=nn.Linear(48, 2),
    )


@pytest.mark.filterwarnings("ignore:In sim autocast, but the target dtype:UserWarning")
@pytest.mark.parametrize("sync_batch_norm", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_training_step_waits_for_no_device(
    sim: Any, monkeypatch: pytest.MonkeyPatch, sync_batch_norm: bool, num_devices: int
) -> None:
    """N5, S11: from the batch on the first device to the optimizer's step; and the numbers are right."""
    plain = layers()
    with simulated_as_accelerators(monkeypatch):
        use_kernels(monkeypatch)
        module = copy.deepcopy(plain).to(sim[0])
        model = DataParallel(module, sim[:num_devices], sync_batch_norm=sync_batch_norm, scalars="mean")
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, foreach=True) for each in (plain, model)]
        for step in range(3):
            x = torch.randn(8, 2, 4, 4)
            x_there = x.to(sim[0])
            with noted_on_simulated_devices() as noted:
                optimizers[1].zero_grad()
                model(x_there).pow(2).mean().backward()
                optimizers[1].step()
            assert step == 0 or noted.waits == []
            optimizers[0].zero_grad()
            plain(x).pow(2).mean().backward()
            optimizers[0].step()
    if sync_batch_norm or num_devices == 1:
        for mine, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-9, atol=1e-9)
