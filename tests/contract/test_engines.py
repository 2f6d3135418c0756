"""The contract of the engines: whatever runs the replicas, numbers, state and errors are the plain module's.

The oracle is the plain module on the whole batch, in float64; where rows interact (batch normalisation in training)
it is `data_parallel`, the plain composition. A new engine is added to `ENGINES`. The rows named in the docstrings are
those of docs/behaviour.md.

The replicas are on the CPU, or on the devices that MANYHANDS_TEST_DEVICES names, in turn: "cuda:0" has them all on one
GPU, "cuda:0,cuda:1" on two. That is how `make gpu-check` runs this file; models and batches are made on the first.
"""

import contextlib
import copy
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from helpers.in_time import in_time as _in_time
from helpers.late_copies import send_late
from helpers.rounding import assert_as_accurate
from manyhands import DataParallel, data_parallel, register_batch_type
from manyhands.autograd import broadcast
from manyhands.engines.processes import worker_group
from manyhands.primitives import pytree
from manyhands.runtime.buckets import buckets_of

DEVICES = os.environ.get("MANYHANDS_TEST_DEVICES", "cpu").split(",")
ON_CPU = DEVICES == ["cpu"]
of_the_host = pytest.mark.skipif(not ON_CPU, reason="about random numbers that are drawn on the host")
in_one_memory = pytest.mark.skipif(len(set(DEVICES)) > 1, reason="several devices cannot share a tensor")
# Processes of which each has parameters of its own, as on GPUs, take part in `make test` where `over_gloo_too` says so.
# Replicas that stand apart, as on several GPUs: parameters are copied to them, and gradients come back in buckets.
ENGINES = [
    "threads",
    pytest.param("threads apart", marks=pytest.mark.slow),
    "processes",
    pytest.param("processes over gloo", marks=pytest.mark.slow),
]
over_gloo_too = pytest.mark.parametrize("engine", ["threads", "processes", "processes over gloo"], indirect=True)
if not ON_CPU:  # processes have tests of their own there: to start one takes seconds
    ENGINES = ["threads", "threads apart"]
    over_gloo_too = pytest.mark.parametrize("engine", ENGINES, indirect=True)
SPLITS = [(2, 7), (4, 6), (2, 1)]  # replicas, rows; (4, 6) leaves one idle, (2, 1) runs one replica
MORE_SPLITS = [(3, 8)]
WAIT_S = 15.0


def over_engines(
    names: str,
    cases: Iterable[tuple[Any, ...]],
    *,
    slow: Iterable[tuple[Any, ...]] = (),
    processes: Iterable[tuple[Any, ...]] | None = None,
    gloo: Iterable[tuple[Any, ...]],
) -> pytest.MarkDecorator:
    """Parametrise a test whose axes multiply: with every case on threads, with fewer on processes and over gloo.

    What a module computes, and which rows a replica has, do not depend on what carries them to another process; so
    each value of each axis goes there, and not each with each.

    Args:
        names: the arguments of a case, in words.
        cases: those on threads.
        slow: more on threads, for `make test-all`.
        processes: those on processes; all of `cases` unless given.
        gloo: those on processes of which each has parameters of its own, and on threads whose replicas stand apart,
            for `make test-all`.
    """
    cases, gloo, slow_mark = list(cases), list(gloo), [pytest.mark.slow]
    product = [pytest.param("threads", *case) for case in cases]
    product += [pytest.param("threads", *case, marks=slow_mark) for case in slow]
    if ON_CPU:
        product += [pytest.param("processes", *case) for case in (cases if processes is None else processes)]
        product += [pytest.param("processes over gloo", *case, marks=slow_mark) for case in gloo]
    product += [pytest.param("threads apart", *case, marks=slow_mark if ON_CPU else ()) for case in gloo]
    return pytest.mark.parametrize(f"engine, {names}", product, indirect=["engine"], ids=label)


def label(value: Any) -> str | None:
    """Return what a value is called in the name of a test, where pytest would give it a number."""
    return type(value).__name__ if isinstance(value, BaseException) else str(value) if isinstance(value, list) else None


def each_with(values: Iterable[Any], cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(value, *case) for value in values for case in cases]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)  # no effect on the CPU
    with exact, on_first_device():
        yield
    torch.set_default_dtype(before)


@contextlib.contextmanager
def on_first_device() -> Iterator[None]:
    """Let this thread make its tensors on the first device."""
    with contextlib.nullcontext() if ON_CPU else torch.device(DEVICES[0]):
        yield


def in_turn(num_replicas: int) -> list[str]:
    """Return the device of each replica."""
    return [DEVICES[i % len(DEVICES)] for i in range(num_replicas)]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine's name; parameters and gradients of processes are shared on the CPU, and sent as they are on GPUs."""
    name, _, how = request.param.partition(" ")
    monkeypatch.setattr(worker_group, "always_send", how == "over gloo")
    if how == "apart":
        monkeypatch.setattr(broadcast, "always_apart", True)
        if ON_CPU:
            send_late(monkeypatch)
        monkeypatch.setattr(broadcast, "buckets_of", functools.partial(buckets_of, full_bytes=300))  # several, that is
    return name


@pytest.fixture
def wrap(engine: str) -> Callable[..., DataParallel]:
    """Wrap a module for some replicas on the engine under test."""

    def wrap(module: nn.Module, num_replicas: int = 2, **options: Any) -> DataParallel:
        return DataParallel(module, in_turn(num_replicas), engine=engine, **options)

    return wrap


# ---- modules -------------------------------------------------------------------------------------


def mlp(width: int = 5, out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, out))


def conv_group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def batch_norm_eval() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    return model.eval()


class EmbeddingLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Fn(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class NestedOutputs(nn.Module):
    """Outputs of every kind: nested, a view, one twice, an integer, one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.trunk(x))
        logits = self.head(hidden)
        return {
            "logits": logits,
            "again": logits,
            "pair": Pair(hidden, hidden[:, 1:3]),
            "views": [hidden.view(-1, 2, 3), logits.transpose(0, 1).transpose(0, 1), logits.expand(2, -1, -1)[0]],
            "classes": (logits.argmax(1), None),
            "constant": logits.detach() * 2,
        }


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.relu(x))


class Unused(nn.Module):
    """A parameter that nothing uses, one that is frozen, and a layer that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) * self.frozen


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 5)
        self.decoder = nn.Linear(5, 5)
        self.decoder.weight = self.encoder.weight
        self.act = nn.PReLU()
        self.also_act = self.act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.also_act(self.encoder(self.act(x))))


class ForceField(nn.Module):
    """Differentiates inside its own forward, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -force


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = mlp(5, 5), mlp(5, 3), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return checkpoint(self.second, hidden, use_reentrant=self.reentrant)


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def identity() -> nn.Module:
    return nn.Identity()


def rows_of(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(0, 11, (rows, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (mlp, rows_of(5)),
    "conv and group norm": (conv_group_norm, rows_of(2, 4, 4)),
    "batch norm in eval mode": (batch_norm_eval, rows_of(2, 4, 4)),
    "embedding and lstm": (EmbeddingLSTM, tokens),
    "transformer layer": (transformer_layer, rows_of(3, 8)),
    "nested outputs": (NestedOutputs, rows_of(5)),
    "in-place first layer": (InPlaceFirst, rows_of(5)),
    "unused and frozen parameters": (Unused, rows_of(5)),
    "tied weights": (TiedAutoencoder, rows_of(5)),
    "output is the input": (identity, rows_of(5)),
    "differentiates inside": (ForceField, rows_of(5)),
    "checkpoint, reentrant": (lambda: Checkpointed(True), rows_of(5)),
    "checkpoint, non-reentrant": (lambda: Checkpointed(False), rows_of(5)),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 3)), nn.Tanh()), rows_of(5)),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 3)), nn.Tanh()), rows_of(5)),
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Tanh()), tokens),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def loss_of(output: Any) -> torch.Tensor:
    """A scalar that depends on every entry of every differentiable output, with different weights."""
    total = torch.zeros(())
    for number, tensor in enumerate(tensors_in(output), 1):
        if tensor.requires_grad:
            total = total + number * (tensor.pow(2) * torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape)).sum()
    return total


def fresh(x: torch.Tensor) -> torch.Tensor:
    """A leaf with the values of `x` that needs a gradient if it can have one; not itself a module's parameter."""
    return x.detach().clone().requires_grad_(x.is_floating_point())


def assert_same(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-12) -> None:
    assert (actual is None) == (expected is None), f"got {actual}, expected {expected}"
    if expected is not None and actual is not None:
        assert actual.is_sparse == expected.is_sparse
        torch.testing.assert_close(actual.to_dense(), expected.to_dense(), rtol=tolerance, atol=tolerance)


def assert_same_gradients(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, mine), theirs in zip(actual.named_parameters(), expected.parameters(), strict=True):
        try:
            assert_same(mine.grad, theirs.grad, tolerance)
        except AssertionError as error:
            error.add_note(f"the gradient of {name}")
            raise


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    mine, theirs = actual.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


in_time = functools.partial(_in_time, within=on_first_device)


# ---- outputs and gradients -----------------------------------------------------------------------


@over_engines(
    "name, num_replicas, rows",
    each_with(MODELS, SPLITS),
    slow=each_with(MODELS, MORE_SPLITS),
    gloo=[*each_with(MODELS, [(4, 6)]), ("nested outputs", 2, 7), ("nested outputs", 2, 1), ("nested outputs", 3, 8)],
)
def test_outputs_and_gradients_are_the_plain_modules(
    wrap: Callable[..., DataParallel], name: str, num_replicas: int, rows: int
) -> None:
    """N1, N8, R3, G3, S12: outputs, gradients of parameters and of the input, and buffers."""
    make_model, make_batch = MODELS[name]
    plain = make_model()
    model = wrap(copy.deepcopy(plain), num_replicas)
    x = make_batch(rows)
    x_plain, x_model = fresh(x), fresh(x)
    # An in-place first layer refuses a leaf; the plain module gets a copy.
    expected = plain(x_plain.clone() if name == "in-place first layer" else x_plain)
    output = model(x_model)
    for mine, theirs in zip(tensors_in(output), tensors_in(expected), strict=True):
        assert mine.requires_grad == theirs.requires_grad
        assert mine.dtype == theirs.dtype
        assert_same(mine.detach(), theirs.detach())
    loss_of(expected).backward()
    loss_of(output).backward()
    assert_same(x_model.grad, x_plain.grad)
    assert torch.equal(x_model.detach(), x), "the module wrote into the caller's batch"
    assert_same_gradients(model.module, plain)
    assert_same_state(model.module, plain)


TRAINED = [name for name in MODELS if name not in ("output is the input", "sparse embedding")]


@over_engines(
    "name, num_replicas",
    each_with(TRAINED, [(2,), (3,), (4,)]),
    processes=[*each_with(TRAINED, [(3,)]), ("mlp", 2), ("mlp", 4)],
    gloo=each_with(TRAINED, [(3,)]),
)
def test_five_steps_of_sgd(wrap: Callable[..., DataParallel], name: str, num_replicas: int) -> None:
    """N9: parameters after five steps are the plain module's; batches of different sizes."""
    make_model, make_batch = MODELS[name]
    plain = make_model()
    model = wrap(copy.deepcopy(plain), num_replicas)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-2) for m in (plain, model.module)
    ]
    for rows in (7, 8, 9, 5, 3):
        x = make_batch(rows)
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(module(fresh(x).clone() if x.is_floating_point() else x)).backward()
            optimizer.step()
    assert_same_state(model.module, plain)


@over_engines("num_replicas, rows", SPLITS, slow=MORE_SPLITS, gloo=[(4, 6)])
def test_batch_norm_in_training_is_the_plain_compositions(
    wrap: Callable[..., DataParallel], num_replicas: int, rows: int
) -> None:
    """N5, R5: each replica normalises over its own rows, and the first one's statistics persist."""
    model = wrap(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), num_replicas)
    oracle = copy.deepcopy(model.module)
    for _ in range(3):
        x = torch.randn(rows, 2, 5, 5)
        output, expected = model(x), data_parallel(oracle, x, in_turn(num_replicas))
        assert_same(output.detach(), expected.detach())
        loss_of(output).backward()
        loss_of(expected).backward()
        assert_same_gradients(model.module, oracle)
        assert_same_state(model.module, oracle)


@over_gloo_too
def test_gradients_accumulate_over_backwards(wrap: Callable[..., DataParallel]) -> None:
    """N1, N7: gradients are added to what is there, as with the plain module."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain), 3)
    for rows in (7, 4):
        x = torch.randn(rows, 5)
        loss_of(plain(x)).backward()
        loss_of(model(x)).backward()
    assert_same_gradients(model.module, plain)


@over_gloo_too
def test_equal_calls_give_equal_bits(wrap: Callable[..., DataParallel]) -> None:
    """N1: gradients are summed in replica order, whichever replica ends first."""
    model = wrap(mlp(), 4)
    x = torch.randn(64, 5)
    seen = []
    for _ in range(20):
        model.zero_grad()
        loss_of(model(x)).backward()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all(torch.equal(other, seen[0]) for other in seen)


def test_several_inputs_positional_keyword_and_whole(wrap: Callable[..., DataParallel]) -> None:
    """S6, S7, N1: one tensor given twice, a 0-dim input, keywords; each gets its gradient."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, a: torch.Tensor, b: Any, *, scale: torch.Tensor, flag: bool) -> torch.Tensor:
            return self.linear(a * scale + b["rows"][0]) if flag else a

    plain = Mixed()
    model = wrap(copy.deepcopy(plain), 3)
    grads = []
    for module in (plain, model):
        x, y, scale = fresh(torch.ones(7, 5)), fresh(torch.arange(35.0).view(7, 5)), fresh(torch.tensor(1.5))
        loss_of(module(x, {"rows": [y * x]}, scale=scale, flag=True)).backward()
        twice = fresh(torch.ones(7, 5))
        loss_of(module(twice, {"rows": [twice]}, scale=scale, flag=True)).backward()
        grads.append((x.grad, y.grad, scale.grad, twice.grad))
    for mine, theirs in zip(*reversed(grads), strict=True):
        assert_same(mine, theirs)


