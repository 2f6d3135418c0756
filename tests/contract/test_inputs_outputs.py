"""Rows on other axes, numbers and 0-dim outputs, containers, and inputs and outputs that are refused."""

import ast
import re
import sys
from collections import UserList
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from helpers.contract import ON_CPU, Wrap, at_one_place, each_with, over_places
from helpers.losses import loss_of
from helpers.modules import Calls, Fn, mlp
from unisono import pad
from unisono.primitives import pytree


def same_results(model: nn.Module, wrapped: nn.Module, inputs: tuple[Any, ...], leaves: list[torch.Tensor]) -> None:
    """Check outputs and gradients (of a loss over all floating outputs) against the plain module's."""

    def results(call: Callable[..., Any]) -> list[torch.Tensor]:
        outputs = [t for _, t in pytree.tensors(call(*inputs))]
        loss = torch.stack([t.square().sum() for t in outputs if t.is_floating_point()]).sum()
        return [*outputs, *torch.autograd.grad(loss, [*leaves, *model.parameters()])]

    torch.testing.assert_close(results(wrapped), results(model), rtol=1e-12, atol=1e-12)


def same_second_derivatives(model: nn.Module, wrapped: nn.Module, *inputs: torch.Tensor) -> None:
    """Check the gradients of a loss of all gradients, those of the first loss's weights too."""
    leaves = [tensor for tensor in (*inputs, *model.parameters()) if tensor.requires_grad]

    def penalty(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        outputs = call(*inputs)
        weights = [torch.linspace(0.5, 1.5, y.numel(), requires_grad=True).view(y.shape).to(y) for y in outputs]
        loss = sum((y.square() * weight).sum() for y, weight in zip(outputs, weights, strict=True))
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), [*leaves, *weights])

    torch.testing.assert_close(penalty(wrapped), penalty(model), rtol=1e-12, atol=1e-12)


# ---- rows on other axes --------------------------------------------------------------------------


def test_a_large_input_that_goes_whole(wrap: Wrap) -> None:
    """N1: its gradient, summed while backward runs, was once given to a parameter."""

    class Projected(nn.Linear):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return super().forward(x @ table)

    plain, x, table = Projected(100, 3), torch.randn(7, 100), torch.randn(100, 100, requires_grad=True)
    same_results(plain, wrap(plain, 3, in_dims={"table": None}), (x, table), [table])


@at_one_place
@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        # One number for each of two replicas is no exception: it may be the weight of each of two classes.
        (
            [(8, 3), (2,)],
            {},
            "inputs[0] has 8, inputs[1] has 2. … all of inputs[1]: DataParallel(..., in_dims={1: None}). Otherwise",
        ),
        (
            [(8, 3), (7,), (8,), (2,)],
            {},
            "all of inputs[1], inputs[3]: DataParallel(..., in_dims={1: None, 3: None}). Otherwise",
        ),
        (  # the batch may be the first one, or most of them
            [(8, 3), (6,), (6,)],
            {},
            "all of inputs[1], inputs[2]: DataParallel(..., in_dims={1: None, 2: None}). If every replica needs all of "
            "inputs[0]: DataParallel(..., in_dims={0: None}). Otherwise",
        ),
        ([(1, 3), (2,)], {}, "inputs[0] has 1, inputs[1] has 2. "),
        (
            [(8, 3), (2,)],
            {"in_dims": 0},
            "inputs[1] has 2. … all of inputs[1]: DataParallel(..., in_dims={1: None}). Otherwise",
        ),
        (
            [(3, 8), (2, 2)],
            {"in_dims": 1},
            "inputs[1] has 2. … all of inputs[1]: DataParallel(..., in_dims={0: 1, 1: None}). Otherwise",
        ),
        (
            [(3, 8), (8,), (5,), (2,)],
            {"in_dims": {0: 1, 2: None}},
            "in_dims={0: 1, 2: None, 3: None}). Otherwise",
        ),
        ([(3, 8), (2, 1)], {"dim": 1}, "inputs[0] has 8, inputs[1] has 1. If every"),
        (
            [(8, 4, 3), (1, 8, 2), (1, 8, 2)],  # the hidden state of an LSTM
            {},
            "If the batch of inputs[1], inputs[2] is on another dimension: DataParallel(..., in_dims={1: 1, 2: 1}). If",
        ),
        ([(8, 4, 3), (1, 8, 2), (2, 3)], {}, "in_dims={1: 1, 2: None}). If every … in_dims={1: None, 2: None}). Other"),
    ],
)
def test_tensors_with_different_numbers_of_rows(
    wrap: Wrap, inputs: list[tuple[int, ...]], options: dict[str, Any], message: str
) -> None:
    """S5: with each one's path and rows, and the remedy."""
    model = wrap(Fn(lambda *inputs: inputs), 2, **options)
    pattern = r"different numbers of rows \(samples\): .*" + ".*".join(map(re.escape, message.split("…")))
    with pytest.raises(ValueError, match=pattern):
        model(*map(torch.zeros, inputs))


