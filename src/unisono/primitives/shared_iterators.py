"""Iterators among the inputs: each replica gets an iterator of its own, over the same items.

One iterator in several replicas would give each of them some of its items. So items are taken from it when the first
replica asks for them, and are kept until the last one has had them. `itertools.tee` does this for one thread only.
The caller's iterator has advanced as far as that of the replica that has taken the most.

Guarantees that one thread at a time runs the caller's iterator. Items are not copied, nor split.
"""

import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.primitives import pytree
from unisono.primitives.visitor import INERT


@dataclass
class _Source:
    """The iterator behind shared ones."""

    iterator: Iterator[Any]
    lock: threading.Lock = field(default_factory=threading.Lock)
    carries_objects: bool = False  # whether an item that was taken is, or has, an object that may lead to a history


class SharedIterator(Iterator[Any]):
    """An iterator over the items that another one has left, which several share; attributes are those of the other.

    >>> first, second = SharedIterator.each(iter("abc"), 2)
    >>> next(first), list(second), list(first)
    ('a', ['a', 'b', 'c'], ['b', 'c'])
    """

    def __init__(self, source: _Source, link: list[Any]) -> None:
        self._source = source
        self._link = link  # [item, next link]; [] before the item is taken

    @classmethod
    def each(cls, iterator: Iterator[Any], number: int) -> list["SharedIterator"]:
        """Return `number` iterators over the items that an iterator has left; it is not to be advanced by itself."""
        start = iterator if isinstance(iterator, cls) else cls(_Source(iterator), [])
        return [cls(start._source, start._link) for _ in range(number)]

    def __next__(self) -> Any:
        source = self._source
        with source.lock:
            if not self._link:  # at the end, too: the other one then says so again
                self._link += [next(source.iterator), []]
                source.carries_objects |= not all(map(_carries_nothing, pytree.flatten(self._link[0])[0]))
        item, self._link = self._link
        return item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols; and where it is copied or unpickled, there is no source yet
            raise AttributeError(name)
        return getattr(self._source.iterator, name)

    def carries_objects(self) -> bool:
        """Return whether an item that was taken is, or has, a tensor with a history or an object that may have one."""
        return self._source.carries_objects


def _carries_nothing(leaf: Any) -> bool:
    return type(leaf) in INERT or (type(leaf) is torch.Tensor and leaf.grad_fn is None)


def is_iterator(value: object) -> bool:
    """Return whether a value is used up by whoever iterates over it; files are not meant."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def shared(value: Any) -> Any:
    """Return a value with shared iterators in the place of those in it."""
    return pytree.map_leaves(lambda leaf: SharedIterator.each(leaf, 1)[0] if is_iterator(leaf) else leaf, value)


def iterators_anew(value: Any) -> Any:
    """Return a value with iterators in the place of shared ones in it, which leave those where they are."""
    return pytree.map_leaves(lambda leaf: leaf.each(leaf, 1)[0] if isinstance(leaf, SharedIterator) else leaf, value)
