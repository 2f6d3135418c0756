"""What holds for every batch: nested inputs of every kind, any number of rows, one to eight replicas, every `shares`.

Hypothesis draws the calls, 200 of them for each test in `make test` and 2,000 in `make test-all` (conftest.py). What
is expected is said independently of the code under test: torch's own `chunk` and `tensor_split`, exact fractions,
slices of the whole batch, and the plain module on it. These are properties of the verbs and of the wrapper, whichever
engine runs the replicas; so they are tried with the default one.
"""

import copy
import dataclasses
import functools
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import manyhands

Pair = namedtuple("Pair", "left right")


class Sample(NamedTuple):
    image: Any
    label: Any = None


@dataclasses.dataclass
class Record:
    x: Any
    note: Any = "no note"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


# ---- what is drawn -------------------------------------------------------------------------------

NUMBERS = [0, 7, True, 2.5, 1j]
WHOLE = [None, "", "text", b"bytes", torch.Size([2, 3]), torch.float16, len]  # what every replica gets as it is
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.bool]

axes = st.lists(st.integers(0, 3), max_size=2)
keys = st.sampled_from(["a", "b", 0, 1])


@st.composite
def tensors(draw: st.DrawFn, rows: int, dim: int) -> torch.Tensor:
    """Tensors whose rows are on axis `dim` and all differ (but for bool); 0-dim ones too, which have no rows."""
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.sampled_from(["rows", "rows", "rows", "0-dim"])) == "0-dim":
        tensor = torch.tensor(draw(st.integers(0, 9))).to(dtype)
    else:
        shape = draw(axes)
        if dim == 1 and not shape:
            shape = [2]
        shape.insert(dim if dim >= 0 else len(shape), rows)
        first = draw(st.integers(0, 9))
        tensor = torch.arange(first, first + math.prod(shape)).reshape(shape).to(dtype)
        if draw(st.booleans()):  # one that is a part of a larger one
            tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.requires_grad_(dtype in FLOATS and draw(st.booleans()))


@functools.cache
def values(rows: int, dim: int) -> st.SearchStrategy[Any]:
    """Tensors and other leaves, in containers of every kind, to some depth."""

    def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists, dicts = st.lists(inside, max_size=3), st.dictionaries(keys, inside, max_size=3)
        return st.one_of(
            lists,
            lists.map(tuple),
            dicts,
            dicts.map(OrderedDict),
            dicts.map(lambda items: defaultdict(list, items)),
            st.tuples(inside, inside).map(lambda two: Pair(*two)),
            inside.map(Sample),
            st.tuples(inside, inside).map(lambda two: Record(*two)),
            inside.map(Frozen),
            inside.map(Slotted),
        )

    other = st.sampled_from([*NUMBERS, *WHOLE])
    return st.recursive(st.one_of(tensors(rows, dim), tensors(rows, dim), other), containers, max_leaves=6)


def weights(num_replicas: int) -> st.SearchStrategy[list[float]]:
    """One weight a replica, 0 or more, not all of them 0."""
    weight = st.one_of(st.integers(0, 9), st.floats(0, allow_infinity=False))
    return st.lists(weight, min_size=num_replicas, max_size=num_replicas).filter(any)


@dataclasses.dataclass
class Call:
    """The inputs of one call, and how they are to be split."""

    num_replicas: int
    rows: int
    dim: int
    shares: str | list[float]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def devices(self) -> list[str]:
        return ["cpu"] * self.num_replicas

    @property
    def has_rows(self) -> bool:
        return any(tensor.dim() for tensor in tensors_in((self.inputs, self.kwargs)))

    def row_numbers(self) -> torch.Tensor:
        numbers = torch.arange(self.rows)
        return numbers[None] if self.dim == 1 else numbers

    def sizes(self) -> list[int]:
        """How many rows each replica gets that gets any."""
        return [size for size in expected_sizes(self.rows, self.num_replicas, self.shares) if size]


@st.composite
def calls(draw: st.DrawFn, shares: Sequence[str] = ("chunk", "even", "weights")) -> Call:
    num_replicas = draw(st.integers(1, 8))
    rows = draw(st.integers(0, 2 * num_replicas + 1))
    dim = draw(st.sampled_from([0, 1, -1]))
    rule: Any = draw(st.sampled_from(shares))
    if rule == "weights":
        rule = draw(weights(num_replicas))
    batch = draw(st.lists(tensors(rows, dim), max_size=1))
    inputs = draw(st.lists(values(rows, dim), max_size=2))
    kwargs = draw(st.dictionaries(st.sampled_from(["mask", "target"]), values(rows, dim), max_size=2))
    return Call(num_replicas, rows, dim, rule, (*batch, *inputs), kwargs)


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