@at_one_place
def test_what_the_error_of_different_rows_says_is_right(wrap: Wrap) -> None:
    """S5: the class weights of two classes, on two devices."""

    def forward(module: nn.Module, x: torch.Tensor, **named: Any) -> torch.Tensor:
        return F.cross_entropy(module.layer(x), named["y"], named["loss"]["of"][0], reduction="none")

    plain, x, y = Calls(forward, layer=nn.Linear(3, 2)), torch.randn(8, 3), torch.randint(2, (8,))
    named = {"y": y, "loss": {"name": "weights", "of": (torch.tensor([1.0, 9.0]), y)}}
    with pytest.raises(ValueError, match=r"kwargs\['loss'\]\['of'\]\[0\] has 2") as raised:
        wrap(plain, 2)(x, **named)
    in_dims = ast.literal_eval(str(raised.value).partition("in_dims=")[2].partition("). ")[0])
    assert in_dims == {"loss": {"of": {0: None}}}
    torch.testing.assert_close(wrap(plain, 2, in_dims=in_dims)(x, **named), plain(x, **named))


@at_one_place
def test_the_error_of_different_rows_finds_the_batch_on_another_dimension(wrap: Wrap) -> None:
    """S5: the state of an LSTM, which two tensors agree on; the tokens have the batch."""
    lstm, tokens = nn.LSTM(3, 4, 2, batch_first=True), torch.randn(6, 5, 3)
    state = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    with pytest.raises(ValueError, match=r"the batch of inputs\[1\]\[0\], inputs\[1\]\[1\] is on another") as raised:
        wrap(lstm, 2, out_dims=(0, 1))(tokens, state)
    in_dims = ast.literal_eval(str(raised.value).partition("in_dims=")[2].partition("). ")[0])
    assert in_dims == {1: 1}
    output, (hidden, _) = wrap(lstm, 2, in_dims=in_dims, out_dims=(0, 1))(tokens, state)
    torch.testing.assert_close((output, hidden), (lstm(tokens, state)[0], lstm(tokens, state)[1][0]))


@at_one_place
def test_replicas_that_do_not_agree_on_what_is_whole(wrap: Wrap) -> None:
    """G3: with what each gave."""
    model = wrap(Fn(lambda x: x.sum()), 2, out_dims=None)
    assert model(torch.zeros(4)).dim() == 0
    with pytest.raises(
        ValueError, match=r"different values, .*out_dims=None says.*replica 0: 1; replica 1: 5\)\. Leave"
    ):
        model(torch.arange(4.0))


