"""Several processes that share one accelerator, as under torchrun: they talk by gloo, and compute what one would.

Run by `make gpu-check`. The same steps run on the CPU in `make test`, so that only the device is new there.
"""

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import manyhands
from helpers.ranks import run_ranks

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


def train(rank: int, device: str, options: dict[str, Any]) -> tuple[list[float], str]:
    """Train beside the plain module on all rows; return the parameters at the end, and how the processes talked."""
    model = manyhands.DataParallel(net().to(device), [device], process_group=torch.distributed.group.WORLD, **options)
    oracle = net().to(device)
    oracle.load_state_dict(model.module.state_dict())
    generator = torch.Generator().manual_seed(3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, oracle)]
    for step, sizes in enumerate(SIZES):
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        x = torch.randn(sum(sizes), 6, generator=generator).double().to(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        output, expected = model(x[rows]), oracle(x)
        torch.testing.assert_close(output, expected[rows], rtol=1e-9, atol=1e-11)
        output.pow(2).mean().backward()
        expected.pow(2).mean().backward()
        for (name, mine), theirs in zip(model.module.named_parameters(), oracle.parameters(), strict=True):
            assert mine.grad.device == torch.device(device)
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11, msg=f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
    gradient_sync = model._gradient_sync()
    assert gradient_sync is not None
    groups = gradient_sync.cluster._groups
    backends = {torch.distributed.get_backend(group) for group in groups.values()}
    return [p.sum().item() for p in model.parameters()], ",".join(sorted(backends))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_two_processes_train_as_one(device: str) -> None:
    """C1, C9: batches of different sizes; batch norm over the rows of both."""
    (first, backends), (second, _) = run_ranks(2, train, device, {"sync_batch_norm": True})
    assert first == second
    assert backends == "gloo"


def train_sparse(rank: int, device: str) -> list[float]:
    """Train a table of which each process uses rows of its own."""
    table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64).to(device)
    model = manyhands.DataParallel(table, [device])
    tokens = torch.arange(rank * 4, rank * 4 + 6, device=device)
    model(tokens).pow(2).sum().backward()
    assert table.weight.grad.is_sparse
    return table.weight.grad.to_dense().flatten().tolist()


def test_sparse_gradients_of_two_processes(device: str) -> None:
    """C1: gathered, not summed, because each has rows of its own."""
    first, second = run_ranks(2, train_sparse, device)
    assert first == second
    used = torch.tensor(first).view(20, 3).abs().sum(1) > 0
    assert used.tolist() == [True] * 10 + [False] * 10
