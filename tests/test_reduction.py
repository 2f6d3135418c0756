"""Gradients over processes are those of one device over all processes' rows. The oracle is the plain module there."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn

import manyhands
from ranks import run_ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [[4, 9, 5, 1], [7, 3, 0, 2], [1, 1, 1, 1], [0, 6, 2, 5]]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def rows_of(rank: int, sizes: list[int]) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def batch(sizes: list[int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(sum(sizes), 5, generator=generator).double()
    return x, torch.randn(sum(sizes), 3, generator=generator).double()


def assert_same_gradients(module: nn.Module, oracle: nn.Module) -> None:
    for (name, parameter), other in zip(module.named_parameters(), oracle.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-11, atol=1e-13, msg=name)


def twins(**options) -> tuple[manyhands.DataParallel, nn.Module]:
    """Return a wrapped module, and a plain one with the same values."""
    module = perceptron()
    model = manyhands.DataParallel(module, **options)
    oracle = perceptron()
    oracle.load_state_dict(module.state_dict())
    return model, oracle


def train(rank: int, world_size: int, options: dict, loss: str) -> list[float]:
    model, oracle = twins(loss=loss, **options)
    generator = torch.Generator().manual_seed(5)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, oracle)]
    for step in range(6):
        sizes = SIZES[step % len(SIZES)][:world_size]
        x, y = batch(sizes, generator)
        rows = rows_of(rank, sizes)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows], reduction=loss).backward()
        nn.functional.mse_loss(oracle(x), y, reduction=loss).backward()
        assert_same_gradients(model.module, oracle)
        for optimizer in optimizers:
            optimizer.step()
    return [p.sum().item() for p in model.parameters()]


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {}),
        (2, {"device_ids": ["cpu"] * 2}),
        (2, {"device_ids": ["cpu"] * 2, "engine": "processes"}),
        (4, {}),
    ],
    ids=["2x1", "2x2 threads", "2x2 processes", "4x1"],
)
def test_training_is_that_of_one_device_over_all_rows(world_size, options, loss):
    """C1, C2, C13: batches of different sizes, and none."""
    ends = run_ranks(world_size, train, world_size, options, loss)
    assert all(end == ends[0] for end in ends), "every process ends with the same bits"
