"""Buffers that forward reassigns, as in `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`; buffers after a failure.

The plain module has the new tensor in the place of the old one after forward. A replica has registries of its own, so
what forward has put into the first replica's is put into the live module's once forward has succeeded.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from unisono.primitives.change_tracking import GONE, Change, DictSnapshot
from unisono.runtime import devices as _devices
from unisono.runtime.errors import note_failure_after
from unisono.runtime.torch_private import foreach


def buffer_registries(modules: Sequence[nn.Module]) -> DictSnapshot:
    """Return the buffers that modules have now; its `changes` are those that are reassigned from now on.

    A scripted module's are TorchScript's: what a script reassigns is lost.
    """
    registries = [module.__dict__.get("_buffers") for module in modules]
    return DictSnapshot([registry if isinstance(registry, dict) else {} for registry in registries])


def histories(changes: Sequence[Change]) -> list[torch.Tensor]:
    """Return those of the new buffers that have a history, each once."""
    tensors = [value for _, _, value in changes if isinstance(value, torch.Tensor)]
    return [*{id(tensor): tensor for tensor in tensors if tensor.grad_fn is not None}.values()]


def commit_buffers(
    changes: Sequence[Change],
    modules: Sequence[nn.Module],
    live_modules: Sequence[nn.Module],
    live_tensors: Mapping[int, torch.Tensor],
    device: torch.device,
    live_device: torch.device,
) -> None:
    """Make the changes of a replica's buffers in the live module.

    A buffer that is gone because forward has made something else of it, such as a parameter, stays: other things that
    forward assigns are lost.

    Args:
        modules, live_modules: the replica's and those of which they are replicas.
        live_tensors: by id, what stands for a tensor of the replica in the live module, where that is another one.
        device, live_device: the replica's and the live module's; they are two where the first device has no rows.
    """
    is_remote = not _devices.same_device(device, live_device)
    for number, name, value in changes:
        attributes, registry = modules[number].__dict__, live_modules[number].__dict__["_buffers"]
        if value is not GONE:
            new = live_tensors.get(id(value), value)
            is_here = is_remote and isinstance(new, torch.Tensor) and _devices.same_device(new.device, device)
            registry[name] = _devices.copied_to(new, live_device) if is_here else new
        elif not any(name in attributes[kind] for kind in ("_parameters", "_modules")) and name not in attributes:
            registry.pop(name, None)


def commit_values(live: Sequence[torch.Tensor], own: Sequence[torch.Tensor], versions: Sequence[int | None]) -> None:
    """Give live buffers the values of a replica's own, which are copies; those had these versions before forward."""
    for of_module, of_replica, before in zip(live, own, versions, strict=True):
        _devices.copy_into(of_module.data, of_replica)
        if versions_of([of_replica]) != [before] and not of_module.is_inference():
            torch.autograd.graph.increment_version(of_module)


def versions_of(buffers: Sequence[torch.Tensor]) -> list[int | None]:
    return [None if buffer.is_inference() else buffer._version for buffer in buffers]


class unchanged_on_failure:  # noqa: N801 - a context manager, as a class because a step enters it each time
    """Restores the buffers if the block raises: a step that fails changes nothing."""

    before: list[list[torch.Tensor]]  # copies of them from when the block began

    def __init__(self, buffers: Sequence[list[torch.Tensor]]) -> None:
        self.buffers = buffers  # in lists of one kind each (`foreach.of_one_kind`)

    def __enter__(self) -> None:
        self.before = [*map(foreach.clones, self.buffers)]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            return
        try:
            self.restore()
        except Exception as other:  # noqa: BLE001 - noted
            note_failure_after(error, other, "putting the buffers back")

    def restore(self) -> None:
        """Write the copies into the buffers."""
        for buffers, before in zip(self.buffers, self.before, strict=True):
            write_values(buffers, before)


def write_values(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Write values into tensors. Autograd does not notice: graphs that have saved the tensors stay valid."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)
