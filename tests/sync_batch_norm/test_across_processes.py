"""Batch norm over all processes' rows is that of one device over all rows; the oracle is the plain module there."""

import re
import sys
from collections import Counter

import pytest
import torch
from torch import nn

import unisono
from helpers.batch_norm_kernels import use_kernels
from helpers.batch_norms import BATCH_NORMS, Branches, branching_rows
from helpers.ranks import drawn, on_own_devices, run_ranks
from helpers.twins import assert_same_gradients, rows_of, train_twins, twins
from unisono.distributed import bucketed_all_reduce, process_group
from unisono.sync_batch_norm.across_processes import CrossProcessAllGather

SIZES = [[4, 9, 5, 1], [7, 3, 0, 2], [1, 1, 1, 1], [0, 6, 2, 5]]


def train(rank: int, world_size: int, num_replicas: int, name: str) -> tuple[float, ...]:
    make_model, make_batch = BATCH_NORMS[name]
    with on_own_devices(rank, num_replicas) as options:
        batches = []
        for step, of_all in enumerate(SIZES):
            torch.manual_seed(step)
            batches.append((of_all[:world_size], make_batch(sum(of_all[:world_size])).double()))
        model, oracle = twins(lambda: make_model().double(), sync_batch_norm=True, **options)
        return train_twins(rank, model, oracle, batches)


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "name"),
    [
        pytest.param(4, 1, "residual block", id="one replica"),
        pytest.param(2, 2, "residual block", id="threads"),
        pytest.param(2, 2, "checkpoint, non-reentrant", id="threads, checkpoints"),
        pytest.param(2, 2, "checkpoint, reentrant", id="threads, reentrant checkpoints"),
    ],
)
def test_training_is_that_of_one_device_over_all_rows(world_size, num_replicas, name):
    """C9, C8, C2: some processes have no rows in some steps."""
    ends = run_ranks(world_size, train, world_size, num_replicas, name)
    assert len(set(ends)) == 1, "every process ends with the same bits"


def as_on_accelerators(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Use kernels, and behave as with an accelerator's own backend: the host waits for no collective of it."""
    calls = use_kernels(patch)
    patch.setattr(process_group.Communicator, "waits_on_host", lambda self, group: group in (None, self._control))
    patch.setattr(
        process_group.torch_private,
        "all_gather_into",
        lambda flat, mine, group: torch.distributed.all_gather(list(flat), mine, group, True),
    )
    return calls


def penalty(rank: int, sizes: list[int], loss: str, by_kernels: bool) -> None:
    if by_kernels:
        as_on_accelerators(pytest.MonkeyPatch())
    with on_own_devices(rank) as options:
        compare_penalties(rank, sizes, loss, options)


def compare_penalties(rank: int, sizes: list[int], loss: str, options: dict) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()

    model, oracle = twins(make, sync_batch_norm=True, loss=loss, **options)
    x = drawn(sum(sizes), 4, seed=3)
    for each, rows in ((model, rows_of(rank, sizes)), (oracle, slice(None))):
        inputs = x[rows].clone().requires_grad_()
        (slopes,) = torch.autograd.grad(each(inputs).sum(), inputs, create_graph=True)
        squares = (slopes.norm(dim=1) - 1) ** 2
        (squares.mean() if loss == "mean" else squares.sum() / sum(sizes)).backward()
    assert_same_gradients(model.module, oracle, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("by_kernels", [False, True], ids=["", "by kernels"])
@pytest.mark.parametrize(("sizes", "loss"), [([4, 4], "mean"), ([5, 2], "sum")], ids=["equal rows", "a sum"])
def test_gradient_penalties(sizes, loss, by_kernels):
    """N3, C5, C9"""
    run_ranks(2, penalty, sizes, loss, by_kernels)


def train_by_kernels(rank: int, world_size: int, name: str) -> tuple[tuple[float, ...], list[str], str]:
    """Train; return the state, what was read from tensors of batch norms, and the order of collectives."""
    patch = pytest.MonkeyPatch()
    calls = as_on_accelerators(patch)
    for size in ("FIRST_BUCKET_BYTES", "BUCKET_BYTES"):
        patch.setattr(bucketed_all_reduce, size, 64)  # several buckets
    read: list[str] = []
    order: list[str] = []
    for method in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        patch.setattr(torch.Tensor, method, noting_reads(read, method))
    for owner, method, letter in (
        (CrossProcessAllGather, "_forward", "f"),
        (CrossProcessAllGather, "_backward", "b"),
        (bucketed_all_reduce.BucketedAllReduce, "_start", "g"),
    ):
        call = getattr(owner, method)
        patch.setattr(owner, method, lambda *args, call=call, letter=letter: (order.append(letter), call(*args))[1])
    ends = train(rank, world_size, 1, name)
    assert calls["batch_norm_stats"]
    assert calls["batch_norm_backward_elemt"]
    return ends, read, "".join(order)


def noting_reads(read: list[str], method: str):
    call = getattr(torch.Tensor, method)

    def noted(tensor: torch.Tensor, *args):
        caller = sys._getframe(1).f_code.co_filename
        if tensor.is_floating_point() and "unisono/sync_batch_norm" in caller:
            read.append(method)
        return call(tensor, *args)

    return noted


@pytest.mark.parametrize("name", ["frozen", "residual block", "checkpoint, non-reentrant"])
def test_by_kernels(name: str) -> None:
    """C9, C8, C2: counts and weights stay on the device; some processes have no rows in some steps.

    Gradients are sent when all exchanges of a backward have begun: an accelerator wants one order on all ranks.
    """
    (first, read, order), (second, _, other_order) = run_ranks(2, train_by_kernels, 2, name)
    assert first == second
    assert read == []
    assert order == other_order
    assert re.fullmatch("(f[fb]*bg+)+", order)  # checkpoints recompute in backward
    assert "gg" in order


def takes_another_way(rank: int) -> str:
    as_on_accelerators(pytest.MonkeyPatch())
    model = unisono.DataParallel(Branches("one of two"), ["cpu"], sync_batch_norm=True)
    with pytest.raises(RuntimeError) as raised:
        model(branching_rows(*[5.0 * rank] * 3)).sum().backward()
    return str(raised.value)


def test_by_kernels_processes_that_take_different_ways() -> None:
    """C11: noticed at the next batch norm at the latest."""
    for message in run_ranks(2, takes_another_way):
        assert "different batch norms: rank" in message or "failed while this one was at" in message
