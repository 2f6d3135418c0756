"""Replace what a program's modules refer to, by a name or by what hangs below one.

A program takes a class of torch's in more ways than by a name: in a registry such as a dict of classes, as a default
argument, in a functools.partial, as an attribute of a class, in a closure. All of these can be reached from its
modules, and each is replaced where it is. Annotations stay as they are.

What is not reached: variables of functions that run, objects with slots, containers of more than 1,000 items, and what
is more than six steps away from a module.

Assumes that no other thread changes what is walked meanwhile; a thread that imports modules does no harm.
"""

import functools
from collections import deque
from collections.abc import Iterable
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from torch import nn

_LONGEST = 1000  # a longer container holds data
_DEEPEST = 6  # steps from a module
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, ModuleType, BuiltinFunctionType}
    | {GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType}
)
_MUTABLE = (dict, list, set, partial, CellType)
_OF_FUNCTION = ("__defaults__", "__kwdefaults__")
_OF_PARTIAL = ("func", "args", "keywords")
_NOT_READ = frozenset({"__annotations__", "__orig_bases__", "__builtins__", "__dict__", "__weakref__"})


def replace(replacements: Iterable[tuple[Any, Any]], namespaces: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Replace the first object of each pair by the second one, wherever the namespaces lead to it; return where.

        >>> program = {"wrappers": {"parallel": (list, dict)}}
        >>> replace([(dict, set)], [("program", program)])
        ["program.wrappers['parallel'][1]"]
        >>> program
        {'wrappers': {'parallel': (<class 'list'>, <class 'set'>)}}

    Args:
        replacements: the old and the new; an old one is known by its identity.
        namespaces: the names of modules, and the names in them.
    """
    walk = _Walk(replacements)
    for place, namespace in namespaces:
        for name, value in list(namespace.items()):
            if (
                type(value) not in _ATOMS
                and name not in _NOT_READ
                and (new := walk.replaced(value, f"{place}.{name}", 1)) is not value
            ):
                namespace[name] = new
    walk.finish()
    return walk.places


class _Walk:
    """Replaces objects in what it is shown, and then in what that leads to, nearest first, each object once."""

    def __init__(self, replacements: Iterable[tuple[Any, Any]]) -> None:
        self.places: list[str] = []
        self._new = {id(old): new for old, new in replacements}
        self._seen: set[int] = set()
        self._holders: deque[tuple[Any, str, int]] = deque()  # what is still to be looked into

    def finish(self) -> None:
        while self._holders:
            self._look_into(*self._holders.popleft())

    def replaced(self, value: Any, place: str, depth: int) -> Any:
        """Return what stands for a value from now on: another object, or itself, which is looked into later."""
        if id(value) in self._new:
            self.places.append(place)
            return self._new[id(value)]
        kind = type(value)  # a proxy's __class__ is that of another object
        if kind in _ATOMS or depth >= _DEEPEST:
            return value
        if kind in (tuple, frozenset) or (issubclass(kind, tuple) and hasattr(kind, "_make")):
            return self._made_anew(value, kind, place, depth + 1)
        if kind in (staticmethod, classmethod):
            function = self.replaced(value.__func__, place, depth)
            return value if function is value.__func__ else kind(function)
        holder = _holder_of(value, kind)
        if holder is not None and id(holder) not in self._seen:
            self._seen.add(id(holder))
            self._holders.append((holder, place, depth + 1))
        return value

    def _made_anew(self, value: Any, kind: Any, place: str, depth: int) -> Any:
        before = list(value) if len(value) <= _LONGEST else []
        parts = [self.replaced(part, f"{place}[{i}]", depth) for i, part in enumerate(before)]
        if all(new is old for new, old in zip(parts, before, strict=True)):
            return value
        return kind._make(parts) if issubclass(kind, tuple) and kind is not tuple else kind(parts)

    def _look_into(self, holder: Any, place: str, depth: int) -> None:
        for key, value in _references_of(holder):
            if type(value) not in _ATOMS:
                new = self.replaced(value, place + _written(holder, key), depth)
                if new is not value:
                    _assign(holder, key, value, new)
        if isinstance(holder, dict):
            for key in [key for key in dict.keys(holder) if id(key) in self._new]:
                holder[self.replaced(key, place, depth)] = holder.pop(key)


def _holder_of(value: Any, kind: type) -> Any:
    """Return what can be changed where a value has its references: itself, its function, its attributes, or None."""
    if issubclass(kind, MethodType):
        value, kind = value.__func__, type(value.__func__)
    elif issubclass(kind, property):
        value, kind = value.fget, type(value.fget)
    if issubclass(kind, FunctionType):
        has_parts = value.__defaults__ or value.__kwdefaults__ or value.__closure__
        return value if has_parts and not _is_foreign(value.__module__) else None
    if issubclass(kind, type):
        return None if _is_foreign(value.__module__) else value
    if issubclass(kind, _MUTABLE):
        return value
    if _is_foreign(kind.__module__) or issubclass(kind, nn.Module):
        return None
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


@functools.cache
def _is_foreign(module: object) -> bool:
    """Return whether what a module defines is left alone: torch's own, unisono's, and what annotations are made of."""
    return str(module).partition(".")[0] in ("torch", "unisono", "typing", "builtins")


def _references_of(holder: Any) -> list[tuple[Any, Any]]:
    """Return a holder's references: the key of each, for `_assign`, and the object.

    Classes of a program's own may load or compute when they are asked for an item: their bases are asked.
    """
    if isinstance(holder, dict):
        return list(dict.items(holder)) if dict.__len__(holder) <= _LONGEST else []
    if isinstance(holder, list):
        return list(enumerate(list.__iter__(holder))) if list.__len__(holder) <= _LONGEST else []
    if isinstance(holder, set):
        return [(None, value) for value in set.__iter__(holder)] if set.__len__(holder) <= _LONGEST else []
    if isinstance(holder, type):
        return [(name, value) for name, value in vars(holder).items() if name not in _NOT_READ]
    if isinstance(holder, partial):
        return [(name, getattr(holder, name)) for name in _OF_PARTIAL]
    if isinstance(holder, FunctionType):
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
        return [*((name, getattr(holder, name)) for name in _OF_FUNCTION), *cells]
    try:
        return [("cell_contents", holder.cell_contents)]
    except ValueError:  # an empty cell
        return []


def _written(holder: Any, key: Any) -> str:
    """Return how a reference is written behind its holder."""
    if isinstance(holder, set | CellType):
        return ""
    if isinstance(holder, dict | list):
        return f"[{key!r}]" if type(key) in (str, int) else "[...]"
    return f".{key}"


def _assign(holder: Any, key: Any, old: Any, new: Any) -> None:
    if isinstance(holder, dict):
        dict.__setitem__(holder, key, new)
    elif isinstance(holder, list):
        list.__setitem__(holder, key, new)
    elif isinstance(holder, set):
        set.remove(holder, old)
        set.add(holder, new)
    elif isinstance(holder, type):
        type.__setattr__(holder, key, new)
    elif isinstance(holder, partial):
        state = {name: getattr(holder, name) for name in _OF_PARTIAL} | {key: new}
        holder.__setstate__((*state.values(), vars(holder)))  # type: ignore[attr-defined]
    else:
        setattr(holder, key, new)
