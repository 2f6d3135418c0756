"""Replace what a program's modules refer to: by a name, in a registry, in a class, or as a default argument.

These are the ways in which a program that was imported before `install` has taken a class of torch's. Others stay as
they are: closures, partials, attributes of objects, containers of more than 1,000 items, and what is more than four
steps away from a module. What they make is named in the log (`install`).

Assumes that no other thread changes what is walked meanwhile; a thread that imports modules does no harm.
"""

from collections.abc import Iterable
from types import FunctionType
from typing import Any

_LONGEST = 1000  # a longer container holds data
_DEEPEST = 4  # steps from a module
_NOT_READ = frozenset({"__annotations__", "__orig_bases__", "__dict__", "__weakref__"})
_FOREIGN = ("torch", "unisono", "typing", "builtins")  # the packages whose classes and functions are left alone


def replace(replacements: Iterable[tuple[Any, Any]], namespaces: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Replace the first object of each pair by the second one, wherever the namespaces lead to it; return where.

    >>> program = {"wrappers": {"parallel": (list, dict)}}
    >>> replace([(dict, set)], [("program", program)])
    ["program.wrappers['parallel'][1]"]
    >>> program
    {'wrappers': {'parallel': (<class 'list'>, <class 'set'>)}}
    """
    new = {id(old): new for old, new in replacements}
    places: list[str] = []
    seen: set[int] = set()

    def replaced(value: Any, place: str, depth: int) -> Any:
        """Return what stands for a value from now on: another object, or itself, with what it refers to replaced."""
        if id(value) in new:
            places.append(place)
            return new[id(value)]
        if depth == _DEEPEST or id(value) in seen:
            return value
        if type(value) is tuple and len(value) <= _LONGEST:
            parts = [replaced(part, f"{place}[{i}]", depth + 1) for i, part in enumerate(value)]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else tuple(parts)
        for key, part in _references(value):
            seen.add(id(value))
            where = f"{place}[{key!r}]" if isinstance(value, dict | list) else f"{place}.{key}"
            if (other := replaced(part, where, depth + 1)) is not part:
                _assign(value, key, other)
        return value

    for module, namespace in namespaces:
        for name, value in list(namespace.items()):
            if name not in _NOT_READ and (other := replaced(value, f"{module}.{name}", 1)) is not value:
                namespace[name] = other
    return places


def _references(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container, class or function refers to, each with its key, for `_assign`; nothing of others.

    Classes of a program's own may load or compute when they are asked for an item: their bases are asked.
    """
    kind = type(value)  # a proxy's __class__ is that of another object
    if issubclass(kind, dict):
        return list(dict.items(value)) if dict.__len__(value) <= _LONGEST else []
    if issubclass(kind, list):
        return list(enumerate(list.__iter__(value))) if list.__len__(value) <= _LONGEST else []
    if not issubclass(kind, type | FunctionType) or str(value.__module__).partition(".")[0] in _FOREIGN:
        return []
    if issubclass(kind, type):
        return [(name, part) for name, part in vars(value).items() if name not in _NOT_READ]
    return [("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)]


def _assign(holder: Any, key: Any, new: Any) -> None:
    if isinstance(holder, dict):
        dict.__setitem__(holder, key, new)
    elif isinstance(holder, list):
        list.__setitem__(holder, key, new)
    elif isinstance(holder, type):
        type.__setattr__(holder, key, new)
    else:
        setattr(holder, key, new)
