"""How fast replicas are made: `unisono.replicate` against `torch.nn.parallel.replicate`, in one run.

    python benchmarks/replicate.py

torch's copy layer is replaced by one that copies nothing, so that only the work on modules is compared, and torch's
code runs on the CPU; ours does all its work. Two replicas on the CPU. The goal is a ratio of 8 or more on both models.
"""

import importlib
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import unisono
from unisono.training import models

REPEATS = 40

torch_replicate = importlib.import_module("torch.nn.parallel.replicate")  # the module: its name is also the function's


def main() -> None:
    print(f"torch {torch.__version__}, 2 replicas, medians of {REPEATS} interleaved runs, milliseconds")
    print(f"{'model':<32}{'torch':>10}{'unisono':>12}{'ratio':>8}")
    for name, model in (
        ("ResNet-18", models.build("resnet18", num_classes=10, image_shape=(1, 28, 28))),
        ("500 blocks of Linear+ReLU", nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(500)))),
    ):
        theirs, ours = measured_in_turn(
            lambda model=model: torch_replicas(model), lambda model=model: unisono_replicas(model)
        )
        print(f"{name:<32}{theirs * 1e3:>10.2f}{ours * 1e3:>12.2f}{theirs / ours:>8.1f}")


def torch_replicas(model: nn.Module) -> object:
    def no_copies(tensors: list[torch.Tensor], devices: list[int], detach: bool = False) -> list[list[torch.Tensor]]:
        return [list(tensors) for _ in devices]

    with (
        mock.patch.object(torch_replicate, "_broadcast_coalesced_reshape", no_copies),
        mock.patch.object(torch_replicate, "_get_device_index", lambda device, optional: device),
    ):
        return torch_replicate.replicate(model, [0, 1])


def unisono_replicas(model: nn.Module) -> object:
    return unisono.replicate(model, ["cpu", "cpu"])


def measured_in_turn(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of each, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS + 3):
        for function, seconds in zip((first, second), times, strict=True):
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
    return statistics.median(times[0][3:]), statistics.median(times[1][3:])


if __name__ == "__main__":
    main()
