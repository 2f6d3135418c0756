"""What every submodule got and returned, and where two steps part."""

import gc
import weakref

import pytest
import torch
from torch import nn

from manyhands import DataParallel
from manyhands.verification.compare import Tolerance
from manyhands.verification.watch import CallRecorder, match, parting

CLOSE = Tolerance(1e-6, 0.0)


def watched(model: nn.Module, x: torch.Tensor, module: nn.Module | None = None) -> CallRecorder:
    watch = CallRecorder(lambda: False)
    with watch.attached(module or model):
        model(x)
    return watch


def no_hooks(model: nn.Module) -> bool:
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("one", "many", "rows", "same", "axis"),
    [
        (torch.arange(5.0), [torch.arange(3.0), torch.arange(3.0, 5.0)], [3, 2], True, 0),
        (torch.arange(5.0), [torch.arange(3.0), torch.arange(2.0)], [3, 2], False, 0),
        (torch.ones(2, 5), [torch.ones(2, 3), torch.ones(2, 2)], [3, 2], True, 1),
        (torch.ones(4), [torch.ones(4), torch.ones(4)], [3, 2], True, None),  # of no row
        (torch.tensor(3.0), [torch.tensor(1.0), torch.tensor(2.0)], [3, 2], True, None),  # a sum
        (torch.tensor(1.4), [torch.tensor(1.0), torch.tensor(2.0)], [3, 2], True, None),  # a mean over rows
        (torch.tensor(1.5), [torch.tensor(1.0), torch.tensor(2.0)], [3, 2], False, None),
        (torch.tensor(5), [torch.tensor(3), torch.tensor(2)], [3, 2], True, None),
        (torch.ones(3), [torch.ones(3)], [3], True, 0),
    ],
)
def test_parts_are_joined_along_the_axis_that_fits(
    one: torch.Tensor, many: list[torch.Tensor], rows: list[int], same: bool, axis: int | None
) -> None:
    found = match([one], many, rows, CLOSE)
    assert found is not None
    assert (found.same, found.axis) == (same, axis)


@pytest.mark.parametrize(
    ("one", "many"),
    [
        (torch.ones(5, 4), [torch.ones(3, 4), torch.ones(2, 3)]),  # each padded to its own longest
        (torch.ones(5), [torch.ones(3), torch.ones(3)]),
        (torch.ones(5), [torch.ones(3), torch.ones(2, dtype=torch.float64)]),
    ],
)
def test_parts_that_fit_nowhere_are_not_compared(one: torch.Tensor, many: list[torch.Tensor]) -> None:
    assert match([one], many, [3, 2], CLOSE) is None


def test_every_call_is_seen_once_a_replica_in_the_order_of_rows() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    model.append(model[0])
    x = torch.arange(10.0).view(5, 2)
    plain = watched(model, x)
    assert [(seen.name, seen.turn) for seen in plain.seen] == [("0", 0), ("1", 0), ("0", 1), ("", 0)]
    wrapper = DataParallel(model, ["cpu"] * 3)
    calls = watched(wrapper, x, model).calls()
    assert calls.keys() == plain.calls().keys()
    for replicas in calls.values():
        assert [seen.path for seen in replicas] == [(0,), (1,), (2,)]
    inputs = torch.cat([seen.inputs[0][1] for seen in calls["", 0]])
    assert torch.equal(inputs, x)
    assert no_hooks(model)


def test_replicas_of_a_wrapper_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), DataParallel(nn.Linear(2, 2), ["cpu"] * 2))
    x = torch.randn(7, 2)
    plain, many = watched(model, x), watched(DataParallel(model, ["cpu"] * 2), x, model)
    assert [seen.path for seen in plain.calls()["1.module", 0]] == [(0,), (1,)]
    assert [seen.path for seen in many.calls()["1.module", 0]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert parting(plain, many, [4, 3], CLOSE) is None


def test_copies_are_of_the_moment_and_shared_while_nothing_changes() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.ReLU(inplace=True))
    x = torch.tensor([[-1.0, 1.0]])
    seen = {seen.name: seen for seen in watched(model, x).seen}
    assert seen["0"].outputs[0][1] is seen["1"].inputs[0][1] is seen["2"].inputs[0][1]
    assert seen["2"].inputs[0][1].tolist() == [[-1.0, 1.0]]
    assert seen["2"].outputs[0][1].tolist() == [[0.0, 1.0]]


def test_a_watch_keeps_no_activation_alive() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    watch = watched(model, torch.randn(3, 2))
    gc.collect()
    assert kept[0]() is None
    assert len(watch.seen) == 3


def test_submodules_of_compiled_modules_are_not_watched() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    model[1].compile(backend="eager")
    assert [seen.name for seen in watched(model, torch.randn(3, 2)).seen] == ["0", ""]


def test_the_first_parting_in_the_order_of_execution() -> None:
    class Swapped(nn.Module):
        """Runs its children in another order than it has them in."""

        def __init__(self) -> None:
            super().__init__()
            self.later, self.earlier = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.later(self.earlier(x))

    model, x = Swapped(), torch.randn(9, 2)
    found = parting(watched(model, x), watched(DataParallel(model, ["cpu"] * 2), x, model), [5, 4], CLOSE)
    assert found is not None
    assert (found.name, found.inputs_same, found.training, found.only_numbers) == ("earlier", True, True, False)


def test_a_forward_that_fails_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with pytest.raises(RuntimeError):
        watched(model, torch.randn(3, 2))
    assert no_hooks(model)
