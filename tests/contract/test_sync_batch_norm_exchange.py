"""Synchronised batch norm where replicas branch, fail, are nested, or are called from several threads."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.batch_norms import (
    Branches,
    CheckpointedBatchNorm,
    ResidualBlock,
    assert_gradients_and_buffers_near,
    assert_near,
    branching_rows,
    compare_with_plain,
)
from helpers.comparisons import assert_all_same, assert_same, assert_unchanged, twins
from helpers.contract import (
    DEVICES,
    ON_CPU,
    Wrap,
    at_one_place,
    each_with,
    in_one_memory,
    in_threads,
    in_time,
    in_turn,
    label,
)
from helpers.failing import (
    FAILURES,
    FailsOn,
    FailureError,
    assert_failure_leaves_nothing,
    numbered_rows,
)
from helpers.losses import fresh, loss_of, penalty_loss
from helpers.modules import Calls, PassingMode
from unisono import DataParallel, data_parallel


@in_one_memory
def test_a_leaf_from_outside_with_synchronised_batch_norm(wrap: Wrap) -> None:
    """N5: replicas that share a leaf of the caller's still run backward at the same time."""
    outside = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.norm(torch.tanh(x * outside[model.which]))

    plain, model = twins(wrap, Calls(forward, norm=nn.BatchNorm1d(5), which=0), 3, sync_batch_norm=True)
    model.module.which = 1
    x = torch.randn(8, 5)
    for module in (plain, model):
        in_time(lambda module=module: loss_of(module(x)).backward())
        in_time(lambda module=module: penalty_loss(module, x).backward())
    assert_near(outside[1].grad, outside[0].grad, 1e-10)
    assert_gradients_and_buffers_near(model.module, plain, 1e-10)


# How three replicas of `Branches` go where the second one turns left -> the error.
DIFFERENT_WAYS = {
    "one of two": "replicas 0 and 2 called the batch norm of right.running_mean, replica 1 called the batch norm of l",
    "one more, last": "replicas 0 and 2 called the batch norm of left.running_mean, replica 1 called no further one",
    "checkpoint": "replicas 0 and 2 called the batch norm of right.running_mean, replica 1 called the batch norm of l",
}


@pytest.mark.parametrize("way", DIFFERENT_WAYS)
def test_replicas_that_the_data_leads_different_ways_are_an_error(wrap: Wrap, way: str) -> None:
    """N5, N11: it says where each replica is; nothing hangs, buffers are as before, and the next call is right."""
    plain, model = twins(wrap, Branches(way), 3, sync_batch_norm=True)
    compare_with_plain(model, plain, branching_rows(1.0, 1.0, 1.0))
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(RuntimeError, match=r"sync_batch_norm=True.* but they differ") as caught:
        in_time(lambda: model(branching_rows(5.0, 1.0, 5.0)))
    assert DIFFERENT_WAYS[way] in str(caught.value)
    assert any(note.startswith("raised in replica 0") for note in caught.value.__notes__)
    assert len(caught.value.__notes__) == 1
    with pytest.raises(RuntimeError, match="but they differ") as caught:
        in_time(lambda: model(branching_rows(1.0, 1.0, 5.0)))
    assert_unchanged(model.module, before)
    compare_with_plain(model, plain, branching_rows(5.0, 5.0, 5.0))


