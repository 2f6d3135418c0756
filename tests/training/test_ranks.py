"""Several processes train as one does. They talk by gloo over the loopback device; the oracle is a run of one."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.commands import assert_same_metrics, steps_of, write_idx
from helpers.commands import run_captured as run
from helpers.ranks import end_ranks, run_ranks
from unisono.console.errors import Interrupted
from unisono.console.progress import Progress
from unisono.training import data
from unisono.training import run as run_module
from unisono.training.computation import Computation
from unisono.training.loop import train
from unisono.training.options import Options
from unisono.training.ranks import Ranks, launch
from unisono.training.run import Run
from unisono.training.run_folder import RunFolder

SMALL = ["train", "--model", "mlp", "--epochs", "2", "--devices", "1"]  # 12 steps an epoch


def assert_same_run(folder: Path, other: Path, rel: float = 1e-5) -> None:
    assert_same_metrics(folder / "metrics.jsonl", other / "metrics.jsonl", rel)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process comes to, on one device."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(0, folder, *SMALL, "--output", "run")[0] == 0
    return folder / "run"


def run_one_step_ahead(rank: int, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run with losses read a step later, as on accelerators; the first process finds it time to save all the time."""
    Run.steps_ahead, run_module._SAVE_EVERY_S = 1, 0.0 if rank == 0 else math.inf
    return run(rank, folder, *arguments)


@pytest.mark.parametrize(
    ("world_size", "run", "arguments"),
    [
        (2, run, []),
        pytest.param(2, run, ["--devices", "cpu*2"], marks=pytest.mark.slow),
        (3, run, []),
        (2, run_one_step_ahead, []),
    ],
    ids=["2x1", "2x2", "3x1", "2x1, losses a step later"],
)
def test_processes_train_as_one_does(alone: Path, tmp_path: Path, world_size: int, run: Any, arguments: Any) -> None:
    ends = run_ranks(world_size, run, tmp_path, *SMALL, *arguments, "--output", "run")
    assert_same_run(tmp_path / "run", alone, rel=1e-5)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(p.name for p in alone.iterdir())
    assert [status for status, _, _ in ends] == [0] * world_size
    assert f"on {world_size} processes, " in ends[0][1]
    assert "see run/curves.png" in ends[0][1]
    assert [out + err for _, out, err in ends[1:]] == [""] * (world_size - 1), "the others are silent"


def test_batches_of_fewer_rows_than_processes(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(0)
    pictures, labels = torch.randint(256, (40, 8, 8), generator=own), torch.arange(40) % 10
    write_idx(tmp_path, [pictures, labels, pictures[:10], labels[:10]])
    arguments = [*SMALL, "--data", str(tmp_path), "--batch-size", "3"]
    run(0, tmp_path, *arguments, "--output", "alone")
    run_ranks(4, run, tmp_path, *arguments, "--output", "four")
    assert_same_run(tmp_path / "four", tmp_path / "alone", rel=1e-4)


def stop_after(rank: int, folder: Path, step: int) -> int:
    """Train until rank 1, and only rank 1, gets a signal after `step`; return how many steps had been finished."""

    class Stopping(Progress):
        finished = 0

        def update(self, *shown: object) -> None:
            self.finished += 1
            if rank == 1 and self.finished == step:
                signal.raise_signal(signal.SIGTERM)

    stopping = Stopping()
    with pytest.raises(Interrupted) as caught:
        train(Options(model="mlp", epochs=2, devices="1"), RunFolder(folder), stopping, ranks=Ranks.join())
    assert caught.value.received == signal.SIGTERM
    return stopping.finished


@pytest.mark.parametrize(("step", "processes"), [(3, 2), (11, 4)])
def test_a_signal_to_one_stops_all_and_others_go_on(alone: Path, tmp_path: Path, step: int, processes: int) -> None:
    """All stop after the same step; fewer processes go on, or more."""
    finished = run_ranks(3, stop_after, tmp_path, step)
    assert finished == [step + 1] * 3 if step == 3 else finished[0] in (step, step + 1)
    assert len(steps_of(tmp_path / "metrics.jsonl")) == finished[0]
    run_ranks(processes, run, tmp_path, "train", "--resume", ".")
    assert_same_run(tmp_path, alone)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["processes"], config["devices"]) == (processes, ["cpu"] * processes)


