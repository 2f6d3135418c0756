"""Synchronised batch norm has the numbers of one device, whatever calls it; see test_higher_order.py too."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.batch_norms import (
    BATCH_NORMS,
    ResidualBlock,
    assert_gradients_and_buffers_near,
    changed_by_a_step,
    compare_with_plain,
)
from helpers.comparisons import assert_same, assert_same_state, assert_unchanged, twins
from helpers.contract import DEVICES, Wrap, at_one_place, each_with, in_time, on_the_cpu, over_places
from helpers.losses import fresh, loss_of
from helpers.modules import Calls
from helpers.rounding import assert_as_accurate

# What replicas exchange differs in these: the number and the order of the exchanges, and backwards within backwards.
EXCHANGES = [
    "1d", "2d", "momentum=None", "functional", "used twice", "residual block", "checkpoint, reentrant",
    "checkpoint, non-reentrant", "differentiates inside",
]  # fmt: skip


@over_places(
    "name, num_replicas, rows",
    [*each_with(BATCH_NORMS, [(2, 7), (4, 6)]), *each_with(["1d", "residual block"], [(4, 4), (8, 9)])],
    separate=each_with(EXCHANGES, [(4, 6)]),
)
def test_synchronised_batch_norm(wrap: Wrap, name: str, num_replicas: int, rows: int) -> None:
    """N5: outputs, gradients and running statistics are the plain module's, in training and after it."""
    make_model, make_batch = BATCH_NORMS[name]
    plain, model = twins(wrap, make_model(), num_replicas, sync_batch_norm=True)
    # Numbers far from 0 have fewer digits behind the point.
    tolerance = 1e-9 if name == "means far from 0" else 1e-12
    for _ in range(2):
        compare_with_plain(model, plain, make_batch(rows), tolerance)
    for module in (plain, model):
        module.eval()
    compare_with_plain(model, plain, make_batch(rows), tolerance)


@pytest.mark.parametrize("shares", ["even", [3, 1, 2], [1, 0, 1]], ids=str)
def test_synchronised_batch_norm_with_shares(wrap: Wrap, shares: Any) -> None:
    """N5, S2: every row counts the same, however many a replica has; idle replicas count nothing."""
    plain, model = twins(wrap, ResidualBlock(), 3, shares=shares, sync_batch_norm=True)
    for rows in (7, 2, 5, 1):
        compare_with_plain(model, plain, torch.randn(rows, 2, 4, 4))


@over_places("num_replicas", [(2,), (3,), (8,)], separate=[(3,)])
def test_synchronised_batch_norm_in_single_precision(wrap: Wrap, num_replicas: int) -> None:
    """N5: as near to the result in double precision as the plain module is; NCHW and channels last."""
    exact = ResidualBlock(bias=False)  # the gradient of a bias before a batch norm is nothing but rounding
    plain, model = twins(wrap, copy.deepcopy(exact).float(), num_replicas, sync_batch_norm=True)
    for scale, offset, memory_format in ((3, 1, torch.contiguous_format), (1, 0, torch.channels_last)):
        for module in (exact, plain, model):
            module.to(memory_format=memory_format)
        x = torch.randn(17, 2, 6, 6, dtype=torch.float32).to(memory_format=memory_format) * scale + offset
        exactly = changed_by_a_step(exact, x.double())
        plainly, ours = (changed_by_a_step(module, x) for module in (plain, model))
        for name, tensor in exactly.items():
            assert_as_accurate(ours[name], plainly[name], tensor, num_terms=17 * 6 * 6, what=name)
    assert model(x).stride() == plain(x).stride()


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=["autocast", "all in bfloat16"])
def test_synchronised_batch_norm_in_half_precision(wrap: Wrap, parameters: torch.dtype) -> None:
    """N5, R14: as near to the result in double precision as the plain module is."""
    exact = ResidualBlock(bias=False)
    plain, model = twins(wrap, copy.deepcopy(exact).to(parameters), 3, sync_batch_norm=True)
    x, results = torch.randn(17, 2, 6, 6), []
    for module, dtype in ((exact, torch.float64), (plain, parameters), (model, parameters)):
        with torch.autocast(torch.device(DEVICES[0]).type, torch.bfloat16, enabled=dtype is torch.float32):
            output = module(x.to(dtype))
        assert output.dtype == (torch.float64 if module is exact else torch.bfloat16)
        loss_of(output.double()).backward()
        found = ([output], [p.grad for p in module.parameters()], module.buffers())
        results.append([torch.cat([t.detach().double().flatten() for t in tensors]) for tensors in found])
    assert {b.dtype for b in model.buffers()} == {parameters, torch.int64}
    for exactly, plainly, mine in zip(*results, strict=True):
        assert (mine - exactly).norm() <= 2 * (plainly - exactly).norm() + 0.01 * exactly.norm()