def test_second_derivatives_through_every_placement(wrap: Wrap) -> None:
    """N3, S5, S10, G6, G10: for rows on another axis, means, sums, whole and padded outputs.

    The value that is filled in is a constant, and adds nothing to gradients of gradients.
    """

    def forward(model: nn.Module, x: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> Any:
        y = torch.tanh(x.T @ model.weight @ table)
        keep = torch.arange(3, device=x.device) < lengths[:, None]
        cut = torch.where(keep, y, y.new_tensor(2.0))[:, : int(lengths.max())]
        return y.T, y.square().mean(), y.sum(), model.weight.sin().sum(), cut

    model, x = Calls(forward, weight=nn.Parameter(torch.randn(3, 3))), torch.randn(3, 5, requires_grad=True)
    table, lengths = torch.randn(3, 3, requires_grad=True), torch.tensor([1, 2, 2, 3, 1])
    dims = {"in_dims": (1, None, 0), "out_dims": (1, 0, 0, None, pad(1, value=2.0))}
    wrapped = wrap(model, 2, scalars=("stack", "mean", "sum", "stack", "stack"), **dims)
    same_second_derivatives(model, wrapped, x, table, lengths)


# ---- rows of different lengths --------------------------------------------------------------------


def cut_to_lengths(model: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
    """Return sequences as long as the longest of these rows; on one device of the whole batch."""
    y = model.layer(x)[:, : int(lengths.max())]
    keep = torch.arange(y.shape[1], device=y.device) < lengths[:, None]
    y = torch.where(keep[:, :, None], y, y.new_tensor(-1.5))
    pairs = (y @ y.transpose(1, 2)) * keep[:, :, None] * keep[:, None, :]
    nested, scores = [pairs, y.transpose(0, 1)], y.new_zeros(keep.shape).masked_fill(~keep, -torch.inf)
    return {"y": y, "nested": nested, "mask": keep, "scores": scores, "words": keep.long() - 1, "lengths": lengths}


@over_places("n", [(2,), (3,)], separate=[(3,)])
def test_outputs_are_padded_to_the_longest(wrap: Wrap, n: int) -> None:
    """G10: at any depth, several axes, rows on another one, and of every dtype; with the plain module's gradients."""
    model = Calls(cut_to_lengths, layer=nn.Linear(3, 4))
    x, lengths = torch.randn(7, 6, 3, requires_grad=True), torch.tensor([2, 1, 4, 6, 3, 1, 2])
    out_dims = {
        "y": pad(1, value=-1.5),
        "nested": [pad((-1, 1)), pad(0, value=-1.5, rows=1)],
        "mask": pad(1, value=False),
        "scores": pad(1, value=-torch.inf),
        "words": pad(-1, value=-1),
    }
    wrapped = wrap(model, n, out_dims=out_dims)
    same_results(model, wrapped, (x, lengths), [x])
    assert wrapped(x, lengths)["mask"].dtype == torch.bool


@at_one_place
def test_padding_that_is_refused(wrap: Wrap) -> None:
    """G10, A13: with the path, the axis and the remedy."""

    def ragged(make: Callable[[int], Any]) -> Callable[[torch.Tensor], Any]:
        return lambda x: {"y": make(int(x[0]) + 2)}

    cases: list[tuple[Any, Callable[[int], torch.Tensor], str]] = [
        (
            pad(2),
            lambda n: torch.zeros(1, n),
            r"output\['y'\] of shape \(1, 2\) by pad\(2, .*2 is not one of its dimensions",
        ),
        (pad(0), lambda n: torch.zeros(1, n), "0 is the batch dimension"),
        (
            pad(1),
            lambda n: torch.zeros(1, n, n),
            r"replica 0 returned \(1, 2, 2\), .*Only dimensions 0 \(joined\), 1 \(padded\) may",
        ),
        (pad(1, value=0.5), lambda n: torch.zeros(1, n).long(), "dtype torch.int64 cannot hold this value"),
        (pad(1, value=-1), lambda n: torch.zeros(1, n).byte(), "dtype torch.uint8 cannot hold this value"),
        (pad(1, value=1e9), lambda n: torch.zeros(1, n).half(), "dtype torch.float16 cannot hold this value"),
        (pad(1), lambda n: torch.zeros(1, n).to_sparse(), r"cannot be padded; return tensor\.to_dense\(\)"),
    ]
    for padding, make, says in cases:
        with pytest.raises(ValueError, match=says):
            wrap(Fn(ragged(make)), 2, out_dims={"y": padding})(torch.arange(2))
    with pytest.raises(
        ValueError, match=r"along dimension 0: replica 0 returned .*Only dimension 0 may differ"
    ) as raised:
        wrap(Fn(ragged(lambda n: torch.zeros(1, n))), 2)(torch.arange(2))
    assert "Pass out_dims=unisono.pad(1) for output['y']" in str(raised.value)
    for arguments, says in (
        (("1",), "'1' is not a dimension"),
        (((),), "dim is empty"),
        ((1, "0"), "value='0': expected a number"),
    ):
        with pytest.raises(TypeError, match=says):
            pad(*arguments)
    with pytest.raises(TypeError, match=r"in_dims\['x'\]=pad\(1, value=0\): inputs cannot be padded"):
        wrap(nn.Identity(), 2, in_dims={"x": pad(1)})


# ---- means and sums ------------------------------------------------------------------------------


SHARES = ["chunk", "even", [3, 1, 2], [0, 1, 1]]


@over_places("shares, rows", each_with(SHARES, [(1,), (4,), (7,), (10,)]), separate=[([3, 1, 2], 7)])
def test_a_mean_over_rows_inside_forward_is_exact(wrap: Wrap, shares: Any, rows: int) -> None:
    """G2, N4: torch's mean of means counts the rows of a small shard several times."""

    def outputs(y: torch.Tensor) -> dict[str, Any]:
        return {"loss": y.square().mean(), "nested": (y.sum(), [y.mean()]), "positive": int((y > 0).sum())}

    model, x = Fn(outputs, mlp()), torch.randn(rows, 5, requires_grad=True)
    scalars = {"loss": "mean", "nested": ("sum", "mean"), "positive": "sum"}
    wrapped = wrap(model, 3, shares=shares, scalars=scalars)
    same_results(model, wrapped, (x,), [x])
    assert wrapped(x)["positive"] == model(x)["positive"]
    assert wrapped(x)["loss"].dim() == 0


@over_places("rule, rows", each_with(["mean", "mean:tokens"], [(1,), (4,), (7,)]), separate=[("mean", 7)])
def test_the_mean_of_equal_numbers_is_that_number(wrap: Wrap, rule: str, rows: int) -> None:
    """G2, G4: with its type, as of the index of an optimizer: it was a float, or a list of bools with a warning."""

    def outputs(y: torch.Tensor) -> dict[str, Any]:
        numbers = {"index": 0, "epoch": 3, "is_last": True, "rate": 0.1, "phase": 2j}
        tensors = {"step": torch.tensor(7), "flag": torch.tensor(False), "half": torch.tensor(3, dtype=torch.int16)}
        return {"loss": y.square().mean(), "tokens": y.numel(), "nested": [numbers, tensors]}

    model, x = Fn(outputs, mlp()), torch.randn(rows, 5)
    wrapped = wrap(model, 3, scalars={"loss": rule, "tokens": "sum", "nested": rule})
    expected, found = model(x), wrapped(x)
    assert found["tokens"] == expected["tokens"]
    for mine, theirs in zip(found["nested"], expected["nested"], strict=True):
        assert {name: str(value) for name, value in mine.items()} == {n: str(value) for n, value in theirs.items()}
    counts = wrap(Fn(lambda x: (x.mean(), len(x), torch.tensor(len(x)))), 2, scalars="mean")(torch.ones(3, 5))
    assert [*map(float, counts[1:])] == pytest.approx([5 / 3, 5 / 3])


@at_one_place
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, Fraction])
def test_numbers_of_numpy_and_fractions(wrap: Wrap, kind: Any) -> None:
    """G4: their mean and sum are those of Python's numbers; numpy's keep their kind. Another number is refused."""

    def outputs(x: torch.Tensor) -> dict[str, Any]:
        return {"mean": kind(float(x.mean())), "sum": kind(int(x.sum())), "epoch": kind(3), "each": kind(len(x))}

    x, scalars = torch.tensor([6.0, 8.0, 10.0, 2.0, 4.0]), {"mean": "mean", "sum": "sum", "epoch": "mean"}
    expected, found = outputs(x), wrap(Fn(outputs), 2, scalars=scalars, out_dims={"each": 0})(x)
    assert found.pop("each") == [kind(3), kind(2)]
    assert float(found["mean"]) == pytest.approx(float(expected["mean"]))
    for name in ("sum", "epoch"):
        assert (found[name], type(found[name])) == (expected[name], kind)
    with pytest.raises(TypeError, match=r"type Decimal\. Return float\(value\)"):
        wrap(Fn(lambda x: Decimal(len(x))), 2)(x)


