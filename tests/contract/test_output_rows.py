"""Outputs that have not one entry a row: parameters and buffers, and those that are joined with a warning."""

import ast
import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from helpers.contract import Wrap, at_one_place, over_places
from helpers.modules import Calls, Fn, PassingMode
from unisono import SampleList, data_parallel


@dataclass
class Pair:
    """An output of a class of the user's."""

    entries: Any
    x: torch.Tensor


def as_meant(message: str) -> Any:
    """The `out_dims` that keeps a list as it is joined."""
    return ast.literal_eval(re.split(r"\)(?:;|\.$)", message.partition("out_dims=")[2])[0])


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings in the block, without those of other libraries; all point at its lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        yield found
    ours = [each for each in caught if "site-packages" not in each.filename]
    found += [str(each.message) for each in ours]
    assert all(each.filename == __file__ for each in ours)


# ---- parameters and buffers ----------------------------------------------------------------------


def with_own_tensors(model: nn.Module, x: torch.Tensor) -> Any:
    """Return everything that the module has, beside what it computes; weights have as many rows as shards of two."""
    model.seen += 1
    y = model.layer(x) * model.scale.exp()
    return y, {"w": model.layer.weight, "own": [model.scale, model.seen, (model.layer.bias, model.layer.weight)]}


def model_with_own_tensors(rows: int) -> nn.Module:
    own = {"layer": nn.Linear(3, rows), "scale": nn.Parameter(torch.tensor(0.5))}
    model = Calls(with_own_tensors, **own)
    model.register_buffer("seen", torch.zeros(rows))
    return model