def loss_of_call(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return loss_of(call(x))


def test_replicas_of_which_some_have_no_backward_of_a_batch_norm_are_an_error(wrap: Wrap) -> None:
    """N5: their rows would miss the gradient that reaches them through the mean and the variance. If no output depends
    on it, it has no gradient, in no replica, as in the plain module."""
    plain, model = twins(wrap, Branches("unused"), 3, sync_batch_norm=True)
    for firsts, ways in (
        ((5.0, 1.0, 5.0), "replica 1 called the backward of the batch norm of both.running_mean, replicas 0 and 2 "),
        ((1.0, 5.0, 1.0), "replicas 0 and 2 called the backward of the batch norm of both.running_mean, replica 1 "),
    ):
        for of_call in (loss_of_call, penalty_loss):
            x = branching_rows(*firsts)
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            with pytest.raises(RuntimeError, match="but they differ") as caught:
                in_time(lambda of_call=of_call, x=x: of_call(model, x).backward())
            assert ways + "called no further one" in str(caught.value)
            assert_all_same([p.grad for p in model.parameters()], before, 0)
        plain.load_state_dict(model.module.state_dict())
        compare_with_plain(model, plain, branching_rows(1.0, 1.0, 1.0))
    for module in (plain, model):
        module.zero_grad()
    compare_with_plain(model, plain, branching_rows(5.0, 5.0, 5.0))
    assert model.module.both.weight.grad is None


def test_replicas_that_use_a_batch_norm_with_a_weight_of_zero(wrap: Wrap) -> None:
    """N5: the remedy that the error names: a gradient of zeros is one, and the rows get their part of the others'."""
    plain, model = twins(wrap, Branches("unused in part"), 3, sync_batch_norm=True)
    x_model, x_plain = fresh(branching_rows(5.0, 1.0, 5.0)), fresh(branching_rows(5.0, 1.0, 5.0))
    in_time(lambda: loss_of(model(x_model)).backward())
    hidden = plain.linear(x_plain)
    used = torch.tensor([0.0, 1.0, 0.0]).repeat_interleave(torch.tensor([3, 3, 2]))[:, None]
    loss_of(plain.both(torch.tanh(hidden + used * plain.left(hidden)))).backward()
    assert_near(x_model.grad, x_plain.grad)
    assert_gradients_and_buffers_near(model.module, plain)


class FailsBetween(FailsOn):
    """Fails between a batch norm and two others."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(super().forward(x))


ERRORS = [FailureError(7, "as asked"), KeyboardInterrupt()]


@at_one_place
@pytest.mark.parametrize(("error", "first_row", "in_backward"), each_with(ERRORS, FAILURES), ids=label)
def test_a_failure_releases_the_replicas_that_wait_in_batch_norm(
    wrap: Wrap, first_row: float, in_backward: bool, error: BaseException
) -> None:
    """F1, F3, N5, N11: the other replicas wait for the one that fails; the next call is right."""
    plain, model = twins(wrap, FailsBetween(), 3, sync_batch_norm=True)
    assert_failure_leaves_nothing(model, error, first_row, in_backward)
    for module in (model, plain):
        in_time(lambda module=module: loss_of(module(numbered_rows())).backward())
    model.module.calls = plain.calls  # counted once a forward, or twice
    assert_gradients_and_buffers_near(model.module, plain)


def test_a_failure_with_one_row_left_for_the_other_replica(wrap: Wrap) -> None:
    """F2, N5: the caller gets the failure, not the complaint of a replica that is left with a single row."""
    error = FailureError(7, "as asked")

    class FailsFirst(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 7:
                raise error
            return super().forward(x)

    model = wrap(FailsFirst(2), 2, sync_batch_norm=True, shares=[1, 7])
    with pytest.raises(FailureError) as caught:
        in_time(lambda: model(numbered_rows()))
    assert caught.value is error


@pytest.mark.parametrize(("outer_synchronised", "inner_synchronised"), [(True, False), (True, True), (False, True)])
def test_wrappers_inside_wrappers_with_batch_norm(
    wrap: Wrap, outer_synchronised: bool, inner_synchronised: bool
) -> None:
    """A10, N5: inside a replica of a synchronised wrapper every batch norm sees the whole batch."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    outer, model = twins(wrap, plain, 2, sync_batch_norm=outer_synchronised)
    model.module[2] = wrap(model.module[2], 2, sync_batch_norm=inner_synchronised)
    x = torch.randn(8, 5)
    if outer_synchronised:
        compare_with_plain(model, plain, x)
    else:  # each outer replica has 4 rows, and the inner wrapper sees all of those
        in_time(lambda: loss_of(model(x)).backward())
        loss_of(data_parallel(outer, x, in_turn(2), sync_batch_norm=False)).backward()
        assert_gradients_and_buffers_near(model.module, plain)


@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator object _checkpoint_without")  # torch 2.9 leaves it
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_a_backward_under_a_mode(wrap: Wrap, reentrant: bool) -> None:
    """N5, R13, R14: one call runs all replicas. A reentrant checkpoint recomputed with each replica's own rows there,
    and gradients were wrong."""
    plain, model = twins(wrap, CheckpointedBatchNorm(reentrant), sync_batch_norm=True)
    loss = loss_of(model(torch.randn(8, 5)))
    with pytest.raises(RuntimeError, match="which do not run now"), PassingMode():
        loss.backward()
    plain.load_state_dict(model.module.state_dict())
    compare_with_plain(model, plain, torch.randn(8, 5))


@pytest.mark.skipif(ON_CPU, reason="about accelerators")
def test_two_replicas_on_one_accelerator_are_refused() -> None:
    """N5, N11: torch runs their backwards in one thread, so the second would never begin."""
    with pytest.raises(ValueError, match=r"sync_batch_norm=True with device_ids=.* expected each accelerator once"):
        DataParallel(nn.BatchNorm1d(2), [DEVICES[0]] * 2, sync_batch_norm=True)
    model = DataParallel(nn.BatchNorm1d(2), [DEVICES[0]] * 2)
    with pytest.raises(ValueError, match="expected each accelerator once"):
        model.sync_batch_norm = True


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_synchronised_wrapper(
    wrap: Wrap, reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """N5, R14: the non-reentrant kind counts saved tensors: one device runs the whole batch, as the log says."""
    plain, model = twins(wrap, ResidualBlock(), 3, sync_batch_norm=True)
    x = torch.randn(8, 2, 4, 4)
    for module in (plain, model):
        in_time(lambda module=module: loss_of(checkpoint(module, fresh(x), use_reentrant=reentrant)).backward())
    assert_gradients_and_buffers_near(model.module, plain)
    assert ("runs the whole batch on its first device" in caplog.text) == (not reentrant)


def untracked() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh())


def test_a_synchronised_wrapper_under_a_mode(wrap: Wrap) -> None:
    """N5, R14: dispatch modes and torch.func transforms."""
    x = torch.randn(8, 5)
    expected, gradient = (
        torch.func.grad(lambda x, module=module: module(x).pow(3).sum())(x)
        for module in twins(wrap, untracked(), 3, sync_batch_norm=True)
    )
    assert_near(gradient, expected)


def test_synchronised_batch_norm_from_several_threads(wrap: Wrap) -> None:
    """F5, N5: calls that overlap do not exchange statistics with each other."""
    plain, model = twins(wrap, untracked(), 3, sync_batch_norm=True)
    batches = [torch.randn(7, 5) for _ in range(4)]

    def gradient(module: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        x = fresh(x)
        return torch.autograd.grad(loss_of(module(x)), x)[0]

    def call(number: int) -> None:
        for _ in range(10):
            assert_same(gradient(model, batches[number]), gradient(plain, batches[number]))

    in_threads(4, call)