@over_places("ignored, n", each_with([0, 3, 6, 7], [(2,), (4,)]), separate=[(6, 3)])
def test_a_mean_over_tokens_is_weighted_by_the_output_that_counts_them(wrap: Wrap, n: int, ignored: int) -> None:
    """N4: cross entropy with ignore_index; a replica whose targets are all ignored has a loss of NaN, and no part."""
    model = Fn(lambda scores, y: (F.cross_entropy(scores, y), (y != -100).sum()), nn.Linear(5, 4))
    x, y = torch.randn(8, 5, requires_grad=True), torch.randint(0, 4, (8,))
    y[8 - ignored :] = -100
    wrapped = wrap(model, n, scalars=("mean:1", "sum"))
    same_results(model, wrapped, (x, y), [x])
    assert wrapped(x, y)[1].dtype == torch.int64


@at_one_place
def test_a_mean_over_nothing_at_all_is_nan_as_in_the_plain_module(wrap: Wrap) -> None:
    model = Fn(lambda x: {"loss": x[x > 9].mean(), "n": (x > 9).sum()})
    assert wrap(model, 2, scalars={"loss": "mean:n", "n": "sum"})(torch.zeros(4))["loss"].isnan()


@at_one_place
def test_weights_that_are_refused(wrap: Wrap) -> None:
    """N4: one that requires a gradient would be taken for a constant; one that is no scalar is named."""
    model = wrap(Fn(lambda x: {"loss": x.mean(), "n": x}), 2, scalars={"loss": "mean:n"})
    with pytest.raises(ValueError, match=r"expected an output 'n' beside it, a number or a 0-dim tensor"):
        model(torch.zeros(4))
    weighted = Fn(lambda x: {"l": x.sum() / x.abs().sum(), "n": x.abs().sum()})
    model = wrap(weighted, 2, scalars={"l": "mean:n", "n": "sum"})
    with pytest.raises(
        ValueError, match=r"'n' requires a gradient, but a weight must be a constant. Call n.detach\(\)"
    ):
        model(torch.randn(4, requires_grad=True))
    assert model(torch.randn(4))["l"].dim() == 0


