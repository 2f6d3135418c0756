"""Batch norm over all replicas in the plain composition, where they are one graph, and by kernels.

tests/contract has plain replicas.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
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
from unisono import DataParallel
from unisono.runtime.exchange import Exchange, taking_part
from unisono.sync_batch_norm.function_mode import BatchNormOverReplicas

pytestmark = pytest.mark.usefixtures("float64")

Wrap = Callable[[nn.Module, int], DataParallel]


@pytest.fixture(params=["composition", "kernels"])
def wrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Wrap a copy of a module, synchronised, for a number of replicas."""
    if request.param == "kernels":
        use_kernels(monkeypatch)
    return composed if request.param == "composition" else with_kernels


def composed(module: nn.Module, n: int) -> DataParallel:
    return Composed(copy.deepcopy(module), ["cpu"] * n, sync_batch_norm=True)


def with_kernels(module: nn.Module, n: int) -> DataParallel:
    return DataParallel(copy.deepcopy(module), ["cpu"] * n, sync_batch_norm=True)


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
def test_steps(wrap: Wrap, case: str) -> None:
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
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside(wrap: Wrap, reentrant: bool) -> None:
    """N5, R13: right, or refused: in one graph a checkpoint recomputes a batch norm when the others do not run."""
    plain = CheckpointedBatchNorm(reentrant)
    model = wrap(plain, 3)
    x = torch.randn(7, 5)
    if wrap is not composed:
        for _ in range(2):
            assert_like_plain(model, plain, x, step_of_cubes)
    else:
        with pytest.raises(RuntimeError, match="inside an activation checkpoint, in a subclass"):
            in_time(lambda: model(x))
    model.module.load_state_dict(plain.state_dict())
    with torch.no_grad():  # where nothing will be run again
        torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-12, atol=1e-12)


def differentiated(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(module.norm(x).pow(3).sum(), x, create_graph=True)[0]


def test_a_derivative_in_forward_is_refused_in_one_graph() -> None:
    """N5, R13: there a replica has its own part of it only."""
    model = composed(Calls(differentiated, norm=nn.BatchNorm1d(2)), 2)
    with pytest.raises(RuntimeError, match="was differentiated inside forward"):
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
    with pytest.raises(RuntimeError, match="sync_batch_norm=True with an overridden parallel_apply"):
        in_time(lambda: model(torch.randn(4, 2)))


def test_a_replicate_of_ones_own() -> None:
    """A9, N5: replicas may be anything that can be called."""

    class Functions(DataParallel):
        def replicate(self, module: nn.Module, device_ids: Any) -> list[Any]:
            return [lambda x, replica=replica: replica(x) for replica in super().replicate(module, device_ids)]

    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = Functions(copy.deepcopy(plain), ["cpu"] * 3, sync_batch_norm=True)
    assert_like_plain(model, plain, torch.randn(8, 2))


def test_a_backward_in_the_thread_of_an_accelerator() -> None:
    """N5, A6: torch runs the nodes there, and the thread of the replica waits."""
    norm, x = nn.BatchNorm1d(3), torch.randn(6, 3)
    over_replicas = BatchNormOverReplicas([norm])
    leaf, expected = fresh(x), fresh(x)
    with over_replicas.one_pass() as in_replica, taking_part(Exchange(1), 0), in_replica(0):
        output = norm(leaf)
    with ThreadPoolExecutor(1) as thread:

        def backward() -> None:
            thread.submit(lambda: output.pow(3).sum().backward()).result()

        with over_replicas.one_pass() as in_replica, taking_part(Exchange(1), 0), in_replica(0):
            backward()
        nn.BatchNorm1d(3)(expected).pow(3).sum().backward()
        torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-12, atol=1e-12)
        with over_replicas.one_pass() as in_replica, taking_part(Exchange(1), 0), in_replica(0):
            output = norm(leaf)
        with pytest.raises(RuntimeError, match="which do not run now"):
            backward()
