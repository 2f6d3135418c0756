"""What holds for every call: nested inputs of every kind, any number of rows, one to eight replicas, every `shares`.

Hypothesis draws the calls, 200 for each test in `make test` and 2,000 in `make test-all` (conftest.py). What is
expected is said independently of the code under test: torch's own `chunk` and `tensor_split`, exact fractions, slices
of the whole batch, and the plain module on it. These are properties of the verbs, and of the wrapper, with replicas in
threads and as the plain composition.
"""

import copy
import dataclasses
import functools
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import unisono
from helpers.losses import loss_of
from helpers.modules import Composed

pytestmark = [
    pytest.mark.property,
    # Outputs of any form are drawn. What each is warned of is tested in test_output_rows.py.
    pytest.mark.filterwarnings("ignore:Each replica returned a scalar:UserWarning"),
    pytest.mark.filterwarnings("ignore:.* in each replica, computed from its own rows:UserWarning"),
    pytest.mark.filterwarnings("ignore:.* with as many entries as each replica has rows:UserWarning"),
]

Pair = namedtuple("Pair", "left right")


class Sample(NamedTuple):
    image: Any
    label: Any = None


Record = dataclasses.make_dataclass("Record", ["x", ("note", Any, "no note")])
Frozen = dataclasses.make_dataclass("Frozen", ["x"], frozen=True)
Slotted = dataclasses.make_dataclass("Slotted", ["x"], slots=True)


# ---- what is drawn -------------------------------------------------------------------------------

NUMBERS = [0, 7, True, 2.5, 1j]
OTHERS = [None, "", "text", b"bytes", torch.Size([2, 3]), torch.float16, len]  # the last: an object of unknown class
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.bool]

sizes_of_other_axes = st.lists(st.integers(0, 3), max_size=2)


