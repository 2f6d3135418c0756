"""examples/two_devices.ipynb runs, from top to bottom, and has the outputs of a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_its_first_cell_installs_a_wheel_or_says_what_is_missing(tmp_path, monkeypatch):
    """Where unisono is not installed: the newest wheel beside it; pip's failure alone would not stop the notebook."""
    transform = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager().transform_cell
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    source, calls = transform("".join(cells[0]["source"])), []
    shell = SimpleNamespace(run_line_magic=lambda *call: calls.append(call))

    def run(*, installs):
        found = iter([None, installs or None])
        monkeypatch.setattr("importlib.util.find_spec", lambda _: next(found))
        names = {"get_ipython": lambda: shell}
        exec(source, names)
        return names["wheels"][-1]

    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="put a wheel beside this notebook"):
        run(installs=True)
    for version in ("0.2.0", "0.1.0"):
        Path(f"unisono-{version}-py3-none-any.whl").touch()
    assert run(installs=True) == "unisono-0.2.0-py3-none-any.whl"
    assert calls == [("pip", 'install -q matplotlib "{wheels[-1]}"')]
    with pytest.raises(ImportError, match=r"it needs torch 2\.9"):
        run(installs=False)


def test_its_outputs_are_there_and_name_no_folder():
    """So that it can be read without a kernel; a picture of the profile is among them."""
    outputs = [output for cell in json.loads(NOTEBOOK.read_text())["cells"] for output in cell.get("outputs", [])]
    texts = "".join("".join(output.get("text", [])) for output in outputs)
    assert "same: 62 comparisons, in training and eval" in texts
    assert [output["output_type"] for output in outputs].count("error") == 0
    assert [kind for output in outputs for kind in output.get("data", {})].count("image/png") == 1
    assert str(Path.home()) not in texts
