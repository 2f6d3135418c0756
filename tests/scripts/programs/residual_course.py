"""课程风格：残差网络、try_gpu、num_gpus 参数，训练函数里再包裹模型。"""

import time

import torch
from torch import nn


def try_gpu(i=0):
    return torch.device(f"cuda:{i}" if torch.cuda.device_count() > i else "cpu")


class Residual(nn.Module):
    def __init__(self, channels, strides=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, stride=strides)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Conv2d(channels, channels, 1, stride=strides) if strides > 1 else None
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (self.skip(x) if self.skip is not None else x))


def build(classes):
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    net.add_module("block1", nn.Sequential(Residual(8), Residual(8, 2)))
    net.add_module("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)))
    return net


def train(net, num_gpus, batch_size, lr):
    devices = [try_gpu(i) for i in range(num_gpus)]

    def init(m):
        if type(m) in (nn.Linear, nn.Conv2d):
            nn.init.normal_(m.weight, std=0.1)

    net.apply(init)
    net = nn.DataParallel(net, device_ids=devices)
    net.to(devices[0])
    trainer, criterion = torch.optim.SGD(net.parameters(), lr), nn.CrossEntropyLoss()
    images, labels = torch.rand(3 * batch_size, 1, 10, 10), torch.randint(10, (3 * batch_size,))
    start = time.time()
    for epoch in range(2):
        net.train()
        for X, y in zip(images.split(batch_size), labels.split(batch_size)):
            trainer.zero_grad()
            X, y = X.to(devices[0]), y.to(devices[0])
            loss = criterion(net(X), y)
            loss.backward()
            trainer.step()
            print(f"epoch {epoch} loss {loss.item():.6f}")
    assert time.time() > start


torch.manual_seed(5)
train(build(10), num_gpus=2, batch_size=16, lr=0.1)
