"""When two values count as the same, and the rows of the report.

The rule. Integers and booleans are compared exactly, NaN equals NaN, an infinity equals itself. Two floating tensors
are the same if their largest absolute difference is at most `rtol` times a *scale*. They are not compared entry by
entry: an entry near zero may be the difference of larger numbers, and has their rounding error. The scale is

    of an output       the largest value in it
    of the loss        the loss, or the largest output where that is larger: rounding comes from the terms
    of a gradient      the largest value in it; and a *floor* is added, 1e-12 of the largest gradient of any parameter,
                       because some sums cancel completely: the gradient of a bias before a batch norm, or of the bias
                       of an attention's keys, is only rounding error of the others
    of a buffer        the largest in any buffer of its module that the step updates: a mean near zero is as exact as
                       its variance

`rtol` is that of the coarsest floating type among the outputs of submodules and the parameters, in the step on one
device: in float64 1e-10, for the first rounding errors grow in a deep model. Where float64 is not the model's own type
it is 1e-6: some code, such as numpy's, may compute in float32 unseen, and training does not resolve less.

**What rounding explains is measured** where it matters: a value differs, or its gradient is so small that the floor
could hide a fault. Then the step on one device is repeated with parameters and inputs changed by the floor, relative to
themselves, in one direction and in the other, and each value may differ by twice as much as it moved:

    it moved by 2 % of itself at most    the value is real, however small: the floor does not count for it
    it moved by more, and is below       zero in exact arithmetic: the floor is allowed, in float64
    the floor
    it moved by more                     *not judged*, unless it differs by more than that. An activation within
                                         rounding error of zero may be on the other side of a ReLU on several devices,
                                         and its part of the gradients appears or disappears. In float64 this is rare

**The model's own type** is compared after that, coarsely: it has other kernels, and other code may run in it. There a
gradient's scale is the largest gradient of any parameter (measured on a ResNet-18 whose rows were put into another
order: gradients moved by up to 3 times their own largest value, by 2e-6 of the largest of all). Among the millions of
activations of a ResNet some nearly always lie at the kink of a ReLU: gradients move by 1e-3 to 1e-2 of the largest when
parameters and inputs are changed by 1e-6 of themselves, and by as much between one device and two. So values that
differ may differ by twice as much as the changed step moves them (gradients: as it moves any of them), but by a tenth
of the scale at most, and the report says so; what it moves further is not judged. If a GPU computes float32 products
with TF32, float32 counts as float16.
"""

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.object_state import same_value, state_of
from unisono.primitives.sample_lists import SampleList
from unisono.runtime.precision import rounds_float32
from unisono.verification.report import Kind, Row

Tensors: TypeAlias = Mapping[str, torch.Tensor | None]  # by name, or by the path in an output

_RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_RTOL_COARSE = 0.25  # of every other floating type, such as those of 8 bits
_RTOL_WIDENED = 1e-6  # of a narrower model in float64: what widening does not see is rounded to float32
_FLOOR = 1e-12  # in float64, of the largest gradient; in other types it is `rtol`
_NO_GRADIENT = 1e-3  # of the loss: where all gradients are smaller, they may be rounding errors of it

_NUMBERS = (bool, int, float, complex)
_SHOWN = 60  # characters of a value in a note
_JUMPS = 2.0  # values may differ by so many times what nudges make of them
_JUMPS_AT_MOST = 0.1  # in the model's own type gradients may differ by so much of the largest at most
_MOVES = 0.02  # a nudge moves by no more what rounding does not decide


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed difference: `rtol` times the scale; of gradients also `floor` times the largest of all."""

    rtol: float
    floor: float = 0.0

    @classmethod
    def of(
        cls, dtypes: Iterable[torch.dtype], device: torch.device, rtol: float | None, *, is_widened: bool = False
    ) -> "Tolerance":
        """Return the tolerance of the caller, or else that of the coarsest of the types, which a model may not have."""
        real = {dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
        if rtol is None:
            if torch.float32 in real and rounds_float32(device):
                real.add(torch.float16)
            rtol = max((_RTOL.get(dtype, _RTOL_COARSE) for dtype in real), default=_RTOL[torch.float32])
            if real == {torch.float64} and is_widened:
                rtol = _RTOL_WIDENED
        return cls(rtol, min(rtol, _FLOOR) if real == {torch.float64} else rtol)

    def allowed(self, dtype: torch.dtype, scale: float) -> float:
        """Return the largest difference that rounding explains, in a tensor of this type."""
        return self.rtol * scale if dtype.is_floating_point or dtype.is_complex else 0.0

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
    values = values if values.is_floating_point() and values.itemsize > 1 else values.double()
    most = max(abs(bound.item()) for bound in values.aminmax())
    if not math.isfinite(most):
        most = values.masked_fill(~values.isfinite(), 0.0).abs().max().item()
    return most


def difference(one: torch.Tensor, many: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; infinite for NaN beside a number."""
    one, many = plain(one).cpu(), plain(many).cpu()
    if torch.equal(one, many):
        return 0.0
    gap = (one.double() - many.double()).abs()
    most = gap.max().item()
    if not math.isfinite(most):
        gap[(one == many) | (one.isnan() & many.isnan())] = 0.0
        most = gap.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    return most if one.is_floating_point() else max(most, 1.0)  # float64 does not tell all integers apart


