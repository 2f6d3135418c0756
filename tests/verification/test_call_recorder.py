"""What is kept of a submodule's calls, and how the replicas' parts are joined. `verify` shows the rest."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.verification.call_recorder import CallRecorder, match
from unisono.verification.compare import Tolerance

CLOSE = Tolerance(1e-6)


def recorded(model: nn.Module, x: torch.Tensor) -> CallRecorder:
    recorder = CallRecorder(lambda: lambda: False)
    with recorder.attached(model):
        model(x)
    return recorder


@pytest.mark.parametrize(
    ("one", "many", "rows", "same", "axis"),
    [
        (torch.ones(4), [torch.ones(4), torch.ones(4)], [3, 2], True, None),  # of no row
        (torch.tensor(3.0), [torch.tensor(1.0), torch.tensor(2.0)], [3, 2], True, None),  # a sum
        (torch.tensor(1.4), [torch.tensor(1.0), torch.tensor(2.0)], [3, 2], True, None),  # a mean over rows
        (torch.tensor(1.5), [torch.tensor(1.0), torch.tensor(2.0)], [3, 2], False, None),
        (torch.tensor(5), [torch.tensor(3), torch.tensor(2)], [3, 2], True, None),
        (torch.ones(5, 4), [torch.ones(3, 4), torch.ones(2, 3)], [3, 2], None, None),  # each padded to its own longest
        (torch.ones(5), [torch.ones(3), torch.ones(3)], [3, 2], None, None),
        (torch.ones(5), [torch.ones(3), torch.ones(2, dtype=torch.float64)], [3, 2], None, None),
    ],
)
def test_parts_that_fit_along_no_axis(
    one: torch.Tensor, many: list[torch.Tensor], rows: list[int], same: bool | None, axis: int | None
) -> None:
    """They may have no rows, or be sums or means over rows; or else they are not compared."""
    assert match(one, many, rows, CLOSE) == (None if same is None else (same, axis))


@pytest.mark.property
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 3), max_size=2), st.data())
def test_parts_are_joined_along_the_axis_that_fits(rows: list[int], others: list[int], data: st.DataObject) -> None:
    """Whichever axis it is; a changed entry is found. Where several fit, one on which all is the same counts."""
    axis = data.draw(st.integers(0, len(others)))
    one = torch.rand(*others[:axis], sum(rows), *others[axis:])
    parts = one.split(rows, axis)
    same, found = match(one, parts, rows, CLOSE)
    assert same
    assert torch.equal(torch.cat(parts, found), one)
    changed = [parts[0] + 1, *parts[1:]]
    assert match(one, changed, rows, CLOSE)[0] is False


def test_copies_are_of_the_moment_and_shared_while_nothing_changes() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.ReLU(inplace=True))
    x = torch.tensor([[-1.0, 1.0]])
    calls = {call.name: call for call in recorded(model, x).calls}
    assert calls["0"].outputs[0][1] is calls["1"].inputs[0][1] is calls["2"].inputs[0][1]
    assert calls["2"].inputs[0][1].tolist() == [[-1.0, 1.0]]
    assert calls["2"].outputs[0][1].tolist() == [[0.0, 1.0]]


def test_a_recorder_keeps_no_activation_alive() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    recorder = recorded(model, torch.randn(3, 2))
    gc.collect()
    assert kept[0]() is None
    assert len(recorder.calls) == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # a later torch's compiler reads it
def test_submodules_of_compiled_modules_are_not_recorded() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    model[1].compile(backend="eager")
    assert [call.name for call in recorded(model, torch.randn(3, 2)).calls] == ["0", ""]
