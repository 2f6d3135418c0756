"""Batch norm over all replicas by the function `data_parallel`, by kernels, and in the plain composition.

tests/contract has plain replicas.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono
from helpers.batch_norm_kernels import use_kernels
from helpers.batch_norms import (
    BATCH_NORMS,
    CheckpointedBatchNorm,
    assert_near,
)
from helpers.in_time import in_time
from helpers.losses import fresh
from unisono import DataParallel, data_parallel
from unisono.runtime.exchange import Exchange, taking_part
from unisono.sync_batch_norm.over_replicas import BatchNormOverReplicas

pytestmark = pytest.mark.usefixtures("float64")

Wrap = Callable[[nn.Module, int], nn.Module]


class ByFunction(nn.Module):
    """A module that is run by `data_parallel`."""

    def __init__(self, module: nn.Module, devices: list[str]) -> None:
        super().__init__()
        self.module, self.devices = module, devices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return data_parallel(self.module, x, self.devices, sync_batch_norm=True)


@pytest.fixture(params=["function", "kernels"])
def wrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wrap:
    """Wrap a copy of a module, synchronised, for a number of replicas."""
    if request.param == "function":
        return lambda module, n: ByFunction(copy.deepcopy(module), ["cpu"] * n)
    use_kernels(monkeypatch)
    return lambda module, n: DataParallel(copy.deepcopy(module), ["cpu"] * n, sync_batch_norm=True)


Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def with_second_derivatives(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x)
    (gradient,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    (output.cpu().sin().sum() + gradient.pow(2).sum() / 100).backward()
    return output


def assert_like_plain(
    model: nn.Module, plain: nn.Module, x: torch.Tensor, step: Call = with_second_derivatives
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
    """N5, R13"""
    plain = CheckpointedBatchNorm(reentrant)
    model = wrap(plain, 3)
    x = torch.randn(7, 5)
    for _ in range(2):
        assert_like_plain(model, plain, x, step_of_cubes)
    model.module.load_state_dict(plain.state_dict())
    with torch.no_grad():  # where nothing will be run again
        torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("verb", ["replicate", "scatter", "parallel_apply", "gather"])
def test_a_verb_of_ones_own(verb: str) -> None:
    """A9, N5: replicas that are one graph do not wait for each other; a batch norm that need not wait is fine."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = DataParallel(copy.deepcopy(plain), ["cpu"] * 2, sync_batch_norm=True)
    setattr(model, verb, unisono.scatter_kwargs if verb == "scatter" else getattr(unisono, verb))
    with pytest.raises(RuntimeError, match="a subclass that overrides replicate, scatter, parallel_apply or gather"):
        in_time(lambda: model(torch.randn(4, 2)))
    x = torch.randn(5, 2)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


def test_a_hook_that_keeps_outputs_by_their_module() -> None:
    """R9, N5: its replicas would be one graph, so the first device runs the batch."""
    plain, kept = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), {}

    model = DataParallel(copy.deepcopy(plain), ["cpu"] * 2, sync_batch_norm=True)
    layer = model.module[1]

    def keep(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        kept[layer] = output

    layer.register_forward_hook(keep)
    assert_like_plain(model, plain, torch.randn(6, 2), step_of_cubes)
    assert len(kept[layer]) == 6
    with pytest.raises(ValueError, match="different numbers of rows"):
        model(torch.randn(4, 2), torch.randn(3, 2))


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
