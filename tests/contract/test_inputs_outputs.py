"""Rows on other axes, numbers and 0-dim outputs, containers, and inputs and outputs that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from helpers.contract import Wrap, each_with, loss_of, mlp, on_threads, over_engines, over_gloo_too, same_results
from helpers.modules import Calls, Fn
from manyhands.runtime.buckets import LARGE_BYTES

# ---- rows on other axes --------------------------------------------------------------------------


@over_engines("n, rows", [(2, 7), (4, 6), (2, 1)], processes=[(4, 6), (2, 1)], gloo=[(4, 6)])
def test_one_input_whole_and_outputs_on_other_axes(wrap: Wrap, n: int, rows: int) -> None:
    """S5, S10, G6: a mask that belongs to no row goes whole to every replica; its gradient is the sum of theirs."""

    class MaskedAttention(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            output, weights = super().forward(x, x, x, attn_mask=mask)
            return {"y": output * scale, "weights": weights.transpose(0, 1), "mask": mask * 2}

    model = MaskedAttention(4, 2, batch_first=True)
    x, mask = torch.randn(rows, 5, 4, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    wrapped = wrap(model, n, in_dims={"mask": None}, out_dims={"weights": 1, "mask": None})
    same_results(model, wrapped, (x, mask, scale), [x, mask, scale])


def test_a_large_input_that_goes_whole(wrap: Wrap) -> None:
    """N1: its gradient, summed while backward runs, was once given to a parameter."""

    class Projected(nn.Linear):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return super().forward(x @ table)

    plain, x, table = Projected(100, 3), torch.randn(7, 100), torch.randn(100, 100, requires_grad=True)
    assert table.nbytes >= LARGE_BYTES
    same_results(plain, wrap(plain, 3, in_dims={"table": None}), (x, table), [table])


@over_gloo_too
def test_the_gradient_of_what_is_whole_counts_once(wrap: Wrap) -> None:
    """A regulariser, say, that every replica computes from the same weights."""

    class Penalised(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.weight.square().sum()

    plain, x = Penalised(5, 3), torch.randn(7, 5, requires_grad=True)
    same_results(plain, wrap(plain, 3, out_dims=(0, None)), (x,), [x])


@on_threads
def test_replicas_that_do_not_agree_on_what_is_whole(wrap: Wrap) -> None:
    """G3: with what each gave."""
    model = wrap(Fn(lambda x: x.sum()), 2, out_dims=None)
    assert model(torch.zeros(4)).dim() == 0
    with pytest.raises(ValueError, match=r"different values, .*out_dims says None.*replica 0: 1; replica 1: 5"):
        model(torch.arange(4.0))


def test_second_derivatives_through_every_placement(wrap: Wrap) -> None:
    """N3, for rows on another axis, means, sums and whole outputs."""

    def forward(model: nn.Module, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(x.T @ model.weight @ table)
        return y.T, y.square().mean(), y.sum(), model.weight.sin().sum()

    model, x = Calls(forward, weight=nn.Parameter(torch.randn(3, 3))), torch.randn(3, 5, requires_grad=True)
    table = torch.randn(3, 3, requires_grad=True)
    scalars = ("stack", "mean", "sum", "stack")
    wrapped = wrap(model, 2, in_dims=(1, None), out_dims=(1, 0, 0, None), scalars=scalars)

    def penalty(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        y, mean, total, whole = call(x, table)
        leaves = [x, table, model.weight]
        grads = torch.autograd.grad(y.square().sum() + mean + total * mean + whole**2, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    torch.testing.assert_close(penalty(wrapped), penalty(model), rtol=1e-12, atol=1e-12)


# ---- means and sums ------------------------------------------------------------------------------


SHARES = ["chunk", "even", [3, 1, 2], [0, 1, 1]]


@over_engines(
    "shares, rows",
    each_with(SHARES, [(1,), (4,), (7,), (10,)]),
    processes=each_with([[3, 1, 2], [0, 1, 1]], [(7,)]),
    gloo=[([3, 1, 2], 7)],
)
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


@over_engines("ignored, n", each_with([0, 3, 6, 7], [(2,), (4,)]), processes=[(3, 3), (6, 3)], gloo=[(6, 3)])
def test_a_mean_over_tokens_is_weighted_by_the_output_that_counts_them(wrap: Wrap, n: int, ignored: int) -> None:
    """N4: cross entropy with ignore_index; a replica whose targets are all ignored has a loss of NaN, and no part."""
    model = Fn(lambda scores, y: (F.cross_entropy(scores, y), (y != -100).sum()), nn.Linear(5, 4))
    x, y = torch.randn(8, 5, requires_grad=True), torch.randint(0, 4, (8,))
    y[8 - ignored :] = -100
    wrapped = wrap(model, n, scalars=("mean:1", "sum"))
    same_results(model, wrapped, (x, y), [x])
    assert wrapped(x, y)[1].dtype == torch.int64


@on_threads
def test_a_mean_over_nothing_at_all_is_nan_as_in_the_plain_module(wrap: Wrap) -> None:
    model = Fn(lambda x: {"loss": x[x > 9].mean(), "n": (x > 9).sum()})
    assert wrap(model, 2, scalars={"loss": "mean:n", "n": "sum"})(torch.zeros(4))["loss"].isnan()


@on_threads
def test_weights_that_are_refused(wrap: Wrap) -> None:
    """N4: one that requires a gradient would be taken for a constant; one that is no scalar is named."""
    model = wrap(Fn(lambda x: {"loss": x.mean(), "n": x}), 2, scalars={"loss": "mean:n"})
    with pytest.raises(ValueError, match=r"expected an output 'n' beside it that is a number or a 0-dim tensor"):
        model(torch.zeros(4))
    weighted = Fn(lambda x: {"l": x.sum() / x.abs().sum(), "n": x.abs().sum()})
    model = wrap(weighted, 2, scalars={"l": "mean:n", "n": "sum"})
    with pytest.raises(ValueError, match=r"'n' requires a gradient, and a weight counts as a constant. detach\(\)"):
        model(torch.randn(4, requires_grad=True))
    assert model(torch.randn(4))["l"].dim() == 0


# ---- containers and kinds of tensor --------------------------------------------------------------


def test_a_container_that_torchs_pytree_registry_knows(wrap: Wrap) -> None:
    """G4, G5: such as the key-value caches of transformers; replicas must agree on what is not a child of it."""

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


@over_gloo_too
def test_memory_formats_and_strides_of_gradients(wrap: Wrap) -> None:
    """G7, S11: an optimizer's fused kernels and the next layer count on them."""
    model = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(7, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()

    def strides(call: Callable[..., Any]) -> list[tuple[int, ...]]:
        output = call(x)
        return [t.stride() for t in (output, *torch.autograd.grad(output.square().sum(), [x, *model.parameters()]))]

    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append((args[0].stride(), module.weight.stride())))
    plain = strides(model)
    assert strides(wrap(model, 3)) == plain
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


