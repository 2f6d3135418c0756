"""When two values count as the same, and the rows of the report.

The rule. Integers and booleans are compared exactly, NaN equals NaN, an infinity equals itself. Two floating tensors
are the same if their largest absolute difference is at most `rtol` times a *largest value*. They are not compared entry
by entry: an entry near zero may be the difference of larger numbers, and has their rounding error. The largest value is

    of an output       the largest in it
    of the loss        the loss, or the largest output where that is larger: rounding comes from the terms
    of a gradient      the largest gradient of any parameter. Replicas sum over rows in another order, and some sums
                       cancel completely: the gradient of a bias before a batch norm is only rounding error of the
                       others (measured on a ResNet-18 whose rows were put into another order: gradients moved by up
                       to 3 times their own largest value, by 2e-6 of the largest of all)
    of a buffer        the largest in any buffer of its module: a mean near zero is as exact as its variance

Gradients can jump where outputs do not. An activation within rounding error of zero may be on the other side of a ReLU
on several devices, and its part of the gradients appears or disappears; among the millions of activations of a ResNet
this nearly always happens (measured: gradients move by 1e-3 to 1e-2 of the largest when parameters and inputs are
changed by 1e-6 of themselves, and by as much between one device and two). So if gradients differ and outputs do not,
the step on one device is repeated with parameters and inputs changed by `rtol` of themselves. Gradients may then differ
by twice as much as they moved, but by a tenth of the largest at most, and the report says so. In float64 a jump is very
rare.

`rtol` is that of the coarsest floating type in the step on one device: some hundred units in the last place for
float32, which leaves room for a deep model to amplify the first rounding errors; less for the coarser types. If a GPU
computes float32 products with TF32, float32 counts as float16.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.runtime import devices as _devices
from unisono.verification.report import Kind, Row

_RTOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_RTOL_COARSE = 0.25  # of every other floating type, such as those of 8 bits

_JUMPS = 2.0  # gradients may differ by so many times what nudges make of them,
_JUMPS_AT_MOST = 0.1  # and by so much of the largest at most

_Number = bool | int | float | complex
_Comparable = _Number | str | bytes | torch.Size | torch.dtype | None


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed difference: `atol`, plus `rtol` times the largest value."""

    rtol: float
    atol: float

    @classmethod
    def of(
        cls, dtypes: Iterable[torch.dtype], device: torch.device, rtol: float | None, atol: float | None
    ) -> "Tolerance":
        """Return the tolerances of the caller, or else those of the coarsest of the types."""
        if rtol is None:
            real = {dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
            if torch.float32 in real and _devices.rounds_float32(device):
                real.add(torch.float16)
            rtol = max((_RTOL.get(dtype, _RTOL_COARSE) for dtype in real), default=_RTOL[torch.float32])
        return cls(rtol, atol or 0.0)

    def allowed(self, dtype: torch.dtype, largest: float) -> float:
        """Return the largest difference that rounding explains, in a tensor of this type."""
        return self.atol + self.rtol * largest if dtype.is_floating_point or dtype.is_complex else 0.0

    def same(self, one: torch.Tensor, many: torch.Tensor) -> bool:
        """Return whether two tensors of one shape are the same, the first being that of one device."""
        return difference(one, many) <= self.allowed(one.dtype, largest(one))


def tensors_in(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor in `value`, also in batches of registered classes.

    Packed sequences are padded: the order of sequences of equal length inside is not specified.
    """
    for path, leaf in pytree.leaves(value):
        batch_type = batch_type_of(leaf)
        if isinstance(leaf, torch.Tensor):
            yield path, leaf
        elif isinstance(leaf, PackedSequence):
            padded, lengths = pad_packed_sequence(leaf, batch_first=True)
            yield from ((f"{path}.data", padded), (f"{path}.lengths", lengths))
        elif batch_type is not None:
            yield from ((f"{path}<{i}>", tensor) for i, tensor in enumerate(batch_type.parts(leaf)[0]))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` as a dense, real tensor without history; it may share its memory."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def largest(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of `tensor`; 0 if there is none."""
    values = plain(tensor)
    if not values.numel():
        return 0.0
    if values.dtype in _RTOL:  # the common case, in one pass
        most = max(abs(end.item()) for end in values.aminmax())
        if math.isfinite(most):
            return most
    finite = values.double().abs()
    finite = finite[finite.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def difference(one: torch.Tensor, many: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; infinite for NaN beside a number."""
    one, many = plain(one), plain(many)
    if not _devices.same_device(one.device, many.device):
        one, many = one.cpu(), many.cpu()
    if torch.equal(one, many):
        return 0.0
    if one.dtype in (torch.float32, torch.float64):
        gap = (one - many).abs_().max().item()
        if math.isfinite(gap):
            return gap
    one_is_floating = one.is_floating_point()
    one, many = one.cpu().double(), many.cpu().double()
    unequal = (one != many) & ~(one.isnan() & many.isnan())
    if not unequal.any():  # NaN beside NaN; or integers of more than 53 bits
        return 0.0 if one_is_floating else 1.0
    return (one[unequal] - many[unequal]).abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def output_rows(mode: str, one: Any, many: Any, tolerance: Tolerance) -> Iterator[Row]:
    """Yield a row for every tensor and every plain value of two outputs, matched by their paths."""
    of_many = dict(_comparable_leaves(many))
    for path, leaf in _comparable_leaves(one):
        if path in of_many:
            yield from _leaf_rows(mode, path, leaf, of_many.pop(path), tolerance)
        elif isinstance(leaf, _Number) and f"{path}[0]" in of_many:  # gathered as a list
            numbers = [of_many.pop(key) for key in [f"{path}[{i}]" for i in range(len(of_many))] if key in of_many]
            yield _number_row(mode, path, leaf, numbers, tolerance)
        else:
            yield _incomparable(mode, path, "on one device only")
    for path in of_many:
        yield _incomparable(mode, path, "on several devices only")


def loss_row(mode: str, one: torch.Tensor, many: torch.Tensor, largest_output: float, tolerance: Tolerance) -> Row:
    """Return the row of the loss."""
    scale = max(largest(one), largest_output)
    return Row(mode, Kind.LOSS, "", (), scale, difference(one, many), tolerance.allowed(one.dtype, scale))


def gradient_rows(
    mode: str,
    one: Mapping[str, torch.Tensor | None],
    many: Mapping[str, torch.Tensor | None],
    tolerance: Tolerance,
) -> Iterator[Row]:
    """Yield a row for each gradient."""
    scale = max((largest(grad) for grad in one.values() if grad is not None), default=0.0)
    for name, grad in one.items():
        other = many[name]
        if grad is not None and other is not None:
            allowed = tolerance.allowed(grad.dtype, scale)
            yield Row(mode, Kind.GRADIENT, name, tuple(grad.shape), scale, difference(grad, other), allowed)
        elif grad is not other:
            has_one, has_none = ("one device", "several") if other is None else ("several", "one device")
            there = grad if grad is not None else other
            shape = None if there is None else tuple(there.shape)
            note = f"a gradient on {has_one}, none on {has_none}"
            yield Row(mode, Kind.GRADIENT, name, shape, scale, math.inf, 0.0, note)


def sensitivity(one: Mapping[str, torch.Tensor | None], nudged: Mapping[str, torch.Tensor | None]) -> float:
    """Return how far gradients moved when everything was nudged, relative to the largest gradient."""
    scale = max((largest(grad) for grad in one.values() if grad is not None), default=0.0)
    moved = [
        difference(grad, other)
        for name, grad in one.items()
        if grad is not None and (other := nudged.get(name)) is not None
    ]
    return max(moved) / scale if moved and scale else 0.0


def allowing(rows: Sequence[Row], sensitivity: float) -> list[Row]:
    """Return the rows; gradients may differ as far as nudges move them."""
    part = min(_JUMPS * sensitivity, _JUMPS_AT_MOST)
    return [
        dataclasses.replace(row, allowed=max(row.allowed, part * row.largest)) if row.kind is Kind.GRADIENT else row
        for row in rows
    ]


def buffer_rows(
    mode: str, one: Mapping[str, torch.Tensor], many: Mapping[str, torch.Tensor], tolerance: Tolerance
) -> Iterator[Row]:
    """Yield a row for each buffer."""
    scales: dict[str, float] = {}
    for name, buffer in one.items():
        if buffer.is_floating_point() or buffer.is_complex():
            scales[_module_of(name)] = max(scales.get(_module_of(name), 0.0), largest(buffer))
    for name, buffer in one.items():
        scale = scales.get(_module_of(name), 0.0) if buffer.is_floating_point() else largest(buffer)
        yield _row(mode, Kind.BUFFER, name, buffer, many[name], scale, tolerance)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _row(
    mode: str, kind: Kind, name: str, one: torch.Tensor, many: torch.Tensor, scale: float, tolerance: Tolerance
) -> Row:
    shape = tuple(one.shape)
    if one.shape != many.shape:
        note = f"{shape} on one device, {tuple(many.shape)} on several"
    elif one.dtype != many.dtype:
        note = f"{one.dtype} on one device, {many.dtype} on several"
    else:
        return Row(mode, kind, name, shape, scale, difference(one, many), tolerance.allowed(one.dtype, scale))
    return Row(mode, kind, name, shape, scale, math.inf, 0.0, note)


def _comparable_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    yield from tensors_in(value)
    for path, leaf in pytree.leaves(value):
        if not isinstance(leaf, torch.Tensor) and batch_type_of(leaf) is None:
            yield path, leaf


def _leaf_rows(mode: str, path: str, one: Any, many: Any, tolerance: Tolerance) -> Iterator[Row]:
    if isinstance(one, torch.Tensor) and isinstance(many, torch.Tensor):
        scale = largest(one)
        if one.dim() == 0 and many.dim() == 1:
            row = _row(mode, Kind.OUTPUT, path, one, in_one_number(one, many), scale, tolerance)
            yield dataclasses.replace(row, note=row.note or f"the mean of {many.numel()} replicas' numbers")
        else:
            yield _row(mode, Kind.OUTPUT, path, one, many, scale, tolerance)
    elif type(one) is not type(many) or (isinstance(one, _Comparable) and one != many):
        given = [f"{v.dtype} tensor" if isinstance(v, torch.Tensor) else repr(v)[:50] for v in (one, many)]
        yield _incomparable(mode, path, f"{given[0]} on one device, {given[1]} on several")


def _number_row(mode: str, path: str, one: Any, many: Sequence[Any], tolerance: Tolerance) -> Row:
    """Compare a Python number with those of the replicas."""
    tensor = torch.tensor(one)
    row = _row(mode, Kind.OUTPUT, path, tensor, in_one_number(tensor, torch.tensor(many)), abs(one), tolerance)
    return dataclasses.replace(row, shape=None, note=f"one number a replica, {many}")


def in_one_number(one: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
    """Return the number that a training script would compute from one number a replica.

    That is their mean; of integers their sum. If all are equal to that of one device, it is that number; booleans that
    are not all equal to it count as different.
    """
    if many.is_floating_point() or many.is_complex():
        return many.mean()
    if bool((many == one).all()):
        return one
    return ~one if many.dtype is torch.bool else many.sum().to(many.dtype)


def _incomparable(mode: str, path: str, note: str) -> Row:
    return Row(mode, Kind.OUTPUT, path, None, 0.0, math.inf, 0.0, note)
