"""The same number of steps in every process, whatever the lengths of their loaders.

Processes sum gradients together, so each has to take as many steps as the others. Before each step they tell each other
whether they have a batch left; who has none while others do goes on with batches that have no rows.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from manyhands.distributed.process_group import Communicator
from manyhands.primitives import pytree
from manyhands.primitives.batch_types import batch_type_of

_DOING = "taking the next batch"


def even_batches(communicator: Communicator | None, loader: Iterable[Any], dim: int) -> Iterator[Any]:
    """Yield the batches of this process's loader; then batches without rows, until no process has any left.

    Args:
        communicator: the processes; None: there is only this one.
        loader: what gives this process's batches.
        dim: the axis of the rows.
    """
    if communicator is None:
        yield from loader
        return
    following = iter(loader)
    latest: Any = None  # the latest batch, from which an empty one is made when it is needed
    is_first, has_more = True, True
    while True:
        # Who has come to the end is not asked again: there are iterators that would begin anew.
        batch = list(islice(following, 1)) if has_more else []
        has_more = bool(batch)
        left = [bool(has) for (has,) in communicator.all_gather([len(batch)], _DOING).wait()]
        if not any(left):
            return
        if is_first and not all(left):  # who has never had a batch does not know what one is like
            is_sender = communicator.rank == left.index(True)
            empty = communicator.all_gather_object(without_rows(batch[0], dim) if is_sender else None, _DOING)[
                left.index(True)
            ]
            latest = batch[0] if batch else empty
        is_first = False
        if batch:
            latest = batch[0]
            yield latest
        else:
            yield without_rows(latest, dim)


def without_rows(batch: Any, dim: int) -> Any:
    """Return a batch of the same kind that has no rows.

    >>> images, labels = without_rows([torch.zeros(8, 3, 28, 28), torch.zeros(8)], 0)
    >>> images.shape, labels.shape
    (torch.Size([0, 3, 28, 28]), torch.Size([0]))

    Tensors that have not as many rows as the first one, such as a table for all rows, stay whole.

    Raises:
        ValueError: the batch is of a class that cannot be without rows, such as a PackedSequence.
    """
    rows: int | None = None

    def cut(leaf: Any) -> Any:
        nonlocal rows
        batch_type = batch_type_of(leaf)
        if batch_type is not None:
            try:
                return next(iter(batch_type.scatter(leaf, [0, batch_type.rows(leaf)])))
            except Exception as error:
                raise ValueError(
                    f"a {type(leaf).__name__} cannot be cut to no rows ({error}), and this process has fewer batches "
                    "than others: give every process as many"
                ) from error
        if not isinstance(leaf, torch.Tensor) or not -leaf.dim() <= dim < leaf.dim():
            return leaf
        rows = leaf.size(dim) if rows is None else rows
        return leaf.narrow(dim, 0, 0).clone() if leaf.size(dim) == rows else leaf

    return pytree.map_leaves(cut, batch)
