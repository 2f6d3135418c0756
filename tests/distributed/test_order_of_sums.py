"""One backward that leads to several forwards, models, or losses that left forward: ranks sum in one order."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_same_gradients
from helpers.contract import ON_CPU
from helpers.modules import Calls
from helpers.ranks import drawn, on_two_ranks, run_on_devices, run_ranks
from helpers.twins import rows_of, twins
from unisono.runtime.thread_pool import inside_replica

SIZES = (4, 9)
NUM_STEPS = 6 if ON_CPU else 40  # on accelerators, threads decide in which order torch comes to the forwards


# On accelerators two threads go through a replica's graph, and the first must not free it.
KEEP = {"retain_graph": not ON_CPU}


class Keeps(nn.Module):
    """Keeps a loss of its rows, and one of a layer that nothing else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(5, 16), nn.Linear(16, 5), nn.Linear(5, 3)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        self.kept.append(hidden.square().sum() + self.side(x).pow(3).sum())
        return self.last(hidden)


def keeping(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a forward; return a loss of its output, and the one that it has kept."""
    kept = getattr(module, "module", module).kept
    kept.clear()
    output = module(x)
    return output.square().sum(), sum(loss.to(output.device) for loss in kept)


Run = Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Run] = {}


def loss(function: Run) -> Run:
    LOSSES[function.__name__] = function
    return function


@loss
def two_models(one: nn.Module, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = one(x), other(x * 2)
    return second.sum() + first.square().tanh().square().sum()  # torch comes to the first one first


@loss
def a_chain(one: nn.Module, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = other(one(x)), one(x * 2)
    return second.square().sum() + first.square().sum()


@loss
def kept_by_two_models(one: nn.Module, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return keeping(one, x)[1] + keeping(other, x * 2)[1]


@loss
def all_of_two_models(one: nn.Module, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(keeping(one, x)) + sum(keeping(other, x * 2))


@loss
def an_output_and_what_another_kept(one: nn.Module, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return keeping(one, x)[0] + keeping(other, x * 2)[1]


@loss
def forwards_in_turn(one: nn.Module, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second, third = keeping(one, x), keeping(other, x * 2), keeping(one, x * 3)
    return first[1] + second[1] + third[1] + third[0]


@loss
def one_behind_the_other_twice(one: nn.Module, other: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum(number * other(one(x * number).tanh()).square().sum() for number in (1, 2))


def compare(rank: int, name: str, **options: Any) -> None:
    pairs = [twins(lambda: Keeps().double(), loss="sum", **options) for _ in range(2)]
    for seed in range(NUM_STEPS):
        x = drawn(sum(SIZES), 5, seed=seed)
        for modules, rows in (([m for m, _ in pairs], x[rows_of(rank, SIZES)]), ([o for _, o in pairs], x)):
            for module in modules:
                module.zero_grad()
            LOSSES[name](*modules, rows).backward(**KEEP)
        for model, oracle in pairs:
            assert_same_gradients(model.module, oracle)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_one_backward(name: str, num_replicas: int) -> None:
    """C1, C4: the gradients of all rows, whichever of its threads torch runs first."""
    run_on_devices(2, compare, name, num_replicas=num_replicas)


@on_two_ranks(1)
def test_hooks_of_parameters(rank: int, options: dict) -> None:
    """C1, R9: they are called once, with the sum, for both models."""
    models = [twins(lambda: Keeps().double(), loss="sum", **options)[0] for _ in range(2)]
    called: list[torch.Tensor] = []
    for model in models:
        model.module.first.weight.register_hook(called.append)
        model.module.first.weight.register_post_accumulate_grad_hook(lambda tensor: called.append(tensor.grad))
    for seed, name in itertools.product(range(NUM_STEPS), ("kept_by_two_models", "one_behind_the_other_twice")):
        for model in models:
            model.zero_grad()
        LOSSES[name](*models, drawn(4, 5, seed=seed)).backward(**KEEP)
        expected = [model.module.first.weight.grad for model in models for _ in range(2)]
        assert sorted(each.sum().item() for each in called) == sorted(each.sum().item() for each in expected)
        called.clear()


@on_two_ranks(1)
def test_given_inputs(rank: int, options: dict) -> None:
    """C1, C5: also of two models at once."""
    pairs = [twins(lambda: Keeps().double(), loss="sum", **options) for _ in range(2)]
    models, oracles = [model for model, _ in pairs], [oracle for _, oracle in pairs]
    inputs = [drawn(4, 5, seed=number) for number in range(2)]
    losses = [LOSSES["kept_by_two_models"](*models, inputs[rank])]
    losses += [LOSSES["kept_by_two_models"](*oracles, x) for x in inputs]
    owners = [models, oracles, oracles]
    parameters = [[p for m in each for p in m.parameters()] for each in owners]
    found, *each = [
        torch.autograd.grad(loss, of_loss, retain_graph=True, allow_unused=True)
        for loss, of_loss in zip(losses, parameters, strict=True)
    ]
    for gradient, *of_rank in zip(found, *each, strict=True):
        assert (gradient is None) == (of_rank[0] is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, of_rank[0] + of_rank[1], rtol=1e-12, atol=1e-14)


class NoGradient(torch.autograd.Function):
    """The identity, through which no gradient goes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@on_two_ranks()
def test_a_loss_that_leaves_forward_and_has_no_gradient_on_one_rank(rank: int, options: dict) -> None:
    """C1, C3: the other ranks waited for it."""
    model, oracle = twins(lambda: Keeps().double(), loss="sum", **options)
    x = drawn(sum(SIZES), 5)
    for with_output in (False, True):
        model.zero_grad()
        oracle.zero_grad()
        output, kept = keeping(model, x[rows_of(rank, SIZES)])
        kept = NoGradient.apply(kept) if rank else kept
        (output + kept if with_output else kept).backward(**KEEP)
        if with_output:
            keeping(oracle, x)[0].backward()
        keeping(oracle, x[rows_of(0, SIZES)])[1].backward()
        assert_same_gradients(model.module, oracle)


# Ranks that run a forward in other ways


class Checkpoints(nn.Module):
    """Has a reentrant checkpoint, if it is asked for one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return checkpoint(self.last, hidden, use_reentrant=True) if again else self.last(hidden)


def in_other_ways(rank: int, name: str) -> None:
    devices = ["cpu", "cpu"] if name == "two devices" and rank else ["cpu"]
    one, oracle_of_one = twins(lambda: Checkpoints().double().eval(), device_ids=devices, loss="sum")
    other, oracle_of_other = twins(lambda: Checkpoints().double().eval(), device_ids=["cpu"], loss="sum")
    again = name == "a checkpoint" and rank == 1
    for seed in range(3):
        x = drawn(sum(SIZES), 5, seed=seed)
        of_rank = x[rows_of(rank, SIZES)]
        (other(one(of_rank, again)) + one(of_rank * 2)).square().sum().backward()
        (oracle_of_other(oracle_of_one(x)) + oracle_of_one(x * 2)).square().sum().backward()
        assert_same_gradients(one.module, oracle_of_one, 1e-12, 1e-14)
        assert_same_gradients(other.module, oracle_of_other, 1e-12, 1e-14)


@pytest.mark.parametrize("name", ["a checkpoint", "two devices"])
def test_one_rank_runs_a_forward_in_another_way(name: str) -> None:
    """C1, C4: each sums as often, and in the same order; in eval mode forwards have no numbers that would tell."""
    run_ranks(2, in_other_ways, name)


@on_two_ranks(1)
def test_second_derivatives_where_one_rank_runs_in_parts(rank: int, options: dict) -> None:
    """C5, F11: there no output lies on the way to another, and backward comes to other boundaries."""

    def forward(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = net.first(x)
        if rank and inside_replica() and torch.is_grad_enabled() and len(x) > 5:
            raise torch.OutOfMemoryError("as is meant")
        return net.last(hidden.tanh()), hidden

    layers = {"first": nn.Linear(5, 5), "last": nn.Linear(5, 3)}
    model, oracle = twins(lambda: Calls(forward, **layers).double(), rescue=True, **options)
    for seed in range(3):
        x = drawn(sum(SIZES), 5, seed=seed)
        for module, rows in ((model, x[rows_of(rank, SIZES)]), (oracle, x)):
            module.zero_grad()
            loss = sum(output.square().mean() for output in module(rows))
            gradients = torch.autograd.grad(loss, [*module.parameters()], create_graph=True)
            sum(gradient.square().sum() for gradient in gradients).backward()
        assert_same_gradients(model.module, oracle, rtol=1e-9)
