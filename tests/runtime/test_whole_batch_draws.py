"""Draws for the whole batch: every operation that draws, every memory layout, and what is an error.

tests/contract/test_one_device_randomness.py has modules, training and the other engines.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from helpers.in_time import in_time
from helpers.modules import Fn
from unisono import DataParallel
from unisono.primitives.split_sizes import unequal
from unisono.runtime.rng import operations_that_draw

Function = Callable[[torch.Tensor], Any]

ROWS = 8  # on two replicas 5 and 3, on three 3, 3 and 2


def on_replicas(function: Function, num_replicas: int = 2, **options: Any) -> DataParallel:
    return DataParallel(Fn(function), ["cpu"] * num_replicas, randomness="one_device", **options)


def drawn(model: Callable[..., Any], x: torch.Tensor, seed: int = 1) -> list[torch.Tensor]:
    """Return what a model draws from a seed, and the random state afterwards."""
    torch.manual_seed(seed)
    output = model(x)
    return [*(output if isinstance(output, tuple) else (output,)), torch.get_rng_state()]


def assert_as_one_device(function: Function, x: torch.Tensor, **options: Any) -> None:
    """Check that replicas draw the same numbers as one device, to the bit, and leave the same random state."""
    expected = drawn(Fn(function), x)
    assert not torch.equal(expected[0], drawn(Fn(function), x, seed=2)[0])
    for num_replicas in (2, 3):
        actual = drawn(on_replicas(function, num_replicas, **options), x)
        for mine, theirs in zip(actual, expected, strict=True):
            assert torch.equal(mine, theirs)


def some_rows(*shape: int) -> torch.Tensor:
    """Numbers between 0.1 and 0.9, each row with its own."""
    return torch.linspace(0.1, 0.9, ROWS * torch.Size(shape).numel()).view(ROWS, *shape)


# ---- every operation -----------------------------------------------------------------------------


def arguments_for(operation: Any, x: torch.Tensor) -> dict[str, Any]:
    """Return arguments with which an operation draws numbers for the rows of `x`, or as many in each replica."""
    name, tensors = operation._schema.name.removeprefix("aten::"), {"count": 50 * x, "noise": torch.empty_like(x)}
    dtype = torch.int64 if name in ("multinomial", "randperm") else x.dtype
    values = {
        "size": [len(x), 6],
        "n": 9,
        "num_samples": 3,
        "from": 2,
        "to": 90,
        "low": 3,
        "high": 70,
        "p": 0.3,
        "mean": 0.5,
        "std": 2.0,
        "training": True,
        "generator": None,
        # Some operations expect an `out` of the right size.
        "out": torch.empty_like(x) if name in ("normal", "rrelu_with_noise") else torch.empty(0, dtype=dtype),
        "self": x - 0.5 if name.startswith("rrelu") else 10 * x if name == "poisson" else x.clone(),
    }
    given: dict[str, Any] = {}
    for argument in operation._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" and argument.name == "high":  # the same for all rows
            given["high"] = torch.tensor(70)
        elif kind == "Tensor" and argument.name not in ("self", "out"):
            given[argument.name] = tensors.get(argument.name, x)
        elif argument.name == "training" or (argument.name in values and not argument.has_default_value()):
            given[argument.name] = values[argument.name]
    return given


OPERATIONS = [
    operation
    for operation, _ in operations_that_draw()
    if "names" not in [argument.name for argument in operation._schema.arguments]  # of named axes, in older releases
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name())
def test_every_operation_draws_as_one_device(operation: Any) -> None:
    """N12: those in place, those with `out`, those that take sizes, and those whose draws depend on values."""

    def draw(x: torch.Tensor) -> Any:
        given = arguments_for(operation, x)
        result = operation(**given)
        in_place = [a.name for a in operation._schema.arguments if a.alias_info and a.alias_info.is_write]
        written = [given[name] for name in in_place]
        for tensor in (*(result if isinstance(result, tuple) else (result,)), *written):
            assert tensor.size(0) == (9 if "randperm" in operation.name() else len(x))
        return (*(result if isinstance(result, tuple) else (result,)), *written)

    constant = {"out_dims": None} if "randperm" in operation.name() else {}
    assert_as_one_device(draw, some_rows(6), **constant)


def vmapped(function: Function, randomness: str, axis: int = 0) -> Function:
    return torch.vmap(function, axis, axis, randomness=randomness)


DRAWS: dict[str, Function] = {
    # which depend on values
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "multinomial with replacement": lambda x: torch.multinomial(x, 4, True),
    "bernoulli": torch.bernoulli,
    "normal without rows in one of two tensors": lambda x: torch.normal(x, some_rows(6)[0]),
    # inside a transform, whose draws have shapes with the axis over which it maps
    "vmap over rows": vmapped(F.dropout, "different"),
    "vmap over rows, the same for all": vmapped(F.dropout, "same"),
    "vmap over columns": vmapped(F.dropout, "different", 1),
    "vmap over columns, the same for all": vmapped(F.dropout, "same", 1),
    "vmap of vmap": vmapped(vmapped(torch.rand_like, "different"), "different"),
    "vmap of values": vmapped(torch.bernoulli, "different"),
    "vmap of a new tensor": vmapped(lambda x: x + torch.rand(3, 6), "different"),
    "grad": torch.func.grad(lambda x: F.dropout(x).square().sum()),
    "grad in vmap": vmapped(torch.func.grad(lambda x: F.dropout(x).square().sum()), "different"),
    # The axis of the rows is found from the shapes in replicas with different numbers of rows.
    "axis 0": lambda x: torch.rand(len(x), 5),
    "axis 1 behind one as long as the rows of a replica": lambda x: torch.rand(3, len(x)).T,
    "axis 1 behind one as long as the batch": lambda x: torch.rand(8, len(x)).T,
    "axis 0 before ones as long as the rows": lambda x: torch.rand(len(x), 3, 5),
    "the last axis": lambda x: torch.rand(2, 5, len(x)).movedim(-1, 0),
    "rows times heads": lambda x: torch.rand(4 * len(x), 3).view(len(x), 12),
    "one number a row": lambda x: torch.rand(len(x), 1, 1).expand(-1, 3, 3),
    "no rows": lambda x: torch.rand(5, 3).expand(len(x), 5, 3),
    "one number": lambda x: torch.rand(()).expand(len(x)),
    "rows expanded from one": lambda x: torch.poisson(torch.arange(1.0, 4).expand(len(x), 3)),
    "permutations of what is the same in all rows": lambda x: torch.randperm(5).expand(len(x), 5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_one_device(name: str) -> None:
    """N12"""
    assert_as_one_device(DRAWS[name], some_rows(6))


def test_a_tensor_that_is_expanded_only_in_the_replica_with_one_row() -> None:
    """N12: there, flattening the rows and an expanded axis copies nothing."""
    means: Function = lambda x: x[:, :1].expand(-1, 6).flatten()  # noqa: E731
    assert_as_one_device(lambda x: torch.normal(means(x), 1.0).view(len(x), 6), some_rows(2)[:3])


def test_what_draws_depend_on_keeps_its_gradient() -> None:
    """N12, N1: of the parameters of a gamma distribution, and through a random leaky ReLU."""

    def gradients(model: Callable[..., Any], weight: nn.Parameter) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = some_rows(6).requires_grad_()
        return list(torch.autograd.grad(model(x * weight).square().sum(), [x, weight]))

    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch._standard_gamma(x) + F.rrelu(x - 0.4, training=True) + F.rrelu_(2 * x - 1, training=True)

    weight = nn.Parameter(torch.ones(6))
    torch.testing.assert_close(gradients(on_replicas(draw, 3), weight), gradients(draw, weight))


# ---- memory layouts and axes ---------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "rows in the middle of memory": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "rows innermost in memory": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "with gaps": lambda x: torch.cat([x, x], -1)[..., : x.size(-1)],
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}
FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "bernoulli_": lambda x: x.bernoulli_(0.4),
    "exponential_": lambda x: x.exponential_(),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.4),
    "rand_like": torch.rand_like,
    "poisson": torch.poisson,
    "bernoulli": torch.bernoulli,
}


# Tensors that show an entry of memory more than once; operations in place cannot fill them.
EXPANDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:, None].expand(-1, 2, -1, -1, -1),
    "expanded, of another order in memory": lambda x: LAYOUTS["channels last"](x)[:, None].expand(-1, 2, -1, -1, -1),
    "expanded, with an axis of one entry": lambda x: x[:, :1].mT[..., None].expand(-1, -1, -1, -1, 3),
}


@pytest.mark.parametrize(
    ("layout", "fill"),
    [*itertools.product(LAYOUTS, FILLS), *itertools.product(EXPANDED, [f for f in FILLS if not f.endswith("_")])],
)
def test_kernels_fill_memory_in_the_order_of_one_device(layout: str, fill: str) -> None:
    """N12: they go along memory, in blocks where it has no gaps, so the whole tensor needs the layout of one device."""
    lay_out = {**LAYOUTS, **EXPANDED}[layout]
    assert_as_one_device(lambda x: FILLS[fill](lay_out(x)), some_rows(3, 4, 5))


def test_replicas_have_different_numbers_of_rows() -> None:
    """N12, S1: an even split gives one row of the last replica to the first."""
    assert unequal([4, 4]) == [5, 3]
    assert unequal([0, 2, 2, 2, 0]) == [0, 3, 2, 1, 0]
    assert unequal([1, 1]) == [2, 0]
    assert unequal([3, 3, 2]) == [3, 3, 2]
    assert unequal([7, 0]) == [7, 0]


# ---- what is an error ----------------------------------------------------------------------------


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def packed(x: torch.Tensor) -> torch.Tensor:
    sequences = pack_padded_sequence(x[:, None].expand(-1, 4, -1), [4] * len(x), batch_first=True)
    return nn.LSTM(2, 2, 2, dropout=0.5)(sequences)[1][0]


ERRORS: dict[str, tuple[Function, str]] = {
    "two axes": (lambda x: torch.rand(len(x), len(x)), r"rand cannot be .* \(5, 5\) for 5 rows, \(3, 3\) for 3 rows"),
    "another number": (lambda x: torch.randn(len(x) + 1, 2), r"randn cannot .* no axis of size .* \(6, 2\) for 5 rows"),
    "other numbers of axes": (lambda x: torch.rand([2] * len(x)), "rand cannot be drawn"),
    "half of the rows": (lambda x: F.dropout(x[: len(x) // 2]), "bernoulli_ cannot be drawn"),
    "a permutation of rows": (lambda x: torch.randperm(len(x)), "randperm cannot be drawn .* depend on the other rows"),
    "a choice of rows": (lambda x: torch.multinomial(x[:, 0], 2), "multinomial cannot .* depend on the other rows"),
    "rows on two axes": (
        lambda x: torch.normal(x[:, :1], x[:, 0]),
        "normal cannot be drawn .* depend on the other rows",
    ),
    "sparse": (lambda x: torch.rand_like(x.to_sparse()), "a sparse or nested tensor"),
    "a subclass": (
        lambda x: torch.rand_like(x.as_subclass(Subclass)),
        "it is given a Subclass, a subclass of Tensor"
        if "generator" in torch.ops.aten.rand_like.overloads()
        else "a custom operator, a tensor subclass",  # an older torch, in which it cannot be caught
    ),
    "a row of the batch": (
        lambda x: torch.randint(len(x), (4,)),
        "randint cannot be drawn .* different numbers: high=5, 3",
    ),
    "seeds, which Inductor's kernels draw like this": (
        lambda x: torch.randint(-(2**63), 2**63 - 1, (2,)).expand(len(x), 2),
        r"randint cannot be drawn .* torch\.compile has compiled draws",
    ),
    "a generator": (
        lambda x: torch.rand(len(x), generator=torch.Generator().manual_seed(1)),
        "rand cannot be drawn .* a generator of its own",
    ),
    "forward mode": (
        lambda x: torch.func.jvp(F.dropout, (x,), (x,))[1],
        "bernoulli cannot be drawn .* forward-mode differentiation",
    ),
    "packed sequences": (packed, "dropout of lstm cannot be drawn .* packed sequences"),
    "one more": (
        lambda x: torch.stack([torch.rand(len(x)) for _ in range(len(x))]),
        r"different ways: replica 0 called rand\.generator, replica 1 called no further one\. Let all replicas draw",
    ),
    "another thread": (
        lambda x: in_time(lambda: [torch.rand(3)]) and x,
        "torch's random generator was drawn from while the replicas of Fn ran",
    ),
}


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_told_is_an_error(name: str) -> None:
    """N12, R13: it names the operation, and leaves the random state as it was."""
    function, message = ERRORS[name]
    model = on_replicas(function)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=message) as caught:
        model(some_rows(2))
    assert 'randomness="one_device"' in str(caught.value)
    assert 'randomness="per_replica"' in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)
    assert_as_one_device(F.dropout, some_rows(2))


def test_a_backward_in_which_replicas_do_not_run_together_draws_nothing() -> None:
    """N12, N3: batched gradients run all replicas' backward in one call, where a draw cannot tell whose it is."""
    weight, x = nn.Parameter(torch.ones(2)), some_rows(2).requires_grad_()
    layer: Function = lambda x: F.dropout(x * weight)  # noqa: E731
    grads = torch.eye(x.numel()).view(-1, *x.shape)
    output = on_replicas(layer)(x)
    (found,) = torch.autograd.grad(output, x, grads, is_grads_batched=True)
    assert torch.equal(found.view(x.numel(), -1), torch.diag((output / x).flatten()))
    output = on_replicas(lambda x: checkpoint(layer, x, use_reentrant=False))(x)
    with pytest.raises(RuntimeError, match="bernoulli_ was called where the replicas do not run at the same"):
        torch.autograd.grad(output, x, grads, is_grads_batched=True)
