"""The worker's own module: made from what the caller's mirror (module_sync.py) sends, kept equal to the live one.

Replicas are stamped from it for every forward, as the threads engine stamps them from the live module.
"""

import pickle
from collections.abc import Sequence

import torch
from torch import nn

from manyhands.engines.processes.change_tracking import GONE
from manyhands.engines.processes.module_sync import Described, Update
from manyhands.engines.processes.pickling import loads
from manyhands.engines.processes.shared_memory import Segment
from manyhands.engines.replica import Stamp, stamped
from manyhands.primitives.blueprint import Blueprint
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import Bucket
from manyhands.runtime.streams import Copies


class Module:
    """The worker's own module: what replicas are stamped from."""

    def __init__(self, update: bytes, segments: dict[int, Segment], device: torch.device) -> None:
        self._device = device
        tensors, pickled, self._outside = pickle.loads(update)
        self.described: list[Described] = pickle.loads(tensors)
        self.tensors = [_tensor(described, segments, device) for described in self.described]
        # The places of tensors that were copied from where they lie, to be copied again when they are written anew.
        self._copied = [
            (tensor, segments[d.place.segment].view(d.place))
            for tensor, d in zip(self.tensors, self.described, strict=True)
            if d.place is not None and not d.is_shared
        ]
        modules, class_attributes = loads(pickled, lambda number: self.tensors[number])
        self.modules = modules[::-1]
        for cls, attributes in class_attributes:
            for name, value in attributes.items():
                if cls.__dict__.get(name) != value:
                    type.__setattr__(cls, name, value)
        self.blueprint = Blueprint(self.modules[0])
        self._number = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._prepared: tuple[bool, Stamp] | None = None

    def change(self, update: Update) -> None:
        """Make it what the live module is now."""
        for number, name, value in update.changes:
            attributes = self.modules[number].__dict__
            if value is GONE:
                del attributes[name]
            else:
                attributes[name] = value
        if update.requires_grad is not None:
            for tensor, flag in zip(self.tensors, update.requires_grad, strict=False):
                tensor.requires_grad_(flag)
        if update.rewritten and self._copied:
            for tensor, written in self._copied:
                tensor.data = written.to(tensor.device, copy=True)
        if update.changes or update.requires_grad is not None:
            self.blueprint = Blueprint(self.blueprint.root)
            self._prepared = None
        if update.rewritten and self._prepared is not None:
            self._prepared[1].renew_buffers()

    def prepare(self, tracked: bool) -> None:
        """Stamp the next replica, while the caller has other things to do."""
        with Copies([self._device]) as copies:
            (stamp,) = stamped(self.blueprint, self._device, [self._device], tracked, copies, with_live_buffers=False)
            copies.wait_copies(0)
        self._prepared = tracked, stamp

    def take(self, buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]) -> None:
        """Take parameters that were sent.

        It does not count as a write: what the caller has written by way of `.data` is none of the graphs' business, and
        of all else the first replica's graph knows.
        """
        for bucket, flat in zip(buckets, flats, strict=True):
            pieces = bucket.pieces(flat)
            torch_private.copy_all_in_place([self.tensors[number].data for number in pieces], [*pieces.values()])

    def stamp(self, tracked: bool) -> tuple[Stamp, dict[int, torch.Tensor]]:
        """Return a new replica, and its leaves by number."""
        if self._prepared is None or self._prepared[0] != tracked:
            self.prepare(tracked)
        assert self._prepared is not None
        (_, stamp), self._prepared = self._prepared, None
        pairs = zip(stamp.live_parameters, stamp.leaves, strict=True)
        leaves = {self._number[id(parameter)]: leaf for parameter, leaf in pairs}
        leaves.update((number, self.tensors[number]) for number in self._outside if tracked)
        return stamp, leaves


def _tensor(described: Described, segments: dict[int, Segment], device: torch.device) -> torch.Tensor:
    """Return the worker's own of one of the module's tensors; on `device`, unless it says otherwise."""
    device = described.device or device
    if described.later is not None:
        form = described.later
        tensor = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=device)
    elif described.place is None:
        assert described.inline is not None
        tensor = described.inline.to(device)
    else:
        tensor = segments[described.place.segment].view(described.place).to(device)
        if not described.is_shared:
            tensor = tensor.clone()
    if described.kind is nn.Parameter:
        tensor = nn.Parameter(tensor, described.requires_grad)
    elif issubclass(described.kind, nn.Parameter):
        tensor = tensor.as_subclass(described.kind).requires_grad_(described.requires_grad)
    elif described.requires_grad:
        tensor = tensor.requires_grad_()
    for name, value in described.attributes.items():
        tensor.__dict__.setdefault(name, value)
    return tensor
