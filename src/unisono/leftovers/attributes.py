"""What forward assigns to a replica: what all replicas assign alike is kept, the rest is lost, and said.

A replica's attributes are its own, and end with its forward. On one device `self.size = x.shape[1]` stays. So the live
module gets what all replicas have set to the same: None, a text, a flag, a number, a size, a tensor of equal bits
without a history. Then a step counter, a table that grows and a flag are those of one device.

What cannot be that of one device is lost: values that differ, a number that is a replica's number of rows or has
changed by it, and layers, parameters, and hooks and functions that refer to the replica. What one forward assigns
together is kept or lost together: a flag may stand for a value. It is said, but for what no program misses: what
forward returns as well, a cached property, a clock.

Of a module's only replica, that of a rank with one device, all is kept that does not refer to the replica inside.

Also here: attributes in `__slots__`, of parameters (`weight.grad_sample`) and of inputs (`x.scale`). They are looked at
in the first forward of new replicas.
"""

import functools
import time
import types
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unisono.leftovers.report import Kind, Leftovers
from unisono.leftovers.shared import function_of
from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.blueprint import HOOKS, STAMPED
from unisono.primitives.change_tracking import GONE, Change, ContainerSnapshot, DictSnapshot
from unisono.primitives.object_state import is_equal
from unisono.primitives.references import references
from unisono.primitives.shared_iterators import SharedIterator
from unisono.primitives.visitor import INERT, LARGE, TRACKED, Place, Step, filled_slots, held, references_of, visit
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private

_CLOCKS = (time.time, time.monotonic, time.perf_counter)
_LONGEST_S = 10.0  # between the moment when forward has read a clock, and this comparison
_OF_EVERY_MODULE = {*nn.Module().__dict__} - {"training"}
# Of torch's own classes, the attributes that follow from others: they are assigned again where they are used.
_DERIVED = {"_flat_weights", "_flat_weight_refs"}
_NUMBERS = (int, float, complex)


def attribute_dicts_of(modules: Sequence[nn.Module]) -> list[dict[Any, Any]]:
    """Return the dicts of replicas' modules that end with their forward: attributes, registries and hooks, by kind."""
    registries = (module.__dict__.get(name) for name in STAMPED for module in modules)
    return [*[m.__dict__ for m in modules], *[each if isinstance(each, dict) else {} for each in registries]]


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
        if key in _OF_EVERY_MODULE or isinstance(module, torch.jit.ScriptModule) or _is_computed(module, key):
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
        if key in _OF_EVERY_MODULE or isinstance(module, torch.jit.ScriptModule) or _is_computed(module, key):
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
    return not with_values or torch.equal(one, _devices.copy_to(other, one.device))


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
        self._dicts = DictSnapshot(attribute_dicts_of(self._each))

    def commit(self, rows: Collection[int], outputs: Sequence[Any]) -> Iterator[str]:
        """Give the module what all replicas have set alike; yield the paths of what is lost."""
        if self._dicts.is_current():
            return
        before = self._dicts.copies
        changes = [change for change in self._dicts.changes() if change[0] < len(self.names)]
        alike, lost, unread = told_apart(changes, before, self.modules, rows, ids_of_leaves(outputs))
        if not keep_hooks(self._dicts, self._each, self.live_modules):
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


