"""Batch norm by torch's own kernels, against torch's batch norm; plain arithmetic stands for the kernels."""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.as_accelerators import simulated_as_accelerators
from helpers.batch_norm_kernels import use_kernels
from helpers.host_waits import noted_on_simulated_devices
from unisono import DataParallel
from unisono.runtime.thread_pool import replica_device
from unisono.sync_batch_norm.kernels import KernelStatistics, dense

EPS = 1e-5
SHAPES = {"2d": (6, 3), "4d": (6, 3, 4, 5), "5d": (6, 3, 2, 2, 2)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    torch.manual_seed(0)
    return use_kernels(monkeypatch)


def normalised(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Normalise x by its statistics, combined from those of parts of it."""
    weight, bias, running_mean, running_var = rest
    parts = [KernelStatistics.of(dense(part), EPS) for part in x.split([0, 4, len(x) - 4])]
    total = KernelStatistics.of_all(parts, x.device)
    total.update(running_mean, running_var, 0.3)
    return total.normalise(dense(x), weight, bias, EPS, lambda grad: grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_as_torchs(calls: Counter[str], shape: str, dtype: torch.dtype, affine: bool) -> None:
    """N5: output, all gradients, running statistics; one of the parts has no rows."""
    whole = torch.randn(SHAPES[shape], dtype=dtype)
    outgoing = torch.randn_like(whole)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    results = []
    for mine in (True, False):
        torch.manual_seed(1)
        x = whole.clone().requires_grad_()
        weight, bias = (torch.rand(3, dtype=wide).requires_grad_() if affine else None for _ in range(2))
        running = [torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)]
        if mine:
            output = normalised(x, weight, bias, *running)
        else:
            own = [each.to(wide, copy=True) for each in running]
            output = F.batch_norm(x.to(wide), *own, weight, bias, True, 0.3, EPS).to(dtype)
            for each, moved in zip(running, own, strict=True):
                each.copy_(moved)
        assert output.dtype == dtype
        wanted = [tensor for tensor in (x, weight, bias) if tensor is not None]
        results.append([output.detach(), *torch.autograd.grad(output, wanted, outgoing), *running])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert calls["batch_norm_backward_elemt"] == 1


def test_channels_last_stays(calls: Counter[str]) -> None:
    """G7, N5"""
    x = torch.randn(6, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    assert dense(x) is x
    output = normalised(x, None, None, None, None)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert dense(x.detach()[:, :, ::2]).is_contiguous()


@dataclass(frozen=True)
class Stream:
    """A stream of a simulated device, by name; notes which streams wait for which."""

    device: torch.device
    name: str
    waits: set[tuple[str, str]] = field(compare=False)

    def wait_stream(self, other: "Stream") -> None:
        self.waits.add((self.name, other.name))


def test_branches_on_streams_of_their_own(calls: Counter[str], sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """N5, R14: statistics that a branch makes on a side stream are read behind it, in other replicas' threads too."""
    waits: set[tuple[str, str]] = set()

    def current(device: torch.device) -> Stream:
        kind = "side" if device == replica_device() else "main"
        return Stream(device, f"{kind} {device.index}", waits)

    for module in ("runtime.streams", "sync_batch_norm.over_replicas"):
        monkeypatch.setattr(f"unisono.{module}.current_stream", current)
    with simulated_as_accelerators(monkeypatch):
        model = DataParallel(nn.BatchNorm1d(3).to(sim[0]), sim[:2], sync_batch_norm=True)
        with torch.no_grad():
            model(torch.randn(8, 3, device=sim[0]))
    # The first replica to ask combines the statistics on device 0, each on its own stream there; the other one reads.
    by_replica_0 = {("main 1", "side 1"), ("main 0", "side 0")}
    by_replica_1 = {("main 0", "side 0"), ("side 0", "main 0")}
    assert waits in (by_replica_0, by_replica_1)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_batch_norm_takes_few_kernels_and_copies(
    calls: Counter[str], sim: Any, monkeypatch: pytest.MonkeyPatch, num_devices: int
) -> None:
    """N5: two kernels over the rows forward; statistics go to one device and back, and so do their gradients."""
    plain = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    with simulated_as_accelerators(monkeypatch):
        model = DataParallel(copy.deepcopy(plain).to(sim[0]), sim[:num_devices], sync_batch_norm=True)
        without = DataParallel(nn.Identity(), sim[:num_devices])
        found = []
        for each in (without, model):
            each(torch.randn(8, 3, device=sim[0]))  # before the first copy, each pair of devices is tested
            x = torch.randn(8, 3, device=sim[0]).requires_grad_()
            calls.clear()
            with noted_on_simulated_devices() as noted:
                each(x).pow(3).sum().backward()
            found.append(len(noted.copies))
    n = num_devices
    assert calls["batch_norm_stats"] == n
    assert calls["batch_norm_gather_stats_with_counts"] == 1 + n  # once for all, then each for its running statistics
    assert calls["batch_norm_backward_reduce"] == n
    assert calls["batch_norm_elemt"] == calls["batch_norm_backward_elemt"] == n
    buffers = 3 * (n - 1)  # one by one, because simulated tensors are of a subclass
    assert found[1] - found[0] == 4 * (n - 1) + buffers