def test_an_output_that_is_a_generator(wrap: Wrap) -> None:
    """G5: it cannot be joined, nor leave a worker process."""
    with pytest.raises(TypeError, match=r"cannot gather .*output.* Return tensors, numbers or strings"):
        wrap(Fn(lambda y: (row for row in y), nn.Linear(5, 3)))(torch.randn(4, 5))


def test_sparse_outputs(wrap: Wrap) -> None:
    """G7: joined along the rows, with gradients."""
    model, x = Fn(lambda y: y.to_sparse(), nn.Linear(4, 3)), torch.randn(7, 4)

    def results(call: Callable[..., Any]) -> list[torch.Tensor]:
        output = call(x)
        assert output.is_sparse
        return [output.to_dense(), *torch.autograd.grad(output.to_dense().square().sum(), list(model.parameters()))]

    torch.testing.assert_close(results(wrap(model, 3)), results(model), rtol=1e-12, atol=1e-12)


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
    with pytest.raises(ValueError, match=r"replica 0: \(2, 6, 4\); replica 1: \(2, 3, 4\)") as raised:
        wrap(model, 2)(x, lengths)
    assert "give total_length=" in raised.value.__notes__[0]
    model.total_length = 6
    same_results(model, wrap(model, 2), (x, lengths), [x])
