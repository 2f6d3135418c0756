"""Finds what a live module has had changed since it was last looked at: what was rebound, written or replaced.

What is derived from a module (its blueprint, replicas, what workers have) is kept across steps as long as nothing of
this is found. The check runs before every forward, so it must cost microseconds: what was there is compared with what
is there object by object, in C, and only what differs is looked at in Python.

Seen: attributes that are rebound, in any module; children, parameters, buffers and hooks that are added or removed; the
contents of plain containers; the class of a module; a tensor's memory, form, `requires_grad` and attributes. Not seen:
changes inside objects of other classes, and in containers of many items.
"""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from manyhands.primitives.references import INERT

_LARGE = 1000  # items; larger containers are not checked
_TRACKED = (dict, OrderedDict, defaultdict, list, set, deque)
_values = dict.values
_own_attributes, _requires_grad, _dtype = attrgetter("__dict__"), attrgetter("requires_grad"), attrgetter("dtype")


class GONE:
    """Stands for an attribute that was deleted."""


class DictSnapshot:
    """The items of some dicts at one moment. Equal is not identical: a rebound `[]`, or 1 in place of True, differs."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self.dicts = dicts
        self.take()

    def take(self) -> None:
        """Take the items as they are now."""
        self.copies = [*map(dict, self.dicts)]
        self._keys = [*chain.from_iterable(self.copies)]
        self._values = [*chain.from_iterable(map(_values, self.copies))]

    def is_current(self) -> bool:
        """Return whether the dicts hold the same objects under the same keys."""
        return [*chain.from_iterable(self.dicts)] == self._keys and all(
            map(is_, chain.from_iterable(map(_values, self.dicts)), self._values)
        )

    def restore(self) -> None:
        """Give the dicts the items that they had."""
        for now, before in zip(self.dicts, self.copies, strict=True):
            now.clear()
            now.update(before)


class TensorSnapshot:
    """Memory, form, flags and attributes of some tensors at one moment. They have to be plain ones (`is_plain`).

    Whoever keeps a snapshot keeps the tensors' memory too, in a tensor of its own: otherwise other memory could come to
    lie at the same address.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [*tensors]
        self._before = self._state()

    def is_current(self) -> bool:
        """Return whether all of it is as it was. Values that were written do not matter."""
        return _equal(self._state(), self._before)

    def _state(self) -> list[Any]:
        tensors = self._tensors
        return [
            *map(torch.Tensor.data_ptr, tensors),
            *map(torch.Tensor.size, tensors),
            *map(torch.Tensor.stride, tensors),
            *map(_requires_grad, tensors),
            *map(_dtype, tensors),
            *map(dict, map(_own_attributes, tensors)),
        ]


class ChangeTracker:
    """Finds what was rebound in modules, and what changed in the plain containers that they hold."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._classes = [*map(type, modules)]
        self._attributes = DictSnapshot([module.__dict__ for module in modules])
        registries: list[dict[Any, Any]] = []
        self._containers: list[Any] = []
        seen: set[int] = set()
        for attributes in self._attributes.dicts:
            for name, value in attributes.items():
                if name in _REGISTRIES and isinstance(value, dict):
                    registries.append(value)
                elif name in _REGISTRIES:
                    self._containers.append(value)
                elif type(value) not in INERT:
                    self._find(value, seen, 0)
        self._registries = DictSnapshot(registries)
        self._containers_before = [*map(_copy, self._containers)]

    def is_current(self) -> bool:
        """Return whether nothing changed that a replica would not see by itself.

        It sees what happens in a container of plain values, which is the live module's own.
        """
        if not (self._attributes.is_current() and self._registries.is_current()):
            return False
        if [*map(type, self._modules)] != self._classes:
            return False
        if _equal(self._containers, self._containers_before):
            return True
        for number, (now, before) in enumerate(zip(self._containers, self._containers_before, strict=True)):
            if not _equal(now, before):
                if not INERT.issuperset(map(type, chain(now, now.values()) if isinstance(now, dict) else now)):
                    return False
                self._containers_before[number] = _copy(now)
        return True

    def changes(self) -> list[tuple[int, str, Any]] | None:
        """Return what was rebound as (number of the module, name, value), one `GONE` for what was deleted.

        Returns None where anything else changed: a container, or a value that is not plain.
        """
        if not (self._registries.is_current() and _equal(self._containers, self._containers_before)):
            return None
        if [*map(type, self._modules)] != self._classes:
            return None
        if self._attributes.is_current():
            return []
        found: list[tuple[int, str, Any]] = []
        for number, (now, known) in enumerate(zip(self._attributes.dicts, self._attributes.copies, strict=True)):
            for name in now.keys() | known.keys():
                value, before = now.get(name, GONE), known.get(name, GONE)
                if value is before:
                    continue
                if name in _REGISTRIES or not (value is GONE or _is_value(value)) or type(before) not in INERT:
                    return None
                found.append((number, name, value))
        self._attributes.take()
        return found

    def commit(self) -> None:
        """Take the containers' present contents as known."""
        if not _equal(self._containers, self._containers_before):
            self._containers_before = [*map(_copy, self._containers)]

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
