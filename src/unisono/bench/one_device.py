"""The cost of the wrapper on one device: `DataParallel(model, [device])` against the model.

It should not grow with the model, so two sizes are measured. On an accelerator the time until the work is queued is
measured; the queue is empty when a forward begins, so that no forward waits for a place in it.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from unisono.console.progress import Progress, Task
from unisono.data_parallel import DataParallel

_REPEATS = 2000
_WARM_UP = 20
_CPU = torch.device("cpu")


def measure(progress: Progress) -> dict[str, float]:
    """Return the microseconds that the wrapper adds to a forward on the CPU, by model."""
    task = Task(progress, "one device", len(_MODELS))
    costs = {}
    for name in _MODELS:
        costs[name] = added_us(name)
        task.advance(f"{name}: {costs[name]:.1f} µs")
    return costs


def added_us(name: str, device: torch.device = _CPU, repeats: int = _REPEATS) -> float:
    """Return the microseconds that the wrapper adds to a forward of a model: the median over pairs of forwards."""
    model, batch = _MODELS[name]()
    model, batch = model.to(device), batch.to(device)
    return 1e6 * _median_difference(model, DataParallel(model, [device]), batch, repeats)


_MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "one Linear": lambda: (nn.Linear(8, 8), torch.zeros(4, 8)),
    "52 thin layers": lambda: (nn.Sequential(*(nn.Linear(16, 16) for _ in range(52))), torch.zeros(4, 16)),
}
MODELS = tuple(_MODELS)


def _median_difference(first: nn.Module, second: nn.Module, batch: torch.Tensor, repeats: int) -> float:
    """Return by how many seconds a forward of the second takes longer; each pair is run in turn."""

    def wait() -> None:
        if batch.device.type != "cpu":
            torch.accelerator.synchronize(batch.device)

    differences = []
    for _ in range(repeats + _WARM_UP):
        seconds = []
        for module in (first, second):
            wait()
            began = time.perf_counter()
            module(batch)
            seconds.append(time.perf_counter() - began)
        differences.append(seconds[1] - seconds[0])
    return statistics.median(differences[_WARM_UP:])
