"""Several processes that share one accelerator, as under torchrun, over gloo: the results are those of one process.

Run by `make gpu-check`. `make test` runs the same steps on the CPU, so that there only the device is new.
"""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import unisono
from helpers.ranks import run_ranks
from helpers.twins import train_twins, twins

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [(5, 3), (1, 6), (4, 4), (7, 2)]  # rows of each process, step by step


def first_accelerator() -> str | None:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return None if kind is None else f"{kind.type}:0"


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "accelerator",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    first_accelerator() is None, reason="no accelerator: run `make gpu-check` on a machine with a GPU"
                ),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return "cpu" if request.param == "cpu" else first_accelerator() or "none"


def train(rank: int, device: str, options: dict[str, Any]) -> tuple[tuple[float, ...], str]:
    """Train beside the plain module on all rows; return the sums of the state at the end, and the backends used."""
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


def test_two_processes_train_as_one(device: str) -> None:
    """C1, C9: batches of different sizes; batch norm over the rows of both."""
    (first, backends), (second, _) = run_ranks(2, train, device, {"sync_batch_norm": True})
    assert first == second
    assert backends == "gloo"


def train_sparse(rank: int, device: str) -> list[float]:
    """Train an embedding of which each process uses different rows."""
    table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64).to(device)
    model = unisono.DataParallel(table, [device])
    tokens = torch.arange(rank * 4, rank * 4 + 6, device=device)
    model(tokens).pow(2).sum().backward()
    assert table.weight.grad.is_sparse
    return table.weight.grad.to_dense().flatten().tolist()


def test_sparse_gradients_of_two_processes(device: str) -> None:
    """C1: gathered, not summed, because each process has different rows."""
    first, second = run_ranks(2, train_sparse, device)
    assert first == second
    used = torch.tensor(first).view(20, 3).abs().sum(1) > 0
    assert used.tolist() == [True] * 10 + [False] * 10
