"""The inputs of a wrapper's first call, for a comparison with one device by `verify`."""

import inspect
from typing import Any

from torch import nn

from unisono.primitives import pytree
from unisono.primitives.shared_iterators import iterators_anew


class FirstCall:
    """The inputs of a call, copied before the call can change them, and the mode in which the model was.

    Args:
        inputs, kwargs: iterators in them are shared ones, of which the call has its own.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.mode = module, "training" if module.training else "eval"
        self._inputs, self._kwargs = pytree.map_tensors(
            lambda tensor: tensor.detach().clone(), (iterators_anew(inputs), iterators_anew(kwargs))
        )

    def inputs(self) -> Any:
        """Return them as `verify` takes them: all by position, or all by name.

        Raises:
            TypeError: some can be given by position only, and others by name only.
        """
        if not self._kwargs or not self._inputs:
            return self._kwargs or self._inputs
        bound = inspect.signature(self.module.forward).bind(*self._inputs, **self._kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise TypeError(f"{name} is given by position only, other inputs by name")
            named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return named
