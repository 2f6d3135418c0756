"""What is said once for a model, in the first step of a structure: batch norm of each shard, shared generators."""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unisono
from helpers.contract import Wrap, at_one_place, in_turn, on_the_cpu, said_by
from helpers.modules import Calls, Composed
from helpers.ranks import run_ranks
from unisono import DataParallel, data_parallel, verify


def step(model: nn.Module, *inputs: Any, **kwargs: Any) -> Callable[[], None]:
    return lambda: model(*inputs, **kwargs).sum().backward()


# ---- batch norm ----------------------------------------------------------------------------------


class OwnNorm(nn.BatchNorm1d):
    pass


def functional(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(net.first(x), None, None, training=True)


IN_TRAINING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "itself": (lambda: nn.BatchNorm1d(5), "BatchNorm1d: "),
    "a layer": (lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), "layer '1' (BatchNorm1d): "),
    "deep": (lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 5), OwnNorm(5))), "layer '0.1' (OwnNorm): "),
    "in eval, without running statistics": (
        lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, track_running_stats=False)).eval(),
        "layer '1' (BatchNorm1d): ",
    ),
    "a function": (lambda: Calls(functional, first=nn.Linear(5, 5)), "torch.nn.functional.batch_norm: "),
    "SyncBatchNorm": (lambda: nn.Sequential(nn.Linear(5, 5), nn.SyncBatchNorm(5)), "layer '1' (SyncBatchNorm): "),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_batch_norm_in_training_is_said_once(wrap: Wrap, name: str) -> None:
    """N5: without the option. The warning is about the line of the call."""
    make, layer = IN_TRAINING[name]
    model, x = wrap(make()), torch.randn(8, 5, requires_grad=True)
    found = said_by(lambda: model(x).sum().backward())
    assert [each.filename for each in found] == [__file__]
    assert str(found[0].message).startswith(layer)
    assert "sync_batch_norm=True" in str(found[0].message)
    assert "sync_batch_norm=False" in str(found[0].message)
    for given in (False, True):
        if given and not isinstance(model.module, nn.Sequential):
            continue
        model = wrap(make(), sync_batch_norm=given)
        assert said_by(step(model, x)) == []


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_batch_norm_that_only_a_later_forward_calls(wrap: Wrap, *, synchronised: bool) -> None:
    """N5: a global switches it on. The graph was searched in the first forward only: nothing was said."""
    switched: list[bool] = []

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        return torch.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False) if switched else h

    model, x = wrap(Calls(forward, first=nn.Linear(5, 5)), sync_batch_norm=synchronised or None), torch.randn(8, 5)
    assert said_by(step(model, x)) == []
    switched.append(True)
    if synchronised:
        with pytest.raises(RuntimeError, match="normalises the rows of one replica only"):
            model(x)
    else:
        assert "sync_batch_norm=True" in str(said_by(step(model, x))[0].message)