def children(value: Any) -> dict[Any, Any] | None:
    """A container's children, in order; None for a leaf."""
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def leaves_of(values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Walk values that have the structure and the types of the first one, side by side; check that they have."""
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


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for (leaf,) in leaves_of([value]) if isinstance(leaf, torch.Tensor)]


def assert_equal(given: Any, expected: Any) -> None:
    """The same type and value; of tensors, the same dtype, shape and values, bit for bit."""
    assert type(given) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
    else:
        assert given == expected


def assert_gathered(given: Any, expected: Any, num_outputs: int) -> None:
    """`given` is `expected` after it has been every one of `num_outputs` replicas' input and its output."""
    for original, gathered in leaves_of([expected, given]):
        if isinstance(original, torch.Tensor) and original.dim() == 0:
            assert_equal(gathered.detach(), torch.stack([original.detach()] * num_outputs))
        elif isinstance(original, bool | int | float | complex):
            assert_equal(gathered, [original] * num_outputs)
        elif isinstance(original, torch.Tensor):
            assert_equal(gathered.detach(), original.detach())
        else:
            assert gathered is original


def assert_dealt(shards: Sequence[Any], whole: Any, sizes: Sequence[int], dim: int) -> None:
    """Shard i is the next `sizes[i]` rows of every tensor, and all else; so nothing is dropped or repeated."""
    for original, *parts in leaves_of([whole, *shards]):
        if not isinstance(original, torch.Tensor):
            assert all(part is original for part in parts)
            continue
        expected = original.split(list(sizes), dim) if original.dim() else [original] * len(parts)
        for part, slice_ in zip(parts, expected, strict=True):
            assert_equal(part, slice_)


# ---- the properties ------------------------------------------------------------------------------

ignores_0_dim_outputs = pytest.mark.filterwarnings("ignore:gathering 0-dim outputs:UserWarning")


@ignores_0_dim_outputs
@given(calls(shares=["chunk"]))
def test_the_verbs(call: Call) -> None:
    """S1, S3, S4, S6 to S10, S15, G1, G3, G4: scatter deals every row once, and gather undoes it."""
    sizes = (call.sizes() or [0]) if call.has_rows else []
    num_shards = len(sizes) or call.num_replicas
    inputs, kwargs = manyhands.scatter_kwargs(call.inputs, call.kwargs, call.devices, call.dim)
    assert len(inputs) == len(kwargs) == num_shards
    assert_dealt(inputs, call.inputs, sizes, call.dim)
    assert_dealt(kwargs, call.kwargs, sizes, call.dim)
    joined = manyhands.gather(list(zip(inputs, kwargs, strict=True)), "cpu", call.dim)
    assert_gathered(joined, (call.inputs, call.kwargs), num_shards)


class Witness(nn.Module):
    """Returns what it is given, and keeps it by the first of its row numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}

    def forward(self, numbers: torch.Tensor, *inputs: Any, **kwargs: Any) -> Any:
        self.seen[int(numbers.min()) if numbers.numel() else 0] = (inputs, kwargs)
        return inputs, kwargs


@ignores_0_dim_outputs
@given(calls())
def test_the_wrapper(call: Call) -> None:
    """S1 to S4, S6, S7, S9, S10, S15, G1, G3, G4: by every `shares` each row once, in order; out comes what went in."""
    model = manyhands.DataParallel(Witness(), call.devices, dim=call.dim, shares=call.shares)
    output = model(call.row_numbers(), *call.inputs, **call.kwargs)
    sizes = call.sizes() or [0]
    seen = [shard for _, shard in sorted(model.module.seen.items())]
    assert len(seen) == len(sizes)
    assert_dealt(seen, (call.inputs, call.kwargs), sizes, call.dim)
    if call.num_replicas == 1:  # the plain module
        assert output[0] == call.inputs
    else:
        assert [timing.rows for timing in model.replica_timings] == sizes
        assert_gathered(output, (call.inputs, call.kwargs), len(sizes))


class Rowwise(nn.Module):
    """Computes each row of every tensor from that row alone, parameters, and what belongs to all rows."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.scale = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = tensors_in((inputs, kwargs))
        whole = sum((number(tensor) for tensor in given if not tensor.dim()), torch.ones(()))
        return [self.row(number(tensor)) * whole for tensor in given if tensor.dim()]

    def row(self, x: torch.Tensor) -> torch.Tensor:
        others = [axis for axis in range(x.dim()) if axis != self.dim % x.dim()]
        return torch.tanh(x * self.scale[0]) + (x.sum(others, keepdim=True) if others else x) * self.scale[1]


def number(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as moderate real numbers in double precision."""
    tensor = tensor.to(torch.complex128) if tensor.is_complex() else tensor.to(torch.float64)
    return (tensor.real + tensor.imag if tensor.is_complex() else tensor) / 64


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar that depends on every entry, with different weights."""
    return sum(
        ((x.square() * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in outputs),
        torch.zeros(()),
    )


@given(calls())
def test_a_rowwise_module(call: Call) -> None:
    """N1, N2, N8, S6, S12: outputs and gradients of parameters and inputs are the plain module's, in float64."""
    plain = Rowwise(call.dim)
    model = manyhands.DataParallel(copy.deepcopy(plain), call.devices, dim=call.dim, shares=call.shares)
    inputs, kwargs = copy.deepcopy((call.inputs, call.kwargs))
    expected, actual = plain(*call.inputs, **call.kwargs), model(*inputs, **kwargs)
    for outputs in (expected, actual):
        if any(output.requires_grad for output in outputs):
            loss_of(outputs).backward()
    pairs = list(zip(actual, expected, strict=True))
    pairs += [(mine.grad, theirs.grad) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)]
    for mine, theirs in leaves_of([(inputs, kwargs), (call.inputs, call.kwargs)]):
        if isinstance(theirs, torch.Tensor):
            pairs.append((mine.grad, theirs.grad))
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            tolerance = {"rtol": 1e-12, "atol": 1e-12} if theirs.dtype == torch.float64 else {}
            torch.testing.assert_close(mine, theirs, **tolerance)
