"""What replicas share and forward writes into: a list of the file, a dict of the module, a closure, what a hook keeps.

Each replica runs with its own rows, so what all of them write under one name is one replica's, a list is in the order
of arrival, and a counter counts replicas. Such a write is known by what it leaves: something to which the code leads
differs after the forward. One search finds it, in the first steps of a structure (`visit`, with its bound):

    roots       hooks; attributes of modules; forward and the other methods of the user's classes
    inside      entries of containers, attributes of objects, variables around functions and those of their file that
                they name; of tensors the version, of small arrays the bytes

`verify` also searches what a program rarely writes into: attributes of classes, and variables of other files.

An entry that is added to a dict, or put in the place of None, is taken for a cache; if a later step replaces it by
another value, it is none.
"""

import contextlib
import functools
import os
import sys
import threading
import types
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.primitives.change_tracking import GONE, HOOKS, OF_EVERY_MODULE
from unisono.primitives.object_state import is_equal
from unisono.primitives.references import MODES
from unisono.primitives.visitor import (
    CONTAINERS,
    INERT,
    LARGE,
    Place,
    Step,
    attributes_of,
    entries,
    is_a,
    num_entries,
    references_of,
    variables_of,
    visit,
)
from unisono.runtime import draws_off
from unisono.runtime.torch_private import process_wide

_MOST = 20_000  # entries that the search of a step reads; that of `verify` has no bound
_NOT_THE_USERS = {"torch", "unisono", *sys.stdlib_module_names} - {"__main__"}
# Objects of these packages are no state.
_SERVICES = {"torch", "unisono", "logging", "threading", "_thread", "concurrent", "multiprocessing", "asyncio"}
_LARGE_BYTES = 2**24  # of an array
_SKIPPED = INERT - {type}


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code and those of the functions in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_of(const)


def is_the_users(value: Any) -> bool:
    """Return whether a function, class or object is defined neither in Python, nor in torch, nor here."""
    place = value.__module__ if is_a(value, types.FunctionType | type) else type(value).__module__
    return _top_package(place) not in _NOT_THE_USERS


def _top_package(name: Any) -> str:
    return str(name).partition(".")[0]


def _is_installed(module: Any) -> bool:
    """Return whether a module is Python's, torch's, this package's or that of an installed package."""
    if _top_package(module) in _NOT_THE_USERS:
        return True
    parts = str(getattr(sys.modules.get(str(module)), "__file__", None) or "").replace("\\", "/").split("/")
    return "site-packages" in parts or "dist-packages" in parts