def same_as_plain(model: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> None:
    y, of_module = call(x)
    scale, seen, (bias, weight) = of_module["own"]
    own = (model.layer.weight, model.layer.weight, model.scale, model.layer.bias, model.seen)
    for returned, live in zip((of_module["w"], weight, scale, bias, seen), own, strict=True):
        assert returned is live

    def gradients(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        loss = y.square().sum() + (y.mean() * weight.sin()).sum() + bias.square().sum()
        return torch.autograd.grad(loss, [*model.parameters()])

    ours = gradients(y, weight, bias)
    torch.testing.assert_close(ours, gradients(model(x)[0], model.layer.weight, model.layer.bias))


@over_places("n, rows", [(2, 2), (3, 4), (2, 7)], separate=[(2, 2), (3, 4)])
def test_an_output_that_is_a_parameter_or_buffer(wrap: Wrap, n: int, rows: int) -> None:
    """G11: it is that of the module, whatever its length, with the gradient of one device."""
    model = model_with_own_tensors(rows)
    wrapped, x = wrap(model, n), torch.randn(2 * n, 3)
    for _ in range(3):
        same_as_plain(model, wrapped, x)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert wrapped(x)[1]["w"] is model.layer.weight
            assert wrapped(x)[1]["own"][1] is model.seen


def test_a_parameter_or_buffer_alone(wrap: Wrap) -> None:
    """G11: the only output."""
    model = Calls(lambda model, x, name: getattr(model, name), weight=nn.Parameter(torch.ones(2, 2)))
    model.register_buffer("table", torch.ones(2, 2))
    wrapped = wrap(model)
    for name in ("weight", "table"):
        assert wrapped(torch.ones(4, 2), name) is getattr(model, name)


def test_a_parameter_in_parts_and_in_the_plain_composition(wrap: Wrap) -> None:
    """G11: also where the graph is the caller's, and where a shard is run in parts."""
    model, x = Calls(lambda model, x: (model.layer(x), model.layer.weight), layer=nn.Linear(3, 2)), torch.randn(8, 3)
    assert wrap(model, 2, parts=2)(x)[1] is model.layer.weight
    with PassingMode():
        assert wrap(model)(x)[1] is model.layer.weight


def test_what_is_computed_from_a_parameter_is_joined(wrap: Wrap) -> None:
    """G11, G12: a row of it for each row of the batch, even if a shard has one row, and this is all of it."""
    model, x = (
        Calls(lambda model, x: model.token.expand(len(x), -1), token=nn.Parameter(torch.ones(1, 3))),
        torch.ones(2),
    )
    torch.testing.assert_close(wrap(model)(x), model(x))


def test_a_buffer_that_forward_reassigns_is_joined(wrap: Wrap) -> None:
    """G11: a state with one entry a row is not the module's tensor, but one of each replica."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.state = x * 2
        return model.state

    model, x = Calls(forward), torch.arange(4.0)
    model.register_buffer("state", torch.zeros(4))
    torch.testing.assert_close(wrap(model)(x), x * 2)


# ---- tensors of another size ---------------------------------------------------------------------

X = torch.arange(12.0, dtype=torch.float64).view(4, 3)


def recurrent(model: nn.Module, x: torch.Tensor) -> Any:
    return {"y": x, "state": model.rnn(x[:, None])[1]}


@pytest.mark.parametrize(
    ("function", "n", "x", "starts", "suggested"),
    [
        (recurrent, 2, torch.randn(6, 3), "output['state'][0] of shape (2, 3, 3) comes from 3 rows", {"state": 1}),
        (recurrent, 3, torch.randn(3, 3), "output['state'][0] of shape (2, 1, 3) comes from 1 rows", {"state": 1}),
        (lambda model, x: (x, model.rnn.weight_ih_l0[1:].sin()), 2, X, "output[1] of shape (11, 3)", {1: None}),
        (lambda model, x: x.T @ x, 2, X, "output of shape (3, 3) comes from 2 rows (samples), but has", None),
        (lambda model, x: [x, (x.mean(0, keepdim=True), x)], 2, X, "output[1][0] of shape (1, 3)", {1: {0: None}}),
        (lambda model, x: tuple(x), 2, X, "output[0] of shape (3,) comes from 2 rows (samples), but has", None),
    ],
)
@at_one_place
def test_tensors_of_another_size(
    wrap: Wrap, function: Any, n: int, x: torch.Tensor, starts: str, suggested: Any
) -> None:
    """G12: one warning for a model, whatever the size of its batches, which names the output and `out_dims`."""
    model = Calls(function, rnn=nn.LSTM(3, 3, 2, batch_first=True))
    wrapped, x = wrap(model, n), x.to(model.rnn.weight_ih_l0)
    with warned() as messages:
        for _ in range(2):
            wrapped(x)
        wrapped(x.repeat(2, 1))
    (message,) = messages
    assert message.startswith(starts)
    written = [part.partition(") if")[0] for part in message.split("out_dims=")[1:]]
    out_dims = ast.literal_eval(written[0])
    assert out_dims == suggested
    as_now = ast.literal_eval(written[1].partition(" if")[0])
    with warned() as messages:
        wrap(model, n, out_dims=as_now)(x)
        if function is recurrent:  # what is suggested gives the numbers of one device
            torch.testing.assert_close(wrap(model, n, out_dims=out_dims)(x), model(x))
    assert messages == []


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda x: (x, x[:, 0], {"z": x[:, None]}), {}),
        (lambda x: (x.mean(), float(x.sum())), {"scalars": "mean"}),
        (lambda x: [x.mean(), x], {"scalars": "mean"}),
        (lambda x: (x, "name", None, ["name"] * 5), {}),
        (lambda x: (x, 3, True), {"out_dims": {1: None, 2: None}}),
        (lambda x: (x, len(x), {"sum": float(x.sum())}), {"scalars": "sum"}),
        (lambda x: (x, 1.0), {"scalars": {1: "stack"}}),
        (lambda x: [x, x * 2], {}),
        (lambda x: [x], {}),
        (lambda x: [x.sin(), x[:, 0].sin()], {}),
        (lambda x: (x, x.T), {"out_dims": (0, 1)}),
        (lambda x: (x, x[0] * 0), {"out_dims": {1: None}}),
        (lambda x: x.reshape(-1), {"out_dims": 0}),
        (lambda x: x[:, : len(x)], {"dim": 0}),
        (lambda x: SampleList(float(each) for each in x[:, 0]), {}),
        (lambda x: (x, x[:1, 0].shape), {"out_dims": {1: None}}),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 4, 6])
@at_one_place
def test_what_is_not_warned_of(wrap: Wrap, function: Any, options: dict[str, Any], rows: int) -> None:
    """G12, G2, S17: rows, joined numbers, and whatever `out_dims` says; with one row a replica, too."""
    with warned() as messages:
        wrap(Fn(function), **options)(torch.ones(rows, 3))
    assert messages == []


@at_one_place
def test_the_function_says_it_once_for_a_module(wrap: Wrap) -> None:
    """G12: each call makes a wrapper of its own."""
    model = wrap(Fn(lambda x: x.mean(0)))
    with warned() as said:
        for _ in range(3):
            data_parallel(model.module, torch.randn(6, 4), model.device_ids)
    assert len(said) == 1


def test_whole_batches_are_not_joined(wrap: Wrap) -> None:
    """G12, I1: in `map` and `evaluate` an output is that of the whole batch; and one replica has all rows."""
    model = wrap(Fn(lambda x: x.sum(0)))
    with warned() as messages:
        assert [y.tolist() for y in model.map([torch.ones(4, 3)] * 2)] == [[4.0] * 3] * 2
        model.evaluate([(torch.ones(4, 3), torch.ones(4))], lambda y, _: y.mean())
        model(torch.ones(1, 3))
    assert messages == []


@at_one_place
def test_outputs_of_transformers(wrap: Wrap) -> None:
    """G12: a ModelOutput has rows everywhere, but for its loss."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    wrapped, words = wrap(model, scalars="mean"), torch.randint(0, 16, (4, 5))
    with warned() as messages:
        wrapped(input_ids=words, labels=words, output_hidden_states=True)
    assert not [message for message in messages if "out_dims" in message]


# ---- lists with one entry a row ------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries",
    [
        lambda x: [float(each) for each in x[:, 0]],
        lambda x: [int(each) for each in x[:, 0]],
        lambda x: [bool(each > 2) for each in x[:, 0]],
        lambda x: ["same" for _ in x],
        lambda x: [(float(each), 1) for each in x[:, 0]],
        lambda x: [[int(each)] * 3 for each in x[:, 0]],
        lambda x: [{"score": float(each), "box": each.expand(5)} for each in x[:, 0]],
        list,
        lambda x: [each.expand(5, 2) for each in x[:, 0]],
        lambda x: [None, *[float(each) for each in x[1:, 0]]],
        lambda x: [None for _ in x],
        lambda x: [each.sin() for each in x[:, : len(x)]] if len(x) < 4 else list(x),
        lambda x: list(x[:, :2, None]) if len(x) < 4 else list(x),
    ],
)
@pytest.mark.parametrize("at", [lambda v, x: v, lambda v, x: (x, v), lambda v, x: {"a": [x, {"b": v}]}, Pair])
@pytest.mark.parametrize("first", [2, 4])
@at_one_place
def test_lists_with_one_entry_a_row(wrap: Wrap, entries: Any, at: Any, first: int) -> None:
    """S17: in each position, once a model, whatever its first batch; numbers, strings, and tensors."""
    wrapped = wrap(Fn(lambda x: at(entries(x), x)))
    with warned() as messages:
        for rows in (first, 4, 8):
            joined = wrapped(torch.arange(24.0).view(8, 3)[:rows])
    (message,) = messages
    assert "return unisono.SampleList(entries)" in message
    as_now = as_meant(message)
    with warned() as messages:
        again = wrap(Fn(lambda x: at(entries(x), x)), out_dims=as_now)(torch.arange(24.0).view(8, 3))
    assert messages == []
    assert str(again) == str(joined)  # what is said does not depend on lengths, nor how it is joined


@at_one_place
def test_a_list_of_statistics_names_both_remedies(wrap: Wrap) -> None:
    """S17, G12: two tensors without rows from two rows a replica may be a mean and a deviation of the rows."""
    forward = Fn(lambda x: [x.mean(0) * 0, x.std(0) * 0])
    with warned() as messages:
        wrap(forward)(torch.ones(4, 3))
    (message,) = messages
    assert "; if every replica returns the same: out_dims=None" in message
    with warned() as messages:
        torch.testing.assert_close(wrap(forward, out_dims=None)(torch.ones(4, 3)), [torch.zeros(3)] * 2)
    assert messages == []


@at_one_place
def test_rows_that_are_more_or_fewer(wrap: Wrap) -> None:
    """G12: entries follow the rows where replicas keep some of theirs, or have as many tokens for each. It was said."""
    for function in (lambda x: x[x[:, 0] > 3], lambda x: x.reshape(-1, 1), lambda x: [x[:, 0] * 2, x[:, 1] * 2]):
        with warned() as messages:
            torch.testing.assert_close(wrap(Fn(function))(X), function(X), check_device=False)
        assert messages == []


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "names", "options"),
    [
        (len, "output is a number", {}),
        (lambda x: (x, 3), "output[1] is a number", {}),
        (lambda x: (x, (2.0, 3, 4)), "output[1][0], output[1][1], output[1][2] are numbers", {}),
        (lambda x: Pair(True, x), "output.entries is a number", {}),
        (lambda x: Pair(True, x), "output.entries is a number", {"scalars": "sum"}),
        (
            lambda x: {"x": x, "n": [1j] * 5},
            "output['n'][0], output['n'][1], output['n'][2], output['n'][3] and 1 more",
            {},
        ),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 4])
