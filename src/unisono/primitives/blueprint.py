"""Blueprint: the structure of a live module, from which replicas of it are stamped.

A `Blueprint` is a snapshot of a live module's structure: its modules (each once, also if shared), the parameters and
buffers in them, and the attributes that refer to the live module. To make one takes a microsecond or so a module. It is
valid as long as `is_current` says so. From it replicas are *stamped*: new objects of the same classes whose `__dict__`
is a copy of the live one, with children, parameters, buffers and those attributes replaced by the replica's own. No
method of the class runs, `__setattr__` included, so no class can interfere. The exception is an overridden
`_replicate_for_data_parallel`: there a class copies what its replicas must not share.

A replica is complete: `parameters()`, `state_dict()`, the `len()` of a ParameterList, ties and sharing are those of the
original. Attributes that a replica assigns, and hooks that it registers, are its own and are freed with it; lists and
dicts that it changes in place are the live module's, unless they hold modules, parameters or methods: then each replica
has its own.
"""

import gc
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter, setitem
from typing import Any, TypeAlias

import torch
from torch import nn

from unisono.primitives.change_tracking import (
    GONE,
    HOOK_FLAGS,
    HOOKS,
    REGISTRIES,
    ChangeTracker,
    TensorSnapshot,
    attribute_dicts,
)
from unisono.primitives.checks import check_initialized
from unisono.primitives.references import (
    MODES,
    is_inert,
    live_among,
    may_refer_later,
    observes,
    reachable,
    rebind,
    references,
)
from unisono.primitives.tensor_attributes import carry_attributes
from unisono.primitives.visitor import filled_slots
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import is_plain
from unisono.runtime.forks import in_forked_child
from unisono.runtime.interrupts import at_deletion
from unisono.runtime.model_warnings import ModelWarnings
from unisono.runtime.torch_private import compiler, foreach, torchscript

# What nn.Module itself keeps in `__dict__`, in the order in which its __init__ puts it there.
_OWN_ATTRIBUTES = list(nn.Module().__dict__)
_FIRST_OWN, _LAST_OWN = _OWN_ATTRIBUTES[0], _OWN_ATTRIBUTES[-1]
_NUM_BEFORE_LAST = len(_OWN_ATTRIBUTES) - 1
_INDISTINCT = (
    "the hook {hook} holds its module ({module}), and several replicas or parts of a batch on one device "
    "({devices}) call it. What it stores by module or by device may be of one replica only. Use the hook on "
    "the plain module, model.module, or give each replica its own device."
)
_is_tracked, _own_attributes = gc.is_tracked, attrgetter("__dict__")
_new: Any = object.__new__  # of any class, whatever its own __new__ asks for
_set_dict: Any = nn.Module.__dict__["__dict__"].__set__  # of any class, whatever its __setattr__ does


