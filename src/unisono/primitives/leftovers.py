"""What forward leaves behind in a replica, and the plain module would keep: one warning for a model.

A replica's attributes and hooks are its own, and end with its forward. What forward assigns to a module (`self.steps`,
a layer that the first forward makes), to a parameter (`weight.grad_sample`) or to an input (`x.scale`) is found by a
comparison of the dicts that hold it, before and after. It is not put into the live module: a number that is equal in
all replicas may be half of the count, and a flag without the weights for which it stands is worse than neither.
Replicas that have run before are compared where they are given back; new ones after their first forward, with more.

What replicas share and write into is found in the first steps of a structure (shared_state.py), and said in another
warning.
"""

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.blueprint import HOOKS, STAMPED, Blueprint, names_of
from unisono.primitives.change_tracking import GONE, ContainerSnapshot, DictSnapshot
from unisono.primitives.object_state import filled_slots, is_equal
from unisono.primitives.references import TRACKED
from unisono.primitives.shared_iterators import SharedIterator
from unisono.primitives.shared_state import HookWrites
from unisono.runtime import torch_private
from unisono.runtime.model_warnings import ModelWarnings
from unisono.runtime.thread_pool import replica_path

_MOST_NAMED = 6
_FIRST = 3  # forwards of the plain composition, with the same hooks, that are watched: each has new replicas
_ROWS_OF_ONE = (
    "A buffer (register_buffer in __init__) suits a value that does not depend on the rows: the first "
    "replica's is kept, computed from its own rows only. "
)
_LOST = (
    "forward of {model} assigns {names}: each replica assigns its own value, computed from its own rows, "
    "and it is lost when forward ends. Return the value from forward, and keep the gathered one. "
    f"{_ROWS_OF_ONE}If the first forward creates layers, parameters or hooks, call the plain module once "
    "before you wrap it; an optimizer finds them then."
)
_KEPT = (
    "a hook stores {names}, and each replica calls it with its own rows, or with a part of them: a value "
    "stored by name is one replica's, and a list is in the order in which replicas finish. Return the value "
    "from forward of {model}; or use the hook on the plain module, model.module."
)
_SHARED = (
    "forward of {model} writes into {names}, which all replicas share: each writes values of its own "
    "rows, in the order in which replicas happen to run. A value stored by name is one replica's, a list is "
    "in that order, and a count counts replicas. So the result is not that of one device. Return the value "
    f"from forward, and keep the gathered one. {_ROWS_OF_ONE}"
).strip()
_DRAWN = (
    "{names} was drawn from while the replicas of {model} ran, or parts of a batch. They share this generator, in the "
    "order in which they happen to run, and a part that backward computes a second time draws other numbers. So runs "
    "with equal seeds may differ. Use torch's functions without generator=, for which each replica has its own stream; "
    "or draw outside the model, and pass the result as an input."
)
_OF_EVERY_MODULE = {*nn.Module().__dict__} - {"training"}
# Of torch's own classes, the attributes that follow from others: they are assigned again where they are used.
_DERIVED = {"_flat_weights", "_flat_weight_refs"}


class Kind(StrEnum):
    """Kinds of what is left behind; a model is warned of each once."""

    ASSIGNED = "assigned"  # the paths of what forward assigns in replicas
    HOOKS = "hooks"  # the names of hooks that keep what they see
    SHARED = "shared"  # the names of what replicas share and write into
    DRAWS = "draws"  # the names of generators that replicas share and draw from


