"""replicate: copies of a module on several devices, stamped from a blueprint.

A `Blueprint` knows a module's structure: its modules (each once, however often it is shared), the parameters and
buffers in them, and which attributes point back at the live module. Before every use it is brought up to date, which
costs a comparison a module; then it *stamps* replicas: new objects of the same classes whose `__dict__` is a copy of
the live one, with children, parameters, buffers and those attributes replaced by the replica's own. Nothing is called
and nothing is assigned through `setattr`, so no class can notice or interfere.

    live module      refresh()      what changed since the last time is looked at again
        |
        v
    blueprint        stamp(tensors) tensors: id of a live parameter or buffer -> the replica's
        |
        v
    replica          complete: parameters(), state_dict(), len() of a ParameterList, ties and sharing as in the original

Attributes that a replica assigns are the replica's own and go with it; lists and dicts that it changes in place are
the live module's, unless they hold modules, parameters or methods, when each replica has its own.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from manyhands import devices as _devices
from manyhands import torch_private
from manyhands.devices import DeviceLike
from manyhands.rebind import INERT, rebind, references

M = TypeVar("M", bound=nn.Module)

# What nn.Module itself keeps in `__dict__`: its tables are replaced by the stamp, and hooks are looked at separately.
_OWN_ATTRIBUTES = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Blueprint:
    """The structure of `root`, kept between forwards.

    Attributes, valid after `refresh`:
        modules: every module of the tree, then modules that are only reachable through attributes ("hidden").
        parameters: id -> tensor, of all that may need a gradient: parameters, and hidden leaf tensors.
        buffers: id -> tensor, of the buffers that need none.
        constants: id -> tensor, of plain tensors in attributes that need no gradient.
        histories: id -> tensor, of tensors in attributes that have a history; a replica cannot use these.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: list[nn.Module] = []
        self.parameters: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.histories: dict[int, torch.Tensor] = {}
        self._scans: dict[int, _Scan] = {}
        self._to_rebind: list[tuple[str, ...]] = []  # attributes to rebind, one entry a module

    def refresh(self) -> bool:
        """Bring the blueprint up to date with the live module; return whether its structure changed.

        Raises:
            TypeError: a module of a kind that cannot be replicated; names it and says what to do.
        """
        modules = _tree(self.root)
        known = {id(module) for module in modules}
        scans: dict[int, _Scan] = {}
        to_rebind: list[tuple[str, ...]] = []
        found_tensors: dict[int, torch.Tensor] = {}
        changed = False
        for module in modules:  # grows at its end while hidden modules are found
            attributes = module.__dict__
            scan = self._scans.get(id(module))
            if scan is None or not scan.is_current(attributes):
                new = _Scan.of(module)
                changed |= scan is None or scan.suspects != new.suspects
                scan = new
            scans[id(module)] = scan
            if not scan.suspects and not any(attributes[hooks] for hooks in _HOOKS):
                to_rebind.append(())
                continue
            pointing = []
            for name in (*(name for name, _ in scan.suspects), *_HOOKS):
                for reference in references(attributes[name]):
                    if name not in pointing:
                        pointing.append(name)
                    if isinstance(reference, torch.Tensor):
                        found_tensors[id(reference)] = reference
                    elif id(reference) not in known:
                        hidden = [m for m in _tree(reference) if id(m) not in known]
                        known.update(map(id, hidden))
                        modules.extend(hidden)
            to_rebind.append(tuple(pointing))
        changed |= scans.keys() != self._scans.keys()
        self.modules, self._scans, self._to_rebind = modules, scans, to_rebind
        self._collect_tensors(found_tensors)
        return changed

    def check_device(self, device: torch.device) -> None:
        """Check that every parameter and buffer of the tree is on `device`.

        Raises:
            RuntimeError: one is not; names it, both devices and the remedy (the type is torch's).
        """
        for tensor in (*self.parameters.values(), *self.buffers.values()):
            if tensor.device != device and not _devices.same_device(tensor.device, device):
                named = (*self.root.named_parameters(), *self.root.named_buffers())
                name = next((name for name, other in named if other is tensor), None)
                if name is None:
                    continue  # hidden: it is copied to each replica's device from where it is
                raise RuntimeError(
                    f"module must have its parameters and buffers on device {device} (device_ids[0]), but {name} is "
                    f"on {tensor.device}. Move the model first: model.to({str(device)!r})"
                )

    def stamp(self, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
        """Return a new replica of `root` that has `tensors[id(t)]` wherever the live module has tensor t."""
        replicas: dict[int, Any] = {id(module): _new(type(module)) for module in self.modules}
        replicas[id(None)] = None
        own: dict[int, Any] = {**tensors, id(None): None}
        replacements: dict[int, Any] | None = None
        memo: dict[int, Any] = {}
        for module, names in zip(self.modules, self._to_rebind, strict=True):
            replica = replicas[id(module)]
            attributes = module.__dict__.copy()
            attributes["_parameters"] = {name: own[id(t)] for name, t in attributes["_parameters"].items()}
            attributes["_buffers"] = {name: own[id(t)] for name, t in attributes["_buffers"].items()}
            attributes["_modules"] = {name: replicas[id(child)] for name, child in attributes["_modules"].items()}
            attributes["_is_replica"] = True
            slots = _slots(type(module))  # type: ignore[arg-type]  # mypy doubts that classes are hashable
            if names or slots:
                if replacements is None:
                    replacements = {**own, **replicas}
                    del replacements[id(None)]
                for name in names:
                    attributes[name] = rebind(attributes[name], replacements, memo)
                for name in slots:
                    if hasattr(module, name):
                        object.__setattr__(replica, name, rebind(getattr(module, name), replacements, memo))
            object.__setattr__(replica, "__dict__", attributes)
        return replicas[id(self.root)]  # type: ignore[no-any-return]

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return how a user would find a tensor of the live module: a parameter's name, or the attribute it is in."""
        for name, parameter in self.root.named_parameters():
            if parameter is tensor:
                return f"parameter {name!r}"
        for path, module in self.root.named_modules():
            for name, value in module.__dict__.items():
                if name not in _OWN_ATTRIBUTES and any(reference is tensor for reference in references(value)):
                    return f"attribute {f'{path}.{name}' if path else name!r}"
        return f"a tensor of shape {tuple(tensor.shape)}"

    def _collect_tensors(self, found: dict[int, torch.Tensor]) -> None:
        parameters: dict[int, torch.Tensor] = {}
        buffers: dict[int, torch.Tensor] = {}
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
            for buffer in module._buffers.values():
                if buffer is not None:
                    (parameters if buffer.requires_grad else buffers)[id(buffer)] = buffer
        self.constants, self.histories = {}, {}
        for key, tensor in found.items():
            if key in parameters or key in buffers:
                continue
            if not tensor.requires_grad:
                self.constants[key] = tensor
            elif tensor.is_leaf:
                parameters[key] = tensor
            else:
                self.histories[key] = tensor
        self.parameters, self.buffers = parameters, buffers


@dataclass(frozen=True, slots=True)
class _Scan:
    """What was found in one module's attributes.

    `suspects` are the attributes that can point at something live, with the ids of their values; all others are inert.
    `snapshot` is what the attributes were, to compare with; None where they hold a tensor, which must not be kept
    alive, so that module is looked at again every time.
    """

    suspects: tuple[tuple[str, int], ...]
    snapshot: dict[str, Any] | None

    @classmethod
    def of(cls, module: nn.Module) -> "_Scan":
        _check_replicable(module)
        attributes = module.__dict__
        others = [(name, value) for name, value in attributes.items() if name not in _OWN_ATTRIBUTES]
        suspects = tuple((name, id(value)) for name, value in others if type(value) not in INERT)
        holds_tensor = any(isinstance(value, torch.Tensor) for _, value in others)
        return cls(suspects, None if holds_tensor else attributes.copy())

    def is_current(self, attributes: dict[str, Any]) -> bool:
        if self.snapshot is None:
            return False
        try:
            return bool(self.snapshot == attributes)  # identical values, nearly always: one pass in C
        except Exception:  # noqa: BLE001 - a value whose comparison is no truth value (an array) was replaced
            return False


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
        network's own, storage is shared; buffers only with the first such replica, so updates there persist.

    Raises:
        TypeError: a module that cannot be replicated. ValueError: a device that is not there.
    """
    targets = [_devices.resolve_one(device, "devices") for device in devices]
    blueprint = Blueprint(network)
    blueprint.refresh()
    source = next((tensor.device for tensor in blueprint.parameters.values()), torch.device("cpu"))
    shares_buffers: set[int] = set()
    replicas = []
    for device in targets:
        tensors = {}
        for key, parameter in blueprint.parameters.items():
            copy = _devices.copy_to(parameter, device)
            if detach or not parameter.requires_grad:
                copy = copy.detach()
            tensors[key] = copy.view_as(copy) if copy is parameter else copy
        for key, buffer in blueprint.buffers.items():
            tensors[key] = buffer_for(buffer, device, shared=key not in shares_buffers)
            if tensors[key] is buffer:
                shares_buffers.add(key)
        tensors.update((key, constant_for(t, source, device)) for key, t in blueprint.constants.items())
        replicas.append(blueprint.stamp(tensors))
    return replicas  # type: ignore[return-value]


def buffer_for(buffer: torch.Tensor, device: torch.device, *, shared: bool) -> torch.Tensor:
    """Return what a replica on `device` has for a live buffer: the buffer itself if `shared`, else a copy."""
    if shared and _devices.same_device(buffer.device, device):
        return buffer
    copy = buffer.detach().to(device, copy=True)
    return copy if type(buffer) is torch.Tensor else copy.as_subclass(type(buffer))


def constant_for(constant: torch.Tensor, source: torch.device, device: torch.device) -> torch.Tensor:
    """Return what a replica on `device` has for a plain tensor in an attribute of a module that is on `source`.

    One that lies beside the module's parameters follows them; one that lies elsewhere was put there on purpose.
    """
    return _devices.copy_to(constant, device) if _devices.same_device(constant.device, source) else constant


_new: Any = object.__new__  # of any class, whatever its own __new__ asks for


def _tree(root: nn.Module) -> list[nn.Module]:
    """Return root and its descendants, each once."""
    found = [root]
    seen = {id(root), id(None)}
    for module in found:  # grows at its end
        for child in module._modules.values():
            if id(child) not in seen:
                seen.add(id(child))
                found.append(child)  # type: ignore[arg-type]
    return found


def _check_replicable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(module).__name__} is a ScriptModule, which cannot be replicated yet: wrap the Python module that "
            "it was made from"
        )
    if torch_private.is_compiled(module):
        raise TypeError(
            f"{type(module).__name__} is compiled, and its compiled call would run the original in every replica: "
            "wrap the module that is not compiled"
        )


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    return tuple(_slot_names(cls))


def _slot_names(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name
