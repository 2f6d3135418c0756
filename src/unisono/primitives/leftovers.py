"""What forward leaves behind in a replica, and the plain module would keep: one warning for a model.

A replica's attributes and hooks are its own, and end with its forward. What forward assigns to a module (`self.steps`,
a layer that the first forward makes), to a parameter (`weight.grad_sample`) or to an input (`x.scale`) is found by a
comparison of the dicts that hold it, before and after. It is not put into the live module: a number that is equal in
all replicas may be half of the count, and a flag without the weights for which it stands is worse than neither.
Replicas that have run before are compared where they are given back; new ones after their first forward, with more.

Not found: what replicas change in place in a list, dict or object that they share. There the plain module's is written
by all of them, in the order of arrival; `unisono.verify` finds it.
"""

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.blueprint import HOOKS, STAMPED, Blueprint, names_of
from unisono.primitives.change_tracking import GONE, ContainerSnapshot, DictSnapshot
from unisono.primitives.object_state import same_state, same_value, state_of
from unisono.primitives.observing_hooks import HookStates, is_the_users
from unisono.primitives.references import INERT, TRACKED
from unisono.primitives.shared_iterators import SharedIterator
from unisono.runtime import torch_private
from unisono.runtime.errors import warn
from unisono.runtime.thread_pool import replica_path

_MOST_NAMED = 6
_FIRST = 3  # forwards of the plain composition that are watched: each has new replicas
_LOST = (
    "forward of {model} assigns {names}: each replica does, for its own rows. Attributes and hooks of a replica, and "
    "its parts of the inputs, end with its forward; what all share, such as a class or an object among the inputs, "
    "each assigns. So the model has not what one device would leave there. Return the value from forward; or make a "
    "tensor a buffer (register_buffer in __init__), of which the first replica's stays; make layers and parameters "
    "before wrapping (one forward of the plain module does), where an optimizer finds them."
)
_KEPT = (
    "a hook keeps what it sees, {names}, and each replica calls it with its own rows, or with those of one of its "
    "parts: what it keeps by name or in an attribute is one replica's, and a list is in the order of arrival. Return "
    "what it sees from forward of {model}; or use the hook with the plain module, model.module."
)
_OF_EVERY_MODULE = {*nn.Module().__dict__} - {"training"}
# Of torch's own classes, the attributes that follow from others: they are assigned again where they are used.
_DERIVED = {"_flat_weights", "_flat_weight_refs"}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


class Leftovers:
    """What the forwards of one model leave behind. Each kind is said once.

    Attributes:
        assigned: the paths of what was assigned.
        hooks: the names of hooks that keep what they see.
        has_more: whether something was found that was not said.
        is_quiet: whether nothing is said.
    """

    def __init__(self) -> None:
        self.assigned: dict[str, None] = {}
        self.hooks: dict[str, None] = {}
        self.has_more = self.is_quiet = False
        self._said: set[str] = set()
        self._num_verbs = 0

    @property
    def looks(self) -> bool:
        """Whether forwards are still looked at."""
        return len(self._said) < 2

    def add(self, assigned: Iterable[str], hooks: Iterable[str] = ()) -> None:
        """Take note of the paths of what a forward has assigned, and of hooks that keep what they see."""
        self.assigned.update(dict.fromkeys(assigned))
        self.hooks.update(dict.fromkeys(hooks))
        self.has_more = bool(self.assigned or self.hooks)

    def say(self, model: nn.Module) -> None:
        """Warn of what was found, if that was not said before."""
        if not self.has_more or self.is_quiet or any(replica_path()):  # the latter: not in the caller's thread
            return
        self.has_more = False
        for names, message in ((self.assigned, _LOST), (self.hooks, _KEPT)):
            if names and message not in self._said:
                self._said.add(message)
                warn(message.format(model=type(model).__name__, names=listed([*names])))

    def watched_by_name(
        self, replicas: Sequence[Any], live: nn.Module, shards: Sequence[Any], devices: Sequence[torch.device]
    ) -> "Watched | None":
        """Watch the modules that replicas have in common with the live module, in the first forwards.

        Args:
            replicas, shards: what a user's own verbs have returned may be anything.
        """
        self._num_verbs += 1
        if not self.looks or self._num_verbs > _FIRST or not all(isinstance(each, nn.Module) for each in replicas):
            return None
        each = [dict(replica.named_modules()) for replica in replicas]
        modules = {path: m for path, m in live.named_modules() if all(path in of_replica for of_replica in each)}
        of_each = [[of_replica[path] for path in modules] for of_replica in each]
        live_modules = [*modules.values()]
        inputs = [shard for shard in shards if _is_shard(shard)]
        return Watched(of_each, live_modules, names_of(live_modules, live), inputs, devices, Blueprint(live).observers)


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


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_kept(module: nn.Module, key: str, before: Any, now: Any) -> bool:
    """Return whether nothing is lost where an attribute of a replica was assigned."""
    if key in _OF_EVERY_MODULE or (key in _DERIVED and isinstance(module, nn.RNNBase)) or is_equal(before, now):
        return True
    # weight_norm, spectral_norm and prune compute a weight in front of each forward.
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return any(key in vars(hook).values() for hook in hooks)