class Leftovers:
    """What the forwards of one model leave behind.

    Attributes:
        found: by kind, the names of what was found.
        of_hooks: ids of that in which hooks keep what they see.
        has_more: whether something was found that was not said.

    Args:
        warnings: of the model.
    """

    def __init__(self, warnings: ModelWarnings) -> None:
        self.found: dict[Kind, dict[str, None]] = {kind: {} for kind in Kind}
        self.of_hooks: set[int] = set()
        self.has_more = False
        self._warnings = warnings
        self._num_verbs, self._hooks_of_verbs = 0, list[int]()

    @property
    def looks(self) -> bool:
        """Whether forwards are still looked at."""
        return not all(map(self._warnings.has_given, Kind))

    def add(self, kind: Kind, names: Iterable[str]) -> None:
        """Take note of what was found."""
        names = dict.fromkeys(names)
        self.found[kind].update(names)
        self.has_more = self.has_more or bool(names)

    def add_hooks(self, changed: Mapping[str, Iterable[Any]]) -> None:
        """Take note of hooks that keep what they see, and of that in which they keep it."""
        self.add(Kind.HOOKS, changed)
        self.of_hooks.update(id(value) for values in changed.values() for value in values)

    def say(self, model: nn.Module) -> None:
        """Warn of what was found, if that was not said before."""
        if not self.has_more or any(replica_path()):  # the latter: not in the caller's thread
            return
        self.has_more = False
        for kind, names in self.found.items():
            if names and not self._warnings.has_given(kind):
                text = _MESSAGES[kind].format(model=type(model).__name__, names=listed([*names]))
                self._warnings.give(text, kind)

    def watched_by_name(
        self, replicas: Sequence[Any], live: nn.Module, shards: Sequence[Any], devices: Sequence[torch.device]
    ) -> "Watched | None":
        """Watch the modules that replicas have in common with the live module, in the first forwards.

        Args:
            replicas, shards: what a user's own verbs have returned may be anything.
        """
        if not self.looks:
            return None
        hooks = [len(module.__dict__[kind]) for module in live.modules() for kind in HOOKS]
        self._num_verbs = self._num_verbs + 1 if hooks == self._hooks_of_verbs else 1
        self._hooks_of_verbs = hooks
        if self._num_verbs > _FIRST or not all(isinstance(each, nn.Module) for each in replicas):
            return None
        each = [dict(replica.named_modules()) for replica in replicas]
        modules = {path: m for path, m in live.named_modules() if all(path in of_replica for of_replica in each)}
        of_each = [[of_replica[path] for path in modules] for of_replica in each]
        live_modules = [*modules.values()]
        inputs = [shard for shard in shards if _is_shard(shard)]
        names, observers = names_of(live_modules, live), Blueprint(live).observers
        return Watched(self, of_each, live_modules, names, inputs, devices, observers)


_MESSAGES = {Kind.ASSIGNED: _LOST, Kind.HOOKS: _KEPT, Kind.SHARED: _SHARED, Kind.DRAWS: _DRAWN}


def listed(names: Sequence[str]) -> str:
    """Return names as a message has them.

    >>> listed(["a.steps", "b.steps"])
    'a.steps and b.steps'
    """
    if len(names) > _MOST_NAMED:
        return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def attribute_dicts_of(modules: Sequence[nn.Module]) -> list[dict[Any, Any]]:
    """Return the dicts of replicas' modules that end with their forward: attributes, registries and hooks, by kind."""
    registries = (module.__dict__.get(name) for name in STAMPED for module in modules)
    return [*[m.__dict__ for m in modules], *[each if isinstance(each, dict) else {} for each in registries]]


def assigned(snapshot: DictSnapshot, modules: Sequence[nn.Module], names: Sequence[str]) -> Iterator[str]:
    """Yield the path of each attribute that was assigned since the snapshot of the dicts of some modules.

    Not what has an equal value, nor what torch itself sets again in each forward.

    Args:
        names: of the modules.
    """
    for number, key, now in snapshot.changes():
        kind, index = divmod(number, len(modules))
        name, registry = names[index], STAMPED[kind - 1] if kind else ""
        # The first replica's buffers stay; a scripted module's attributes are TorchScript's.
        if registry == "_buffers" or isinstance(modules[index], torch.jit.ScriptModule):
            continue
        if registry in HOOKS:
            yield f"{name or 'itself'} (a hook)"
        elif registry in ("_parameters", "_modules") or (
            not registry and not _is_kept(modules[index], key, snapshot.copies[number].get(key, GONE), now)
        ):
            yield _path(name, key)


