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
    """Return the microseconds that the wrapper adds to a forward, by model: the median over pairs of forwards."""
    models = {
        "one Linear": (nn.Linear(8, 8), torch.zeros(4, 8)),
        "52 thin layers": (nn.Sequential(*(nn.Linear(16, 16) for _ in range(52))), torch.zeros(4, 16)),
    }
    costs = {}
    progress.begin("one device", len(models))
    for name, (model, batch) in models.items():
        costs[name] = 1e6 * _median_difference(model, DataParallel(model, ["cpu"]), batch)
        progress.part(f"{name}: {costs[name]:.1f} µs")
    return costs


def _median_difference(first: nn.Module, second: nn.Module, batch: torch.Tensor) -> float:
    """Return by how many seconds a forward of the second takes longer; each pair is run in turn."""
    differences = []
    for _ in range(_REPEATS + _WARM_UP):
        began = time.perf_counter()
        first(batch)
        between = time.perf_counter()
        second(batch)
        differences.append(time.perf_counter() - between - (between - began))
    return statistics.median(differences[_WARM_UP:])
