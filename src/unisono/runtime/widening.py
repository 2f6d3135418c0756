"""Wider floating types: what a module converts to a narrower type stays in the type of the comparison.

A copy of a model in float64 does not compute in float64 alone: `x.float()`, `softmax(dtype=torch.float32)`, autocast
and constants of torch's default type are narrower again, and a product of two types is an error. So these operations
are caught where torch dispatches them, in C++ and in a backward pass too. A conversion, or a sum, that asks for a
narrower floating type gives the wider one; so do the functions that make constants. Integers and booleans stay.

What is not caught keeps its type: `torch.empty`, tensors of numpy, constants made before, custom operators, and code
that torch.compile has compiled.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

# Operations that have a `dtype`, or make a tensor of torch's default type.
_CONVERSIONS = ("_to_copy", "sum", "mean", "prod", "nansum", "cumsum", "cumprod", "norm", "linalg_vector_norm")
_CONSTANTS = (
    *("lift_fresh", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "scalar_tensor", "zeros_like"),
    *("ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
)


def widened(dtype: torch.dtype, least: torch.dtype) -> torch.dtype:
    """Return `dtype`, or `least` where that is wider; of a complex type the complex type of that width.

    >>> widened(torch.bfloat16, torch.float64), widened(torch.int64, torch.float64)
    (torch.float64, torch.int64)
    """
    if dtype.is_complex:
        return torch.promote_types(dtype, least)
    return least if dtype.is_floating_point and dtype.itemsize < least.itemsize else dtype


def handlers(asked: Callable[[torch.dtype], torch.dtype]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield the operations with their handlers, for `torch_private.catch_operations`.

    Args:
        asked: returns the type to compute in, in the place of one that was asked for.
    """
    for name in (*_CONVERSIONS, *_CONSTANTS):
        packet = getattr(torch.ops.aten, name)
        for operation in (getattr(packet, overload) for overload in packet.overloads()):
            names = [argument.name for argument in operation._schema.arguments]
            if "out" not in names and ("dtype" in names or name == "lift_fresh"):
                yield operation, partial(_widened, operation, names, asked)


def _widened(
    operation: Any,
    names: list[str],
    asked: Callable[[torch.dtype], torch.dtype],
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    number = names.index("dtype") if "dtype" in names else len(args)
    if kwargs.get("dtype") is not None:
        kwargs["dtype"] = asked(kwargs["dtype"])
    elif number < len(args) and args[number] is not None:
        args = (*args[:number], asked(args[number]), *args[number + 1 :])
    if args and isinstance(args[0], bool | int | float | complex) and names[0] == "self":
        args = (torch.scalar_tensor(args[0]), *args[1:])  # torch hands over a number where C++ has a 0-dim tensor
    result = operation.redispatch(keys, *args, **kwargs)
    dtype = asked(result.dtype)
    return result if dtype == result.dtype else result.to(dtype)