def test_middle_block_wrapped_with_an_in_place_layer(wrap: Callable[..., DataParallel]) -> None:
    """A10, S12: the wrapped block starts with an in-place ReLU on the activation of the layer before it."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(5, 5), InPlaceFirst(), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.block(self.first(x)))

    plain, model = Outer(), Outer()
    model.load_state_dict(plain.state_dict())
    model.block = wrap(model.block, 2)
    x = torch.randn(7, 5)
    loss_of(plain(x)).backward()
    loss_of(model(x)).backward()
    assert_same_gradients(model, plain)


@over_gloo_too
def test_wrapper_inside_a_wrapped_module(wrap: Callable[..., DataParallel]) -> None:
    """A10: forward and backward."""
    plain = nn.Sequential(mlp(5, 5), mlp(5, 3))
    inner = copy.deepcopy(plain)
    inner[1] = wrap(inner[1], 2)
    model = wrap(inner, 3)
    x = torch.randn(8, 5)
    for _ in range(2):
        loss_of(plain(x)).backward()
        in_time(lambda: loss_of(model(x)).backward())
    assert_same_gradients(model.module, plain)


def test_many_wrapped_blocks_in_a_row(wrap: Callable[..., DataParallel]) -> None:
    """A10: one boundary after the other, and one block many times, as in a loop over time."""
    plain = mlp(5, 5)
    model = wrap(copy.deepcopy(plain))
    grads = []
    for module in (plain, model):
        x = fresh(torch.ones(5, 5))
        h = x
        for _ in range(30):
            h = h + 0.1 * module(h)
        h.sum().backward()
        grads.append(x.grad)
    assert_same(grads[1], grads[0], 1e-10)
    assert_same_gradients(model.module, plain, 1e-10)


def test_output_is_a_parameter(wrap: Callable[..., DataParallel]) -> None:
    """N8: joined once a replica, as data_parallel does; later writes into the output do not reach the parameter."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table

    model = wrap(Table())
    oracle = copy.deepcopy(model.module)
    before = model.module.table.detach().clone()
    x = torch.zeros(4, 1)
    output, expected = model(x), data_parallel(oracle, x, in_turn(2))
    assert_same(output.detach(), expected.detach())
    (output * torch.arange(12.0).view(6, 2)).sum().backward()
    (expected * torch.arange(12.0).view(6, 2)).sum().backward()
    assert_same_gradients(model.module, oracle)
    for rows in (1, 4):  # one replica; two
        with torch.no_grad():
            model(torch.zeros(rows, 1)).zero_()
    assert torch.equal(model.module.table.detach(), before)


def test_outputs_may_be_written_into(wrap: Callable[..., DataParallel]) -> None:
    """N8: in-place operations on the gathered output."""
    plain = nn.Linear(5, 3)
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(7, 5)
    for module in (plain, model):
        output = module(x)
        output.mul_(2)
        output[:, 0] = 1.0
        output.pow(2).sum().backward()
    assert_same_gradients(model.module, plain)


def test_integer_outputs_and_outputs_that_the_loss_ignores(wrap: Callable[..., DataParallel]) -> None:
    """N8: integers come back as such; an ignored output gets no gradient, and its own layer none either."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            h = self.trunk(x)
            return self.a(h), self.b(h), self.a(h).argmax(1)

    plain = TwoHeads()
    model = wrap(copy.deepcopy(plain), 3)
    x = torch.randn(7, 5)
    for module in (plain, model):
        a, _, classes = module(x)
        assert classes.dtype is torch.int64
        assert not classes.requires_grad
        F.nll_loss(a.log_softmax(1), classes).backward()
    assert model.module.b.weight.grad is None
    assert_same_gradients(model.module, plain)


@over_gloo_too
def test_unused_parameters_keep_no_gradient(wrap: Callable[..., DataParallel]) -> None:
    """N2: so weight decay does not move them; one that a single replica uses gets that replica's gradient."""

    class OnlyBigRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes, self.never = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = x[:, 0] > 5
            return self.always(x) + (self.sometimes(x) * big[:, None] if big.any() else 0)

    plain = OnlyBigRows()
    model = wrap(copy.deepcopy(plain), 3)
    x = torch.arange(14.0).view(7, 2) - 5
    before = copy.deepcopy(plain.never.state_dict())
    for module in (plain, model.module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
        optimizer.zero_grad()
        loss_of((plain if module is plain else model)(x)).backward()
        optimizer.step()
    assert model.module.never.weight.grad is None
    assert_same_gradients(model.module, plain)
    assert torch.equal(model.module.never.weight.detach(), before["weight"])


def test_unused_rows_of_an_input_get_zeros(wrap: Callable[..., DataParallel]) -> None:
    """N1: an input that only one replica uses has a gradient of zeros in the others' rows."""

    class UsesFirstRows(nn.Module):
        def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            return x * 2 if number[0] == 0 else torch.zeros_like(x, requires_grad=True)

    model = wrap(UsesFirstRows(), 2)
    x = torch.ones(5, 2, requires_grad=True)
    model(x, torch.arange(5)).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[2.0, 2.0]] * 3 + [[0.0, 0.0]] * 2))


@over_gloo_too
def test_frozen_parameters_toggled_between_steps(wrap: Callable[..., DataParallel]) -> None:
    """R4: requires_grad is seen at each step."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain))
    for step in range(4):
        x = torch.randn(7, 5)
        for module, root in ((plain, plain), (model, model.module)):
            root[2].requires_grad_(step % 2 == 1)
            root[0].requires_grad_(step != 2)
            root.zero_grad()
            loss_of(module(x)).backward()
        assert_same_gradients(model.module, plain)
    for root in (plain, model.module):
        root.requires_grad_(False)
    assert not model(torch.randn(7, 5)).requires_grad


@over_gloo_too
def test_without_grad_and_in_inference_mode(wrap: Callable[..., DataParallel]) -> None:
    """R14: outputs that need no gradient, and inference tensors."""
    model = wrap(batch_norm_eval())
    x = torch.randn(7, 2, 4, 4)
    expected = model.module(x).detach()
    with torch.no_grad():
        output = model(x)
    assert not output.requires_grad
    assert_same(output, expected)
    with torch.inference_mode():
        output = model(x)
    assert output.is_inference()
    assert_same(output.clone(), expected)
    assert_same(model(x).detach(), expected)  # and back again


# ---- how backward is asked for -------------------------------------------------------------------


@over_gloo_too
def test_several_forwards_then_backwards(wrap: Callable[..., DataParallel]) -> None:
    """N1: one loss over several calls, and several losses in another order than their forwards."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain), 3)
    batches = [torch.randn(rows, 5) for rows in (7, 2, 8)]
    for module in (plain, model):
        losses = [loss_of(module(x)) for x in batches]
        (losses[0] * 2).backward()
        (losses[2] + losses[1]).backward()
    assert_same_gradients(model.module, plain)


@over_gloo_too
def test_retain_graph(wrap: Callable[..., DataParallel]) -> None:
    """N1: a graph that is kept can be walked again; without, the second walk is refused, as in torch."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(7, 5)
    for module in (plain, model):
        loss = loss_of(module(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match=r"backward through .* a second time"):
            loss.backward()
    assert_same_gradients(model.module, plain)


@over_gloo_too
def test_a_kept_graph_that_two_threads_walk_at_once(wrap: Callable[..., DataParallel]) -> None:
    """N1, F5: each gets its own gradients, of a loss of its own."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(7, 5)
    outputs, roots = (plain(x), model(x)), (plain, model.module)
    weights = torch.randn(2, *outputs[0].shape)
    expected, _ = (
        [torch.autograd.grad(output, list(root.parameters()), weight, retain_graph=True) for weight in weights]
        for output, root in zip(outputs, roots, strict=True)
    )
    together = threading.Barrier(2)
    wrong: list[str] = []

    def walk(number: int) -> None:
        together.wait(WAIT_S)
        for _ in range(10):
            found = torch.autograd.grad(outputs[1], list(model.module.parameters()), weights[number], retain_graph=True)
            try:
                torch.testing.assert_close(found, expected[number])
            except AssertionError as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=walk, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    assert not wrong, wrong[0]


@over_gloo_too
def test_partial_gradients(wrap: Callable[..., DataParallel]) -> None:
    """N1: torch.autograd.grad of some parameters, of the input; nothing is accumulated anywhere."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(7, 5)
    results = []
    for module, root in ((plain, plain), (model, model.module)):
        x_here = fresh(x)
        loss = loss_of(module(x_here))
        first = torch.autograd.grad(loss, [root[0].weight, x_here], retain_graph=True)
        second = torch.autograd.grad(loss, [root[4].bias, root[2].weight])
        assert all(p.grad is None for p in root.parameters())
        assert x_here.grad is None
        results.append([*first, *second])
    for mine, theirs in zip(*reversed(results), strict=True):
        assert_same(mine, theirs)
    with pytest.raises(RuntimeError, match=r"unused|not have been used"):
        torch.autograd.grad(loss_of(model(x)), [torch.ones((), requires_grad=True)])


def test_backward_with_respect_to_named_inputs(wrap: Callable[..., DataParallel]) -> None:
    """N1: `backward(inputs=...)` touches the named tensors only."""
    model = wrap(mlp())
    loss_of(model(torch.randn(7, 5))).backward(inputs=[model.module[0].bias])
    assert [name for name, p in model.module.named_parameters() if p.grad is not None] == ["0.bias"]


def test_gradients_given_by_the_caller_are_not_written_into(wrap: Callable[..., DataParallel]) -> None:
    """N1: the tensor given to backward, and gradients that share its memory."""

    class TwoShifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0 + self.a.view(-1) + self.b.view(-1) if x.dim() == 1 else x.sum() * 0 + self.a + self.b

    plain = TwoShifts()
    model = wrap(copy.deepcopy(plain))
    grad = torch.arange(12.0).view(4, 3)
    kept = grad.clone()
    model(torch.ones(4, 3)).backward(grad)
    assert torch.equal(grad, kept)
    for parameter in model.module.parameters():
        assert torch.equal(parameter.grad, kept[:2] + kept[2:])
    model.module.a.grad.zero_()
    assert torch.equal(model.module.b.grad, kept[:2] + kept[2:])


def test_a_tensor_written_into_between_the_passes_is_noticed(wrap: Callable[..., DataParallel]) -> None:
    """N1: a parameter changed in place before backward is an error, not a wrong gradient, as with the plain module."""
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model = wrap(copy.deepcopy(plain))
    for module, root in ((plain, plain), (model, model.module)):
        loss = loss_of(module(torch.randn(7, 5)))
        with torch.no_grad():
            root[1].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    loss_of(model(torch.randn(7, 5))).backward()  # and the next step works


def test_anomaly_mode(wrap: Callable[..., DataParallel]) -> None:
    """N8: a NaN in a replica's backward is found."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * 0).sqrt() * 0

    model = wrap(Root())
    with (
        pytest.warns(UserWarning, match="Error detected in|Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        model(torch.randn(4, 5)).sum().backward()


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian(wrap: Callable[..., DataParallel], vectorize: bool) -> None:
    """N3: torch.autograd.functional.jacobian, one backward a row of it, or all of them under vmap."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(3, 5)
    expected = torch.autograd.functional.jacobian(plain, x)
    assert_same(torch.autograd.functional.jacobian(model, x, vectorize=vectorize), expected)


def test_batched_gradients(wrap: Callable[..., DataParallel]) -> None:
    """N3: `is_grads_batched`, which runs backward under vmap."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(3, 5)
    vectors = torch.randn(4, 3, 3)
    results = []
    for module, root in ((plain, plain), (model, model.module)):
        results.append(torch.autograd.grad(module(x), list(root.parameters()), vectors, is_grads_batched=True))
    for mine, theirs in zip(*reversed(results), strict=True):
        assert_same(mine, theirs)


# ---- derivatives of higher order -----------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_gradcheck_and_gradgradcheck(wrap: Callable[..., DataParallel], num_replicas: int) -> None:
    """N3"""
    model = wrap(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), num_replicas)
    x = torch.randn(4, 2, requires_grad=True)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(x)

    assert torch.autograd.gradcheck(run, (x, *model.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *model.parameters()))


def penalty_models() -> dict[str, Callable[[], nn.Module]]:
    norms = {
        "spectral_norm, parametrized": parametrizations.spectral_norm,
        "weight_norm, parametrized": parametrizations.weight_norm,
    }
    models: dict[str, Callable[[], nn.Module]] = {
        "linear": mlp,
        "conv": lambda: nn.Sequential(nn.Conv1d(1, 3, 3), nn.Softplus(), nn.Flatten(), nn.Linear(9, 3)),
        "batch norm in eval mode": lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh()).eval(),
        "group norm": lambda: nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4), nn.Tanh()),
        "lstm cell": lambda: nn.Sequential(nn.RNNCell(5, 4)),
        "differentiates inside": ForceField,
    }
    for name, norm in norms.items():
        models[name] = lambda norm=norm: nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh(), norm(nn.Linear(6, 3)))
    return models


def penalty_loss(module: Callable[..., Any], x: torch.Tensor, between: Callable[[], None] = lambda: None) -> Any:
    """The loss of a WGAN-GP critic: it uses the output and the output's gradient."""
    x = fresh(x)
    output = tensors_in(module(x))[0]
    (grad,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
    between()
    return output.mean() + (grad.flatten(1).norm(dim=1) - 1).pow(2).mean()


@over_engines(
    "name, num_replicas, rows",
    each_with(penalty_models(), [(2, 7), (3, 8), (4, 6), (2, 1)]),
    processes=[*each_with(penalty_models(), [(4, 6)]), ("linear", 2, 7), ("linear", 3, 8), ("linear", 2, 1)],
    gloo=each_with(penalty_models(), [(3, 8)]),
)
def test_gradient_penalty(wrap: Callable[..., DataParallel], name: str, num_replicas: int, rows: int) -> None:
    """N3: a loss of the output and of its gradient; parameters, their gradients and the buffers after three steps."""
    plain = penalty_models()[name]()
    model = wrap(copy.deepcopy(plain), num_replicas)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, model.module)]
    for _ in range(3):
        x = torch.randn(rows, 1, 5) if name == "conv" else torch.randn(rows, 5)
        for module, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            penalty_loss(module, x).backward()
            optimizer.step()
        assert_same_gradients(model.module, plain, 1e-10)
    for mine, theirs in zip(model.module.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_same(mine, theirs, 1e-10)


@over_gloo_too
def test_gradient_penalty_with_batch_norm_in_training(wrap: Callable[..., DataParallel]) -> None:
    """N3: statistics over a replica's rows, written once; the oracle is data_parallel."""
    model = wrap(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)), 3)
    oracle = copy.deepcopy(model.module)
    x = torch.randn(9, 5)
    for _ in range(2):
        penalty_loss(model, x).backward()
        penalty_loss(lambda x: data_parallel(oracle, x, in_turn(3)), x).backward()
    assert_same_gradients(model.module, oracle, 1e-10)
    assert_same_state(model.module, oracle)
    assert model.module[1].num_batches_tracked == 2


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_gradient_penalty_with_the_old_norms(
    wrap: Callable[..., DataParallel], norm: Callable[[nn.Module], nn.Module]
) -> None:
    """N3, R10: hooks that compute the weight as a plain attribute before each forward."""
    # Deep copies of these are refused by torch once a forward has run, so the two are made alike.
    plain = nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh(), norm(nn.Linear(6, 1)))
    other = nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh(), norm(nn.Linear(6, 1)))
    other.load_state_dict(plain.state_dict())
    model = wrap(other, 2)
    x = torch.randn(7, 5)
    for _ in range(2):
        penalty_loss(plain, x).backward()
        penalty_loss(model, x).backward()
        assert_same_gradients(model.module, plain, 1e-10)
    assert_same_state(model.module, plain)


