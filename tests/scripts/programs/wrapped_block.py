"""只并行一个模块；之后用四个基本函数自己拼出 data_parallel。"""

import torch
import torch.nn as nn
from torch import optim

torch.manual_seed(3)
device_ids = [0, 1]
on_gpus = torch.cuda.device_count() > 1


class ThreeBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 20)
        self.middle = nn.DataParallel(nn.Linear(20, 20))
        self.last = nn.Linear(20, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(self.middle(x))
        return self.last(x)


def parallel_by_hand(module, inputs, device_ids, output_device=None):
    if not device_ids:
        return module(inputs)
    output_device = device_ids[0] if output_device is None else output_device
    replicas = nn.parallel.replicate(module, device_ids)
    shards = nn.parallel.scatter(inputs, device_ids)
    outputs = nn.parallel.parallel_apply(replicas[: len(shards)], shards)
    return nn.parallel.gather(outputs, output_device)


model = ThreeBlocks()
if torch.cuda.is_available():
    model.cuda()
optimizer = optim.SGD(model.parameters(), lr=0.05)
x, target = torch.randn(30, 10), torch.randn(30, 1)
if torch.cuda.is_available():
    x, target = x.cuda(), target.cuda()
for step in range(5):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    print("step", step, "loss", loss.item())

model.middle = model.middle.module
by_hand = parallel_by_hand(model, x, device_ids if on_gpus else [])
print("by hand loss", nn.functional.mse_loss(by_hand, target).item())
