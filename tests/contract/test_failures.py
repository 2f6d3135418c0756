"""What fails in a replica is raised in the caller, and leaves nothing behind: no gradient, no buffer, no cycle."""

import copy
import threading

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_same_gradients, assert_unchanged, twins
from helpers.contract import Wrap, at_one_place, at_the_same_time, each_with, in_time, in_turn, over_places
from helpers.failing import FAILURES, FailsOn, FailureError, assert_failure_leaves_nothing, numbered_rows
from helpers.losses import loss_of
from helpers.modules import Calls, Fn
from unisono import data_parallel


@over_places(
    "error, first_row, in_backward",
    each_with([FailureError(7, "as asked"), KeyboardInterrupt(), SystemExit(3)], FAILURES),
    separate=each_with([FailureError(7, "as asked")], FAILURES),
)
def test_the_callers_exception_is_the_replicas(
    wrap: Wrap, error: BaseException, first_row: float, in_backward: bool
) -> None:
    """F1, F3, N11: the same object, with a note; no gradient has been added, and buffers are as before a failed
    forward; the next call works.
    """
    plain, model = twins(wrap, FailsOn(), 3, sync_batch_norm=False)
    caught = assert_failure_leaves_nothing(model, error, first_row, in_backward)
    replica = int(first_row) // 3
    notes = "".join(getattr(caught, "__notes__", []))
    if isinstance(error, FailureError):
        assert caught.code == 7
        if not in_backward:
            assert f"replica {replica} on {in_turn(3)[replica]}, rows {replica * 3} to " in notes
        else:
            assert f"replica {replica}" in notes
    in_time(lambda: loss_of(model(numbered_rows())).backward())
    loss_of(data_parallel(plain, numbered_rows(), in_turn(3), sync_batch_norm=False)).backward()
    assert_same_gradients(model.module, plain)


def test_the_first_of_several_exceptions(wrap: Wrap) -> None:
    """F2: the lowest replica's; the others are in its note."""
    model = wrap(FailsOn(), 3, sync_batch_norm=False)
    model.module.on = {3.0: ValueError("in the second"), 6.0: KeyError("in the third")}
    with pytest.raises(ValueError, match="in the second") as caught:
        model(numbered_rows())
    notes = "\n".join(caught.value.__notes__)
    for text in (f"replica 1 on {in_turn(3)[1]}", f"replica 2 on {in_turn(3)[2]}", "KeyError", "in the third"):
        assert text in notes


def test_a_failed_backward_is_not_counted_twice(wrap: Wrap) -> None:
    """F1: a backward that is tried again, on a kept graph, gives the right gradient or an error."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def fail_once(grad: torch.Tensor) -> None:
            if model.errors:
                raise model.errors.pop()

        y = model.linear(x)
        if x[0, 0] == 3:
            y.register_hook(fail_once)
        return y

    model = wrap(Calls(forward, linear=nn.Linear(2, 2), errors=[FailureError(9, "once")]), 3)
    plain = copy.deepcopy(model.module.linear)
    loss = loss_of(model(numbered_rows()))
    with pytest.raises(FailureError):
        loss.backward(retain_graph=True)
    loss_of(plain(numbered_rows())).backward()
    try:
        loss.backward()
    except RuntimeError:
        assert model.module.linear.weight.grad is None
    else:
        assert_same_gradients(model.module.linear, plain)


@at_one_place
def test_buffers_are_as_before_when_outputs_do_not_fit_together(wrap: Wrap) -> None:
    """N11, G5: a failure after every replica has succeeded."""

    class Disagrees(FailsOn):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {f"starts with {x[0, 0]}": super().forward(x)}

    model = wrap(Disagrees(), sync_batch_norm=False)
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(ValueError, match="different keys"):
        model(numbered_rows())
    assert_unchanged(model.module, before)


@at_the_same_time
def test_an_interrupt_in_one_replica_does_not_wait_for_another(wrap: Wrap) -> None:
    """F3: raised promptly, although a third replica is still busy."""
    release = threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 3:
            raise KeyboardInterrupt
        if x[0, 0] == 6:
            release.wait()
        return x

    model = wrap(Fn(wait), 3)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_time(lambda: model(numbered_rows()))
    finally:
        release.set()
