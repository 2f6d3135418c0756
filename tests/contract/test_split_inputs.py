"""Inputs that are split by accident, or not at all: the error, or a warning, names them and what to write."""

import ast

import numpy
import pytest
import torch
from torch import nn

import unisono
from helpers.contract import Wrap, said_by
from helpers.modules import Composed, Fn
from unisono import SampleList
from unisono.runtime.errors import forget_logged

NOTE = "the inputs were split by rows, 4 = 2 + 2: "


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if NOTE in note]


def messages(*inputs, **options):
    """Return the warnings of a call."""
    model = unisono.DataParallel(Fn(lambda *_: torch.ones(2, 1)), ["cpu"] * 2, **options)
    return [str(each.message) for each in said_by(lambda: model(*inputs), 1)]


# ---- tensors that have no rows ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (lambda x, w: nn.functional.cross_entropy(x, x.new_zeros(len(x), dtype=torch.int64), w[:, 0]), "inputs[1]"),
        (lambda x, w: x @ w.expand(4, 4), "inputs[1]"),
        (lambda x, p: x @ p["layer"][0].expand(4, 4), "inputs[1]['layer'][0]"),
        (lambda x, w: x[:, : int(w.max())], "inputs[1]"),
    ],
    ids=["class weights", "table", "nested", "gathered"],
)
def test_an_error_names_the_inputs_and_how_they_were_split(wrap: Wrap, function, path):
    """S18: and with the `in_dims` that it names, the numbers are one device's."""
    x, weights = torch.rand(4, 4), torch.arange(1.0, 5.0)[:, None].expand(4, 4)
    given = {"layer": [weights]} if "layer" in path else weights
    with pytest.raises((RuntimeError, ValueError)) as raised:
        wrap(Fn(function))(x, given)
    (note,) = notes(raised.value)
    assert f"inputs[0] of shape (4, 4) along dim 0, {path} of shape (4, 4) along dim 0" in note
    in_dims = ast.literal_eval(note.partition("such as in_dims=")[2].partition(": the inputs")[0])
    whole = wrap(Fn(function), scalars="mean", in_dims=in_dims)
    torch.testing.assert_close(whole(x, given), function(x, given))


@pytest.mark.parametrize(("replicas", "sizes"), [(1, "4 = 2 + 2"), (2, "4 = 1 + 1 + 1 + 1"), (2, "3 = 1 + 1 + 1")])
def test_an_error_in_parts_names_them_too(wrap: Wrap, replicas: int, sizes: str) -> None:
    """S18, N13: how each replica's rows were split is said, too. With one replica, nothing was."""
    n = int(sizes[0])
    with pytest.raises(RuntimeError) as raised:
        wrap(Fn(lambda x, w: x @ w), replicas, parts=2)(torch.rand(n, n), torch.ones(n, n))
    (note,) = [note for note in raised.value.__notes__ if "the inputs were split" in note]
    assert f"the inputs were split by rows, {sizes}: inputs[0] of shape ({n}, {n}) along dim 0, inputs" in note


def test_a_list_beside_rows_in_parts(wrap: Wrap) -> None:
    """S17, N13: one replica gives each part all of it, too."""
    model = wrap(Fn(lambda x, factors: x * x.new_tensor(factors)[: len(x), None]), 1, parts=2)
    with pytest.warns(UserWarning, match="as many entries as the batch has rows"):
        model(torch.rand(4, 4), [1.0, 2.0, 3.0, 4.0])


def test_weights_are_doubted_before_targets(wrap: Wrap) -> None:
    """S18: both have one axis, and as many entries as the batch has rows; targets are integers. They were named."""
    x, targets, weights = torch.rand(4, 4), torch.arange(4), torch.ones(4)
    with pytest.raises(RuntimeError) as raised:
        wrap(Fn(nn.functional.cross_entropy))(x, targets, weights)
    (note,) = notes(raised.value)
    assert "such as in_dims={2: None}: the inputs" in note


def test_the_plain_composition_names_them_too():
    """S18, A9: a wrapper with a verb of its own."""
    with pytest.raises(RuntimeError) as raised:
        Composed(Fn(lambda x, w: x @ w), ["cpu"] * 2)(torch.rand(4, 4), torch.ones(4, 4))
    assert len(notes(raised.value)) == 1


@pytest.mark.parametrize(
    ("given", "dim", "described", "in_dims"),
    [
        (lambda pair: (pair,), 0, "inputs[0] of shape (2, 6, 3) along dim 0", "1"),
        (lambda pair: ({"pair": pair},), 0, "inputs[0]['pair'] of shape (2, 6, 3) along dim 0", "1"),
        (lambda pair: (pair.permute(2, 1, 0),), 2, "inputs[0] of shape (3, 6, 2) along dim 2", "0"),
        (lambda pair: (pair, pair), {1: None}, "inputs[0] of shape (2, 6, 3) along dim 0", "{0: 1, 1: None}"),
    ],
    ids=["tensor", "in a dict", "last axis", "beside a whole one"],
)
def test_an_error_says_on_which_axis_the_only_tensor_was_split(wrap: Wrap, given, dim, described, in_dims):
    """S18: pairs on the first axis: it said "expected 2, got 1" only."""

    def forward(pair, *_):
        one, other = pair["pair"] if isinstance(pair, dict) else pair
        return (one - other).reshape(-1, 3)

    options = {"in_dims": dim} if isinstance(dim, dict) else {"dim": dim}
    with pytest.raises(ValueError, match="values to unpack") as raised:
        wrap(Fn(forward), **options)(*given(torch.rand(2, 6, 3)))
    (note,) = [note for note in raised.value.__notes__ if "were split" in note]
    assert described in note
    assert f"on another dimension, write in_dims={in_dims}: the inputs" in note