# ---- containers and kinds of tensor --------------------------------------------------------------


def test_a_container_that_torchs_pytree_registry_knows(wrap: Wrap) -> None:
    """G4, G5: replicas must agree on what is not a child of it."""

    class Cache:
        def __init__(self, keys: list[torch.Tensor], n: int) -> None:
            self.keys, self.n = keys, n

    torch.utils._pytree.register_pytree_node(
        Cache, lambda cache: (cache.keys, cache.n), lambda keys, n: Cache(list(keys), n), serialized_type_name="t.Cache"
    )
    model, x = wrap(Fn(lambda x: {"y": x, "cache": Cache([x * 2, x * 3], len(x))})), torch.arange(6.0)
    cache = model(x)["cache"]
    assert (type(cache), cache.n) == (Cache, 3)
    assert [key.tolist() for key in cache.keys] == [(x * 2).tolist(), (x * 3).tolist()]
    again = wrap(Fn(lambda cache: cache.keys[0] + cache.keys[1]))(cache)
    assert again.tolist() == (x * 5).tolist()
    with pytest.raises(ValueError, match=r"different Caches \(replica 0: 3; replica 1: 2\)"):
        model(torch.zeros(5))


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda y: UserList([y]), "tensors, numbers or strings"),
        (lambda y: {y}, "tensors, numbers or strings"),
        (lambda y: y.detach().cpu().numpy(), r"without \.numpy\(\)"),
        (lambda y: nn.ParameterList([y.detach()]), "tensors, numbers or strings"),
        (iter, "tensors, numbers or strings"),
    ],
    ids=["iterable", "set", "array", "module", "iterator"],
)
def test_objects_that_nothing_says_how_to_join(wrap: Wrap, make: Callable[[torch.Tensor], Any], remedy: str) -> None:
    """G9, G5: the error has the path and a remedy. One that all replicas return is returned."""
    model = wrap(Fn(lambda y: {"y": y, "extra": make(y)}, nn.Linear(5, 3)))
    with pytest.raises(TypeError, match=rf"cannot gather output\['extra'\]: .*{remedy}.*register_batch_type"):
        model(torch.randn(7, 5))
    common = object()
    assert wrap(Fn(lambda y: [y, common], nn.Linear(5, 3)))(torch.randn(7, 5))[1] is common


