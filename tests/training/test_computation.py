"""The arithmetic of a step. That it is captured in CUDA graphs is in tests/gpu/test_training.py."""

import copy

import torch
from torch import nn

from unisono import DataParallel
from unisono.training.computation import Computation

IMAGES = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(20) % 10


def test_steps_are_those_of_torchs_sgd() -> None:
    """Bit for bit, the first one too: momenta begin with zeros here, and with the first gradient there."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))
    computed = Computation(DataParallel(ours, ["cpu"]), ours, autocast=False, whole=False)
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(theirs.parameters(), momentum=0.9, weight_decay=5e-4)
    for number in range(4):
        for module in (ours, theirs):
            module.zero_grad()
            nn.functional.cross_entropy(module(IMAGES), LABELS).backward()
        optimizer.param_groups[0]["lr"] = rate = 0.1 / (number + 1)
        optimizer.step()
        computed.update(rate)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