def function_of(hook: Any) -> Any:
    """Return the function behind partials and methods."""
    while isinstance(hook, functools.partial | types.MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook


def functions_in(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions of a class of the user's: methods, properties, and what decorators wrap."""
    for name, each in [*vars(cls).items()] if name_of_file(cls.__module__) else []:
        if name == "__init__":
            continue
        inside = [each, *(getattr(each, part, None) for part in ("fget", "fset", "func", "__func__", "__wrapped__"))]
        yield from (function for function in inside if type(function) is types.FunctionType)


def name_of_file(module: Any) -> str:
    """Return the name of a file of the user's, by that of its module; "" if it is not the user's."""
    if _is_installed(module):
        return ""
    return os.path.basename(str(getattr(sys.modules.get(str(module)), "__file__", None) or module))


class Search:
    """What a forward leads to, found once: everything that replicas share and it may write into.

    Args:
        modules: the live ones, with their `names`.
        inputs: what is given to forward, by path.
        observers: ids of hooks that are known to keep what they see by the replicas' modules.
        own: further modules of which the attributes are compared elsewhere: replicas.

    Attributes:
        places: all that was found, near ones first.
        hooks: the names of the hooks among the roots.
        is_thorough: whether this is `verify`, which tells caches by repeating the step.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Sequence[str],
        inputs: Mapping[str, Any] = types.MappingProxyType({}),
        observers: Iterable[int] = (),
        own: Iterable[nn.Module] = (),
    ) -> None:
        self.is_thorough = draws_off.are_off()
        self._own = {id(module) for module in (*modules, *own)}
        self.hooks: set[str] = set()
        roots = [*self._hooks(modules, names, observers)]
        for module, name in zip(modules, names, strict=True):
            for key, value in [*module.__dict__.items()]:
                if key not in OF_EVERY_MODULE and not is_a(value, nn.Module):
                    roots.append(Place(value, f"{name}.{key}" if name else key))
        for cls in dict.fromkeys(cls for module in modules for cls in type(module).__mro__):
            if name_of_file(cls.__module__):
                roots.append(Place(cls, cls.__name__))
                roots += [Place(function, f"{cls.__name__}.{function.__name__}") for function in functions_in(cls)]
        for path, value in inputs.items():
            if not is_a(value, torch.Tensor):
                roots += [Place(each, f"{path}{text.format(key)}") for (text, key), each in self.inside(value)]
        tensors = [[*module._parameters.values(), *module._buffers.values()] for module in (*modules, *own)]
        seen = {id(tensor) for each in tensors for tensor in each}
        most = float("inf") if self.is_thorough else _MOST
        self.places = [place for place, _ in visit(roots, self._followed, most, _SKIPPED, seen)]

    def _hooks(self, modules: Sequence[nn.Module], names: Sequence[str], observers: Iterable[int]) -> Iterator[Place]:
        known = {*observers}
        for module, name in zip(modules, names, strict=True):
            for kind in HOOKS:
                for hook in module.__dict__[kind].values():
                    yield from self._hook(hook, name or "itself", known)
        for hooks in process_wide.hooks_of_every_module().values():
            for hook in hooks:
                yield from self._hook(hook, "every module", known)

    def _hook(self, hook: Any, name: str, known: Container[int]) -> Iterator[Place]:
        function = function_of(hook)
        if id(hook) not in known and is_the_users(function):
            said = f"{getattr(function, '__qualname__', type(hook).__name__)} of {name}"
            self.hooks.add(said)
            yield Place(hook, said)

    def _followed(self, value: Any) -> list[tuple[Step, Any]]:
        """Return what is searched inside a value: also what it leads to and does not hold."""
        found = self.inside(value)
        if is_a(value, types.FunctionType):
            if not _is_installed(value.__globals__.get("__name__")):
                found += [(("={}", name), each) for name, each in self._named_functions(value)]
            elif hasattr(value, "__wrapped__"):
                found.append((("", None), value.__wrapped__))
        elif is_a(value, types.MethodType | functools.partial):
            found += references_of(value)
            found += [(("", None), value.__func__)] if is_a(value, types.MethodType) else []
        return found

    def _named_functions(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield the functions of its file that a function names; for `verify` also the user's classes and files."""
        variables = function.__globals__
        for code in codes_of(function.__code__):
            for name in code.co_names:
                value: Any = variables.get(name)
                if is_a(value, types.FunctionType):
                    is_followed = value.__globals__ is variables or self.is_thorough
                else:
                    is_followed = self.is_thorough and is_a(value, type) and bool(name_of_file(value.__module__))
                if is_followed:
                    yield name, value

    def inside(self, value: Any) -> list[tuple[Step, Any]]:
        """Return what a value holds, such that a write into the value changes it."""
        with contextlib.suppress(Exception):  # objects of any class, which other threads may be changing
            return [*self._inside(value)]
        return []

    def _inside(self, value: Any) -> Iterator[tuple[Step, Any]]:
        if id(value) in self._own:
            return
        if is_a(value, torch.Tensor):
            if not value.is_inference():
                yield ("", None), value._version
        elif is_a(value, nn.Module):
            for name, each in [*value.__dict__.items()]:
                if name not in OF_EVERY_MODULE or name == "_buffers":
                    yield (".{}", name), each
        elif (number := num_entries(value)) is not None:
            yield from entries(value)
            if number > LARGE:
                yield ("", len), number
            if not is_a(value, tuple):  # a class of dicts or lists may have attributes, too
                yield from [((".{}", name), each) for name, each in attributes_of(value).items()]
        elif is_a(value, types.FunctionType):
            yield from self._variables(value)
        elif type(value).__module__ == "numpy" and hasattr(value, "nbytes"):
            if value.nbytes < _LARGE_BYTES and hasattr(value, "tobytes"):
                yield ("", bytes), zlib.crc32(value.tobytes())
        elif is_a(value, bytearray | array):
            yield ("", bytes), zlib.crc32(value)
        elif is_a(value, type):
            if self.is_thorough and name_of_file(value.__module__):
                for name, each in [*vars(value).items()]:
                    if not (name.startswith("__") or hasattr(type(each), "__get__")):
                        yield (f"={value.__name__}.{{}}", name), each
        elif _top_package(type(value).__module__) not in _SERVICES:
            attributes = attributes_of(value)
            if any(is_a(each, threading.Thread) and threading.Thread.is_alive(each) for each in attributes.values()):
                return  # its thread writes, too: a logger's, or a loader's
            yield from [((".{}", name), each) for name, each in attributes.items()]

    def _variables(self, function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
        """Yield the variables around a function, its defaults, and the variables of its file that it names."""
        for name, each in variables_of(function).items():
            yield (f"={{}} (variable of {function.__name__})", name), each
        variables = function.__globals__
        file = name_of_file(variables.get("__name__"))
        if not file:
            return
        for code in codes_of(function.__code__):
            for name in code.co_names:
                each = variables.get(name, GONE)
                if each is GONE or is_a(each, types.FunctionType | type):
                    continue
                if not is_a(each, types.ModuleType):
                    yield (f"={{}} (global of {file})", name), each
                elif self.is_thorough and (other := name_of_file(each.__name__)):
                    for key, of_other in [*vars(each).items()]:
                        if not key.startswith("__"):
                            yield (f"={{}} (global of {other})", key), of_other


class SharedWrites:
    """What forward, and the backward after it, write into that replicas share.

    Args:
        add: takes the names of what was written into by forward.
        add_hooks: takes the names of hooks that keep what they see.
        search: what the code of the model leads to.
        devices: of the replicas.
        is_first: whether this is the first step of its structure.
    """

    def __init__(
        self,
        add: Callable[[Iterable[str]], object],
        add_hooks: Callable[[Iterable[str]], object],
        search: Search,
        devices: Sequence[torch.device],
        *,
        is_first: bool,
    ) -> None:
        self._add, self._add_hooks, self._search = add, add_hooks, search
        self._before: list[tuple[Place, dict[Step, Any]]] = []
        self._is_first = is_first
        # What is kept by device is complete, where each replica has its own.
        self._by_device = len({*devices}) < len(devices)

    def begin(self) -> None:
        """Take what there is: forward begins."""
        self._take(self._search.places)

    def end(self, _: Sequence[Any] = (), /) -> None:
        """Add the names of what was written into since."""
        names = self._names()
        self._add_hooks([name for name, by_hook in names.items() if by_hook])
        self._add([name for name, by_hook in names.items() if not by_hook])
        self._take([place for place, _ in self._before if place.root in self._search.hooks])

    def backward_has_run(self) -> None:
        """Add the hooks that have kept what they see in the backward after that forward."""
        self._add_hooks(self._names())
        self._take([])

    @property
    def looks_at_backward(self) -> bool:
        """Whether there are hooks that the backward after that forward may call."""
        return bool(self._before)

    def _take(self, places: Iterable[Place]) -> None:
        self._before = [(place, dict(self._search.inside(place.value))) for place in places]

    def _names(self) -> dict[str, bool]:
        """Return the names of what was written into, each with whether it is a hook's."""
        found: dict[str, bool] = {}
        for place, before in self._before:
            now = dict(self._search.inside(place.value))
            for step in {**before, **now}:
                old, new = before.get(step, GONE), now.get(step, GONE)
                by_hook = place.root in self._search.hooks
                if old is not new and self._is_written(place.value, step[1], old, new, by_hook=by_hook):
                    found[place.root if by_hook else _name(place, step)] = by_hook
        return found

    def _is_written(self, holder: Any, key: Any, before: Any, now: Any, *, by_hook: bool) -> bool:
        if is_a(key, torch.device) and not self._by_device:
            return False
        if before is GONE or before is None:
            is_one_more = before is GONE and is_a(holder, list | deque)
            return (
                is_one_more or self._search.is_thorough or (by_hook and not is_a(now, bool | str | types.FunctionType))
            )
        if now is GONE:
            return True
        if is_equal(before, now):
            return False
        says_how = type(now) in MODES or isinstance(now, type | types.FunctionType | types.ModuleType)
        return not (says_how and self._is_first)  # a flag, as of what was made or said once


def _name(place: Place, step: Step) -> str:
    """Return what a message calls what was written into: a container, a variable, or an attribute."""
    if is_a(place.value, CONTAINERS) or not step[0]:
        return str(place)
    return str(Place(None, place, step))
