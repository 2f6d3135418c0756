"""A wrapped module beside the plain one: the same outputs, gradients and state, in float64."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from helpers.contract import Wrap, in_time
from helpers.losses import fresh, loss_of
from unisono import DataParallel


def twins(wrap: Wrap, plain: nn.Module, num_replicas: int = 2, **options: Any) -> tuple[nn.Module, DataParallel]:
    """Return a module and a wrapped copy of it."""
    return plain, wrap(copy.deepcopy(plain), num_replicas, **options)


def assert_alike(
    wrap: Wrap,
    module: nn.Module,
    steps: Callable[[Callable[..., Any], Any], Any],
    num_replicas: int = 2,
    tolerance: float = 1e-12,
    **options: Any,
) -> DataParallel:
    """Check steps of a wrapped copy of a module: what they return, all gradients, and the state are the plain module's.

    Args:
        steps: makes steps by `call(...)`, and returns tensors: `steps(call, root)`, of which `root` has the parameters.

    Returns:
        The wrapped copy.
    """
    plain, model = twins(wrap, module, num_replicas, **options)
    found = []
    for call, root in ((plain, plain), (model, model.module)):
        torch.manual_seed(1)
        found.append(_entries(in_time(lambda call=call, root=root: steps(call, root))))
    assert_all_same(found[1], found[0], tolerance)
    assert_same_gradients(model.module, plain, tolerance)
    assert_same_state(model.module, plain, tolerance)
    return model


def one_step(*shape: int) -> Callable[..., torch.Tensor | None]:
    """Return a step for `assert_alike`, on a batch of this shape, which returns the gradient of the batch."""

    def step(call: Callable[..., Any], root: nn.Module) -> torch.Tensor | None:
        x = fresh(torch.randn(shape))
        loss_of(call(x)).backward()
        return x.grad

    return step


def _entries(value: Any) -> list[Any]:
    return [entry for item in value for entry in _entries(item)] if isinstance(value, list | tuple) else [value]


def assert_same(
    actual: torch.Tensor | None, expected: torch.Tensor | None, rtol: float = 1e-12, atol: float | None = None
) -> None:
    """Check that both are the same, within `rtol`, and absolutely within `atol`; None: the same. None is not zeros."""
    assert (actual is None) == (expected is None), f"got {actual}, expected {expected}"
    if expected is not None and actual is not None:
        assert actual.is_sparse == expected.is_sparse
        atol = rtol if atol is None else atol
        torch.testing.assert_close(actual.to_dense(), expected.to_dense(), rtol=rtol, atol=atol)


def assert_same_gradients(module: nn.Module, oracle: nn.Module, rtol: float = 1e-12, atol: float | None = None) -> None:
    """Check that both have the same gradients, in the sense of `assert_same`."""
    for (name, parameter), other in zip(module.named_parameters(), oracle.parameters(), strict=True):
        try:
            assert_same(parameter.grad, other.grad, rtol, atol)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_equal(found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]) -> None:
    """Check that tensors are the same, bit for bit, and None where None is expected."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def assert_all_same(actual: Iterable[Any], expected: Iterable[Any], tolerance: float = 1e-12) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same(mine, theirs, tolerance)


def assert_same_state(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    mine, theirs = actual.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_unchanged(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Check that a module's state is, bit for bit, what `state_dict` returned before."""
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def train_both(plain: nn.Module, wrapped: nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Train both on the same batches, the fifth in eval mode; compare outputs and gradients in every step."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (plain, wrapped)]
    for number, x in enumerate(batches):
        for model in (plain, wrapped):
            model.train(number % 6 != 4)
        outputs = [plain(x), wrapped(x)]
        assert_same(outputs[1], outputs[0])
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.pow(2).mean().backward()
        assert_all_same((p.grad for p in wrapped.parameters()), (p.grad for p in plain.parameters()), 1e-10)
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        assert_same(wrapped(x), plain(x), 1e-10)
