"""The same number of steps in every process, whatever the lengths of their loaders.

Processes sum gradients together, so each has to take as many steps as the others. Before each step they tell each other
whether they have a batch left; who has none while others do goes on with batches that have no rows.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from manyhands import nested
from manyhands.batch_types import batch_type_of
from manyhands.cluster import Cluster

_DOING = "taking the next batch"


def even_batches(cluster: Cluster | None, loader: Iterable[Any], dim: int) -> Iterator[Any]:
    """Yield the batches of this process's loader; then batches without rows, until no process has any left.

    Args:
        cluster: the processes; None: there is only this one.
        loader: what gives this process's batches.
        dim: the axis of the rows.
    """
    if cluster is None:
        yield from loader
        return
    following = iter(loader)
    empty: Any = None
    is_first, has_more = True, True
    while True:
        # Who has come to the end is not asked again: there are iterators that would begin anew.
        batch = list(_next(following)) if has_more else []
        has_more = bool(batch)
        left = [bool(has) for (has,) in cluster.gather([len(batch)], _DOING)()]
        if not any(left):
            return
        if is_first:
            empty = without_rows(batch[0], dim) if batch else None
            if not all(left):  # who has never had a batch does not know what one is like
                empty = cluster.exchange(empty, _DOING)[left.index(True)]
        is_first = False
        yield batch[0] if batch else empty


def without_rows(batch: Any, dim: int) -> Any:
    """Return a batch of the same kind that has no rows.

    >>> images, labels = without_rows([torch.zeros(8, 3, 28, 28), torch.zeros(8)], 0)
    >>> images.shape, labels.shape
    (torch.Size([0, 3, 28, 28]), torch.Size([0]))
    """

    def cut(leaf: Any) -> Any:
        batch_type = batch_type_of(leaf)
        if batch_type is not None:
            return next(iter(batch_type.scatter(leaf, [0, batch_type.rows(leaf)])))
        if isinstance(leaf, torch.Tensor) and -leaf.dim() <= dim < leaf.dim():
            return leaf.narrow(dim, 0, 0).clone()
        return leaf

    return nested.map_leaves(cut, batch)


def _next(following: Iterator[Any]) -> Iterator[Any]:
    """Yield the next item, if there is one."""
    for item in following:
        yield item
        return
