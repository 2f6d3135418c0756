"""examples/two_devices.ipynb runs, from top to bottom, and has the outputs of a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "two_devices.ipynb"


def test_it_runs(tmp_path):
    """In a kernel of its own, by nbmake; on CPU replicas, or on the GPUs if there are two."""
    pytest.importorskip("nbmake")
    shutil.copy(NOTEBOOK, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=200", "-q", NOTEBOOK.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_its_outputs_are_there_and_name_no_folder():
    """So that it can be read without a kernel; a picture of the profile is among them."""
    outputs = [output for cell in json.loads(NOTEBOOK.read_text())["cells"] for output in cell.get("outputs", [])]
    texts = "".join("".join(output.get("text", [])) for output in outputs)
    assert "same: 36 comparisons, in training and eval" in texts
    assert [output["output_type"] for output in outputs].count("error") == 0
    assert [kind for output in outputs for kind in output.get("data", {})].count("image/png") == 1
    assert str(Path.home()) not in texts
