"""replicate: copies of a module on several devices, stamped from a blueprint.

A `Blueprint` is one look at a live module: its modules (each once, however often it is shared), the parameters and
buffers in them, and the attributes that point back at the live module. It is taken anew for every use, so it is never
stale: one pass, a microsecond or so a module. From it replicas are *stamped*: new objects of the same classes whose
`__dict__` is a copy of the live one, with children, parameters, buffers and those attributes replaced by the
replica's own. Nothing is called and nothing is assigned through `setattr`, so no class can notice or interfere.

A replica is complete: `parameters()`, `state_dict()`, the `len()` of a ParameterList, ties and sharing are those of the
original. Attributes that a replica assigns are its own and go with it; lists and dicts that it changes in place are
the live module's, unless they hold modules, parameters or methods, when each replica has its own.
"""

import contextlib
import gc
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from manyhands import devices as _devices
from manyhands import torch_private
from manyhands.devices import DeviceLike
from manyhands.rebind import INERT, is_inert, rebind, references

M = TypeVar("M", bound=nn.Module)

# What nn.Module itself keeps in `__dict__`, in the order in which it puts it there.
_OWN_ATTRIBUTES = list(nn.Module().__dict__)
_NUM_OWN = len(_OWN_ATTRIBUTES)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _CollectorPause:
    """Keeps Python's garbage collector from looking, again and again, through thousands of objects just made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._was_enabled = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if self._num_open == 0 and self._was_enabled:
                    gc.enable()

    def end(self) -> None:
        """Forget who paused it, in the child of a fork: those threads do not exist there."""
        if self._num_open and self._was_enabled:
            gc.enable()
        self.__init__()  # type: ignore[misc]


_collector_paused = _CollectorPause()
os.register_at_fork(after_in_child=_collector_paused.end)


class Blueprint:
    """The structure of `root` at the moment when the blueprint is made.

    Attributes:
        modules: every module of the tree, then modules that are only reachable through attributes ("hidden").
        parameters: id -> tensor, of all that may need a gradient: parameters, and hidden leaf tensors.
        buffers: id -> tensor, of the buffers that need none.
        constants: id -> tensor, of plain tensors that are attributes and need no gradient. (In a list or dict they
            stay what they are, so that a list to which replicas append is the live module's own.)
        histories: id -> tensor, of tensors in attributes that have a history; a replica cannot use these.
        signature: equal for two blueprints of one root if no module and no pointing attribute was exchanged, no
            mode switched, and the same parameters need gradients.

    Raises:
        TypeError: a module of a kind that cannot be replicated; says what to do.
    """

    @_collector_paused()
    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = modules = [root]
        self.parameters: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.histories: dict[int, torch.Tensor] = {}
        self._to_rebind: dict[int, list[str]] = {}  # id of a module -> its attributes that point at something live
        self._slots: dict[type, list[str]] = {}  # of the classes that have any
        found: dict[int, nn.Module | torch.Tensor] = {}
        known = {id(root), id(None)}
        parameters, buffers = self.parameters, self.buffers
        classes: set[type] = set()
        self._num_registered = 0
        for module in modules:  # grows at its end
            attributes = module.__dict__
            for child in attributes["_modules"].values():
                if id(child) not in known:
                    known.add(id(child))
                    modules.append(child)
            for parameter in attributes["_parameters"].values():
                parameters[id(parameter)] = parameter
            for buffer in attributes["_buffers"].values():
                if buffer is not None:
                    (parameters if buffer.requires_grad else buffers)[id(buffer)] = buffer
            if type(module) not in classes:
                classes.add(type(module))
                self._look_at_class(module)
            for name in self._slots.get(type(module), ()) if self._slots else ():
                found.update((id(reference), reference) for reference in references(getattr(module, name, None)))
            for name, value in _attributes_of_its_own(attributes):
                if type(value) not in INERT and not is_inert(value):
                    self._look_at_attribute(module, name, found)
            if (
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
            ):
                for name in _HOOKS:
                    self._look_at_attribute(module, name, found)
            if module is modules[-1]:  # the tree is complete: now what is only reachable through attributes
                self._num_registered = self._num_registered or len(modules)
                hidden = [m for m in found.values() if isinstance(m, nn.Module) and id(m) not in known]
                known.update(map(id, hidden))
                modules.extend(hidden)
        self.parameters.pop(id(None), None)
        self._sort_tensors(found)
        self.signature = [
            *map(id, modules),
            *(module.training for module in modules),
            *(parameter.requires_grad for parameter in parameters.values()),
            *((module, name, id(value)) for module, name, value in self._pointing_attributes()),
        ]

    @_collector_paused()
    def stamp(self, tensors: Mapping[int, torch.Tensor]) -> "Stamped":
        """Return a new replica of `root` that has `tensors[id(t)]` wherever the live module has tensor t."""
        replicas: dict[int, Any] = {id(module): _new(type(module)) for module in self.modules}
        replicas[id(None)] = None
        own: dict[int, Any] = {**tensors, id(None): None}
        for module in self.modules:
            attributes = module.__dict__.copy()
            inside: dict[str, Any] = attributes["_parameters"]
            attributes["_parameters"] = {name: own[id(tensor)] for name, tensor in inside.items()} if inside else {}
            inside = attributes["_buffers"]
            attributes["_buffers"] = {name: own[id(tensor)] for name, tensor in inside.items()} if inside else {}
            inside = attributes["_modules"]
            attributes["_modules"] = {name: replicas[id(child)] for name, child in inside.items()} if inside else {}
            attributes["_is_replica"] = True
            _set(replicas[id(module)], "__dict__", attributes)
        root: nn.Module = replicas[id(self.root)]
        links: list[tuple[nn.Module, str, Any]] = []
        if self._to_rebind or self._slots:
            links = [(replicas[key], name, value) for key, name, value in self._pointing_attributes()]
            self._rebind_attributes(replicas, {**own, **replicas})
        if len(self.modules) > self._num_registered:  # nothing else may hold what only a weak reference leads to
            links.append((root, "_hidden_replicas", None))
            root.__dict__["_hidden_replicas"] = [replicas[id(m)] for m in self.modules[self._num_registered :]]
        return Stamped(root, links)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return how a user would find a tensor of the live module: a parameter's name, or the attribute it is in."""
        for name, parameter in self.root.named_parameters():
            if parameter is tensor:
                return f"parameter {name!r}"
        for path, module in self.root.named_modules():
            for name in self._to_rebind.get(id(module), ()):
                if any(reference is tensor for reference in references(module.__dict__[name])):
                    return f"attribute {f'{path}.{name}' if path else name!r}"
        return f"a tensor of shape {tuple(tensor.shape)}"

    def _look_at_class(self, module: nn.Module) -> None:
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{cls.__name__} is a ScriptModule, which cannot be replicated yet: wrap the Python module that it "
                "was made from"
            )
        slots = _slots.get(cls)
        if slots is None:
            slots = _slots[cls] = list(_slot_names(cls))
        if slots:
            self._slots[cls] = slots

    def _look_at_attribute(self, module: nn.Module, name: str, found: dict[int, nn.Module | torch.Tensor]) -> None:
        """Add what an attribute leads to to `found`; remember the attribute if it leads anywhere."""
        if torch_private.is_compiled(module):
            raise TypeError(
                f"{type(module).__name__} is compiled, and its compiled call would run the original in every replica: "
                "wrap the module that is not compiled"
            )
        value = module.__dict__[name]
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            self.constants[id(value)] = value
        led_to = references(value)
        if led_to:
            self._to_rebind.setdefault(id(module), []).append(name)
            found.update((id(reference), reference) for reference in led_to)

    def _sort_tensors(self, found: dict[int, nn.Module | torch.Tensor]) -> None:
        for key, tensor in found.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and key not in self.parameters:
                (self.parameters if tensor.is_leaf else self.histories)[key] = tensor
        for key in self.constants.keys() & (self.parameters.keys() | self.buffers.keys()):
            del self.constants[key]

    def _pointing_attributes(self) -> Iterator[tuple[int, str, Any]]:
        for module in self.modules if self._to_rebind else ():
            for name in self._to_rebind.get(id(module), ()):
                yield id(module), name, module.__dict__[name]

    def _rebind_attributes(self, replicas: Mapping[int, Any], replacements: dict[int, Any]) -> None:
        del replacements[id(None)]
        memo: dict[int, Any] = {}
        for key, name, value in self._pointing_attributes():
            replicas[key].__dict__[name] = rebind(value, replacements, memo)
        for module in self.modules if self._slots else ():
            for name in self._slots.get(type(module), ()):
                if hasattr(module, name):
                    _set(replicas[id(module)], name, rebind(getattr(module, name), replacements, memo))


