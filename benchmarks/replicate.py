"""How fast replicas are made: `unisono.replicate` against `torch.nn.parallel.replicate`, in one run.

    python benchmarks/replicate.py

torch's copy layer is replaced by one that copies nothing, so that only the work on modules is compared, and torch's
code runs on the CPU; ours does all its work. Two replicas on the CPU. The goal is a ratio of 8 or more on both models.
"""

import argparse
import importlib
from functools import partial
from unittest import mock

import torch
from timed import timed
from torch import nn

import unisono
from unisono.console.tables import table
from unisono.primitives.measured_shares import lower_quartile
from unisono.training import models

REPEATS = 40

torch_replicate = importlib.import_module("torch.nn.parallel.replicate")  # the module: its name is also the function's


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"torch {torch.__version__}, 2 replicas, lower quartiles of {REPEATS} runs in turn\n")
    rows = []
    for name, model in (
        ("ResNet-18", models.build("resnet18", num_classes=10, image_shape=(1, 28, 28))),
        ("500 blocks of Linear+ReLU", nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(500)))),
    ):
        functions = {"torch": torch_replicas, "unisono": unisono_replicas}
        times = timed({who: partial(make, model) for who, make in functions.items()}, REPEATS, num_untimed=3)
        theirs, ours = (1e3 * lower_quartile(times[who]) for who in functions)
        rows.append([name, f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.1f}"])
    print(table(["model", "torch, ms", "unisono, ms", "ratio"], rows))


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


if __name__ == "__main__":
    main()
