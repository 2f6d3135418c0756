"""shares="measured": the numbers are the plain module's in every phase, whatever is tried.

What steps take is made up (`speeds`), so that a test knows what is chosen, and when.
"""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_all_same, assert_same, assert_same_gradients, assert_same_state, twins
from helpers.contract import Wrap, at_one_place
from helpers.modules import Fn, mlp
from unisono import DataParallel
from unisono.primitives.measured_shares import PERIOD, MeasuredShares

ROWS = 16
Sizes = Sequence[int]
Speeds = Callable[..., list[Sizes]]  # of the fixture `speeds`


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    """Have each replica take so many seconds a row, and the step so many for each replica beyond the first."""
    record = MeasuredShares.record
    tried: list[Sizes] = []

    def set_speeds(*row_s: float, per_replica_s: float = 0.0) -> list[Sizes]:
        def with_speeds(self: MeasuredShares, step: Any) -> None:
            each = [size * seconds for size, seconds in zip(step.sizes, row_s, strict=True)]
            seconds = max(each) + per_replica_s * (len([size for size in step.sizes if size]) - 1)
            tried.append(list(step.sizes))
            record(self, step._replace(replica_s=each, seconds=seconds))

        monkeypatch.setattr(MeasuredShares, "record", with_speeds)
        return tried

    return set_speeds


def frozen(model: DataParallel) -> bool:
    return any(measured.is_frozen for measured in model._options.measured.values())


def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    return output


def until_frozen(model: DataParallel) -> None:
    """Train until the shares are frozen."""
    for _ in range(100):
        train(model, torch.randn(ROWS, 5))
        if frozen(model):
            return
    raise AssertionError("100 steps, and nothing is frozen")


def two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    first, second = model(x), model(torch.randn(7, 5))
    (first.sum() + second.square().sum()).backward()
    return first


# Name -> the module, the wrapper's options, and how a step is made.
TRAINED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[..., torch.Tensor]]] = {
    "an MLP": (mlp, {}, train),
    "two forwards before a backward": (mlp, {}, two_forwards),
    "batch norm": (lambda: nn.Sequential(mlp(), nn.BatchNorm1d(3), nn.Tanh()), {"sync_batch_norm": True}, train),
    "a loss in forward": (lambda: nn.Sequential(mlp(), Fn(lambda y: y.square().mean())), {"scalars": "mean"}, train),
}


@at_one_place
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_the_plain_modules_in_every_step(wrap: Wrap, speeds: Speeds, name: str) -> None:
    """S16, N1, N2, N5, G5: with every split that is tried, with one device, after the freeze, with short batches."""
    tried = speeds(1, 3, 3)
    make, options, step = TRAINED[name]
    plain, model = twins(wrap, make(), 3, shares="measured", **options)
    steps_after, tolerance = 3, 1e-9 if name == "batch norm" else 1e-12
    for number in range(100):
        x, found = torch.randn(5 if number % 6 == 5 else ROWS, 5), []
        for module in (model, plain):
            torch.manual_seed(number)
            found.append([step(module, x), torch.get_rng_state()])
        assert_all_same(*found, tolerance)
        assert_same_gradients(model, plain, tolerance)
        assert_same_state(model.module, plain, tolerance)
        steps_after -= frozen(model)
        if not steps_after:
            break
    assert not steps_after
    assert [ROWS, 0, 0] in tried
    assert len({tuple(sizes) for sizes in tried}) >= 4
    train(model, torch.randn(ROWS, 5))
    assert [timing.rows for timing in model.replica_timings] == [10, 3, 3] or step is two_forwards


@at_one_place
def test_an_output_on_the_way_to_another_in_parts(wrap: Wrap) -> None:
    """S16, N13: a step was an error that named a hook on the first output, which was ours: it notes the time."""
    plain, model = twins(wrap, Fn(lambda x: (hidden := x.tanh(), hidden.square())), 2, shares="measured", parts=2)
    found = []
    for module in (model, plain):
        x = torch.linspace(-1, 1, 40).view(8, 5).requires_grad_()
        sum([output.sum() for output in module(x)]).backward()
        found.append(x.grad)
    assert_same(*found)


