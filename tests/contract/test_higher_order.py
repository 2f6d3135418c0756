"""Derivatives of higher order: gradient penalties, third derivatives, gradients with a history."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from helpers.batch_norms import BATCH_NORMS
from helpers.comparisons import assert_alike, assert_all_same, assert_same_gradients, assert_same_state, twins
from helpers.contract import ON_CPU, Wrap, each_with, in_time, over_places
from helpers.losses import fresh, loss_of, penalty_loss
from helpers.modules import Calls, mlp


@over_places("num_replicas", [(2,), (3,)], separate=[(2,)])
@pytest.mark.parametrize("norm", [False, True], ids=["", "synchronised batch norm"])
def test_gradcheck_and_gradgradcheck(wrap: Wrap, num_replicas: int, norm: bool) -> None:
    """N3, N5"""
    norms = (nn.BatchNorm1d(2), nn.BatchNorm1d(1, affine=False)) if norm else (nn.Identity(), nn.Identity())
    layers = [nn.Linear(2, 2), norms[0], nn.Tanh(), nn.Linear(2, 1), norms[1]]
    model = wrap(nn.Sequential(*layers), num_replicas, sync_batch_norm=norm)
    x = torch.randn(3, 2, requires_grad=True)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(x)

    assert torch.autograd.gradcheck(run, (x, *model.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *model.parameters()))


@over_places(
    "name, num_replicas, rows",
    each_with(["residual block", "differentiates inside", "checkpoint, non-reentrant"], [(2, 7), (4, 6)]),
    separate=[("differentiates inside", 3, 8)],
)
def test_gradient_penalty(wrap: Wrap, name: str, num_replicas: int, rows: int) -> None:
    """N3, N5, R13: a loss of the output and of its gradient; parameters, their gradients and the buffers after three
    steps. Running statistics are written once. Of other modules such losses are programs of the contract."""
    make_model, make_batch = BATCH_NORMS[name]
    plain, model = twins(wrap, make_model(), num_replicas, sync_batch_norm=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, model.module)]
    for _ in range(3):
        x = make_batch(rows)
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            in_time(lambda module=module, x=x: penalty_loss(module, x).backward())
            optimizer.step()
        assert_same_gradients(model.module, plain, 1e-10)
    if not name.startswith("checkpoint"):  # each pass over the graph runs its forward again, which writes the buffers
        assert_same_state(model.module, plain, 1e-10)


def test_train_and_eval_toggled_between_the_passes(wrap: Wrap) -> None:
    """N3: the second pass belongs to the mode, the attributes and the buffers of the first."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model.linear(x)) * (model.factor if model.training else 100.0)

    def step(call: Callable[..., torch.Tensor], root: nn.Module) -> None:
        def change() -> None:
            root.eval()
            root.factor = 7.0

        penalty_loss(call, torch.randn(7, 5), change).backward()

    module = Calls(forward, linear=parametrizations.spectral_norm(nn.Linear(5, 5)), factor=1.0)
    assert_alike(wrap, module, step, tolerance=1e-10)


class Formula(nn.BatchNorm1d):
    """Batch norm by elementary functions: torch's own third derivatives of it are wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(0)
        return centred / torch.sqrt(centred.square().mean(0) + self.eps) * self.weight + self.bias


def sum_of_cubes(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3).sum()


@pytest.mark.parametrize(("reduce", "synchronised"), [(torch.sum, False), (sum_of_cubes, False), (sum_of_cubes, True)])
def test_third_derivatives(wrap: Wrap, reduce: Callable[..., torch.Tensor], synchronised: bool) -> None:
    """N3, N5: of inputs and of parameters; after a plain sum the incoming gradients need no gradient themselves."""
    plain, model = Formula(5) if synchronised else mlp(), nn.BatchNorm1d(5) if synchronised else mlp()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(7, 5)

    def third(module: Callable[..., torch.Tensor], parameters: Iterable[nn.Parameter]) -> tuple[torch.Tensor, ...]:
        x_here = fresh(x)
        (first,) = torch.autograd.grad(reduce(module(x_here)), x_here, create_graph=True)
        (second,) = torch.autograd.grad(reduce(first), x_here, create_graph=True)
        return torch.autograd.grad(reduce(second), [x_here, *parameters], allow_unused=True)

    wrapped = wrap(model, 3, sync_batch_norm=synchronised)
    found, expected = in_time(lambda: third(wrapped, model.parameters())), third(plain, plain.parameters())
    # Each entry is a sum of terms that may be as large as the largest entry of all, 1e9 here, and cancel. Rounding is
    # relative to these; the processor's instructions decide in which order they are summed.
    largest = max(1.0, *(each.abs().max().item() for each in expected if each is not None))
    scaled = [[None if each is None else each / largest for each in some] for some in (found, expected)]
    assert_all_same(*scaled, 1e-12 if ON_CPU else 1e-8)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_create_graph_backward_gives_gradients_with_a_history(wrap: Wrap) -> None:
    """N3: `loss.backward(create_graph=True)`, and a loss of the gradients that it leaves."""

    def step(call: Callable[..., torch.Tensor], root: nn.Module) -> tuple[torch.Tensor, ...]:
        parameters = list(root.parameters())
        loss_of(call(torch.randn(7, 5))).backward(create_graph=True)
        grads = torch.autograd.grad(sum(p.grad.pow(2).sum() for p in parameters), parameters)
        root.zero_grad()  # it would be a cycle, as the warning says
        return grads

    assert_alike(wrap, mlp(), step, tolerance=1e-10)