@at_one_place
def test_numbers_become_a_list(wrap: Wrap, function: Any, names: str, options: Any, rows: int) -> None:
    """G4: one warning for a model; each `out_dims` that it names says what is meant."""
    wrapped, x = wrap(Fn(function), **options), torch.ones(rows, 3)
    with warned() as messages:
        for _ in range(2):
            listed = wrapped(x)
    (message,) = messages
    assert message.startswith(names)
    whole, as_now = [ast.literal_eval(part.partition(" if")[0]) for part in message.split("out_dims=")[1:]]
    with warned() as messages:
        assert str(wrap(Fn(function), out_dims=as_now, **options)(x)) == str(listed)
        if rows != 4 or function(x) != 4:  # the number of rows is not that of the batch
            wrap(Fn(function), out_dims=whole, **options)(x)
    assert messages == []


@pytest.mark.parametrize("scalars", ["mean", "sum"])
@at_one_place
def test_a_list_of_which_scalars_make_one_number(wrap: Wrap, scalars: str) -> None:
    """S17: with as many entries as rows, the numbers may belong to rows."""
    for function in (lambda x: [float(each) for each in x], list):
        for rows in (2, 6):
            with warned() as messages:
                wrap(Fn(function), scalars=scalars)(torch.arange(float(rows)))
            (message,) = messages
            assert "return unisono.SampleList(entries)" in message
            with warned() as messages:
                wrap(Fn(function), scalars=scalars, out_dims=as_meant(message))(torch.arange(float(rows)))
            assert messages == []


@at_one_place
def test_the_size_of_a_replicas_output(wrap: Wrap) -> None:
    """G4: it is that of a shard. Where replicas have other numbers of rows, it is an error."""
    assert wrap(Fn(lambda x: (x, x.shape)))(X)[1] == (2, 3)
    with pytest.raises(ValueError, match=r"cannot gather output\[1\]: replicas returned different values"):
        wrap(Fn(lambda x: (x, x.shape)))(X[:3])


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["{}".format, lambda each: object(), lambda each: each.cpu().numpy()])
@at_one_place
def test_errors_inside_a_list_name_the_remedy(wrap: Wrap, entry: Any) -> None:
    """S17, G5: strings that differ, and objects; also with one row a replica."""
    for rows in (2, 6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((TypeError, ValueError), match=r"cannot gather output\['a'\]\[0\]") as raised:
                wrap(Fn(lambda x: {"a": [entry(each) for each in x]}))(torch.arange(float(rows)))
        assert "return unisono.SampleList(entries)" in raised.value.__notes__[0]