class MaskedMLP(nn.Module):
    """A dropout that also returns its mask, so that a plain module can be given the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        if mask is None:
            mask = F.dropout(torch.ones_like(hidden), 0.4)
        return self.second(hidden * mask), mask


def test_gradient_penalty_with_dropout(wrap: Callable[..., DataParallel]) -> None:
    """N3: the second derivative belongs to the masks of the first pass."""
    model = wrap(MaskedMLP(), 3)
    plain = copy.deepcopy(model.module)
    x = torch.randn(8, 5)
    drawn: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        output, mask = model(x)
        drawn.append(mask)
        return output

    penalty_loss(run, x).backward()
    assert len(drawn) == 1
    penalty_loss(lambda x: plain(x, drawn[0].detach())[0], x).backward()
    assert_same_gradients(model.module, plain, 1e-10)


def test_train_and_eval_toggled_between_the_passes(wrap: Callable[..., DataParallel]) -> None:
    """N3: the second pass belongs to the mode, the attributes and the buffers of the first."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = parametrizations.spectral_norm(nn.Linear(5, 5)), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) * (self.factor if self.training else 100.0)

    plain = Moody()
    model = wrap(copy.deepcopy(plain), 2)
    x = torch.randn(7, 5)
    for module, root in ((plain, plain), (model, model.module)):

        def change(root: nn.Module = root) -> None:
            root.eval()
            root.factor = 7.0

        penalty_loss(module, x, change).backward()
    assert_same_gradients(model.module, plain, 1e-10)
    assert_same_state(model.module, plain)


REDUCTIONS = {"sum": torch.sum, "sum of cubes": lambda t: t.pow(3).sum()}


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_third_derivatives(wrap: Callable[..., DataParallel], reduce: Callable[..., torch.Tensor]) -> None:
    """N3: of inputs and of parameters; after a plain sum the gradients that come in need no gradient themselves."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain), 3)
    x = torch.randn(7, 5)
    results = []
    for module, root in ((plain, plain), (model, model.module)):
        x_here = fresh(x)
        (first,) = torch.autograd.grad(reduce(module(x_here)), x_here, create_graph=True)
        (second,) = torch.autograd.grad(reduce(first), x_here, create_graph=True)
        third = torch.autograd.grad(reduce(second), [x_here, *root.parameters()], allow_unused=True)
        results.append(third)
    for mine, theirs in zip(*reversed(results), strict=True):
        assert_same(mine, theirs, 1e-10)


def test_double_backward_of_an_input_written_into_afterwards(wrap: Callable[..., DataParallel]) -> None:
    """N3: the plain module refuses it (the input was saved); a wrong second derivative must not come out."""
    plain = nn.Sequential(nn.Linear(5, 3), nn.Tanh())
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(7, 5)

    def second(module: Callable[..., torch.Tensor], write: bool) -> torch.Tensor:
        x_here = fresh(x)
        hidden = x_here * 1.0
        output = module(hidden)
        if write:
            hidden.mul_(3.0)
        (grad,) = torch.autograd.grad(output.sum(), x_here, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), x_here)[0]

    right = second(plain, write=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second(plain, write=True)
    try:
        result = second(model, write=True)
    except RuntimeError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert_same(result, right)
    assert not refusal or "modified by an inplace operation" in refusal


@over_gloo_too
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_create_graph_backward_gives_gradients_with_a_history(wrap: Callable[..., DataParallel]) -> None:
    """N3: `loss.backward(create_graph=True)`, and a loss of the gradients that it leaves."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain), 2)
    x = torch.randn(7, 5)
    results = []
    for module, root in ((plain, plain), (model, model.module)):
        loss_of(module(x)).backward(create_graph=True)
        norm = sum(p.grad.pow(2).sum() for p in root.parameters())
        results.append(torch.autograd.grad(norm, list(root.parameters())))
        for parameter in root.parameters():
            parameter.grad = None  # it would be a cycle, as the warning says
    for mine, theirs in zip(*reversed(results), strict=True):
        assert_same(mine, theirs, 1e-10)


# ---- replicas follow the module ------------------------------------------------------------------


def change_attribute(model: nn.Module) -> None:
    model.scale = 3.0


def change_mode(model: nn.Module) -> None:
    model.eval()


def change_submodule(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.linear = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def change_data(model: nn.Module) -> None:
    model.linear.weight.data = model.linear.weight.data * 2
    model.linear.bias.data.zero_()


def change_parameter(model: nn.Module) -> None:
    model.linear.weight = nn.Parameter(torch.ones(3, 5))


def change_dtype(model: nn.Module) -> None:
    model.float()


def change_buffer(model: nn.Module) -> None:
    model.shift = torch.full((3,), 4.0)


def add_parameter(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.full((3,), 2.0))


def add_hook(model: nn.Module) -> None:
    model.linear.register_forward_hook(lambda module, args, output: output * module.weight.sum())


def add_pre_hook(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def replace_forward(model: nn.Module) -> None:
    forward = model.forward
    model.forward = lambda x: forward(x) * 2


CHANGES = [
    change_attribute,
    change_mode,
    change_submodule,
    change_data,
    change_parameter,
    change_dtype,
    change_buffer,
    add_parameter,
    add_hook,
    add_pre_hook,
    replace_forward,
]


class Changeable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.extra = nn.Linear(5, 3), 1.0, None
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.parameters()).dtype)
        y = self.linear(x) * self.scale + self.shift + (0 if self.training else 10)
        return y if self.extra is None else y * self.extra


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_between_steps_are_seen(wrap: Callable[..., DataParallel], change: Callable[[nn.Module], None]) -> None:
    """R8: whatever the caller changes, the next forward runs with it."""
    plain = Changeable()
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(7, 5)
    loss_of(model(x)).backward()
    before = model(x).detach()
    for root in (plain, model.module):
        root.zero_grad()
        change(root)
    output, expected = model(x), plain(x)
    assert output.dtype == expected.dtype
    assert change is change_dtype or not torch.equal(output, before)
    tolerance = 1e-5 if change is change_dtype else 1e-12
    assert_same(output.detach(), expected.detach(), tolerance)
    output.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    assert_same_gradients(model.module, plain, tolerance)


@over_gloo_too
def test_removed_hooks_and_children_are_gone(wrap: Callable[..., DataParallel]) -> None:
    """R8"""
    model = wrap(nn.Sequential(nn.Linear(5, 3), nn.Tanh()))
    x = torch.randn(4, 5)
    plain = model.module(x).detach()
    handle = model.module.register_forward_hook(lambda module, args, output: output + 1)
    assert_same(model(x).detach(), plain + 1)
    handle.remove()
    assert_same(model(x).detach(), plain)
    del model.module[1]
    assert_same(model(x).detach(), model.module[0](x).detach())


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("rows", torch.zeros(1), persistent=False)
        self.linear = nn.Linear(2, 2)
        self.log: list[float] = []
        self.latest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rows += len(x)
        self.latest = len(x)
        self.log.append(float(x[0, 0]))
        return self.linear(x) * 0 + self.calls


def test_buffers_of_the_first_replica_persist(wrap: Callable[..., DataParallel]) -> None:
    """R5: the others' updates are lost, and every forward starts every replica from the live buffers."""
    model = wrap(CountsCalls(), 3)
    calls, rows = model.module.calls, model.module.rows
    for step in range(1, 4):
        output = model(torch.zeros(7, 2))
        assert torch.equal(output.detach(), torch.full((7, 2), float(step)))  # the same in every replica
        assert model.module.calls is calls
        assert calls.item() == step
        assert rows.item() == 3 * step  # the first replica's rows
    model.module.calls.fill_(10)
    assert model(torch.zeros(7, 2))[-1, 0].item() == 11


def test_assigned_attributes_are_lost_and_lists_persist(wrap: Callable[..., DataParallel], engine: str) -> None:
    """R6; what a worker process adds to a list stays there."""
    model = wrap(CountsCalls(), 3)
    model(torch.arange(14.0).view(7, 2))
    assert model.module.latest == 0
    assert sorted(model.module.log) == [0.0, 6.0, 12.0][: num_here(engine, 3)]


