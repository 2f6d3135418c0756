"""Finds what a live module has had changed since it was last looked at: what was rebound, written or replaced.

What is derived from a module (its blueprint, replicas) is kept across steps as long as nothing of
this is found. The check runs before every forward, so it must cost microseconds: torch's guards, in C, know a dict that
nothing was written into, and a tensor that is as before. What they do not know is compared with what was there, object
by object, and only what differs is looked at in Python.

Seen: attributes that are rebound, in any module; children, parameters, buffers and hooks that are added or removed; the
contents of plain containers; the class of a module; a tensor's memory, form, `requires_grad` and attributes. Not seen:
changes inside objects of other classes, in containers of many items, and beyond a bound on all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeAlias

import torch
from torch import nn

from unisono.primitives.visitor import INERT, LARGE, TRACKED, Place, Step, entries, is_a, num_entries, visit
from unisono.runtime.torch_private import tensor_objects

_MOST = 10_000  # entries of containers that are compared before each forward
_values = dict.values
_own_attributes, _requires_grad, _forward = map(attrgetter, ("__dict__", "requires_grad", "forward"))
OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Of which hooks are to be called always, or with keyword inputs, by their ids.
HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
STAMPED = (*REGISTRIES, *HOOKS, *HOOK_FLAGS)  # the dicts that each replica's modules have of their own
_MEMORY: tuple[Callable[[torch.Tensor], Any], ...] = (
    *(torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, attrgetter("dtype")),
    *(torch.Tensor.is_conj, torch.Tensor.is_neg),
)


class GONE:
    """Stands for an attribute that was deleted."""


Change: TypeAlias = tuple[int, Any, Any]  # number of the dict, key, new value: GONE if deleted


def attribute_dicts(modules: Sequence[nn.Module]) -> list[dict[Any, Any]]:
    """Return the dicts of modules' attributes, and those of their children, parameters, buffers and hooks, by kind."""
    registries = (module.__dict__.get(name) for name in STAMPED for module in modules)
    return [*[m.__dict__ for m in modules], *[each if isinstance(each, dict) else {} for each in registries]]


class DictSnapshot:
    """The items of some dicts at one moment. Equal is not identical: a rebound `[]`, or 1 in place of True, differs."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self.dicts = dicts
        self.copies = [*map(dict, dicts)]
        self._number_items()

    def _number_items(self) -> None:
        both = [*zip(self.dicts, self.copies, strict=True)]
        self._empty = [items for items, copy in both if not copy]  # as most of a module's own registries are
        self._filled = [items for items, copy in both if copy]
        self._filled_copies = [*filter(None, self.copies)]
        self._lengths = [*map(len, self._filled_copies)]
        self._keys = [*chain(*self.copies)]
        self._objects = [*chain(*map(_values, self.copies))]
        # Another order of an OrderedDict is no other version.
        self._version = tensor_objects.dict_version if {*map(type, self._filled)} <= {dict} else None
        self._versions: list[int] | None = None  # as long as nothing has been compared

    def is_current(self) -> bool:
        """Return whether the dicts hold the same objects under the same keys, in the same order."""
        if [*filter(None, self._empty)]:
            return False
        # Before the comparison: another thread may write meanwhile.
        versions = None if self._version is None else [*map(self._version, self._filled)]
        if versions is not None and versions == self._versions:
            return True
        is_current = (
            [*map(len, self._filled)] == self._lengths  # with equal lengths, no item can have moved to the next dict
            and [*chain(*self._filled)] == self._keys
            and all(map(is_, chain(*map(_values, self._filled)), self._objects))
        )
        if is_current:
            self._versions = versions
        return is_current

    def put(self, number: int, key: Any, value: Any) -> None:
        """Take a value of one dict as if it had held it before; `GONE`: as if it had held none."""
        copy = self.copies[number]
        if key in copy and value is not GONE:  # hardly any work: a step counter does so in each step
            start = sum(map(len, self.copies[:number]))
            self._objects[start + [*copy].index(key)] = copy[key] = value
        else:
            copy.pop(key, None) if value is GONE else copy.update({key: value})
            self._number_items()

    def changes(self) -> list[Change]:
        """Return what differs now, with each new value."""
        if self.is_current():
            return []
        return [
            (number, key, now.get(key, GONE))
            for number, (now, before) in enumerate(zip(self.dicts, self.copies, strict=True))
            for key in {**before, **now}
            if now.get(key, GONE) is not before.get(key, GONE)
        ]

    def restore(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Give the dicts the items that they had; return those that differed, each with what it held."""
        held = [(items, dict(items)) for items in filter(None, self._empty)]
        for items, _ in held:
            items.clear()
        return held + restore(self._filled, self._filled_copies)