# ---- few rows, and none --------------------------------------------------------------------------


def test_one_value_a_channel(wrap: Wrap) -> None:
    """N5, N11, F1: raises what the plain module raises where the whole batch has one; a replica may. If batch norm is
    each replica's own, it may not, and a note says what to do about it."""
    plain, model = twins(wrap, nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), 3, sync_batch_norm=True)
    compare_with_plain(model, plain, torch.randn(3, 5))
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as expected:
        plain(torch.randn(1, 5))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        model(torch.randn(1, 5))
    assert str(caught.value) == str(expected.value)
    assert_unchanged(model.module, before)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        wrap(plain, sync_batch_norm=False)(torch.randn(3, 5))
    assert any("sync_batch_norm=True" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("in_eval", [False, True])
def test_a_forward_of_one_row_before_one_of_all_replicas(wrap: Wrap, in_eval: bool) -> None:
    """N5, N7: one replica runs torch's batch norm, which saves the running statistics for backward. The next forward
    counted as a write into them, and backward raised; torch's own batch norm does not count."""
    net = nn.Sequential(nn.Unflatten(1, (3, 4)), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1))
    plain, model = twins(wrap, net, sync_batch_norm=True)
    few, many = torch.randn(1, 12), torch.randn(4, 12)
    for module in (plain, model):
        module.train(not in_eval)
        outputs = [module(few)]
        module.train()
        outputs.append(module(many))
        loss_of(outputs).backward()
    assert_gradients_and_buffers_near(model.module, plain)


def test_one_value_a_channel_where_rows_are_selected(wrap: Wrap) -> None:
    """N5, S9: forward may leave a replica no rows at all, or the whole batch one, or none; and there may be none."""

    class Selects(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[x[:, 0] > 0])

    plain, model = twins(wrap, Selects(2), 3, sync_batch_norm=True, out_dims=0)
    x = torch.arange(18.0).view(9, 2).sin()
    for smallest in (-2.0, 4.0, 7.0):
        compare_with_plain(model, plain, x + torch.arange(9.0)[:, None] - smallest)
    with pytest.raises(ValueError, match=r"more than 1 value per channel .* input size torch.Size\(\[1, 2\]\)"):
        in_time(lambda: model(torch.tensor([[-1.0, 1.0], [-1.0, 1.0], [1.0, 1.0]])))
    for x in (-torch.ones(3, 2), torch.ones(0, 2)):
        assert plain(x).shape == in_time(lambda x=x: model(x)).shape == (0, 2)
    assert_same_state(model.module, plain)


# ---- which calls see the rows of all replicas ----------------------------------------------------

# What a replica's forward does with its rows and a batch norm.
Function = Callable[[torch.Tensor, nn.Module], Any]


def over_replicas(wrap: Wrap, function: Function, x: torch.Tensor) -> Any:
    """Call a function as forward of two replicas; return what is gathered."""
    module = Calls(lambda module, x: function(x, module.norm), norm=nn.BatchNorm1d(3))
    model = wrap(module, 2, sync_batch_norm=True)
    return in_time(lambda: model(x))


def batch_norm(x: torch.Tensor, _: nn.Module | None = None, **options: Any) -> torch.Tensor:
    return F.batch_norm(x, None, None, training=True, **options)


BACKWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "Tensor.backward": lambda loss, leaf: loss.backward(),
    "autograd.backward": lambda loss, leaf: torch.autograd.backward([loss.view(1)], [torch.ones_like(loss.view(1))]),
    "autograd.grad": lambda loss, leaf: setattr(leaf, "grad", torch.autograd.grad([loss], [leaf])[0]),
    "of some inputs": lambda loss, leaf: loss.backward(inputs=[leaf]),
    "of named inputs": lambda loss, leaf: loss.backward(inputs={"leaf": leaf}),
}


def backward_inside(x: torch.Tensor, norm: nn.Module, how: str, reentrant: bool) -> torch.Tensor | None:
    leaf = fresh(x)
    BACKWARDS[how](checkpoint(norm, leaf, use_reentrant=reentrant).pow(3).sum(), leaf)
    return leaf.grad


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "vjp": lambda function, x: torch.func.vjp(function, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda function, x: torch.func.jacrev(lambda x: function(x).sum(0))(x).sum(0),
    "vmap of jacrev": lambda function, x: torch.vmap(torch.func.jacrev(function))(x).sum(1),
}