def test_hooks_run_once_a_replica_and_parameter_hooks_once(wrap: Callable[..., DataParallel], engine: str) -> None:
    """R9: parameter hooks see the summed gradient, and may change it. What hooks in a worker process do stays there."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain), 3)
    x = torch.randn(8, 5)
    loss_of(plain(x)).backward()
    events: list[str] = []
    grads: list[torch.Tensor] = []
    layer = model.module[0]
    layer.register_forward_pre_hook(lambda module, args: events.append(f"pre {len(args[0])}"))
    layer.register_forward_hook(lambda module, args, output: events.append(f"post {len(output)}"))
    layer.register_full_backward_hook(lambda module, into, out: events.append(f"backward {len(out[0])}"))
    layer.weight.register_hook(lambda grad: grads.append(grad.clone()) or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: events.append("accumulated"))
    loss_of(model(fresh(x))).backward()
    shards = [3, 3, 2][: num_here(engine, 3)]
    once_a_replica = [f"{what} {n}" for what in ("pre", "post", "backward") for n in shards]
    assert sorted(events) == sorted([*once_a_replica, "accumulated"])
    assert events[-1] == "accumulated"
    assert len(grads) == 1
    assert_same(grads[0], plain[0].weight.grad)
    assert_same(layer.weight.grad, plain[0].weight.grad * 2)
    assert_same(model.module[2].weight.grad, plain[2].weight.grad)


def test_hooks_of_the_wrapper_run_once(wrap: Callable[..., DataParallel]) -> None:
    """R9: a hook on the wrapper sees the whole batch."""
    model = wrap(mlp())
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model.register_full_backward_hook(lambda module, into, out: seen.append(len(out[0])))
    loss_of(model(fresh(torch.randn(7, 5)))).backward()
    assert seen == [7, 7]


# ---- what a replica cannot be given --------------------------------------------------------------


class Holder:
    """An object of a class that nobody knows."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Hidden(nn.Module):
    """Reaches its own layer through an object that cannot be looked into."""

    def __init__(self, hide: Callable[["Hidden"], Any]) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.hiding_place = hide(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = self.hiding_place
        return (place.held if isinstance(place, Holder) else place)(self.first(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


HIDING_PLACES: dict[str, Callable[[Hidden], Any]] = {
    "a module": lambda module: Holder(module.layer),
    "a bound method": lambda module: Holder(module.run),
    "a cached method": lambda module: functools.lru_cache(module.run),
}


@in_one_memory
@pytest.mark.parametrize("hide", HIDING_PLACES.values(), ids=HIDING_PLACES)
def test_a_live_module_behind_an_unknown_object_is_an_error(
    wrap: Callable[..., DataParallel], hide: Callable[[Hidden], Any], engine: str
) -> None:
    """R7: the replica would train the live module behind our back; the error names the parameter.

    F6: where it has to be sent to another process and cannot be, the error names the attribute.
    """
    model = wrap(Hidden(hide))
    x = torch.randn(7, 5)
    error, message = RuntimeError, r"parameter 'layer\.(weight|bias)' of the original module"
    if engine == "processes" and isinstance(model.module.hiding_place, functools._lru_cache_wrapper):
        error, message = TypeError, r"attribute 'hiding_place' .*cannot be pickled"
    for _ in range(2):
        with pytest.raises(error, match=message):
            model(x)
    assert all(p.grad is None for p in model.parameters())
    model.module.hiding_place = model.module.layer  # and mended
    loss_of(model(x)).backward()
    assert model.module.layer.weight.grad is not None


@in_one_memory
def test_a_hidden_module_that_was_frozen_at_first_is_an_error_later(wrap: Callable[..., DataParallel]) -> None:
    """R7, R4: no gradient may be lost because the first forwards needed none there."""
    model = wrap(Hidden(HIDING_PLACES["a module"]))
    model.module.layer.requires_grad_(False)
    x = torch.randn(7, 5)
    loss_of(model(x)).backward()
    model.module.layer.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 'layer\.(weight|bias)' of the original module"):
        loss_of(model(x)).backward()


@in_one_memory
def test_a_hidden_module_behind_a_flag_is_an_error_when_it_is_used(wrap: Callable[..., DataParallel]) -> None:
    """R7, R8: the graph is looked at again when the structure changes; a hiding place assigned later is found."""
    model = wrap(Hidden(lambda module: module.run))
    x = torch.randn(7, 5)
    loss_of(model(x)).backward()
    model.module.hiding_place = Holder(model.module.layer)
    with pytest.raises(RuntimeError, match=r"parameter 'layer\.(weight|bias)' of the original module"):
        model(x)


@in_one_memory
def test_a_hidden_module_that_is_used_in_training_only_is_an_error_then(wrap: Callable[..., DataParallel]) -> None:
    """R7, R8: a first forward in eval mode, with gradients on, proves nothing about training."""

    class InTraining(Hidden):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.training else self.first(x)

    model = wrap(InTraining(HIDING_PLACES["a module"]))
    x = torch.randn(7, 5)
    model.module.eval()
    loss_of(model(x)).backward()
    model.module.train()
    with pytest.raises(RuntimeError, match=r"parameter 'layer\.(weight|bias)' of the original module"):
        model(x)


@in_one_memory
def test_a_tensor_with_a_history_as_attribute_is_an_error(wrap: Callable[..., DataParallel]) -> None:
    """R7: the error names the attribute; unused, it does no harm."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.memory, self.use = nn.Linear(5, 5), {"state": torch.zeros(5)}, True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + (self.memory["state"] if self.use else 0)

    model = wrap(nn.Sequential(Remembers()))
    x = torch.randn(7, 5)
    model.module[0].memory["state"] = torch.exp(torch.zeros(5, requires_grad=True))
    model.module[0].use = False
    loss_of(model(x)).backward()
    model.module[0].use = True
    model.module[0].memory = dict(model.module[0].memory)
    with pytest.raises(RuntimeError, match=r"attribute '0\.memory'"):
        model(x)
    model.module[0].memory["state"] = torch.ones(5)
    loss_of(model(x)).backward()


def test_methods_lists_and_lambdas_are_the_replicas_own(wrap: Callable[..., DataParallel]) -> None:
    """R7: gradients arrive through every way by which a module can refer to itself."""

    class Devious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(5, 5) for _ in range(4)]
            self.a, self.b, self.c, self.d = layers
            self.hidden = nn.Linear(5, 5)
            self.plain_list = [self.a]
            self.table = {"op": self.run_b, "nested": (1, [functools.partial(self.run_c, 2.0)])}
            self.op = lambda x, extra=nn.Linear(5, 5): extra(self.d(x))  # noqa: B008 - it is what is tested
            self.not_a_child = {"only here": [self.__dict__["_modules"].pop("hidden")]}

        def run_b(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(x)

        def run_c(self, factor: float, x: torch.Tensor) -> torch.Tensor:
            return self.c(x) * factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.plain_list[0](x)
            x = self.table["op"](x)
            x = self.table["nested"][1][0](x)
            return self.not_a_child["only here"][0](self.op(x))

        def everything(self) -> list[torch.Tensor]:
            outside = (self.op.__defaults__[0], self.not_a_child["only here"][0])
            return [*self.parameters(), *(p for module in outside for p in module.parameters())]

    plain = Devious()
    model = wrap(Devious(), 3)
    with torch.no_grad():
        for mine, theirs in zip(model.module.everything(), plain.everything(), strict=True):
            mine.copy_(theirs)
    x = torch.randn(7, 5)
    loss_of(plain(x)).backward()
    loss_of(model(x)).backward()
    for mine, theirs in zip(model.module.everything(), plain.everything(), strict=True):
        assert theirs.grad is not None
        assert_same(mine.grad, theirs.grad)


@in_one_memory
def test_objects_that_carry_tensors_with_a_history(wrap: Callable[..., DataParallel]) -> None:
    """S4: an object of an unknown class reaches every replica as it is, and gradients flow through what it holds."""

    class AddsFeature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, batch: Holder) -> torch.Tensor:
            return self.linear(x) * batch.held

    plain = AddsFeature()
    model = wrap(copy.deepcopy(plain))
    for _ in range(3):  # other objects in each step, whose tensors have not been met before
        x, grads = torch.randn(7, 5), []
        for module in (plain, model):
            weight, leaf = fresh(torch.arange(3.0)), fresh(torch.ones(3))
            loss_of(module(x, Holder(torch.exp(weight) * 2))).backward()
            loss_of(module(x, Holder(leaf))).backward()
            grads.append([weight.grad, leaf.grad])
        for mine, theirs in zip(grads[1], grads[0], strict=True):
            assert_same(mine, theirs)
        assert_same_gradients(model.module, plain)


# ---- activation checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("rows", [7, 8])
def test_activation_checkpointing_around_the_wrapper(
    wrap: Callable[..., DataParallel], reentrant: bool, rows: int
) -> None:
    """R13: `checkpoint(model, x)`; many steps, because an order that depends on threads is right some of the time."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain), 2)
    for _ in range(30):
        x = torch.randn(rows, 5)
        grads = []
        for module, root in ((plain, plain), (model, model.module)):
            x_here = fresh(x)
            root.zero_grad()
            loss_of(checkpoint(module, x_here, use_reentrant=reentrant)).backward()
            grads.append(x_here.grad)
        assert_same(grads[1], grads[0])
        assert_same_gradients(model.module, plain)


# ---- random numbers ------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """A module whose activations are computed again in backward."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def with_dropout(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, width), nn.Dropout(0.2))


class RandomLayers(nn.Module):
    """Draws in many ways: in dropout layers, inside an LSTM, inside attention, and in activations computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(with_dropout(), Recomputed(with_dropout(), True), Recomputed(with_dropout(), False))
        self.recurrent = nn.LSTM(5, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.blocks(x)[:, None].expand(-1, 3, -1))
        return self.attention(hidden)


def run_steps(model: nn.Module, x: torch.Tensor, seed: int, num_steps: int = 2) -> list[torch.Tensor]:
    """Return what some steps from a seed give: outputs, gradients, and the random state in the end."""
    torch.manual_seed(seed)
    seen: list[torch.Tensor] = []
    for _ in range(num_steps):
        model.zero_grad()
        output = model(x)
        loss_of(output).backward()
        seen += [tensor.detach() for tensor in tensors_in(output)]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*seen, torch.get_rng_state()]


def all_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.fixture
def busy() -> Iterator[None]:
    """Other threads that want the processor and the interpreter, so that replicas take ever other turns."""
    stop = threading.Event()

    def burn() -> None:
        a = torch.ones(64, 64)
        while not stop.is_set():
            a = torch.tanh(a @ a)
            sum(range(1000))

    threads = [threading.Thread(target=burn, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"


@of_the_host
@over_engines("num_replicas", [(2,), (3,), (8,)], processes=[(3,)], gloo=[(3,)])  # each process draws by itself
def test_equal_seeds_give_equal_runs_under_load(
    wrap: Callable[..., DataParallel], busy: None, caplog: pytest.LogCaptureFixture, num_replicas: int
) -> None:
    """N6: 50 times the same bits, outputs, gradients and random state, however the replicas take turns."""
    model = wrap(RandomLayers(), num_replicas)
    x = torch.randn(16, 5)
    run_steps(model, x, 3, num_steps=1)  # which gradients travel together over gloo follows from the first step
    expected = run_steps(model, x, 3, num_steps=1)
    assert all(all_equal(run_steps(model, x, 3, num_steps=1), expected) for _ in range(50))
    assert not all_equal(run_steps(model, x, 4, num_steps=1), expected)
    assert not caplog.records


class Draw(nn.Module):
    """Returns what a function of its input draws."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


def per_row(draw: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: draw((len(x), 9))


def after_a_seed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(torch.randint(1 << 30, ())))
    return torch.rand(len(x), 9)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": F.dropout,
    "dropout in place": lambda x: F.dropout(x.clone(), inplace=True),
    "dropout2d": lambda x: F.dropout2d(x[:, :, :, None]),
    "alpha dropout": lambda x: F.alpha_dropout(x, training=True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        torch.arange(4096.0).view(1, 4, 32, 32).expand(len(x), 4, 32, 32), 2, 19
    ),
    "rand": per_row(torch.rand),
    "randn": per_row(torch.randn),
    "randint": per_row(functools.partial(torch.randint, 1000)),
    "randperm": lambda x: torch.randperm(99).expand(len(x), 99),
    "rand_like": torch.rand_like,
    "randn with out": lambda x: torch.randn(len(x), 9, out=torch.empty(len(x), 9)),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.5)),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "random_": lambda x: torch.empty_like(x).random_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "poisson": lambda x: torch.poisson(100 * torch.ones_like(x)),
    "multinomial": lambda x: torch.multinomial(torch.ones(len(x), 30), 9),
    "gamma": lambda x: torch.distributions.Gamma(torch.ones_like(x), 1.0).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(torch.ones_like(x)).rsample(),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 50.0), torch.full_like(x, 0.5)),
    "init": lambda x: nn.init.kaiming_normal_(torch.empty_like(x)),
    "the default generator by name": lambda x: torch.rand(len(x), 9, generator=torch.default_generator),
    "after torch.manual_seed": after_a_seed,
    "under vmap": torch.vmap(F.dropout, randomness="different"),
}


@of_the_host
@over_engines("name", [(name,) for name in DRAWS], gloo=[("dropout",)])  # a module without parameters: none are sent
def test_every_replica_draws_from_a_stream_of_its_own(
    wrap: Callable[..., DataParallel], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """N6: whatever draws; no two replicas, steps or seeds give the same, and the plain composition gives no other."""
    model = wrap(Draw(DRAWS[name]), 3)
    x = torch.ones(6, 32, 8)
    torch.manual_seed(1)
    first, second, after = model(x), model(x), torch.get_rng_state()
    torch.manual_seed(1)
    oracle = data_parallel(model.module, x, in_turn(3))
    assert torch.equal(oracle, first)
    assert torch.equal(model(x), second)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(2)
    different = [*first.chunk(3), *second.chunk(3), *model(x).chunk(3)]
    assert len({tuple(part.flatten().tolist()) for part in different}) == 9
    assert not caplog.records


@of_the_host
@pytest.mark.parametrize("mode", ["eval", "no random layers"])
def test_without_random_numbers_the_random_state_is_untouched(
    wrap: Callable[..., DataParallel], caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """N6: the order of the data is then the same on one device and on several."""
    model = wrap(RandomLayers().eval() if mode == "eval" else Recomputed(mlp(), False), 3)
    before = torch.get_rng_state()
    loss_of(model(torch.randn(7, 5, generator=torch.Generator()))).backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not caplog.records


@of_the_host
def test_the_random_state_moves_on_alike_for_any_number_of_replicas(wrap: Callable[..., DataParallel]) -> None:
    """N6: by one number a forward, nothing a backward; so data are drawn alike on two devices and on eight."""
    torch.manual_seed(5)
    torch.rand(())
    expected = torch.get_rng_state()
    for num_replicas in (2, 3, 8):
        model = wrap(RandomLayers(), num_replicas)
        torch.manual_seed(5)
        output = model(torch.ones(16, 5))
        assert torch.equal(torch.get_rng_state(), expected)
        loss_of(output).backward()
        assert torch.equal(torch.get_rng_state(), expected)


@of_the_host
def test_a_restored_random_state_repeats_the_run(wrap: Callable[..., DataParallel]) -> None:
    """N6: resuming from a checkpoint needs torch's random state and nothing of ours."""
    model = wrap(RandomLayers(), 3)
    x = torch.randn(7, 5)
    model(x)
    state = torch.get_rng_state()
    expected = [model(x).detach() for _ in range(3)]
    model = wrap(copy.deepcopy(model.module), 3)
    torch.set_rng_state(state)
    assert all_equal([model(x).detach() for _ in range(3)], expected)


@of_the_host
def test_a_single_replica_draws_what_the_plain_module_draws(wrap: Callable[..., DataParallel]) -> None:
    """N6: a batch of one row."""
    plain = with_dropout()
    model = wrap(copy.deepcopy(plain), 3)
    x = torch.randn(1, 5)
    expected = run_steps(plain, x, 7)
    for mine, theirs in zip(run_steps(model, x, 7), expected, strict=True):
        assert_same(mine, theirs)


@of_the_host
def test_a_forward_that_fails_leaves_the_random_state(wrap: Callable[..., DataParallel]) -> None:
    """N6, N11: also where other replicas have drawn."""
    fails = [True]

    def draw(x: torch.Tensor) -> torch.Tensor:
        drawn = F.dropout(x)
        if fails[0] and x[0, 0] == 2:
            raise FailureError(3, "after the draw")
        return drawn

    model = wrap(Draw(draw), 3)
    x = torch.arange(3.0).view(3, 1).expand(3, 20)
    before = torch.get_rng_state()
    with pytest.raises(FailureError):
        model(x)
    assert torch.equal(torch.get_rng_state(), before)
    fails.clear()
    fails.append(False)
    model.refresh()  # a variable of a closure
    expected = model(x)
    torch.set_rng_state(before)
    assert torch.equal(model(x), expected)


@of_the_host
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_recomputed_activations_have_the_masks_of_the_forward(
    wrap: Callable[..., DataParallel], reentrant: bool, num_replicas: int
) -> None:
    """N6, R13: gradients by hand, from the masks that the outputs show."""
    layer = nn.Linear(5, 40)
    model = wrap(Recomputed(nn.Sequential(layer, nn.Dropout(0.5)), reentrant), num_replicas)
    for _ in range(5):
        model.zero_grad()
        x = torch.randn(7, 5)
        x_model = fresh(x)
        output = model(x_model)
        mask = (output.detach() != 0) * 2.0
        assert 0.2 < mask.mean() / 2 < 0.8
        assert_same(output.detach(), (layer(x) * mask).detach())
        loss_of(output).backward()
        x_plain, expected = fresh(x), copy.deepcopy(layer)
        expected.zero_grad()
        loss_of(expected(x_plain) * mask).backward()
        assert_same_gradients(layer, expected)
        assert_same(x_model.grad, x_plain.grad)


def twice_with_retain_graph(output: torch.Tensor, x: torch.Tensor) -> None:
    loss_of(output).backward(retain_graph=True)
    loss_of(output).backward()


def with_create_graph(output: torch.Tensor, x: torch.Tensor) -> None:
    (grad,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
    grad.pow(2).sum().backward()


WALKS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "backward": lambda output, x: loss_of(output).backward(),
    "twice with retain_graph": twice_with_retain_graph,
    "create_graph": with_create_graph,
}


# torch's reentrant checkpoints know a plain backward only.
@of_the_host
@pytest.mark.parametrize(("reentrant", "walk"), [(True, "backward"), *((False, walk) for walk in WALKS)])
@pytest.mark.parametrize("outside", [False, True], ids=["", "with a global parameter"])
def test_recomputed_activations_in_every_kind_of_backward(
    wrap: Callable[..., DataParallel], reentrant: bool, outside: bool, walk: str
) -> None:
    """N6, N3: also where one call walks all replica graphs; against the same replicas without checkpoints."""
    shared = nn.Parameter(torch.ones(5)) if outside else torch.ones(5)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(2)
        model = wrap(nn.Sequential(with_dropout(), nn.Identity(), Draw(lambda x: x * shared)), 3)
        if recompute:
            model.module[0] = Recomputed(model.module[0], reentrant)
        torch.manual_seed(3)
        x = fresh(torch.randn(7, 5))
        output = model(x)
        other = model(x * 2)  # a later forward with masks of its own, walked first
        loss_of(other).backward()
        WALKS[walk](output, x)
        assert x.grad is not None
        grads.append([x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()])
    for mine, theirs in zip(*grads, strict=True):
        assert_same(mine, theirs)


@of_the_host
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_around_a_wrapper_with_dropout(
    wrap: Callable[..., DataParallel], reentrant: bool
) -> None:
    """N6, R13: `checkpoint(model, x)`: the replicas draw the same again."""
    layer = nn.Linear(5, 40)
    model = wrap(nn.Sequential(layer, nn.Dropout(0.5)), 3)
    for _ in range(5):
        model.zero_grad()
        x = torch.randn(7, 5)
        output = checkpoint(model, fresh(x), use_reentrant=reentrant)
        loss_of(output).backward()
        expected = copy.deepcopy(layer)
        expected.zero_grad()
        loss_of(expected(x) * (output.detach() != 0) * 2.0).backward()
        assert_same_gradients(layer, expected)


@of_the_host
def test_a_wrapper_inside_a_replica_draws_from_that_replicas_stream(
    wrap: Callable[..., DataParallel], caplog: pytest.LogCaptureFixture
) -> None:
    """N6, A10: equal seeds, equal runs, and masks that differ everywhere."""
    inner = wrap(nn.Sequential(Recomputed(nn.Dropout(0.5), False), nn.Dropout(0.1)), 2)
    model = wrap(nn.Sequential(nn.Linear(5, 20), inner), 3)
    x = torch.ones(12, 5)
    expected = run_steps(model, x, 3)
    assert all(all_equal(run_steps(model, x, 3), expected) for _ in range(10))
    kept = {tuple((part != 0).flatten().tolist()) for part in expected[0].chunk(6)}
    assert len(kept) == 6
    assert not caplog.records


class AddsNoise(torch.autograd.Function):
    """Noise on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.randn_like(grad)


@of_the_host
def test_random_numbers_in_backward(wrap: Callable[..., DataParallel], caplog: pytest.LogCaptureFixture) -> None:
    """N6: streams of their own too; the random state moves on, so that the next backward draws others."""
    model = wrap(nn.Sequential(nn.Linear(5, 5), Draw(AddsNoise.apply)), 3)
    x = torch.randn(6, 5)
    expected = run_steps(model, x, 3)
    assert all(all_equal(run_steps(model, x, 3), expected) for _ in range(20))
    noise = []
    for _ in range(2):
        x_model = fresh(torch.zeros(6, 5))
        (grad,) = torch.autograd.grad(wrap(Draw(AddsNoise.apply), 3)(x_model).sum(), x_model)
        noise += grad.chunk(3)
    assert len({tuple(part.flatten().tolist()) for part in noise}) == 6
    assert not caplog.records


@of_the_host
def test_the_random_state_functions_act_on_the_replicas_stream(wrap: Callable[..., DataParallel]) -> None:
    """N6: manual_seed, seed, initial_seed, get_rng_state, set_rng_state and fork_rng, in every replica at once."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        drawn = torch.rand(9)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(x[0]))
            assert torch.initial_seed() == int(x[0])
            seeded = torch.rand(9)
            torch.seed()
        after = torch.rand(9)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(9), drawn)
        assert torch.equal(torch.rand(9), after)
        return torch.stack([drawn, seeded, after])[None]

    model = wrap(Draw(draw), 3)
    before = torch.get_rng_state()
    seeded = [torch.rand(9, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1, 2)]
    for _ in range(20):
        torch.set_rng_state(before)
        output = model(torch.arange(3.0))
        assert torch.equal(output[:, 1], torch.stack(seeded))
        assert len({tuple(row.tolist()) for row in (*output[:, 0], *output[:, 2])}) == 6
    torch.set_rng_state(before)
    assert torch.initial_seed() == torch.default_generator.initial_seed()


@of_the_host
def test_a_generator_of_the_users_own_is_used(wrap: Callable[..., DataParallel]) -> None:
    """N6"""
    model = wrap(Draw(lambda x: torch.rand(1, 9, generator=torch.Generator().manual_seed(int(x[0])))), 3)
    before = torch.get_rng_state()
    expected = [torch.rand(9, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1, 2)]
    assert torch.equal(model(torch.arange(3.0)), torch.stack(expected))
    assert torch.equal(torch.get_rng_state(), before)


def in_a_thread(x: torch.Tensor) -> torch.Tensor:
    drawn: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(torch.rand_like(x)))
    thread.start()
    thread.join()
    return drawn[0]


