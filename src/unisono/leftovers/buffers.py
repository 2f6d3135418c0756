"""Buffers that forward reassigns, as in `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`; buffers in backward.

The plain module has the new tensor in the place of the old one after forward. A replica has registries of its own, so
what forward has put into the first replica's is put into the live module's once forward has succeeded.

In backward an activation checkpoint runs a part of forward again, and reads what the buffers are then
(`BuffersInBackward`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from unisono.primitives.change_tracking import GONE, Change, DictSnapshot, fill
from unisono.runtime import devices as _devices
from unisono.runtime.torch_private import engine, foreach

T = TypeVar("T")


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


_CHANGED = (
    "the buffer {name} has changed between forward and backward, which runs forward again in parts (parts=, or "
    "rescue=). Change buffers after backward; or do not run the module in parts."
)


class BuffersInBackward:
    """Lets activation checkpoints in the backward of one step's replicas read the buffers as on one device.

    That is as they are then, not as they were in this step's forward: later forwards, other backwards or the program
    may have changed them, where no version counts it, too. So in each backward the first replica has the live ones, and
    the others have new copies. Tensors that the graphs have saved stay as they are.

    Args:
        modules: of each replica; live_modules: those of which they are replicas, with their `names`.
        devices: one a replica; live_device: the live modules'.
    """

    def __init__(
        self,
        modules: Sequence[Sequence[nn.Module]],
        live_modules: Sequence[nn.Module],
        names: Sequence[str],
        devices: Sequence[torch.device],
        live_device: torch.device,
    ) -> None:
        self._live_device = live_device
        self._names, self._in_parts = names, False
        self._modules, self._live_modules, self._devices = modules[0], live_modules, devices
        self._registries = [buffer_registries(each).dicts for each in modules]
        self._live = buffer_registries(live_modules).dicts
        self._reassigns = False
        self._backward = -1  # the number of the last one
        self._before: Any = None  # what it has begun with: `_state`
        self._buffers: list[torch.Tensor] = []  # after the forward
        self._versions: list[int | None] = []

    def forward_has_run(self, *, reassigns: bool, in_parts: bool) -> None:
        """Take note of the live buffers after the forward.

        Args:
            reassigns: whether it has reassigned some.
            in_parts: whether the checkpoints are those of parts, which the plain module does not have. Then a backward
                raises RuntimeError if a buffer has changed.
        """
        self._reassigns, self._in_parts = reassigns, in_parts
        if in_parts:
            self._buffers = self._now()
            self._versions = versions_of(self._buffers)

    def around(self, run: Callable[[T], None], repeats: bool, backward_of: T) -> None:
        """Call `run(backward_of)`, a backward of the replicas.

        Args:
            repeats: whether one backward of the caller's may run through the graphs several times, as for derivatives
                of higher order. One device runs a checkpoint once then: so each time that does begins with the same
                buffers, and what the first one has made of them stays.
        """
        number = engine.number_of_backward()
        state = self._state() if repeats and not self._in_parts else None
        is_again = state is not None and number == self._backward >= 0
        if is_again:
            self._put_back(self._before)
        now = self._now()
        versions = versions_of(now)
        if not self._in_parts:
            self.renew()
        elif [*map(id, now)] != [*map(id, self._buffers)] or versions != self._versions:
            raise RuntimeError(_CHANGED.format(name=self._name_of_changed()))
        before = DictSnapshot(self._registries[0]) if self._reassigns else None
        run(backward_of)
        if before is not None:  # what is reassigned again stays, without the history of a graph that is gone
            changes = before.changes()
            detached = {id(value): value.detach() for _, _, value in changes if isinstance(value, torch.Tensor)}
            devices = self._devices[0], self._live_device
            commit_buffers(changes, self._modules, self._live_modules, detached, *devices)
        if state is None:
            return
        if is_again:
            self._put_back(state)
        elif [*map(id, self._now())] != [*map(id, now)] or versions_of(now) != versions:  # it has come to a checkpoint
            self._backward, self._before = number, state
            engine.call_at_end_of_backward(self._forget)

    def _state(self) -> "_State":
        """Return the live registries; and the buffers, each with its memory and its value."""
        buffers = [buffer for buffer in self._now() if not buffer.is_inference()]
        return [*map(dict, self._live)], [(buffer, buffer.data, buffer.detach().clone()) for buffer in buffers]

    def _put_back(self, state: "_State") -> None:
        registries, values = state
        for live, before in zip(self._live, registries, strict=True):
            fill(live, before)
        for buffer, data, value in values:
            data.copy_(value)  # no version counts it: graphs that have saved the buffer stay valid
            buffer.data = data

    def _forget(self) -> None:
        self._backward, self._before = -1, None

    def _now(self) -> list[torch.Tensor]:
        return [buffer for buffer in chain(*map(_values, self._live)) if buffer is not None]

    def _name_of_changed(self) -> str:
        before = dict(zip(map(id, self._buffers), self._versions, strict=True))
        paths = zip(self._names, self._live, strict=True)
        buffers = [(f"{path}.{name}" if path else name, b) for path, live in paths for name, b in live.items()]
        changed = [repr(name) for name, b in buffers if b is not None and before.get(id(b), -1) not in versions_of([b])]
        return changed[0] if changed else "that is gone"

    def renew(self) -> None:
        """Give the replicas what the live module has now."""
        buffers = self._now()
        for i, (registries, device) in enumerate(zip(self._registries, self._devices, strict=True)):
            here = [each for each in buffers if _devices.same_device(each.device, device)]
            if i == 0:
                own = {id(each): each.detach() if each.requires_grad else each for each in here}
            else:
                with torch.no_grad():
                    own = dict(zip(map(id, here), foreach.clones(here), strict=True))
            own.update({id(each): _devices.copied_to(each.detach(), device) for each in buffers if id(each) not in own})
            for registry, live in zip(registries, self._live, strict=True):
                fill(registry, {name: own.get(id(value), value) for name, value in live.items()})


def versions_of(buffers: Sequence[torch.Tensor]) -> list[int | None]:
    return [None if buffer.is_inference() else buffer._version for buffer in buffers]


_State: TypeAlias = tuple[list[dict[str, Any]], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
_values = dict.values