class _CollectorPause:
    """Keeps Python's garbage collector from scanning thousands of objects just made, again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0 and self._was_enabled:
                gc.enable()

    def end(self) -> None:
        """End all pauses, in the child of a fork: the threads that paused it do not exist there."""
        if self._num_open and self._was_enabled:
            gc.enable()
        self.__init__()  # type: ignore[misc]


collector_paused = _CollectorPause()
in_forked_child(collector_paused.end)


class Blueprint:
    """The structure of `root` at the moment when the blueprint is made.

    Attributes:
        modules: every module of the tree, then modules that are only reachable through attributes ("hidden").
        parameters: id -> tensor, of all that may need a gradient: parameters, and hidden leaf tensors.
        buffers: id -> tensor, of the buffers that need none.
        constants: id -> tensor, of plain tensors that are attributes, also of parameters and buffers, and need no
            gradient. (Those in a list or dict are left out, so that a list to which replicas append is the live
            module's own.)
        histories: id -> tensor, of tensors in attributes that have a history; a replica cannot use these.
        without_data: parameters on the meta device. What is there is in none of the above: replicas share it.
        compiled: whether an attribute or a class holds a function made by torch.compile. Such functions close over the
            live module, and are rebound like any other.
        replays_cuda_graphs: whether such a function replays CUDA graphs.
        assigned: what forwards have left on modules alike in all replicas, by number of the module and name: the last
            value, and how many there were before; `num_assigned` in all. `lost`: of what is not alike.
        why_not_captured: why steps are not launched as graphs of kernels (engines/graphed.py); "": no reason is known.
        plans: of steps, by their kinds, for as long as the structure is this one (engines/step_plan.py).

    Raises:
        ValueError: a lazy module that has not had its first input yet; names the remedy.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = modules = [root]
        self.constants: dict[int, torch.Tensor] = {}
        self.histories: dict[int, torch.Tensor] = {}
        self._to_rebind: dict[int, list[str]] = {}  # id of a module -> its attributes that refer to live objects
        self._script_classes: set[type] = set()
        self._copied_by_class: dict[type, Any] = {}  # by class, its own `_replicate_for_data_parallel`
        self._script_attributes: list[tuple[int, str, Any]] = []  # id of a module, name, and value that refers
        self._slotted_classes: set[type] = set()  # those with `__slots__`
        self._slots: list[
            tuple[int, types.MemberDescriptorType, Any]
        ] = []  # id of a module, its slots and their values
        self.assigned: dict[tuple[int, str], tuple[int, Any]] = {}
        self.num_assigned = 0
        self.lost: set[tuple[int, str]] = set()
        self.plans: dict[Hashable, Any] = {}
        self.why_not_captured = ""
        self._modes_assigned: set[tuple[int, str]] = set()
        self.compiled = self.replays_cuda_graphs = False
        self._to_search: list[tuple[dict[str, Any], str]] = []  # attributes that may refer to live objects later
        self._num_registered = 0
        parameters: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        found: dict[int, nn.Module | torch.Tensor] = {}
        known = {id(root), id(None)}
        classes: set[type] = set()
        for module in modules:  # grows at its end
            attributes = module.__dict__
            if type(module) not in classes:
                classes.add(type(module))
                self._inspect_class(module)
            if self._script_classes and type(module) in self._script_classes:
                attributes = torchscript.script_parts(module)
                self._inspect_script_attributes(module, found)
            if children := attributes["_modules"]:
                for child in children.values():
                    if id(child) not in known:
                        known.add(id(child))
                        modules.append(child)
            if inside := attributes["_parameters"]:
                parameters += inside.values()
            if inside := attributes["_buffers"]:
                buffers += inside.values()
            # Nearly always nn.Module's own attributes come first; then the others are those after them.
            others: Iterator[tuple[str, Any]] = islice(attributes.items(), _NUM_BEFORE_LAST, None)
            if next(iter(attributes)) != _FIRST_OWN or next(others, ("",))[0] != _LAST_OWN:
                others = ((name, value) for name, value in attributes.items() if name not in _OWN_ATTRIBUTES)
            for name, value in others:
                # An object that the garbage collector does not track refers to none that it tracks; it tracks modules.
                if _is_tracked(value) and not is_inert(value):
                    self._inspect_attribute(module, name, found)
            if self._slotted_classes and type(module) in self._slotted_classes:
                for _, slot, value in filled_slots(module):
                    self._inspect_value(value, reachable(value), found)
                    self._slots.append((id(module), slot, value))
            if (
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
            ):
                for name in HOOKS:
                    self._inspect_attribute(module, name, found)
            if module is modules[-1]:  # the tree is complete: now modules that only attributes refer to
                self._num_registered = self._num_registered or len(modules)
                hidden = [m for m in found.values() if isinstance(m, nn.Module) and id(m) not in known]
                known.update(map(id, hidden))
                modules.extend(hidden)
        check_initialized(root, chain(parameters, buffers))
        self.parameters = {id(parameter): parameter for parameter in parameters if parameter is not None}
        self.buffers = {id(buffer): buffer for buffer in buffers if buffer is not None and not buffer.is_meta}
        self.without_data = [parameter for parameter in self.parameters.values() if parameter.is_meta]
        for parameter in self.without_data:
            del self.parameters[id(parameter)]
        self._sort_tensors(found)

    @cached_property
    def is_reusable(self) -> bool:
        """Whether `is_current` can ever be True: what the blueprint follows from can be compared.

        Not where a function in an attribute or hook refers to a module or a parameter; nor where only a weak reference
        leads to one, which would be kept alive here; nor where a class copies what forward may change, or has slots.
        """
        if self._script_classes or self._copied_by_class or self._slotted_classes or self.compiled or self.histories:
            return False
        if not all([parameter.is_leaf for parameter in self.parameters.values()] + [*map(is_plain, self.tensors)]):
            return False
        if not self._to_rebind:
            return True
        registered = {*map(id, self.root.modules()), *map(id, self.root.parameters())}
        return not any(may_refer_later(reachable(value), registered) for _, _, value in self._referring_attributes())

    @cached_property
    def observers(self) -> dict[int, tuple[nn.Module, Any]]:
        """By id, each hook that observes its module (see `references.observes`), with that module."""
        hooks = [
            (module, hook)
            for module in (self.modules if self._to_rebind else ())
            for name in self._to_rebind.get(id(module), ())
            if name in HOOKS
            for hook in module.__dict__[name].values()
        ]
        if not hooks:
            return {}
        own_code = {(cls.__module__, cls.__qualname__) for module in self.modules for cls in type(module).__mro__}
        return {id(hook): (module, hook) for module, hook in hooks if observes(hook, module, own_code)}

    def constants_on(self, source: torch.device) -> dict[int, torch.Tensor]:
        """Return the constants that are copied with a module on `source`; those on other devices stay there."""
        return {key: c for key, c in self.constants.items() if _devices.same_device(c.device, source)}

    @cached_property
    def tracker(self) -> ChangeTracker:
        """What finds changes since its first use."""
        return ChangeTracker(self.modules)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters, buffers and constants."""
        return [*self.parameters.values(), *self.buffers.values(), *self.constants.values()]

    @cached_property
    def _tensor_snapshot(self) -> TensorSnapshot:
        return TensorSnapshot(self.tensors)

    def keep(self) -> None:
        """Take the module as it is now for what `is_current` compares with."""
        if self.is_reusable:
            self.tracker, self._tensor_snapshot  # noqa: B018 - made on first use

    def is_current(self, module: nn.Module) -> bool:
        """Return whether a blueprint of `module` would be the same as this one."""
        if module is not self.root or not self.is_reusable or not self.tracker.is_current():
            return False
        if not self._tensor_snapshot.is_current():  # their memory and flags
            return False
        # Has an attribute come to refer to a module or tensor?
        return not (self._to_search and any(references(attributes[name]) for attributes, name in self._to_search))

    def assign(self, number: int, name: str, value: Any) -> None:
        """Give a live module an attribute that all replicas have set alike: that makes no other structure.

        But for the first change of a mode, which may be a flag for what is done once.

        Args:
            number: of the module.
            value: `GONE`: the attribute is deleted.
        """
        attributes, key = self.modules[number].__dict__, (number, name)
        is_mode = type(value) in MODES or type(attributes.get(name, GONE)) in MODES
        if value is GONE:
            attributes.pop(name, None)
        else:
            attributes[name] = value
        if self.is_reusable:
            self.tracker.put(number, name, value)
        self.num_assigned += 1
        self.assigned[key] = (self.num_assigned, value)
        if is_mode and key not in self._modes_assigned:
            self._modes_assigned.add(key)
            self.__dict__.pop("signature", None)
            self.plans.clear()

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What is equal for two blueprints of one root if they have the same structure.

        That is: no module and no attribute that refers to one was replaced, no mode was switched, and the same
        parameters need gradients. Modes are attributes that are bools, strings or None, as `training` is.
        """
        return (
            *[parameter.requires_grad for parameter in self.parameters.values()],
            *map(id, self.modules),
            *[module.training for module in self.modules],
            sum([len(module.__dict__[kind]) for module in self.modules for kind in HOOKS if kind in module.__dict__]),
            # One number, because a tuple is hashed as a whole each time that it is looked up.
            hash(tuple([value for value in self._other_attributes() if type(value) in MODES])),
            *[(module, name, id(value)) for module, name, value in self._referring_attributes()],
        )

    def _other_attributes(self) -> Iterator[Any]:
        """Return the values of the attributes that are not nn.Module's own, which nearly always come first."""
        values = [module.__dict__.values() for module in self.modules]
        return chain.from_iterable([islice(of_module, _NUM_BEFORE_LAST + 1, None) for of_module in values])

    @cached_property
    def attribute_dicts(self) -> list[dict[Any, Any]]:
        """The dicts that hold what the modules have: attributes, children, parameters, buffers and hooks."""
        return attribute_dicts(self.modules)

    @cached_property
    def names(self) -> list[str]:
        """The modules' names in messages (see `names_of`)."""
        return names_of(self.modules, self.root)

    def stamp(self, tensors: Mapping[int, torch.Tensor]) -> tuple[list[nn.Module], list["Link"]]:
        """Return the modules of a new replica, the root first; it has `tensors[id(t)]` for the live module's tensor t.

        Where `tensors` has nothing, the replica has the live tensor itself; the others get its attributes. Also returns
        the attributes by which the replica may refer to itself.
        """
        replicas: list[Any] = [*map(_new, map(type, self.modules))]
        own: dict[int, Any] = dict(zip(map(id, self.modules), replicas, strict=True))
        own.update(tensors)
        for live in self.tensors:
            if live.__dict__ and id(live) in tensors:
                carry_attributes(live, [tensors[id(live)]], tensors)
        parameters_differ = not tensors.keys().isdisjoint(self.parameters)
        buffers_differ = parameters_differ or not tensors.keys().isdisjoint(self.buffers)
        for module, replica in zip(self.modules, replicas, strict=True):
            attributes = module.__dict__.copy()
            if self._script_classes and type(module) in self._script_classes:
                attributes = torchscript.script_parts(module)
            elif self._copied_by_class and type(module) in self._copied_by_class:
                copied = self._copied_by_class[type(module)](module)
                attributes = {**copied.__dict__, **{name: attributes[name] for name in REGISTRIES}}
                attributes.pop("_is_replica", None)
            attributes["_parameters"] = inside = attributes["_parameters"].copy()
            if inside and parameters_differ:
                for name, tensor in inside.items():
                    inside[name] = own.get(id(tensor), tensor)
            attributes["_buffers"] = inside = attributes["_buffers"].copy()
            if inside and buffers_differ:
                for name, tensor in inside.items():
                    inside[name] = own.get(id(tensor), tensor)
            attributes["_modules"] = inside = attributes["_modules"].copy()
            if inside:
                for name, child in inside.items():
                    inside[name] = own.get(id(child), child)
            for name in (*HOOKS, *HOOK_FLAGS):
                hooks = attributes[name]
                attributes[name] = hooks.copy() if hooks else OrderedDict()
            _set_dict(replica, attributes)
        # By this torch warns of zero_grad. Only the root has it: libraries take it to mean that parameters() is empty.
        replicas[0].__dict__["_is_replica"] = True
        links: list[Link] = []
        if self._to_rebind or self._script_attributes or self._slots:
            referring = self._referring_attributes()
            links = [(setitem, own[key].__dict__, name, value) for key, name, value in referring]
            links += [(type(slot).__set__, slot, own[key], value) for key, slot, value in self._slots]
            # The live tensors too, where they are the replica's own: a list that holds any is each replica's own.
            self._rebind_attributes({**self.parameters, **self.buffers, **own})
        if len(self.modules) > self._num_registered:  # weak references keep none of them alive
            links.append((setitem, replicas[0].__dict__, "_hidden_replicas", None))
            replicas[0].__dict__["_hidden_replicas"] = replicas[self._num_registered :]
        for replica in replicas if self._script_classes else ():
            if type(replica) in self._script_classes:
                torchscript.script_from_parts(replica)
        return replicas, links

    def buffers_for(self, copies: Mapping[int, torch.Tensor], *, shared: bool) -> dict[int, torch.Tensor]:
        """Return a replica's tensors in place of the live buffers, for `stamp`.

        Args:
            copies: by id, copies of those buffers that are not on the replica's device.
            shared: whether the replica has the other buffers themselves, or copies.
        """
        moved = {key: copies[key] for key in self.buffers.keys() & copies.keys()} if copies else {}
        if shared:
            return moved
        here = {key: buffer for key, buffer in self.buffers.items() if key not in moved}
        return {**moved, **dict(zip(here, foreach.clones(list(here.values())), strict=True))}

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return a live tensor's name for messages: that of the parameter, or of the attribute that holds it."""
        for name, parameter in self.root.named_parameters():
            if parameter is tensor:
                return f"parameter {name!r}"
        for name, buffer in self.root.named_buffers():
            if buffer is tensor:
                return f"buffer {name!r}"
        for path, module in self.root.named_modules():
            for name in self._to_rebind.get(id(module), ()):
                if any(reference is tensor for reference in references(module.__dict__[name])):
                    return f"attribute {f'{path}.{name}' if path else name!r}"
        return f"a tensor of shape {tuple(tensor.shape)}"

    def _inspect_class(self, module: nn.Module) -> None:
        cls = type(module)
        if any(vars(base).get("__slots__") for base in cls.__mro__):
            self._slotted_classes.add(cls)
        if torchscript.is_scripted(module):
            if not torchscript.can_take_scripts_apart():
                raise TypeError(
                    f"{cls.__name__} is a ScriptModule, which torch {torch.__version__} cannot replicate: "
                    "wrap the Python module that it was made from"
                )
            self._script_classes.add(cls)
        replicate: Any = cls._replicate_for_data_parallel
        if not replicate.__module__.startswith("torch."):
            self._copied_by_class[cls] = replicate
        self.compiled = self.compiled or compiler.is_compiled(getattr(cls, "forward", None))

    def _inspect_script_attributes(self, module: nn.Module, found: dict[int, nn.Module | torch.Tensor]) -> None:
        for name, value in torchscript.script_attributes(module).items():
            referred = references(value)
            if issubclass(type(value), torch.Tensor) and not value.requires_grad:
                self.constants[id(value)] = value
            if referred:
                self._script_attributes.append((id(module), name, value))
                found.update((id(reference), reference) for reference in referred)

    def _inspect_attribute(self, module: nn.Module, name: str, found: dict[int, nn.Module | torch.Tensor]) -> None:
        """Add what an attribute refers to to `found`; remember the attribute if it refers to anything."""
        value = module.__dict__[name]
        in_value = reachable(value)
        if self._inspect_value(value, in_value, found):
            self._to_rebind.setdefault(id(module), []).append(name)
        elif may_refer_later(in_value):
            self._to_search.append((module.__dict__, name))

    def _inspect_value(self, value: Any, in_value: Sequence[Any], found: dict[int, nn.Module | torch.Tensor]) -> bool:
        """Add what is live of `in_value`, all that a value leads to, to `found`; return whether anything is."""
        self.compiled = self.compiled or compiler.is_compiled(value)
        self.replays_cuda_graphs = self.replays_cuda_graphs or compiler.replays_cuda_graphs(value)
        if issubclass(type(value), torch.Tensor) and not value.requires_grad and not value.is_meta:
            self.constants[id(value)] = value
        referred = live_among(in_value)
        found.update((id(reference), reference) for reference in referred)
        return bool(referred)

    def _sort_tensors(self, found: dict[int, nn.Module | torch.Tensor]) -> None:
        if any(buffer.requires_grad for buffer in self.buffers.values()):
            need_grad = {key: buffer for key, buffer in self.buffers.items() if buffer.requires_grad}
            self.parameters.update(need_grad)
            self.buffers = {key: buffer for key, buffer in self.buffers.items() if key not in need_grad}
        of_tensors = filter(None, map(_own_attributes, chain(self.parameters.values(), self.buffers.values())))
        for value in chain.from_iterable(map(dict.values, of_tensors)):  # such as `weight.full_precision`
            if type(value) is torch.Tensor and is_plain(value) and not value.requires_grad:
                self.constants[id(value)] = value
        for key, tensor in found.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            if tensor.requires_grad and key not in self.parameters:
                (self.parameters if tensor.is_leaf else self.histories)[key] = tensor
        for key in self.constants.keys() & (self.parameters.keys() | self.buffers.keys()):
            del self.constants[key]

    def _referring_attributes(self) -> Iterator[tuple[int, str, Any]]:
        for module in self.modules if self._to_rebind else ():
            for name in self._to_rebind.get(id(module), ()):
                yield id(module), name, module.__dict__[name]

    def _rebind_attributes(self, own: Mapping[int, Any]) -> None:
        memo: dict[int, Any] = {key: hook for key, (_, hook) in self.observers.items()}  # these stay as they are
        for key, name, value in self._referring_attributes():
            rebound = rebind(value, own, memo)
            if rebound is not value or name not in HOOKS:  # else it is the replica's own already
                own[key].__dict__[name] = rebound
        for key, name, value in self._script_attributes:
            torchscript.set_script_attribute(own[key], name, rebind(value, own, memo))
        for key, slot, value in self._slots:
            slot.__set__(own[key], rebind(value, own, memo))


def warn_of_observers(blueprint: Blueprint, devices: Sequence[torch.device], warnings: ModelWarnings) -> None:
    """Warn if a hook that observes its module cannot tell replicas apart, because they are on one device."""
    if len(set(devices)) < len(devices):
        for module, hook in blueprint.observers.values():
            name = next((name for name, other in blueprint.root.named_modules() if other is module), "")
            warnings.give(
                _INDISTINCT.format(
                    hook=getattr(hook, "__qualname__", type(hook).__name__),
                    module=f"{name!r}, a {type(module).__name__}" if name else type(module).__name__,
                    devices=", ".join(map(str, devices)),
                )
            )


def names_of(modules: Sequence[nn.Module], root: nn.Module) -> list[str]:
    """Return the paths of modules in `root`, for messages; the class of a module to which only an attribute leads."""
    paths = {id(module): path for path, module in root.named_modules()}
    return [paths.get(id(module), f"a {type(module).__name__}") for module in modules]


# What sets an attribute, where (the dict of a replica's module, or a slot), of what (a name, or the module), and the
# live value.
Link: TypeAlias = tuple[Callable[..., object], Any, Any, Any]


def unlinked_at_deletion(links: list[Link]) -> at_deletion | None:
    """Return what sets attributes to the live values when it goes: a replica is freed with the last reference to it."""
    if not links:
        return None
    return at_deletion(*[map(set_, [owner], [name], [value]) for set_, owner, name, value in links])