def seed_by_hand(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(int(x[0, 0]))
    return x


@of_the_host
@pytest.mark.parametrize("draw", [in_a_thread, seed_by_hand])
def test_draws_that_cannot_be_led_to_a_stream_are_reported(
    wrap: Callable[..., DataParallel],
    caplog: pytest.LogCaptureFixture,
    draw: Callable[[torch.Tensor], torch.Tensor],
    engine: str,
) -> None:
    """N6: once, with what to do. In processes there is nothing to report: each has a generator to itself."""
    model = wrap(Draw(draw), 3)
    for _ in range(3):
        model(torch.ones(6, 5))
    if engine == "processes":
        assert not caplog.records
        return
    (record,) = caplog.records
    assert "drawn from while the replicas of Draw ran" in record.getMessage()
    assert "generator=..." in record.getMessage()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_a_method_that_is_kept_as_an_attribute(
    wrap: Callable[..., DataParallel], reentrant: bool
) -> None:
    """R7, R13: it is called again in backward, and still is the replica's."""

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(3, 3)
            self.function = self.block.forward

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: self.function(torch.tanh(self.function(x))), x, use_reentrant=reentrant)

    plain = Bound()
    model = wrap(copy.deepcopy(plain), 2)
    x = torch.randn(6, 3)
    for module in (plain, model):
        loss_of(module(fresh(x))).backward()
    assert_same_gradients(model.module, plain)


# ---- failures ------------------------------------------------------------------------------------


class FailureError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def num_here(engine: str, num_replicas: int) -> int:
    """Return how many of the replicas share Python objects with the caller: those that are not in other processes."""
    return 1 if engine == "processes" else num_replicas


def assert_is_the_replicas(caught: BaseException, error: BaseException, replica: int, engine: str) -> None:
    """Check that an exception is the very object that a replica raised; from another process, an equal one."""
    if replica < num_here(engine, 3):
        assert caught is error
    else:
        assert (type(caught), caught.args) == (type(error), error.args)


class FailsOn(nn.Module):
    """Raises for the replicas whose first row is in `on`, after it has written into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(1))
        self.on: dict[float, BaseException] = {}
        self.in_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(self.norm(x))
        error = self.on.get(float(x[0, 0]))
        if error is not None and not self.in_backward:
            raise error
        if error is not None:

            def fail(grad: torch.Tensor) -> None:
                raise error

            y.register_hook(fail)
        return y


def numbered_rows() -> torch.Tensor:
    return torch.arange(8.0).repeat_interleave(2).view(8, 2)  # replicas start with 0, 3 and 6


@pytest.mark.parametrize("first_row", [0.0, 3.0, 6.0])
def test_the_callers_exception_is_the_replicas(
    wrap: Callable[..., DataParallel], first_row: float, engine: str
) -> None:
    """F1, N11: the same object (from a process an equal one) with a note; buffers as before; the next call works."""
    model = wrap(FailsOn(), 3)
    model(numbered_rows())
    before = copy.deepcopy(model.module.state_dict())
    error = FailureError(7, "as asked")
    model.module.on = {first_row: error}
    with pytest.raises(FailureError) as caught:
        model(numbered_rows())
    replica = int(first_row) // 3
    assert_is_the_replicas(caught.value, error, replica, engine)
    assert caught.value.code == 7
    assert f"replica {replica} on {in_turn(3)[replica]}, rows {replica * 3} to " in "".join(caught.value.__notes__)
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    model.module.on = {}
    loss_of(model(numbered_rows())).backward()
    assert model.module.linear.weight.grad is not None


def test_the_first_of_several_exceptions(wrap: Callable[..., DataParallel]) -> None:
    """F2: the lowest replica's; the others are in its note."""
    model = wrap(FailsOn(), 3)
    model.module.on = {3.0: ValueError("in the second"), 6.0: KeyError("in the third")}
    with pytest.raises(ValueError, match="in the second") as caught:
        model(numbered_rows())
    notes = "\n".join(caught.value.__notes__)
    assert f"replica 1 on {in_turn(3)[1]}" in notes
    assert f"replica 2 on {in_turn(3)[2]}" in notes
    assert "KeyError" in notes
    assert "in the third" in notes


