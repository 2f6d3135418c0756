"""What one process costs the links between its devices in a step, and the first device's memory, without a GPU.

    python benchmarks/links.py [--devices 2 3 4 8]

On the asynchronous device (tests/async_device), whose copies between devices are counted, and take their time on both
ends. Figures are multiples of the size P of the parameters: what each device sends and receives in a step of training,
and the first device's peak memory above that of the plain module on one device. Then how long after the call, on links
of a given speed, the first and the last replica on another device can start: in units of P / speed.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import unisono
from unisono.console.tables import table

_STEPS = 4  # of which the last is measured
_WIDTH, _LAYERS = 2560, 4  # 105 MB
_GOALS = "goals: 1.1 P each way, 1.5 P of memory; the last replica of eight waits at most 1.5 times as long as of two"


class Found(NamedTuple):
    """A step on some devices: bytes, and seconds."""

    sent: list[int]
    received: list[int]
    peak: int  # bytes of the first device
    starts: list[float]  # after the call, of each replica but the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    few = range(2, 17)  # as many as the asynchronous device can be
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3, 4, 8], choices=few, metavar="{2..16}")
    parser.add_argument("--speed", type=int, default=500, help="of each link, each way, in MB/s (default: %(default)s)")
    options = parser.parse_args()
    if options.speed < 1:
        parser.error(f"--speed {options.speed}: expected 1 MB/s or more")
    os.environ.update(QUEUED_DEVICES=str(max(options.devices)), QUEUED_POISON="0", OMP_NUM_THREADS="1")
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

    import async_device  # it reads the variables

    size = 4 * _LAYERS * _WIDTH**2
    plain = step(1, async_device.C).peak
    rows, worst_link, worst_peak = [], 0.0, 0.0
    for number in options.devices:
        carried = step(number, async_device.C)
        async_device.C.set_link_speed(options.speed)
        starts = [seconds * options.speed * 1e6 / size for seconds in step(number, async_device.C).starts]
        async_device.C.set_link_speed(0)
        links = [bytes_ / size for each in zip(carried.sent, carried.received, strict=True) for bytes_ in each]
        peak = (carried.peak - plain) / size
        figures = [links[0], links[1], max(links), peak, starts[0], starts[-1]]
        rows.append([str(number), *(f"{figure:.2f}" for figure in figures)])
        worst_link, worst_peak = max(worst_link, *links[:2]), max(worst_peak, peak)
        print(f"{number} devices: measured", flush=True)
    columns = ["devices", "first sends", "receives", "most of any", "first's peak", "first start", "last start"]
    print(f"\nMultiples of P = {size / 1e6:.0f} MB; starts in units of P / speed, at {options.speed} MB/s\n")
    print(table(columns, rows))
    print(f"\n{_GOALS}")
    print(f"first device: at most {worst_link:.2f} P each way, peak {worst_peak:.2f} P")


def step(number: int, queued: Any) -> Found:
    """Return what the last of some training steps on so many devices needs."""
    devices = [torch.device(f"queued:{index}") for index in range(number)]
    moments: dict[int, float] = {}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            if is_timed:
                torch.accelerator.current_stream(x.device).synchronize()  # its copies have arrived
                moments[x.device.index] = time.perf_counter()
            return self.layers(x)

    is_timed = False
    module = Net().to(devices[0])
    model = module if number == 1 else unisono.DataParallel(module, devices)
    inputs = torch.randn(2 * number, _WIDTH).to(devices[0])
    for index in range(_STEPS):
        is_timed = index == _STEPS - 1
        for device in devices:
            torch.accelerator.synchronize(device)
        model.zero_grad()
        torch.accelerator.memory.reset_peak_memory_stats(devices[0])
        queued.take_link_bytes()
        began = time.perf_counter()
        model(inputs).square().mean().backward()
        for device in devices:
            torch.accelerator.synchronize(device)
    sent, received = zip(*queued.take_link_bytes()[:number], strict=True)
    starts = [moments[index] - began for index in range(1, number)]
    peak = torch.accelerator.memory.max_memory_allocated(devices[0])
    return Found([*sent], [*received], peak, starts)


if __name__ == "__main__":
    main()
