"""A wrapped module and a plain one with the same values: the oracle."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

import manyhands


def twins(make: Callable[[], nn.Module], **options) -> tuple[manyhands.DataParallel, nn.Module]:
    """Return a wrapped module, and a plain one with the same values."""
    module = make()
    model = manyhands.DataParallel(module, **options)
    oracle = make()
    oracle.load_state_dict(module.state_dict())
    return model, oracle


def rows_of(rank: int, sizes: Sequence[int]) -> slice:
    """Return which rows of all are those of a rank."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def assert_same_gradients(module: nn.Module, oracle: nn.Module, rtol: float = 1e-11, atol: float = 1e-13) -> None:
    for (name, parameter), other in zip(module.named_parameters(), oracle.parameters(), strict=True):
        one, two = parameter.grad, other.grad
        assert (one is None) == (two is None), name
        if one is not None and two is not None:
            assert one.is_sparse == two.is_sparse, name
            one, two = one.to_dense(), two.to_dense()
            torch.testing.assert_close(one, two, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