@over_gloo_too
@pytest.mark.parametrize("first_row", [0.0, 3.0])
def test_an_exception_in_backward(wrap: Callable[..., DataParallel], first_row: float, engine: str) -> None:
    """F1: the same object with a note; nothing has been added to any gradient; the next step is right."""
    model = wrap(FailsOn(), 3)
    plain = copy.deepcopy(model.module)
    error = FailureError(8, "in backward")
    model.module.on, model.module.in_backward = {first_row: error}, True
    loss = loss_of(model(numbered_rows()))
    with pytest.raises(FailureError) as caught:
        loss.backward(retain_graph=True)
    assert_is_the_replicas(caught.value, error, int(first_row) // 3, engine)
    if ON_CPU:  # on accelerators one call walks all replicas' graphs
        assert f"replica {int(first_row) // 3}" in "".join(caught.value.__notes__)
    assert all(p.grad is None for p in model.parameters())
    model.module.on = {}
    loss_of(model(numbered_rows())).backward()
    loss_of(data_parallel(plain, numbered_rows(), in_turn(3))).backward()  # once: the first backward left nothing
    assert_same_gradients(model.module, plain)


@over_gloo_too
def test_a_walk_that_failed_is_not_counted_twice(wrap: Callable[..., DataParallel]) -> None:
    """F1: a backward that is tried again, on a kept graph, gives the right gradient or an error."""

    class FailsOnce(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.errors = nn.Linear(2, 2), [FailureError(9, "once")]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if x[0, 0] == 3:

                def fail_once(grad: torch.Tensor) -> None:
                    if self.errors:
                        raise self.errors.pop()

                y.register_hook(fail_once)
            return y

    model = wrap(FailsOnce(), 3)
    plain = nn.Linear(2, 2)
    plain.load_state_dict(model.module.linear.state_dict())
    loss = loss_of(model(numbered_rows()))
    with pytest.raises(FailureError):
        loss.backward(retain_graph=True)
    loss_of(plain(numbered_rows())).backward()
    try:
        loss.backward()
    except RuntimeError:
        assert model.module.linear.weight.grad is None
    else:
        assert_same_gradients(model.module.linear, plain)


def test_buffers_are_as_before_when_outputs_do_not_fit_together(wrap: Callable[..., DataParallel]) -> None:
    """N11, G5: a failure after every replica has succeeded."""

    class Disagrees(FailsOn):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {f"starts with {x[0, 0]}": super().forward(x)}

    model = wrap(Disagrees())
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(ValueError, match="different keys"):
        model(numbered_rows())
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[name]), name


PLACES = [(first_row, in_backward) for first_row in (0.0, 3.0, 6.0) for in_backward in (False, True)]


@over_engines(
    "error, first_row, in_backward",
    each_with([KeyboardInterrupt(), SystemExit(3)], PLACES),
    gloo=each_with([KeyboardInterrupt()], PLACES),
)
def test_interrupts_in_a_replica(
    wrap: Callable[..., DataParallel], error: BaseException, first_row: float, in_backward: bool, engine: str
) -> None:
    """F3, N11: raised in the caller; buffers as before a failed forward; the next call works."""
    model = wrap(FailsOn(), 3)
    plain = copy.deepcopy(model.module)
    before = copy.deepcopy(model.module.state_dict())
    model.module.on, model.module.in_backward = {first_row: error}, in_backward
    with pytest.raises(type(error)) as caught:
        in_time(lambda: loss_of(model(numbered_rows())).backward())
    assert_is_the_replicas(caught.value, error, int(first_row) // 3, engine)
    if not in_backward:
        for name, value in model.module.state_dict().items():
            assert torch.equal(value, before[name]), name
    model.module.load_state_dict(before)
    model.module.on = {}
    in_time(lambda: loss_of(model(numbered_rows())).backward())
    loss_of(data_parallel(plain, numbered_rows(), in_turn(3))).backward()
    assert_same_gradients(model.module, plain)


def test_an_interrupt_in_one_replica_does_not_wait_for_another(
    wrap: Callable[..., DataParallel], tmp_path: Path
) -> None:
    """F3: raised promptly, although a third replica is still busy."""
    release = tmp_path / "release"  # a file: a replica may be in another process

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x[0, 0] == 3:
                raise KeyboardInterrupt
            while x[0, 0] == 6 and not release.exists():
                time.sleep(0.01)
            return x

    model = wrap(Waits(), 3)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_time(lambda: model(numbered_rows()))
    finally:
        release.touch()


# ---- memory --------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Keeps weak references to its intermediate results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        self.seen.append(weakref.ref(hidden))
        result = self.b(torch.tanh(hidden) * hidden)  # hidden is saved for backward
        if self.fails:
            raise MemoryError("no room")
        return result

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)


class WithMethodAttribute(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.op = self.run

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(super().forward(x))


class WithHiddenModule(Watched):
    """Reaches, through a plain list, a module that has a method of its own as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [WithMethodAttribute()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.hidden[0](x)


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_backward_frees_activations(wrap: Callable[..., DataParallel], collector_off: None, engine: str) -> None:
    """N10: while backward runs, not when the loss goes."""
    model = wrap(Watched(), 3)
    output = model(torch.randn(8, 5))
    assert model.module.alive() == num_here(engine, 3)
    loss = loss_of(output)
    loss.backward()
    assert model.module.alive() == 0
    assert loss.grad_fn is not None


@over_gloo_too
def test_a_kept_graph_is_kept_and_then_freed(
    wrap: Callable[..., DataParallel], collector_off: None, engine: str
) -> None:
    """N10: retain_graph keeps activations until the loss goes, or until a backward without it."""
    model = wrap(Watched(), 2)
    loss = loss_of(model(torch.randn(8, 5)))
    loss.backward(retain_graph=True)
    assert model.module.alive() == num_here(engine, 2)
    loss.backward()
    assert model.module.alive() == 0
    loss = loss_of(model(torch.randn(8, 5)))
    loss.backward(retain_graph=True)
    del loss
    assert model.module.alive() == 0


def test_dropping_the_output_frees_activations(
    wrap: Callable[..., DataParallel], collector_off: None, engine: str
) -> None:
    """N10: a forward without a backward."""
    model = wrap(Watched(), 2)
    output = model(torch.randn(8, 5))
    assert model.module.alive() == num_here(engine, 2)
    del output
    assert model.module.alive() == 0


ORDERS = [(0,), (1,), (2,)]


@over_engines(
    "kind, order",
    each_with([Watched, WithMethodAttribute, WithHiddenModule], ORDERS),
    gloo=each_with([WithHiddenModule], ORDERS),
)
def test_no_reference_cycles(
    wrap: Callable[..., DataParallel], collector_off: None, kind: type[Watched], order: int
) -> None:
    """N10: after a forward, a backward, and a double backward; also where attributes are methods of the module."""
    model = wrap(kind(), 3)

    def step() -> None:
        x = fresh(torch.randn(8, 5))
        if order == 2:
            penalty_loss(model, x).backward()
        else:
            output = model(x)
            if order == 1:
                loss_of(output).backward()

    step()  # what is made once and kept
    model.module.seen.clear()
    gc.collect()
    step()
    assert model.module.alive() == 0
    assert gc.collect() == 0


def test_a_failed_forward_leaves_nothing_behind(wrap: Callable[..., DataParallel], collector_off: None) -> None:
    """N10, F1: so that a batch that ran out of memory can be tried again in parts."""
    model = wrap(Watched(), 3)
    model(torch.randn(8, 5))
    model.module.seen.clear()
    gc.collect()
    for _ in range(2):
        failed = False
        model.module.fails = True
        try:  # not pytest.raises, which keeps the exception, and by it the frames
            model(torch.randn(8, 5))
        except MemoryError:
            failed = True
        model.module.fails = False
        assert failed
        assert model.module.alive() == 0
        assert gc.collect() == 0


def test_inputs_and_outputs_are_not_kept(wrap: Callable[..., DataParallel], collector_off: None) -> None:
    """N10: neither the engine nor an idle worker keeps anything of the last step."""
    model = wrap(mlp(), 3)
    x = fresh(torch.randn(8, 5))
    output = model(x)
    references = [weakref.ref(x), weakref.ref(output)]
    loss_of(output).backward()
    del x, output
    assert [reference() for reference in references] == [None, None]
    module = weakref.ref(model.module)
    del model
    gc.collect()  # modules have cycles of their own
    assert module() is None


# ---- callers and processes -----------------------------------------------------------------------


@over_gloo_too
def test_calls_from_several_threads_at_once(wrap: Callable[..., DataParallel]) -> None:
    """F5: each caller gets its own batch's outputs and gradients."""
    plain = mlp()
    model = wrap(copy.deepcopy(plain), 3)
    together = threading.Barrier(4)
    batches = [torch.randn(7, 5) for _ in range(4)]
    wrong: list[str] = []

    @on_first_device()  # which a thread does not inherit
    def call(number: int) -> None:
        x = batches[number]
        together.wait(WAIT_S)
        for _ in range(10):
            x_model, x_plain = fresh(x), fresh(x)
            (mine,) = torch.autograd.grad(loss_of(model(x_model)), x_model)
            (theirs,) = torch.autograd.grad(loss_of(plain(x_plain)), x_plain)
            if not torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12):
                wrong.append(f"caller {number}")

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    assert not wrong


# A program of its own knows nothing of what `engine` has set here, so that gloo would be no case of its own.
in_a_program_of_its_own = pytest.mark.parametrize(
    "engine", ["threads", "processes"] if ON_CPU else ["threads"], indirect=True
)


def run_script(script: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@in_a_program_of_its_own
def test_the_interpreter_exits_cleanly_after_training(engine: str) -> None:
    """F5: status 0, and nothing on stderr, with outputs and graphs still alive."""
    done = run_script(f"""
        import torch, manyhands
        model = manyhands.DataParallel(torch.nn.Linear(5, 3), ["cpu"] * 3, engine={engine!r})
        for _ in range(3):
            output = model(torch.randn(7, 5))
            output.sum().backward()
        kept = model(torch.randn(7, 5))
        print("trained")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


@in_a_program_of_its_own
def test_sys_exit_inside_a_replica_ends_the_program(engine: str) -> None:
    """F3, F5: with its status, and with other replicas at work."""
    done = run_script(f"""
        import sys, torch, manyhands

        class Exits(torch.nn.Module):
            def forward(self, x):
                if x[0] == 0:
                    sys.exit(5)
                while True:
                    torch.ones(100).sum()

        manyhands.DataParallel(Exits(), ["cpu"] * 2, engine={engine!r})(torch.arange(4.0))
    """)
    assert done.returncode == 5, done.stderr
    assert "terminate called" not in done.stderr


# ---- rows on other axes, and 0-dim outputs -------------------------------------------------------


def same_results(model: nn.Module, wrapped: nn.Module, inputs: tuple[Any, ...], leaves: list[torch.Tensor]) -> None:
    """Check outputs and gradients (of a loss over all floating outputs) against the plain module's."""

    def results(call: Callable[..., Any]) -> list[torch.Tensor]:
        outputs = [t for _, t in pytree.tensors(call(*inputs))]
        loss = sum(t.square().sum() for t in outputs if t.is_floating_point())
        return [*outputs, *torch.autograd.grad(loss, [*leaves, *model.parameters()])]

    torch.testing.assert_close(results(wrapped), results(model), rtol=1e-12, atol=1e-12)


HIDDEN_STATES = [(kind, batch_first) for kind in (nn.LSTM, nn.GRU) for batch_first in (True, False)]


@over_engines(
    "kind, batch_first, n, rows",
    [(*kind, *split) for kind in HIDDEN_STATES for split in SPLITS],
    slow=[(*kind, *split) for kind in HIDDEN_STATES for split in MORE_SPLITS],
    processes=[*((*kind, 4, 6) for kind in HIDDEN_STATES), (nn.LSTM, False, 2, 7), (nn.LSTM, False, 2, 1)],
    gloo=[(*kind, 4, 6) for kind in HIDDEN_STATES],
)
def test_hidden_states_in_and_out(wrap, kind, batch_first, n, rows):
    """S10, G6: they have their rows on axis 1."""
    model = kind(3, 4, num_layers=2, batch_first=batch_first)
    axis = 0 if batch_first else 1
    x = torch.randn(rows, 6, 3).transpose(0, axis).contiguous().requires_grad_()
    states = [torch.randn(2, rows, 4, requires_grad=True) for _ in range(2 if kind is nn.LSTM else 1)]
    state = tuple(states) if kind is nn.LSTM else states[0]
    wrapped = wrap(model, n, in_dims=(axis, 1), out_dims=(axis, 1))
    same_results(model, wrapped, (x, state), [x, *states])


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        output, weights = self.attention(x, x, x, attn_mask=mask)
        return {"y": output * scale, "weights": weights.transpose(0, 1), "mask": mask * 2}


@over_engines("n, rows", SPLITS, slow=MORE_SPLITS, gloo=[(4, 6)])
def test_one_input_whole_and_outputs_on_other_axes(wrap, n, rows):
    """S5, S10, G6: a mask that belongs to no row goes whole to every replica, and its gradient is their sum."""
    model = MaskedAttention()
    x, mask = torch.randn(rows, 5, 4, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    wrapped = wrap(model, n, in_dims={"mask": None}, out_dims={"weights": 1, "mask": None})
    same_results(model, wrapped, (x, mask, scale), [x, mask, scale])


SHARES = ["chunk", "even", [3, 1, 2], [0, 1, 1]]


@over_engines("shares, rows", each_with(SHARES, [(1,), (4,), (7,), (10,)]), gloo=each_with(SHARES, [(7,)]))
def test_a_mean_over_rows_inside_forward_is_exact(wrap, shares, rows):
    """G2, N4: torch's mean of means counts the rows of a small shard several times."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp()

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.layer(x)
            return {"loss": y.square().mean(), "nested": (y.sum(), [y.mean()]), "positive": int((y > 0).sum())}

    model, x = WithLoss(), torch.randn(rows, 5, requires_grad=True)
    scalars = {"loss": "mean", "nested": ("sum", "mean"), "positive": "sum"}
    wrapped = wrap(model, 3, shares=shares, scalars=scalars)
    same_results(model, wrapped, (x,), [x])
    assert wrapped(x)["positive"] == model(x)["positive"]
    assert wrapped(x)["loss"].dim() == 0


IGNORED = [0, 3, 6, 7]  # of 8 targets


@over_engines("ignored, n", each_with(IGNORED, [(2,), (3,), (4,)]), gloo=each_with(IGNORED, [(3,)]))
def test_a_mean_over_tokens_is_weighted_by_the_output_that_counts_them(wrap, n, ignored):
    """N4: cross entropy with ignore_index; a replica whose targets are all ignored has a loss of NaN, and no part."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.cross_entropy(self.layer(x), y), (y != -100).sum()

    model, x = Tagger(), torch.randn(8, 5, requires_grad=True)
    y = torch.randint(0, 4, (8,))
    y[8 - ignored :] = -100
    wrapped = wrap(model, n, scalars=("mean:1", "sum"))
    same_results(model, wrapped, (x, y), [x])
    assert wrapped(x, y)[1].dtype == torch.int64


def test_a_mean_over_nothing_at_all_is_nan_as_in_the_plain_module(wrap):
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"loss": x[x > 9].mean(), "n": (x > 9).sum()}

    assert wrap(Empty(), 2, scalars={"loss": "mean:n", "n": "sum"})(torch.zeros(4))["loss"].isnan()


def test_scalars_that_name_no_output(wrap):
    model = wrap(Fn(lambda x: {"loss": x.mean(), "n": x}), 2, scalars={"loss": "mean:n"})
    with pytest.raises(ValueError, match=r"expected an output 'n' beside it that is a number or a 0-dim tensor"):
        model(torch.zeros(4))


def test_replicas_that_do_not_agree_on_what_is_whole(wrap):
    """G3: with what each gave."""
    model = wrap(Fn(lambda x: x.sum()), 2, out_dims=None)
    assert model(torch.zeros(4)).dim() == 0
    with pytest.raises(ValueError, match=r"different values, .*out_dims says None.*replica 0: 1; replica 1: 5"):
        model(torch.arange(4.0))


@over_gloo_too
def test_the_gradient_of_what_is_whole_counts_once(wrap):
    """A regulariser, say, that every replica computes from the same weights."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.layer.weight.square().sum()

    plain, x = Penalised(), torch.randn(7, 5, requires_grad=True)
    same_results(plain, wrap(plain, 3, out_dims=(0, None)), (x,), [x])


def test_second_derivatives_through_every_layout(wrap):
    """N3, for rows on another axis, means, sums and whole outputs."""

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.tanh(x.T @ self.weight @ table)
            return y.T, y.square().mean(), y.sum(), self.weight.sin().sum()

    model, x = All(), torch.randn(3, 5, requires_grad=True)
    table = torch.randn(3, 3, requires_grad=True)
    wrapped = wrap(
        model,
        2,
        in_dims=(1, None),
        out_dims=(1, 0, 0, None),
        scalars=("stack", "mean", "sum", "stack"),
    )

    def penalty(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        y, mean, total, whole = call(x, table)
        leaves = [x, table, model.weight]
        grads = torch.autograd.grad(y.square().sum() + mean + total * mean + whole**2, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    torch.testing.assert_close(penalty(wrapped), penalty(model), rtol=1e-12, atol=1e-12)


def test_another_method_is_called_in_parallel(wrap, engine):
    """R12."""

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)
            self.seen: list[int] = []

        def generate(self, x: torch.Tensor, *, steps: int) -> torch.Tensor:
            self.seen.append(len(x))
            for _ in range(steps):
                x = torch.tanh(self.layer(x))
            return x

    model, x = Generator(), torch.randn(7, 5, requires_grad=True)
    wrapped = wrap(model, 3)
    plain = model.generate(x, steps=3)
    model.seen.clear()
    output = wrapped.call("generate", x, steps=3)
    assert sorted(model.seen) == ([1, 3, 3] if engine == "threads" else [3])
    torch.testing.assert_close(output, plain, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(plain.sum(), list(model.parameters()))
    actual = torch.autograd.grad(output.sum(), list(model.parameters()))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(AttributeError, match="Generator has no method 'generat'"):
        wrapped.call("generat", x)


def test_padding_to_the_longest_of_each_replicas_own_is_explained(wrap):
    """G8: the best-known trap of RNNs."""

    class Padded(nn.Module):
        def __init__(self, total_length: int | None) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)
            self.total_length = total_length

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=self.total_length)[0]

    x, lengths = torch.randn(4, 6, 3, requires_grad=True), torch.tensor([6, 2, 3, 1])
    with pytest.raises(ValueError, match=r"replica 0: \(2, 6, 4\); replica 1: \(2, 3, 4\)") as raised:
        wrap(Padded(None), 2)(x, lengths)
    assert "give total_length=" in raised.value.__notes__[0]
    model = Padded(6)
    same_results(model, wrap(model, 2), (x, lengths), [x])


def test_a_container_that_torchs_pytree_registry_knows(wrap):
    """G4: such as the key-value caches of transformers."""

    class Cache:
        def __init__(self, keys: list[torch.Tensor]) -> None:
            self.keys = keys

    torch.utils._pytree.register_pytree_node(
        Cache, lambda cache: (cache.keys, None), lambda keys, _: Cache(list(keys)), serialized_type_name="test.Cache"
    )
    model, x = Fn(lambda x: {"y": x, "cache": Cache([x * 2, x * 3])}), torch.arange(6.0)
    output = wrap(model, 2)(x)
    assert type(output["cache"]) is Cache
    assert [key.tolist() for key in output["cache"].keys] == [(x * 2).tolist(), (x * 3).tolist()]
    again = wrap(Fn(lambda cache: cache.keys[0] + cache.keys[1]), 2)(output["cache"])
    assert again.tolist() == (x * 5).tolist()


@over_gloo_too
@pytest.mark.parametrize("n", [2, 3])
def test_memory_formats_and_strides_of_gradients(wrap, n):
    """G7, S11: an optimizer's fused kernels and the next layer count on them."""
    model = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(7, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()

    def layouts(call: Callable[..., Any]) -> list[tuple[int, ...]]:
        output = call(x)
        return [t.stride() for t in (output, *torch.autograd.grad(output.square().sum(), [x, *model.parameters()]))]

    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(args[0].stride()))
    plain = layouts(model)
    assert layouts(wrap(model, n)) == plain
    assert set(seen) == {x.stride()}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(wrap: Callable[..., DataParallel], layout: torch.layout) -> None:
    """S15: errors that say which, and what to do."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nested.nested_tensor(list(self.linear(x).unbind()), layout=layout)

    model = wrap(Rows())
    with pytest.raises(TypeError, match=r"cannot gather output, a nested tensor: .*to_padded_tensor"):
        model(torch.randn(4, 5))
    nested = torch.nested.nested_tensor([torch.randn(n, 5) for n in (3, 1, 2)], layout=layout)
    with pytest.raises(TypeError, match=r"cannot scatter inputs\[0\], a nested tensor: .*to_padded_tensor"):
        model(nested)
    model = wrap(nn.Linear(5, 3))
    compare_with_plain(model, copy.deepcopy(model.module), torch.randn(4, 5))


class _YieldsRows(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return (row for row in super().forward(x))


def test_an_output_that_is_a_generator(wrap: Callable[..., DataParallel]) -> None:
    """G5: it cannot be joined, nor leave a worker process."""
    with pytest.raises(TypeError, match=r"cannot gather .*output.* Return tensors, numbers or strings"):
        wrap(_YieldsRows(5, 3))(torch.randn(4, 5))


@pytest.mark.parametrize("n", [2, 3])
def test_sparse_outputs(wrap, n):
    """G7: joined along the rows, with gradients."""
    model, x = nn.Linear(4, 3), torch.randn(7, 4)

    def results(call: Callable[..., Any]) -> list[torch.Tensor]:
        output = call(x)
        assert output.is_sparse
        return [output.to_dense(), *torch.autograd.grad(output.to_dense().square().sum(), list(model.parameters()))]

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).to_sparse()

    torch.testing.assert_close(results(wrap(Sparse(), n)), results(Sparse()), rtol=1e-12, atol=1e-12)


# ---- batch norm over all replicas ----------------------------------------------------------------


class CallsSuper(nn.BatchNorm1d):
    """A user's subclass that has something of its own, and lets torch's do the rest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2) + 1


class CallsFunctional(nn.BatchNorm1d):
    """A user's subclass that does without torch's forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = (self.running_mean, self.running_var)
        return F.batch_norm(x, *running, self.weight + 1, self.bias, training=self.training, momentum=0.3, eps=1e-3)


class Functional(nn.Module):
    """Batch norms that have no tensor by which to know them, the second over another number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.batch_norm(self.first(x), None, None, training=True)
        return F.batch_norm(
            self.second(F.batch_norm(hidden.tanh(), None, None, None, None, True)), None, None, None, None, True
        )


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(self.norm(x))))