def numbered(draw: st.DrawFn, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of any dtype whose entries all differ (but for bool), perhaps with a gradient."""
    dtype, first = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9))
    tensor = torch.arange(first, first + math.prod(shape)).reshape(tuple(shape)).to(dtype)
    if draw(st.booleans()):  # a part of a larger one, not contiguous
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.requires_grad_(dtype in FLOATS and draw(st.booleans()))


@st.composite
def tensors(draw: st.DrawFn, rows: int, axis: int | None) -> torch.Tensor:
    """Tensors with `rows` rows on `axis`, and 0-dim ones, which have none; of any shape where `axis` is None."""
    shape = draw(sizes_of_other_axes)
    if axis is not None:
        if draw(st.integers(0, 3)) == 3:
            return numbered(draw, ())
        if axis == 1 and not shape:
            shape = [2]
        shape.insert(len(shape) if axis == -1 else axis, rows)
    return numbered(draw, shape)


@st.composite
def packed(draw: st.DrawFn, rows: int) -> PackedSequence:
    """Packed sequences of 1 to 3 steps each, sorted by length or not."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=rows, max_size=rows))
    steps = numbered(draw, [sum(lengths), 2])
    sequences = steps.detach().split(lengths)
    batch = pack_sequence(sequences, enforce_sorted=lengths == sorted(lengths, reverse=True) and draw(st.booleans()))
    batch.data.requires_grad_(steps.requires_grad and not steps.is_complex())  # torch cannot pack those
    return batch


@functools.cache
def values(rows: int, axis: int | None) -> st.SearchStrategy[Any]:
    """Leaves of all kinds, in containers of all kinds, to some depth."""

    def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists, two = st.lists(inside, max_size=3), st.tuples(inside, inside)
        dicts = st.dictionaries(st.sampled_from(["a", "b", 0, 1]), inside, max_size=3)
        return st.one_of(
            lists,
            lists.map(tuple),
            dicts,
            dicts.map(OrderedDict),
            dicts.map(lambda items: defaultdict(list, items)),
            two.map(lambda pair: Pair(*pair)),
            inside.map(Sample),
            two.map(lambda pair: Record(*pair)),
            inside.map(Frozen),
            inside.map(Slotted),
        )

    leaves = [tensors(rows, axis), tensors(rows, axis), st.sampled_from([*NUMBERS, *OTHERS])]
    if rows and axis is not None:
        leaves.append(packed(rows))
    return st.recursive(st.one_of(leaves), containers, max_leaves=6)


def weights(num_replicas: int) -> st.SearchStrategy[list[float]]:
    """One weight a replica, 0 or more, not all of them 0."""
    weight = st.one_of(st.integers(0, 9), st.floats(0, allow_infinity=False))
    return st.lists(weight, min_size=num_replicas, max_size=num_replicas).filter(any)


@dataclasses.dataclass
class Call:
    """The inputs of one call and how they are to be split.

    `axes`: for every input, by position or name, on which axis it has its rows; None for no rows.
    """

    num_replicas: int
    rows: int
    dim: int
    shares: str | list[float]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    axes: dict[int | str, int | None]

    def sizes(self) -> list[int]:
        """How many rows each replica has that has any; one replica runs where there are none."""
        return [size for size in expected_sizes(self.rows, self.num_replicas, self.shares) if size] or [0]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    num_replicas = draw(st.integers(1, 8))
    rows = draw(st.integers(0, 2 * num_replicas + 1))
    rule: Any = draw(st.sampled_from(["chunk", "even", "weights"]))
    if rule == "weights":
        rule = draw(weights(num_replicas))
    dim = draw(st.sampled_from([0, 1, -1]))
    axis_of_each = st.just(dim) if draw(st.booleans()) else st.sampled_from([0, 1, -1, None])
    keys = [*range(draw(st.integers(0, 3))), *draw(st.sampled_from([(), ("mask",), ("mask", "target")]))]
    axes = {key: draw(axis_of_each) for key in keys}
    drawn = {key: draw(tensors(rows, axis) if key == 0 else values(rows, axis)) for key, axis in axes.items()}
    inputs = tuple(drawn[key] for key in keys if isinstance(key, int))
    kwargs = {key: drawn[key] for key in keys if isinstance(key, str)}
    return Call(num_replicas, rows, dim, rule, inputs, kwargs, axes)


# ---- what is expected ----------------------------------------------------------------------------


def expected_sizes(rows: int, num_replicas: int, shares: str | Sequence[float]) -> list[int]:
    """Each replica's number of rows, by torch's own functions; by weights, the largest remainder in fractions."""
    batch = torch.empty(rows)
    if shares == "chunk":
        sizes = [len(chunk) for chunk in batch.chunk(num_replicas)]
        return sizes + [0] * (num_replicas - len(sizes))
    if shares == "even":
        return [len(part) for part in batch.tensor_split(num_replicas)]
    total = sum(map(Fraction, shares))
    quotas = [rows * Fraction(weight) / total for weight in shares]
    sizes = [math.floor(quota) for quota in quotas]
    while sum(sizes) < rows:
        missing = [quota - size for quota, size in zip(quotas, sizes, strict=True)]
        sizes[missing.index(max(missing))] += 1
    return sizes


def by_key(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    return {**dict(enumerate(inputs)), **kwargs}


def children(value: Any) -> dict[Any, Any] | None:
    """A container's children, in order; None for a leaf."""
    if isinstance(value, torch.Size | PackedSequence):
        return None
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def leaves_of(values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Walk values side by side, leaf by leaf; check that all have the structure and the types of the first one."""
    inside = children(values[0])
    if inside is None:
        yield tuple(values)
        return
    for other in values[1:]:
        assert type(other) is type(values[0])
        assert list(children(other) or {}) == list(inside)
        assert getattr(other, "default_factory", None) is getattr(values[0], "default_factory", None)
    for key in inside:
        yield from leaves_of([(children(value) or {})[key] for value in values])


def tensors_in(value: Any) -> list[Any]:
    """The tensors and packed sequences in a value."""
    return [leaf for (leaf,) in leaves_of([value]) if isinstance(leaf, torch.Tensor | PackedSequence)]


def assert_equal(given: Any, expected: Any) -> None:
    """The same type and value: of tensors the same dtype, shape and bits, of packed sequences the same sequences."""
    assert type(given) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(given.detach(), expected.detach(), rtol=0, atol=0)
    elif isinstance(expected, PackedSequence):
        for one, other in zip(unpack_sequence(given), unpack_sequence(expected), strict=True):
            assert_equal(one, other)
    else:
        assert given == expected


def assert_dealt(shards: Sequence[Any], whole: Any, sizes: Sequence[int], axis: int | None) -> None:
    """Shard i has the next `sizes[i]` rows of every tensor, and all else whole: nothing is dropped or repeated."""
    for original, *parts in leaves_of([whole, *shards]):
        if isinstance(original, PackedSequence):
            sequences = [unpack_sequence(part) for part in parts]
            assert [len(some) for some in sequences] == list(sizes)
            for one, other in zip(chain(*sequences), unpack_sequence(original), strict=True):
                assert_equal(one, other)
        elif isinstance(original, torch.Tensor):
            rows = axis is not None and original.dim() > 0
            expected = original.split(list(sizes), axis) if rows else [original] * len(parts)
            for part, other in zip(parts, expected, strict=True):
                assert_equal(part, other)
        else:
            assert all(part is original for part in parts)


def assert_gathered(given: Any, expected: Any, num_outputs: int, axis: int | None) -> None:
    """`given` is what comes out when `expected` goes in and each of `num_outputs` replicas returns its input."""
    for original, gathered in leaves_of([expected, given]):
        number = isinstance(original, bool | int | float | complex)
        if axis is not None and number:
            assert_equal(gathered, [original] * num_outputs)
        elif axis is not None and isinstance(original, torch.Tensor) and original.dim() == 0:
            assert_equal(gathered, torch.stack([original] * num_outputs))
        elif number or isinstance(original, torch.Tensor | PackedSequence):
            assert_equal(gathered, original)
        else:
            assert gathered is original


# ---- the properties ------------------------------------------------------------------------------

wrappers = st.sampled_from([unisono.DataParallel, Composed])


def wrapped(wrapper: type[unisono.DataParallel], module: nn.Module, call: Call, out_dims: Any) -> Any:
    axes = {"dim": call.dim}
    if any(axis != call.dim for axis in call.axes.values()):
        axes |= {"in_dims": call.axes, "out_dims": out_dims}
    return wrapper(module, ["cpu"] * call.num_replicas, shares=call.shares, **axes)


class Witness(nn.Module):
    """Returns what it is given, and keeps it by the first of its row numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, dict[int | str, Any]] = {}

    def forward(self, *inputs: Any, row_numbers: torch.Tensor, **kwargs: Any) -> Any:
        first = int(row_numbers.flatten()[0]) if row_numbers.numel() else 0
        self.seen[first] = by_key(inputs, kwargs)
        return self.seen[first]


@given(wrappers, calls())
def test_each_row_goes_to_one_replica_and_comes_back(wrapper: type[unisono.DataParallel], call: Call) -> None:
    """S1, S2, S3, S4, S6, S7, S9, S10, S13, S15, G1, G3, G4, G6: by every `shares`, and on any axis."""
    model = wrapped(wrapper, Witness(), call, call.axes)
    row_numbers = torch.arange(call.rows)
    output = model(*call.inputs, **call.kwargs, row_numbers=row_numbers[None] if call.dim == 1 else row_numbers)
    sizes = call.sizes()
    seen = [shard for _, shard in sorted(model.module.seen.items())]
    assert len(seen) == len(sizes)
    if call.num_replicas > 1 and wrapper is unisono.DataParallel:
        assert [timing.rows for timing in model.replica_timings] == sizes
    for key, value in by_key(call.inputs, call.kwargs).items():
        assert_dealt([shard[key] for shard in seen], value, sizes, call.axes[key])
        gathers = call.num_replicas > 1  # else it is the plain module
        assert_gathered(output[key], value, len(sizes), call.axes[key] if gathers else None)


class Rowwise(nn.Module):
    """Computes each row of every tensor from that row, from parameters, and from what belongs to all rows."""

    def __init__(self, axes: Mapping[int | str, int | None]) -> None:
        super().__init__()
        self.axes = axes
        self.scale = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **kwargs: Any) -> dict[int | str, list[Any]]:
        given = {key: tensors_in(value) for key, value in by_key(inputs, kwargs).items()}
        of_all = torch.ones((), dtype=torch.float64)
        for key, leaves in given.items():
            of_all = of_all + sum(number(leaf).sum() for leaf in leaves if not self.has_rows(key, leaf))
        return {
            key: [self.rows(leaf, self.axes[key], of_all) for leaf in leaves if self.has_rows(key, leaf)]
            for key, leaves in given.items()
        }

    def has_rows(self, key: int | str, leaf: Any) -> bool:
        return self.axes[key] is not None and (isinstance(leaf, PackedSequence) or leaf.dim() > 0)

    def rows(self, leaf: Any, axis: Any, of_all: torch.Tensor) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=self.rows(leaf.data, 0, of_all))
        x = number(leaf)
        other_axes = [other for other in range(x.dim()) if other != axis % x.dim()]
        row_sums = x.sum(other_axes, keepdim=True) if other_axes else x
        return (torch.tanh(x * self.scale[0]) + row_sums * self.scale[1]) * of_all


