"""Derivatives of higher order: gradient penalties, third derivatives, gradients with a history."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from helpers.contract import (
    ForceField,
    Wrap,
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    each_with,
    fresh,
    in_turn,
    loss_of,
    mlp,
    over_engines,
    over_gloo_too,
    penalty_loss,
    twins,
)
from manyhands import data_parallel


@over_engines("num_replicas", [(2,), (3,)], processes=[(2,)], gloo=[(2,)])
def test_gradcheck_and_gradgradcheck(wrap: Wrap, num_replicas: int) -> None:
    """N3"""
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), num_replicas)
    x = torch.randn(3, 2, requires_grad=True)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(x)

    assert torch.autograd.gradcheck(run, (x, *model.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *model.parameters()))


PENALISED: dict[str, Callable[[], nn.Module]] = {
    "linear": mlp,
    "conv": lambda: nn.Sequential(nn.Conv1d(1, 3, 3), nn.Softplus(), nn.Flatten(), nn.Linear(9, 3)),
    "batch norm in eval mode": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh()).eval(),
    "group norm": lambda: nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4), nn.Tanh()),
    "rnn cell": lambda: nn.Sequential(nn.RNNCell(5, 4)),
    "differentiates inside": ForceField,
} | {
    norm.__name__: lambda norm=norm: nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh(), norm(nn.Linear(6, 3)))
    for norm in (parametrizations.spectral_norm, parametrizations.weight_norm)
}
SENT = ["linear", "differentiates inside", "spectral_norm"]  # parameters only, a graph inside, buffers that change


@over_engines(
    "name, num_replicas, rows",
    [*each_with(PENALISED, [(2, 7), (4, 6)]), ("linear", 3, 8), ("linear", 2, 1)],
    processes=[*each_with(SENT, [(4, 6)]), ("linear", 2, 7), ("linear", 2, 1)],
    gloo=each_with(SENT, [(3, 8)]),
)
def test_gradient_penalty(wrap: Wrap, name: str, num_replicas: int, rows: int) -> None:
    """N3: a loss of the output and of its gradient; parameters, their gradients and the buffers after three steps."""
    plain, model = twins(wrap, PENALISED[name](), num_replicas)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, model.module)]
    for _ in range(3):
        x = torch.randn(rows, 1, 5) if name == "conv" else torch.randn(rows, 5)
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


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_gradient_penalty_with_the_old_norms(wrap: Wrap, norm: Callable[[nn.Module], nn.Module]) -> None:
    """N3, R10: hooks that compute the weight as a plain attribute before each forward."""
    # Deep copies of these are refused by torch once a forward has run, so the two are made alike.
    plain, other = (nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh(), norm(nn.Linear(6, 1))) for _ in range(2))
    other.load_state_dict(plain.state_dict())
    model = wrap(other, 2)
    x = torch.randn(7, 5)
    for _ in range(2):
        penalty_loss(plain, x).backward()
        penalty_loss(model, x).backward()
        assert_same_gradients(model.module, plain, 1e-10)
    assert_same_state(model.module, plain)


def test_gradient_penalty_with_dropout(wrap: Wrap) -> None:
    """N3: the second derivative belongs to the masks of the first pass."""

    class ReturnsItsMask(nn.Module):
        """Also takes one, so that the plain module can be given the same."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.tanh(self.first(x))
            if mask is None:
                mask = F.dropout(torch.ones_like(hidden), 0.4)
            return self.second(hidden * mask), mask

    plain, model = twins(wrap, ReturnsItsMask(), 3)
    x = torch.randn(8, 5)
    drawn: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        output, mask = model(x)
        drawn.append(mask)
        return output

    penalty_loss(run, x).backward()
    assert len(drawn) == 1
    penalty_loss(lambda x: plain(x, drawn[0].detach())[0], x).backward()
    assert_same_gradients(model.module, plain, 1e-10)


def test_train_and_eval_toggled_between_the_passes(wrap: Wrap) -> None:
    """N3: the second pass belongs to the mode, the attributes and the buffers of the first."""

    class DependsOnMode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = parametrizations.spectral_norm(nn.Linear(5, 5)), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) * (self.factor if self.training else 100.0)

    plain, model = twins(wrap, DependsOnMode())
    x = torch.randn(7, 5)
    for module, root in ((plain, plain), (model, model.module)):

        def change(root: nn.Module = root) -> None:
            root.eval()
            root.factor = 7.0

        penalty_loss(module, x, change).backward()
    assert_same_gradients(model.module, plain, 1e-10)
    assert_same_state(model.module, plain)


REDUCTIONS = {"sum": torch.sum, "sum of cubes": lambda t: t.pow(3).sum()}


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
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


def test_double_backward_of_an_input_written_into_afterwards(wrap: Wrap) -> None:
    """N3: the plain module refuses it (the input was saved); a wrong second derivative must not come out."""
    plain, model = twins(wrap, nn.Sequential(nn.Linear(5, 3), nn.Tanh()))
    x = torch.randn(7, 5)

    def second(module: Callable[..., torch.Tensor], write: bool) -> torch.Tensor:
        x_here = fresh(x)
        hidden = x_here * 1.0
        output = module(hidden)
        if write:
            hidden.mul_(3.0)
        (grad,) = torch.autograd.grad(output.sum(), x_here, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), x_here)[0]

    right = second(plain, write=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second(plain, write=True)
    try:
        result = second(model, write=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 - refused or right
    else:
        assert_same(result, right)


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
