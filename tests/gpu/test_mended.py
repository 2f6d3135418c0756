"""Defects that were found by reading, and mended without a GPU: whether the mends hold on one.

Run by `make gpu-check`. Where the same code runs on the CPU, `make test` runs it there.
"""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unisono
from helpers import batch_norm_kernels as reference
from helpers.accelerators import FIRST, on_accelerator, on_cuda, on_shared_accelerator, on_two_gpus
from helpers.comparisons import assert_same_gradients
from helpers.modules import Calls
from helpers.ranks import run_ranks
from helpers.twins import rows_of, twins
from unisono import DataParallel
from unisono.runtime import devices


@pytest.fixture(params=["cpu", pytest.param(FIRST, marks=on_accelerator, id="accelerator")])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


# ---- batch norm ------------------------------------------------------------------------------------


@on_accelerator
@pytest.mark.skipif(
    FIRST != "none" and not devices.has_batch_norm_kernels(torch.device(FIRST)),
    reason="no accelerator that has the kernels: run `make gpu-check` on a machine with one",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 6), (8, 6, 5, 7), (8, 6, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_the_kernels_compute_what_their_reference_does(dtype: torch.dtype, shape: tuple[int, ...], last: bool) -> None:
    """N5: so the tests that run without a GPU, which use the reference, say something about one."""
    there = torch.device(FIRST)
    x, grad = (torch.randn(shape, dtype=dtype, device=there) for _ in range(2))
    if last and len(shape) > 2:
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        x, grad = x.to(memory_format=layout), grad.to(memory_format=layout)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    weight, bias = (torch.rand(6, dtype=wide, device=there) for _ in range(2))
    counts = torch.tensor([30.0, 1e-30, 70.0], dtype=wide, device=there)
    means, inverse_stds = torch.randn(3, 6, dtype=wide, device=there), torch.rand(3, 6, dtype=wide, device=there) + 0.5
    means[1], inverse_stds[1] = 0, 1
    found = []
    for module in (torch, reference):
        running = torch.zeros(6, dtype=wide, device=there), torch.ones(6, dtype=wide, device=there)
        mean, inverse_std = module.batch_norm_stats(x, 1e-5)
        sums = module.batch_norm_backward_reduce(grad, x, mean, inverse_std, weight, True, True, False)
        total = torch.tensor([100], dtype=torch.int32, device=there)
        gathered = module.batch_norm_gather_stats_with_counts(means, means, inverse_stds, *running, 0.1, 1e-5, counts)
        found.append(
            [
                mean,
                inverse_std,
                *sums[:3],
                *gathered,
                *running,
                module.batch_norm_elemt(x, weight, bias, mean, inverse_std, 1e-5),
                module.batch_norm_elemt(x, None, None, mean, inverse_std, 1e-5),
                module.batch_norm_backward_elemt(grad, x, mean, inverse_std, weight, sums[0], sums[1], total),
                module.batch_norm_backward_elemt(grad, x, mean, inverse_std, None, sums[0], sums[1], total),
            ]
        )
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2}[dtype]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )


@on_two_gpus
def test_no_step_waits_with_synchronised_batch_norm() -> None:
    """N5, S11: torch raises an error for whatever waits for the GPU."""
    model = DataParallel(net().to("cuda:0"), ["cuda:0", "cuda:1"], sync_batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    x = torch.randn(16, 2, 8, 8, device="cuda:0")
    try:
        for step in range(4):
            torch.cuda.set_sync_debug_mode("default" if step == 0 else "error")
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_with_outputs_on_the_host(rank: int, device: str) -> None:
    sizes = [3, 5]
    group = torch.distributed.group.WORLD
    options: dict[str, Any] = {"output_device": "cpu", "sync_batch_norm": True, "process_group": group}
    model, oracle = twins(lambda: net().double().to(device), device_ids=[device], **options)
    x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(3)).double().to(device)
    model(x[rows_of(rank, sizes)]).pow(2).mean().backward()
    oracle(x).cpu().pow(2).mean().backward()
    assert_same_gradients(model.module, oracle, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param(FIRST, marks=on_shared_accelerator, id="accelerator")])
def test_losses_on_the_host_and_batch_norm_over_processes(device: str) -> None:
    """A6, C9: torch runs the batch norms' backward in a thread of the accelerator."""
    run_ranks(2, train_with_outputs_on_the_host, device)


# ---- random numbers --------------------------------------------------------------------------------


def test_activation_checkpoints_of_two_replicas_on_one_device(device: torch.device) -> None:
    """N6, R13, A12: the masks of backward are those of forward; each replica has its own."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(lambda x: F.dropout(x * module.scale, 0.5), x, use_reentrant=False)
        return x

    model = DataParallel(Calls(forward, scale=nn.Parameter(torch.ones(64))).to(device), [device] * 2)
    for _ in range(20):
        model.zero_grad()
        output = model(torch.ones(8, 64, device=device))
        output.sum().backward()
        torch.testing.assert_close(model.module.scale.grad, 3 * output.detach().sum(0))  # d(s * s * s * m) at s = 1
        assert len({tuple(row) for row in output.tolist()}) == 8


# ---- streams, devices, CUDA graphs -----------------------------------------------------------------


@on_cuda
def test_a_module_compiled_with_cuda_graphs_is_refused_on_several_replicas() -> None:
    """R13"""
    compiled: Any = torch.compile(nn.Linear(4, 4).cuda(), mode="reduce-overhead")
    model = DataParallel(compiled, ["cuda:0"] * 2)
    with pytest.raises(RuntimeError, match="compiled with CUDA graphs"):
        model(torch.ones(4, 4, device="cuda:0"))


def run_alone(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@on_two_gpus
def test_a_gpu_that_is_not_named_is_left_alone() -> None:
    """A1: a CUDA context takes half a gigabyte of it."""
    code = """
        import torch, unisono
        model = unisono.DataParallel(torch.nn.Linear(4, 2).to("cuda:1"), ["cuda:1", "cuda:1"])
        model(torch.ones(6, 4)).sum().backward()
        print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])
    """
    assert run_alone(code) == "[False, True]"


@on_cuda
def test_a_process_that_sees_one_gpu_takes_it() -> None:
    """C14: whatever its LOCAL_RANK is."""
    code = """
        import os
        os.environ.update(CUDA_VISIBLE_DEVICES="0", LOCAL_RANK="3")
        from unisono.distributed.environment import local_device
        print(local_device())
    """
    assert run_alone(code) == "cuda:0"


# ---- failures --------------------------------------------------------------------------------------


def one_leaves(rank: int) -> str:
    device = torch.device("cuda", rank)
    model = unisono.DataParallel(nn.Linear(4, 4).to(device), [device])
    model(torch.ones(2, 4, device=device)).sum().backward()
    if rank:
        raise SystemExit(0)
    try:
        while True:
            model(torch.ones(2, 4, device=device)).sum().backward()
    except RuntimeError as error:
        return str(error)


@on_two_gpus
def test_a_process_that_ends_leaves_no_collective_behind() -> None:
    """C12: the other one raises, and ends, although NCCL waits on the GPU."""
    reason, _ = run_ranks(2, one_leaves)
    assert "rank 1 has ended" in reason