def number(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as moderate real numbers in double precision."""
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128)
        tensor = tensor.real + tensor.imag
    return tensor.to(torch.float64) / 64


def flat(outputs: dict[int | str, list[Any]]) -> list[torch.Tensor]:
    """All tensors; packed sequences as one, in the caller's order."""
    leaves = [leaf for of_key in outputs.values() for leaf in of_key]
    return [torch.cat(unpack_sequence(leaf)) if isinstance(leaf, PackedSequence) else leaf for leaf in leaves]


def gradients(module: nn.Module, *values: Any) -> list[torch.Tensor | None]:
    leaves = [leaf for value in values for leaf in tensors_in(value)]
    tensors = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves]
    return [tensor.grad for tensor in (*module.parameters(), *tensors)]


@given(wrappers, calls())
def test_a_rowwise_module_is_the_plain_one(wrapper: type[unisono.DataParallel], call: Call) -> None:
    """N1, N2, N8, S6, S10, S12, S13: outputs, and gradients of parameters and inputs, in float64."""
    plain = Rowwise(call.axes)
    model = wrapped(wrapper, copy.deepcopy(plain), call, call.axes)
    inputs, kwargs = copy.deepcopy((call.inputs, call.kwargs))
    expected, actual = flat(plain(*call.inputs, **call.kwargs)), flat(model(*inputs, **kwargs))
    for outputs in (expected, actual):
        if outputs:
            loss_of(outputs).backward()
    expected += gradients(plain, call.inputs, call.kwargs)
    actual += gradients(model, inputs, kwargs)
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            tolerance = {"rtol": 1e-12, "atol": 1e-12} if theirs.dtype == torch.float64 else {}
            torch.testing.assert_close(mine, theirs, **tolerance)
