"""What replicas share and write into: a list of the file, a dict of the module, a counter in a class, a closure.

Each replica runs with its own rows, so what all of them write under one name is one replica's, a list is in the order
of arrival, and a counter may miss counts. Such a write is known by what it leaves: something to which the code leads
differs after the forward.

    code        forward, the methods and functions that it names, hooks
    leads to    variables around a function and of its file, defaults, attributes of modules, objects and classes, and
                what is in containers; in tensors and arrays the numbers

Of installed packages only functions of the same file are followed. An entry that is added to a dict, or put in the
place of None, is taken for a cache as long as nothing in it depends on rows (`_depends_on_rows`); if a later step
replaces it by another value, it is none. What lies in C code is not seen, as `functools.lru_cache` and files.
"""

import contextlib
import contextvars
import dis
import functools
import io
import itertools
import sys
import threading
import types
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.primitives.blueprint import HOOKS
from unisono.primitives.change_tracking import GONE
from unisono.primitives.object_state import attributes_of, is_equal, state_of
from unisono.primitives.references import INERT, LARGE, MODES, PROXIES, TRACKED, is_set, referent
from unisono.runtime import torch_private


class _Sequence:
    def __getitem__(self, index: int) -> int:
        raise IndexError


_NOT_THE_USERS = {"torch", "unisono", *sys.stdlib_module_names} - {"__main__"}
_SERVICES = {
    "logging",
    "threading",
    "_thread",
    "concurrent",
    "multiprocessing",
    "asyncio",
}  # their objects are no state
_MOST_SEARCHED = 10_000  # objects to which one look leads
_MOST_ENTRIES = 50_000  # of all of these
_LARGE_BYTES = 2**24  # of an array
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_STORE_ATTR = dis.opmap["STORE_ATTR"]
_CONTAINERS = (dict, types.MappingProxyType, list, tuple, set, frozenset, deque)
_OVER_SEQUENCES = (type(iter(_Sequence())), reversed)
_NUMBERS = (int, float, complex)


def is_a(value: object, classes: type | types.UnionType | tuple[type, ...]) -> bool:
    """Return whether an object is of one of some classes. isinstance asks the object, which may be a proxy, too."""
    return issubclass(type(value), classes)


class Place(NamedTuple):
    """A value, and where it is."""

    value: Any
    path: str  # such as "meter.values"
    origin: str = ""  # such as " (global of train.py)"

    def __str__(self) -> str:
        return self.path + self.origin


class Reached:
    """What some values lead to, each object once.

    Args:
        roots: where the search begins.
        own: ids of modules whose attributes are compared elsewhere: those of replicas.
        seen: ids of what is not searched; ids of what is found are added.
    """

    def __init__(self, roots: Iterable[Place], own: Collection[int] = (), seen: set[int] | None = None) -> None:
        self.places: list[Place] = []
        self._own = own
        seen = set() if seen is None else seen
        self._num_entries = 0
        left = deque(roots)
        while left and len(self.places) < _MOST_SEARCHED and self._num_entries < _MOST_ENTRIES:
            with contextlib.suppress(Exception):  # objects of any class, which other threads may be changing
                left += self._beside(left.popleft(), seen)

    def _beside(self, place: Place, seen: set[int]) -> list[Place]:
        """Add what a place has, if that was not seen before; return what it leads to."""
        if type(place.value) in PROXIES:
            place = place._replace(value=referent(place.value))
        value = place.value
        if (type(value) in INERT and not is_a(value, type)) or id(value) in seen:
            return []
        if is_a(value, types.ModuleType) or (is_a(value, type) and not is_the_users(value)):
            return []
        seen.add(id(value))
        self.places.append(place)
        inside = _inside_of(place)
        self._num_entries += len(inside)
        return [*inside.values(), *_beyond(place)]

    def inside(self, place: Place) -> dict[Any, Place]:
        """Return what a value holds, by key; writes into the value change it."""
        return {} if id(place.value) in self._own else _inside_of(place)


def _inside_of(place: Place) -> dict[Any, Place]:
    try:
        return dict(_inside(place))
    except Exception:  # noqa: BLE001 - objects of any class, which other threads may be changing
        return {}


