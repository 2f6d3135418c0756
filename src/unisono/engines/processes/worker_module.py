"""The worker's own module: made from the caller's updates (module_sync.py), kept equal to the live one.

As the threads engine has replicas of the live module, a worker has some of its own.
"""

from collections.abc import Sequence

import torch
from torch import nn

from unisono.engines.processes.module_sync import TensorRecipe, Update
from unisono.engines.processes.pickling import loads
from unisono.engines.processes.shared_memory import Segment
from unisono.engines.replica import ReplicaPool, Replicas
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.change_tracking import GONE
from unisono.primitives.replicate import write_values
from unisono.runtime import torch_private
from unisono.runtime.buckets import Bucket
from unisono.runtime.streams import Copies


class WorkerModule:
    """The worker's own module, from which its replicas are stamped.

    Attributes:
        tensors: the module's tensors, by number.
        outside: those that need gradients and are not the module's.
    """

    def __init__(self, update: bytes, segments: dict[int, Segment], device: torch.device) -> None:
        self._device = device
        recipes, pickled, self._num_parameters, outside = loads(update)
        self.tensors = [_tensor(recipe, segments, device) for recipe in recipes]
        self.outside = [self.tensors[number] for number in outside]
        in_segments = [
            (own, segments[recipe.spec.segment].view(recipe.spec))
            for own, recipe in zip(self.tensors, recipes, strict=True)
            if recipe.spec is not None
        ]
        # Tensors with memory of their own, each with its source in shared memory: copied again when that is rewritten.
        # On an accelerator these are all, also those that may share.
        self._copied = [(own, source) for own, source in in_segments if own.data_ptr() != source.data_ptr()]
        modules, class_attributes = loads(pickled, lambda number: self.tensors[number])
        self.modules = modules[::-1]
        for cls, attributes in class_attributes:
            for name, value in attributes.items():
                if cls.__dict__.get(name) != value:
                    type.__setattr__(cls, name, value)
        self._renew_pool()

    def _renew_pool(self) -> None:
        blueprint = Blueprint(self.modules[0])
        # The caller's, in its order: what the blueprint finds in a set has another order in each process.
        blueprint.parameters = {id(parameter): parameter for parameter in self.tensors[: self._num_parameters]}
        self._pool = ReplicaPool(blueprint, self._device)
        self._prepared: tuple[bool, Replicas] | None = None

    @property
    def blueprint(self) -> Blueprint:
        return self._pool.blueprint

    def apply(self, update: Update) -> None:
        """Apply an update."""
        for number, name, value in update.changes:
            attributes = self.modules[number].__dict__
            if value is GONE:
                del attributes[name]
            else:
                attributes[name] = value
        if update.requires_grad is not None:
            for tensor, flag in zip(self.tensors, update.requires_grad, strict=False):
                tensor.requires_grad_(flag)
        if update.rewritten:  # in place, because replicas refer to this memory
            write_values([own for own, _ in self._copied], [source for _, source in self._copied])
        if update.changes or update.requires_grad is not None:
            self._renew_pool()
        if update.rewritten and self._prepared is not None:
            self._prepared[1].renew_buffers()

    def prepare(self, tracked: bool) -> None:
        """Make the next replica ready, while the caller is busy."""
        with Copies([self._device]) as copies:
            replicas = self._pool.take([self._device], tracked, copies, with_live_buffers=False)
            copies.wait_copies(0)
        self._prepared = tracked, replicas

    def load_parameters(self, buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]) -> None:
        """Load parameters that were sent.

        This does not count as a write: a write by the caller through `.data` concerns no graph, and the first replica's
        graph detects all others.
        """
        for bucket, flat in zip(buckets, flats, strict=True):
            pieces = bucket.pieces(flat)
            torch_private.copy_all_in_place([self.tensors[number].data for number in pieces], [*pieces.values()])

    def take(self, tracked: bool) -> Replicas:
        """Return a replica for a forward."""
        if self._prepared is None or self._prepared[0] != tracked:
            self.prepare(tracked)
        assert self._prepared is not None
        (_, replicas), self._prepared = self._prepared, None
        return replicas


def _tensor(recipe: TensorRecipe, segments: dict[int, Segment], device: torch.device) -> torch.Tensor:
    """Return the worker's copy of one of the module's tensors, on `device` unless the recipe names another."""
    device = recipe.device or device
    if recipe.sent_form is not None:
        form = recipe.sent_form
        tensor = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=device)
    elif recipe.spec is None:
        assert recipe.inline is not None
        tensor = recipe.inline.to(device)
    else:
        tensor = segments[recipe.spec.segment].view(recipe.spec).to(device, copy=not recipe.may_share)
    if recipe.kind is nn.Parameter:
        tensor = nn.Parameter(tensor, recipe.requires_grad)
    elif issubclass(recipe.kind, nn.Parameter):
        tensor = tensor.as_subclass(recipe.kind).requires_grad_(recipe.requires_grad)
    elif recipe.requires_grad:
        tensor = tensor.requires_grad_()
    for name, value in recipe.attributes.items():
        tensor.__dict__.setdefault(name, value)
    return tensor