@pytest.mark.filterwarnings("ignore:a hook stores")
def test_memory_formats_and_strides_of_gradients(wrap: Wrap) -> None:
    """G7, S11: an optimizer's fused kernels and the next layer count on them."""
    model = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(7, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    seen, results = [], []
    model.register_forward_hook(lambda module, args, output: seen.append((args[0].stride(), module.weight.stride())))
    for call in (model, wrap(model, 3)):
        output = call(x)
        loss_of(output).backward()
        results.append([output, *(leaf.grad for leaf in (x, *model.parameters()))])
        x.grad = None
        model.zero_grad()
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12, check_stride=True)
    assert set(seen) == {(x.stride(), model.weight.stride())}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(wrap: Wrap, layout: torch.layout) -> None:
    """S15: errors that say which, and what to do."""
    rows = Fn(lambda y: torch.nested.nested_tensor(list(y.unbind()), layout=layout), nn.Linear(5, 3))
    with pytest.raises(TypeError, match=r"cannot gather output, a nested tensor: .*to_padded_tensor"):
        wrap(rows)(torch.randn(4, 5))
    nested = torch.nested.nested_tensor([torch.randn(n, 5) for n in (3, 1, 2)], layout=layout)
    model = wrap(nn.Linear(5, 3))
    with pytest.raises(TypeError, match=r"cannot scatter inputs\[0\], a nested tensor: .*to_padded_tensor"):
        model(nested)
    loss_of(model(torch.randn(4, 5))).backward()  # the next call works


UNPLACEABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_csr": torch.Tensor.to_sparse_csr,
    "sparse_csc": torch.Tensor.to_sparse_csc,
    "meta": lambda x: x.to("meta"),
}
if ON_CPU:  # torch has it there only
    UNPLACEABLE["mkldnn"] = lambda x: x.float().to_mkldnn()