def _inside(place: Place) -> Iterator[tuple[Any, Place]]:
    value, path, origin = place
    if is_a(value, torch.Tensor):
        if not value.is_inference():
            yield "_version", Place(value._version, path, origin)
    elif is_a(value, nn.Module):
        for name, each in [*value.__dict__.items()]:
            if name not in _OF_EVERY_MODULE or name == "_buffers":
                yield name, Place(each, f"{path}.{name}", origin)
    elif is_a(value, _CONTAINERS):
        yield from _items(place)
        if not is_a(value, tuple):  # a class of dicts or lists may have attributes, too
            for name, each in attributes_of(value).items():
                yield f".{name}", Place(each, f"{path}.{name}", origin)
    elif is_a(value, types.FunctionType):
        yield from _variables(value)
    elif is_a(value, type):
        for name, each in [*vars(value).items()]:
            if not (name.startswith("__") or hasattr(type(each), "__get__")):
                yield name, Place(each, f"{value.__name__}.{name}")
    elif type(value).__module__ == "numpy":
        if getattr(value, "nbytes", _LARGE_BYTES) < _LARGE_BYTES and hasattr(value, "tobytes"):
            yield "bytes", Place(zlib.crc32(value.tobytes()), path, origin)
    elif is_a(value, bytearray | array):
        yield "bytes", Place(zlib.crc32(value), path, origin)
    elif is_a(value, io.StringIO | io.BytesIO):
        yield "position", Place(value.tell(), path, origin)
    elif is_a(value, types.GeneratorType):
        variables = {} if value.gi_frame is None else value.gi_frame.f_locals
        yield "line", Place(-1 if value.gi_frame is None else value.gi_frame.f_lasti, path, origin)
        for name, each in [*variables.items()]:
            yield name, Place(each, path, origin)
    elif type(value) is contextvars.ContextVar:
        yield "value", Place(value.get(GONE), path, origin)
    elif type(value) is threading.local:  # of the caller's thread, which runs the first replica
        for name, each in [*vars(value).items()]:
            yield name, Place(each, f"{path}.{name}", origin)
    elif type(value) in _OVER_SEQUENCES:  # their length is that of a sequence of any class
        yield "left", Place([*value.__reduce__()[2:], -1][0], path, origin)
    elif type(value).__module__ in ("builtins", "itertools") and is_a(value, Iterator):
        is_count = type(value) is itertools.count
        yield "left", Place(zlib.crc32(repr(value).encode()) if is_count else length_hint(value, 0), path, origin)
    elif _top_package(type(value).__module__) not in {"torch", "unisono", *_SERVICES}:
        attributes = attributes_of(value)
        if any(is_a(each, threading.Thread) and threading.Thread.is_alive(each) for each in attributes.values()):
            return  # its thread writes, too: a logger's, or a loader's
        for name, each in attributes.items():
            yield name, Place(each, f"{path}.{name}", origin)


def _items(place: Place) -> Iterator[tuple[Any, Place]]:
    """Yield the entries of a container, past methods that its class may have of its own."""
    value, path, origin = place
    kind = next(each for each in _CONTAINERS if is_a(value, each))
    if kind.__len__(value) > LARGE:
        yield _LENGTH, Place(kind.__len__(value), path, origin)
    elif kind in (dict, types.MappingProxyType):
        for key, each in [*kind.items(value)]:
            yield key, Place(each, f"{path}[{key!r}]" if type(key) in INERT else f"{path}[...]", origin)
    elif kind in (set, frozenset):
        for each in [*kind.__iter__(value)]:
            yield each, Place(each, path, origin)
    else:
        for index, each in enumerate([*kind.__iter__(value)]):
            yield index, Place(each, f"{path}[{index}]", origin)


class _LENGTH:
    """The key under which a large container has its length."""


def _variables(function: types.FunctionType) -> Iterator[tuple[Any, Place]]:
    """Yield the variables around a function and its defaults; of its file's those that it assigns."""
    name = function.__name__
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if is_set(cell):
            yield free, Place(cell.cell_contents, free, f" (variable around {name})")
    if not _is_the_users_code(function):  # such as a decorator's
        return
    for key, each in [*function.__dict__.items()]:
        yield f".{key}", Place(each, f"{name}.{key}")
    named = function.__code__.co_varnames
    defaults = function.__defaults__ or ()
    with_default = named[function.__code__.co_argcount - len(defaults) : function.__code__.co_argcount]
    for key, each in (*zip(with_default, defaults, strict=True), *(function.__kwdefaults__ or {}).items()):
        yield f"{key}=", Place(each, key, f" (default of {name})")
    for code in codes_of(function.__code__):
        for key in _assigned_globals(code):
            yield f"global {key}", _global(function, key)
        for name, key in _assigned_in_modules(code, function.__globals__):
            variables = vars(function.__globals__[name])
            yield f"{name}.{key}", Place(variables.get(key, GONE), key, f" (global of {_file_of(variables)})")


