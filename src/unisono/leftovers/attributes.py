"""What forward assigns to a replica: what all replicas assign alike is kept, the rest is lost, and said.

A replica's attributes are its own, and end with its forward. On one device `self.size = x.shape[1]` stays. So the live
module gets what all replicas have set to the same: None, a text, a flag, a number, a size, a tensor of equal bits
without a history. Then a step counter, a table that grows and a flag are those of one device.

What cannot be that of one device is lost: values that differ, a number that is a replica's number of rows or has
changed by it, and layers, parameters, and hooks and functions that refer to the replica. What one forward assigns
together is kept or lost together: a flag may stand for a value. It is said, but for what no program misses: what
forward returns as well, a cached property, a clock.

Of a module's only replica, that of a rank with one device, all is kept that does not refer to the replica inside.

What forward leaves in `__slots__`, on tensors (`weight.grad_sample`, `x.scale`) and in inputs is verify's to find.
"""

import functools
import time
import types
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import chain, filterfalse
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn

from unisono.leftovers.shared import function_of
from unisono.primitives import pytree
from unisono.primitives.change_tracking import (
    GONE,
    HOOKS,
    OF_EVERY_MODULE,
    STAMPED,
    Change,
    DictSnapshot,
    attribute_dicts,
)
from unisono.primitives.object_state import is_equal
from unisono.primitives.references import references
from unisono.primitives.visitor import INERT, LARGE, Place, Step, held, references_of, visit
from unisono.runtime import devices as _devices
from unisono.runtime.torch_private import graph_nodes

_CLOCKS = (time.time, time.monotonic, time.perf_counter)
_LONGEST_S = 10.0  # between the moment when forward has read a clock, and this comparison
# Of torch's own classes, the attributes that follow from others: they are assigned again where they are used.
_DERIVED = {"_flat_weights", "_flat_weight_refs"}
_NOT_ASSIGNED = OF_EVERY_MODULE - {"training"}
_NUMBERS = (int, float, complex)
_parameters, _is_none = attrgetter("_parameters"), functools.partial(is_, None)


def told_apart(
    changes: Sequence[Change],
    before: Sequence[Mapping[str, Any]],
    replicas: Sequence[Sequence[nn.Module]],
    rows: Collection[int],
    returned: Collection[int] = (),
    known: Container[tuple[int, str]] = (),
) -> tuple[list[Change], list[Change], list[Change]]:
    """Return which changes of the first replica's attributes can be kept, and which are lost, in silence the last ones.

    Args:
        changes: of the `__dict__` of the first replica's modules.
        before: what these held.
        replicas: the modules of each.
        rows: how many rows replicas have.
        returned: ids of what forward returns.
        known: what was kept before: of that, tensors on accelerators are not compared again, which would wait for them.
    """
    alike: list[Change] = []
    lost: list[Change] = []
    unread: list[Change] = []
    for number, key, value in changes:
        module, old = replicas[0][number], before[number].get(key, GONE)
        if key in _NOT_ASSIGNED or isinstance(module, torch.jit.ScriptModule) or is_computed(module, key):
            continue
        if isinstance(getattr(type(module), key, None), functools.cached_property) or is_equal(old, value):
            continue
        values = [modules[number].__dict__.get(key, GONE) for modules in replicas]
        if _are_alike(values, old, rows, with_tensors=(number, key) not in known):
            # A tensor has an entry a row; or another size of it may be the number of rows, or be as large by accident.
            is_known = not isinstance(value, torch.Tensor) or not _may_have_rows(value, rows)
            of_rows = lost if not is_known and value.shape[0] in rows else unread
            (alike if is_known else of_rows).append((number, key, value))
        elif not _is_clock(value):
            (unread if id(value) in returned else lost).append((number, key, value))
    return alike, lost, unread


def kept_of_only(
    changes: Sequence[Change], before: Sequence[Mapping[str, Any]], modules: Sequence[nn.Module], own: Mapping[int, Any]
) -> tuple[list[Change], list[Change]]:
    """Return the changes of a module's only replica, as the live module gets them, and those that are lost.

    Args:
        changes, before: as in `told_apart`.
        modules: the replica's.
        own: by id, the replica's modules and tensors, each with the live module's.
    """
    kept: list[Change] = []
    lost: list[Change] = []
    for number, key, value in changes:
        module, old = modules[number], before[number].get(key, GONE)
        if key in _NOT_ASSIGNED or isinstance(module, torch.jit.ScriptModule) or is_computed(module, key):
            continue
        if id(value) in own:
            kept.append((number, key, own[id(value)]))
        elif any(id(place.value) in own for place, _ in visit([Place(value, key)], _held_or_referred)):
            if not is_equal(old, value):
                lost.append((number, key, value))
        else:
            kept.append((number, key, value))
    return kept, lost


