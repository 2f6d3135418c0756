"""The traceback of a user's error is the plain module's: at the end the same frames, in between none of unisono's.

A shape error in a module, where the plain module had 23 lines, had 63: the frames of the wrapper and of the pool of
threads.
"""

import pdb
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from helpers.contract import Wrap, at_one_place, in_turn
from helpers.garbage import no_garbage
from helpers.modules import Composed, Fn, WithBackward
from helpers.programs import until

_OURS = str(Path(unisono.__file__).parent)
_MOST_LINES_MORE = 10  # the notes; in backward also the node of torch's graph that runs the replicas' backward


class Misfit(nn.Module):
    """Its second layer does not fit the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marker = "forward's own variable"
        y: torch.Tensor = self.layers(x)
        return y if marker else x


class MisfitLater(Misfit):
    """Fails in the replica whose first row is 4 or more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x[0] < 4 else super().forward(torch.zeros(8, 5))


class InChain(nn.Module):
    """Raises a ValueError that has a KeyError as its cause; where x is positive, as its context."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.any():
            return x
        try:
            return {}["a"] * x
        except KeyError as error:
            if x.sum() > 0:
                raise ValueError("with a context")  # noqa: B904
            raise ValueError("with a cause") from error


def fail(grad: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("in backward")


def raised(call: Callable[..., Any], *inputs: Any) -> BaseException:
    """Return what a call raises."""
    try:
        call(*inputs)
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def frames_of(error: BaseException) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame, without those that lead from this file to the call."""
    return [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)][1:]


def assert_reads_as(error: BaseException, plain: BaseException, first: str) -> None:
    """Assert that an error has the plain module's frames, from the first that is in a function of that name on."""
    frames, of_plain = frames_of(error), frames_of(plain)
    theirs = of_plain[[name for _, _, name in of_plain].index(first) :]
    assert frames[-len(theirs) :] == theirs
    assert not [file for file, _, _ in frames if file.startswith(_OURS)]
    lines, of_plain_lines = ["".join(traceback.format_exception(e)).splitlines() for e in (error, plain)]
    assert len(lines) <= len(of_plain_lines) + _MOST_LINES_MORE
    assert lines.count("Traceback (most recent call last):") == of_plain_lines.count(lines[0])
    assert "raised in " in "\n".join(lines)


def test_an_error_in_forward(wrap: Wrap) -> None:
    """F13: in the first replica's; torch's call of the replica is not shown beside that of the wrapper.

    IPython shows seven lines for each frame, so that two more frames were 14 more lines in a notebook.
    """
    module, x = Misfit(), torch.zeros(8, 5)
    model, plain = wrap(module, 2), raised(module, x)
    for call in (model, model.forward, lambda x: model.call("forward", x)):
        assert_reads_as(raised(call, x), plain, "forward")
    assert frames_of(raised(model, x)) == frames_of(plain)
    assert frames_of(raised(model.call, "forward", x))[0][2] == "forward"
    with pytest.raises(TypeError, match="missing 1 required positional argument") as missing:
        model()
    assert frames_of(missing.value)[-1] == frames_of(raised(module))[-1]  # torch's call itself stays where it fails


def test_an_error_in_another_replica(wrap: Wrap) -> None:
    """F13: in a thread of its own."""
    module = MisfitLater()
    error = raised(wrap(module, 3), torch.arange(6.0))
    assert_reads_as(error, raised(module, torch.arange(4.0, 6)), "forward")
    assert error.__notes__ == [f"raised in replica 2 on {in_turn(3)[2]}, rows 4 to 5 of 6"]


@pytest.mark.parametrize("value", [-1.0, 1.0], ids=["cause", "context"])
@pytest.mark.parametrize("row", [0, 7], ids=["first replica", "second replica"])
def test_a_chain_of_errors(wrap: Wrap, value: float, row: int) -> None:
    """F13: the user's chain stays, and nothing of ours is in it."""
    module, x = InChain(), torch.zeros(8)
    x[row] = value
    error, plain = raised(wrap(module, 2), x), raised(module, x)
    assert_reads_as(error, plain, "forward")
    assert (error.__cause__ is None) == (plain.__cause__ is None)
    chained, of_plain = error.__cause__ or error.__context__, plain.__cause__ or plain.__context__
    assert type(chained) is type(of_plain) is KeyError
    assert frames_of(chained) == frames_of(of_plain)


def test_an_error_in_backward(wrap: Wrap) -> None:
    """F13"""
    module = Fn(lambda y: WithBackward.apply(y, fail), nn.Linear(5, 2))
    outputs = [call(torch.zeros(8, 5)).sum() for call in (wrap(module, 2), module)]
    error, plain = [raised(output.backward) for output in outputs]
    assert_reads_as(error, plain, "fail")


