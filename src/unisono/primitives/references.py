"""References from a module's attributes to live modules and tensors, and how a replica's attributes get its own.

A replica starts as a copy of the live module's `__dict__`, whose values can still refer to the live module:
a bound method (`self.op = self._forward_fast`), a list of layers that is no ModuleList, a partial, a lambda that
closes over `self`, a hook, the flat weights of an RNN. Unchanged, such an attribute would run the live module inside a
replica: on the wrong device, and its gradients would be lost.

One kind of reference stays: that of a hook to the very module that it is registered for, in code that is not the
model's own (`observes`).

`references` finds what a value refers to; `rebind` returns the value with each live object replaced by the replica's.
Both search the same places: containers, bound methods, partials, functions' closures and defaults, weak references and
proxies (visitor.py). They do not search objects of other classes, nor more than its bound; what they miss is found in
the output's graph (autograd/graph_search.py).
"""

import dis
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from unisono.primitives.containers import container_like, kind_of
from unisono.primitives.visitor import (
    INERT,
    LARGE,
    PROXIES,
    TRACKED,
    Place,
    Step,
    entries,
    is_a,
    is_set,
    references_of,
    referent,
    variables_of,
    visit,
)

_GRAPHED = (
    "this module replays CUDA graphs (torch.cuda.make_graphed_callables): a graph has one fixed input and "
    "output, which replicas cannot share. Wrap the module for one device, DataParallel(model, [0]), or wrap "
    "it before make_graphed_callables."
)

# Values of exactly these types tell code which way to go, as `training` does.
MODES = frozenset({bool, str, type(None)})


def is_inert(value: Any) -> bool:
    """Return whether `value` certainly refers to no module or tensor, as most attributes; a quick check."""
    kind = type(value)
    if kind in INERT:
        return True
    if kind is tuple or kind is list or kind is set:
        return len(value) > LARGE or INERT.issuperset(map(type, value))
    if kind is dict:
        return len(value) > LARGE or (
            INERT.issuperset(map(type, value.values())) and INERT.issuperset(map(type, value))
        )
    return False


def references(value: Any) -> list[nn.Module | torch.Tensor]:
    """Return every module and tensor that `value` is or refers to, each once."""
    return live_among(reachable(value))


def live_among(found: Iterable[Any]) -> list[nn.Module | torch.Tensor]:
    """Return the modules and tensors among what is `reachable`."""
    return [part for part in found if _is_live(part)]


def may_refer_later(found: Iterable[Any], kept: Container[int] = ()) -> bool:
    """Return whether a value may come to refer to another object although no tracked container in it changes.

    A variable that a function closes over can be assigned; a weak reference can die; containers of other classes are
    not tracked.

    Args:
        found: what is `reachable` from it.
        kept: ids of objects that do not die.
    """
    return any(_is_changing(part, kept) for part in found)


def _is_changing(part: Any, kept: Container[int]) -> bool:
    if type(part) in PROXIES or type(part) is weakref.ref:
        return not all(id(target) in kept for _, target in _parts(part))
    if isinstance(part, dict | list | set | deque):
        return type(part) not in TRACKED
    return isinstance(part, types.FunctionType | functools.partial | weakref.ref)


def reachable(value: Any) -> list[Any]:
    """Return what is found in `value`, each object once, but no plain values; what is live is not searched."""
    return [place.value for place, _ in visit([Place(value, "")], _parts)]


def rebind(value: Any, replacements: Mapping[int, Any], memo: dict[int, Any] | None = None) -> Any:
    """Return `value` with every object whose id is in `replacements` replaced; the same object if it refers to none.

    Args:
        value: an attribute's value.
        replacements: id of a live module or tensor -> the replica's.
        memo: results so far, by id; pass one dict for all attributes of a replica, and what they share stays shared.
    """
    if type(value) in INERT:
        return value
    if id(value) in replacements:
        return replacements[id(value)]
    if _is_live(value):
        return value
    memo = {} if memo is None else memo
    if id(value) not in memo:
        memo[id(value)] = value  # for a value that refers to itself, until its replacement is made
        if any(id(reference) in replacements for reference in references(value)):
            memo[id(value)] = _rebuilt(value, replacements, memo)
    return memo[id(value)]


