"""References from a module's attributes to live modules and tensors, and how a replica's attributes get its own.

A replica starts as a copy of the live module's `__dict__`, and what lies in there can still point at the live module:
a bound method (`self.op = self._forward_fast`), a list of layers that is no ModuleList, a partial, a lambda that
closes over `self`, a hook, the flat weights of an RNN. Used as it is, such an attribute would run the live module
inside a replica: on the wrong device, and with gradients that never arrive.

`references` finds what a value points at; `rebind` returns the value with each live object replaced by the replica's.
Both look into the same places: containers, bound methods, partials, functions' closures and defaults, and weak
references. They do not look into objects of other classes, nor into containers of more than `_LARGE` items (a
vocabulary, say); what hides there is found when the output's graph is walked (see engines/threads.py).
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_LARGE = 1000

# Values of exactly these types point at nothing.
INERT = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, range, slice}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {types.BuiltinFunctionType, types.ModuleType}
)


def is_inert(value: Any) -> bool:
    """Return whether `value` surely points at nothing, as most attributes do; a quick look."""
    kind = type(value)
    if kind in INERT:
        return True
    if kind is tuple or kind is list or kind is set:
        return len(value) > _LARGE or INERT.issuperset(map(type, value))
    if kind is dict:
        return len(value) > _LARGE or INERT.issuperset(map(type, value.values()))
    return False


def references(value: Any, seen: set[int] | None = None) -> Iterator[nn.Module | torch.Tensor]:
    """Yield every module and tensor that `value` is or leads to."""
    if type(value) in INERT:
        return
    if isinstance(value, nn.Module | torch.Tensor):
        yield value
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        if type(part) not in INERT:
            yield from references(part, seen)


def rebind(value: Any, replacements: Mapping[int, Any], memo: dict[int, Any] | None = None) -> Any:
    """Return `value` with every object whose id is in `replacements` replaced; the same object if there is none.

    Args:
        value: an attribute's value.
        replacements: id of a live module or tensor -> the replica's.
        memo: results so far, by id; pass one dict for all attributes of a replica, and what they share stays shared.
    """
    if type(value) in INERT:
        return value
    if id(value) in replacements:
        return replacements[id(value)]
    if isinstance(value, nn.Module | torch.Tensor):
        return value
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo[id(value)] = value  # met again on the way down: a value that contains itself keeps that reference
        memo[id(value)] = _rebuilt(value, replacements, memo)
    return memo[id(value)]


def _parts(value: Any) -> list[Any]:
    """Return the values directly inside `value`, where it is of a kind that we look into."""
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LARGE else []
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value) if len(value) <= _LARGE else []
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return [*_cell_contents(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if type(value) is weakref.ref:
        return [value()]
    return []


def _rebuilt(value: Any, replacements: Mapping[int, Any], memo: dict[int, Any]) -> Any:
    parts = _parts(value)
    new = [rebind(part, replacements, memo) for part in parts]
    if all(a is b for a, b in zip(parts, new, strict=True)):
        return value
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, new[0])
    if type(value) is weakref.ref:
        return weakref.ref(new[0])
    if isinstance(value, functools.partial):
        num_args = len(value.args)
        keywords = dict(zip(value.keywords, new[1 + num_args :], strict=True))
        rebuilt = type(value)(new[0], *new[1 : 1 + num_args], **keywords)
        rebuilt.__dict__.update(rebind(value.__dict__, replacements, memo))
        return rebuilt
    if isinstance(value, types.FunctionType):
        return _rebuilt_function(value, replacements, memo)
    if isinstance(value, dict):
        copied = value.copy()  # keeps the order, and the type of OrderedDict and defaultdict
        copied.update(zip(value, new, strict=True))
        return copied
    if isinstance(value, deque):
        return deque(new, value.maxlen)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(new)
    return type(value)(new)


def _rebuilt_function(
    function: types.FunctionType, replacements: Mapping[int, Any], memo: dict[int, Any]
) -> types.FunctionType:
    """Return `function` with cells of its own for what is replaced; other cells stay shared with the original."""
    closure = []
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            closure.append(cell)
            continue
        new = rebind(content, replacements, memo)
        closure.append(cell if new is content else types.CellType(new))
    defaults = rebind(function.__defaults__, replacements, memo)
    rebuilt = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, tuple(closure) or None
    )
    rebuilt.__kwdefaults__ = rebind(function.__kwdefaults__, replacements, memo)
    rebuilt.__qualname__ = function.__qualname__
    rebuilt.__dict__.update(rebind(function.__dict__, replacements, memo))
    return rebuilt


def _cell_contents(function: types.FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return contents