@pytest.mark.parametrize("kind", UNPLACEABLE)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_that_cannot_be_split_or_joined(wrap: Wrap, kind: str) -> None:
    """S15: errors that say which, and what to do; whole or in rows, as an input and as an output."""
    make, x = UNPLACEABLE[kind], torch.randn(4, 5)
    remedy = {"mkldnn": r"\.to_dense\(\)", "meta": r"torch\.empty_like"}.get(
        kind, r"\.to_sparse_coo\(\) or \.to_dense\(\)"
    )
    says = f"a tensor (with the layout torch.*{kind}|on the {kind} device): .*{remedy}"
    for in_dims in (..., {"table": None}):
        with pytest.raises(TypeError, match=rf"cannot scatter kwargs\['table'\]\['t'\], {says}"):
            wrap(Fn(lambda x, table: x), 2, in_dims=in_dims)(x, table={"t": make(x)})
    with pytest.raises(TypeError, match=rf"cannot gather output\[1\], {says}"):
        wrap(Fn(lambda x: (x, make(x))), 2)(x)
    if kind == "meta":
        with pytest.raises(TypeError, match=rf"cannot scatter inputs\[0\], {says}"):
            wrap(Fn(lambda x: x), 1)(make(x))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["sparse_coo", *(kind for kind in UNPLACEABLE if kind not in ("sparse_csc", "meta"))])
def test_parameters_that_are_not_dense(wrap: Wrap, place: str, kind: str) -> None:
    """S15: trained as in the plain module."""
    make = torch.Tensor.to_sparse if kind == "sparse_coo" else UNPLACEABLE[kind]
    tensor = make(torch.eye(4))

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model.weight.to_dense().to(x) @ x.T).T

    plain, x = Calls(forward, weight=nn.Parameter(tensor)), torch.randn(6, 4)
    wrapped = wrap(plain, 2)
    if kind == "mkldnn" and place != "one memory":
        pytest.skip("torch has it on the CPU only, where replicas share one memory")
    same = [torch.autograd.grad(call(x).square().sum(), plain.weight)[0].to_dense() for call in (wrapped, plain)]
    torch.testing.assert_close(same[0], same[1])


@at_one_place
@pytest.mark.parametrize("is_cycle", [True, False])
def test_containers_without_an_end(wrap: Wrap, is_cycle: bool) -> None:
    """S3, G3: one that contains itself, or is nested beyond Python's recursion limit, is an error."""

    def nested(x: Any) -> Any:
        value: Any = [x]
        if is_cycle:
            value.append((x, value))
        for _ in range(0 if is_cycle else sys.getrecursionlimit()):
            value = [value]
        return value

    x = torch.randn(4, 5)
    for model, given in ((nn.Identity(), nested(x)), (Fn(nested), x)):
        with pytest.raises(ValueError, match="contains itself, or is nested deeper"):
            wrap(model, 2)(given)


def test_sparse_outputs(wrap: Wrap) -> None:
    """G7: joined along the rows, with gradients."""
    model, x = Fn(lambda y: y.to_sparse(), nn.Linear(4, 3)), torch.randn(7, 4)
    same_results(model, wrap(model, 3), (x,), [])


def test_gradients_switched_on_inside_forward(wrap: Wrap) -> None:
    """R14: forces from an energy, though the caller asks for no gradients."""

    def forces(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            energy = x.square().sum()
        return -torch.autograd.grad(energy, x)[0]

    x = torch.randn(5, 3, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(wrap(Fn(forces))(x), -2 * x.detach())


def test_padding_to_the_longest_of_each_replicas_own_is_explained(wrap: Wrap) -> None:
    """G8: the best-known trap of RNNs."""

    def forward(model: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(model.rnn(packed)[0], batch_first=True, total_length=model.total_length)[0]

    model = Calls(forward, rnn=nn.GRU(3, 4, batch_first=True), total_length=None)
    x, lengths = torch.randn(4, 6, 3, requires_grad=True), torch.tensor([6, 2, 3, 1])
    with pytest.raises(ValueError, match=r"replica 0 returned \(2, 6, 4\), replica 1 returned \(2, 3, 4\)") as raised:
        wrap(model, 2)(x, lengths)
    assert "or total_length= to pad_packed_sequence" in str(raised.value)
    model.total_length = 6
    same_results(model, wrap(model, 2), (x, lengths), [x])
