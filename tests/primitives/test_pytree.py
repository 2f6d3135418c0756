"""Containers: which there are, how a path reads, and that they are rebuilt as what they were."""

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch

from unisono.primitives import pytree

Point = namedtuple("Point", "x y")
Nothing = namedtuple("Nothing", "")


@dataclasses.dataclass
class Batch:
    x: Any
    note: str = "none"
    derived: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any


class Row(tuple):
    __slots__ = ()


class Rows(list):
    pass


class ReadOnly(dict):
    def __setitem__(self, *_: Any) -> None:
        raise RuntimeError("read only")

    update = __copy__ = __setitem__


class TwoOf(tuple):
    def __new__(cls, first: Any, second: Any) -> "TwoOf":
        return super().__new__(cls, (first, second))


class Config(dict):
    """A dict with an attribute, as configuration libraries have."""

    source = "default"


class ModelOutput(OrderedDict):
    """Like that of transformers: its items are attributes too, and are kept in step."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def double(leaf):
    return leaf * 2 if isinstance(leaf, torch.Tensor | int) else leaf


def batch_of(x, derived):
    batch = Batch(x)
    batch.derived = derived  # a field that the constructor does not take
    return batch


def output_of(**items):
    output = ModelOutput()
    for key, value in items.items():
        output[key] = value
    return output


LEAVES = [None, 1, 2.5, "text", b"bytes", {1, 2}, frozenset({1}), torch.ones(2), torch.Size([2, 3]), torch.float32]
LEAVES += [Batch, Point, object(), MappingProxyType({"x": 1}), range(3)]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_everything_that_is_no_container_is_a_leaf(leaf):
    """S4: other objects stay the objects they are."""
    assert pytree.children(leaf) is None
    assert list(pytree.leaves(leaf)) == [("", leaf)] or isinstance(leaf, torch.Tensor)
    assert pytree.map_tensors(lambda tensor: tensor, leaf) is leaf


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ([1, [2, "a"]], [2, [4, "a"]]),
        (torch.ones(1, 1).cummax(1), torch.return_types.cummax((torch.tensor([[2.0]]), torch.tensor([[0]])))),
        (Counter("aab"), Counter({"a": 4, "b": 2})),
        (batch_of(1, 5), batch_of(2, 10)),
        (FrozenSlotted((1,)), FrozenSlotted((2,))),
        (Row([1, 2]), Row([2, 4])),
        (Rows([1]), Rows([2])),
        (ReadOnly(a=1), ReadOnly(a=2)),
        (TwoOf(1, 2), TwoOf(2, 4)),
        (UserDict(a=1), UserDict(a=2)),
        (deque([1, 2]), deque([2, 4])),
        (output_of(loss=1, extra=None), output_of(loss=2, extra=None)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_rebuilt_as_their_own_type(container, expected):
    """S3: types kept, of torch's own named tuples too; tests/contract/test_properties.py has the common ones."""
    before = repr(container)
    rebuilt = pytree.map_leaves(double, container)
    assert rebuilt == expected
    assert type(rebuilt) is type(container)
    assert repr(container) == before
    assert rebuilt is not container


def test_mappings_keep_their_properties():
    """S3: order; a defaultdict's factory (torch raises); attributes; keys that are attributes too, in step."""
    assert list(pytree.map_leaves(double, {"z": 1, "a": 2, 3: 3})) == ["z", "a", 3]
    assert list(pytree.map_leaves(double, OrderedDict(z=1, a=2))) == ["z", "a"]
    rebuilt = pytree.map_leaves(double, defaultdict(list, a=1))
    assert rebuilt == {"a": 2}
    assert rebuilt["new"] == []
    config = Config(a=1)
    config.source = "file"
    assert pytree.map_leaves(double, config).source == "file"
    output = pytree.map_tensors(double, output_of(loss=torch.ones(1)))
    assert output.loss is output["loss"]
    assert output.loss.item() == 2


@pytest.mark.parametrize("empty", [(), [], {}, Nothing(), OrderedDict(), defaultdict(int)], ids=repr)
def test_empty_containers_stay(empty):
    """S3: torch loses a namedtuple without fields."""
    assert pytree.children(empty) == {}
    assert list(pytree.leaves(empty)) == []
    assert pytree.map_leaves(double, empty) is empty


def test_what_does_not_change_is_not_rebuilt():
    unchanged = {"a": [1, 2], "b": Batch("x")}
    assert pytree.map_tensors(double, unchanged) is unchanged
    partly = {"changes": [torch.ones(1)], "stays": unchanged}
    rebuilt = pytree.map_tensors(double, partly)
    assert rebuilt is not partly
    assert rebuilt["stays"] is unchanged


def test_paths_read_like_the_code_that_reaches_the_leaf():
    value = ({"mask": Batch([1]), 3: Point(1, "a")}, output_of(loss=0), FrozenSlotted(x=None))
    assert [path for path, _ in pytree.leaves(value, "inputs")] == [
        "inputs[0]['mask'].x[0]",
        "inputs[0]['mask'].note",
        "inputs[0]['mask'].derived",
        "inputs[0][3].x",
        "inputs[0][3].y",
        "inputs[1]['loss']",
        "inputs[2].x",
    ]


def test_which_leaves_are_in_a_list() -> None:
    """S4: the error of an output says what to write for a list of rows."""
    _, spec = pytree.flatten({"pair": (1, 2), "deep": ([3], 4), "last": 5})
    assert [pytree.is_in_list(spec, number) for number in range(5)] == [False, False, True, False, False]
