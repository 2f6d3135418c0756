"""A wrapped module and a plain one with the same values: the oracle."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

import unisono
from helpers.comparisons import assert_same_gradients


def twins(make: Callable[[], nn.Module], **options) -> tuple[unisono.DataParallel, nn.Module]:
    """Return a wrapped module, and a plain one with the same values."""
    module = make()
    model = unisono.DataParallel(module, **options)
    oracle = make()
    oracle.load_state_dict(module.state_dict())
    return model, oracle


def rows_of(rank: int, sizes: Sequence[int]) -> slice:
    """Return which rows of all are those of a rank."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def state_of(model: nn.Module) -> list[torch.Tensor | None]:
    """Return copies of parameters, buffers, gradients and the random state."""
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*map(torch.clone, model.state_dict().values()), *gradients, torch.get_rng_state()]


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Run forward and backward; return the output and the gradients."""
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


def train_twins(
    rank: int,
    model: unisono.DataParallel,
    oracle: nn.Module,
    batches: Iterable[tuple[Sequence[int], torch.Tensor]],
    rtol: float = 1e-11,
) -> tuple[float, ...]:
    """Train both, the oracle on the rows of all ranks; compare outputs, gradients and buffers in every step.

    Args:
        batches: how many rows each rank has, and the rows of all.

    Returns:
        The sum of each tensor of the state in the end.
    """
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=rtol / 100)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, oracle)]
    for sizes, x in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        output, expected = model(x[rows_of(rank, sizes)]), oracle(x)
        close(output, expected[rows_of(rank, sizes)])
        output.square().mean().backward()
        expected.square().mean().backward()
        assert_same_gradients(model.module, oracle, rtol=1e-9, atol=1e-12)
        for (name, buffer), other in zip(model.module.named_buffers(), oracle.buffers(), strict=True):
            close(buffer, other, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    return tuple(t.double().sum().item() for t in model.module.state_dict().values())