def transform_beside(x: torch.Tensor, norm: nn.Module, name: str) -> torch.Tensor:
    return TRANSFORMS[name](lambda x: x.pow(3), norm(x).detach())


CALLS: dict[str, Function] = {
    # However it is called: a function mode is off while a torch function runs, such as backward.
    **{how: partial(backward_inside, how=how, reentrant=False) for how in BACKWARDS},
    # torch refuses the others
    **{f"{how}, reentrant": partial(backward_inside, how=how, reentrant=True) for how in [*BACKWARDS][:2]},
    # A backward in forward is run by gradient edges, so that it sees batch norms. Tensors of a transform have none,
    # also after it: vjp and jacrev returned zeros, jacrev under vmap raised an AttributeError.
    **{name: partial(transform_beside, name=name) for name in TRANSFORMS},
}
MISTAKES: dict[str, Function] = {
    "one axis": lambda x, _: batch_norm(x[0]),
    "a weight of another length": lambda x, _: batch_norm(x, weight=torch.ones(4)),
    "a backward of what needs no gradient": lambda x, _: torch.ones(2).sum().backward(),
}
# Newer releases of torch refuse it; older ones compute with it, and then the rows of all replicas count.
EITHER: dict[str, Function] = {"an eps of 0": partial(batch_norm, eps=0.0)}
ALL = {**CALLS, **MISTAKES, **EITHER}


@at_one_place
@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(name, marks=on_the_cpu) for name in [*MISTAKES, *EITHER])])
def test_a_call_is_that_of_all_rows(wrap: Wrap, name: str) -> None:
    """N5: or raises what torch raises."""
    x = torch.randn(6, 3)
    try:
        expected = ALL[name](x, nn.BatchNorm1d(3))
    except (ValueError, RuntimeError, IndexError) as error:
        if name == "of named inputs":
            pytest.skip("needs a torch whose backward takes a dict of inputs")
        assert name in {**MISTAKES, **EITHER}
        with pytest.raises(type(error), match=re.escape(str(error))):
            over_replicas(wrap, ALL[name], x)
    else:
        assert name not in MISTAKES
        assert_same(over_replicas(wrap, ALL[name], x), expected)


@on_the_cpu
def test_transforms_inside_a_replica_are_refused(wrap: Wrap) -> None:
    """N5"""
    with pytest.raises(RuntimeError, match=r"inside a torch.func transform in forward"):
        over_replicas(wrap, lambda x, _: torch.vmap(batch_norm)(torch.randn(4, 5, 3)), torch.zeros(4, 3))


def saved_bytes(x: torch.Tensor, norm: nn.Module) -> int:
    held: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in norm.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = norm(x.detach().requires_grad_() * 1)
    del output
    return sum(held.values())


@on_the_cpu
@pytest.mark.filterwarnings("ignore:output is a number in each replica:UserWarning")
def test_the_graph_holds_no_more_than_torchs_own(wrap: Wrap) -> None:
    """N5: the input, and some numbers a channel."""
    x = torch.randn(8, 3, 256)
    of_torch = [saved_bytes(shard, nn.BatchNorm1d(3)) for shard in x.tensor_split(2)]
    for mine, theirs in zip(over_replicas(wrap, saved_bytes, x), of_torch, strict=True):
        assert mine <= theirs + 100


# ---- whatever surrounds it -----------------------------------------------------------------------


@at_one_place
def test_synchronised_batch_norm_changes_replicas_only(wrap: Wrap) -> None:
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


def test_synchronised_batch_norm_gives_equal_bits(wrap: Wrap) -> None:
    """N1, N5: whichever replica is first at a batch norm."""
    model = wrap(ResidualBlock().float(), 4, sync_batch_norm=True)
    x = torch.randn(9, 2, 4, 4, dtype=torch.float32)
    state = copy.deepcopy(model.module.state_dict())
    seen = []
    for _ in range(30):
        model.module.load_state_dict(state)
        model.zero_grad()
        seen.append(changed_by_a_step(model, x))
    assert all(torch.equal(other[name], tensor) for other in seen for name, tensor in seen[0].items())


def test_batched_gradients_of_synchronised_batch_norm(wrap: Wrap) -> None:
    """N5: one backward is run for many gradients, which is an error that says what to do."""
    _, model = twins(wrap, nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), sync_batch_norm=True)
    x, vectors = torch.randn(6, 5), torch.randn(4, 6, 3)

    def batched(model: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x), weight, vectors, is_grads_batched=True)[0]

    with pytest.raises(RuntimeError, match="Compute gradients one by one"):
        in_time(lambda: batched(model, model.module[0].weight))
    compare_with_plain(model, copy.deepcopy(model.module), torch.randn(6, 5))