@pytest.mark.only_on("linux", "macos", because="signals as of a terminal")
def test_ctrl_c_ends_in_the_users_code(wrap: Wrap) -> None:
    """F13: in forward and backward, where the module runs, where a step waits, and at a step's end."""

    def interrupt(grad: torch.Tensor) -> None:
        signal.raise_signal(signal.SIGINT)

    def forward(x: torch.Tensor) -> torch.Tensor:
        is_here = bool(x[0] == where)
        if call is of_forward:  # with a default device torch drops what a handler raises in a comparison
            compared.append(is_here)
            until(lambda: len(compared) == 2)
        if is_here:
            interrupt(x)
        return x

    def backward(x: torch.Tensor) -> torch.Tensor:
        output = x * 2
        if x[0] == where:
            output.register_hook(interrupt)
        return output

    x, compared = torch.arange(8.0, requires_grad=True), list[bool]()
    of_forward, of_backward = wrap(Fn(forward), 2), wrap(Fn(backward), 2)
    for where in (0.0, 4.0):  # of the first replica, in the caller's thread; of another, whose signal the caller gets
        for call in (of_forward, lambda x: of_backward(x).sum().backward(), lambda x: list(of_forward.map([x, x[4:]]))):
            compared.clear()
            with pytest.raises(KeyboardInterrupt) as interrupted:
                call(x)
            frames = frames_of(interrupted.value)
            assert not [frame for frame in frames if frame[0].startswith(_OURS)]
            assert frames[-1][2] == "interrupt" or call is not of_forward or where


def test_an_error_in_a_map_and_in_an_evaluation(wrap: Wrap) -> None:
    """F13: wherever the batch was computed."""
    module, batch = Misfit(), torch.zeros(8, 5)
    model, plain = wrap(module, 2), raised(module, batch)
    for computed in (
        lambda: list(model.map([batch] * 3)),
        lambda: list(model.map([batch] * 3, progress=True)),
        lambda: model.map([batch], out=torch.zeros(8, 2)),
        lambda: model.evaluate([(batch, batch)], nn.functional.mse_loss),
    ):
        assert_reads_as(raised(computed), plain, "forward")


@at_one_place
def test_an_error_on_the_other_ways(wrap: Wrap) -> None:
    """F13: one device, the plain composition, its function, a hook that keeps tensors of replicas."""
    module, x, devices = Misfit(), torch.zeros(8, 5), in_turn(2)
    plain = raised(module, x)
    one, composed = unisono.DataParallel(module, devices[:1]), Composed(module, devices)
    assert_reads_as(raised(composed, x), plain, "forward")
    assert_reads_as(raised(lambda x: unisono.data_parallel(module, x, devices), x), plain, "forward")
    assert_reads_as(raised(lambda x: unisono.parallel_apply([module] * 2, [x, x]), x), plain, "forward")
    kept: list[Any] = []
    module.layers[0].register_forward_hook(lambda module, args, output: kept.append(output))
    assert_reads_as(raised(wrap(module, 2), x), raised(module, x), "forward")
    alone = raised(one, x)
    alone.add_note("raised in the only replica")  # it is the plain module's, without a note
    assert_reads_as(alone, raised(module, x), "forward")


def test_an_error_of_unisono_ends_where_it_is_raised(wrap: Wrap) -> None:
    """F13: two frames of torch's, and one of ours."""
    model = wrap(nn.Bilinear(5, 5, 2), 2)
    error = raised(model, torch.zeros(8, 5), torch.zeros(7, 5))
    assert "different numbers of rows" in str(error)
    assert [file.startswith(_OURS) for file, _, _ in frames_of(error)] == [False, False, True]


def test_all_frames_are_there_if_asked_for(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """F13"""
    monkeypatch.setenv("UNISONO_TRACEBACK", "full")
    frames = frames_of(raised(wrap(MisfitLater(), 2), torch.arange(8.0)))
    assert len([file for file, _, _ in frames if file.startswith(_OURS)]) > 5
    assert (__file__, "forward") in [(file, name) for file, _, name in frames]


@at_one_place
def test_a_debugger_reaches_the_users_frames(wrap: Wrap) -> None:
    """F13: with the variables in them, also those of a thread that has ended its task."""
    error = raised(wrap(MisfitLater(), 2), torch.arange(8.0))
    stack, _ = pdb.Pdb(nosigint=True, readrc=False).get_stack(None, error.__traceback__)
    (variables,) = [frame.f_locals for frame, _ in stack if "marker" in frame.f_locals]
    assert variables["marker"] == "forward's own variable"


def test_no_frame_is_kept(wrap: Wrap) -> None:
    """F13: by no cycle."""
    model = wrap(MisfitLater(), 2)
    raised(model, torch.arange(8.0))  # what the first one imports
    with no_garbage():
        error = raised(model, torch.arange(8.0))
        del error
