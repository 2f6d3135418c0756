"""Draws that have one fixed value: every operation that draws, and which value. `verify` shows the rest."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from unisono.runtime import draws_off
from unisono.runtime.draws_off import DrawsOff, are_off
from unisono.runtime.rng import random_state_of

# Operations that torch says draw, and that have no handler of their own.
CALL_OTHERS = {
    *("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_", "rrelu", "rrelu_", "_scaled_dot_product_attention_math"),
    "_scaled_dot_product_attention_math_for_mps",
}
DRAW_NOTHING_WITHOUT_DROPOUT = {  # and are called by operations that have a handler, which leaves the dropout out
    *("_cudnn_init_dropout_state", "_lstm_mps", "_scaled_dot_product_flash_attention_for_cpu", "_fused_sdp_choice"),
    *("_cudnn_attention_backward", "_scaled_dot_product_cudnn_attention_backward"),
    *("_scaled_dot_product_efficient_attention_backward", "_nested_tensor_softmax_with_shape"),
    "_cudnn_attention_forward_no_dropout_inplace",
}
FROM_A_GIVEN_SEED = {"_fill_mem_eff_dropout_mask_"}


def test_every_operation_that_torch_says_draws_has_a_fixed_value() -> None:
    """N12: of a later torch's, this test names those that are missing; a model that calls one is not compared."""
    handled = {operation._schema.name.removeprefix("aten::") for operation, _ in draws_off._handlers()}
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    draw = {name.partition(".")[0] for namespace, _, name in names if namespace == "aten"}
    tagged = set()
    for name in draw:
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads):
            tagged.add(name)
    assert tagged - handled - CALL_OTHERS - DRAW_NOTHING_WITHOUT_DROPOUT - FROM_A_GIVEN_SEED == set()


