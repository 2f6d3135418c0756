"""Synchronised batch norm where replicas branch, fail, are nested, or are called from several threads."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.batch_norms import ResidualBlock, assert_gradients_and_buffers_near, assert_near, compare_with_plain
from helpers.contract import (
    FAILURES,
    FailsOn,
    FailureError,
    Wrap,
    assert_failure_leaves_nothing,
    assert_is_the_replicas,
    assert_same,
    each_with,
    fresh,
    in_one_memory,
    in_threads,
    in_time,
    in_turn,
    loss_of,
    numbered_rows,
    over_engines,
    penalty_loss,
    twins,
)
from helpers.modules import Calls
from manyhands import data_parallel


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


class Branches(nn.Module):
    """Takes one branch or the other, by the first number of the first row."""

    def __init__(self, *, crossing: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.crossing = crossing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.left, self.right) if x[0, 0] < 3 else (self.right, self.left)
        return self.both(torch.tanh(second(torch.tanh(first(x))) if self.crossing else first(x)))


def test_branches_that_the_data_decides(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    """N5: each batch norm is over the rows that reach it, forward and backward; the log says so, and nothing hangs."""
    plain, model = twins(wrap, Branches(), 3, sync_batch_norm=True)
    x_model, x_plain = fresh(numbered_rows().sin()), fresh(numbered_rows().sin())
    x_model.data[[0, 3, 6], 0] = x_plain.data[[0, 3, 6], 0] = torch.tensor([5.0, 1.0, 5.0])  # right, left, right
    output = in_time(lambda: model(x_model))
    in_time(lambda: loss_of(output).backward())
    right = plain.right(torch.cat([x_plain[:3], x_plain[6:]]))
    parts = [right[:3], plain.left(x_plain[3:6]), right[3:]]
    loss_of(plain.both(torch.tanh(torch.cat(parts)))).backward()
    assert_near(x_model.grad, x_plain.grad)
    for mine, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad)
    assert "the batch norm of right.running_mean saw the rows of some replicas only" in caplog.text
    assert "both" not in caplog.text


def test_batch_norms_in_different_orders_do_not_hang(wrap: Wrap) -> None:
    """N5: where replicas wait for each other in a circle, one goes on with the rows that are at its batch norm."""
    model = wrap(Branches(crossing=True), 3, sync_batch_norm=True)
    for first_rows in ((0.0, 5.0, 0.0), (5.0, 0.0, 5.0), (5.0, 5.0, 0.0)):
        x = fresh(numbered_rows().cos())
        x.data[[0, 3, 6], 0] = torch.tensor(first_rows)
        in_time(lambda x=x: loss_of(model(x)).backward())
        assert x.grad.isfinite().all()


class FailsBetween(FailsOn):
    """Fails between a batch norm and two others."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(super().forward(x))


ERRORS = [FailureError(7, "as asked"), KeyboardInterrupt()]


@over_engines(
    "error, first_row, in_backward",
    each_with(ERRORS, FAILURES),
    processes=[*each_with(ERRORS[:1], FAILURES), *each_with(ERRORS[1:], [(3.0, False), (3.0, True)])],
    gloo=each_with(ERRORS[:1], [(0.0, True), (3.0, False), (3.0, True)]),
)
def test_a_failure_releases_the_replicas_that_wait_in_batch_norm(
    wrap: Wrap, first_row: float, in_backward: bool, error: BaseException, engine: str
) -> None:
    """F1, F3, N5, N11: the other replicas wait for the one that fails; the next call is right."""
    plain, model = twins(wrap, FailsBetween(), 3, sync_batch_norm=True)
    assert_failure_leaves_nothing(model, error, first_row, in_backward, engine)
    for module in (model, plain):
        in_time(lambda module=module: loss_of(module(numbered_rows())).backward())
    model.module.calls = plain.calls  # counted once a forward, or twice
    assert_gradients_and_buffers_near(model.module, plain)


def test_a_failure_with_one_row_left_for_the_other_replica(wrap: Wrap, engine: str) -> None:
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
    assert_is_the_replicas(caught.value, error, 1, engine)


@pytest.mark.parametrize("outer_synchronised", [False, True])
@pytest.mark.parametrize("inner_synchronised", [False, True])
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
    elif inner_synchronised:  # each outer replica has 4 rows, and the inner wrapper sees all of those
        in_time(lambda: loss_of(model(x)).backward())
        loss_of(data_parallel(outer, x, in_turn(2))).backward()
        assert_gradients_and_buffers_near(model.module, plain)


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
