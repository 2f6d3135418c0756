"""Which calls see the rows of all replicas: batch norms in forward, and those of a backward inside forward."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_same
from helpers.contract import Wrap, in_time, on_the_cpu, over_engines
from helpers.losses import fresh
from helpers.modules import Calls

pytestmark = on_the_cpu

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
    "autograd.backward": lambda loss, leaf: torch.autograd.backward([loss.view(1)], [torch.ones(1)]),
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
IN_PROCESSES = ["Tensor.backward", *TRANSFORMS, *MISTAKES, *EITHER]


@over_engines("name", [(name,) for name in ALL], processes=[(name,) for name in IN_PROCESSES], gloo=[])
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


def test_transforms_inside_a_replica_are_refused(wrap: Wrap) -> None:
    """N5"""
    with pytest.raises(RuntimeError, match=r"inside a torch.func transform that forward applies"):
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


def test_the_graph_holds_no_more_than_torchs_own(wrap: Wrap) -> None:
    """N5: the input, and some numbers a channel."""
    x = torch.randn(8, 3, 256)
    of_torch = [saved_bytes(shard, nn.BatchNorm1d(3)) for shard in x.tensor_split(2)]
    for mine, theirs in zip(over_replicas(wrap, saved_bytes, x), of_torch, strict=True):
        assert mine <= theirs + 100
