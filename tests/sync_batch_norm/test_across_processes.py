"""Batch norm over all processes' rows is that of one device over all rows; the oracle is the plain module there."""

import re
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import unisono
from helpers.batch_norm_kernels import use_kernels
from helpers.batch_norms import BATCH_NORMS, Branches, branching_rows
from helpers.comparisons import assert_same_gradients
from helpers.ranks import drawn, on_two_ranks, run_on_devices, run_ranks
from helpers.twins import rows_of, train_twins, twins
from unisono.distributed import bucketed_all_reduce, process_group
from unisono.sync_batch_norm.across_processes import CrossProcessAllGather

SIZES = [[4, 9, 5, 1], [7, 3, 0, 2], [1, 1, 1, 1], [0, 6, 2, 5]]


def train(rank: int, world_size: int, name: str, **options: Any) -> tuple[float, ...]:
    make_model, make_batch = BATCH_NORMS[name]
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
    ends = run_on_devices(world_size, train, world_size, name, num_replicas=num_replicas)
    assert len(set(ends)) == 1, "every process ends with the same bits"


def as_on_accelerators(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Use kernels, and behave as with an accelerator's own backend: the host waits for no collective of it."""
    calls = use_kernels(patch)
    patch.setattr(process_group.Communicator, "waits_on_host", lambda self, group: group in (None, self._control))
    patch.setattr(
        process_group,
        "_all_gather_into",
        lambda flat, mine, group: torch.distributed.all_gather(list(flat), mine, group, True),
    )
    return calls


def penalty(rank: int, sizes: list[int], loss: str, by_kernels: bool, **options: Any) -> None:
    if by_kernels:
        as_on_accelerators(pytest.MonkeyPatch())

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
    run_on_devices(2, penalty, sizes, loss, by_kernels)


def train_by_kernels(rank: int, world_size: int, name: str, **options: Any) -> tuple[tuple[float, ...], list[str], str]:
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
    ends = train(rank, world_size, name, **options)
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
    (first, read, order), (second, _, other_order) = run_on_devices(2, train_by_kernels, 2, name)
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


# Forwards without gradients, and in eval mode


def norm(*, tracks: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=tracks), nn.Linear(5, 3)).double()


def update(rank: int, world_size: int, by_kernels: bool, mode: type, **options: Any) -> list[float]:
    """Compute running statistics anew, as after averaging weights, then go on training; return the buffers."""
    if by_kernels:
        as_on_accelerators(pytest.MonkeyPatch())
    model, oracle = twins(norm, sync_batch_norm=True, **options)
    batches = [(each[:world_size], drawn(sum(each[:world_size]), 4, seed=i) * 3) for i, each in enumerate(SIZES)]
    averaged = swa_utils.AveragedModel(model)
    for each in (model, averaged):
        with mode():
            swa_utils.update_bn([x[rows_of(rank, sizes)] for sizes, x in batches], each)
    swa_utils.update_bn([x for _, x in batches], oracle)
    for name, buffer in oracle.named_buffers():
        for each in (model.module, averaged.module.module):
            torch.testing.assert_close(each.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    sizes, x = batches[0]
    model.set_batch_weight(sizes[rank])  # of the next step: a forward without gradients does not take it
    if rank == 0:  # batch norms in eval mode need no other process
        model.module[1].eval()
        with mode():
            model(x)
        model.module[1].train()
    model(x[rows_of(rank, sizes)]).square().mean().backward()
    oracle(x).square().mean().backward()
    assert_same_gradients(model.module, oracle, rtol=1e-9, atol=1e-12)
    return [value for buffer in model.module.buffers() for value in buffer.flatten().tolist()]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("world_size", "num_replicas", "by_kernels"), [(3, 1, False), (2, 2, False), (2, 1, True)], ids=str
)
def test_training_mode_without_gradients(world_size, num_replicas, by_kernels, mode):
    """C15, C9, C2: each process had the statistics of its own rows; some have no rows in some batches."""
    ends = run_on_devices(world_size, update, world_size, by_kernels, mode, num_replicas=num_replicas)
    assert ends == [ends[0]] * world_size, "every process has the same bits"


@on_two_ranks(timeout_s=30)
def test_in_eval_mode_no_process_waits(rank: int, options: dict) -> None:
    """C15: the first process evaluates, before any step; it waited for the others, which were not there.

    A batch norm that needs the statistics of its batch in eval mode has those of the process where no gradients are
    summed. Where saved-tensor hooks are around the model, none was allowed.
    """
    options["sync_batch_norm"] = True
    model = unisono.DataParallel(norm(), **options)
    refusing = {
        "1.weight": (unisono.DataParallel(norm(tracks=False), **options), lambda module: module.eval()),
        "1.running_mean": (unisono.DataParallel(norm(), **options), lambda module: module.eval()[1].train()),
    }
    x = drawn(6, 4)
    if rank == 0:
        model.eval()
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.autograd.graph.save_on_cpu):
            with mode():
                torch.testing.assert_close(model(x), model.module(x))
        for name, (refused, prepare) in refusing.items():
            prepare(refused.module)
            for call in (refused, torch.compile(refused, backend="eager")):
                with pytest.raises(RuntimeError, match=f"the batch norm of {name} needs .*eval mode"):
                    call(x)
                with torch.no_grad():
                    torch.testing.assert_close(call(x), refused.module(x))
            with (
                torch.autograd.graph.save_on_cpu(),
                pytest.raises(RuntimeError, match=r"the batch norm of .* eval mode"),
            ):
                refused(x)
    model.train()
    model(x).sum().backward()
    model.eval().zero_grad()
    with torch.autograd.graph.save_on_cpu():
        model(x).mean().backward()
    expected = torch.autograd.grad(model.module(x).mean(), [*model.parameters()])
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])
