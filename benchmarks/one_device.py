"""What the wrapper costs on one device: `DataParallel(model, ["cpu"])` against the model, in one run.

    python benchmarks/one_device.py

The goal is at most 20 microseconds a forward, however large the model: nothing in it grows with the model.
"""

import statistics
import time

import torch
from torch import nn

import manyhands

REPEATS = 2000


def main() -> None:
    print(f"torch {torch.__version__}, medians of {REPEATS} interleaved forwards, microseconds")
    print(f"{'model':<24}{'plain':>10}{'wrapped':>10}{'cost':>8}")
    for name, model, width in (
        ("one Linear", nn.Linear(8, 8), 8),
        ("52 thin layers", nn.Sequential(*(nn.Linear(16, 16) for _ in range(52))), 16),
    ):
        plain, wrapped = medians(model, manyhands.DataParallel(model, ["cpu"]), torch.zeros(4, width))
        print(f"{name:<24}{plain * 1e6:>10.1f}{wrapped * 1e6:>10.1f}{(wrapped - plain) * 1e6:>8.1f}")


def medians(first: nn.Module, second: nn.Module, batch: torch.Tensor) -> tuple[float, float]:
    """Return the median seconds of a forward of each, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS + 20):
        for module, seconds in zip((first, second), times, strict=True):
            started = time.perf_counter()
            module(batch)
            seconds.append(time.perf_counter() - started)
    return statistics.median(times[0][20:]), statistics.median(times[1][20:])


if __name__ == "__main__":
    main()