def _held_or_referred(value: Any) -> list[tuple[Step, Any]]:
    return [*held(value), *references_of(value)]


def _are_alike(values: Sequence[Any], before: Any, rows: Collection[int], *, with_tensors: bool) -> bool:
    """Return whether replicas have set an attribute to what one device would have set it to."""
    first = values[0]
    if any(type(each) is not type(first) for each in values):
        return False
    if isinstance(first, torch.Tensor):
        if first.requires_grad or type(first) is not torch.Tensor:
            return False
        is_compared = with_tensors or _devices.computes_on_host(first.device)
        return all(_is_same_tensor(first, each, with_values=is_compared) for each in values[1:])
    if isinstance(first, types.FunctionType):
        return all(each is first for each in values) and not references(first)
    if first is GONE:
        return True
    if not _is_plain(first) or _is_of_rows(first, before, rows):
        return False
    return all(each == first or (first != first and each != each) for each in values[1:])  # NaN is NaN


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, or a short tuple or list of such."""
    if type(value) in (tuple, list):
        return len(value) <= LARGE and all(map(_is_plain, value))
    return type(value) in INERT


def _is_of_rows(value: Any, before: Any, rows: Collection[int]) -> bool:
    """Return whether a number, or one in a size, is the number of rows of all replicas, or has changed by it.

    Where replicas have different numbers of rows, what is alike is none of them.
    """
    number = _common(rows)
    if number is None:
        return False
    if isinstance(value, tuple | list):
        old = before if type(before) is type(value) and len(before) == len(value) else [None] * len(value)
        return any(_is_of_rows(each, other, rows) for each, other in zip(value, old, strict=True))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if type(before) is type(value) and value != before:
        return (value - before) % number == 0 or (value == number and value != before + 1)  # one that counts comes by
    return value == number


def _common(rows: Collection[int]) -> int | None:
    """Return the number of rows of all replicas; None if they differ, or it cannot be told from a counter's one."""
    distinct = {*rows} - {0, 1}
    return distinct.pop() if len({*rows}) == len(distinct) == 1 else None


def _may_have_rows(tensor: torch.Tensor, rows: Collection[int]) -> bool:
    """Return whether a tensor has an axis that may be that of the rows of all replicas."""
    return _common(rows) in tensor.shape


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor, *, with_values: bool) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout) or other.requires_grad:
        return False
    if one.is_nested or one.layout is not torch.strided or one.is_meta:
        return False
    return not with_values or torch.equal(one, _devices.moved_to(other, one.device))


def ids_of_leaves(outputs: Sequence[Any]) -> set[int]:
    """Return the ids of what replicas return; none where that cannot be gathered, which raises."""
    try:
        return {id(leaf) for leaf in pytree.flatten([*outputs])[0]}
    except (ValueError, RecursionError):
        return set()


class AnyReplicas:
    """Replicas that may be anything, as a user's own `replicate` returns them, as far as they are like a module."""

    def __init__(self, replicas: Sequence[Any], live: nn.Module) -> None:
        by_path = [dict(each.named_modules()) if isinstance(each, nn.Module) else {} for each in replicas]
        common = {path: m for path, m in live.named_modules() if by_path and all(path in each for each in by_path)}
        self.names, self.live_modules = [*common], [*common.values()]
        self.modules = [[each[path] for path in common] for each in by_path]
        is_live = any(a is b for a, b in zip(self.live_modules, self.modules[0] if self.modules else (), strict=False))
        self._each = [] if is_live else [module for modules in self.modules for module in modules]
        self._dicts, self._num_hooks = DictSnapshot(attribute_dicts(self._each)), num_hooks_of(self._each)

    def commit(self, rows: Collection[int], outputs: Sequence[Any]) -> Iterator[str]:
        """Give the module what all replicas have set alike; yield the paths of what is lost."""
        if self._dicts.is_current() and num_hooks_of(self._each) == self._num_hooks:
            return
        before = self._dicts.copies
        changes = [change for change in self._dicts.changes() if change[0] < len(self.names)]
        alike, lost, unread = told_apart(changes, before, self.modules, rows, ids_of_leaves(outputs))
        if not keep_hooks(self._dicts, self._each, self.live_modules, self._num_hooks):
            yield from registered(self._dicts, self._each, self.names * len(self.modules))
        elif not lost and not unread:
            for number, key, value in alike:
                if value is GONE:
                    self.live_modules[number].__dict__.pop(key, None)
                else:
                    self.live_modules[number].__dict__[key] = value
            return
        lost += [change for change in alike if counts(before[change[0]].get(change[1]), change[2])]
        yield from (path_of(self.names[number], key) for number, key, _ in lost)


