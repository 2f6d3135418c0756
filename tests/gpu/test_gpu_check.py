"""`make gpu-check` on a machine without a GPU: it says so, and every outcome of a check is in its report."""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
MACHINE = {
    "kind": "cuda",
    "accelerators": [{"name": "Card | 9", "memory_gib": 78.0, "capability": "9.0"}] * 2,
    "versions": {"python": "3.12.1", "torch": "2.13.0", "CUDA": "13.0", "driver": "590.1"},
    "system": "Linux 6 x86_64",
    "cores": 16,
    "unusable": {},
    "said": "",
}
NOWHERE = {**MACHINE, "kind": None, "accelerators": [], "versions": {"torch": "2.13.0+cpu", "CUDA": "none"}}
TOO_OLD = {**MACHINE, "accelerators": [], "said": "The NVIDIA driver on your system is too old (found version 11040)."}
BROKEN = {**MACHINE, "unusable": {"pytest": "ModuleNotFoundError: No module named 'pluggy'"}}


@pytest.fixture(scope="module")
def gpu_check() -> Iterator[ModuleType]:
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    yield importlib.import_module("gpu_check")
    sys.path.pop(0)


# ---- where there is nothing to check -------------------------------------------------------------


def program(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the program as it is typed, without a GPU."""
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "gpu_check.py"), *arguments],
        cwd=folder,
        env={**os.environ, **NO_GPU, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path):
    done = program(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "There is no GPU here (torch sees no accelerator): nothing has been run.\n"
    assert list(tmp_path.iterdir()) == []


BRING = "pip download -d wheels pytest numpy psutil"


@pytest.mark.parametrize(
    ("machine", "absent", "status", "messages"),
    [
        (MACHINE, ["torch"], 2, [f"torch: missing in {sys.executable}"]),
        (MACHINE, ["numpy", "pluggy"], 2, [f"numpy: missing in {sys.executable}", "pluggy: missing in", BRING]),
        (BROKEN, [], 2, ["pytest: ModuleNotFoundError: No module named 'pluggy'", BRING]),
        (TOO_OLD, [], 2, ["driver is here (590.1), but torch 2.13.0 (CUDA: 13.0) sees no GPU", TOO_OLD["said"]]),
        (NOWHERE, ["pytest"], 0, ["There is no GPU here"]),
    ],
    ids=["torch", "packages", "broken package", "old driver", "no GPU"],
)
def test_a_machine_that_cannot_be_checked(gpu_check, monkeypatch, capsys, machine, absent, status, messages):
    """It says why before it runs anything, and how to bring every package, with those that it needs in turn."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_check, "missing", lambda names: [name for name in names if name in absent])
    monkeypatch.setattr(gpu_check, "describe_machine", lambda environment: dict(machine))
    assert gpu_check.main([]) == status
    printed = capsys.readouterr().out
    assert "othing has been run" in printed
    assert [message for message in messages if message not in printed] == []


def test_a_driver_that_does_not_answer(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "DESCRIBE_S", 0.01)
    assert gpu_check.main([]) == 2
    assert "did not answer in 0.01 s" in capsys.readouterr().out


def test_wheels_that_were_brought_along(gpu_check, tmp_path):
    with zipfile.ZipFile(tmp_path / "brought_along-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought_along/__init__.py", "value = 7")
    assert gpu_check.missing(["brought_along"]) == ["brought_along"]
    with gpu_check.wheels_on_path(tmp_path) as environment:
        assert gpu_check.missing(["brought_along"]) == []
        code = "import brought_along, importlib.util as i; print(brought_along.value, i.find_spec('unisono').name)"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "7 unisono\n"
    assert gpu_check.missing(["brought_along"]) == ["brought_along"]


def test_a_dry_run_is_not_written_into_benchmarks(gpu_check, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu_check.main(["--dry-run", "--output", str(REPOSITORY / "benchmarks" / "gpu-results.md")])
    assert "does not belong into benchmarks/" in capsys.readouterr().err


# ---- whatever happens to a check -----------------------------------------------------------------

CHECKS = """
import os, signal, threading, warnings
import pytest

def test_passes(): warnings.warn("look here")
def test_fails(): assert 1 + 1 == 3, "as asked"
@pytest.mark.skip(reason="not today")
def test_is_skipped(): pass
def test_hangs(): threading.Event().wait()
def test_after_the_hang(): pass
def test_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
def test_loses_the_gpu(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_has_another_process(): assert os.environ.setdefault("SEEN", str(os.getpid())) == str(os.getpid())
def test_needs_what_is_missing(): raise ModuleNotFoundError("No module named 'rich'")
@pytest.fixture
def broken():
    yield
    raise ValueError("when it was over")
def test_fails_in_teardown(broken): pass
"""


# Of each check: its outcome, and a pattern that its text has.
OUTCOMES = {
    "test_passes": ("passed", ""),
    "test_fails": ("failed", "as asked"),
    "test_is_skipped": ("skipped", r"^not today\Z"),
    "test_hangs": ("hung", r"(?s)no end after 5 s.* in test_hangs"),  # the stack
    "test_after_the_hang": ("passed", ""),
    "test_crashes": ("crashed", "SIGSEGV"),
    "test_loses_the_gpu": ("failed", ""),
    "test_has_another_process": ("passed", ""),
    "test_needs_what_is_missing": ("skipped", r"^not run: rich is missing\Z"),
    "test_fails_in_teardown": ("failed", "when it was over"),
    "test_other.py": ("skipped", r"^not run: safetensors is missing\Z"),
    "test_broken.py": ("failed", ""),
}


def run(gpu_check: ModuleType, files: list[Any], *, limit_s: float = 60, budget_s: float = 100, path: str = "") -> Any:
    done = gpu_check.Done(gpu_check.Group("some", "tests", list(map(str, files)), 100, check_limit_s=limit_s))
    path = os.pathsep.join(filter(None, (path, str(REPOSITORY / "src"))))
    gpu_check.run_group(done, {**os.environ, **NO_GPU, "PYTHONPATH": path}, budget_s)
    return done


def test_every_outcome_is_reported(gpu_check, tmp_path):
    """A hang, a crash and a lost GPU each cost one check; the others run in a new process."""
    files = {
        "test_some.py": CHECKS,
        "test_other.py": "import safetensors.nothing_like_it",
        "test_broken.py": "no syntax",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = run(gpu_check, [tmp_path / name for name in files], limit_s=5)
    checks = {check.name.split("::")[-1].split("/")[-1]: check for check in done.checks.values()}
    assert {name: check.outcome for name, check in checks.items()} == {name: out for name, (out, _) in OUTCOMES.items()}
    for name, (_, pattern) in OUTCOMES.items():
        assert re.search(pattern, checks[name].text), name
    assert any("look here" in text for text in done.warnings)
    assert done.failed
    assert not done.problem


def test_the_gpu_tests_need_little(gpu_check, tmp_path):
    """They can be collected, and would run, where nothing is installed but what the program says that it needs."""
    absent = gpu_check.gpu_children.OPTIONAL
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n")
    files = [REPOSITORY / name for name in (*gpu_check.GPU_TESTS, "tests/test_examples.py")]
    done = run(gpu_check, [*files, "-m", "gpu"], path=str(tmp_path))
    assert done.checks
    assert {check.outcome for check in done.checks.values()} == {"skipped"}
    reason = "no accelerator|no GPU|needs two accelerators|needs two GPUs|needs a GPU|CUDA graphs need CUDA"
    assert [check.text for check in done.checks.values() if not re.match(f"({reason})(:|$)", check.text)] == []
    assert not done.failed


@pytest.mark.parametrize(("body", "first"), [("pass", "passed"), ("threading.Event().wait()", "cut")])
def test_checks_are_cut_when_the_time_is_over(gpu_check, tmp_path, monkeypatch, body, first):
    """Later ones do not begin; one that does not end is stopped."""
    monkeypatch.setattr(gpu_check, "OVERTIME_S", 3 if first == "cut" else 30)
    file = tmp_path / "test_some.py"
    file.write_text(f"import threading\ndef test_a(): {body}\ndef test_b(): pass\ndef test_c(): pass\n")
    done = run(gpu_check, [file], budget_s=0)
    assert [check.outcome for check in done.checks.values()] == [first, "cut", "cut"]
    assert ("in test_a" in next(iter(done.checks.values())).text) == (first == "cut")
    assert not done.failed


def test_a_group_that_cannot_be_run(gpu_check, tmp_path):
    done = run(gpu_check, [tmp_path / "test_nothing.py"])
    assert done.failed
    assert "exit status 4" in done.problem
    assert "test_nothing.py" in done.problem


# ---- the report ----------------------------------------------------------------------------------


@pytest.fixture
def report_of(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Have two groups "end" with some events instead of running anything; return the exit status and the report."""

    def run(*events: Any) -> tuple[int, str]:
        def child(orders: dict[str, Any], environment: dict[str, str], log: Path) -> int:
            lines = [json.dumps(event) for event in events if isinstance(event, dict)]
            Path(orders["journal"]).write_text("\n".join(lines) + '\n{"event": "fini')  # the last line was cut short
            if isinstance(events[-1], BaseException):
                raise events[-1]
            with Path(orders["journal"]).open("a") as journal:
                journal.write('\n{"event": "finished"}\n')
            return 0

        monkeypatch.setattr(gpu_check, "_run_child", child)
        groups = [gpu_check.Group(name, "tests", [], 100) for name in ("first", "second")]
        options = argparse.Namespace(output=tmp_path / "gpu-results.md", dry_run=False)
        return gpu_check.run_all(groups, MACHINE, {}, options), options.output.read_text()

    return run


def ended(name: str, outcome: str, text: str = "") -> dict[str, Any]:
    return {"event": "ended", "name": name, "outcome": outcome, "seconds": 1.5, "text": text}


PASSED = ended("one", "passed")
FAILED = ended("two", "failed", "```\na fence | of its own\n```")
FIGURE = {"event": "figure", "name": "a speed", "value": 12.3456, "unit": "s", "note": "beside 14.0"}


def test_the_report(report_of):
    """Machine, versions, each check with its outcome, each figure; status 1 if anything failed."""
    status, report = report_of(PASSED, FAILED, FIGURE, ended("three", "skipped", "psutil is missing"))
    assert status == 1
    assert "**Complete: 2 checks passed, 2 failed, 2 not run.**" in report
    assert r"| accelerators | 2 x Card \| 9, 78.0 GiB, capability 9.0 |" in report
    assert "| driver | 590.1 |" in report
    assert "| a speed | 12.35 | s | beside 14.0 |" in report
    assert "````text\n```\na fence | of its own\n```\n````" in report
    assert "- 2 x psutil is missing" in report
    ends = [("one", "passed"), ("two", "failed"), ("three", "skipped")]
    assert re.findall(r"^\| (one|two|three) \| (\w+) \| 1.50 \|$", report, re.MULTILINE) == ends * 2
    assert "dry run" not in report.lower()


def test_ctrl_c_loses_nothing(report_of, tmp_path):
    began = {"event": "began", "name": "four", "limit_s": 60}
    status, report = report_of(PASSED, FIGURE, began, KeyboardInterrupt())
    assert status == 130
    assert "**Interrupted: 1 checks passed, 1 cut.**" in report
    assert "| a speed | 12.35 |" in report
    assert "not begun" in report
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-results.md"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_groups_fit_into_ten_minutes(gpu_check, count):
    groups = gpu_check.groups_for("cuda", count)
    assert gpu_check.BUDGET_S + gpu_check.OVERTIME_S < 600
    assert sum(group.budget_s for group in groups) <= gpu_check.BUDGET_S + 1e-6
    devices = [group.environment.get("UNISONO_TEST_DEVICES") for group in groups]
    assert "cuda:0" in devices
    assert (",".join(f"cuda:{i}" for i in range(count)) in devices) or count == 1
    files = {argument for group in groups if group.kind == "tests" for argument in group.arguments if "/" in argument}
    assert all((REPOSITORY / file).exists() for file in files)


def test_a_dry_run_from_end_to_end(tmp_path):
    """Every figure can be measured, but for what needs a GPU."""
    done = program(tmp_path, "--dry-run", "--output", "results.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Complete: \d+ checks passed, \d+ not run\.", done.stdout)
    report = (tmp_path / "results.md").read_text()
    assert report.startswith("# gpu-check\n\n**Dry run on the CPU: not a measurement.**")
    assert "## Figures (dry run on the CPU, tiny sizes: not a measurement)" in report
    _, _, _, _, *figures = report.split("\n## Figures ")[1].split("\n\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in figure.split("|")[1:-1]] for figure in figures]
    assert {note for _, value, _, note in cells if not value} == {
        "not run: the profiler sees no kernels here",
        "not run: CUDA graphs need CUDA",
    }
    assert any("on 2 devices" in name for name, *_ in cells)