def is_equal(before: Any, now: Any) -> bool:
    """Return whether two values hold the same, as far as that can be told."""
    if type(before) is not type(now):
        return False
    try:
        if isinstance(now, _FUNCTIONS) or type(now) in INERT:
            return bool(before == now)
        if isinstance(now, torch.Tensor):
            return before.requires_grad == now.requires_grad and same_value(before, now)
        if isinstance(now, tuple | list | dict | set) and not len(before) and not len(now):
            return True
        state = state_of(now)
        return bool(state) and same_state(state_of(before), state)
    except Exception:  # noqa: BLE001 - objects of any class
        return False


class Watched:
    """What the replicas of one forward have before it: their attributes, containers, tensors and inputs.

    Args:
        replicas: the modules of each.
        live_modules: those of which they are replicas, with the names of these.
        shards: the replicas' positional and keyword inputs.
        devices: of each run of the module; a replica that runs in parts has several.
        observers: ids of hooks that are known to keep what they see.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[nn.Module]],
        live_modules: Sequence[nn.Module],
        names: Sequence[str],
        shards: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        devices: Sequence[torch.device],
        observers: Collection[int] = (),
    ) -> None:
        self._modules = [module for modules in replicas for module in modules]
        self._names = [*names] * len(replicas)
        self._hook_states = partial(HookStates, self._modules, self._names, devices, observers)
        self._hooks = self._hook_states() if len(devices) > 1 else None
        classes = {cls for module in live_modules for cls in type(module).__mro__ if is_the_users(cls)}
        self._classes = {cls: dict(vars(cls)) for cls in classes}
        self._dicts = DictSnapshot(attribute_dicts_of(self._modules))
        self._containers = [*self._own_containers([*live_modules] * len(replicas))]
        self._scripts = [torch_private.script_attributes(module) for module in self._modules]
        self._tensors = {id(tensor): (name, tensor) for name, tensor in self._named_tensors()}
        self._of_tensors = [*map(_attributes_of, self._tensors.values())]
        self._inputs = WatchedInputs(shards)

    def forward_has_run(self, leftovers: Leftovers) -> HookStates | None:
        """Add what is found; return the states of the hooks that backward calls, None if there are none."""
        leftovers.add(self._assigned(), self._hooks.changed() if self._hooks is not None else ())
        in_backward = self._hook_states(in_backward=True) if self._hooks is not None else None
        return in_backward if in_backward else None

    def _assigned(self) -> Iterator[str]:
        yield from assigned(self._dicts, self._modules, self._names)
        for cls, values in self._classes.items():  # which replicas share
            for key, value in [*vars(cls).items()]:
                before = values.get(key, GONE)
                if value is not before and not key.startswith("__") and not is_equal(before, value):
                    yield f"{cls.__name__}.{key}"
        for attribute, container in self._containers:
            if not container.is_current():
                yield attribute
        for path, module, values in zip(self._names, self._modules, self._scripts, strict=True):
            for key, value in torch_private.script_attributes(module).items() if values else ():
                if not is_equal(values.get(key, GONE), value):
                    yield _path(path, key)
        for (name, tensor), of_tensor in zip(self._tensors.values(), self._of_tensors, strict=True):
            yield from _added(name, tensor, of_tensor)
            if tensor.grad_fn is not None and torch_private.num_hooks([tensor]):  # a leaf is the caller's
                yield f"{name} (a hook)"
        yield from self._inputs.assigned()

    def _own_containers(self, live_modules: Sequence[nn.Module]) -> Iterator[tuple[str, ContainerSnapshot]]:
        """Yield the containers that a replica has in place of the live module's, because they hold layers or weights.

        Not of a class that says itself what its replicas do not share.
        """
        for module, live, name in zip(self._modules, live_modules, self._names, strict=True):
            if not type(module)._replicate_for_data_parallel.__module__.startswith("torch."):
                continue
            for key, value in vars(module).items():
                is_own = type(value) in TRACKED and value is not live.__dict__.get(key, GONE)
                if is_own and key not in _OF_EVERY_MODULE and key not in _DERIVED:
                    yield _path(name, key), ContainerSnapshot([value])

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
