"""Batches of other kinds: values with rows that are neither tensors nor containers of tensors.

Only the library of a packed sequence or a batch of graphs knows how to count, split and join its rows.
`register_batch_type` registers these functions for a class and its subclasses; torch's own `PackedSequence`, and the
caches of the library transformers, are registered here.

Batches are split and joined in the caller's thread and in the caller's graph, so that gradients flow through. Only the
tensors inside are copied to the replicas and back; `BatchType.parts` finds them.
"""

import io
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from unisono.primitives.object_state import same_value, state_of
from unisono.runtime.errors import add_note

# The tensors inside a value, and a function that makes a value like it with other tensors in their place.
Parts = tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]


@dataclass(frozen=True)
class BatchType:
    """How to count, split and join the rows of a class of batches, and how to find the tensors inside.

    `rows` returns None for a batch that fits any number of rows, such as a cache that nothing was written into yet.
    """

    scatter: Callable[[Any, Sequence[int]], Sequence[Any]]
    gather: Callable[[Sequence[Any]], Any]
    rows: Callable[[Any], int | None]
    parts: Callable[[Any], Parts]


def register_batch_type(
    cls: type,
    *,
    scatter: Callable[[Any, Sequence[int]], Sequence[Any]],
    gather: Callable[[Sequence[Any]], Any],
    rows: Callable[[Any], int] = len,
) -> None:
    """Register how batches of a class are split among replicas, and joined again.

        >>> class Sentences:
        ...     def __init__(self, words):
        ...         self.words = words
        >>> unisono.register_batch_type(
        ...     Sentences,
        ...     scatter=lambda batch, sizes: [Sentences(words) for words in batch.words.split(sizes)],
        ...     gather=lambda batches: Sentences(torch.cat([batch.words for batch in batches])),
        ...     rows=lambda batch: len(batch.words),
        ... )
        >>> [shard.words.shape for shard in unisono.scatter(Sentences(torch.zeros(5, 7)), ["cpu", "cpu"])]
        [torch.Size([3, 7]), torch.Size([2, 7])]

    Args:
        cls: the class; its subclasses are included. A second call for a class replaces the first.
        scatter: from a batch and the replicas' row counts to one batch a replica. Differentiable if made of torch's
            operations. Tensors in its results are then copied to the replicas' devices.
        gather: from the replicas' outputs of the class, in order and on one device, to one.
        rows: the number of rows of a batch.

    `pickle` must be able to serialise instances; their tensors are found that way.

    Raises:
        TypeError: `cls` is no class, or is one that needs no registration (a tensor, tuple, list, dict); another
            argument is not callable.
    """
    if not isinstance(cls, type) or cls in (object, torch.Tensor, tuple, list, dict):
        raise TypeError(f"cls={cls!r}: expected a class that you or a library defined")
    for name, function in (("scatter", scatter), ("gather", gather), ("rows", rows)):
        if not callable(function):
            raise TypeError(f"{name}={function!r}: expected a function")
    _registered[cls] = BatchType(scatter, gather, rows, _parts_by_pickle)


def batch_type_of(value: object) -> BatchType | None:
    """Return the batch type of the value's class; None if the class is not registered."""
    kind = type(value)
    if kind in _registered:
        return _registered[kind]
    for cls in kind.__mro__:
        if cls in _registered:
            return _registered[cls]
        if cls.__module__ == "transformers.cache_utils" and cls.__name__ in ("DynamicCache", "EncoderDecoderCache"):
            return _CACHE
    return None


def without_rows(batch: Any) -> Any:
    """Return a batch of a registered class like `batch`, with no rows; raise what its class does if it cannot."""
    batch_type = batch_type_of(batch)
    assert batch_type is not None
    return next(iter(batch_type.scatter(batch, [0, batch_type.rows(batch) or 0])))


# What pickle would look up by name is kept as it is, so that classes of a notebook or a function work too.
_BY_REFERENCE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def _parts_by_pickle(value: Any) -> Parts:
    """Return the parts of any picklable value, wherever it holds its tensors."""
    stream = io.BytesIO()
    taker = _Taker(stream, value)
    try:
        taker.dump(value)
    except Exception as error:
        add_note(
            error,
            "a registered batch type is copied to the replicas by pickle, which cannot serialise this "
            f"{type(value).__name__}",
        )
        raise
    return taker.tensors, partial(_rebuilt, stream.getvalue(), taker.makers)


def _rebuilt(pickled: bytes, makers: Sequence["_Maker"], tensors: Sequence[torch.Tensor]) -> Any:
    giver = _Giver(io.BytesIO(pickled))
    giver.made = [make(tensors) for make in makers]  # once each, so that what was one object stays one object
    return giver.load()


_Maker: TypeAlias = Callable[[Sequence[torch.Tensor]], Any]  # makes a part that is not pickled, from all new tensors


# Both are classes of the module: a class made in a function is a cycle, which would keep the batch.


class _Taker(pickle.Pickler):
    """Pickles a value without its tensors, and without batches of registered classes inside it."""

    def __init__(self, stream: io.BytesIO, value: Any) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._value = value
        self.tensors: list[torch.Tensor] = []  # those of the value
        self.makers: list[_Maker] = []  # of the parts that are not pickled, by place
        self._places: dict[int, int] = {}  # id -> its maker

    def persistent_id(self, part: Any) -> int | None:
        inner = None if part is self._value else batch_type_of(part)
        if inner is None and not isinstance(part, (torch.Tensor, *_BY_REFERENCE)):
            return None
        if id(part) not in self._places:
            self._places[id(part)] = len(self.makers)
            self.makers.append(self._maker_of(part, inner))
        return self._places[id(part)]

    def _maker_of(self, part: Any, inner: BatchType | None) -> _Maker:
        start = len(self.tensors)
        if inner is not None:  # its own batch type may leave some of its tensors in place
            own, rebuild_inner = inner.parts(part)
            self.tensors.extend(own)
            return lambda new: rebuild_inner(new[start : start + len(own)])
        if isinstance(part, torch.Tensor):
            self.tensors.append(part)
            return lambda new: new[start]
        return lambda new: part


