"""Outputs and gradients of one step and of several, and the ways to ask for a backward."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import (
    assert_alike,
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_same_state,
    twins,
)
from helpers.contract import REFUSES_CHECKPOINTS, Wrap, in_one_memory, in_threads, in_turn, over_places
from helpers.losses import fresh, loss_of
from helpers.modules import Calls, Fn, mlp
from unisono import DataParallel, data_parallel

SPLITS = [(2, 7), (4, 6), (2, 1)]  # replicas, rows; (4, 6) leaves one idle, (2, 1) runs one replica
Call = Callable[..., Any]


# ---- models --------------------------------------------------------------------------------------


OWN_ROWS: dict[str, Any] = {"sync_batch_norm": False}  # each replica's batch norms see these only


def with_unused_and_frozen() -> nn.Module:
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    unused = nn.Parameter(torch.randn(3))
    return Calls(lambda model, x: model.used(x) * model.frozen, used=nn.Linear(5, 3), unused=unused, frozen=frozen)


# ---- outputs and gradients -----------------------------------------------------------------------


@over_places("num_replicas, rows", SPLITS, separate=[(4, 6)])
def test_batch_norm_in_training_is_the_plain_compositions(wrap: Wrap, num_replicas: int, rows: int) -> None:
    """N5, R5: each replica normalises over its own rows, and the first one's statistics persist."""
    oracle, model = twins(
        wrap, nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), num_replicas, **OWN_ROWS
    )
    for _ in range(3):
        x = torch.randn(rows, 2, 5, 5)
        output, expected = model(x), data_parallel(oracle, x, in_turn(num_replicas), **OWN_ROWS)
        assert_same(output.detach(), expected.detach())
        loss_of(output).backward()
        loss_of(expected).backward()
        assert_same_gradients(model.module, oracle)
        assert_same_state(model.module, oracle)


@pytest.mark.parametrize("how", ["parameter", "input"])
def test_sums_are_in_replica_order(wrap: Wrap, how: str) -> None:
    """N1: float32 cannot tell 1e8 + 1 from 1e8."""
    weight, given = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    model = wrap(Calls(lambda net, x, given: x * net.weight * given, weight=weight).float(), 3, in_dims={1: None})
    for rows, expected in (([1e8, -1e8, 1.0], 1.0), ([1e8, 1.0, -1e8], 0.0)):
        of = model.module.weight if how == "parameter" else given
        (grad,) = torch.autograd.grad(model(torch.tensor(rows)[:, None], given.float()).sum(), of)
        assert grad.item() == expected


def test_unused_rows_of_an_input_get_zeros(wrap: Wrap) -> None:
    """N1: an input that only one replica uses has a gradient of zeros in the other replicas' rows."""
    model = wrap(Fn(lambda x, number: x * 2 if number[0] == 0 else torch.zeros_like(x, requires_grad=True)))
    x = torch.ones(5, 2, requires_grad=True)
    model(x, torch.arange(5)).sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0]] * 3 + [[0.0, 0.0]] * 2


