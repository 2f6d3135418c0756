"""The script of the README: train on every device, then compare a step with one of the plain module.

    python examples/first_steps.py

With fewer than two accelerators it uses two CPU replicas.
"""

import torch
from torch import nn

import unisono

count = torch.accelerator.device_count()
devices = list(range(count)) if count > 1 else ["cpu", "cpu"]
inputs = torch.randn(600, 20)
labels = inputs[:, :5].argmax(1).to(devices[0])
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(devices[0])
model = unisono.DataParallel(net, devices)  # the line
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(10):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f}, rows: {[each.rows for each in model.replica_timings]}")
unisono.verify(model, inputs, labels, nn.functional.cross_entropy)
