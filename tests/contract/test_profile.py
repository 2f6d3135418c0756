"""`model.profile()`: what is recorded of each replica."""

import copy
import gc
import threading
import time
import weakref
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from helpers.contract import ON_CPU, Wrap, at_one_place, in_threads, on_the_cpu
from helpers.failing import FailsOn
from helpers.modules import mlp
from unisono import DataParallel
from unisono.profiling.profile import Profile
from unisono.profiling.steps import PHASES, ProfiledStep
from unisono.runtime import timeline


def train(model: nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def checked(profile: Profile) -> list[ProfiledStep]:
    """Return the steps, in whose lanes no phase overlaps another one, and all phases make up the step."""
    steps = profile.steps()
    assert all(a.ended == b.began for a, b in pairwise(steps))
    for step in steps:
        for lane, spans in step.lanes.items():
            assert all(a.ended <= b.began for a, b in pairwise(spans))
            assert all(span.began <= span.ended and span.phase in PHASES for span in spans)
            if ON_CPU or lane == "host":  # a device is later
                assert sum(step.phases(lane).values()) == pytest.approx(step.seconds)
    return steps


def profiled(model: DataParallel, x: torch.Tensor, steps: int = 3) -> list[ProfiledStep]:
    train(model, x)
    with model.profile() as profile:
        for _ in range(steps):
            train(model, x)
    return checked(profile)


def phases(step: ProfiledStep, lane: str, *others: str, since: float = 0.0) -> list[str]:
    """Return a lane's phases in order, without the waits and others; what these have interrupted is there once."""
    found = [span.phase for span in step.lanes[lane] if span.began >= since]
    return [phase for phase, _ in groupby(phase for phase in found if phase not in ("wait", *others))]


def replicas_of(step: ProfiledStep) -> list[str]:
    return [lane for lane in step.lanes if lane.startswith("replica")]


def test_each_replica_has_a_lane_from_one_forward_to_the_next(wrap: Wrap) -> None:
    """P1: without overlap, whatever runs it."""
    steps = profiled(wrap(mlp(), 3), torch.randn(9, 5))
    assert [list(step.rows.values()) for step in steps] == [[3, 3, 3]] * 3
    for step in steps:
        assert [lane.split(",")[0] for lane in replicas_of(step)] == ["replica 0", "replica 1", "replica 2"]
        for lane in replicas_of(step):
            assert phases(step, lane, "scatter", "replicate", "gather", "reduce") == ["forward", "backward"]
            for span in step.lanes[lane] if ON_CPU else ():
                assert any(each.began <= span.began and span.ended <= each.ended for each in step.passes)


@on_the_cpu
def test_the_phases_are_in_the_order_of_the_algorithm(wrap: Wrap) -> None:
    """P1: the caller's thread, whose lane is that of the first replica."""
    [step] = profiled(wrap(mlp()), torch.randn(4, 5), steps=1)
    (caller, _), (forward, backward) = step.lanes, step.passes
    in_forward = [span.phase for span in step.lanes[caller] if span.ended <= forward.ended]
    assert in_forward[0] == "scatter"
    assert phases(step, caller, "replicate", since=backward.began)[-1] == "reduce"
    assert phases(step, caller, "scatter", "replicate", "reduce") == ["forward", "gather", "backward"]
    assert "scatter" in phases(step, caller, since=backward.began)


def test_numbers_are_the_same_bit_for_bit(wrap: Wrap) -> None:
    """P1: with batch norm over all replicas, too; and nothing is recorded after the block."""
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model, other = (wrap(each, sync_batch_norm=True) for each in (module, copy.deepcopy(module)))
    x = torch.randn(8, 5)
    for _ in range(3):
        with model.profile() as profile:
            found = train(model, x)
        assert all(torch.equal(a, b) for a, b in zip(found, train(other, x), strict=True))
        train(model, x)
        assert len(profile.steps()) == 1
    assert not timeline.recording


@on_the_cpu
@pytest.mark.parametrize("phase", ["wait", "reduce"])
def test_what_interrupts_a_replica(wrap: Wrap, phase: str) -> None:
    """P2: it waits for the other replicas' statistics in batch norm, and adds a large gradient during backward."""
    wide = 1 << 13
    if phase == "wait":
        model = wrap(nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), sync_batch_norm=True)
    else:
        model = wrap(nn.Sequential(nn.Linear(1, wide), nn.Linear(wide, 1), nn.Linear(1, 1)))
    [step] = profiled(model, torch.randn(8, 1), steps=1)
    for spans in step.lanes.values():
        found = [span.phase for span in spans]
        for interrupted in ("forward", "backward") if phase == "wait" else ("backward",):
            first, last = found.index(interrupted), len(found) - found[::-1].index(interrupted)
            assert phase in found[first:last]


