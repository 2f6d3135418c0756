"""replicate: copies of a module on several devices, linked to it for autograd."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from unisono.primitives.blueprint import Blueprint, check_initialized, collector_paused, warn_of_observers
from unisono.primitives.checks import check_module
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds
from unisono.runtime.model_warnings import of_process
from unisono.runtime.torch_private import process_groups

M = TypeVar("M", bound=nn.Module)

_NOT_WHOLE = (
    "DataParallel needs whole parameters in each process, as plain tensors, but {what}. The library that "
    "shards parameters also sums their gradients: use it alone, without DataParallel."
)


def replicate(network: M, devices: DeviceIds, detach: bool = False) -> list[M]:
    """Return one copy of `network` for each device; the copies' parameters are linked to its own for autograd.

        >>> model = torch.nn.Linear(5, 2)
        >>> first, second = unisono.replicate(model, ["cpu", "cpu"])
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
        TypeError: no module.
        ValueError: a device that does not exist; a lazy module that has not had its first input yet.
    """
    check_module(network, "network")
    targets = _devices.resolve_each(devices, "devices")
    with collector_paused:
        blueprint = Blueprint(network)
        source = next((tensor.device for tensor in blueprint.parameters.values()), torch.device("cpu"))
        replicas = []
        for number, device in enumerate(targets):
            buffers = blueprint.buffers.items()
            copies = {
                k: _devices.copied_to(b, device) for k, b in buffers if not _devices.same_device(b.device, device)
            }
            tensors = blueprint.buffers_for(copies, shared=device not in targets[:number])
            if detach or device != source:
                for key, parameter in blueprint.parameters.items():
                    there = _devices.moved_to(parameter, device)
                    tensors[key] = there.detach() if detach else there
            for key, constant in blueprint.constants_on(source).items():
                tensors[key] = _devices.moved_to(constant, device)
            (root, *_), _ = blueprint.stamp(tensors)
            replicas.append(root)
        warn_of_observers(blueprint, targets, of_process)
    return replicas  # type: ignore[return-value]


def live_tensors_of(replicas: Sequence[Any], live: nn.Module) -> list[dict[int, torch.Tensor]]:
    """Return for each replica the live parameters and buffers by the ids of its own of the same names.

    A user's own `replicate` may return anything.
    """
    named = [*live.named_parameters(), *live.named_buffers()]
    own = [
        {**dict(each.named_parameters()), **dict(each.named_buffers())} if isinstance(each, nn.Module) else {}
        for each in replicas
    ]
    return [{id(of[name]): tensor for name, tensor in named if name in of} for of in own]


def check_can_be_replicated(root: nn.Module, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Check that those of `tensors` that are parameters or buffers of `root` are on `device`, and initialized.

    Raises:
        RuntimeError: one is not; names it, both devices and the remedy (the type is torch's).
        ValueError: one is not initialized.
        TypeError: one is sharded over processes.
    """
    tensors = list(tensors)
    check_initialized(root, tensors)
    _check_whole(root, tensors)
    for tensor in tensors:
        if tensor.device != device and not _devices.same_device(tensor.device, device):
            named = (*root.named_parameters(), *(() if tensor.is_meta else root.named_buffers()))
            name = next((name for name, other in named if other is tensor), None)
            if name is None:
                continue  # only an attribute refers to it: each replica gets a copy; or it is a buffer without data
            where = f"module must have its parameters and buffers on device {device} (device_ids[0]), but {name} is on"
            if tensor.is_meta:
                raise RuntimeError(
                    f"{where} the meta device, which stores no data. First allocate the module, "
                    f"model.to_empty(device={str(device)!r}), and load or initialise its parameters. A module that "
                    "is only a template for torch.func.functional_call belongs in a list: self.base = [base]."
                )
            raise RuntimeError(
                f"{where} {tensor.device}. First move the whole module there, model.to({str(device)!r}), or "
                "wrap only the part that runs on several devices."
            )


def _check_whole(root: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Raise TypeError if some parameters of `root` are sharded: no process has them as a whole then."""
    kinds = process_groups.sharded_tensor_types()
    sharded = next((path for path, module in root.named_modules() if process_groups.is_sharded(module)), None)
    if sharded is not None:
        raise TypeError(_NOT_WHOLE.format(what=f"FSDP manages {f'layer {sharded!r}' if sharded else 'the module'}"))
    part = next((tensor for tensor in tensors if isinstance(tensor, kinds)), None)
    if part is not None:
        named = (*root.named_parameters(), *root.named_buffers())
        name = next((name for name, tensor in named if tensor is part), "a tensor of it")
        raise TypeError(_NOT_WHOLE.format(what=f"{name} is a {type(part).__name__}"))
