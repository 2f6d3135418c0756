"""Batch norm over all replicas in ways of running replicas that make one graph; tests/contract has the others.

They are the plain composition (a verb is overridden) and accelerators, where one call runs backward of all replicas'
graphs as one; simulated devices stand in for them.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.batch_norm_kernels import use_kernels
from helpers.batch_norms import (
    BATCH_NORMS,
    CheckpointedBatchNorm,
    assert_near,
)
from helpers.in_time import in_time
from helpers.losses import fresh
from helpers.modules import Calls, Composed
from helpers.one_graph import simulated_accelerators_with_one_graph
from unisono import DataParallel
from unisono.runtime.exchange import Exchange, taking_part
from unisono.sync_batch_norm.function_mode import BackwardMode, BatchNormOverReplicas

pytestmark = pytest.mark.usefixtures("float64")

Wrap = Callable[[nn.Module, int], DataParallel]


@pytest.fixture(params=["composition", "accelerators", "accelerators with kernels"])
def wrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrap]:
    """Wrap a copy of a module, synchronised, for a number of replicas, whose graphs are one."""
    way = request.param
    cls = Composed if way == "composition" else DataParallel
    devices = ["cpu"] if way == "composition" else request.getfixturevalue("sim")
    accelerators = way != "composition"

    def make(module: nn.Module, n: int) -> DataParallel:
        ids = [devices[i % len(devices)] for i in range(n)]
        return cls(copy.deepcopy(module).to(ids[0]), ids, sync_batch_norm=True)

    with simulated_accelerators_with_one_graph(monkeypatch) if accelerators else contextlib.nullcontext():
        if way == "accelerators with kernels":
            use_kernels(monkeypatch)
        yield make


Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def with_second_derivatives(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    (gradient,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    (output.cpu().sin().sum() + gradient.pow(2).sum() / 100).backward()
    return output


def assert_like_plain(
    model: DataParallel, plain: nn.Module, x: torch.Tensor, step: Call = with_second_derivatives
) -> None:
    """Compare output, gradients and buffers after a step."""
    results = []
    for module in (plain, model):
        module.zero_grad()
        inputs = x.clone().requires_grad_()
        output = in_time(lambda module=module, inputs=inputs: step(module, inputs))
        tensors = [output, inputs.grad, *(p.grad for p in module.parameters()), *module.buffers()]
        results.append([tensor if tensor is None else tensor.detach().cpu() for tensor in tensors])
    for mine, theirs in zip(*reversed(results), strict=True):
        assert_near(mine, theirs, 1e-11)


def step_of_cubes(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    output.pow(3).sum().backward()
    return output


def in_a_checkpoint(reentrant: bool) -> Call:
    return lambda module, x: step_of_cubes(lambda x: checkpoint(module, x, use_reentrant=reentrant), x)


STEPS: dict[str, tuple[str, Call]] = {
    **{name: (name, with_second_derivatives) for name in ("residual block", "used twice", "functional")},
    "in a reentrant checkpoint": ("1d", in_a_checkpoint(True)),
    "in a non-reentrant checkpoint": ("1d", in_a_checkpoint(False)),
}


@pytest.mark.parametrize("case", STEPS)
def test_one_graph(wrap: Wrap, case: str) -> None:
    """N3, N5, R14: as the plain module, first and second derivatives, several steps; a replica without rows."""
    name, step = STEPS[case]
    make_model, make_batch = BATCH_NORMS[name]
    plain = make_model()
    model = wrap(plain, 4)
    for rows in (7, 6):
        assert_like_plain(model, plain, make_batch(rows), step)
    for module in (plain, model):
        module.eval()
    assert_like_plain(model, plain, make_batch(7), step)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
# A checkpoint puts autocast back as it was: off, about which older releases of torch warn on a simulated device.
@pytest.mark.filterwarnings("ignore:In sim autocast, but the target dtype:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_one_graph_and_checkpoints_inside(wrap: Wrap, reentrant: bool, request: pytest.FixtureRequest) -> None:
    """N5, R13: right, or refused: a checkpoint may recompute a batch norm when the other replicas do not run."""
    way = request.node.callspec.params["wrap"]
    plain = CheckpointedBatchNorm(reentrant)
    model = wrap(plain, 3)
    x = torch.randn(7, 5)
    if way != "composition" and not reentrant:
        for _ in range(2):
            assert_like_plain(model, plain, x, step_of_cubes)
    else:
        with pytest.raises(RuntimeError, match="inside an activation checkpoint: on accelerators"):
            in_time(lambda: model(x))
    model.module.load_state_dict(plain.state_dict())
    with torch.no_grad():  # where nothing will be run again
        torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-12, atol=1e-12)


def differentiated(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(module.norm(x).pow(3).sum(), x, create_graph=True)[0]


def without_tensors(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: F.batch_norm(x, None, None, training=True), module.linear(x), use_reentrant=False)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (differentiated, "was differentiated inside forward"),
        (without_tensors, "the batch norm has to have a tensor of its own"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(wrap: Wrap, forward: Callable[..., Any], message: str) -> None:
    """N5, R13: of a derivative in forward a replica has its own part only; what a checkpoint recomputes of a batch norm
    without tensors could not be matched with forward."""
    model = wrap(Calls(forward, norm=nn.BatchNorm1d(2), linear=nn.Linear(2, 2)), 2)
    with pytest.raises(RuntimeError, match=message):
        in_time(lambda: model(torch.randn(6, 2)))


@pytest.mark.parametrize("how", ["subclass", "attribute"])
def test_a_parallel_apply_of_ones_own_is_refused(how: str) -> None:
    """A9, N5: it may run replicas one after the other, and the first would wait for ever."""

    def one_by_one(replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        return [replica(*args, **kw) for replica, args, kw in zip(replicas, inputs, kwargs, strict=True)]

    cls = type("OneByOne", (DataParallel,), {"parallel_apply": staticmethod(one_by_one)})
    model = (cls if how == "subclass" else DataParallel)(nn.BatchNorm1d(2), ["cpu"] * 2, sync_batch_norm=True)
    if how == "attribute":
        model.parallel_apply = one_by_one
    with pytest.raises(RuntimeError, match="sync_batch_norm=True with a parallel_apply of your own"):
        in_time(lambda: model(torch.randn(4, 2)))


def test_a_replicate_of_ones_own() -> None:
    """A9, N5: replicas may be anything that can be called."""

    class Functions(DataParallel):
        def replicate(self, module: nn.Module, device_ids: Any) -> list[Any]:
            return [lambda x, replica=replica: replica(x) for replica in super().replicate(module, device_ids)]

    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = Functions(copy.deepcopy(plain), ["cpu"] * 3, sync_batch_norm=True)
    assert_like_plain(model, plain, torch.randn(8, 2))


def test_a_backward_of_one_replica_in_another_thread() -> None:
    """N5, A6: torch runs it in the accelerator's thread where the caller's loss is on the CPU."""
    norm, x = nn.BatchNorm1d(3), torch.randn(6, 3)
    over_replicas = BatchNormOverReplicas([norm], BackwardMode.PER_REPLICA)
    leaf, expected = fresh(x), fresh(x)
    with taking_part(Exchange(1), 0), over_replicas.in_replica(0, tracked=True):
        output = norm(leaf)
    with over_replicas.single_replica(Exchange), ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: output.pow(3).sum().backward()).result()
    nn.BatchNorm1d(3)(expected).pow(3).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-12, atol=1e-12)
    others = BatchNormOverReplicas([norm], BackwardMode.PER_REPLICA)
    with taking_part(Exchange(1), 0), others.in_replica(0, tracked=True):
        output = norm(fresh(x))
    with pytest.raises(RuntimeError, match="they do not run at the same time"):
        output.sum().backward()