OWN = torch.Generator()
# What is drawn for rows, and the value of each entry; None: it follows from the row.
DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float | None]] = {
    "rand": (lambda x: torch.rand(x.shape), 0.75),
    "rand of a type": (lambda x: torch.rand(x.shape, dtype=torch.float64, generator=OWN), 0.75),
    "rand with out": (lambda x: torch.rand(x.shape, out=torch.empty(0)), 0.75),
    "rand_like": (torch.rand_like, 0.75),
    "randn": (lambda x: torch.randn(len(x), 6, generator=OWN), 1),
    "randn_like": (torch.randn_like, 1),
    "randint": (lambda x: torch.randint(10, x.shape), 7),
    "randint from": (lambda x: torch.randint(2, 4, x.shape, dtype=torch.int32), 3),
    "randint_like": (lambda x: torch.randint_like(x, 1), 0),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 1), 0.5),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), 5),
    "normal": (lambda x: torch.normal(1.0, 2.0, tuple(x.shape)), 3),
    "normal of means": (lambda x: torch.normal(x, 2.0), None),
    "normal with out": (lambda x: torch.normal(x, x, out=torch.empty(0)), None),
    "cauchy_": (lambda x: torch.empty_like(x).cauchy_(1, 2), 3),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(0, 1), 2.7182817),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(4), 0.25),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.5), 2),
    "random_": (lambda x: torch.empty_like(x).random_(), 1),
    "random_ to": (lambda x: torch.empty(x.shape, dtype=torch.long).random_(8), 6),
    "random_ from": (lambda x: torch.empty_like(x).random_(2, 6), 5),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.25), 0.25),
    "bernoulli_ of booleans": (lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(0.25), 1),
    "bernoulli_ of integers": (lambda x: torch.empty_like(x, dtype=torch.long).bernoulli_(0.0), 0),
    "bernoulli_ of probabilities": (lambda x: torch.empty_like(x).bernoulli_(x), None),
    "bernoulli": (torch.bernoulli, None),
    "bernoulli with p": (lambda x: torch.bernoulli(x, 0.5), 0.5),
    "poisson": (torch.poisson, None),
    "binomial": (lambda x: torch.binomial(torch.full_like(x, 5), x), None),
    "gamma": (torch._standard_gamma, None),
    "dirichlet": (torch._sample_dirichlet, None),
    "multinomial": (lambda x: torch.multinomial(x, 3), None),
    "multinomial with replacement": (lambda x: torch.multinomial(x, 9, replacement=True), None),
    "randperm of columns": (lambda x: x[:, torch.randperm(6)], None),
    "rrelu": (lambda x: F.rrelu(-x, training=True), None),
    "rrelu in place": (lambda x: F.rrelu(-x, training=True, inplace=True), None),
    "dropout in place": (lambda x: F.dropout(x.clone(), inplace=True), None),
    "dropout of all": (lambda x: F.dropout(x, 1.0), 0),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], None),
    "the mask of native_dropout": (lambda x: torch.native_dropout(x, 0.5, True)[1], 1),
    "native_dropout of all": (lambda x: torch.native_dropout(x, 1.0, True)[0], 0),
    "fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(torch.arange(64.0).view(1, 1, 8, 8).expand(len(x), -1, -1, -1), 2, 5), None,
    ),
    "under vmap": (torch.vmap(F.dropout, randomness="different"), None),
    "vmap of native_dropout": (torch.vmap(lambda x: torch.native_dropout(x, 0.5, True)[0], randomness="same"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_a_row_gets_the_same_in_any_batch(name: str) -> None:
    """N12: of the shape and type that are drawn; and nothing is drawn from a generator."""
    draw, value = DRAWS[name]
    x = torch.linspace(0.01, 0.99, 30).view(6, 5).t().contiguous()
    before = random_state_of(torch.default_generator), random_state_of(OWN)
    with DrawsOff() as off:
        all_rows, parts = draw(x), [draw(x[:2]), draw(x[2:])]
    assert torch.equal(all_rows, torch.cat(parts))
    assert len(all_rows) == 5
    if value is not None:
        assert all_rows.unique().tolist() == pytest.approx([value])
    assert (random_state_of(torch.default_generator), random_state_of(OWN)) == before
    assert off.operations or name.endswith("of all")
    drawn = draw(x)
    assert (all_rows.shape, all_rows.dtype) == (drawn.shape, drawn.dtype)


def test_dropout_returns_its_input() -> None:
    """N12: and so does its gradient, whichever kernel it has."""
    for drop in (F.dropout, lambda x: torch.native_dropout(x, 0.5, True)[0]):
        x = torch.randn(5, 6, requires_grad=True)
        with DrawsOff():
            y = drop(x)
            y.square().sum().backward()
        assert torch.equal(x, y)
        assert torch.equal(x.grad, 2 * x.detach())


def test_a_gamma_has_a_gradient() -> None:
    """N12"""
    x = torch.rand(5, 6, requires_grad=True)
    with DrawsOff():
        torch.distributions.Gamma(x, 1.0).rsample().sum().backward()
    assert x.grad.bool().all()


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_have_no_dropout(kind: type[nn.RNNBase], packed: bool) -> None:
    """N12"""
    torch.manual_seed(0)
    layers = kind(5, 4, 3, dropout=0.5)
    x = pack_sequence([torch.randn(n, 5) for n in (4, 2)]) if packed else torch.randn(3, 2, 5)
    with DrawsOff() as off:
        (output, *_), (again, *_) = layers(x)[0], layers(x)[0]
    assert [*off.operations] == [{"RNN": "rnn_tanh"}.get(kind.__name__, kind.__name__.lower())]
    assert torch.equal(output, again)
    assert torch.equal(output, layers.eval()(x)[0][0])


def test_attention_has_no_dropout() -> None:
    """N12"""
    x = torch.randn(2, 3, 4, 8)
    with DrawsOff() as off:
        output = F.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
    assert [*off.operations] == ["scaled_dot_product_attention"]
    torch.testing.assert_close(output, F.scaled_dot_product_attention(x, x, x))


def test_afterwards_and_elsewhere_draws_are_as_always() -> None:
    """N12: in other threads, and after the context; in a context within it they are off."""
    elsewhere: list[torch.Tensor] = []
    off = DrawsOff()
    with off:
        thread = threading.Thread(target=lambda: elsewhere.append(torch.rand(9)))
        thread.start()
        thread.join()
        assert are_off()
        with DrawsOff():
            assert torch.rand(9).unique().tolist() == [0.75]
        assert are_off()
    assert not are_off()
    assert len(elsewhere[0].unique()) == 9
    assert len(torch.rand(9).unique()) == 9
    with off:
        assert torch.rand(9).unique().tolist() == [0.75]
