"""Buffers that forward reassigns, as in `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`.

The plain module has the new tensor in the place of the old one after forward. A replica has registries of its own, so
what forward has put into the first replica's is put into the live module's once forward has succeeded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from unisono.primitives.change_tracking import GONE, DictSnapshot

Change: TypeAlias = tuple[int, str, Any]  # number of the module, name of the buffer, its new value: GONE if deleted


def buffer_registries(modules: Sequence[nn.Module]) -> DictSnapshot:
    """Return the buffers that modules have now; its `changes` are those that are reassigned from now on.

    A scripted module's are TorchScript's: what a script reassigns is lost.
    """
    registries = [module.__dict__.get("_buffers") for module in modules]
    return DictSnapshot([registry if isinstance(registry, dict) else {} for registry in registries])


def modules_in_common(replicas: Sequence[Any], live: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of the first replica that have a live module's name, and these live modules.

    A user's own `replicate` may return anything.
    """
    of_replica = dict(replicas[0].named_modules()) if replicas and isinstance(replicas[0], nn.Module) else {}
    pairs = [(of_replica[name], module) for name, module in live.named_modules() if name in of_replica]
    return [module for module, _ in pairs], [module for _, module in pairs]


def histories(changes: Sequence[Change]) -> list[torch.Tensor]:
    """Return those of the new buffers that have a history, each once."""
    tensors = [value for _, _, value in changes if isinstance(value, torch.Tensor)]
    return [*{id(tensor): tensor for tensor in tensors if tensor.grad_fn is not None}.values()]


def commit_buffers(
    changes: Sequence[Change],
    modules: Sequence[nn.Module],
    live_modules: Sequence[nn.Module],
    live_tensors: Mapping[int, torch.Tensor],
) -> None:
    """Make the changes of a replica's buffers in the live module.

    A buffer that is gone because forward has made something else of it, such as a parameter, stays: other things that
    forward assigns are lost.

    Args:
        modules, live_modules: the replica's and those of which they are replicas.
        live_tensors: by id, what stands for a tensor of the replica in the live module, where that is another one.
    """
    for number, name, value in changes:
        attributes, registry = modules[number].__dict__, live_modules[number].__dict__["_buffers"]
        if value is not GONE:
            registry[name] = live_tensors.get(id(value), value)
        elif not any(name in attributes[kind] for kind in ("_parameters", "_modules")) and name not in attributes:
            registry.pop(name, None)
