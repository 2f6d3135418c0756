"""Runs that are killed with SIGKILL and resumed. The oracle is a run that was never killed."""

import random
import sys
from pathlib import Path

import pytest

from helpers.commands import metrics_of
from helpers.killed_runs import ALL, WRITING, run_killed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks, and SIGKILL")

TRAIN = ["train", "--model", "mlp", "--devices", "cpu*2", "--epochs", "2", "--batch-size", "500"]  # 3 steps an epoch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that was never killed, and the number of its lines."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "out", run_killed([*TRAIN, "--output", "out"], folder)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))], ids="seed {}".format
)
def test_a_run_that_was_killed_anywhere_ends_in_the_same_weights(undisturbed, tmp_path, seed):
    """T1, T2: killed up to four times, at lines drawn from all lines or from those that write files."""
    oracle, num_lines = undisturbed
    out, draw = tmp_path / "out", random.Random(seed)
    lines_of = {ALL: num_lines, WRITING: 700}  # so many lines write the files of a run
    for within in draw.sample([ALL, WRITING], 2) * 2:
        # Where no run has begun, there is nothing to resume.
        arguments = (
            ["train", "--resume", "out"] if (out / "checkpoint.safetensors").exists() else [*TRAIN, "--output", "out"]
        )
        kill_at, each_step = draw.randint(1, lines_of[within]), draw.random() < 0.5
        run_killed(arguments, tmp_path, kill_at=kill_at, within=within, save_each_step=each_step)
    run_killed(["train", "--resume", "out"], tmp_path)
    assert (out / "model.safetensors").read_bytes() == (oracle / "model.safetensors").read_bytes()
    assert metrics_of(out / "metrics.jsonl") == metrics_of(oracle / "metrics.jsonl")
    assert files_of(out) == files_of(oracle)