def joined_numbers(one: Tensors, many: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of several devices; where one device has one number, what a script makes of the replicas'.

    That is their mean; of integers their sum. If all are equal to that of one device, it is that number; booleans that
    are not all equal to it count as different.
    """
    return {path: _in_one_number(one.get(path), numbers) for path, numbers in many.items()}


def _in_one_number(one: torch.Tensor | None, many: torch.Tensor) -> torch.Tensor:
    if one is None or one.dim() or many.dim() != 1:
        return many
    if many.is_floating_point() or many.is_complex():
        return many.mean()
    if bool((many == one).all()):
        return one
    return ~one if many.dtype is torch.bool else many.sum().to(many.dtype)


def values_in(one: Any, many: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value on one device, what several devices have there) for each value of an output without tensors.

    Where the two have not one structure, it is the container. Tensors, also those of registered batches, are left out.
    """
    is_tensors = isinstance(one, torch.Tensor) or (batch_type_of(one) is not None and not isinstance(one, SampleList))
    if is_tensors or (one is None and many is None):
        return
    inside, of_many = _children(one), _children(many)
    if inside is None or of_many is None or type(one) is not type(many) or inside.keys() != of_many.keys():
        yield path, one, many
    else:
        for key, child in inside.items():
            yield from values_in(child, of_many[key], path + pytree.step(one, key))


def _children(value: Any) -> Mapping[Any, Any] | None:
    return dict(enumerate(value)) if isinstance(value, SampleList) else pytree.children(value)


def row_of_value(mode: str, path: str, one: Any, many: Any, tolerance: Tolerance) -> Row:
    """Return the row for a value of an output that is no tensor.

    Numbers of the replicas count as 0-dim outputs do: see `joined_numbers`.
    """
    said = f"{_shown(one)} on one device, {_shown(many)} on several"
    one, many = _of_python(one), [*map(_of_python, many)] if isinstance(many, list) else _of_python(many)
    if isinstance(one, int | float | complex) and _are_numbers(many, type(one)):
        with contextlib.suppress(
            RuntimeError, OverflowError, ValueError
        ):  # an integer too large for a tensor has to be the same
            of_one = _as_tensor(one)
            joined = _in_one_number(of_one, _as_tensor(many))
            if joined.dim() == of_one.dim():
                gap, scale = difference(of_one, joined), largest(of_one)
                allowed = tolerance.allowed(of_one.dtype, scale)
                return Row(mode, Kind.OUTPUT, path, (), scale, scale, gap, allowed, "" if gap <= allowed else said)
        many = many[0] if isinstance(many, list) and all(each == many[0] for each in many) else many
    is_same = type(one) is type(many) and pytree.children(one) is None and holds_the_same(one, many, tolerance)
    return Row(mode, Kind.OUTPUT, path, difference=0.0 if is_same else math.inf, note="" if is_same else said)


def _of_python(value: Any) -> Any:
    """Return a number of numpy's, or a fraction, as Python's; anything else as it is."""
    if not isinstance(value, numbers.Complex) or isinstance(value, int | float | complex):
        return value
    return value.item() if hasattr(value, "item") else float(value)  # type: ignore[arg-type]


def _are_numbers(value: Any, kind: type) -> bool:
    return all(type(each) is kind for each in (value if isinstance(value, list) and value else [value]))


def _as_tensor(value: Any) -> torch.Tensor:
    kind = type(value[0] if isinstance(value, list) else value)
    dtype = {float: torch.float64, complex: torch.complex128}.get(kind)
    return torch.tensor(value, dtype=dtype, device="cpu")


def _shown(value: Any) -> str:
    text = repr(value)
    length = f" ({len(value)} entries)" if isinstance(value, list | tuple | dict) else ""
    return (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...") + length


def holds_the_same(one: Any, other: Any, tolerance: Tolerance) -> bool:
    """Return whether two values, or objects of one class, hold the same; floating ones within the tolerance."""
    if isinstance(one, (*_NUMBERS, str, bytes, torch.Tensor)):
        return _same_within(one, other, tolerance)
    state, of_other = state_of(one), state_of(other)
    if not state and not of_other:
        return same_value(one, other) or type(one) is type(other)
    return state.keys() == of_other.keys() and all(_same_within(state[p], of_other[p], tolerance) for p in state)


def _same_within(one: Any, other: Any, tolerance: Tolerance) -> bool:
    if type(one) is type(other) and isinstance(one, float | complex | torch.Tensor):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return one.shape == other.shape and one.dtype == other.dtype and tolerance.same(one, other)
    return same_value(one, other)


def own_scales(tensors: Tensors) -> dict[str, float]:
    """Return the largest value of each tensor."""
    return {name: largest(tensor) for name, tensor in tensors.items() if tensor is not None}


def module_scales(buffers: Tensors, updated: Container[str]) -> dict[str, float]:
    """Return for each buffer the largest value of its module's updated floating ones; of other buffers their own."""
    own = own_scales(buffers)
    floating = [
        n for n, buffer in buffers.items() if buffer is not None and buffer.is_floating_point() and n in updated
    ]
    of_module: dict[str, float] = {}
    for name in floating:
        module = name.rpartition(".")[0]
        of_module[module] = max(of_module.get(module, 0.0), own[name])
    return own | {name: of_module[name.rpartition(".")[0]] for name in floating}


def rows_of(
    mode: str,
    kind: Kind,
    one: Tensors,
    many: Tensors,
    tolerance: Tolerance,
    scales: Mapping[str, float] | None = None,
    floor: float = 0.0,
) -> Iterator[Row]:
    """Yield a row for each tensor that is there on one device, or on several.

    Args:
        scales: of each tensor; None: its own largest value.
        floor: what any of them may differ by in addition.
    """
    own = own_scales(one)
    scales = own if scales is None else scales
    for name in dict.fromkeys([*one, *many]):
        a, b = one.get(name), many.get(name)
        value, scale = own.get(name, 0.0), scales.get(name, 0.0)
        if a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype:
            allowed = tolerance.allowed(a.dtype, scale) + floor
            has_numbers = bool(value) or not a.numel() or bool(plain(a).isfinite().any())
            yield Row(mode, kind, name, tuple(a.shape), value, scale, difference(a, b), allowed, judged=has_numbers)
        elif a is not None or b is not None:
            note = f"{_described(a)} on one device, {_described(b)} on several"
            shape = tuple((b if a is None else a).shape)  # type: ignore[union-attr]
            yield Row(mode, kind, name, shape, value, scale, math.inf, 0.0, note)


def gradient_rows(
    mode: str, one: Tensors, many: Tensors, tolerance: Tolerance, *, coarsely: bool, loss: float = 0.0
) -> Iterator[Row]:
    """Yield the rows of gradients: each relative to itself; `coarsely`, to the largest of all."""
    most = max(own_scales(one).values(), default=0.0)
    if coarsely:
        return rows_of(mode, Kind.GRADIENT, one, many, tolerance, dict.fromkeys(one, most))
    floor = tolerance.floor * max(most, _NO_GRADIENT * loss)
    return rows_of(mode, Kind.GRADIENT, one, many, tolerance, floor=floor)


def _described(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def decided(
    rows: Sequence[Row], nudged: Iterable[Sequence[Row]], tolerance: Tolerance, *, coarsely: bool = False
) -> list[Row]:
    """Return the rows, the undecided ones judged by how far nudges move each value; see the module's docstring.

    Args:
        nudged: comparisons of the step on one device with the same step whose parameters and inputs were nudged, in
            one direction, then in the other. One is asked for only if the last one leaves a difference.
        coarsely: the rows are those of the model's own type.
    """
    moved: dict[tuple[Kind, str], float] = {}
    judged = [*rows]
    for of_one in nudged if any(is_undecided(row, tolerance, coarsely=coarsely) for row in rows) else ():
        for row in of_one:
            key = row.kind, "" if coarsely and row.kind is Kind.GRADIENT else row.name  # coarsely, the most of all
            moved[key] = max(moved.get(key, 0.0), row.difference)
        judged = [_decided(row, moved, tolerance, coarsely) for row in rows]
        if not any(row.differs for row in judged):
            break
    return judged


def is_undecided(row: Row, tolerance: Tolerance, *, coarsely: bool = False) -> bool:
    """Return whether it matters how far rounding moves the value: it differs, or the floor may hide that it does."""
    if row.differs or coarsely or row.kind is not Kind.GRADIENT:
        return row.differs and math.isfinite(row.difference)
    return row.difference > tolerance.rtol * row.value and row.allowed > _MOVES * row.value


def _decided(row: Row, moved: Mapping[tuple[Kind, str], float], tolerance: Tolerance, coarsely: bool) -> Row:
    if not is_undecided(row, tolerance, coarsely=coarsely):
        return row
    if coarsely and row.allowed:  # integers have to be equal
        explained = _JUMPS * moved.get((row.kind, "" if row.kind is Kind.GRADIENT else row.name), 0.0)
        allowed = max(row.allowed, min(explained, _JUMPS_AT_MOST * row.scale))
        return dataclasses.replace(row, allowed=allowed, judged=not allowed < row.difference <= explained)
    if coarsely:
        return row
    by = moved.get((row.kind, row.name), 0.0)
    if row.scale and by <= _MOVES * row.scale:
        allowed = tolerance.rtol * row.scale if row.allowed else 0.0  # integers have to be equal
        return dataclasses.replace(row, allowed=max(allowed, _JUMPS * by))
    if row.kind is Kind.GRADIENT and row.value <= row.allowed and tolerance.floor < tolerance.rtol:
        return row  # zero but for rounding; in narrower types a nudge moves too much to tell
    return dataclasses.replace(row, judged=row.difference > _JUMPS * by)