def _is_computed(module: nn.Module, key: str) -> bool:
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
        snapshot: of `attribute_dicts_of(modules)`.
        names: of the modules.
    """
    for number, key, _ in snapshot.changes():
        kind, index = divmod(number, len(modules))
        if not kind or isinstance(modules[index], torch.jit.ScriptModule):  # a scripted module's are TorchScript's
            continue
        if STAMPED[kind - 1] in HOOKS:
            yield f"{names[index] or 'itself'} (a hook)"
        elif STAMPED[kind - 1] in ("_parameters", "_modules"):
            yield path_of(names[index], key)


def keep_hooks(snapshot: DictSnapshot, modules: Sequence[nn.Module], live_modules: Sequence[nn.Module]) -> bool:
    """Give live modules the hooks that all replicas have registered alike, if these refer to no replica.

    Return whether that was all that was registered since a snapshot: layers, parameters and other hooks are lost with
    the replicas. Then no attribute may be kept: it may be the flag that they are there.

    Args:
        snapshot: of `attribute_dicts_of(modules)`.
        modules: of all replicas, one replica after the other.
    """
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


class NewReplicas:
    """What the replicas of one forward have before it, beside their attributes; in their first forward.

    Args:
        leftovers: of the model; takes note of what is found.
        replicas: the modules of each.
        live_modules: those of which they are replicas, with the names of these.
        shards: the replicas' positional and keyword inputs.
    """

    def __init__(
        self,
        leftovers: Leftovers,
        replicas: Sequence[Sequence[nn.Module]],
        live_modules: Sequence[nn.Module],
        names: Sequence[str],
        shards: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> None:
        self._leftovers = leftovers
        self._modules = [module for modules in replicas for module in modules]
        self._live_modules = [*live_modules] * len(replicas)
        self._names = [*names] * len(replicas)
        self._shards = [*shards]

    def begin(self) -> None:
        """Take what the replicas have: forward begins."""
        self._containers = [*self._own_containers()]
        self._tensors = {id(tensor): (name, tensor) for name, tensor in self._named_tensors()}
        self._of_tensors = [*map(_attributes_of, self._tensors.values())]
        self._num_hooks = [torch_private.num_hooks([tensor]) for _, tensor in self._tensors.values()]
        self._inputs = WatchedInputs(self._shards)
        self._slots = dict(self._filled_slots())

    def end(self, outputs: Sequence[Any] = (), /) -> None:
        """Add what is found to the leftovers, but for what forward returns."""
        self._leftovers.add(Kind.ASSIGNED, self._assigned(ids_of_leaves(outputs)))

    def _assigned(self, returned: Collection[int]) -> Iterator[str]:
        for attribute, container in self._containers:
            if not container.is_current():
                yield attribute
        of_tensors = zip(self._tensors.values(), self._of_tensors, self._num_hooks, strict=True)
        for (name, tensor), of_tensor, num_hooks in of_tensors:
            yield from _added(name, tensor, of_tensor)
            if torch_private.num_hooks([tensor]) > num_hooks:
                yield f"{name} (a hook)"
        for slot, now in self._filled_slots():
            if now is not (before := self._slots.get(slot, GONE)) and not is_equal(before, now):
                yield slot[1]
        yield from self._inputs.assigned(returned)

    def _own_containers(self) -> Iterator[tuple[str, ContainerSnapshot]]:
        """Yield the containers that a replica has in place of the live module's, because they hold layers or weights.

        Not of a class that says itself what its replicas do not share.
        """
        for module, live, name in zip(self._modules, self._live_modules, self._names, strict=True):
            if not type(module)._replicate_for_data_parallel.__module__.startswith("torch."):
                continue
            for key, value in vars(module).items():
                is_own = type(value) in TRACKED and value is not live.__dict__.get(key, GONE)
                if is_own and key not in _OF_EVERY_MODULE and key not in _DERIVED:
                    yield path_of(name, key), ContainerSnapshot([value], [live.__dict__.get(key)])

    def _filled_slots(self) -> Iterator[tuple[tuple[int, str], Any]]:
        """Yield what modules have in slots of their classes, by number of the module and path."""
        classes = {*map(type, self._modules)}
        has_slots = {cls: any(vars(base).get("__slots__") for base in cls.__mro__) for cls in classes}
        for number, (module, name) in enumerate(zip(self._modules, self._names, strict=True)):
            if has_slots[type(module)]:
                for key, _, value in filled_slots(module):
                    yield (number, path_of(name, key)), value

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module, name in zip(self._modules, self._names, strict=True):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield path_of(name, key), tensor


class WatchedInputs:
    """What some inputs, positional and keyword ones, hold before forward runs with them."""

    def __init__(self, shards: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        self._shards = [*shards]
        self._leaves = [_leaves(shard) for shard in shards]
        self._attributes = [[*map(_attributes_of, leaves.items())] for leaves in self._leaves]

    def assigned(self, returned: Collection[int] = ()) -> Iterator[str]:
        """Yield the path of each attribute and each entry of the inputs that was assigned or removed since.

        Args:
            returned: ids of what forward returns.
        """
        for shard, leaves, attributes in zip(self._shards, self._leaves, self._attributes, strict=True):
            for named, of_leaf in zip(leaves.items(), attributes, strict=True):
                yield from _added(*named, of_leaf)
            now = _leaves(shard)
            new = {where: leaf for where, leaf in now.items() if leaf is not leaves.get(where, GONE)}
            yield from (where for where, leaf in new.items() if id(leaf) not in returned)
            yield from leaves.keys() - now.keys()


def _leaves(shard: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    args, kwargs = shard
    return {**dict(pytree.leaves(args, "inputs")), **dict(pytree.leaves(kwargs, "kwargs"))}


def _attributes_of(named: tuple[str, Any]) -> Mapping[str, Any]:
    """Return the attributes that an object has now; nothing of what has none of its own, is a batch, or is used up."""
    _, value = named
    if isinstance(value, nn.Module | types.ModuleType | type | SharedIterator) or batch_type_of(value) is not None:
        return {}
    return dict(getattr(value, "__dict__", ()))


def _added(name: str, value: Any, before: Mapping[str, Any]) -> Iterator[str]:
    """Yield the path of each attribute that was assigned to a tensor or an input."""
    for key, now in _attributes_of((name, value)).items():
        if now is before.get(key, GONE) or key.startswith("_dynamo_"):  # the latter: marks of torch.compile's
            continue
        # A tensor of a class of its own may hold its data there.
        is_data = isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter) and key in before
        if not is_data and not is_equal(before.get(key, GONE), now):
            yield f"{name}.{key}"