def _beyond(place: Place) -> Iterator[Place]:
    """Yield what a value leads to and does not hold."""
    value, path, origin = place
    if is_a(value, functools.partial):
        yield Place(value.func, path, origin)
        for number, each in enumerate((*value.args, *value.keywords.values())):
            yield Place(each, f"{path}[{number}]", origin)
    elif is_a(value, types.MethodType):
        yield Place(value.__self__, path, origin)
        yield Place(value.__func__, path, origin)
    elif type(value) is weakref.ref:
        yield Place(value(), path, origin)
    elif is_a(value, types.FunctionType):
        if _is_the_users_code(value):
            yield from _named_by(value)
        elif hasattr(value, "__wrapped__"):
            yield Place(value.__wrapped__, path, origin)
    elif not is_a(value, nn.Module | torch.Tensor) and not is_a(value, _CONTAINERS):
        cls = value if is_a(value, type) else type(value)
        if is_the_users(cls) and not _is_installed(cls.__module__):
            yield from _functions_of(cls)


def _named_by(function: types.FunctionType) -> Iterator[Place]:
    """Yield what of its file a function names, and of files of the user's that it names."""
    variables = function.__globals__
    for code in codes_of(function.__code__):
        loaded: set[str] | None = None
        for name in code.co_names:
            if name not in variables or type(variables[name]) in INERT - {types.ModuleType, type}:
                continue
            value = variables[name]
            if isinstance(value, types.ModuleType):
                if not _is_installed(value.__name__):
                    origin = f" (global of {_file_of(vars(value))})"
                    yield from (Place(vars(value)[key], key, origin) for key in code.co_names if key in vars(value))
            elif isinstance(value, types.FunctionType):
                if value.__globals__ is variables or not _is_installed(value.__module__):
                    yield Place(value, name)
            elif isinstance(value, type):
                yield Place(value, name)
            else:  # is it the variable, or an attribute of that name?
                loaded = _loaded_globals(code) if loaded is None else loaded
                if name in loaded:
                    yield _global(function, name)


def _global(function: types.FunctionType, name: str) -> Place:
    return Place(function.__globals__.get(name, GONE), name, f" (global of {_file_of(function.__globals__)})")


def _file_of(variables: Mapping[str, Any]) -> str:
    return Path(str(variables.get("__file__") or variables.get("__name__"))).name


