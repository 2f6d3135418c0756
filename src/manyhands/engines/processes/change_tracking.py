"""Finds what was rebound in modules since the last check, and what changed in the plain containers that they hold.

The check runs before every forward, so it must cost microseconds: modules' dicts are compared with copies of them, in
C, and only dicts that differ are compared item by item. It does not see changes inside objects of other classes, nor in
containers of many items.
"""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from manyhands.primitives.references import INERT

_LARGE = 1000  # items; larger containers are not checked
_TRACKED = (dict, OrderedDict, defaultdict, list, set, deque)


class GONE:
    """Stands for an attribute that was deleted."""


class ChangeTracker:
    """Finds what was rebound in modules, and what changed in the plain containers that they hold."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._attributes: list[Any] = [module.__dict__ for module in modules]
        self._registries: list[Any] = []
        self._containers: list[Any] = []
        seen: set[int] = set()
        for attributes in self._attributes:
            for name, value in attributes.items():
                if name in _REGISTRIES:
                    self._registries.append(value)
                elif type(value) not in INERT:
                    self._find(value, seen, 0)
        self._attributes_before = [_copy(container) for container in self._attributes]
        self._registries_before = [_copy(container) for container in self._registries]
        self._containers_before = [_copy(container) for container in self._containers]
        # Two tensors of one element compare equal if their values are, so their identity is checked too.
        containers = [*self._attributes, *self._registries]
        self._single = [
            (container, name, value)
            for container in containers
            if isinstance(container, dict)
            for name, value in container.items()
            if issubclass(type(value), torch.Tensor) and value.numel() == 1  # `isinstance` would ask a dead weak proxy
        ]

    def changes(self) -> list[tuple[int, str, Any]] | None:
        """Return what was rebound as (number of the module, name, value), one `GONE` for what was deleted.

        Returns None where anything else changed: a container, or a value that is not plain.
        """
        if not _equal(self._registries, self._registries_before) or not _equal(
            self._containers, self._containers_before
        ):
            return None
        if any(container.get(name) is not tensor for container, name, tensor in self._single):
            return None
        if _equal(self._attributes, self._attributes_before):
            return []
        found: list[tuple[int, str, Any]] = []
        for number, (now, known) in enumerate(zip(self._attributes, self._attributes_before, strict=True)):
            if _equal(now, known):
                continue
            for name in now.keys() | known.keys():
                value, before = now.get(name, GONE), known.get(name, GONE)
                if value is before:
                    continue
                if name in _REGISTRIES or not (value is GONE or _is_value(value)) or type(before) not in INERT:
                    return None
                found.append((number, name, value))
            self._attributes_before[number] = _copy(now)
        return found

    def commit(self) -> None:
        """Take the containers' present contents as known."""
        if not _equal(self._containers, self._containers_before):
            self._containers_before = [_copy(container) for container in self._containers]

    def _find(self, value: Any, seen: set[int], depth: int) -> None:
        """Add the containers in a value: itself and those that it leads to."""
        if type(value) not in _TRACKED and not issubclass(type(value), tuple):
            return
        if id(value) in seen or len(value) > _LARGE or depth > 20:
            return
        seen.add(id(value))
        if not issubclass(type(value), tuple):
            self._containers.append(value)
        for item in value.values() if isinstance(value, dict) else value:
            self._find(item, seen, depth + 1)


# The attributes of nn.Module that are containers.
_REGISTRIES = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set))


def _copy(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else type(container)(container)


def _equal(now: Any, before: Any) -> bool:
    """Return whether containers hold the same; quick where they hold the same objects."""
    try:
        return bool(now == before)
    except Exception:  # noqa: BLE001 - the comparison of two tensors, arrays or other objects may raise: not the same
        return False


def _is_value(value: Any) -> bool:
    """Return whether `value` is plain: pickle can send it as it is."""
    return type(value) in INERT and not isinstance(value, type | types.BuiltinFunctionType | types.ModuleType)