class _Giver(pickle.Unpickler):
    """Unpickles what `_Taker` has pickled; `made` has the parts that it left out."""

    made: Sequence[Any]

    def persistent_load(self, place: int) -> Any:
        return self.made[place]


def _packed_rows(packed: PackedSequence) -> int:
    return int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0


def _scatter_packed(packed: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    """Split by sequence, in the caller's order; a sorted batch stays sorted in every shard."""
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    is_sorted = packed.unsorted_indices is None
    parts = zip(torch.split(padded, list(sizes)), torch.split(lengths, list(sizes)), strict=True)
    return [
        pack_padded_sequence(rows[:, : int(own.max())], own, batch_first=True, enforce_sorted=is_sorted)
        for rows, own in parts
    ]


def _gather_packed(parts: Sequence[PackedSequence]) -> PackedSequence:
    longest = max(len(part.batch_sizes) for part in parts)
    padded, lengths = zip(*(pad_packed_sequence(p, batch_first=True, total_length=longest) for p in parts), strict=True)
    all_lengths = torch.cat(lengths)
    is_sorted = all(part.unsorted_indices is None for part in parts) and bool((all_lengths.diff() <= 0).all())
    return pack_padded_sequence(torch.cat(padded), all_lengths, batch_first=True, enforce_sorted=is_sorted)


def _parts_of_packed(packed: PackedSequence) -> Parts:
    """Return all tensors but `batch_sizes`, which stays on the CPU."""
    indices = [i for i in (packed.sorted_indices, packed.unsorted_indices) if i is not None]

    def rebuild(tensors: Sequence[torch.Tensor]) -> PackedSequence:
        data, *own_indices = tensors
        return PackedSequence(data, packed.batch_sizes, *own_indices)

    return [packed.data, *indices], rebuild


# ---- caches of transformers ----------------------------------------------------------------------
#
# A cache has one layer for each layer of the model, and every tensor in a layer has its rows on axis 0, but for 0-dim
# ones such as the size of a sliding window. torch's gather makes a cache anew from what iterating over it yields; here
# it is copied with other tensors in it, because what iterating does not yield (how many tokens a sliding window has
# seen, states of linear attention) would be lost. Classes are recognised by name, so that transformers is not imported.


def _cache_rows(cache: Any) -> int | None:
    tensors, _ = _parts_of_cache(cache)
    rows = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(rows) > 1:
        raise ValueError(
            f"the layers of this {type(cache).__name__} have different batch sizes, {sorted(rows)}: expected "
            "the same in each layer. For another layout, register how it is split and joined: "
            "unisono.register_batch_type."
        )
    return next(iter(rows), None)


def _scatter_cache(cache: Any, sizes: Sequence[int]) -> list[Any]:
    """Split by rows; a cache without rows is copied, because forward writes into it."""
    tensors, rebuild = _parts_of_cache(cache)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        rebuild([tensor.narrow(0, start, size) if tensor.dim() else tensor for tensor in tensors])
        for start, size in zip(starts, sizes, strict=True)
    ]


def _gather_caches(caches: Sequence[Any]) -> Any:
    """Join by rows; what is not a tensor with rows, such as the number of tokens seen, has to be the same in all."""
    each_tensors = [_parts_of_cache(cache)[0] for cache in caches]
    states = [state_of(cache) for cache in caches]
    for path in dict.fromkeys(chain.from_iterable(states)):
        given = [_without_rows(state.get(path)) for state in states]
        if not all(same_value(given[0], value) for value in given[1:]):
            each = "; ".join(f"replica {index}: {value}" for index, value in enumerate(given))
            raise ValueError(
                f"cannot gather the replicas' {type(caches[0]).__name__}s: they differ in {path} ({each}). "
                "Pad all sequences to one length; or leave the cache out of the output: use_cache=False."
            )
    joined = [torch.cat(tensors) if tensors[0].dim() else tensors[0] for tensors in zip(*each_tensors, strict=True)]
    return _parts_of_cache(caches[0])[1](joined)


def _without_rows(value: Any) -> Any:
    """Return what has to be the same in all replicas' caches: of a tensor with rows, its shape without them."""
    return value.shape[1:] if isinstance(value, torch.Tensor) and value.dim() else value


def _parts_of_cache(cache: Any) -> Parts:
    for half in (getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None)):
        if half is not None and batch_type_of(half) is None:
            raise TypeError(
                f"cannot split or join this {type(cache).__name__}: its {type(half).__name__} is preallocated "
                "and still empty. Give a DynamicCache, or leave it out: use_cache=False."
            )
    tensors, rebuild = _parts_by_pickle(cache)

    def rebuilt(new_tensors: Sequence[torch.Tensor]) -> Any:
        made = rebuild(new_tensors)
        for layer in getattr(made, "layers", ()):
            if isinstance(keys := getattr(layer, "keys", None), torch.Tensor):
                layer.device = keys.device
        return made

    return tensors, rebuilt


_CACHE = BatchType(_scatter_cache, _gather_caches, _cache_rows, _parts_of_cache)

_registered: dict[type, BatchType] = {
    PackedSequence: BatchType(_scatter_packed, _gather_packed, _packed_rows, _parts_of_packed)
}