@on_the_cpu
@at_one_place
def test_a_replica_that_is_done_waits_for_the_others(wrap: Wrap) -> None:
    """P2: replica 1 ends its forward only after replica 0 has ended its own; whose wait lasts until then."""
    ended = threading.Event()

    class Waits(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().__call__(x)
            if threading.current_thread() is caller:
                ended.set()
            assert ended.wait(60)
            return y

    caller = threading.current_thread()
    model = wrap(Waits(5, 2))
    with model.profile() as profile:
        model(torch.randn(4, 5))
    [step] = profile.steps()
    own, other = ([span for span in lane if span.phase == "forward"] for lane in step.lanes.values())
    waits = [span for span in step.lanes["replica 0, cpu"] if span.phase == "wait"]
    assert any(wait.began == own[-1].ended and wait.ended >= other[-1].ended for wait in waits)


def test_a_forward_that_fails_is_left_out(wrap: Wrap) -> None:
    """P3: with a failed backward, and what comes next is recorded as ever."""
    model = wrap(FailsOn(), sync_batch_norm=False)
    x = torch.arange(8.0).reshape(4, 2)
    train(model, x)
    with model.profile() as profile:
        model.module.on = {4.0: ValueError("no")}
        with pytest.raises(ValueError, match="no"):
            model(x)
        model.module.on = {}
        train(model, x)
        model.module.on, model.module.in_backward = {4.0: ValueError("no")}, True
        with pytest.raises(ValueError, match="no"):
            train(model, x)
        model.module.on, model.module.in_backward = {}, False
        train(model, x)
    steps = checked(profile)
    assert len(steps) == 3
    for step in (steps[0], steps[2]):
        assert all("backward" in phases(step, lane) for lane in step.lanes)


def test_several_backwards_of_one_forward(wrap: Wrap) -> None:
    """P1, P3: retain_graph, and gradients of gradients: each is a pass of the same step."""
    model = wrap(mlp())
    x = torch.randn(4, 5, requires_grad=True)
    train(model, x)
    with model.profile() as profile:
        y = model(x).square().sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        began = time.perf_counter()
        grad.square().sum().backward()
    [step] = checked(profile)
    assert [each.phase for each in step.passes[:4]] == ["forward", "backward", "backward", "backward"]
    for lane in replicas_of(step):
        backwards = [span for span in step.lanes[lane] if span.phase == "backward"]
        assert sum(any(p.began <= span.began <= p.ended for span in backwards) for p in step.passes) >= 3 or not ON_CPU
    caller = next(iter(step.lanes))
    assert set(phases(step, caller, "reduce", since=began)) == {"scatter", "backward"}  # not outside of the model


@at_one_place
def test_a_wrapper_inside_a_replica_is_part_of_it(wrap: Wrap) -> None:
    """P3: also where both are profiled; in a wrapper without replicas it has steps of its own."""
    inner = wrap(mlp())
    x = torch.randn(8, 5)
    for model, num_steps in (
        (wrap(nn.Sequential(nn.Linear(5, 5), inner)), (1, 0)),
        (wrap(nn.Sequential(nn.Linear(5, 5), inner), 1), (0, 1)),
    ):
        train(model, x)
        with model.profile() as profile, inner.profile() as of_inner:
            train(model, x)
        assert (len(profile.steps()), len(of_inner.steps())) == num_steps
        with model.profile() as alone:
            train(model, x)
        assert len(alone.steps()) == num_steps[0]
        for step in checked(profile):
            for lane in step.lanes:
                found = phases(step, lane, "reduce", "replicate", "scatter")
                assert found in (["forward", "gather", "backward"], ["forward", "backward"])


def test_the_backward_of_a_model_ends_where_that_of_the_next_begins(wrap: Wrap) -> None:
    """P3: a generator whose gradient comes through a discriminator: their passes do not overlap."""
    generator, discriminator = wrap(mlp(5, 4)), wrap(mlp(4, 1))
    z = torch.randn(4, 5)
    discriminator(generator(z)).sum().backward()
    with generator.profile() as of_generator, discriminator.profile() as of_discriminator:
        discriminator(generator(z)).sum().backward()
    [first], [second] = checked(of_discriminator), checked(of_generator)
    last = max(span.ended for span in next(iter(first.lanes.values())) if span.phase in ("backward", "reduce"))
    begin = min(span.began for span in next(iter(second.lanes.values())) if span.phase == "backward")
    assert last <= begin


def test_a_profile_keeps_no_graph(wrap: Wrap) -> None:
    """P6: nor the module, nor a tensor of a step that has ended."""
    model, x = wrap(mlp()), torch.randn(4, 5)
    with model.profile() as profile:
        output = model(x)
        node = weakref.ref(output)
        output.sum().backward()
        del output
    module = weakref.ref(model.module)
    del model
    gc.collect()
    assert node() is None
    assert module() is None
    assert len(profile.steps()) == 1


def test_what_is_not_recorded(wrap: Wrap) -> None:
    """P3, P6: replicas in a map, which leaves nothing for the next step to be recorded on; a backward after the block.

    What the profile shows does not change any more.
    """
    model, x = wrap(mlp()), torch.randn(4, 5)
    train(model, x)
    with model.profile() as profile:
        list(model.map([x, x]))
        train(model, x)
        output = model(x)
    steps = profile.steps()
    assert len(steps) == 2
    output.sum().backward()
    assert profile.steps() == steps


def test_a_loss_of_two_forwards_is_one_step(wrap: Wrap) -> None:
    """P1: both forwards and the backward of both are in it, once, and the next step begins after it."""
    model = wrap(mlp())
    train(model, torch.randn(4, 5))
    with model.profile() as profile:
        for _ in range(20):  # not all show what depends on the order in which threads are run
            (model(torch.randn(4, 5)).sum() + model(torch.randn(6, 5)).sum()).backward()
    steps = checked(profile)
    assert [sum(step.rows.values()) for step in steps] == [10] * 20
    for step in steps:
        assert [each.phase for each in step.passes] == ["forward"] * 2 + ["backward"] * 2
        assert phases(step, [*step.lanes][-1], "reduce", "scatter", "gather", "replicate") == ["forward", "backward"]


def test_two_backwards_of_one_forward_at_once(wrap: Wrap) -> None:
    """P3: one of them is recorded, and both compute what they would without a profile."""
    model, x = wrap(mlp()), torch.randn(4, 5)
    train(model, x)
    model.zero_grad()
    inside = threading.Barrier(2)
    with model.profile() as profile:
        output = model(x)

        def backward(number: int) -> None:
            inside.wait(60)
            for _ in range(10):
                output.sum().backward(retain_graph=True)

        in_threads(2, backward)
    assert len(checked(profile)) == 1
    found = [parameter.grad for parameter in model.parameters()]
    expected = torch.autograd.grad(model.module(x).sum() * (10 * 2), [*model.module.parameters()])
    torch.testing.assert_close(found, [*expected])