def _loaded_globals(code: types.CodeType) -> set[str]:
    return {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _assigned_globals(code: types.CodeType) -> set[str]:
    found = _strings_in(code) if "globals" in code.co_names else set()
    if _STORE_GLOBAL in code.co_code[::2]:
        found |= {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
    return found


def _assigned_in_modules(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file of the user's that a code names, with each name that it may assign there."""
    named = [name for name in code.co_names if type(variables.get(name)) is types.ModuleType]
    named = [name for name in named if not _is_installed(variables[name].__name__)]
    if not named:
        return
    stored = _strings_in(code) if {"setattr", "vars", "__dict__"} & {*code.co_names} else set()
    if _STORE_ATTR in code.co_code[::2]:
        stored |= {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    yield from ((name, key) for name in named for key in sorted(stored) if key in vars(variables[name]))


def _strings_in(code: types.CodeType) -> set[str]:
    return {each for each in code.co_consts if type(each) is str}


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code and those of the functions in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_of(const)


def _functions_of(cls: type) -> Iterator[Place]:
    """Yield the functions of a class and its bases that are the user's."""
    for base in cls.__mro__:
        if is_the_users(base):
            for name, each in [*vars(base).items()]:
                for function in _functions_in(each) if name != "__init__" else ():
                    yield Place(function, f"{base.__name__}.{name}")


def _functions_in(attribute: Any) -> Iterator[types.FunctionType]:
    """Yield the functions behind an attribute of a class: a method, a property, what a decorator wraps."""
    inside = attributes_of(attribute)
    candidates = [attribute, *(inside.get(name) for name in ("fget", "fset", "func"))]
    if is_a(attribute, property):
        candidates += [attribute.fget, attribute.fset]
    elif is_a(attribute, staticmethod | classmethod):
        candidates.append(attribute.__func__)
    for each in candidates:
        wrapped = None if type(each) is types.FunctionType else attributes_of(each).get("__wrapped__")
        if type(each) is types.FunctionType:
            yield each
        elif type(wrapped) is types.FunctionType:
            yield wrapped


def function_of(hook: Any) -> Any:
    """Return the function behind partials and methods."""
    while isinstance(hook, functools.partial | types.MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook


def is_the_users(value: Any) -> bool:
    """Return whether a function, class or object is defined neither in Python, nor in torch, nor here."""
    place = value.__module__ if is_a(value, types.FunctionType | type) else type(value).__module__
    return _top_package(place) not in _NOT_THE_USERS


def _is_the_users_code(function: types.FunctionType) -> bool:
    return _top_package(function.__globals__.get("__name__")) not in _NOT_THE_USERS


def _top_package(name: Any) -> str:
    return str(name).partition(".")[0]


def _is_installed(module: str | None) -> bool:
    """Return whether a module is Python's, torch's, this package's or that of an installed package."""
    if _top_package(module) in _NOT_THE_USERS:
        return True
    parts = Path(getattr(sys.modules.get(str(module)), "__file__", None) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


def code_of(modules: Sequence[nn.Module], method: str | None = None) -> Iterator[Place]:
    """Yield the functions of the user's classes that a forward of modules may call.

    Args:
        method: the root's method that is called; None: forward.
    """
    classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__ if is_the_users(cls))
    by_name: dict[str, list[Place]] = {}
    names = ["forward", "__call__", "__getattr__", method or "forward"]
    for cls in classes:
        yield Place(cls, cls.__name__)
        for name, each in [*vars(cls).items()]:
            places = [Place(function, f"{cls.__name__}.{name}") for function in _functions_in(each)]
            if not _is_installed(cls.__module__) and name != "__init__":
                yield from places
                names += [each for place in places for code in codes_of(place.value.__code__) for each in code.co_names]
            else:  # packages have many functions: only those that are named
                by_name.setdefault(name, []).extend(places)
    while names:
        for place in by_name.pop(names.pop(), ()):
            yield place
            names += [each for code in codes_of(place.value.__code__) for each in code.co_names]


def attributes_of_modules(
    modules: Iterable[nn.Module], names: Iterable[str], live: Iterable[nn.Module] | None = None
) -> Iterator[Place]:
    """Yield the attributes of modules.

    Args:
        names: of the modules.
        live: the modules of which they are replicas: containers that these do not have are a replica's own, but what is
            inside may be shared.
    """
    modules = [*modules]
    for module, name, original in zip(modules, names, modules if live is None else live, strict=True):
        for key, value in [*module.__dict__.items()]:
            is_own = type(value) in TRACKED and value is not original.__dict__.get(key, GONE)
            shared = original.__dict__.get(key) if is_own else value
            if key not in _OF_EVERY_MODULE and not issubclass(type(value), nn.Module):
                yield Place(shared, f"{name}.{key}" if name else key)


def reached_by(
    modules: Sequence[nn.Module],
    names: Sequence[str],
    live: Sequence[nn.Module],
    method: str | None = None,
    inputs: Mapping[str, Any] = types.MappingProxyType({}),
) -> Reached:
    """Return what a forward leads to.

    Args:
        modules, names: those of replicas.
        live: those of which they are replicas.
        method: the root's method that is called; None: forward.
        inputs: what is given to forward, by path.
    """
    roots = [*attributes_of_modules(modules, names, live), *code_of(live, method)]
    for path, value in inputs.items():
        roots += [place for key, place in _inside_of(Place(value, path)).items() if type(key) is str]
    tensors = [(*module._parameters.values(), *module._buffers.values()) for module in (*modules, *live)]
    return Reached(roots, {*map(id, modules)}, {id(tensor) for each in tensors for tensor in each})


class SharedWrites:
    """What forward writes into that replicas share.

    Args:
        add: takes the names of what was written into.
        known: ids of what is named already, such as what hooks write into.
        reached: what the code of the model leads to.
        rows: how many rows replicas have; `axis`: on which axis of a tensor.
        is_first: whether this is the first step of its structure.
    """

    def __init__(
        self,
        add: Callable[[Iterable[str]], object],
        known: Container[int],
        reached: Reached,
        rows: Iterable[int],
        axis: int = 0,
        *,
        is_first: bool = True,
    ) -> None:
        self._add, self._known = add, known
        self._reached, self._rows, self._axis = reached, {*rows} - {0, 1}, axis
        self._is_first = is_first

    def begin(self) -> None:
        """Take what there is: forward begins."""
        self._before = [(place, self._reached.inside(place)) for place in self._reached.places]

    def end(self) -> None:
        """Add the names of what was written into since."""
        self._add(self._names())

    def _names(self) -> list[str]:
        found: dict[str, None] = {}
        for place, before in self._before:
            if id(place.value) in self._known:
                continue
            now = self._reached.inside(place)
            for key in {**before, **now}:
                old, new = before.get(key, _NOTHING), now.get(key, _NOTHING)
                if old.value is not new.value and self._is_written(place.value, key, old.value, new.value):
                    is_inside = is_a(place.value, _CONTAINERS)
                    found[str(place if is_inside else new if new is not _NOTHING else old)] = None
        return [*found]

    def _is_written(self, holder: Any, key: Any, before: Any, now: Any) -> bool:
        if before is GONE or before is None:
            return (isinstance(holder, list | deque) and before is GONE) or self._depends_on_rows(key, now)
        if now is GONE:
            return True
        if is_equal(before, now):
            return False
        says_how = type(now) in MODES or isinstance(now, type | types.FunctionType | types.ModuleType)
        return not (says_how and self._is_first)  # a flag, as of what was made or said once

    def _depends_on_rows(self, key: Any, value: Any) -> bool:
        """Return whether what was added under a key may depend on the rows of the replica that has added it."""
        if type(value) in (list, tuple, dict, torch.Size) and type(key) is str:
            inside = value.values() if isinstance(value, dict) else value
            if any(self._depends_on_rows(key, each) for each in inside):
                return True
        if isinstance(value, _NUMBERS) and not isinstance(value, bool):
            return isinstance(key, str | float) or key is value  # the latter: in a set
        sizes = {each for each in (key if isinstance(key, tuple) else (key,)) if type(each) is int}
        return any(self._has_rows(each, sizes, is_named=isinstance(key, str)) for each in state_of(value).values())

    def _has_rows(self, value: Any, in_key: set[int], *, is_named: bool) -> bool:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
        shape = getattr(value, "shape", None)
        if shape is None:
            return False
        if not len(shape):
            return is_named
        return bool({*shape[self._axis : self._axis + 1]} & self._rows - in_key) or shape[0] in self._rows - in_key


_NOTHING = Place(GONE, "")


class HookWrites:
    """What the hooks of replicas' modules keep, at one moment.

    Args:
        modules, names: the replicas' modules, with their names.
        devices: of the replicas.
        others: ids of hooks that are not looked at.
        in_backward: only those that are called in backward, or that register some that are.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Sequence[str],
        devices: Sequence[torch.device],
        others: Collection[int] = (),
        *,
        in_backward: bool = False,
    ) -> None:
        # What is kept by device is complete, where each replica has its own.
        self._by_device = len({*devices}) < len(devices)
        self._states: list[tuple[str, Reached, list[Any]]] = []
        own, seen = {*map(id, modules)}, {*others}
        for kind, name, hook in hooks_of(modules, names):
            function = function_of(hook)
            is_called = not in_backward or "backward" in kind or _registers_hooks(function)
            if is_called and id(hook) not in seen and is_the_users(function):
                said = getattr(function, "__qualname__", type(hook).__name__)
                reached = Reached([Place(hook, said)], own, seen)
                self._states.append((f"{said} of {name}", reached, [*map(reached.inside, reached.places)]))

    def changed(self) -> dict[str, list[Any]]:
        """Return what the hooks have written into since, by the names of the hooks."""
        found = {}
        for said, reached, states in self._states:
            places = zip(reached.places, states, strict=True)
            changed = [place.value for place, state in places if not _same(reached.inside(place), state)]
            if changed := [value for value in changed if not self._is_by_device(value)]:
                found[said] = changed
        return found

    def __bool__(self) -> bool:
        return bool(self._states)

    def _is_by_device(self, value: Any) -> bool:
        return isinstance(value, Mapping) and not self._by_device and any(type(key) is torch.device for key in value)


def hooks_of(modules: Sequence[nn.Module], names: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield each hook with its registry and the name of what it is registered for."""
    for module, name in zip(modules, names, strict=True):
        for kind in HOOKS:
            for hook in module.__dict__[kind].values():
                yield kind, name or "itself", hook
    for kind, hooks in torch_private.hooks_of_every_module().items():
        for hook in hooks:
            yield kind, "every module", hook


def _registers_hooks(function: Any) -> bool:
    call = function if isinstance(function, types.FunctionType) else vars(type(function)).get("__call__")
    code = getattr(call, "__code__", None)
    return code is not None and any("register_hook" in each.co_names for each in codes_of(code))


def _same(now: Mapping[Any, Place], before: Mapping[Any, Place]) -> bool:
    return now.keys() == before.keys() and all(
        now[key].value is before[key].value
        or (type(before[key].value) in (int, str) and now[key].value == before[key].value)
        for key in before
    )