@dataclass(frozen=True)
class Stamped:
    """A replica, and by which attributes it can refer to itself: (module of the replica, name, the live value)."""

    root: nn.Module
    links: list[tuple[nn.Module, str, Any]]

    def unlink(self) -> None:
        """Put the live values there, so that the replica goes with the last reference to it."""
        for module, name, value in self.links:
            module.__dict__[name] = value


def replicate(network: M, devices: Sequence[DeviceLike], detach: bool = False) -> list[M]:
    """Return one copy of `network` for each device; the copies' parameters are linked to its own for autograd.

        >>> model = torch.nn.Linear(5, 2)
        >>> first, second = manyhands.replicate(model, ["cpu", "cpu"])
        >>> first(torch.zeros(3, 5)).sum().backward()
        >>> model.bias.grad
        tensor([3., 3.])

    Args:
        network: the module; its parameters may be on any device.
        devices: one a replica: accelerator indices, strings or `torch.device`s; a device may be named twice.
        detach: leave the link out, for inference.

    Returns:
        Modules of the same classes, complete: parameters, buffers, children, attributes. Where the device is the
        network's own, parameters are the network's own too; buffers only in the first such replica, so that updates
        there persist and replicas do not write into each other's.

    Raises:
        TypeError: no module, or one that cannot be replicated. ValueError: a device that is not there.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network: expected a torch.nn.Module, got {network!r}")
    targets = _devices.resolve_each(devices, "devices")
    blueprint = Blueprint(network)
    source = next((tensor.device for tensor in blueprint.parameters.values()), torch.device("cpu"))
    replicas = []
    for number, device in enumerate(targets):
        tensors = dict(blueprint.parameters)
        if detach or device != source:
            for key, parameter in tensors.items():
                there = _devices.copy_to(parameter, device)
                tensors[key] = there.detach() if detach else there
        shared = device not in targets[:number]
        for key, buffer in blueprint.buffers.items():
            tensors[key] = buffer_for(buffer, device, shared=shared)
        for key, constant in blueprint.constants.items():
            tensors[key] = constant_for(constant, source, device)
        replicas.append(blueprint.stamp(tensors).root)
    return replicas  # type: ignore[return-value]


def check_device(root: nn.Module, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Check that those of `tensors` that are parameters or buffers of `root` are on `device`.

    Raises:
        RuntimeError: one is not; names it, both devices and the remedy (the type is torch's).
    """
    for tensor in tensors:
        if tensor.device != device and not _devices.same_device(tensor.device, device):
            named = (*root.named_parameters(), *root.named_buffers())
            name = next((name for name, other in named if other is tensor), None)
            if name is None:
                continue  # reached through an attribute only: each replica gets a copy from where it is
            raise RuntimeError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]), but {name} is on "
                f"{tensor.device}. Move the whole module there first, model.to({str(device)!r}), or wrap only the part "
                "of the model that is to run on several devices."
            )


