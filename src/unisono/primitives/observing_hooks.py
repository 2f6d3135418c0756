"""Hooks that keep what they see: in a dict by name, in a list, in attributes of an object, in a class.

Each replica calls a hook with its own rows, so what it keeps by name is that of one replica, and a list is in the order
of arrival. Such a hook is known by what it does: something to which it leads differs after the forward. Searched are
variables that it closes over or names, containers, and attributes of objects; not inside of modules.
"""

import functools
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.primitives.blueprint import HOOKS
from unisono.primitives.object_state import values_of_slots
from unisono.primitives.references import DEEP, INERT, LARGE, TRACKED, is_set
from unisono.runtime import torch_private

_NOT_THE_USERS = {"torch", "unisono", *sys.stdlib_module_names} - {"__main__"}
_MOST_SEARCHED = 2000  # objects to which one hook leads
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class HookStates:
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
        self._by_device = len(set(devices)) < len(devices)
        self._states: list[tuple[str, list[tuple[Any, Any]]]] = []
        seen: set[int] = {*others}
        for kind, name, hook in _hooks(modules, names):
            is_called = not in_backward or "backward" in kind or "register_hook" in _names_in(hook)
            if is_called and id(hook) not in seen and is_the_users(_function_of(hook)):
                said = f"{getattr(_function_of(hook), '__qualname__', type(hook).__name__)} of {name}"
                self._states.append((said, [(each, self._held(each)) for each in _reachable(hook, seen)]))

    def changed(self) -> list[str]:
        """Return the names of the hooks that keep something else now."""
        return [said for said, state in self._states if not all(_same(self._held(each), held) for each, held in state)]

    def _held(self, value: Any) -> Any:
        if isinstance(value, Mapping) and not self._by_device and any(type(key) is torch.device for key in value):
            return None
        return _held(value)


def _hooks(modules: Sequence[nn.Module], names: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield each hook with its registry and the name of what it is registered for."""
    for module, name in zip(modules, names, strict=True):
        for kind in HOOKS:
            for hook in module.__dict__[kind].values():
                yield kind, name or "itself", hook
    for kind, hooks in torch_private.hooks_of_every_module().items():
        for hook in hooks:
            yield kind, "every module", hook


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial | types.MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook


def is_the_users(value: Any) -> bool:
    """Return whether a function, class or object is defined neither in Python, nor in torch, nor here."""
    place = value.__module__ if isinstance(value, types.FunctionType | type) else type(value).__module__
    return str(place).partition(".")[0] not in _NOT_THE_USERS


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _names_in(hook: Any) -> set[str]:
    """Return the names of variables outside and of attributes that a hook's code has."""
    function = _function_of(hook)
    if not isinstance(function, types.FunctionType):
        function = vars(type(hook)).get("__call__")
    code = getattr(function, "__code__", None)
    return {name for each in _codes(code) for name in each.co_names} if code is not None else set()


def _reachable(hook: Any, seen: set[int]) -> list[Any]:
    """Return what a hook leads to, itself first, but what is in `seen`."""
    found: list[Any] = []
    level = [hook]
    for _ in range(DEEP):
        below: list[Any] = []
        for value in level:
            if (
                (type(value) in INERT and not isinstance(value, type))
                or id(value) in seen
                or len(found) > _MOST_SEARCHED
            ):
                continue
            if isinstance(value, types.ModuleType) or (isinstance(value, type) and not is_the_users(value)):
                continue
            seen.add(id(value))
            found.append(value)
            below.extend(_inside(value))
        if not below:
            break
        level = below
    return found


def _inside(value: Any) -> list[Any]:
    """Return what is directly inside of a value."""
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, nn.Module):
        attributes = vars(value).items()
        return [each for name, each in attributes if type(each) in TRACKED and name not in _OF_EVERY_MODULE]
    if isinstance(value, Mapping):
        return [*value, *value.values()] if len(value) <= LARGE else []
    if isinstance(value, list | tuple | set | frozenset) or type(value) in TRACKED:
        return [*value] if len(value) <= LARGE else []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_set(cell)]
        named = [value.__globals__.get(name) for name in sorted(_names_in(value))]
        # Of functions that it names, those in the same file.
        named = [each for each in named if getattr(each, "__globals__", value.__globals__) is value.__globals__]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *named]
    if isinstance(value, type):
        return [each for name, each in vars(value).items() if not (name.startswith("__") or hasattr(each, "__get__"))]
    if not is_the_users(value) and type(value).__module__.partition(".")[0] == "torch":
        return []
    return [*getattr(value, "__dict__", {}).values(), *values_of_slots(value)]


def _held(value: Any) -> Any:
    """Return what differs where a value is written into."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else [value._version]
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) <= LARGE:
        return [value.tobytes()]
    if isinstance(value, Mapping | list | tuple | set | frozenset) and len(value) > LARGE:
        return [len(value)]
    return _inside(value)


def _same(now: Any, before: Any) -> bool:
    if now is None or before is None:
        return now is before
    return len(now) == len(before) and all(
        one is other or (type(one) in (int, bytes) and one == other) for one, other in zip(now, before, strict=True)
    )
