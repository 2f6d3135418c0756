"""What the wrapper costs where there is nothing to divide: `DataParallel(model, ["cpu"])` against the model.

Nothing in it grows with the model, so two sizes should cost the same.
"""

import statistics
import time

import torch
from torch import nn

from manyhands.bench.interleaved import Progress
from manyhands.data_parallel import DataParallel

_REPEATS = 2000
_WARM_UP = 20


def measure(progress: Progress) -> dict[str, float]:
    """Return the microseconds that the wrapper adds to a forward, by model: medians of interleaved forwards."""
    models = {
        "one Linear": (nn.Linear(8, 8), torch.zeros(4, 8)),
        "52 thin layers": (nn.Sequential(*(nn.Linear(16, 16) for _ in range(52))), torch.zeros(4, 16)),
    }
    costs = {}
    progress.begin("one device", len(models))
    for name, (model, batch) in models.items():
        plain, wrapped = _medians(model, DataParallel(model, ["cpu"]), batch)
        costs[name] = 1e6 * (wrapped - plain)
        progress.part(f"{name}: {costs[name]:.1f} µs")
    return costs


def _medians(first: nn.Module, second: nn.Module, batch: torch.Tensor) -> tuple[float, float]:
    """Return the median seconds of a forward of each, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_REPEATS + _WARM_UP):
        for module, seconds in zip((first, second), times, strict=True):
            began = time.perf_counter()
            module(batch)
            seconds.append(time.perf_counter() - began)
    return statistics.median(times[0][_WARM_UP:]), statistics.median(times[1][_WARM_UP:])
