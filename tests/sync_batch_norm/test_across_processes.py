"""Batch norm over all processes' rows is that of one device over all rows; the oracle is the plain module there."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.modules import Calls
from helpers.ranks import run_ranks
from helpers.twins import assert_same_gradients, rows_of, twins

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [[4, 9, 5, 1], [7, 3, 0, 2], [1, 1, 1, 1], [0, 6, 2, 5]]
ENGINES = [{}, {"device_ids": ["cpu"] * 2}, {"device_ids": ["cpu"] * 2, "engine": "processes"}]


def features(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(module.norm(module.conv(x)))


def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = checkpoint(features, module, x, use_reentrant=False) if module.repeats else features(module, x)
    return module.flat(module.last(x.mean((2, 3))))


def block(repeats: bool) -> nn.Module:
    conv, norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
    last, flat = nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None, affine=False)
    return Calls(forward, conv=conv, norm=norm, last=last, flat=flat, repeats=repeats).double()


def train(rank: int, world_size: int, options: dict, repeats: bool) -> tuple[float, ...]:
    model, oracle = twins(lambda: block(repeats), sync_batch_norm=True, **options)
    generator = torch.Generator().manual_seed(3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, oracle)]
    for step in range(4):
        sizes = SIZES[step][:world_size]
        rows = rows_of(rank, sizes)
        x = torch.randn(sum(sizes), 2, 5, 5, generator=generator).double()
        y = torch.randn(sum(sizes), 3, generator=generator).double()
        for optimizer in optimizers:
            optimizer.zero_grad()
        output, expected = model(x[rows]), oracle(x)
        torch.testing.assert_close(output, expected[rows], rtol=1e-11, atol=1e-13)
        nn.functional.mse_loss(output, y[rows]).backward()
        nn.functional.mse_loss(expected, y).backward()
        assert_same_gradients(model.module, oracle, rtol=1e-9, atol=1e-12)
        for (name, b), c in zip(model.module.named_buffers(), oracle.buffers(), strict=True):
            torch.testing.assert_close(b, c, rtol=1e-11, atol=1e-13, msg=f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
    return tuple(t.double().sum().item() for t in model.module.state_dict().values())


def train_twice(rank: int, options: dict) -> list[tuple[float, ...]]:
    return [train(rank, 2, options, repeats) for repeats in (False, True)]


@pytest.mark.parametrize("options", ENGINES, ids=["one replica", "threads", "processes"])
def test_training_is_that_of_one_device_over_all_rows(options):
    """C9, C8, C2: without checkpoints, and with them."""
    ends = run_ranks(2, train_twice, options)
    assert ends[0] == ends[1], "every process ends with the same bits"


def test_four_processes_some_without_rows():
    """C9, C2"""
    ends = run_ranks(4, train, 4, {}, False)
    assert len(set(ends)) == 1


def penalty(rank: int, sizes: list[int], loss: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()

    model, oracle = twins(make, sync_batch_norm=True, loss=loss)
    x = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(3)).double()
    for each, rows in ((model, rows_of(rank, sizes)), (oracle, slice(None))):
        inputs = x[rows].clone().requires_grad_()
        (slopes,) = torch.autograd.grad(each(inputs).sum(), inputs, create_graph=True)
        squares = (slopes.norm(dim=1) - 1) ** 2
        (squares.mean() if loss == "mean" else squares.sum() / sum(sizes)).backward()
    assert_same_gradients(model.module, oracle, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("sizes", "loss"), [([4, 4], "mean"), ([5, 2], "sum")], ids=["equal rows", "a sum"])
def test_gradient_penalties(sizes, loss):
    """C5, C9"""
    run_ranks(2, penalty, sizes, loss)