def run_with(rank: int, folder: Path, of_both: list[str], of_rank_1: list[str]) -> tuple[int, str, str]:
    return run(rank, folder, "train", *of_both, *of_rank_1 * rank)


@pytest.mark.parametrize(
    ("of_both", "of_rank_1", "message"),
    [
        (["--epochs", "-1"], [], "--epochs -1: expected a whole number, 1 or more"),
        (["--output", "other"], [], "other already has a run"),
        ([], ["--lr", "0.1"], "the options of the processes differ: rank 0 has none, rank 1 has --lr 0.1; start"),
        ([], ["--devices", "none"], "rank 1: --devices none: none is not a device"),
    ],
)
def test_an_error_of_any_rank_is_one_line_of_rank_0(tmp_path, of_both, of_rank_1, message):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoint.safetensors").touch()
    ends = run_ranks(2, run_with, tmp_path, of_both, of_rank_1)
    assert [status for status, _, _ in ends] == [2, 2]
    assert ends[0][2].startswith(f"unisono train: error: {message}")
    assert ends[0][2].count("\n") == 1
    assert ends[1][1] + ends[1][2] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def run_with_other_data(rank: int, folder: Path) -> tuple[int, str, str]:
    if rank == 1:
        data._DIGITS_MAX = 15
    return run(rank, folder, *SMALL, "--output", "run")


def test_other_data_in_one_process_is_an_error(tmp_path: Path) -> None:
    ends = run_ranks(2, run_with_other_data, tmp_path)
    assert [status for status, _, _ in ends] == [2, 2]
    assert "the data sets of the processes differ: rank 0 has " in ends[0][2]


def run_and_fail(rank: int, folder: Path, which: int, fail: Callable[[], None]) -> tuple[int, str, str]:
    """Run; one of the processes fails in its 15th step, the third of the second epoch."""
    training_loss, steps = Computation.training_loss, 0

    def failing(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if (rank, steps) == (which, 15):
            fail()
        return training_loss(*args)

    Computation.training_loss = failing
    return run(rank, folder, *SMALL, "--output", "run")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("no more")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("which", [0, 1])
def test_one_process_that_fails_ends_all(tmp_path: Path, which: int) -> None:
    ends = run_ranks(2, run_and_fail, tmp_path, which, run_out_of_memory)
    assert ends[which][0] == 2
    assert ends[1 - which][0] == 1
    assert "out of memory with --batch-size 128" in ends[0][2]
    assert ends[0][2].count("\n") == 1
    assert ends[1][1] + ends[1][2] == ""


@pytest.mark.only_on("linux", "macos", because="SIGKILL")
def test_a_process_that_is_killed_ends_the_others(alone: Path, tmp_path: Path) -> None:
    first, second = end_ranks(2, run_and_fail, tmp_path, 1, die)
    assert second.exit_code == -9
    status, _, err = first.value
    assert status == 1
    assert err.startswith("unisono train: error: rank 1 has ended while this one was at")
    _, out, _ = run_ranks(2, run, tmp_path, "train", "--resume", "run")[0]
    assert "resuming after step 12, epochs finished: 1" in out
    assert_same_run(tmp_path / "run", alone)


# ---- a launch that starts its processes anew -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "launch", "expected"),
    [
        (["--output", "run"], "launch 1", "resuming after step 12, epochs finished: 1"),
        (["--output", "run", "--overwrite"], "launch 1", "resuming after step 12, epochs finished: 1"),
        ([], "launch 1", "resuming after step 12, epochs finished: 1"),
        (["--output", "run"], "launch 2", "run already has a run"),
    ],
)
def test_a_launch_goes_on_with_its_own_run(tmp_path, monkeypatch, arguments, launch, expected):
    """The run has stopped after its first epoch, as a kill stops it: without another checkpoint."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launch 1")
    assert run(0, tmp_path, *SMALL, *arguments, "--epochs", "1")[0] == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    status, out, err = run(0, tmp_path, *SMALL, *arguments)
    assert status == (0 if launch == "launch 1" else 2)
    assert expected in out + err


def test_the_name_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    assert launch() == "job 7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun sets it for a launch without a name
    assert launch() == launch()
    assert f"process {os.getppid()} of " in launch()
