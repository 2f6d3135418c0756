"""Derivatives of higher order: gradient penalties, third derivatives, gradients with a history."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from helpers.comparisons import assert_all_same, assert_same_gradients, assert_same_state, twins
from helpers.contract import Wrap, each_with, in_turn, over_engines, over_gloo_too
from helpers.losses import fresh, loss_of, penalty_loss
from helpers.modules import Calls, ForceField, mlp
from unisono import data_parallel


@over_engines("num_replicas", [(2,), (3,)], processes=[(2,)], gloo=[(2,)])
def test_gradcheck_and_gradgradcheck(wrap: Wrap, num_replicas: int) -> None:
    """N3"""
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), num_replicas)
    x = torch.randn(3, 2, requires_grad=True)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(x)

    assert torch.autograd.gradcheck(run, (x, *model.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *model.parameters()))


# Parameters only, buffers that forward reads, a graph inside, buffers that forward writes.
PENALISED: dict[str, Callable[[], nn.Module]] = {
    "linear": mlp,
    "batch norm in eval mode": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh()).eval(),
    "differentiates inside": ForceField,
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh()),
}
SPLITS = [("linear", 2, 7), ("linear", 2, 1), *each_with(PENALISED, [(4, 6)])]


@over_engines("name, num_replicas, rows", SPLITS, processes=SPLITS, gloo=each_with(PENALISED, [(3, 8)]))
def test_gradient_penalty(wrap: Wrap, name: str, num_replicas: int, rows: int) -> None:
    """N3: a loss of the output and of its gradient; parameters, their gradients and the buffers after three steps."""
    plain, model = twins(wrap, PENALISED[name](), num_replicas)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, model.module)]
    for _ in range(3):
        x = torch.randn(rows, 5)
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            penalty_loss(module, x).backward()
            optimizer.step()
        assert_same_gradients(model.module, plain, 1e-10)
    assert_same_state(model.module, plain, 1e-10)


@over_gloo_too
def test_gradient_penalty_with_batch_norm_in_training(wrap: Wrap) -> None:
    """N3: statistics over a replica's rows, written once; the oracle is data_parallel."""
    layers = [nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)]
    oracle, model = twins(wrap, nn.Sequential(*layers), 3)
    x = torch.randn(9, 5)
    for _ in range(2):
        penalty_loss(model, x).backward()
        penalty_loss(lambda x: data_parallel(oracle, x, in_turn(3)), x).backward()
    assert_same_gradients(model.module, oracle, 1e-10)
    assert_same_state(model.module, oracle)
    assert model.module[1].num_batches_tracked == 2


def test_train_and_eval_toggled_between_the_passes(wrap: Wrap) -> None:
    """N3: the second pass belongs to the mode, the attributes and the buffers of the first."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model.linear(x)) * (model.factor if model.training else 100.0)

    plain, model = twins(wrap, Calls(forward, linear=parametrizations.spectral_norm(nn.Linear(5, 5)), factor=1.0))
    x = torch.randn(7, 5)
    for module, root in ((plain, plain), (model, model.module)):

        def change(root: nn.Module = root) -> None:
            root.eval()
            root.factor = 7.0

        penalty_loss(module, x, change).backward()
    assert_same_gradients(model.module, plain, 1e-10)
    assert_same_state(model.module, plain)


@pytest.mark.parametrize("reduce", [torch.sum, lambda t: t.pow(3).sum()], ids=["sum", "sum of cubes"])
def test_third_derivatives(wrap: Wrap, reduce: Callable[..., torch.Tensor]) -> None:
    """N3: of inputs and of parameters; after a plain sum the incoming gradients need no gradient themselves."""
    x = torch.randn(7, 5)
    results = []
    for module in twins(wrap, mlp(), 3):
        x_here = fresh(x)
        (first,) = torch.autograd.grad(reduce(module(x_here)), x_here, create_graph=True)
        (second,) = torch.autograd.grad(reduce(first), x_here, create_graph=True)
        results.append(torch.autograd.grad(reduce(second), [x_here, *module.parameters()], allow_unused=True))
    assert_all_same(results[1], results[0], 1e-10)


@over_gloo_too
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_create_graph_backward_gives_gradients_with_a_history(wrap: Wrap) -> None:
    """N3: `loss.backward(create_graph=True)`, and a loss of the gradients that it leaves."""
    x = torch.randn(7, 5)
    results = []
    for module in twins(wrap, mlp()):
        parameters = list(module.parameters())
        loss_of(module(x)).backward(create_graph=True)
        results.append(torch.autograd.grad(sum(p.grad.pow(2).sum() for p in parameters), parameters))
        for parameter in parameters:
            parameter.grad = None  # it would be a cycle, as the warning says
    assert_all_same(results[1], results[0], 1e-10)
