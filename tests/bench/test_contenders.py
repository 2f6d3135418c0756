"""The contenders take the same training step."""

import operator
import sys
from pathlib import Path

import pytest
import torch

from helpers.ranks import run_ranks
from unisono.bench.contenders import Contender, step_of
from unisono.bench.tasks import Task
from unisono.console.targets import TargetError

SCRIPT = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x, mask, scale=1.0):
        return self.layer(x) * mask * scale

def build():
    return {
        "model": Model(), "inputs": (torch.randn(8, 5), torch.randn(4)), "target": torch.randn(8, 4),
        "criterion": nn.MSELoss(), "in_dims": (0, None), "device_ids": ["cuda:0"], "rtol": 1.0,
    }

def by_name():
    return {"model": Model(), "inputs": {"x": torch.randn(7, 5), "mask": torch.randn(7, 4)}}

def few():
    return nn.Linear(5, 4), torch.randn(1, 5)

def integers():
    return nn.Flatten(), torch.ones(4, 5, dtype=torch.long)

def no_model():
    return 5, torch.randn(1, 5)
"""


@pytest.fixture
def _script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bench_script.py").write_text(SCRIPT)
    monkeypatch.delitem(sys.modules, "bench_script", raising=False)


def test_threads_do_not_spin_unless_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert Contender("threads", 2).variables["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in Contender("plain", 1).variables
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert Contender("threads", 2).variables["OMP_WAIT_POLICY"] == "active"


def mean_over_rows(losses: list[list[float]], rows: list[int]) -> list[float]:
    """Return the losses of the whole batch, step by step, from those of each program over its own rows."""
    return [sum(map(operator.mul, rows, at)) / sum(rows) for at in zip(*losses, strict=True)]


def losses_of(contender: Contender, target: str, folder: Path, num_steps: int = 3) -> list[float]:
    """Return the first losses; those of the limit's programs are taken one program after the other."""
    threads = torch.get_num_threads()
    losses, rows = [], []
    try:
        for rank in range(contender.num_programs):
            task = Task.of_target(target)
            if contender.num_programs > 1:
                task = task.shard(rank, contender.replicas)
            step = step_of(contender, rank, task, folder)
            losses.append([step().loss.item() for _ in range(num_steps)])
            rows.append(task.rows)
    finally:
        torch.set_num_threads(threads)
    return mean_over_rows(losses, rows)


@pytest.mark.usefixtures("_script")
@pytest.mark.parametrize(
    "target",
    [
        "bench_script:build",
        "bench_script:by_name",
        "unisono.bench.workloads:tiny",
        pytest.param("unisono.bench.workloads:mlp", marks=pytest.mark.slow),
        pytest.param("unisono.bench.workloads:gpt", marks=pytest.mark.slow),
    ],
)
def test_the_losses_agree(target: str, tmp_path: Path):
    """Of ours in every step; of the limit, whose programs learn by themselves, in the first. Uneven rows, too."""
    plain = losses_of(Contender("plain", 1), target, tmp_path)
    assert len(set(plain)) == 3  # something is learnt
    assert losses_of(Contender("threads", 2), target, tmp_path) == pytest.approx(plain, rel=1e-5)
    assert losses_of(Contender("limit", 2), target, tmp_path)[0] == pytest.approx(plain[0], rel=1e-5)


def losses_of_rank(rank: int, name: str, target: str, folder: Path) -> list[float]:
    step = step_of(Contender(name, 2), rank, Task.of_target(target).shard(rank, 2), folder)
    return [step().loss.item() for _ in range(3)]


@pytest.mark.slow
def test_ours_agree_with_ddp_with_batch_norm(tmp_path: Path):
    target = "unisono.bench.workloads:resnet"

    def of_ranks(name: str) -> list[float]:
        (tmp_path / name).mkdir()
        return mean_over_rows(run_ranks(2, losses_of_rank, name, target, tmp_path / name, init=False), [16, 16])

    expected = of_ranks("ddp")
    assert of_ranks("torchrun") == pytest.approx(expected, rel=1e-5)
    assert losses_of(Contender("threads", 2), target, tmp_path) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("_script")
def test_what_cannot_be_measured():
    with pytest.raises(ValueError, match=r"a batch of 1 rows \(samples\) is enough for 1 replicas only, not for 2"):
        Task.of_target("bench_script:few").shard(0, 2)
    task = Task.of_target("bench_script:integers")
    with pytest.raises(ValueError, match="the model has no floating-point output"):
        task.loss(task.model(*task.args))
    with pytest.raises(TargetError, match=r"returned an object of type int as the model: expected a torch\.nn\.Module"):
        Task.of_target("bench_script:no_model")
