"""What a step costs the host with graphs of kernels, and without, on asynchronous devices.

    python benchmarks/graphs.py
    python benchmarks/graphs.py --devices 1 2

The module has 52 thin layers, each with a batch norm behind it. While a step is queued no kernel runs, so the time is
that of the host: forward, backward and the optimizer. Steps with and without graphs take turns. Launches are what the
host queues in a step: operations, and graphs. The devices stand in for GPUs (tests/async_device/README.md): to queue an
operation there takes longer than to launch a kernel of CUDA's, so ratios of times are no GPU's; launches are.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono import DataParallel

NUM_LAYERS, WIDTH, ROWS = 52, 8, 32
NUM_TURNS = 15


def model(device: str) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers).to(device)


class Training:
    """Trains a module on some devices, one step a call; `async_device` is the module of that name."""

    def __init__(self, async_device: Any, num_devices: int, *, graphs: bool) -> None:
        torch.manual_seed(0)
        self._device = async_device
        devices = [f"{async_device.NAME}:{i}" for i in range(num_devices)]
        self.module = model(devices[0])
        self.wrapped = DataParallel(self.module, devices, graphs=graphs, sync_batch_norm=False)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, foreach=True)
        self.inputs = torch.randn(ROWS, WIDTH, device=devices[0])

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.wrapped(self.inputs).square().mean().backward()
        self.optimizer.step()

    def host_s(self) -> float:
        """Return how long the host takes for a step, whose kernels run afterwards."""
        self._device.C.synchronize_all()
        with contextlib.ExitStack() as stack:
            for device in self.wrapped.devices:
                stack.enter_context(self._device.held(torch.accelerator.current_stream(device)))
            began = time.perf_counter()
            self()
            taken = time.perf_counter() - began
        self._device.C.synchronize_all()
        return taken

    def launches(self) -> int:
        """Return how many operations and graphs the host queues in a step."""
        before = self._num_queued()
        self()
        return self._num_queued() - before

    def _num_queued(self) -> int:
        operations = sum([sum(counts) for counts in self._device.C.counts().values()])
        return int(operations + self._device.C.num_replays())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    few = range(1, 17)  # as many as the asynchronous device can be
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8], choices=few, metavar="{1..16}")
    options = parser.parse_args()
    os.environ["QUEUED_DEVICES"] = str(max(options.devices))
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

    import async_device  # it reads the variable

    print(f"{'devices':>8} {'launches':>8} {'with graphs':>12} {'host ms':>8} {'with graphs':>12} {'ratio':>6}")
    for num_devices in options.devices:
        trainings = [Training(async_device, num_devices, graphs=graphs) for graphs in (False, True)]
        for _ in range(8):
            for training in trainings:
                training()
        launches = [training.launches() for training in trainings]
        turns = [[training.host_s() for training in trainings] for _ in range(NUM_TURNS)]
        without, with_graphs = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
        row = f"{num_devices:>8} {launches[0]:>8} {launches[1]:>12} {without:>8.1f} {with_graphs:>12.1f}"
        print(f"{row} {without / with_graphs:>6.1f}", flush=True)


if __name__ == "__main__":
    main()
