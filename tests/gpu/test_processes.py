"""Several processes, as under torchrun, that share an accelerator (gloo) or have one each (NCCL): as one process.

Run by `make gpu-check`. `make test` runs the same steps on the CPU, so that there only the device is new.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import unisono
from helpers.accelerators import FIRST, SECOND, on_shared_accelerator, on_two_accelerators
from helpers.comparisons import assert_same_gradients
from helpers.ranks import run_ranks
from helpers.twins import rows_of, train_twins, twins

SIZES = [(5, 3), (1, 6), (4, 4), (7, 2)]  # rows of each process, step by step


@pytest.fixture(
    params=[
        pytest.param(["cpu", "cpu"], id="cpu"),
        pytest.param([FIRST, FIRST], marks=on_shared_accelerator, id="one accelerator"),
        pytest.param([FIRST, SECOND], marks=on_two_accelerators, id="two accelerators"),
    ]
)
def devices(request: pytest.FixtureRequest) -> list[str]:
    """That of each process."""
    return request.param


def train(rank: int, devices: list[str], options: dict[str, Any]) -> tuple[tuple[float, ...], str]:
    """Train beside the plain module on all rows; return the sums of the state at the end, and the backends used."""
    device = devices[rank]
    group = torch.distributed.group.WORLD
    model, oracle = twins(lambda: net().to(device), device_ids=[device], process_group=group, **options)
    generator = torch.Generator().manual_seed(3)
    batches = [(sizes, torch.randn(sum(sizes), 6, generator=generator).double().to(device)) for sizes in SIZES]
    sums = train_twins(rank, model, oracle, batches, rtol=1e-9)
    assert {p.grad.device for p in model.parameters()} == {torch.device(device)}
    gradient_sync = model._gradient_sync()
    assert gradient_sync is not None
    groups = gradient_sync.communicator._groups
    backends = {torch.distributed.get_backend(group) for group in groups.values()}
    return sums, ",".join(sorted(backends))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_two_processes_train_as_one(devices: list[str]) -> None:
    """C1, C9: batches of different sizes; batch norm over the rows of both."""
    (first, backends), (second, _) = run_ranks(2, train, devices, {"sync_batch_norm": True})
    assert first == pytest.approx(second, rel=1e-12)
    assert ("nccl" in backends) == (len(set(devices)) > 1 and devices[0].startswith("cuda"))


def accumulate(rank: int, devices: list[str], hooked: bool) -> int:
    """Take steps of three micro-batches, the last of which sums; return how many buckets a hook has had."""
    device = devices[rank]
    model, oracle = twins(
        lambda: net().to(device), device_ids=[device], process_group=torch.distributed.group.WORLD, sync_batch_norm=True
    )
    buckets = []
    if hooked:
        gradient_sync = model._gradient_sync()
        assert gradient_sync is not None

        def hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buckets.append(bucket.buffer().device)
            return default_hooks.allreduce_hook(group, bucket)

        model.register_comm_hook(gradient_sync.group, hook)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, oracle)]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, sizes in enumerate(SIZES[:3]):
            x = torch.randn(sum(sizes), 6, generator=generator).double().to(device)
            with model.no_sync() if number < 2 else contextlib.nullcontext():
                model(x[rows_of(rank, sizes)]).square().mean().backward()
            oracle(x).square().mean().backward()
        assert_same_gradients(model.module, oracle, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    assert set(buckets) <= {torch.device(device)}
    return len(buckets)


@pytest.mark.parametrize("hooked", [False, True])
def test_accumulated_gradients_of_two_processes(devices: list[str], hooked: bool) -> None:
    """C6, C9, C10: no_sync() and a communication hook, with synchronised batch norm, as the plain module."""
    first, second = run_ranks(2, accumulate, devices, hooked)
    assert first == second
    assert (first > 0) == hooked


def train_sparse(rank: int, devices: list[str]) -> list[float]:
    """Train an embedding of which each process uses different rows."""
    device = devices[rank]
    table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64).to(device)
    model = unisono.DataParallel(table, [device])
    tokens = torch.arange(rank * 4, rank * 4 + 6, device=device)
    model(tokens).pow(2).sum().backward()
    assert table.weight.grad.is_sparse
    return table.weight.grad.to_dense().flatten().tolist()


def test_sparse_gradients_of_two_processes(devices: list[str]) -> None:
    """C1: gathered, not summed, because each process has different rows."""
    first, second = run_ranks(2, train_sparse, devices)
    assert first == second
    used = torch.tensor(first).view(20, 3).abs().sum(1) > 0
    assert used.tolist() == [True] * 10 + [False] * 10