@pytest.mark.parametrize("how", ["backward", "twice", "grad"])
@pytest.mark.parametrize("leaf", ["none", "made", "kept"])
def test_reentrant_checkpoints(wrap: Wrap, leaf: str, how: str) -> None:
    """N1, R13: torch differentiates such a checkpoint only in a backward that writes `.grad`. Leaves that forward makes
    kept the replicas from that: RuntimeError. So did `torch.autograd.grad`, which in the plain module does not reach
    the checkpoint. If forward keeps the leaf, its `grad` is the caller's, who may have one there already."""
    x = torch.randn(7, 3)

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x if leaf == "none" else x.detach().requires_grad_()
        if leaf == "kept":
            net.kept.append(x)
        return net.head(checkpoint(net.body, net.foot(x) * 2, use_reentrant=True))

    def steps(call: Call, root: Any) -> Any:
        loss = loss_of(call(x))
        if how == "grad":
            found = torch.autograd.grad(loss, [root.head.weight])
            assert all(kept.grad is None for kept in root.kept)
            return found
        for again in (True, False) if how == "twice" else (False,):
            loss.backward(retain_graph=again)
        kept = [(leaf.detach().to(x.device), leaf.grad.to(x.device)) for leaf in root.kept]
        kept.sort(key=lambda pair: int((x == pair[0][0]).all(1).nonzero()[0]))
        return [torch.cat([grad for _, grad in kept])[:3]] if kept else []

    layers = {name: nn.Linear(3, 3) for name in ("foot", "body", "head")}
    assert_alike(wrap, Calls(forward, kept=[], **layers), steps, 3)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_reentrant_checkpoints_have_no_second_derivatives(wrap: Wrap) -> None:
    """R13: the error was torch's, which told the caller of `backward()` to call `backward()`."""
    layers = {name: nn.Linear(3, 3) for name in ("foot", "body")}
    model = wrap(Calls(lambda net, x: checkpoint(net.body, net.foot(x), use_reentrant=True), **layers))
    with pytest.raises(RuntimeError, match=r"backward\(create_graph=True\) reaches.*use_reentrant=False"):
        model(torch.randn(7, 3)).sum().backward(create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_reentrant_checkpoint_behind_a_wrapper_inside_the_module(wrap: Wrap) -> None:
    """N1: the outer wrapper sees the leaf of the inner one's forward, and did not see that its checkpoint has to be
    differentiated through `.grad`: RuntimeError."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net.head(checkpoint(net.body, x.detach().requires_grad_() * 2, use_reentrant=True))

    plain = linears(forward, 3, "body", "head")()
    inner = copy.deepcopy(plain)
    model, x = wrap(DataParallel(inner, ["cpu"] * 2), 2), torch.randn(7, 3)
    for module in (plain, model):
        loss_of(module(x)).backward()
    assert_same_gradients(inner, plain)


@in_one_memory
def test_tensors_from_outside_that_change_from_step_to_step(wrap: Wrap) -> None:
    """N1, N3: not the module's, and another one in each step."""
    table: dict[str, torch.Tensor] = {}
    wrapped, x = wrap(Fn(lambda x: x + table["now"], nn.Linear(3, 3))), torch.randn(5, 3)
    for _ in range(3):
        table["now"] = torch.zeros(3, requires_grad=True)
        wrapped(x).sum().backward()
        assert table["now"].grad.tolist() == [5.0] * 3


@in_one_memory
@pytest.mark.parametrize("how", ["argument", "attribute", "global"])
def test_a_tensor_from_outside_that_only_later_steps_use(wrap: Wrap, how: str) -> None:
    """N1: an argument, an attribute or a global leads to it; `torch.autograd.grad` returned None, and the tensor got a
    `grad`, or with the global none, in silence."""
    outside = torch.ones(3, dtype=torch.float64, requires_grad=True)
    holder = SimpleNamespace(tensor=outside, used=False)  # in which no attribute is looked for

    def forward(net: nn.Module, x: torch.Tensor, used: bool = False) -> torch.Tensor:
        return net.linear(x) * holder.tensor if used or net.used or holder.used else net.linear(x)

    plain, model = twins(wrap, Calls(forward, linear=nn.Linear(3, 3).double(), used=False))
    x = torch.randn(5, 3, dtype=torch.float64)
    for used in (False, False, False, True, False, True):
        gradients = []
        for module, root in ((plain, plain), (model, model.module)):
            root.used, holder.used = used and how == "attribute", used and how == "global"
            loss = loss_of(module(x, used=used and how == "argument"))
            gradients.append(torch.autograd.grad(loss, [root.linear.weight, outside], allow_unused=True))
        assert outside.grad is None, used
        assert (gradients[1][1] is not None) is used
        assert_all_same(gradients[1], gradients[0])


def test_large_gradients_that_are_sparse_in_some_replicas(wrap: Wrap) -> None:
    """S15, N1: torch adds a sparse gradient to a dense one, but no dense one to a sparse one."""

    def forward(net: nn.Module, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        embedded = net.embedding(tokens)
        return embedded @ net.embedding.weight.t() if target.any() else embedded.repeat(1, 3000)

    plain, model = twins(wrap, Calls(forward, embedding=nn.Embedding(6000, 2, sparse=True).double()), 3)
    tokens = torch.tensor([2, 1, 2, 5, 0, 1])
    for replica in range(3):
        target = torch.arange(6) // 2 == replica
        for module in (plain, model):
            module.zero_grad()
        loss_of(model(tokens, target)).backward()
        loss_of(torch.cat([plain(*part) for part in zip(tokens.split(2), target.split(2), strict=True)])).backward()
        mine, expected = model.module.embedding.weight.grad, plain.embedding.weight.grad
        assert_same(mine, expected)


class OfFirst(torch.autograd.Function):
    """The first input; the second one has no gradient."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def test_sparse_and_missing_gradients_in_the_plain_composition(wrap: Wrap) -> None:
    """S15, R14: of a copy on another device, too: torch's own has no sparse gradient."""

    def forward(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return OfFirst.apply(net.embedding(tokens) * net.embedding(tokens.flip(1)), net.unused)

    embedding, unused = nn.Embedding(6, 2, sparse=True).double(), nn.Parameter(torch.ones(1))
    plain, model = twins(wrap, Calls(forward, embedding=embedding, unused=unused))
    tokens = torch.tensor([[2, 1], [2, 5], [0, 1]])
    with torch.autograd.graph.save_on_cpu():
        for module in (plain, model):
            loss_of(module(tokens)).backward()
    mine, expected = model.module.embedding.weight.grad, plain.embedding.weight.grad
    assert mine.is_sparse
    assert model.module.unused.grad is None
    assert_same(mine.to_dense(), expected.to_dense())


# ---- how backward is asked for -------------------------------------------------------------------


def batched(call: Call, root: nn.Module) -> Any:
    """`is_grads_batched` runs backward under vmap, as a vectorized jacobian does."""
    x, vectors = torch.randn(3, 5, requires_grad=True), torch.randn(4, 3, 3)
    return torch.autograd.grad(call(x), [x, *root.parameters()], vectors, is_grads_batched=True)


def parameter_written_into(call: Call, root: nn.Module) -> None:
    """Between the passes: an error, not a wrong gradient; and the next step works."""
    loss = loss_of(call(torch.randn(7, 5)))
    with torch.no_grad():
        root[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    root.zero_grad()  # of what the plain module has computed before the error
    loss_of(call(torch.randn(7, 5))).backward()


def in_anomaly_mode(call: Call, root: nn.Module) -> None:
    """A NaN in a replica's backward is found."""
    with (
        pytest.warns(UserWarning, match="Error detected in|Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        call(torch.randn(4, 5)).sum().backward()


def many_in_a_row(call: Call, root: nn.Module) -> torch.Tensor | None:
    """One block many times, as in a loop over time."""
    x = h = torch.ones(5, 5, requires_grad=True)
    for _ in range(30):
        h = h + 0.1 * call(h)
    h.sum().backward()
    return x.grad


def several_inputs(call: Call, root: nn.Module) -> Any:
    """Positional ones, in keywords, 0-dim; one tensor given twice."""
    x, y, scale = fresh(torch.ones(7, 5)), fresh(torch.arange(35.0).view(7, 5)), fresh(torch.tensor(1.5))
    loss_of(call(x, {"rows": [y * x]}, scale=scale, flag=True)).backward()
    twice = fresh(torch.ones(7, 5))
    loss_of(call(twice, {"rows": [twice]}, scale=scale, flag=True)).backward()
    return [x.grad, y.grad, scale.grad, twice.grad]


def takes_several(model: nn.Module, a: torch.Tensor, b: Any, *, scale: torch.Tensor, flag: bool) -> torch.Tensor:
    return model.linear(a * scale + b["rows"][0]) if flag else a


def values_that_are_no_leaves(call: Any, root: nn.Module) -> None:
    """`functional_call` with computed values. A parameter that no replica used got zeros, by way of its value's
    history; the plain module leaves it without a gradient."""
    whole = nn.Sequential(call)
    values = {name: value * 1.1 for name, value in whole.named_parameters()}
    loss_of(torch.func.functional_call(whole, values, (torch.randn(5, 5),))).backward()
    assert root.unused.grad is None


def checkpoint_around(call: Call, root: nn.Module) -> None:
    """The gradient makes torch compute the checkpoint's function again, up to the tensors that it has so far.
    Replica 1 was run after replica 0 had come to that end: CheckpointError."""
    loss_of(checkpoint(call, torch.randn(7, 3), use_reentrant=False)).backward()


def uses_slope(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net.body(leaf).tanh().sum(), leaf)
    return net.head(x + slope)


def linears(function: Callable[..., Any], width: int, *names: str) -> Callable[[], nn.Module]:
    return lambda: Calls(function, **{name: nn.Linear(width, width) for name in names})


# The module, and the steps that are made with it.
STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "batched": (mlp, batched),
    "a parameter that is written into": (mlp, parameter_written_into),
    "anomaly mode": (lambda: Fn(lambda y: (y * 0).sqrt() * 0, nn.Linear(5, 3)), in_anomaly_mode),
    "many in a row": (lambda: mlp(5, 5), many_in_a_row),
    "several inputs": (linears(takes_several, 5, "linear"), several_inputs),
    "values that are no leaves": (with_unused_and_frozen, values_that_are_no_leaves),
    "a checkpoint around a gradient": (linears(uses_slope, 3, "body", "head"), checkpoint_around),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_plain_modules(wrap: Wrap, name: str) -> None:
    """N1, N2, N3, N7, N8, S6, S7, R4, R13, A10: returned and accumulated gradients, and the state."""
    make, steps = STEPS[name]
    if steps is checkpoint_around and REFUSES_CHECKPOINTS:
        with pytest.raises(RuntimeError, match="Put the checkpoint inside the module"):
            steps(wrap(make()), None)
        return
    assert_alike(wrap, make(), steps, 3, 1e-10 if name == "many in a row" else 1e-12)


def test_backward_of_a_kept_graph_from_two_threads(wrap: Wrap) -> None:
    """N1, F5: each gets its own gradients, of a loss of its own."""
    plain, model = twins(wrap, mlp())
    x = torch.randn(7, 5)
    expected, output = plain(x), model(x)
    weights = torch.randn(2, *output.shape)

    def gradients(output: torch.Tensor, root: nn.Module, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(output, list(root.parameters()), weight, retain_graph=True)

    right = [gradients(expected, plain, weight) for weight in weights]

    def backward(number: int) -> None:
        for _ in range(10):
            torch.testing.assert_close(gradients(output, model.module, weights[number]), right[number])

    in_threads(2, backward)


def test_gradients_given_by_the_caller_are_not_written_into(wrap: Wrap) -> None:
    """N1: the tensor given to backward, and gradients that share its memory."""

    shifts = {name: nn.Parameter(torch.zeros(2, 3)) for name in "ab"}
    model = wrap(Calls(lambda model, x: x.sum() * 0 + model.a + model.b, **shifts))
    grad = torch.arange(12.0).view(4, 3)
    kept = grad.clone()
    model(torch.ones(4, 3)).backward(grad)
    assert torch.equal(grad, kept)
    for parameter in model.module.parameters():
        assert torch.equal(parameter.grad, kept[:2] + kept[2:])
    model.module.a.grad.zero_()
    assert torch.equal(model.module.b.grad, kept[:2] + kept[2:])
