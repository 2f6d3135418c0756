"""What an object of any class holds: the tensors, numbers and strings inside it, by path.

Two objects that hold the same can stand for each other. Classes, functions, devices, dtypes and None count as nothing:
they say what an object does, or where it is, not what is in it.
"""

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_HOLDS_NOTHING = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.NoneType)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
_PLAIN = (range, slice, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, types.NoneType)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_VALUES = (bool, int, float, complex, str, bytes)


def state_of(value: object, without: tuple[type, ...] = ()) -> dict[str, Any]:
    """Return everything that `value` holds, by path; what it holds twice is there once.

    Args:
        without: classes whose objects count as nothing.

    >>> state_of({"rows": 2, "parts": [types.SimpleNamespace(name="a", made_by=dict)]})
    {"['rows']": 2, "['parts'][0].name": 'a'}
    """
    return dict(_held(value, "", set(), (torch.dtype, torch.device, *_HOLDS_NOTHING, *without)))


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
        if isinstance(now, (*_FUNCTIONS, *_PLAIN)):
            return bool(before == now)
        if isinstance(now, torch.Tensor):
            return before.requires_grad == now.requires_grad and same_value(before, now)
        if isinstance(now, tuple | list | dict | set) and not len(before) and not len(now):
            return True
        state = state_of(now)
        return bool(state) and same_state(state_of(before), state)
    except Exception:  # noqa: BLE001 - objects of any class
        return False


def _held(value: Any, path: str, seen: set[int], nothing: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nothing):
        return
    if isinstance(value, (torch.Tensor, *_VALUES)):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inside = _inside(value)
    if inside is None:
        yield path, value
        return
    for step, child in inside.items():
        yield from _held(child, path + step, seen, nothing)


def _inside(value: Any) -> dict[str, Any] | None:
    """Return what is inside a container or object, by the last step of its path; None if nothing can be seen there."""
    if isinstance(value, Mapping):
        inside = {f"[{key!r}]": child for key, child in value.items()}
    elif isinstance(value, list | tuple | deque):
        inside = {f"[{number}]": child for number, child in enumerate(value)}
    else:
        inside = {}
    inside.update((f".{name}", child) for name, child in attributes_of(value).items())
    if not inside and not isinstance(value, Mapping | list | tuple | deque) and not hasattr(value, "__dict__"):
        return None  # a set, or an object of C code
    return inside


def attributes_of(value: object) -> dict[str, Any]:
    """Return what an object has in its `__dict__`, and in the slots of its class; no code of the class is called."""
    found: dict[str, Any] = {}
    of_dict: Any = next((vars(base)["__dict__"] for base in type(value).__mro__ if "__dict__" in vars(base)), None)
    if type(of_dict) in _DESCRIPTORS:  # a property of that name is another object's, as a proxy's
        found.update(of_dict.__get__(value))
    for name, _, held in filled_slots(value):
        found.setdefault(name, held)
    return found


def filled_slots(value: object) -> Iterator[tuple[str, types.MemberDescriptorType, Any]]:
    """Yield the attributes that an object has in slots of its class (`__slots__`), with the slots."""
    for base in type(value).__mro__:
        of_base = vars(base)
        slots = of_base.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            attribute = f"_{base.__name__.lstrip('_')}{name}" if _is_private(name) else name
            slot = of_base.get(attribute)
            if type(slot) is types.MemberDescriptorType:
                try:
                    held = slot.__get__(value)
                except AttributeError:  # it is empty
                    continue
                yield attribute, slot, held


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