def _beside_dict(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are not in its dict: those of TorchScript, and in slots of its class."""
    in_slots = {name: value for name, _, value in filled_slots(module)}
    return {**torch_private.script_attributes(module), **in_slots}


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_kept(module: nn.Module, key: str, before: Any, now: Any) -> bool:
    """Return whether nothing is lost where an attribute of a replica was assigned."""
    if key in _OF_EVERY_MODULE or (key in _DERIVED and isinstance(module, nn.RNNBase)) or is_equal(before, now):
        return True
    # weight_norm, spectral_norm and prune compute a weight in front of each forward.
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return any(key in vars(hook).values() for hook in hooks)


class Watched:
    """What the replicas of one forward have before it: their attributes, containers, tensors and inputs.

    Args:
        leftovers: of the model; takes note of what is found.
        replicas: the modules of each.
        live_modules: those of which they are replicas, with the names of these.
        shards: the replicas' positional and keyword inputs.
        devices: of each run of the module; a replica that runs in parts has several.
        observers: ids of hooks that are known to keep what they see.
    """

    def __init__(
        self,
        leftovers: Leftovers,
        replicas: Sequence[Sequence[nn.Module]],
        live_modules: Sequence[nn.Module],
        names: Sequence[str],
        shards: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        devices: Sequence[torch.device],
        observers: Collection[int] = (),
    ) -> None:
        self._leftovers, self._has_several = leftovers, len(devices) > 1
        self._modules = [module for modules in replicas for module in modules]
        self._live_modules = [*live_modules] * len(replicas)
        self._names = [*names] * len(replicas)
        self._shards = [*shards]
        self._hook_states = partial(HookWrites, self._modules, self._names, devices, observers)
        self._in_backward: HookWrites | None = None

    def begin(self) -> None:
        """Take what the replicas have: forward begins."""
        self._hooks = self._hook_states() if self._has_several else None
        self._dicts = DictSnapshot(attribute_dicts_of(self._modules))
        self._containers = [*self._own_containers()]
        self._beside = [*map(_beside_dict, self._modules)]
        self._tensors = {id(tensor): (name, tensor) for name, tensor in self._named_tensors()}
        self._of_tensors = [*map(_attributes_of, self._tensors.values())]
        self._num_hooks = [torch_private.num_hooks([tensor]) for _, tensor in self._tensors.values()]
        self._inputs = WatchedInputs(self._shards)

    def end(self) -> None:
        """Add what is found to the leftovers."""
        self._leftovers.add(Kind.ASSIGNED, self._assigned())
        if self._hooks is not None:
            self._leftovers.add_hooks(self._hooks.changed())
        self._in_backward = self._hook_states(in_backward=True) if self._hooks is not None else None

    def backward_has_run(self) -> None:
        """Add the hooks that have kept what they see in the backward after that forward."""
        if self._in_backward is not None:
            self._leftovers.add_hooks(self._in_backward.changed())
            self._in_backward = None

    @property
    def looks_at_backward(self) -> bool:
        """Whether there are hooks that the backward after that forward calls."""
        return bool(self._in_backward)

    def _assigned(self) -> Iterator[str]:
        yield from assigned(self._dicts, self._modules, self._names)
        for attribute, container in self._containers:
            if not container.is_current():
                yield attribute
        for path, module, values in zip(self._names, self._modules, self._beside, strict=True):
            for key, value in _beside_dict(module).items():
                if value is not values.get(key, GONE) and not is_equal(values.get(key, GONE), value):
                    yield _path(path, key)
        of_tensors = zip(self._tensors.values(), self._of_tensors, self._num_hooks, strict=True)
        for (name, tensor), of_tensor, num_hooks in of_tensors:
            yield from _added(name, tensor, of_tensor)
            if torch_private.num_hooks([tensor]) > num_hooks:
                yield f"{name} (a hook)"
        yield from self._inputs.assigned()

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
                    yield _path(name, key), ContainerSnapshot([value], [live.__dict__.get(key)])

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module, name in zip(self._modules, self._names, strict=True):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield _path(name, key), tensor


class WatchedInputs:
    """What some inputs, positional and keyword ones, hold before forward runs with them."""

    def __init__(self, shards: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        self._shards = [*shards]
        self._leaves = [_leaves(shard) for shard in shards]
        self._attributes = [[*map(_attributes_of, leaves.items())] for leaves in self._leaves]

    def assigned(self) -> Iterator[str]:
        """Yield the path of each attribute and each entry of the inputs that was assigned or removed since."""
        for shard, leaves, attributes in zip(self._shards, self._leaves, self._attributes, strict=True):
            for named, of_leaf in zip(leaves.items(), attributes, strict=True):
                yield from _added(*named, of_leaf)
            now = _leaves(shard)
            yield from (where for where, leaf in now.items() if leaf is not leaves.get(where, GONE))
            yield from leaves.keys() - now.keys()


def _is_shard(shard: Any) -> bool:
    args, kwargs = shard
    return isinstance(args, tuple) and isinstance(kwargs, dict)


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