class ResidualBlock(nn.Module):
    """Two ways through the block, each with a batch norm."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        first, second = nn.Conv2d(2, 3, 3, padding=1, bias=bias), nn.Conv2d(3, 3, 1, bias=bias)
        self.long = nn.Sequential(first, nn.BatchNorm2d(3), nn.ReLU(), second)
        self.short = nn.Sequential(nn.Conv2d(2, 3, 1, bias=bias), nn.BatchNorm2d(3))
        self.after = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.short(x) + self.after(self.long(x)))


class CheckpointedBatchNorm(nn.Module):
    """Checkpoints around batch norms, one of them inside of another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.third = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if x.is_leaf else x  # what a reentrant checkpoint asks for
        return checkpoint(
            self.inner, checkpoint(self.first, x, use_reentrant=self.reentrant), use_reentrant=self.reentrant
        )

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(checkpoint(self.second, x, use_reentrant=self.reentrant))


class BatchNormForceField(ForceField):
    """Differentiates through batch norm inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def frozen_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
    model[1].requires_grad_(False)
    return model


def one_norm_in_eval_mode() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
    model[1].eval()
    return model


BATCH_NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "1d": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)), rows_of(5)),
    "1d, over a length": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Tanh()), rows_of(2, 6)),
    "2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 1)),
        rows_of(2, 5, 5),
    ),
    "3d": (lambda: nn.Sequential(nn.BatchNorm3d(2), nn.Tanh()), rows_of(2, 2, 3, 2)),
    "means far from 0": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Tanh()), lambda rows: torch.randn(rows, 5) + 1e3),
    "momentum=None": (lambda: nn.Sequential(nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)), rows_of(5)),
    "affine=False": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)), rows_of(5)),
    "track_running_stats=False": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        rows_of(5),
    ),
    "neither": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)),
        rows_of(5),
    ),
    "subclass, super": (lambda: nn.Sequential(nn.Linear(5, 4), CallsSuper(4), nn.Tanh()), rows_of(5)),
    "subclass, functional": (lambda: nn.Sequential(nn.Linear(5, 4), CallsFunctional(4), nn.Tanh()), rows_of(5)),
    "functional": (Functional, rows_of(5)),
    "SyncBatchNorm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.SyncBatchNorm(4), nn.Tanh()), rows_of(5)),
    "used twice": (UsedTwice, rows_of(5)),
    "residual block": (ResidualBlock, rows_of(2, 4, 4)),
    "frozen": (frozen_batch_norm, rows_of(5)),
    "one of two in eval mode": (one_norm_in_eval_mode, rows_of(5)),
    "checkpoint, reentrant": (lambda: CheckpointedBatchNorm(True), rows_of(5)),
    "checkpoint, non-reentrant": (lambda: CheckpointedBatchNorm(False), rows_of(5)),
    "differentiates inside": (BatchNormForceField, rows_of(5)),
}


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-12) -> None:
    """Compare on the scale of the largest entry: gradients behind a batch norm are small differences."""
    assert (actual is None) == (expected is None), f"got {actual}, expected {expected}"
    if expected is not None and actual is not None and expected.numel():
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def assert_all_near(model: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    """Compare gradients and buffers."""
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        try:
            assert_near(mine.grad, theirs.grad, tolerance)
        except AssertionError as error:
            error.add_note(f"the gradient of {name}")
            raise
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        try:
            assert_near(mine, theirs, tolerance)
        except AssertionError as error:
            error.add_note(name)
            raise


def compare_with_plain(model: DataParallel, plain: nn.Module, x: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Run forward and backward of both; compare outputs, all gradients and buffers."""
    x_plain, x_model = fresh(x), fresh(x)
    expected, output = plain(x_plain), in_time(lambda: model(x_model))
    for mine, theirs in zip(tensors_in(output), tensors_in(expected), strict=True):
        assert mine.dtype == theirs.dtype
        assert_near(mine.detach(), theirs.detach(), tolerance)
    loss_of(expected).backward()
    in_time(lambda: loss_of(output).backward())
    assert_near(x_model.grad, x_plain.grad, tolerance)
    assert_all_near(model.module, plain, tolerance)


# What replicas that wait for each other in backward can do, and what is an error on accelerators, where none may wait.
WAITS_IN_BACKWARD = ("checkpoint, reentrant", "differentiates inside")


def is_refused(name: str, step: Callable[[], Any]) -> bool:
    """Return whether `step` is refused where the replicas are; check that it says so."""
    if ON_CPU or name not in WAITS_IN_BACKWARD:
        return False
    with pytest.raises(RuntimeError, match=r"use_reentrant=False|works for replicas on the host"):
        in_time(step)
    return True


ROWS_OF_BATCH_NORMS = [(2, 7), (4, 4), (4, 6), (8, 9)]
EACH_ONCE = [*each_with(BATCH_NORMS, [(4, 6)]), *(("residual block", *split) for split in [(2, 7), (4, 4), (8, 9)])]


@over_engines(
    "name, num_replicas, rows",
    each_with(BATCH_NORMS, ROWS_OF_BATCH_NORMS),
    processes=EACH_ONCE,
    gloo=EACH_ONCE,
)
def test_synchronised_batch_norm(wrap: Callable[..., DataParallel], name: str, num_replicas: int, rows: int) -> None:
    """N5: outputs, gradients and running statistics are the plain module's, in training and after it."""
    make_model, make_batch = BATCH_NORMS[name]
    plain = make_model()
    model = wrap(copy.deepcopy(plain), num_replicas, sync_batch_norm=True)
    if is_refused(name, lambda: loss_of(model(make_batch(rows))).backward()):
        return
    # Numbers far from 0 have fewer digits behind the point.
    tolerance = 1e-9 if name == "means far from 0" else 1e-12
    for _ in range(2):
        compare_with_plain(model, plain, make_batch(rows), tolerance)
    for module in (plain, model):
        module.eval()
    compare_with_plain(model, plain, make_batch(rows), tolerance)


@over_gloo_too
@pytest.mark.parametrize("shares", ["even", [3, 1, 2], [1, 0, 1]], ids=str)
def test_synchronised_batch_norm_with_shares(wrap: Callable[..., DataParallel], shares: Any) -> None:
    """N5, S2: every row counts the same, however many a replica has; idle replicas count nothing."""
    plain = ResidualBlock()
    model = wrap(copy.deepcopy(plain), 3, shares=shares, sync_batch_norm=True)
    for rows in (7, 2, 5, 1):
        compare_with_plain(model, plain, torch.randn(rows, 2, 4, 4))


def changed_by_a_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run forward and backward; return the output, all gradients and the buffers, by name."""
    x = fresh(x)
    output = in_time(lambda: model(x))
    in_time(lambda: loss_of(output).backward())
    module = model.module if isinstance(model, DataParallel) else model
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    found = {"output": output, "gradient of x": x.grad, **gradients, **dict(module.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@over_engines("num_replicas", [(n,) for n in range(1, 9)], processes=[(1,), (2,), (3,), (8,)], gloo=[(2,), (3,)])
def test_synchronised_batch_norm_in_single_precision(wrap: Callable[..., DataParallel], num_replicas: int) -> None:
    """N5: as near to the result in double precision as the plain module is; NCHW and channels last."""
    exact = ResidualBlock(bias=False)  # the gradient of a bias before a batch norm is nothing but rounding
    plain = copy.deepcopy(exact).float()
    model = wrap(copy.deepcopy(plain), num_replicas, sync_batch_norm=True)
    for scale, offset, memory_format in ((3, 1, torch.contiguous_format), (1, 0, torch.channels_last)):
        for module in (exact, plain, model):
            module.to(memory_format=memory_format)
        x = torch.randn(17, 2, 6, 6, dtype=torch.float32).to(memory_format=memory_format) * scale + offset
        exactly = changed_by_a_step(exact, x.double())
        plainly, ours = (changed_by_a_step(module, x) for module in (plain, model))
        for name, tensor in exactly.items():
            assert_as_accurate(ours[name], plainly[name], tensor, num_terms=17 * 6 * 6, what=name)
    assert model(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=["autocast", "all in bfloat16"])
def test_synchronised_batch_norm_in_half_precision(wrap: Callable[..., DataParallel], parameters: torch.dtype) -> None:
    """N5, R14: as near to the result in double precision as the plain module is."""
    exact = ResidualBlock(bias=False)
    plain = copy.deepcopy(exact).to(parameters)
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    x = torch.randn(17, 2, 6, 6)
    outputs = [exact(x)]
    with torch.autocast(torch.device(DEVICES[0]).type, torch.bfloat16, enabled=parameters is torch.float32):
        outputs += [module(x.to(parameters)) for module in (plain, model)]
    assert outputs[1].dtype == outputs[2].dtype == torch.bfloat16
    assert {b.dtype for b in model.buffers()} == {parameters, torch.int64}
    for output in outputs:
        loss_of(output.double()).backward()
    results = [
        [
            torch.cat([t.detach().double().flatten() for t in tensors])
            for tensors in (out, [p.grad for p in m.parameters()], m.buffers())
        ]
        for out, m in zip(outputs, (exact, plain, model), strict=True)
    ]
    for exactly, plainly, mine in zip(*results, strict=True):
        assert (mine - exactly).norm() <= 2 * (plainly - exactly).norm() + 0.01 * exactly.norm()


def test_one_value_a_channel(wrap: Callable[..., DataParallel]) -> None:
    """N5, N11: raises what the plain module raises where the whole batch has one; a replica may."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    compare_with_plain(model, plain, torch.randn(3, 5))
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as expected:
        plain(torch.randn(1, 5))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        model(torch.randn(1, 5))
    assert str(caught.value) == str(expected.value)
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_one_row_for_a_replica_with_batch_norm_of_its_own(wrap: Callable[..., DataParallel]) -> None:
    """N5, F1: torch's error says what is wrong; a note says what to do about it here."""
    model = wrap(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        model(torch.randn(3, 5))
    assert any("sync_batch_norm=True" in note for note in caught.value.__notes__)


def test_one_value_a_channel_where_rows_are_selected(wrap: Callable[..., DataParallel]) -> None:
    """N5: forward may leave a replica no rows at all, or the whole batch one, or none."""

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x[x[:, 0] > 0])

    plain = Selects()
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    x = torch.arange(18.0).view(9, 2).sin()
    for smallest in (-2.0, 4.0, 7.0):
        compare_with_plain(model, plain, x + torch.arange(9.0)[:, None] - smallest)
    with pytest.raises(ValueError, match=r"more than 1 value per channel .* input size torch.Size\(\[1, 2\]\)"):
        in_time(lambda: model(torch.tensor([[-1.0, 1.0], [-1.0, 1.0], [1.0, 1.0]])))
    assert plain(-torch.ones(3, 2)).shape == in_time(lambda: model(-torch.ones(3, 2))).shape == (0, 2)


def test_synchronised_batch_norm_without_rows(wrap: Callable[..., DataParallel]) -> None:
    """S9, N5: as the plain module."""
    plain = nn.BatchNorm1d(3)
    model = wrap(copy.deepcopy(plain), 2, sync_batch_norm=True)
    x = torch.zeros(0, 3)
    assert model(x).shape == plain(x).shape
    assert_same_state(model.module, plain)


def test_synchronised_batch_norm_changes_replicas_only(wrap: Callable[..., DataParallel]) -> None:
    """N5: types, attributes, names and torch itself are as before, during the call as well."""
    before, seen = F.batch_norm, []
    modes = torch.overrides._get_current_function_mode_stack()

    class Looks(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((type(self), F.batch_norm))
            return super().forward(x)

    model = wrap(Looks(3), 2, sync_batch_norm=True)
    attributes, names = dict(vars(model.module)), list(model.module.state_dict())
    loss_of(model(torch.randn(4, 3))).backward()
    assert set(seen) == {(Looks, before)}
    assert F.batch_norm is before
    assert vars(model.module).keys() == attributes.keys()
    assert list(model.module.state_dict()) == names
    assert torch.overrides._get_current_function_mode_stack() == modes


def test_synchronised_batch_norm_gives_equal_bits(wrap: Callable[..., DataParallel]) -> None:
    """N1, N5: whichever replica comes first to a batch norm."""
    model = wrap(ResidualBlock().float(), 4, sync_batch_norm=True)
    x = torch.randn(9, 2, 4, 4, dtype=torch.float32)
    state = copy.deepcopy(model.module.state_dict())
    seen = []
    for _ in range(10):
        model.module.load_state_dict(state)
        model.zero_grad()
        output = model(x)
        loss_of(output.double()).backward()
        seen.append(
            torch.cat(
                [
                    t.detach().double().flatten()
                    for t in (output, *[p.grad for p in model.parameters()], *model.buffers())
                ]
            )
        )
    if worker_group.always_send:  # the first walk finds the order in buckets, on which gloo's order of summing depends
        del seen[0]
    assert all(torch.equal(other, seen[0]) for other in seen)


def test_synchronised_batch_norm_and_how_backward_is_asked_for(wrap: Callable[..., DataParallel]) -> None:
    """N5, N1, N8: several forwards, kept graphs, partial gradients, an output that the loss ignores."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh())
            self.used, self.ignored = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.trunk(x)
            return self.used(hidden), self.ignored(hidden)

    plain = TwoHeads()
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    batches = [torch.randn(rows, 5) for rows in (7, 4, 8)]
    partial = []
    for module, root in ((plain, plain), (model, model.module)):

        def run(module: nn.Module = module, root: nn.Module = root) -> None:
            losses = [loss_of(module(x)[0]) for x in batches]
            (losses[0] * 2).backward(retain_graph=True)
            (losses[2] + losses[1]).backward()
            losses[0].backward()
            partial.append(torch.autograd.grad(loss_of(module(batches[0])), [root.used.bias, root.trunk[0].weight]))

        in_time(run)
    assert model.module.ignored.weight.grad is None
    assert_all_near(model.module, plain)
    for mine, theirs in zip(*reversed(partial), strict=True):
        assert_near(mine, theirs)


def test_synchronised_batch_norm_without_grad(wrap: Callable[..., DataParallel]) -> None:
    """N5, R14: statistics of the whole batch also where nothing is to be differentiated."""
    plain = ResidualBlock()
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    x = torch.randn(8, 2, 4, 4)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_near(model(x), plain(x))
        assert_all_near(model.module, plain)
    compare_with_plain(model, plain, x)


def test_gradgradcheck_of_synchronised_batch_norm(wrap: Callable[..., DataParallel]) -> None:
    """N3, N5"""
    layers = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1), nn.BatchNorm1d(1, affine=False)]
    model = wrap(nn.Sequential(*layers), 2, sync_batch_norm=True)
    x = torch.randn(3, 2, requires_grad=True)

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(x)

    assert torch.autograd.gradcheck(run, (x, *model.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *model.parameters()))


WITH_PENALTY = ["1d", "2d", "affine=False", "used twice", "residual block", "differentiates inside"]


@over_engines(
    "name, num_replicas, rows",
    each_with(WITH_PENALTY, [(2, 7), (3, 8), (4, 6)]),
    processes=[*each_with(WITH_PENALTY, [(4, 6)]), ("2d", 2, 7), ("2d", 3, 8)],
    gloo=each_with(WITH_PENALTY, [(3, 8)]),
)
def test_gradient_penalty_with_synchronised_batch_norm(
    wrap: Callable[..., DataParallel], name: str, num_replicas: int, rows: int
) -> None:
    """N3, N5: gradients of a loss of gradients; running statistics are written once."""
    make_model, make_batch = BATCH_NORMS[name]
    plain = make_model()
    model = wrap(copy.deepcopy(plain), num_replicas, sync_batch_norm=True)
    if is_refused(name, lambda: penalty_loss(model, make_batch(rows)).backward()):
        return
    for _ in range(2):
        x = make_batch(rows)
        penalty_loss(plain, x).backward()
        in_time(lambda x=x: penalty_loss(model, x).backward())
        assert_all_near(model.module, plain, 1e-10)


def test_checkpoints_around_batch_norm_in_double_backward(wrap: Callable[..., DataParallel]) -> None:
    """N3, N5, R13: each pass over the graph runs the checkpoint's forward again, with the other replicas."""
    plain = CheckpointedBatchNorm(False)
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    x = torch.randn(8, 5)
    penalty_loss(plain, x).backward()
    in_time(lambda: penalty_loss(model, x).backward())
    for mine, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad, 1e-10)


