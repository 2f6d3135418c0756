"""in_dims, out_dims and scalars: how a rule is read."""

import dataclasses
from typing import Any, NamedTuple

import pytest

from unisono.primitives import pytree
from unisono.primitives.dims import check_dims, check_scalars, spread, spread_inputs


def structure(value):
    return pytree.flatten(value)[1]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any = None


@pytest.mark.parametrize(
    ("rule", "value", "entries"),
    [
        (..., (1, [2, 3]), [7, 7, 7]),
        (0, (1, [2, 3]), [0, 0, 0]),
        (None, {"a": 1}, [None]),
        ((0, None), (1, [2, 3]), [0, None, None]),
        ((0, [1, 2]), (1, [2, 3]), [0, 1, 2]),
        ({"b": 1}, {"a": 1, "b": (2, 3)}, [7, 1, 1]),
        ((1, {"a": None}), Pair(1, {"a": 1, "b": 2}), [1, None, 7]),
        ({"right": 2}, Pair(1, 2), [7, 2]),
        ({"y": None}, Record(1, 2), [7, None]),
        ((..., 0), (1, 2), [7, 0]),
    ],
    ids=repr,
)
def test_an_entry_applies_to_everything_below_it(rule, value, entries):
    assert spread(rule, structure(value), 7, "rule") == entries


@pytest.mark.parametrize(
    ("rule", "value", "message"),
    [
        ((0, 1), (1, 2, 3), r"rule=\(0, 1\) has 2 entries for a tuple of 3"),
        ({"c": 0}, {"a": 1}, r"rule names 'c', but the dict has only \['a'\]"),
        ((0,), 5, r"rule=\(0,\) is nested deeper than the value, a int"),
        ({"a": (0, 1)}, {"a": 3}, r"rule\['a'\]=\(0, 1\) is nested deeper"),
    ],
)
def test_a_rule_that_does_not_fit_is_named(rule, value, message):
    with pytest.raises(ValueError, match=message):
        spread(rule, structure(value), 7, "rule")


def forward(x, mask=None, *, table=None):
    """Stands for a module's forward: the names of its inputs."""


def many(first, *others, mask=None):
    """Stands for the forward of a module that takes any number of inputs."""


@pytest.mark.parametrize(
    ("function", "in_dims", "inputs", "kwargs", "axes"),
    [
        (forward, ..., (1, 2), {"table": 3}, [0, 0, 0]),
        (forward, 1, (1, 2), {"table": 3}, [1, 1, 1]),
        (forward, None, (1,), {}, [None]),
        (forward, (0, 1), (1, 2), {"table": 3}, [0, 1, 0]),
        (forward, {"mask": 1, "table": None}, (1, 2), {"table": 3}, [0, 1, None]),
        (forward, {"mask": 1, "table": None}, (1,), {"mask": 2}, [0, 1]),
        (forward, {1: None}, (1, 2), {}, [0, None]),
        (forward, {"mask": 1}, (1,), {}, [0]),  # an optional input that is not given
        (many, {"others": 1}, (1, 2, 3), {}, [0, 1, 1]),
        (many, {"mask": None}, (1, 2, 3), {}, [0, 0, 0]),
        (many, {"mask": None, "first": 2}, (1, 2, 3), {"mask": 4}, [2, 0, 0, None]),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_in_dims_name_inputs_by_position_and_name(function, in_dims, inputs, kwargs, axes):
    assert spread_inputs(in_dims, structure(inputs), structure(kwargs), 0, function) == axes


@pytest.mark.parametrize(
    ("in_dims", "message"),
    [
        ({"maks": 0}, r"in_dims names 'maks', but the inputs are: x, mask, table"),
        ((0, 0), r"in_dims=\(0, 0\) has 2 entries for 1 positional inputs"),
        *(({key: 0}, r"in_dims has the key .*: expected names of inputs, or pos") for key in (-1, None, True, 1.5)),
    ],
)
def test_in_dims_that_name_no_input(in_dims, message):
    with pytest.raises(ValueError, match=message):
        spread_inputs(in_dims, structure((1,)), structure({}), 0, forward)


@pytest.mark.parametrize("dims", ["0", 1.5, True, (0, "x"), {"a": True}], ids=repr)
def test_check_dims(dims):
    with pytest.raises(TypeError, match=r"in_dims.*expected an int \(the batch dimension\) or None"):
        check_dims(dims, "in_dims")


@pytest.mark.parametrize("scalars", ["max", "mean:", "sum:x", "", ("mean", "max"), {"a": "stak"}, None, 1], ids=repr)
def test_check_scalars(scalars):
    error = ValueError if isinstance(scalars, str | tuple | dict) else TypeError
    with pytest.raises(error, match=r'scalars.*expected "stack", "mean", "sum" or "mean:name"'):
        check_scalars(scalars)
