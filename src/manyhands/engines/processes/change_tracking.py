"""What is rebound in modules between two looks at them, and what changes in the plain containers that they hold.

This is looked for before every forward, so it has to cost microseconds: modules' dicts are compared with copies of
them, in C, and only where they differ is anything done one by one. What cannot be seen in this way is what objects of
other classes hold, and containers of many items.
"""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from manyhands.primitives.references import INERT

_LARGE = 1000  # items; a larger container is not looked into
_WATCHED = (dict, OrderedDict, defaultdict, list, set, deque)


class GONE:
    """Stands for an attribute that was deleted."""


class ChangeTracker:
    """FailureStore what is rebound in modules, and what changes in the plain containers that they hold."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._own: list[Any] = [module.__dict__ for module in modules]
        self._registries: list[Any] = []
        self._containers: list[Any] = []
        seen: set[int] = set()
        for attributes in self._own:
            for name, value in attributes.items():
                if name in _REGISTRIES:
                    self._registries.append(value)
                elif type(value) not in INERT:
                    self._find(value, seen, 0)
        self._held_own = [_copy(container) for container in self._own]
        self._held_registries = [_copy(container) for container in self._registries]
        self._held = [_copy(container) for container in self._containers]
        # Tensors of one element are equal if their values are: whether they are the same has to be asked.
        containers = [*self._own, *self._registries]
        self._single = [
            (container, name, value)
            for container in containers
            if isinstance(container, dict)
            for name, value in container.items()
            if issubclass(type(value), torch.Tensor) and value.numel() == 1  # `isinstance` asks a dead weak proxy
        ]

    def changes(self) -> list[tuple[int, str, Any]] | None:
        """Return what was rebound, (number of the module, name, value), as far as it is plain; None for all else."""
        if not _equal(self._registries, self._held_registries) or not _equal(self._containers, self._held):
            return None
        if any(container.get(name) is not tensor for container, name, tensor in self._single):
            return None
        if _equal(self._own, self._held_own):
            return []
        found: list[tuple[int, str, Any]] = []
        for number, (now, held) in enumerate(zip(self._own, self._held_own, strict=True)):
            if _equal(now, held):
                continue
            for name in now.keys() | held.keys():
                value, before = now.get(name, GONE), held.get(name, GONE)
                if value is before:
                    continue
                if name in _REGISTRIES or not (value is GONE or _is_value(value)) or type(before) not in INERT:
                    return None
                found.append((number, name, value))
            self._held_own[number] = _copy(now)
        return found

    def commit(self) -> None:
        """Take what containers hold now as known."""
        if not _equal(self._containers, self._held):
            self._held = [_copy(container) for container in self._containers]

    def _find(self, value: Any, seen: set[int], depth: int) -> None:
        """Add the containers that a value is or leads to."""
        if type(value) not in _WATCHED and not issubclass(type(value), tuple):
            return
        if id(value) in seen or len(value) > _LARGE or depth > 20:
            return
        seen.add(id(value))
        if not issubclass(type(value), tuple):
            self._containers.append(value)
        for item in value.values() if isinstance(value, dict) else value:
            self._find(item, seen, depth + 1)


# What nn.Module keeps in containers.
_REGISTRIES = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set))


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(container)(container)


def _equal(now: Any, held: Any) -> bool:
    """Return whether containers hold the same; quick where they hold the very same objects."""
    try:
        return bool(now == held)
    except Exception:  # noqa: BLE001 - two tensors, or arrays, or whatever a class says: not the same objects
        return False


def _is_value(value: Any) -> bool:
    """Return whether `value` is one that pickle takes as it is."""
    return type(value) in INERT and not isinstance(value, type | types.BuiltinFunctionType | types.ModuleType)
