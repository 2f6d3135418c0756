"""Wider floating types: what a module converts to a narrower type stays in the type of the comparison.

A copy of a model in float64 does not compute in float64 alone: `x.float()`, `softmax(dtype=torch.float32)`, autocast
and constants of torch's default type are narrower again, and a product of two types is an error. So these operations
are caught where torch dispatches them, in C++ and in a backward pass too. A conversion of a tensor, or a sum, that
asks for a narrower floating type gives the wider one; so do the functions that make constants. Integers and booleans
stay, and what is computed from them alone.

What is not caught keeps its type: `torch.empty`, tensors of numpy, constants made before, custom operators, and code
that torch.compile has compiled. Sums and the like promote it. Products, convolutions and losses, which take one type
only, get it in the wider one.
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
# Operations that take one type only.
_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "nll_loss_forward"),
    *("nll_loss2d_forward", "native_layer_norm", "native_group_norm"),  # not batch norm, which writes into its inputs
)

_TO_COPY = torch.ops.aten._to_copy.default
_TYPES_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def widened(dtype: torch.dtype, least: torch.dtype) -> torch.dtype:
    """Return `dtype`, or `least` where that is wider; of a complex type the complex type of that width.

    >>> widened(torch.bfloat16, torch.float64), widened(torch.int64, torch.float64)
    (torch.float64, torch.int64)
    """
    if dtype.is_complex:
        return torch.promote_types(dtype, least)
    return least if dtype.is_floating_point and dtype.itemsize < least.itemsize else dtype


def handlers(asked: Callable[[torch.dtype], torch.dtype]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield the operations with their handlers, for `dispatcher.catch_operations`.

    Args:
        asked: returns the type to compute in, in the place of one that was asked for.
    """
    for name in (*_CONVERSIONS, *_CONSTANTS):
        packet = getattr(torch.ops.aten, name)
        for operation in (getattr(packet, overload) for overload in packet.overloads()):
            names = [argument.name for argument in operation._schema.arguments]
            if "out" not in names and ("dtype" in names or name == "lift_fresh"):
                yield operation, partial(_widened, operation, names, asked)
    for name in _PRODUCTS:
        yield getattr(torch.ops.aten, name).default, partial(_promoted, getattr(torch.ops.aten, name).default, asked)


def _widened(
    operation: Any,
    names: list[str],
    asked: Callable[[torch.dtype], torch.dtype],
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if args and names[0] == "self" and not isinstance(args[0], torch.Tensor):
        # torch hands over a number where C++ has a 0-dim tensor.
        args = (torch.scalar_tensor(args[0], dtype=_TYPES_OF_NUMBERS[type(args[0])]), *args[1:])
    if operation is _TO_COPY and not (args[0].dim() and args[0].is_floating_point()):
        # Kernels convert 0-dim tensors, and integers, to the type that they compute in, and rely on it.
        return operation.redispatch(keys, *args, **kwargs)
    number = names.index("dtype") if "dtype" in names else len(args)
    if kwargs.get("dtype") is not None:
        kwargs["dtype"] = asked(kwargs["dtype"])
    elif number < len(args) and args[number] is not None:
        args = (*args[:number], asked(args[number]), *args[number + 1 :])
    return _wide(operation.redispatch(keys, *args, **kwargs), asked)


def _promoted(operation: Any, asked: Callable[[torch.dtype], torch.dtype], keys: Any, *args: Any, **kwargs: Any) -> Any:
    args = tuple([_wide(each, asked) if isinstance(each, torch.Tensor) else each for each in args])
    kwargs = {name: _wide(each, asked) if isinstance(each, torch.Tensor) else each for name, each in kwargs.items()}
    return operation.redispatch(keys, *args, **kwargs)


def _wide(tensor: torch.Tensor, asked: Callable[[torch.dtype], torch.dtype]) -> torch.Tensor:
    dtype = asked(tensor.dtype)
    return tensor if dtype == tensor.dtype else tensor.to(dtype)
