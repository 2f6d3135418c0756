"""The script of the README: train on every device, then compare a step with one of the plain module.

    python examples/first_steps.py

With fewer than two accelerators it uses two CPU replicas.
"""

import torch

import unisono

count = torch.accelerator.device_count()
devices = list(range(count)) if count > 1 else ["cpu", "cpu"]
torch.manual_seed(0)
inputs = torch.randn(600, 20)
labels = inputs[:, :5].argmax(1).to(devices[0])
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5)).to(devices[0])
model = unisono.DataParallel(net, devices)  # the line
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for _ in range(40):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f}, rows of each replica: {[timing.rows for timing in model.replica_timings]}")
report = unisono.verify(net, inputs, labels, torch.nn.functional.cross_entropy, device_ids=devices)
assert report.same
