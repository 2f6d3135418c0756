"""How the inputs of a call become those of its replicas: cut by their placements, copied, linked to the caller's.

Copies to other devices may still be in flight when `Shards` exist: see `streams.py`.
"""

import torch

from unisono.autograd.linked import LinkedTensors
from unisono.engines.step_plan import Call
from unisono.primitives.placements import Placement
from unisono.primitives.tensor_attributes import carry_attributes
from unisono.runtime import devices as _devices
from unisono.runtime.streams import Copies


class Shards:
    """The shards of one call, one a replica; linked to the caller's tensors where these need a gradient.

    Attributes:
        of_replicas: (positional, keyword) inputs, one a replica, on its device.
        linked: the caller's tensors that need a gradient, with the replicas' parts of them.
        numbers_of_linked: which of all tensors these are.
    """

    def __init__(self, call: Call, tracked: bool, copies: Copies) -> None:
        plan, devices = call.plan, call.plan.devices
        num_replicas = len(devices)
        self.linked: list[LinkedTensors] = []
        self.numbers_of_linked: tuple[int, ...] = ()
        number = 0

        def place(tensor: torch.Tensor, placement: Placement) -> list[torch.Tensor | None]:
            nonlocal number
            number += 1
            data = tensor.detach()
            parts = [placement.part(data, i) for i in range(num_replicas)]
            if tracked and tensor.requires_grad:
                # On the replica's own device: its nodes do not run in the thread that torch has for another one, which
                # may be waiting for this replica in batch norm.
                parts = [
                    None if part is None else _devices.moved_to(part, device)
                    for part, device in zip(parts, devices, strict=True)
                ]
                linked = LinkedTensors.of_input(tensor, placement, parts)
                self.linked.append(linked)
                self.numbers_of_linked += (number,)
                parts = [*linked.tensors.tensors]
            # A copy even on the same device, so that a module that writes into its input writes into its own; and
            # made in the replica's graph, so that the gradient is that of what the caller gave.
            if plan.on_cpu and _devices.is_cpu(tensor.device):  # the common case, with few calls
                placed = _devices.copies_on_cpu(parts)
            else:
                placed = [None if p is None else _copied(p, i, devices[i], copies) for i, p in enumerate(parts)]
            if tensor.requires_grad and not tracked:  # a module may switch gradients on for what it does inside
                placed = [copy if copy is None else copy.requires_grad_() for copy in placed]
            if tensor.__dict__:
                carry_attributes(tensor, placed)
            return placed

        self.of_replicas = call.arguments.split(plan.sizes, place)


def _copied(part: torch.Tensor, replica: int, device: torch.device, copies: Copies) -> torch.Tensor:
    """Return a copy for a replica; a copy with a history is made at once, on the stream of the rest of the graph."""
    if part.requires_grad or _devices.same_device(part.device, device):
        return _devices.copied_to(part, device)
    return copies.to(part, replica)
