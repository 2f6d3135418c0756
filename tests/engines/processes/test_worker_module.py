"""The worker's module, made in this process from updates of a live one."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from helpers.modules import Calls
from unisono.engines.processes.module_sync import ModuleSync
from unisono.engines.processes.worker_module import WorkerModule

CPU = torch.device("cpu")


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_buffers_follow_the_live_ones(monkeypatch: pytest.MonkeyPatch, on_accelerator: bool, tracked: bool) -> None:
    """R5: on an accelerator `to` copies out of shared memory, and the copy kept the values of the first forward."""
    live = Calls(lambda module, x: x, norm=nn.BatchNorm1d(3))
    live.__dict__["constant"] = torch.zeros(3)
    module_sync, worker = ModuleSync(), None
    for step in range(3):
        live.norm.running_mean.fill_(step)
        live.norm.num_batches_tracked.add_(1)
        live.constant.fill_(step)
        update = module_sync.pack(module_sync.diff(live), CPU, shares_parameters=False)
        module_sync.commit()
        if worker is None:
            assert update.module is not None
            segments = {segment.number: segment for segment in module_sync.segments}
            with monkeypatch.context() as patch:
                if on_accelerator:
                    patch.setattr(torch.Tensor, "to", functools.partialmethod(torch.Tensor.to, copy=True))
                worker = WorkerModule(update.module, segments, CPU)
        worker.apply(update)
        replica: Any = worker.take(tracked).roots[0]
        assert replica.constant.tolist() == [step] * 3
        for mine, theirs in zip(replica.buffers(), live.buffers(), strict=True):
            assert torch.equal(mine, theirs)
