"""Batch norm over all processes' rows is that of one device over all rows; the oracle is the plain module there."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn

from helpers.batch_norms import BATCH_NORMS
from helpers.ranks import run_ranks
from helpers.twins import assert_same_gradients, rows_of, train_twins, twins

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [[4, 9, 5, 1], [7, 3, 0, 2], [1, 1, 1, 1], [0, 6, 2, 5]]
TWO = {"device_ids": ["cpu"] * 2}


def train(rank: int, world_size: int, options: dict, name: str) -> tuple[float, ...]:
    make_model, make_batch = BATCH_NORMS[name]
    batches = []
    for step, of_all in enumerate(SIZES):
        torch.manual_seed(step)
        batches.append((of_all[:world_size], make_batch(sum(of_all[:world_size])).double()))
    model, oracle = twins(lambda: make_model().double(), sync_batch_norm=True, **options)
    return train_twins(rank, model, oracle, batches)


@pytest.mark.parametrize(
    ("world_size", "options", "name"),
    [
        pytest.param(4, {}, "residual block", id="one replica"),
        pytest.param(2, TWO, "residual block", id="threads"),
        pytest.param(2, TWO, "checkpoint, non-reentrant", id="threads, checkpoints"),
        pytest.param(2, {**TWO, "engine": "processes"}, "residual block", id="processes"),
    ],
)
def test_training_is_that_of_one_device_over_all_rows(world_size, options, name):
    """C9, C8, C2: some processes have no rows in some steps."""
    ends = run_ranks(world_size, train, world_size, options, name)
    assert len(set(ends)) == 1, "every process ends with the same bits"


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