@at_one_place
def test_frozen_shares_are_bit_for_bit_those_that_are_written(
    wrap: Wrap, speeds: Speeds, caplog: pytest.LogCaptureFixture
) -> None:
    """S16: the line in the log gives the same numbers from the first step on."""
    speeds(1, 3)
    model = wrap(mlp(), shares="measured")
    until_frozen(model)
    [message] = [r.getMessage() for r in caplog.records if "measured shares" in r.getMessage()]
    assert message.endswith("write shares=[3, 1]")
    fixed = wrap(copy.deepcopy(model.module), shares=model.shares)
    for seed in range(2 * PERIOD):  # also in the steps that are timed
        torch.manual_seed(seed)
        x = torch.randn(ROWS, 5)
        assert torch.equal(train(model, x), train(fixed, x))
        for ours, theirs in zip(model.parameters(), fixed.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@at_one_place
def test_shares_are_what_was_chosen(wrap: Wrap, speeds: Speeds) -> None:
    """S16: those of training, once it has some; others are assigned, and "measured" again begins anew."""
    speeds(1, 3)
    model = wrap(mlp(), shares="measured")
    assert model.shares == "measured"
    with torch.no_grad():
        while not frozen(model):
            model(torch.randn(ROWS // 2, 5))
    assert model.shares == (3, 1)
    speeds(1, 1)
    for _ in range(100):
        train(model, torch.randn(ROWS, 5))
    assert model.shares == (1, 1)
    model.shares = "measured"
    assert model.shares == "measured"
    until_frozen(model)
    assert model.shares == (1, 1)
    model.shares = [1, 3]
    train(model, torch.randn(ROWS, 5))
    assert [timing.rows for timing in model.replica_timings] == [4, 12]


@at_one_place
def test_where_one_device_wins_it_is_the_plain_module(
    wrap: Wrap, speeds: Speeds, caplog: pytest.LogCaptureFixture
) -> None:
    """S16, A3: the same bits, and no node of ours in the graph. The log says so once, with the figures."""
    speeds(0.001, 0.001, per_replica_s=1)
    plain, model = twins(wrap, mlp(), shares="measured")
    until_frozen(model)
    for _ in range(2 * PERIOD):
        x = torch.randn(ROWS, 5)
        ours, theirs = train(model, x), train(plain, x)
        assert torch.equal(ours, theirs)
        assert type(ours.grad_fn) is type(theirs.grad_fn)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    [message] = [r.getMessage() for r in caplog.records if "measured shares" in r.getMessage()]
    assert f"one device ({model.device_ids[0]}) is fastest, 16 ms per step (shares=" in message


def test_training_and_inference_are_measured_apart(wrap: Wrap, speeds: Speeds) -> None:
    """S16, R12: and so is each method that is called by name."""
    speeds(1, 3)
    plain, model = twins(wrap, mlp(), shares="measured")
    until_frozen(model)
    x = torch.randn(ROWS, 5)
    for _ in range(3):
        with torch.no_grad():
            assert_same(model(x), plain(x))
            assert_same(model.call("forward", x), plain(x))
    assert {kind: measured.is_frozen for kind, measured in model._options.measured.items()} == {
        (True, None): True,
        (False, None): False,
        (False, "forward"): False,
    }


def test_what_is_no_step_of_training(wrap: Wrap, speeds: Speeds) -> None:
    """S16, A10, F1: a forward that fails, or without backward where gradients are on; a wrapper inside a replica.

    A forward whose output needs no gradient is a step.
    """
    tried = speeds(1, 3)
    model = wrap(mlp(), shares="measured")
    outer = wrap(nn.Sequential(DataParallel(mlp(), ["cpu"] * 2, shares="measured")))
    for _ in range(5):
        model(torch.randn(ROWS, 5))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(ROWS, 4))
        train(outer, torch.randn(ROWS, 5))
    assert tried == []
    model.requires_grad_(False)(torch.randn(ROWS, 5))
    assert tried == [[8, 8]]
    until_frozen(model.requires_grad_(True))
    assert model._options.measured[True, None].weights == (3, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_wrapper(wrap: Wrap, speeds: Speeds, copied: Callable[[DataParallel], DataParallel]) -> None:
    """S16, A14: have the frozen shares; a state_dict has nothing of them."""
    speeds(1, 3)
    model = wrap(mlp(), shares="measured")
    names = [*model.state_dict()]
    until_frozen(model)
    assert [*model.state_dict()] == names
    other = copied(model)
    train(other, torch.randn(ROWS, 5))
    assert [timing.rows for timing in other.replica_timings] == [12, 4]


def test_a_replica_that_ran_out_of_memory_gets_no_more_than_it_can_bear(wrap: Wrap, speeds: Speeds) -> None:
    """S16, F5: the limits that rescue=True has found."""
    speeds(1, 3)
    model = wrap(mlp(), shares="measured", rescue=True)
    model._step_memory.row_limits[0] = 10
    until_frozen(model)
    train(model, torch.randn(ROWS, 5))
    assert [timing.rows for timing in model.replica_timings] == [10, 6]