def observes(hook: Any, module: nn.Module, own_code: Container[tuple[str, str]]) -> bool:
    """Return whether a hook of `module`, from outside of the model, has `module` itself as a key.

    A hook is given the module that runs, in a replica the replica's. One that has its module in a variable besides, and
    uses that only as a key (`saved[layer] = output`), notes what it has seen for a caller that looks it up by the same
    key (captum's layer methods do). So it has to stay the caller's. One that takes or sets attributes of the variable,
    or hands it on, means the module that runs. In the model's own code such a reference is `self`, and means that too.

    Args:
        own_code: module and qualified name of each class of the model.
    """
    return any(_has_as_key(part, module) and not _is_within(part, own_code) for part in reachable(hook))


def _has_as_key(function: Any, module: nn.Module) -> bool:
    """Return whether variables of a function are `module`, and all that it does with them is to use them as a key.

    A variable is one of an enclosing function, a parameter with a default, or one that a partial gives.
    """
    values: dict[str, Any] = {}
    if isinstance(function, functools.partial) and isinstance(function.func, types.FunctionType):
        values = {**dict(zip(function.func.__code__.co_varnames, function.args, strict=False)), **function.keywords}
        function = function.func
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    values = {**variables_of(function), **values}
    names = {name for name, value in values.items() if value is module}
    uses = [
        following.opname in _KEY_USES or following.argrepr == "[]"  # the latter: since Python 3.14
        for instruction, following in pairwise(dis.get_instructions(code))
        if instruction.opname.startswith("LOAD_") and instruction.argval in names
    ]
    return bool(uses) and all(uses)


_KEY_USES = {"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "CONTAINS_OP"}


def _is_within(function: Any, classes: Container[tuple[str, str]]) -> bool:
    """Return whether a function, or that of a partial, is defined in a method of one of the classes."""
    while isinstance(function, functools.partial):
        function = function.func
    names = getattr(function, "__qualname__", "").split(".")
    place = getattr(function, "__module__", "")
    return any((place, ".".join(names[:end])) in classes for end in range(1, len(names)))


def _is_live(value: Any) -> bool:
    return type(value) not in PROXIES and isinstance(value, nn.Module | torch.Tensor)  # a proxy is an instance, too


def _parts(value: Any) -> list[tuple[Step, Any]]:
    """Return the values directly inside `value`, if it is of a kind that is searched."""
    if is_inert(value) or _is_live(value):
        return []
    if is_a(value, types.FunctionType) and value.__module__ == "torch.cuda.graphs":
        raise RuntimeError(_GRAPHED)
    found = entries(value)
    if is_a(value, dict):
        found += [(("", None), key) for (_, key), _ in found if type(key) not in INERT]
    return found or references_of(value)


def _rebuilt(value: Any, replacements: Mapping[int, Any], memo: dict[int, Any]) -> Any:
    """Return a value like `value` with its parts rebound.

    What can contain itself (lists, dicts, deques, functions) is in the memo before its parts are rebound.
    """

    def new(part: Any) -> Any:
        return rebind(part, replacements, memo)

    if type(value) in PROXIES:
        return weakref.proxy(new(referent(value)))
    if isinstance(value, types.FunctionType):
        return _rebuilt_function(value, new, memo)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, new(value.__self__))
    if type(value) is weakref.ref:
        return weakref.ref(new(value()))
    kind = kind_of(value)
    items: Iterable[Any]
    if issubclass(kind, dict):
        items = ((new(key), new(item)) for key, item in kind.items(value))
    else:
        parts = (value.func, *value.args) if kind is functools.partial else kind.__iter__(value)
        items = map(new, parts)
    return container_like(value, items, new, functools.partial(memo.__setitem__, id(value)))


def _rebuilt_function(
    function: types.FunctionType, new: Callable[[Any], Any], memo: dict[int, Any]
) -> types.FunctionType:
    """Return `function` with new cells for what is replaced; other cells stay shared with the original."""
    cells = list(function.__closure__ or ())
    to_replace = [is_set(cell) and bool(references(cell.cell_contents)) for cell in cells]
    closure = [types.CellType() if replace else cell for cell, replace in zip(cells, to_replace, strict=True)]
    rebuilt = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(closure) if closure else None
    )
    memo[id(function)] = rebuilt
    for cell, own, replace in zip(cells, closure, to_replace, strict=True):
        if replace:
            own.cell_contents = new(cell.cell_contents)
    rebuilt.__defaults__, rebuilt.__kwdefaults__ = new(function.__defaults__), new(function.__kwdefaults__)
    rebuilt.__qualname__ = function.__qualname__
    rebuilt.__dict__.update({name: new(item) for name, item in function.__dict__.items()})
    return rebuilt