def buffer_for(buffer: torch.Tensor, device: torch.device, *, shared: bool) -> torch.Tensor:
    """Return what a replica on `device` has for a live buffer: the buffer itself if `shared`, else a copy."""
    if shared and _devices.same_device(buffer.device, device):
        return buffer
    copy = _devices.copy_to(buffer, device)
    return copy.clone() if copy is buffer else copy


@contextlib.contextmanager
def unchanged_on_failure(buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back what buffers held if the block raises: a step that fails changes nothing."""
    before = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    except BaseException:
        for buffer, held in before:
            buffer.data.copy_(held)
        raise


def constant_for(constant: torch.Tensor, source: torch.device, device: torch.device) -> torch.Tensor:
    """Return what a replica on `device` has for a plain tensor in an attribute of a module that is on `source`.

    One that lies beside the module's parameters follows them; one that lies elsewhere was put there on purpose.
    """
    return _devices.copy_to(constant, device) if _devices.same_device(constant.device, source) else constant


def _attributes_of_its_own(attributes: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return name and value of the attributes that are not nn.Module's."""
    if list(islice(attributes, _NUM_OWN)) == _OWN_ATTRIBUTES:  # as nearly always: nn.Module.__init__ ran first
        return islice(attributes.items(), _NUM_OWN, None)
    return [(name, value) for name, value in attributes.items() if name not in _OWN_ATTRIBUTES]


_new: Any = object.__new__  # of any class, whatever its own __new__ asks for
_set = object.__setattr__  # of any class, whatever its own __setattr__ does


_slots: WeakKeyDictionary[type, list[str]] = WeakKeyDictionary()  # what _slot_names found, by class


def _slot_names(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name
