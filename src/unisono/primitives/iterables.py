"""Outputs of classes that torch's gather makes anew: `type(output)(joined items)`, from what iterating over it yields.

torch does so with every class that it does not know. That loses whatever iterating does not yield: rows, or what the
constructor cannot compute from them. So an object is taken apart only if its class makes the same object again from its
own items.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from unisono.primitives import pytree
from unisono.primitives.object_state import same_state, state_of

_NOTHING_TO_JOIN = "it has no rows to join"
_NOT_MADE_AGAIN = "its class does not make the same object again from what iterating over it yields"


def why_whole(value: Any) -> str | None:
    """Return why an object of an unknown class cannot be joined from its items; None if it can."""
    if isinstance(value, Set):
        return "a set has no order by which the replicas' items could be matched"
    if not isinstance(value, Iterable) or isinstance(value, Iterator | Mapping | nn.Module | range | memoryview):
        return _NOTHING_TO_JOIN
    try:
        with torch.no_grad():
            heads = [next(iter(value), None) for _ in range(2)]
            if not isinstance(heads[0], Iterable) and heads[0] is not None and pytree.children(heads[0]) is None:
                return _NOTHING_TO_JOIN  # numbers, say, of an array
            if [*map(id, _tensors(heads[:1]))] != [*map(id, _tensors(heads[1:]))]:
                return "iterating over it makes new tensors each time"
            items = list(value)
            again: Any = type(value)(iter(items))  # type: ignore[call-arg]
            tensors, tensors_again = _tensors(items), _tensors(list(again))
    except Exception:  # noqa: BLE001 - the code of a user's class
        return _NOT_MADE_AGAIN
    if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in tensors_again]:
        return _NOT_MADE_AGAIN
    same = same_state(_state_beside(tensors, value), _state_beside(tensors_again, again))
    return None if same else _NOT_MADE_AGAIN


def _tensors(items: list[Any]) -> list[torch.Tensor]:
    return [tensor for _, tensor in pytree.tensors(items)]


def _state_beside(items: list[torch.Tensor], value: Any) -> dict[str, Any]:
    """Return what `value` holds, with each of the tensors that iterating yields replaced by its number."""
    numbers = {id(tensor): (number,) for number, tensor in enumerate(items)}
    return {path: numbers.get(id(held), held) for path, held in state_of(value).items()}
