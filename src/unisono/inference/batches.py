"""What a batch is: the inputs of one call. And batches made of samples.

A tuple or list has the positional inputs, as in `model(*batch)`; a mapping has keyword inputs, as in `model(**batch)`;
anything else is the only input. (A batch of a registered class is one input, whatever its class.)
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import torch

from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.placements import check_have_data
from unisono.primitives.sample_lists import SampleList

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword inputs of one call


def inputs_of(batch: Any) -> Inputs:
    """Return the positional and keyword inputs that a batch stands for.

    >>> inputs_of([1, 2]), inputs_of({"x": 1}), inputs_of(1)
    (((1, 2), {}), ((), {'x': 1}), ((1,), {}))

    Raises:
        TypeError: a mapping with keys that are no names; a tensor without data (on the meta device).
        ValueError: containers that contain themselves, or are nested beyond Python's recursion limit.
    """
    if type(batch) is torch.Tensor and not batch.is_meta:  # the common case, with few calls
        return (batch,), {}
    check_have_data("compute", batch, "batch")
    if batch_type_of(batch) is None:
        if isinstance(batch, tuple | list):
            return tuple(batch), {}
        if isinstance(batch, Mapping):
            if wrong := [key for key in batch if not isinstance(key, str)]:
                raise TypeError(
                    f"a batch that is a {type(batch).__name__} gives keyword inputs, but {wrong[0]!r} is not "
                    "a name. To give the model all of it as one input, put it into a tuple: (batch,)"
                )
            return (), dict(batch)
    return (batch,), {}


def hint_for(batch: Any) -> str | None:
    """Return what to say if the model does not take a batch's inputs; None where they are not taken apart."""
    if type(batch) is torch.Tensor or not isinstance(batch, tuple | list | Mapping) or batch_type_of(batch) is not None:
        return None
    if isinstance(batch, Mapping):
        return f"the batch gave the model the keyword inputs {list(batch)}"
    return (
        f"the batch gave the model {len(batch)} positional inputs. If one is a target, give only the inputs: "
        "model.map(x for x, target in loader)"
    )


def batches_of(batches: Iterable[Any], batch_size: int | None, dim: int) -> Iterable[Any]:
    """Return the batches: those given, or `batch_size` samples of what is given at a time; the last may have fewer.

    Raises:
        TypeError: something that has no batches, or a batch size that is no int.
        ValueError: a batch size below 1, or for a loader that makes batches itself.
    """
    given = f"batches: got {_described(batches)}"
    if batch_size is None:
        if isinstance(batches, str | bytes | Mapping) or _has_axes(batches):
            raise TypeError(f"{given}, expected an iterable of batches. To divide it into batches, give batch_size=")
        if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            raise TypeError(f"{given}, expected an iterable of batches, such as a DataLoader")
        return batches
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise TypeError(f"batch_size={batch_size!r}: expected an int")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected 1 or more")
    if isinstance(batches, torch.utils.data.DataLoader) and batches.batch_sampler is not None:
        raise ValueError(f"batch_size={batch_size}: the DataLoader makes batches itself. Leave batch_size out")
    if _has_axes(batches) and not -len(batches.shape) <= dim < len(batches.shape):  # type: ignore[attr-defined]
        raise ValueError(f"{given}, which has no dimension {dim} to split into batches")
    if hasattr(batches, "__len__") and hasattr(batches, "__getitem__") and not isinstance(batches, Mapping):
        return SampleBatches(batches, batch_size, dim)
    if not hasattr(batches, "__iter__") or isinstance(batches, Mapping):
        raise TypeError(f"{given}, expected a sequence of samples, a tensor or an array")
    return _collated(iter(batches), batch_size, dim)


class SampleBatches:
    """The batches of a sequence of samples, each made when it is asked for.

    Args:
        samples: a sequence, a map-style dataset, a tensor or an array: its rows are the samples.
        batch_size: how many samples a batch has.
        dim: the axis of the rows, in a batch, a tensor and an array.
    """

    def __init__(self, samples: Any, batch_size: int, dim: int) -> None:
        self._samples, self._batch_size, self._dim = samples, batch_size, dim

    def __len__(self) -> int:
        return math.ceil(self._num_samples / self._batch_size)

    @property
    def _num_samples(self) -> int:
        if _has_axes(self._samples):
            return int(self._samples.shape[self._dim])
        return len(self._samples)

    def __getitem__(self, number: int) -> Any:
        start = number * self._batch_size
        if not 0 <= start < self._num_samples:
            raise IndexError(number)
        stop = min(start + self._batch_size, self._num_samples)
        if not _has_axes(self._samples):
            return collate([self._samples[i] for i in range(start, stop)], self._dim)
        rows = self._samples[(slice(None),) * (self._dim % self._samples.ndim) + (slice(start, stop),)]
        return torch.tensor(rows) if _is_array(rows) else rows  # a copy: it may be a read-only memory map

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


def _collated(samples: Iterator[Any], batch_size: int, dim: int) -> Iterator[Any]:
    while some := list(islice(samples, batch_size)):
        yield collate(some, dim)


def collate(samples: list[Any], dim: int) -> Any:
    """Return samples as one batch.

    >>> collate([(torch.zeros(3), 1), (torch.ones(3), 2)], 0)
    (tensor([[0., 0., 0.],
            [1., 1., 1.]]), tensor([1, 2]))

    Tuples and mappings are taken apart. Tensors and arrays of one shape are stacked, numbers become a tensor; what
    cannot be stacked becomes a `SampleList`, which is one input.

    Raises:
        ValueError: tuples of different lengths, or mappings with different keys.
    """
    batch = _together(samples, dim)
    return (batch,) if isinstance(batch, list) else batch


def _together(values: list[Any], dim: int) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        if any(not isinstance(value, Mapping) or value.keys() != first.keys() for value in values):
            raise ValueError(f"samples of one batch have different keys: the first one has {list(first)}")
        return {key: _together([value[key] for value in values], dim) for key in first}
    if isinstance(first, tuple):
        if any(not isinstance(value, tuple) or len(value) != len(first) for value in values):
            raise ValueError(f"samples of one batch have different lengths: the first one is a tuple of {len(first)}")
        return tuple([_together(list(column), dim) for column in zip(*values, strict=True)])
    if all(_is_array(value) for value in values):
        values = [torch.tensor(value) for value in values]
    if all(isinstance(value, torch.Tensor) for value in values):
        if len({(value.shape, value.dtype, value.device) for value in values}) == 1:
            return torch.stack(values, dim)
    elif all(isinstance(value, bool | int | float | complex) for value in values):
        return torch.tensor(values)
    return SampleList(values)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy's, or of a library that has its protocol."""
    return not isinstance(value, torch.Tensor) and hasattr(value, "__array_interface__")


def _has_axes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_array(value)


def _described(value: Any) -> str:
    if _has_axes(value):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return type(value).__name__
