"""Runs that are killed with SIGKILL and resumed. The oracle is a run that was never killed."""

import random
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import metrics_of
from helpers.event_files import scalars, scalars_expected
from helpers.killed_runs import ALL, WRITING, run_killed
from unisono.training import checkpoint
from unisono.training.run_folder import RunFolder

pytestmark = pytest.mark.only_on("linux", "macos", because="forks, and SIGKILL")

TRAIN = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "2", "--batch-size", "500"]  # 3 steps an epoch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that was never killed, and the number of its lines."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "out", run_killed([*TRAIN, "--output", "out"], folder)


def results_of(out: Path) -> dict[str, Any]:
    """Return names of files, the weights' file, the metrics but for times, and each tensor of the checkpoint."""
    saved = checkpoint.read(RunFolder(out))
    tensors = [*saved.model.items(), *saved.momenta.items()]
    return {
        "files": {path.name for path in out.iterdir()} - {"tensorboard"},
        "weights": (out / "model.safetensors").read_bytes(),
        "metrics": metrics_of(out / "metrics.jsonl"),
        "tensors": [(name, tensor.numpy().tobytes()) for name, tensor in tensors],
    }


SLOW = [pytest.param([], seed, marks=pytest.mark.slow) for seed in range(2, 5)]


@pytest.mark.parametrize(("observed", "seed"), [([], 0), (["--tensorboard"], 1), *SLOW])
def test_a_run_that_was_killed_anywhere_ends_in_the_same_numbers(undisturbed, tmp_path, observed, seed):
    """T1, T2, T8: killed four times, at lines drawn from all lines or from those that write files."""
    if observed:
        pytest.importorskip("tensorboard")
    oracle, num_lines = undisturbed
    out, draw = tmp_path / "out", random.Random(seed)
    lines_of = {ALL: num_lines, WRITING: 700}  # so many lines write the files of a run
    begin = [*TRAIN, "--output", "out"]

    def arguments() -> list[str]:
        """Where no run has begun, there is nothing to resume."""
        return [*(["train", "--resume", "out"] if (out / "checkpoint.safetensors").exists() else begin), *observed]

    for within in draw.sample([ALL, WRITING], 2) * 2:
        kill_at, each_step = draw.randint(1, lines_of[within]), draw.random() < 0.5
        run_killed(arguments(), tmp_path, kill_at=kill_at, within=within, save_each_step=each_step)
    run_killed(arguments(), tmp_path)
    assert results_of(out) == results_of(oracle)
    if observed:
        assert scalars(out / "tensorboard") == scalars_expected(out)
        assert len(list((out / "tensorboard").iterdir())) == 1