def test_a_single_vector_is_the_batch(wrap: Wrap):
    """S18: it has no other axis; nothing is said about it."""
    with pytest.raises(RuntimeError) as raised:
        wrap(Fn(lambda x: x @ torch.ones(9, 9)))(torch.rand(4))
    assert notes(raised.value) == []


@pytest.mark.parametrize("forward", [nn.functional.relu, lambda x: x.unsqueeze(0)])
def test_an_array_as_the_only_input(wrap: Wrap, forward):
    """S4: the error said "no rows" only."""
    with pytest.raises((TypeError, AttributeError)) as raised:
        wrap(Fn(forward))(numpy.ones((4, 3)))
    advice = (
        "inputs[0] is a numpy.ndarray, and only tensors are split: use torch.from_numpy(inputs[0]). No input has rows"
    )
    assert raised.value.__notes__[0].startswith(advice)


# ---- lists -----------------------------------------------------------------------------------------


def test_an_error_about_a_list_names_the_remedy(wrap: Wrap):
    """S17, S18: before all other notes, and with two shapes; it was the last, behind a shape for each picture."""
    model = wrap(Fn(lambda given: torch.stack([each @ torch.ones(9) for each in given])), in_dims=0)
    with pytest.raises(RuntimeError) as raised:
        model([torch.ones(4, 8)] * 5)
    advice = "if a list has one entry for each row, make it a unisono.SampleList: "
    each = ", ".join(f"inputs[0][{i}] of shape (4, 8) along dim 0" for i in (0, 1))
    assert raised.value.__notes__[0] == f"{advice}{NOTE}{each}, and 3 more"


def test_an_error_about_a_list_of_one_row_names_the_remedy(wrap: Wrap):
    """S17, S18: its tensor is split, as every only tensor is."""
    with pytest.raises(RuntimeError) as raised:
        wrap(Fn(lambda rows: torch.stack(rows) @ torch.ones(4)))([torch.ones(4)])
    (note,) = notes(raised.value)
    assert note.startswith("if a list has one entry for each row, make it a unisono.SampleList")


# ---- what is not split ----------------------------------------------------------------------------------


class Batch:
    """A library's batch that is not registered."""

    def __init__(self, name: str, x) -> None:
        self.name, self.x = name, x


class Unbound:
    """A proxy of nothing, as of another library's context: each attribute is an error, that of a sequence, too."""

    def __getattr__(self, name):
        raise RuntimeError("unbound")


class Unknown(Unbound):
    shape = None

    def __len__(self):
        raise NotImplementedError

    def __getitem__(self, index):
        raise NotImplementedError


X, WORDS = torch.ones(4, 2), ["a", "b", "c", "d"]
OF_ROWS = [
    *(WORDS, tuple(WORDS), [[1, 2], [3], [], [4]]),
    *(numpy.arange(4.0), numpy.ones((4, 2)), numpy.array(WORDS), range(4)),
    *(Batch("a", torch.ones(4, 2)), Batch("a", numpy.ones(4))),
]


@pytest.mark.parametrize("given", OF_ROWS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("nested", [False, True])
def test_what_has_an_entry_a_row_and_is_not_split_is_warned_of(given, nested):
    """S17, S14: every replica gets all of it, as in torch; `in_dims` says that this is meant."""
    inputs = ({"x": X, "given": given},) if nested else (X, given)
    (message,) = messages(*inputs)
    name = "inputs[0]['given']" if nested else "inputs[1]"
    assert message.startswith(f"{name}: if each entry belongs to a row")
    for remedy in ("unisono.SampleList", "unisono.register_batch_type", "as many entries as the batch has rows"):
        assert remedy in message
    forget_logged()
    assert messages(*inputs, in_dims=ast.literal_eval(message.partition("in_dims=")[2].removesuffix("."))) == []


@pytest.mark.parametrize(
    "given",
    [
        [224, 224, 3, 1],
        SampleList(WORDS),
        WORDS[:3],
        (1, 2, 3, 4),
        [torch.ones(4)] * 4,
        (None,) * 4,
        Batch("a", torch.ones(3, 2)),
        Unbound(),
        Unknown(),
        numpy.ones(3),
        numpy.float64(2),
        "abcd",
        b"abcd",
        torch.Size([1] * 4),
        object(),
        nn.ModuleList([nn.ReLU()] * 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_warned_of(given):
    """S17, S4: nor beside a batch that is in a container."""
    assert messages(X, given) == []
    assert messages("mode", None, True, {"x": X}, given) == []


# ---- iterators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [lambda: iter([2.0]), lambda: (i for i in [2.0]), lambda: map(float, "235")])
@pytest.mark.parametrize("nested", [False, True])
def test_an_iterator_is_an_error(wrap: Wrap, made, nested):
    """S19: each replica took some of its items. One replica has it as it is; a file is none."""
    model, x, given = wrap(Fn(lambda x, items: x)), torch.ones(4, 1), made()
    with pytest.raises(TypeError, match=r"inputs\[1\].* is an iterator.*Give a list of them: \[\*inputs\[1\]"):
        model(x, [given] if nested else given)
    assert wrap(Fn(lambda x, items: x * len([*items])), 1)(x, iter([1, 2])).tolist() == (2 * x).tolist()
    with open(__file__) as file:
        model(x, file)