def restore(
    dicts: Sequence[dict[Any, Any]], copies: Sequence[dict[Any, Any]]
) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Give dicts the items of their copies; return those that differed, each with what it held."""
    held = []
    for now, before in zip(dicts, copies, strict=True):
        if not _same_items(now, before):
            held.append((now, dict(now)))
            fill(now, before)
    return held


def _same_items(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and [*now] == [*before] and all(map(is_, now.values(), before.values()))


def fill(target: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Give a dict other items."""
    target.clear()
    target.update(items)


class TensorSnapshot:
    """Memory, form, flags and attributes of some tensors at one moment. They have to be plain ones (`is_plain`).

    The owner of a snapshot also keeps the tensors' memory, in a tensor of its own: otherwise other memory could come to
    lie at the same address.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [*tensors]
        self._attributes = DictSnapshot([*map(_own_attributes, self._tensors)])
        self._have_attributes = any(self._attributes.dicts)  # hardly any have
        self._before, self._are_alike = self._state(), tensor_objects.look_at_tensors(self._tensors)

    def is_current(self) -> bool:
        """Return whether all of it is as it was. Values that were written do not matter."""
        if not self._are_alike() and self._state() != self._before:
            return False
        return self._attributes.is_current() if self._have_attributes else not any(self._attributes.dicts)

    def _state(self) -> list[Any]:
        tensors = self._tensors
        state = [*map(_requires_grad, tensors), *map(type, tensors)]
        for read in _MEMORY:
            state += map(read, tensors)
        return state


class ContainerSnapshot:
    """What some values, and the plain containers that they lead to, hold at one moment.

    Args:
        shared: values whose containers are left out.
    """

    def __init__(self, values: Iterable[Any], shared: Iterable[Any] = ()) -> None:
        seen: set[int] = set()
        for _ in _visited(shared, seen):
            pass
        self._containers: list[Any] = [each for each in _visited(values, seen) if not is_a(each, tuple)]
        self._before = [*map(_items, self._containers)]

    def is_current(self) -> bool:
        """Return whether they hold the same objects."""
        return all(map(_same, map(_items, self._containers), self._before))

    def take_plain(self) -> bool:
        """Take what they hold now where that is plain values; return whether nothing else has changed."""
        for number, container in enumerate(self._containers):
            items = _items(container)
            if not _same(items, self._before[number]):
                if not INERT.issuperset(map(type, items)):
                    return False
                self._before[number] = items
        return True


def _visited(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    for place, _ in visit([Place(value, "") for value in values], _in_containers, _MOST, INERT, seen):
        if _is_tracked(place.value):
            yield place.value


def _in_containers(value: Any) -> list[tuple[Step, Any]]:
    return entries(value) if _is_tracked(value) else []


def _is_tracked(value: Any) -> bool:
    """Return whether a value is a container, itself or in a tuple, that is compared with what it held."""
    return (type(value) in TRACKED or is_a(value, tuple)) and (num_entries(value) or 0) <= LARGE


class ChangeTracker:
    """Finds what was rebound in modules, and what changed in the plain containers that they hold."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._classes = [*map(type, modules)]
        self._forwards = [*map(_forward, dict.fromkeys(self._classes))]
        self._dicts = DictSnapshot(attribute_dicts(modules))
        others = (item for module in modules for item in module.__dict__.items() if item[0] not in OF_EVERY_MODULE)
        self._containers = ContainerSnapshot([value for _, value in others if type(value) not in INERT])

    def put(self, number: int, name: str, value: Any) -> None:
        """Take an attribute of one module as if it had been there before; `GONE`: as if it had not."""
        self._dicts.put(number, name, value)

    def is_current(self) -> bool:
        """Return whether nothing changed that a replica would not see by itself.

        It sees what happens in a container of plain values, which is the live module's own.
        """
        classes = [*map(type, self._modules)]
        return (
            self._dicts.is_current()
            and classes == self._classes
            and [*map(_forward, dict.fromkeys(classes))] == self._forwards
            and self._containers.take_plain()
        )


def _items(container: Any) -> Any:
    """Return what a container holds: keys and values in order; a set as a copy."""
    if isinstance(container, dict):
        return [*container, *container.values()]
    return set(container) if isinstance(container, set) else [*container]


def _same(now: Any, before: Any) -> bool:
    """Return whether two results of `_items` hold the same objects."""
    if type(now) is set:
        return bool(now == before)
    return len(now) == len(before) and all(map(is_, now, before))