def counts(before: Any, now: Any) -> bool:
    """Return whether a number has changed, which a program may miss where it is lost."""
    return isinstance(now, _NUMBERS) and not isinstance(now, bool) and isinstance(before, _NUMBERS) and now != before


def has_rows(value: Any, rows: Collection[int]) -> bool:
    """Return whether a value is a tensor with an entry a row, or one number of all rows."""
    return isinstance(value, torch.Tensor) and (not value.dim() or value.shape[0] in rows)


def is_computed(module: nn.Module, key: str) -> bool:
    """Return whether torch computes an attribute in front of each forward: weight_norm, spectral_norm, prune."""
    if key in _DERIVED and isinstance(module, nn.RNNBase):
        return True
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return any(key in vars(hook).values() for hook in hooks)


def _is_clock(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    value, seconds = min(value, 1 << 62), [clock() for clock in _CLOCKS]  # a larger one may be none of float's
    return any(abs(value / unit - now) < _LONGEST_S < now for now in seconds for unit in (1, 1e9))


def path_of(name: str, key: str) -> str:
    """Return what messages call an attribute of a module."""
    return f"{name}.{key}" if name else key


def registered(snapshot: DictSnapshot, modules: Sequence[nn.Module], names: Sequence[str]) -> Iterator[str]:
    """Yield the path of each layer, parameter and hook that forward has registered since a snapshot.

    Args:
        snapshot: of `attribute_dicts(modules)`.
        names: of the modules.
    """
    for module, name in zip(modules, names, strict=True):
        hooked = [key for key, each in module._parameters.items() if each is not None and graph_nodes.num_hooks([each])]
        yield from (f"{path_of(name, key)} (a hook)" for key in hooked)
    for number, key, _ in snapshot.changes():
        kind, index = divmod(number, len(modules))
        if not kind or isinstance(modules[index], torch.jit.ScriptModule):  # a scripted module's are TorchScript's
            continue
        if STAMPED[kind - 1] in HOOKS:
            yield f"{names[index] or 'itself'} (a hook)"
        elif STAMPED[kind - 1] in ("_parameters", "_modules"):
            yield path_of(names[index], key)


def num_hooks_of(modules: Sequence[nn.Module]) -> int:
    """Return how many hooks are on the modules' parameters."""
    of_each = chain.from_iterable(map(methodcaller("values"), map(_parameters, modules)))  # in C: a step may ask
    return graph_nodes.num_hooks([*filterfalse(_is_none, of_each)])


def keep_hooks(
    snapshot: DictSnapshot, modules: Sequence[nn.Module], live_modules: Sequence[nn.Module], num_hooks: int = 0
) -> bool:
    """Give live modules the hooks that all replicas have registered alike, if these refer to no replica.

    Return whether that was all that was registered since a snapshot: layers, parameters and other hooks are lost with
    the replicas. Then no attribute may be kept: it may be the flag that they are there.

    Args:
        snapshot: of `attribute_dicts(modules)`.
        modules: of all replicas, one replica after the other.
        num_hooks: how many their parameters had before.
    """
    if num_hooks_of(modules) != num_hooks:  # on parameters
        return False
    of_each: dict[int, list[tuple[str, int, Any, Any]]] = {}
    changes = snapshot.changes()
    for number, key, value in changes:
        kind, index = divmod(number, len(modules))
        replica, module = divmod(index, len(live_modules))
        if kind and STAMPED[kind - 1] in ("_parameters", "_modules"):
            return False
        if kind and STAMPED[kind - 1] != "_buffers":
            of_each.setdefault(replica, []).append((STAMPED[kind - 1], module, key, value))
    first = of_each.get(0, [])
    forms = {tuple([(name, module, _code_of(value)) for name, module, _, value in each]) for each in of_each.values()}
    if len(of_each) not in (0, len(modules) // len(live_modules)) or len(forms) > 1:
        return False
    if any(value is GONE or references(value) for *_, value in first):
        return False
    for name, module, key, value in first:
        live_modules[module].__dict__[name][key] = value
    for number, key, value in changes:
        if number >= len(modules) and STAMPED[number // len(modules) - 1] != "_buffers":
            snapshot.put(number, key, value)
    return True


def _code_of(hook: Any) -> Any:
    return getattr(function_of(hook), "__code__", type(hook))
