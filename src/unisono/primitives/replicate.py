"""replicate: copies of a module on several devices, linked to it for autograd."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from unisono.primitives.blueprint import Blueprint, collector_paused, warn_of_observers
from unisono.primitives.checks import check_module
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds
from unisono.runtime.model_warnings import of_process

M = TypeVar("M", bound=nn.Module)


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
                    if detach:
                        tensors[key] = _devices.moved_to(parameter, device).detach()
                    elif _devices.same_device(parameter.device, device):
                        tensors[key] = parameter
                    else:
                        tensors[key] = _Copied.apply(parameter, device)  # type: ignore[no-untyped-call]
            for key, constant in blueprint.constants_on(source).items():
                tensors[key] = _devices.moved_to(constant, device)
            (root, *_), _ = blueprint.stamp(tensors)
            replicas.append(root)
        warn_of_observers(blueprint, targets, of_process)
    return replicas  # type: ignore[return-value]


class _Copied(torch.autograd.Function):
    """A copy on another device. Its gradient may be sparse, as an embedding's is; that of `Tensor.to` may not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return _devices.copied_to(tensor, device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.device], output: torch.Tensor) -> None:
        ctx.devices = inputs[0].device, inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if grad is None else _devices.moved_to(grad, ctx.devices[0]), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, _: None) -> torch.Tensor | None:
        return None if tangent is None else _devices.copied_to(tangent, ctx.devices[1])


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