FROZEN: dict[str, Callable[[], nn.Module]] = {
    "eval": lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).eval(),
    "frozen": lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).eval()),
    "layer norm": lambda: nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)),
    "instance norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True)),
    "group norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6)),
    "a function by running statistics": lambda: Calls(
        lambda net, x: F.batch_norm(net.first(x), x.new_zeros(5), x.new_ones(5)), first=nn.Linear(5, 5)
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_does_not_see_other_rows_is_not_mentioned(wrap: Wrap, name: str) -> None:
    """N5: a batch norm by its running statistics, and other norms."""
    assert said_by(step(wrap(FROZEN[name]()), torch.randn(8, 5))) == []


def switching(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.norm.train(net.is_training)
    output: torch.Tensor = net.norm(net.first(x))
    return output


@pytest.mark.parametrize("composed", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_modes_that_forward_switches_count(wrap: Wrap, *, is_training: bool, composed: bool) -> None:
    """N5: what counts is the mode in which it has run. A layer that forward froze was mentioned."""
    net = Calls(switching, first=nn.Linear(5, 5), norm=nn.BatchNorm1d(5), is_training=is_training)
    net.norm.train(not is_training)
    model = Composed(net, in_turn(2)) if composed else wrap(net)
    found = [str(each.message) for each in said_by(step(model, torch.randn(8, 5)))]
    assert [text.partition(":")[0] for text in found if "normalises" in text] == [
        "layer 'norm' (BatchNorm1d)"
    ] * is_training


def test_it_is_said_when_training_begins(wrap: Wrap) -> None:
    """N5: after steps in eval mode, and without gradients; where one replica has all rows, there is nothing to say."""
    model = wrap(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    assert said_by(lambda: model.eval()(torch.randn(8, 5))) == []
    one = wrap(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), shares=[1, 0])
    assert said_by(step(one, torch.randn(8, 5))) == []
    with torch.no_grad():
        assert len(said_by(lambda: model.train()(torch.randn(8, 5)))) == 1
    assert said_by(step(model, torch.randn(8, 5))) == []


def test_an_option_that_is_assigned(wrap: Wrap) -> None:
    """N5: tests/test_data_parallel.py has values that are refused."""
    model = wrap(nn.BatchNorm1d(5))
    assert model.sync_batch_norm is None
    model.sync_batch_norm = False
    assert said_by(lambda: model(torch.randn(8, 5))) == []
    model.sync_batch_norm = None
    assert len(said_by(lambda: model(torch.randn(8, 5)))) == 1


@at_one_place
def test_the_plain_composition_says_it_too(wrap: Wrap) -> None:
    """N5: a wrapper with a verb of its own, and the function, which makes a wrapper for each call."""
    norm, x = nn.BatchNorm1d(5), torch.randn(8, 5)
    model = Composed(norm, in_turn(2))
    assert len(said_by(lambda: model(x))) == 1
    assert len(said_by(lambda: data_parallel(norm, x, in_turn(2)))) == 1
    assert said_by(lambda: data_parallel(nn.BatchNorm1d(5), x, in_turn(2), sync_batch_norm=False)) == []


@at_one_place
def test_the_function_has_the_option(wrap: Wrap) -> None:
    """N5"""
    norm, x = nn.BatchNorm1d(5), torch.randn(8, 5)
    wrap(norm, sync_batch_norm=True)  # skips where no device can be named twice
    torch.testing.assert_close(data_parallel(norm, x, in_turn(2), sync_batch_norm=True), norm(x))


@at_one_place
@on_the_cpu  # its projection is drawn there
def test_verify_says_it_in_its_report(wrap: Wrap) -> None:
    """N5: and no warning of a step that it takes. A False that the wrapper was given explains the difference."""
    norm, x = nn.BatchNorm1d(5), torch.randn(9, 5)
    for given, explained in ((None, False), (False, True)):
        model = wrap(norm, sync_batch_norm=given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = verify(model, x, show=False)
        assert (str(report.cause), report.explained) == ("batch norm per shard", explained)


@at_one_place
def test_installed_wrappers_say_it(wrap: Wrap) -> None:
    """N5, X3."""
    x = torch.randn(8, 5)
    for given, number in ((None, 1), (False, 0)):
        with unisono.install(in_turn(2), sync_batch_norm=given):
            model: Any = torch.nn.DataParallel(nn.BatchNorm1d(5))
            assert len(said_by(lambda model=model: model(x))) == number
            norm = nn.BatchNorm1d(5)
            assert len(said_by(lambda norm=norm: torch.nn.parallel.data_parallel(norm, x))) == number


def trained(rank: int) -> list[str]:
    x = torch.randn(4, 5)
    found = []
    for make in (nn.BatchNorm1d, nn.LayerNorm):
        model = DataParallel(make(5), ["cpu"])
        found.append(len(said_by(step(model, x))))
    functional_model = DataParallel(Calls(functional, first=nn.Linear(5, 5)), ["cpu"])
    return [*map(str, found), str(len(said_by(step(functional_model, x))))]


def test_over_ranks_the_first_one_says_it() -> None:
    """N5, C9: each process normalises its own rows."""
    assert run_ranks(2, trained) == [["1", "0", "1"], ["0", "0", "0"]]


# ---- random numbers ------------------------------------------------------------------------------


def drawing_around() -> Callable[[Any], float]:
    generator = random.Random(0)
    return lambda net: generator.random()


DRAWS: dict[str, tuple[Callable[[Any], float], str]] = {
    "Python": (lambda net: random.random(), "Python's generator (random)"),
    "Python, shuffled": (lambda net: random.sample([1.0, 1.0], 1)[0], "Python's generator (random)"),
    "numpy": (lambda net: float(np.random.rand()), "Numpy's generator"),
    "numpy's own": (lambda net: float(net.numpys.random()), "A generator of its own"),
    "Python's own": (lambda net: net.pythons["a"].random(), "A generator of its own"),
    "numpy's old one": (lambda net: net.old.rand(), "A generator of its own"),
    "of a class in a function": (lambda net: net.mine.random(), "A generator of its own"),
    "torch's own": (lambda net: float(torch.rand((), generator=net.torchs, device="cpu")), "A generator of its own"),
    "a default": (lambda net, generator=random.Random(0): generator.random(), "A generator of its own"),  # noqa: B008
    "a closure": (drawing_around(), "A generator of its own"),
    "two": (lambda net: random.random() + np.random.rand(), "Python's generator (random) and numpy's generator"),
}


def drawing(draw: Callable[[Any], float]) -> nn.Module:
    class Mine(random.Random):  # cannot be pickled: the step ended in that error
        pass

    own = {"numpys": np.random.default_rng(0), "pythons": {"a": random.Random(0)}, "torchs": torch.Generator()}
    own |= {"old": np.random.RandomState(0), "mine": Mine(0)}
    return Calls(lambda net, x: net.layer(x) * draw(net), layer=nn.Linear(5, 3), **own)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("composed", [False, True])
def test_draws_from_a_generator_that_replicas_share(wrap: Wrap, name: str, composed: bool) -> None:
    """N6: one warning, about the line of the call; none with one replica, or from `verify`, whose report says it."""
    draw, generator = DRAWS[name]
    model = Composed(drawing(draw), in_turn(2)) if composed else wrap(drawing(draw))
    found = said_by(step(model, torch.randn(6, 5)))
    assert [each.filename for each in found] == [__file__]
    assert str(found[0].message).startswith(f"{generator} was drawn from while the replicas of Calls ran")
    if not composed:
        assert said_by(step(wrap(drawing(draw), 2, shares=[1, 0]), torch.randn(6, 5))) == []


@pytest.mark.parametrize("name", [name for name, (_, generator) in DRAWS.items() if generator.startswith("A ")])
def test_a_map_says_it_too(wrap: Wrap, name: str) -> None:
    """N6: of the model's own, where several lanes run. The caller's draws between batches are not the model's."""
    draw, generator = DRAWS[name]
    x = torch.randn(6, 5)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(4):
            random.random()
            np.random.rand()
            yield x

    mapped, evaluated = wrap(drawing(draw)), wrap(drawing(draw))
    targets = [(x, x[:, :3])] * 4
    for call in (lambda: [*mapped.map(batches())], lambda: evaluated.evaluate(targets, F.mse_loss)):
        (found,) = said_by(call, 1)
        assert found.filename == __file__
        assert str(found.message).startswith(generator)
    one = wrap(drawing(draw), 1)
    assert said_by(lambda: list(one.map(batches())), 1) == []
    silent = wrap(Calls(lambda net, x: net.layer(x), layer=nn.Linear(5, 3)))
    assert said_by(lambda: list(silent.map(batches())), 1) == []


def test_draws_after_a_step_of_one_replica(wrap: Wrap) -> None:
    """N6: a batch of one row was the first step of its structure, so larger ones were looked at by none."""
    model = wrap(drawing(lambda net: random.random()), 2)
    assert said_by(step(model, torch.randn(1, 5))) == []
    assert len(said_by(step(model, torch.randn(6, 5)))) == 1


def test_draws_of_a_part_that_is_wrapped(wrap: Wrap) -> None:
    """N6, A10: one replica of the whole has several of the part, which drew in silence."""
    for mode in (contextlib.nullcontext, torch.autograd.graph.save_on_cpu):
        model = wrap(nn.Sequential(nn.Linear(5, 5), wrap(drawing(lambda net: random.random()), 2)), 2, shares=[0, 1])
        with mode():
            assert len(said_by(step(model, torch.randn(6, 5)))) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_draws_in_parts(wrap: Wrap, replicas: int) -> None:
    """N6, N13: each part draws, and once more in backward; one replica does so in silence."""
    model = wrap(drawing(lambda net: random.random()), replicas, parts=2)
    assert said_by(step(model, torch.randn(1, 5))) == []
    (found,) = said_by(step(model, torch.randn(6, 5)))
    assert "(random) was drawn from while the replicas of Calls ran, or parts of a batch." in str(found.message)


def test_a_generator_without_a_state(wrap: Wrap) -> None:
    """N6: nothing can be seen of its draws; the step was an error."""

    class Mine(random.Random):
        def getstate(self) -> Any:
            raise NotImplementedError

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.layer(x) * net.mine.random()

    model = wrap(Calls(forward, layer=nn.Linear(5, 3)))
    model.module.mine = Mine(0)
    assert said_by(step(model, torch.randn(6, 5))) == []


def test_a_generator_among_the_inputs(wrap: Wrap) -> None:
    """N6."""

    def forward(net: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return net.layer(x) + torch.randn(len(x), 3, generator=generator, device="cpu").to(x)

    model = wrap(Calls(forward, layer=nn.Linear(5, 3)))
    (found,) = said_by(step(model, torch.randn(6, 5), generator=torch.Generator()))
    assert str(found.message).startswith("A generator of its own was drawn from")


def test_draws_that_are_the_callers(wrap: Wrap) -> None:
    """N6: between steps, and torch's in forward, for which replicas have streams."""

    def call() -> None:
        random.random()
        np.random.rand()
        model(torch.randn(6, 5)).sum().backward()

    model = wrap(Calls(lambda net, x: F.dropout(net.layer(x)), layer=nn.Linear(5, 3)))
    assert said_by(call) == []


def test_draws_that_begin_in_another_mode(wrap: Wrap) -> None:
    """N6: each structure has a first step; what was said is not said again."""
    model = wrap(drawing(lambda net: random.random() if net.training else 1.0))
    x = torch.randn(6, 5)
    assert said_by(step(model.eval(), x)) == []
    assert len(said_by(step(model.train(), x))) == 1
    assert said_by(lambda: model(torch.randn(6, 5, requires_grad=True)).sum().backward()) == []


@pytest.mark.parametrize("composed", [False, True])
def test_a_step_that_fails_is_not_the_first_one(wrap: Wrap, composed: bool) -> None:
    """N6: replicas may not have come to their draws in it."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return net.layer(x) * random.random()

    net = Calls(forward, layer=nn.Linear(5, 3))
    model = Composed(net, in_turn(2)) if composed else wrap(net)
    with pytest.raises(ValueError, match="not a number"):
        model(torch.full((6, 5), torch.nan))
    (found,) = said_by(step(model, torch.randn(6, 5)))
    assert "was drawn from while" in str(found.message)
