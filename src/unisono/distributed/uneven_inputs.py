"""The same number of steps in every process, whatever the lengths of their loaders.

Gradients are all-reduced, so every rank has to take as many steps as the others. Before each step the ranks all-gather
whether they have a batch left. A rank without one, while others have some, goes on with batches that have no rows.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from unisono.distributed.process_group import Communicator
from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of, without_rows
from unisono.runtime import devices as _devices

_DOING = "taking the next batch"


def even_batches(
    communicator: Communicator | None, loader: Iterable[Any], dim: int, device: torch.device
) -> Iterator[Any]:
    """Yield the batches of this process's loader; then batches without rows, until no process has a batch left.

    Args:
        communicator: the processes; None: there is only this one.
        loader: this process's batches.
        dim: the axis of the rows.
        device: of this process, for what another process has on an accelerator of its own.
    """
    if communicator is None:
        yield from loader
        return
    iterator = iter(loader)
    latest: Any = None  # the latest batch, from which an empty one is made when it is needed
    is_first, has_more = True, True
    while True:
        # An exhausted iterator is not asked again: some would start over.
        batch = list(islice(iterator, 1)) if has_more else []
        has_more = bool(batch)
        has_batch = [bool(has) for (has,) in communicator.all_gather([len(batch)], _DOING).wait()]
        if not any(has_batch):
            return
        if is_first and not all(has_batch):  # a rank that never had a batch needs one to make an empty one from
            sender = has_batch.index(True)
            empty = _to_send(empty_batch(batch[0], dim)) if communicator.rank == sender else None
            empty = communicator.all_gather_object(empty, _DOING)[sender]
            latest = batch[0] if batch else _received(empty, device)
        is_first = False
        if batch:
            latest = batch[0]
            yield latest
        else:
            yield empty_batch(latest, dim)


def empty_batch(batch: Any, dim: int) -> Any:
    """Return a batch like `batch`, with no rows.

    >>> images, labels = empty_batch([torch.zeros(8, 3, 28, 28), torch.zeros(8)], 0)
    >>> images.shape, labels.shape
    (torch.Size([0, 3, 28, 28]), torch.Size([0]))

    Tensors that do not have as many rows as the first one, such as a table for all rows, are returned as they are.

    Raises:
        ValueError: the batch is of a class that cannot have no rows, such as a PackedSequence.
    """
    rows: int | None = None

    def cut(leaf: Any) -> Any:
        nonlocal rows
        if batch_type_of(leaf) is not None:
            try:
                return without_rows(leaf)
            except Exception as error:
                raise ValueError(
                    f"cannot make an empty batch of a {type(leaf).__name__} ({error}), and this process has "
                    "fewer batches than others: give every process the same number of batches"
                ) from error
        if not isinstance(leaf, torch.Tensor) or not -leaf.dim() <= dim < leaf.dim():
            return leaf
        rows = leaf.size(dim) if rows is None else rows
        return leaf.narrow(dim, 0, 0).clone() if leaf.size(dim) == rows else leaf

    return pytree.map_leaves(cut, batch)


class _OnAccelerator:
    """A tensor that the sender has on an accelerator, which another process should not use: here it is on the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.cpu()


def _to_send(batch: Any) -> Any:
    def wrapped(leaf: Any) -> Any:
        return _OnAccelerator(leaf) if isinstance(leaf, torch.Tensor) and not _devices.is_cpu(leaf.device) else leaf

    return pytree.map_leaves(wrapped, batch)


def _received(batch: Any, device: torch.device) -> Any:
    return pytree.map_leaves(lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _OnAccelerator) else leaf, batch)
