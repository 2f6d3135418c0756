"""Attributes of modules that hold numbers, as they are before and after a step: metrics, counters, running values.

What a replica assigns is lost when its forward ends, so an attribute that forward updates differs from the plain
module's, and nothing else shows it. Compared are attributes that hold numbers before the step and others after it:
numbers, tensors without a history, and plain containers of these alone. One that holds none before is filled, as a
cache is, or keeps values for who reads them: its name is a note. Objects, functions, iterators and the like are not
looked at.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from unisono.data_parallel import DataParallel
from unisono.primitives.references import LARGE
from unisono.verification.compare import Tolerance, difference, largest, plain
from unisono.verification.report import Kind, Row

Numbers: TypeAlias = dict[str, torch.Tensor]  # by the path in an attribute's value
_CONTAINERS = (list, tuple, deque, dict, OrderedDict, defaultdict)
_DEPTH = 4
_MOST_BITS = 62
_OWN = frozenset(vars(nn.Module()))


class _NoNumbersError(Exception):
    pass


def numbers_in(module: nn.Module) -> dict[str, Numbers]:
    """Return copies of what the attributes of a module and of its submodules hold, by name: those that hold numbers."""
    found: dict[str, Numbers] = {}
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule | DataParallel):  # not in its `__dict__`; a wrapper's own
            continue
        for name, value in vars(part).items():
            if name not in _OWN:
                try:
                    found[f"{path}.{name}" if path else name] = dict(_numbers(value, "", _DEPTH))
                except _NoNumbersError:
                    continue
    return found


def _numbers(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    kind = type(value)
    if kind in (bool, float, complex) or (kind is int and value.bit_length() <= _MOST_BITS):
        yield path, torch.tensor(value, dtype=torch.float64 if kind is float else None)
    elif kind is torch.Tensor and _is_state(value):
        yield path, plain(value).to("cpu", copy=True)
    elif kind in _CONTAINERS and len(value) <= LARGE and depth:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, f"{path}[{key!r}]", depth - 1)
    else:
        raise _NoNumbersError


def _is_state(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be compared, and are no part of a graph, as a derived weight's are."""
    return tensor.layout is torch.strided and not (tensor.requires_grad or tensor.is_nested or tensor.is_meta)


def attribute_rows(
    mode: str,
    before: Mapping[str, Numbers],
    one: Mapping[str, Numbers],
    many: Mapping[str, Numbers],
    tolerance: Tolerance,
) -> Iterator[Row]:
    """Yield a row for each number or tensor in an attribute that the step has updated, on one device or on several."""
    for name, start in before.items():
        after, of_many = one.get(name), many.get(name)
        if after is None or of_many is None or (_same(start, after) and _same(start, of_many)):
            continue
        if after.keys() != of_many.keys():
            note = f"{len(after)} values on one device, {len(of_many)} on several"
            yield Row(mode, Kind.ATTRIBUTE, name, difference=float("inf"), note=note)
            continue
        for path, tensor in after.items():
            other = of_many[path]
            if tensor.shape != other.shape or tensor.dtype != other.dtype:
                note = f"{_described(tensor)} on one device, {_described(other)} on several"
                yield Row(mode, Kind.ATTRIBUTE, name + path, difference=float("inf"), note=note)
                continue
            scale = largest(tensor)
            gap, allowed = difference(tensor, other), tolerance.allowed(tensor.dtype, scale)
            yield Row(mode, Kind.ATTRIBUTE, name + path, tuple(tensor.shape), scale, gap, allowed)


def filled(before: Mapping[str, Numbers], one: Mapping[str, Numbers], many: Mapping[str, Numbers]) -> list[str]:
    """Return names of attributes that held no numbers before, and hold some after a step on one device only."""
    return sorted(one.keys() - before.keys() - many.keys())


def _same(one: Numbers, other: Numbers) -> bool:
    return one.keys() == other.keys() and all(
        tensor.shape == other[path].shape and tensor.dtype == other[path].dtype and not difference(tensor, other[path])
        for path, tensor in one.items()
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
