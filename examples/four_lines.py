"""The four lines of the README: is it right for this model? `verify` says what differs, and the argument to write.

    python examples/four_lines.py

Each replica normalises its own rows, unless the second line has `sync_batch_norm=True`.
"""

import torch
from torch import nn

import unisono

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
model = unisono.DataParallel(net, ["cpu", "cpu"])  # two GPUs: net.to("cuda"), [0, 1]
inputs, labels = torch.randn(30, 20), torch.randint(5, (30,))
unisono.verify(model, inputs, labels, nn.functional.cross_entropy)
