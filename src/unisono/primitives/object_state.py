"""What an object of any class holds: the tensors, numbers and strings inside it, by path.

Two objects that hold the same can stand for each other. Classes, functions, devices, dtypes and None count as nothing:
they say what an object does, or where it is, not what is in it.
"""

import math
import types
from collections.abc import Mapping
from typing import Any

import torch

from unisono.primitives.visitor import Place, held, num_entries, visit

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_HOLDS_NOTHING: tuple[type, ...] = (*_FUNCTIONS, types.NoneType, type, torch.dtype, torch.device)
_VALUES = (torch.Tensor, bool, int, float, complex, str, bytes)
_OPAQUE = (set, frozenset)
# Of these it is told by themselves whether they are equal.
_PLAIN = (*_HOLDS_NOTHING, types.MethodType, range, slice, torch.Size, torch.layout, torch.memory_format)


def state_of(value: object, without: tuple[type, ...] = ()) -> dict[str, Any]:
    """Return everything that `value` holds, by path; what it holds twice is there once.

    Args:
        without: classes whose objects count as nothing.

    >>> state_of({"rows": 2, "parts": [types.SimpleNamespace(name="a", made_by=dict)]})
    {"['rows']": 2, "['parts'][0].name": 'a'}
    """
    nothing = (*_HOLDS_NOTHING, *without)
    if isinstance(value, _VALUES) and not isinstance(value, nothing):
        return {"": value}
    found: dict[str, Any] = {}
    closed = (*_VALUES, *_OPAQUE, *nothing)
    pairs = visit([Place(value, "")], lambda each: () if isinstance(each, closed) else held(each), math.inf, _LEAVES)
    for place, children in pairs:
        each = place.value
        if isinstance(each, nothing):
            continue
        if not children and not isinstance(each, _VALUES) and _is_opaque(each):
            found[str(place)] = each
        values = [child for child in children if isinstance(child.value, _VALUES)]
        found.update((str(child), child.value) for child in values if not isinstance(child.value, nothing))
    return found


def _is_opaque(value: Any) -> bool:
    """Return whether nothing can be seen in a value: a set, or an object of C code."""
    return isinstance(value, _OPAQUE) or (num_entries(value) is None and not hasattr(value, "__dict__"))


_LEAVES: frozenset[type] = frozenset({*_VALUES, types.NoneType})


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two objects hold the same; on an accelerator this waits for tensors."""
    return one.keys() == other.keys() and all(same_value(value, other[path]) for path, value in one.items())


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values that `state_of` has found are the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - an object of any class
        return False


def is_equal(before: Any, now: Any) -> bool:
    """Return whether two values hold the same, as far as that can be told."""
    if type(before) is not type(now):
        return False
    try:
        if isinstance(now, _PLAIN):
            return bool(before == now)
        if isinstance(now, torch.Tensor):
            return before.requires_grad == now.requires_grad and same_value(before, now)
        if isinstance(now, tuple | list | dict | set) and not len(before) and not len(now):
            return True
        state = state_of(now)
        return bool(state) and same_state(state_of(before), state)
    except Exception:  # noqa: BLE001 - objects of any class
        return False
