"""`make clusters` without the launchers: the page still has the code that it runs, and nothing outlives its checks."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from clusters import __main__ as command
from clusters import page, report, uneven_rows
from clusters.part import Check, Part
from clusters.report import Row
from clusters.site import CheckError, site

pytestmark = pytest.mark.only_on("linux", "macos", because="process groups are not Windows's")


def test_the_page_has_the_code_that_is_run() -> None:
    scripts = [page.training_script(), page.block("ray", number=1), page.block("ray", "The training command")]
    for where in (("ray",), ("other-launchers", "Monarch"), ("other-launchers", "Dask")):
        scripts.append(page.with_training(page.block(*where)))
    for script in scripts:
        compile(script, "page", "exec")
    assert all("model.batches(loader)" in script for script in (scripts[0], *scripts[3:]))
    for heading, line in (("", "srun python train.py"), ("With torchrun, to restart after a failure", "srun torchrun")):
        assert line in page.block("slurm", heading)
        assert page.block("slurm", heading).startswith("#!/bin/bash\n#SBATCH")
    assert page.block("slurm", number=1).startswith("srun python -m unisono train --data /shared/")
    assert page.block("mpi").startswith("mpirun -n 2 ")
    assert page.block("mpi", number=1).startswith("mpirun -host first-machine:4,second-machine:4 ")
    for heading in ("The training command", "When a process dies"):
        assert page.block("torchrun", heading).startswith("torchrun")
    assert page.block("clusters", number=1).startswith("torchrun --nproc-per-node 2 ")
    assert page.block("other-launchers", "Accelerate").startswith("accelerate launch --multi_gpu --num_processes 2 ")
    assert "<!-- written by make clusters -->\n" in page.RECORDS.read_text(encoding="utf-8")
    with pytest.raises(AssertionError, match="no longer has 'nowhere'"):
        page.changed("code", {"nowhere": ""})


def test_weights_of_ranks_are_compared_with_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_intra_op_thread: None, float64: None
) -> None:
    """Those of the script of the page, run alone, are those of one device; a launch of separate trainings is seen."""
    monkeypatch.setenv("UNISONO_CLUSTERS_KEEP", str(tmp_path))
    exec(compile(page.training_script(), "train.py", "exec"), {"__name__": "__main__"})
    assert uneven_rows.compared(tmp_path, 1) == "largest difference of a weight 0.0e+00"
    with pytest.raises(AssertionError, match="ranks that have ended: 0 of 1; expected 0 of 2, 1 of 2"):
        uneven_rows.compared(tmp_path, 2)


def test_nothing_outlives_its_site() -> None:
    """A daemon has left the process that started it, and ignores SIGTERM."""
    daemon = "trap '' TERM; echo $$ > pid; while :; do sleep 1; done"
    log = list[str]()
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:  # noqa: PT012
        opened = stack.enter_context(site(log))
        opened.expect("sh", "-c", 'setsid sh -c "$1" > /dev/null 2>&1 &', "sh", daemon)
        written = opened.folder / "pid"
        opened.wait_until(lambda: written.exists() and written.read_text().strip(), "the daemon runs")
        pid = int(written.read_text())
        assert psutil.pid_exists(pid)
        raise KeyboardInterrupt
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    assert not opened.folder.exists()


def test_a_command_that_fails_or_hangs_is_in_the_log() -> None:
    log = list[str]()
    with site(log) as opened:
        with pytest.raises(CheckError, match="status 3: sh -c 'echo no; exit 3': no"):
            opened.expect("sh", "-c", "echo no; exit 3")
        with pytest.raises(CheckError, match=r"no end after 0\.2 s"):
            opened.run("sleep", "60", limit_s=0.2)
    assert log[:2] == ["$ sh -c 'echo no; exit 3'", "no"]


def test_what_is_not_there_is_a_row_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> str:
        raise ValueError("no such thing")

    def opened(_: object) -> contextlib.nullcontext[list[Check]]:
        return contextlib.nullcontext([Check("a", lambda: "good"), Check("b", fail)])

    missing = Part("no", "None", lambda: "1", opened, programs={"no-such-program": "no-such-package"})
    log = list[str]()
    rows = [*command._run(missing, log, ""), *command._run(Part("yes", "Some", lambda: "2", opened), log, "")]
    assert [row.outcome for row in rows] == [
        "not run: not installed: apt-get install --no-install-recommends no-such-package",
        "good",
        "FAILED: ValueError: no such thing",
    ]
    assert "None: not run" in capsys.readouterr().out
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- written by make clusters -->\nold\n<!-- end -->\nafter\n<!-- end -->\n")
    report.write_into_page(path, rows)
    assert "| Some 2 | a | good | 0 |\n" in path.read_text()
    assert "old" not in path.read_text()
    assert path.read_text().endswith("\n<!-- end -->\nafter\n<!-- end -->\n")
    report.write_results(tmp_path / "results.md", [Row("a", "b", "c|d", None)], {"a": log})
    assert "| a | b | c\\|d | - |" in (tmp_path / "results.md").read_text()


def test_it_says_what_is_wrong_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "clusters", "--only", "pbs"], cwd=page.ROOT / "tests", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("clusters: error: argument --only: invalid choice: 'pbs'")
    assert done.stderr.count("\n") == 1
