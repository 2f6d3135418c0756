"""Models with batch norms, and a comparison on the scale that their gradients need."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.contract import in_time
from helpers.losses import fresh, loss_of, tensors_in
from helpers.modules import Calls, ForceField, rows_of
from unisono import DataParallel


class CallsSuper(nn.BatchNorm1d):
    """A user's subclass that adds something of its own, and calls torch's forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2) + 1


class CallsFunctional(nn.BatchNorm1d):
    """A user's subclass that does not call torch's forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = (self.running_mean, self.running_var)
        return F.batch_norm(x, *running, self.weight + 1, self.bias, training=self.training, momentum=0.3, eps=1e-3)


def functional(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Batch norms without any tensor that identifies them, the second over another number of channels."""
    hidden = F.batch_norm(model.first(x), None, None, training=True)
    return F.batch_norm(
        model.second(F.batch_norm(hidden.tanh(), None, None, None, None, True)), None, None, None, None, True
    )


def used_twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.norm(torch.tanh(model.linear(model.norm(x))))


class ResidualBlock(nn.Module):
    """Two ways through the block, each with a batch norm."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        first, second = nn.Conv2d(2, 3, 3, padding=1, bias=bias), nn.Conv2d(3, 3, 1, bias=bias)
        self.long = nn.Sequential(first, nn.BatchNorm2d(3), nn.ReLU(), second)
        self.short = nn.Sequential(nn.Conv2d(2, 3, 1, bias=bias), nn.BatchNorm2d(3))
        self.after = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.short(x) + self.after(self.long(x)))


class CheckpointedBatchNorm(nn.Module):
    """Checkpoints around batch norms, one of them inside of another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.third = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if x.is_leaf else x  # what a reentrant checkpoint asks for
        return checkpoint(
            self.inner, checkpoint(self.first, x, use_reentrant=self.reentrant), use_reentrant=self.reentrant
        )

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(checkpoint(self.second, x, use_reentrant=self.reentrant))


class Branches(nn.Module):
    """Takes different ways through its batch norms, by the first number of the first row."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.left, self.right, self.both = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.left if x[0, 0] < 3 else self.right
        x = self.linear(x)
        if self.way == "one of two":
            x = first(x)
        elif self.way == "one more, last":
            return self.both(x) if first is self.left else self.left(torch.tanh(self.both(x)))
        elif self.way == "checkpoint":
            x = checkpoint(first, x, use_reentrant=False)
        elif self.way == "unused" and first is self.right:
            return x + 0 * self.both(x).detach()
        elif self.way == "unused in part":
            x = x + (1 if first is self.left else 0) * self.left(x)
        return self.both(torch.tanh(x))


def branching_rows(*firsts: float) -> torch.Tensor:
    """Rows for `Branches` on three replicas: below 3, a replica goes left."""
    x = torch.arange(8.0).repeat_interleave(2).view(8, 2).sin()
    x[[0, 3, 6], 0] = torch.tensor(firsts)
    return x


class BatchNormForceField(ForceField):
    """Differentiates through batch norm inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def linear_and(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 4), norm(4), nn.Tanh())


def two_norms(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    """Return what makes a model with two batch norms, the first one changed."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
        change(model[1])
        return model

    return make


# Batch norms of other ranks and settings are in tests/contract/test_nn_sweep.py.
BATCH_NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "1d": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), rows_of(5)),
    "2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 1)),
        rows_of(2, 5, 5),
    ),
    "means far from 0": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Tanh()), lambda rows: torch.randn(rows, 5) + 1e6),
    "momentum=None": (linear_and(lambda n: nn.BatchNorm1d(n, momentum=None)), rows_of(5)),
    "neither": (linear_and(lambda n: nn.BatchNorm1d(n, affine=False, track_running_stats=False)), rows_of(5)),
    "subclass, super": (linear_and(CallsSuper), rows_of(5)),
    "subclass, functional": (linear_and(CallsFunctional), rows_of(5)),
    "functional": (lambda: Calls(functional, first=nn.Linear(5, 6), second=nn.Linear(6, 3)), rows_of(5)),
    "used twice": (
        lambda: Calls(used_twice, linear=nn.Linear(5, 5), norm=nn.BatchNorm1d(5, momentum=None)),
        rows_of(5),
    ),
    "residual block": (ResidualBlock, rows_of(2, 4, 4)),
    "frozen": (two_norms(lambda norm: norm.requires_grad_(False)), rows_of(5)),
    "one of two in eval mode": (two_norms(lambda norm: norm.eval()), rows_of(5)),
    "checkpoint, reentrant": (lambda: CheckpointedBatchNorm(True), rows_of(5)),
    "checkpoint, non-reentrant": (lambda: CheckpointedBatchNorm(False), rows_of(5)),
    "differentiates inside": (BatchNormForceField, rows_of(5)),
}


def assert_near(
    actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-12, what: str = "tensor"
) -> None:
    """Compare on the scale of the largest entry: gradients behind a batch norm are small differences."""
    assert (actual is None) == (expected is None), f"{what}: got {actual}, expected {expected}"
    if expected is not None and actual is not None and expected.numel():
        atol = tolerance * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


def gradients_and_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    gradients = {f"the gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    return {**gradients, **dict(module.named_buffers())}


def changed_by_a_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Run forward and backward; return the outputs, all gradients and the buffers, by name."""
    x = fresh(x)
    output = in_time(lambda: model(x))
    in_time(lambda: loss_of(output).backward())
    module = model.module if isinstance(model, DataParallel) else model
    outputs = {f"output {number}": tensor for number, tensor in enumerate(tensors_in(output))}
    found = {**outputs, "the gradient of x": x.grad, **gradients_and_buffers(module)}
    return {name: tensor if tensor is None else tensor.detach().clone() for name, tensor in found.items()}


def assert_gradients_and_buffers_near(model: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    expected = gradients_and_buffers(plain).values()
    for (name, mine), theirs in zip(gradients_and_buffers(model).items(), expected, strict=True):
        assert_near(mine, theirs, tolerance, name)


def compare_with_plain(model: DataParallel, plain: nn.Module, x: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Run forward and backward of both; compare outputs, all gradients and buffers."""
    expected, actual = changed_by_a_step(plain, x), changed_by_a_step(model, x)
    for (name, mine), theirs in zip(actual.items(), expected.values(), strict=True):
        assert_near(mine, theirs, tolerance, name)