def test_third_derivatives_of_synchronised_batch_norm(wrap: Callable[..., DataParallel]) -> None:
    """N3, N5: the oracle is the formula, because torch's own third derivatives of batch norm are wrong."""

    class Formula(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            centred = x - x.mean(0)
            return centred / torch.sqrt(centred.square().mean(0) + self.eps) * self.weight + self.bias

    model = wrap(nn.BatchNorm1d(3), 2, sync_batch_norm=True)
    plain = Formula(3)
    x = torch.randn(5, 3)

    def third(module: nn.Module) -> torch.Tensor:
        x_here = fresh(x)
        (first,) = torch.autograd.grad(module(x_here).pow(3).sum(), x_here, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(3).sum(), x_here, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), x_here)[0]

    assert_near(in_time(lambda: third(model)), third(plain), 1e-10)


def test_batched_gradients_cannot_meet(wrap: Callable[..., DataParallel], engine: str) -> None:
    """N5: on CPU threads, where one backward is run for many gradients, an error that says what to do."""
    model = wrap(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), 2, sync_batch_norm=True)
    plain, x, vectors = copy.deepcopy(model.module), torch.randn(6, 5), torch.randn(4, 6, 3)

    def batched(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x), weight, vectors, is_grads_batched=True)[0]

    if engine == "processes" or not ON_CPU:  # the former run one for each, and on accelerators nobody meets
        assert_near(in_time(lambda: batched(model, model.module[0].weight)), batched(plain, plain[0].weight))
    else:
        with pytest.raises(RuntimeError, match="Ask for gradients one by one"):
            in_time(lambda: batched(model, model.module[0].weight))
    compare_with_plain(model, copy.deepcopy(model.module), torch.randn(6, 5))


@in_one_memory
def test_a_leaf_from_outside_with_synchronised_batch_norm(wrap: Callable[..., DataParallel]) -> None:
    """N5: replicas that share a leaf of the caller's still walk their graphs at once."""
    outside = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))]

    class UsesOutside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.which = nn.BatchNorm1d(5), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(x * outside[self.which]))

    plain = UsesOutside()
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    model.module.which = 1
    x = torch.randn(8, 5)
    for module in (plain, model):
        in_time(lambda module=module: loss_of(module(x)).backward())
        in_time(lambda module=module: penalty_loss(module, x).backward())
    assert_near(outside[1].grad, outside[0].grad, 1e-10)
    assert_all_near(model.module, plain, 1e-10)


class Branches(nn.Module):
    """Takes one branch or the other, by the first number of the first row."""

    def __init__(self, *, crossing: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.crossing = crossing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.left, self.right) if x[0, 0] < 3 else (self.right, self.left)
        return self.both(torch.tanh(second(torch.tanh(first(x))) if self.crossing else first(x)))


def test_branches_that_the_data_decides(wrap: Callable[..., DataParallel], caplog: pytest.LogCaptureFixture) -> None:
    """N5: each batch norm is over the rows that came to it, forward and backward; this is said, and nothing hangs."""
    model = wrap(Branches(), 3, sync_batch_norm=True)
    plain = copy.deepcopy(model.module)
    x_model, x_plain = fresh(numbered_rows().sin()), fresh(numbered_rows().sin())
    x_model.data[[0, 3, 6], 0] = x_plain.data[[0, 3, 6], 0] = torch.tensor([5.0, 1.0, 5.0])  # right, left, right
    output = in_time(lambda: model(x_model))
    in_time(lambda: loss_of(output).backward())
    right = plain.right(torch.cat([x_plain[:3], x_plain[6:]]))
    parts = [right[:3], plain.left(x_plain[3:6]), right[3:]]
    loss_of(plain.both(torch.tanh(torch.cat(parts)))).backward()
    assert_near(x_model.grad, x_plain.grad)
    for mine, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad)
    assert "the batch norm of right.running_mean saw the rows of some replicas only" in caplog.text
    assert "both" not in caplog.text


def test_batch_norms_in_different_orders_do_not_hang(wrap: Callable[..., DataParallel]) -> None:
    """N5: replicas that need each other in a circle go on with the rows of those who are there."""
    model = wrap(Branches(crossing=True), 3, sync_batch_norm=True)
    for first_rows in ((0.0, 5.0, 0.0), (5.0, 0.0, 5.0), (5.0, 5.0, 0.0)):
        x = fresh(numbered_rows().cos())
        x.data[[0, 3, 6], 0] = torch.tensor(first_rows)
        in_time(lambda x=x: loss_of(model(x)).backward())
        assert x.grad.isfinite().all()


@over_engines(
    "error, first_row, in_backward",
    each_with([FailureError(7, "as asked"), KeyboardInterrupt()], PLACES),
    gloo=each_with([FailureError(7, "as asked")], PLACES),
)
def test_a_failure_releases_who_waits_in_batch_norm(
    wrap: Callable[..., DataParallel], first_row: float, in_backward: bool, error: BaseException, engine: str
) -> None:
    """F1, F3, N5, N11: the others wait for it in a batch norm before and one after; the next call is right."""

    class FailsBetween(FailsOn):
        def __init__(self) -> None:
            super().__init__()
            self.after = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(super().forward(x))

    model = wrap(FailsBetween(), 3, sync_batch_norm=True)
    plain = copy.deepcopy(model.module)
    before = copy.deepcopy(model.module.state_dict())
    model.module.on, model.module.in_backward = {first_row: error}, in_backward
    with pytest.raises(type(error)) as caught:
        in_time(lambda: loss_of(model(numbered_rows())).backward())
    assert_is_the_replicas(caught.value, error, int(first_row) // 3, engine)
    assert all(p.grad is None for p in model.parameters())
    if not in_backward:
        for name, value in model.module.state_dict().items():
            assert torch.equal(value, before[name]), name
    model.module.load_state_dict(before)
    model.module.on = {}
    for module in (model, plain):
        in_time(lambda module=module: loss_of(module(numbered_rows())).backward())
    model.module.calls = plain.calls  # counted once a forward, or twice
    assert_all_near(model.module, plain)


def test_a_failure_with_one_row_left_to_the_others(wrap: Callable[..., DataParallel], engine: str) -> None:
    """F2, N5: the caller gets the failure, not the complaint of a replica that is left with a single row."""
    error = FailureError(7, "as asked")

    class FailsFirst(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 7:
                raise error
            return super().forward(x)

    model = wrap(FailsFirst(2), 2, sync_batch_norm=True, shares=[1, 7])
    with pytest.raises(FailureError) as caught:
        in_time(lambda: model(numbered_rows()))
    assert_is_the_replicas(caught.value, error, 1, engine)


@pytest.mark.parametrize("outer_synchronised", [False, True])
@pytest.mark.parametrize("inner_synchronised", [False, True])
def test_wrappers_inside_wrappers_with_batch_norm(
    wrap: Callable[..., DataParallel], outer_synchronised: bool, inner_synchronised: bool
) -> None:
    """A10, N5: inside a replica of a synchronised wrapper every batch norm sees the whole batch."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    inner = copy.deepcopy(plain)
    inner[2] = wrap(inner[2], 2, sync_batch_norm=inner_synchronised)
    model = wrap(inner, 2, sync_batch_norm=outer_synchronised)
    x = torch.randn(8, 5)
    if outer_synchronised:
        compare_with_plain(model, plain, x)
    elif inner_synchronised:  # each outer replica has 4 rows, and the inner wrapper sees all of those
        in_time(lambda: loss_of(model(x)).backward())
        loss_of(data_parallel(plain, x, in_turn(2))).backward()
        assert_all_near(model.module, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_synchronised_wrapper(
    wrap: Callable[..., DataParallel], reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """N5, R14: the non-reentrant kind counts saved tensors, so that one device runs the whole batch, which is said."""
    plain = ResidualBlock()
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    x = torch.randn(8, 2, 4, 4)
    for module in (plain, model):
        in_time(lambda module=module: loss_of(checkpoint(module, fresh(x), use_reentrant=reentrant)).backward())
    assert_all_near(model.module, plain)
    assert ("runs the whole batch on its first device" in caplog.text) == (not reentrant)


def test_a_synchronised_wrapper_under_a_mode(wrap: Callable[..., DataParallel]) -> None:
    """N5, R14: dispatch modes and torch.func transforms."""
    plain = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False))
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    x = torch.randn(8, 5)
    grads = [torch.func.grad(lambda x, module=module: module(x).pow(3).sum())(x) for module in (plain, model)]
    assert_near(grads[1], grads[0])


def test_synchronised_batch_norm_from_several_threads(wrap: Callable[..., DataParallel]) -> None:
    """F5, N5: calls that overlap do not meet each other."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh())
    model = wrap(copy.deepcopy(plain), 3, sync_batch_norm=True)
    batches = [torch.randn(7, 5) for _ in range(4)]
    wrong: list[int] = []

    @on_first_device()
    def call(number: int) -> None:
        x = batches[number]
        for _ in range(10):
            x_model, x_plain = fresh(x), fresh(x)
            (mine,) = torch.autograd.grad(loss_of(model(x_model)), x_model)
            (theirs,) = torch.autograd.grad(loss_of(plain(x_plain)), x_plain)
            if not torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it hangs"
    assert not wrong


def test_synchronised_batch_norm_frees_what_it_held(
    wrap: Callable[..., DataParallel], collector_off: None, engine: str
) -> None:
    """N10, N5: activations go while backward runs; no cycles, whatever the order of the derivative."""

    class WatchedNorm(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.latest = self.norm(super().forward(x))  # lost, and not held by what led to it
            return self.latest * 1

    model = wrap(WatchedNorm(), 3, sync_batch_norm=True)

    def step(order: int) -> None:
        x = fresh(torch.randn(8, 5))
        if order == 2:
            penalty_loss(model, x).backward()
        else:
            loss = loss_of(model(x))
            if order == 1:
                loss.backward()
                assert model.module.alive() == 0
            else:
                assert model.module.alive() == num_here(engine, 3)

    for order in (0, 1, 2):
        step(order)  # what is made once and kept
        model.module.seen.clear()
        gc.collect()
        step(order)
        assert model.module.alive() == 0
        assert gc.collect() == 0
        model.module.seen.clear()


@in_one_memory
def test_tensors_from_outside_that_change_from_step_to_step(wrap):
    """N1, N3: not the module's, and another one in each step. (Workers are told, of what a closure has.)"""
    table: dict[str, torch.Tensor] = {}

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + table["now"]

    wrapped, x = wrap(Reads(), 2), torch.randn(5, 3)
    for _ in range(3):
        table["now"] = torch.zeros(3, requires_grad=True)
        wrapped.refresh()
        wrapped(x).sum().backward()
        assert table["now"].grad.tolist() == [5.0] * 3


def test_a_weight_that_requires_a_gradient_is_refused(wrap):
    """N4: it would be taken for a constant."""
    weighted = Fn(lambda x: {"l": x.sum() / x.abs().sum(), "n": x.abs().sum()})
    model = wrap(weighted, 2, scalars={"l": "mean:n", "n": "sum"})
    with pytest.raises(ValueError, match=r"'n' requires a gradient, and a weight counts as a constant. detach\(\)"):
        model(torch.randn(4, requires_grad=True))
    assert model(torch.randn(4))["l"].dim() == 0


def test_gradients_switched_on_inside_forward(wrap):
    """R14: forces from an energy, though the caller asks for no gradients."""

    class Forces(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                energy = x.square().sum()
            return -torch.autograd.grad(energy, x)[0]

    x = torch.randn(5, 3, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(wrap(Forces(), 2)(x), -2 * x.detach())


def test_buffers_stay_if_outputs_cannot_be_joined(wrap):
    """N11."""

    class Fails:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def fail(parts: Any) -> Any:
        raise ValueError("cannot be joined")

    register_batch_type(Fails, scatter=fail, gather=fail)
    norm = nn.BatchNorm1d(3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> Fails:
            return Fails(self.norm(x))

    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(ValueError, match="cannot be joined"):
        wrap(Model(), 2)(torch.randn(6, 3))
    torch.testing.assert_close(norm.state_dict(), before)


def test_pytree_containers_that_differ_beside_their_children(wrap):
    """G5."""

    class Box:
        def __init__(self, x: torch.Tensor, n: int) -> None:
            self.x, self.n = x, n

    torch.utils._pytree.register_pytree_node(
        Box, lambda box: ([box.x], box.n), lambda parts, n: Box(*parts, n), serialized_type_name="test.Box"
    )
    assert wrap(Fn(lambda x: Box(x, 7)), 2)(torch.zeros(4)).n == 7
    with pytest.raises(ValueError, match=r"different Boxs \(replica 0: 3; replica 1: 2\)"):
        wrap(Fn(lambda x: Box(x, len(x))), 2)(torch.zeros(5))
