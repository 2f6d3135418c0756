"""What fails in a replica is raised in the caller, and leaves nothing behind: no gradient, no buffer, no cycle."""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_same_gradients, assert_unchanged, twins
from helpers.contract import ON_CPU, Wrap, at_one_place, at_the_same_time, each_with, in_time, in_turn, over_places
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


class NotesAreTextError(Exception):
    __notes__ = "some text"


class NotesAreNumbersError(ValueError):
    def __init__(self) -> None:
        self.__notes__ = [1, 2]


class NoNotesError(RuntimeError):
    def add_note(self, note: str) -> None:
        raise KeyboardInterrupt


class FixedError(Exception):
    """As an exception that is a frozen dataclass."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class SilentError(RuntimeError):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@over_places(
    "error, in_backward, options",
    each_with(
        [NotesAreTextError(), NotesAreNumbersError(), NoNotesError(), FixedError(), SilentError()],
        [(in_backward, options) for in_backward in (False, True) for options in ({}, {"rescue": True})],
    ),
    separate=[(NotesAreTextError(), False, {}), (NoNotesError(), True, {})],
)
def test_an_exception_that_takes_no_note(
    wrap: Wrap, error: BaseException, in_backward: bool, options: dict[str, Any]
) -> None:
    """F1, F2: it is the caller's as it is, also where another replica has raised one."""
    if isinstance(error, FixedError) and in_backward and not ON_CPU:
        pytest.skip("torch's mode for the default device replaces it, around the call of backward")
    model = wrap(FailsOn(), 3, sync_batch_norm=False, **options)
    assert_failure_leaves_nothing(model, error, 3.0, in_backward)
    model.module.on, model.module.in_backward = {3.0: FailureError(1, "first"), 6.0: error}, in_backward
    with pytest.raises(FailureError):
        in_time(lambda: loss_of(model(numbered_rows())).backward())


class ClosedError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt if name.startswith("__") else OSError


@at_one_place
@pytest.mark.parametrize(("in_backward", "options"), each_with([False, True], [({},), ({"rescue": True},)]))
def test_an_exception_whose_class_answers_nothing(wrap: Wrap, in_backward: bool, options: dict[str, Any]) -> None:
    """F1: no method of its class is asked for anything on its way."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model.linear(x)
        if x[0, 0] != 3:
            return y
        if not in_backward:
            raise ClosedError
        y.register_hook(fail)
        return y

    def fail(_: torch.Tensor) -> None:
        raise ClosedError

    model = wrap(Calls(forward, linear=nn.Linear(2, 2)), 3, **options)
    with pytest.raises(ClosedError):
        in_time(lambda: loss_of(model(numbered_rows())).backward())
    if not in_backward:
        with pytest.raises(ClosedError):
            in_time(lambda: list(model.map([numbered_rows()[3:]])))


class ComparesNotError(RuntimeError):
    def __eq__(self, other: object) -> bool:
        raise OSError

    __hash__ = RuntimeError.__hash__


@at_one_place
def test_an_exception_from_another_one_that_does_not_compare(wrap: Wrap) -> None:
    """F1: raised by another replica than the caller's; it was waited for, for ever."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 3:
            raise ComparesNotError("second") from ComparesNotError("first")
        return model.linear(x)

    model = wrap(Calls(forward, linear=nn.Linear(2, 2)), 3)
    with pytest.raises(ComparesNotError, match="second"):
        in_time(lambda: model(numbered_rows()))


@at_one_place
@pytest.mark.parametrize("sync_batch_norm", [False, True])
@pytest.mark.parametrize("within", ["profile", "no_sync"])
def test_a_frozen_exception(wrap: Wrap, within: str, sync_batch_norm: bool) -> None:
    """F1: contextlib sets the traceback of what comes through its contexts: FrozenInstanceError, or AttributeError."""
    error = FixedError()
    module = FailsOn()
    module.on = {0.0: error}
    model = wrap(module, sync_batch_norm=sync_batch_norm)

    def step() -> None:
        with getattr(model, within)():
            model(numbered_rows())

    with pytest.raises(FixedError) as caught:
        in_time(step)
    assert caught.value is error


@at_one_place
@pytest.mark.parametrize(
    "error", [NotesAreTextError(), NotesAreNumbersError(), NoNotesError(), SilentError(), FixedError()]
)
def test_an_exception_that_takes_no_note_in_a_map(wrap: Wrap, error: Exception) -> None:
    """I6: of a batch, of the loader, and of a metric; it was waited for, for ever, or it was FrozenInstanceError."""

    def metric(output: torch.Tensor, target: torch.Tensor) -> float:
        raise error

    def batches() -> Iterator[torch.Tensor]:
        yield torch.ones(2, 2)
        raise error

    model = wrap(FailsOn(), sync_batch_norm=False)
    calls = [
        lambda: list(model.map([torch.zeros(2, 2), torch.ones(2, 2)])),
        lambda: list(model.map(batches())),
        lambda: model.evaluate([(torch.ones(2, 2), torch.ones(2))], metric),
    ]
    model.module.on = {0.0: error}
    for call in calls:
        with pytest.raises(type(error)) as caught:
            in_time(call)
        assert caught.value is error


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
