"""Models for which the rule of torch.nn.DataParallel gives other numbers than one device, and the line that does not.

    python examples/same_numbers.py

An error is the norm of the difference of all gradients, over the norm of one device's.
"""

import copy
import warnings

import torch
from torch import nn

import unisono

FOUR = list(range(4)) if torch.accelerator.device_count() >= 4 else ["cpu"] * 4
FIRST = torch.accelerator.current_accelerator() if FOUR[0] == 0 else "cpu"


class WithLoss(nn.Module):
    """A classifier that returns its own loss, the mean over its rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))

    def forward(self, inputs, labels):
        return nn.functional.cross_entropy(self.layers(inputs), labels)


class WithState(nn.Module):
    """A model with an LSTM inside, which returns its last hidden state; its batch is on dimension 1."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, sequences):
        return self.lstm(sequences)[1][0]


def gradient(net, step, options=None):
    """Return all gradients of a step as one vector; `options` are those of the wrapper, None: one device."""
    net = copy.deepcopy(net)
    step(net if options is None else unisono.DataParallel(net, FOUR, **options)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def compare(name, net, step, as_torch, **option):
    one = gradient(net, step)
    theirs, ours = (((gradient(net, step, each) - one).norm() / one.norm()).item() for each in (as_torch, option))
    [(argument, value)] = option.items()
    print(f"{name}: gradients {theirs:.0%} off by torch's rule, {ours:.0e} with {argument}={value!r}")


torch.manual_seed(0)
warnings.simplefilter("ignore")  # the library warns of torch's rule, each time

# 30 rows on 4 devices are 8, 8, 8 and 6: the mean of four means is not the mean of 30.
rows, labels = torch.randn(30, 20, device=FIRST), torch.randint(5, (30,), device=FIRST)
net = WithLoss().to(FIRST)
compare("loss inside forward", net, lambda model: model(rows, labels).mean(), {}, scalars="mean")

# Each replica normalises its own 4 pictures, not all 16.
pictures, classes = torch.randn(16, 3, 8, 8, device=FIRST), torch.randint(5, (16,), device=FIRST)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).to(FIRST)
compare(
    "batch norm", net, lambda model: nn.functional.cross_entropy(model(pictures), classes), {}, sync_batch_norm=True
)

# torch joins all outputs along dimension 0; the state has its layers there, and its batch on dimension 1.
net, sequences = WithState().to(FIRST), torch.randn(8, 5, 8, device=FIRST)
shapes = [tuple(unisono.DataParallel(net, FOUR, out_dims=dim)(sequences).shape) for dim in (0, 1)]
one_device = tuple(net(sequences).shape)
print(f"state of an LSTM: {shapes[0]} by torch's rule, {shapes[1]} with out_dims=1; {one_device} on one device")
