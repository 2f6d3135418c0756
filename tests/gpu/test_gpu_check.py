"""`make gpu-check` on a machine without a GPU: it says so, and every outcome of a check is in its report."""

import argparse
import importlib
import importlib.util
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
import torch

from helpers.programs import until

REPOSITORY = Path(__file__).parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
MACHINE = {
    "kind": "cuda",
    "accelerators": [{"name": "Card | 9", "memory_gib": 78.0, "capability": "9.0"}] * 2,
    "versions": {"python": "3.12.1", "torch": "2.13.0", "CUDA": "13.0", "driver": "590.1"},
    "system": "Linux 6 x86_64",
    "cores": 16,
    "said": "",
}
NOWHERE = {**MACHINE, "kind": None, "accelerators": [], "versions": {"torch": "2.13.0+cpu", "CUDA": "none"}}
TOO_OLD = {**MACHINE, "accelerators": [], "said": "The NVIDIA driver on your system is too old (found version 11040)."}


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
        env={**os.environ, **NO_GPU, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY / 'src'}"},
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


@pytest.mark.parametrize(
    ("machine", "status", "message"),
    [
        (TOO_OLD, 2, "driver is here (590.1), but torch 2.13.0 (CUDA: 13.0) sees no GPU"),
        (TOO_OLD, 2, TOO_OLD["said"]),
        (NOWHERE, 0, "There is no GPU here"),
    ],
)
def test_a_machine_that_cannot_be_checked(gpu_check, monkeypatch, capsys, machine, status, message):
    """It says why before it runs anything, and whether pytest is there does not matter."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_check, "describe_machine", lambda environment: dict(machine))
    monkeypatch.setattr(gpu_check, "why_no_pytest", lambda environment: pytest.fail("asked for pytest"))
    assert gpu_check.main([]) == status
    printed = capsys.readouterr().out
    assert message in printed
    assert "othing has been run" in printed


def test_without_torch(gpu_check, without_package, capsys):
    without_package("torch")
    assert gpu_check.main([]) == 2
    assert f"torch: missing in {sys.executable}. Name another Python" in capsys.readouterr().out


def test_a_driver_that_does_not_answer(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "DESCRIBE_S", 0.01)
    assert gpu_check.main([]) == 2
    assert "did not answer in 0.01 s" in capsys.readouterr().out


def wheel(folder: Path, name: str) -> None:
    """Write a package of one module as a wheel."""
    info = f"{name}-1.dist-info"
    lines = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", "RECORD": ""}
    lines["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "value = 7")
        for file, text in lines.items():
            archive.writestr(f"{info}/{file}", text)


def test_wheels_that_were_brought_along(gpu_check, tmp_path):
    wheel(tmp_path, "brought_along")
    code = "import brought_along, importlib.util as i; print(brought_along.value, i.find_spec('unisono').name)"
    with gpu_check.packages_on_path(tmp_path) as (environment, folder):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "7 unisono\n"
    assert not folder.exists()


@pytest.mark.parametrize("with_pip", [True, False], ids=["pip", "the pip that Python brings along"])
def test_pytest_is_taken_from_the_index(gpu_check, tmp_path, monkeypatch, capsys, without_package, with_pip):
    """Into a folder of its own: what is installed stays as it is. Here the index is a folder, with a "pytest" in it."""
    wheel(tmp_path, "pytest")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "USER": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    if not with_pip:
        without_package("pip")
    reasons = iter(["No module named 'pytest'", ""])
    monkeypatch.setattr(gpu_check, "why_no_pytest", lambda environment: next(reasons))
    assert gpu_check.provide_pytest(tmp_path / "own", dict(os.environ)) == ""
    assert (tmp_path / "own" / "pytest.py").read_text() == "value = 7"
    assert "temporary folder, for this run; nothing that is installed has changed" in capsys.readouterr().out


def test_pytest_that_cannot_be_had(gpu_check, tmp_path, monkeypatch, capsys):
    """It is missing, broken or for another Python, and there is no index."""
    (tmp_path / "pytest.py").write_text("import not_there")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert "No matching distribution" in gpu_check.provide_pytest(tmp_path / "own", environment)
    printed = capsys.readouterr().out
    assert "ModuleNotFoundError: No module named 'not_there'" in printed
    assert printed.endswith("running what needs torch alone.\n")


def test_no_pip(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu_check.fetch_pytest(tmp_path, {}) == "there is no pip"


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


def run(
    gpu_check: ModuleType,
    arguments: list[Any],
    *,
    kind: str = "tests",
    limit_s: float = 60,
    budget_s: float = 100,
    path: str = "",
) -> Any:
    done = gpu_check.Done(gpu_check.Group("some", kind, list(map(str, arguments)), 100, check_limit_s=limit_s))
    path = os.pathsep.join(filter(None, (path, str(REPOSITORY / "src"))))
    gpu_check.run_group(done, {**os.environ, **NO_GPU, "PYTHONPATH": path}, budget_s)
    return done


@pytest.mark.only_on("linux", "macos", because="make gpu-check runs process groups")
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


def hide_packages(gpu_check: ModuleType, folder: Path) -> None:
    """Write a file that hides packages from programs with this folder on PYTHONPATH.

    They are all that may be missing, and, from plain checks and what these start, pytest.
    """
    (folder / "sitecustomize.py").write_text(f"""
import os, sys
if '"kind": "programs"' in str(sys.orig_argv):
    os.environ["WITHOUT_PYTEST"] = "1"
absent = {gpu_check.gpu_children.OPTIONAL!r}
sys.modules.update(dict.fromkeys([*absent, "pytest"] if "WITHOUT_PYTEST" in os.environ else absent))
""")


@pytest.mark.only_on("linux", "macos", because="make gpu-check runs process groups")
def test_the_gpu_tests_need_little(gpu_check, tmp_path):
    """They can be collected, and would run, where nothing is installed but torch and pytest."""
    hide_packages(gpu_check, tmp_path)
    files = [REPOSITORY / name for name in (*gpu_check.GPU_TESTS, "tests/test_examples.py")]
    done = run(gpu_check, [*files, "-m", "gpu"], path=str(tmp_path))
    assert done.checks
    assert {check.outcome for check in done.checks.values()} == {"skipped"}
    reason = "no accelerator[a-z ]*|no GPU|needs two accelerators|needs two GPUs|needs a GPU|CUDA graphs need CUDA"
    assert [check.text for check in done.checks.values() if not re.match(f"({reason})(:|$)", check.text)] == []
    assert not done.failed


@pytest.mark.only_on("linux", "macos", because="make gpu-check runs process groups")
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


@pytest.mark.only_on("linux", "macos", because="make gpu-check runs process groups")
@pytest.mark.parametrize(
    ("file", "status", "says"), [("test_nothing.py", 4, "test_nothing.py"), ("test_some.py", 5, "1 deselected")]
)
def test_a_group_that_cannot_be_run(gpu_check, tmp_path, file, status, says):
    (tmp_path / "test_some.py").write_text("def test_other(): pass")
    done = run(gpu_check, [tmp_path / file, "-k", "one_of_another_name"])
    assert done.failed
    assert f"exit status {status}" in done.problem
    assert says in done.problem


@pytest.mark.only_on("linux", "macos", because="make gpu-check runs process groups")
def test_ctrl_c_ends_what_runs_beside(gpu_check, tmp_path):
    file, begun = tmp_path / "test_some.py", tmp_path / "begun"
    file.write_text(
        f"import pathlib, threading\ndef test(): pathlib.Path({str(begun)!r}).touch(); threading.Event().wait()"
    )
    hanging, other = (gpu_check.Done(gpu_check.Group(name, "tests", [str(file)], 100)) for name in ("hanging", "other"))

    def run(done: Any) -> None:
        if done is hanging:
            gpu_check.run_group(done, {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}, 100)
        elif until(begun.exists):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu_check._run_at_once([hanging, other], 2, run)
    assert [check.outcome for check in hanging.checks.values()] == ["cut"]
    assert not gpu_check._children


# ---- the report ----------------------------------------------------------------------------------


@pytest.fixture
def report_of(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Have two groups "end" with some events instead of running anything; return the exit status and the report."""

    def run(*events: Any, **machine: Any) -> tuple[int, str]:
        def child(orders: dict[str, Any], environment: dict[str, str], log: Path) -> int:
            lines = [json.dumps(event) for event in events if isinstance(event, dict)]
            Path(orders["journal"]).write_text("\n".join(lines) + '\n{"event": "fini')  # the last line was cut short
            if isinstance(events[-1], BaseException):
                raise events[-1]
            with Path(orders["journal"]).open("a") as journal:
                journal.write('\n{"event": "finished"}\n')
            return 0

        monkeypatch.setattr(gpu_check, "_run_child", child)
        groups = [gpu_check.Group(name, kind, [], 100) for name, kind in (("first", "tests"), ("second", "figures"))]
        options = argparse.Namespace(output=tmp_path / "gpu-results.md", dry_run=False)
        return gpu_check.run_all(groups, {**MACHINE, **machine}, {}, options), options.output.read_text()

    return run


def ended(name: str, outcome: str, text: str = "") -> dict[str, Any]:
    return {"event": "ended", "name": name, "outcome": outcome, "seconds": 1.5, "text": text}


PASSED = ended("one", "passed")
FAILED = ended("two", "failed", "```\na fence | of its own\n```")
FIGURE = {"event": "figure", "name": "a speed", "value": 12.3456, "unit": "s", "note": "goal: 9 or less, missed"}


def test_the_report(report_of):
    """Machine, versions, each check with its outcome, each figure; status 1 if anything failed."""
    status, report = report_of(PASSED, FAILED, FIGURE, ended("three", "skipped", "psutil is missing"))
    assert status == 1
    assert "**Complete: 2 checks passed, 2 failed, 2 not run.**" in report
    assert r"| accelerators | 2 x Card \| 9, 78.0 GiB, capability 9.0 |" in report
    assert "| driver | 590.1 |" in report
    assert "| a speed | 12.35 | s | goal: 9 or less, missed |" in report
    assert "- a speed: 12.35 s; goal: 9 or less, missed" in report
    assert "````text\n```\na fence | of its own\n```\n````" in report
    assert "- 2 x psutil is missing" in report
    ends = [("one", "passed"), ("two", "failed"), ("three", "skipped")]
    assert re.findall(r"^\| (one|two|three) \| (\w+) \| 1.50 \|$", report, re.MULTILINE) == ends * 2
    assert "dry run" not in report.lower()


def test_the_report_without_pytest(report_of):
    """Its head says what ran, what did not, why, and what to do; what ran decides on the status."""
    status, report = report_of(PASSED, no_pytest="no answer")
    assert status == 0
    assert "**Complete: 1 checks passed, 1 group left out.**" in report
    head = '**Only a part ran: "second".** Left out: "first": pytest is missing (no answer).\nInstall pytest'
    assert head in report.split("## Machine")[0]
    assert report_of(FAILED, no_pytest="no answer")[0] == 1


@pytest.mark.only_on("linux", "macos", because="make gpu-check runs process groups")
def test_ctrl_c_loses_nothing(report_of, tmp_path):
    began = {"event": "began", "name": "four", "limit_s": 60}
    status, report = report_of(PASSED, FIGURE, began, KeyboardInterrupt())
    assert status == 130
    assert "**Interrupted: 1 checks passed, 1 cut.**" in report
    assert "| a speed | 12.35 |" in report
    assert "not begun" in report
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-results.md"]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_groups_fit_into_ten_minutes(gpu_check, count, side_by_side):
    """Each group that runs tests names GPUs, which tests/conftest.py hides otherwise; with several, all come first."""
    groups = gpu_check.groups_for("cuda", count, side_by_side=side_by_side)
    every = ",".join(f"cuda:{i}" for i in range(count))
    assert gpu_check.BUDGET_S + gpu_check.OVERTIME_S < 600
    *others, figures = groups
    assert (figures.kind, {group.kind for group in others}) == ("figures", {"programs", "tests"})
    budgets = [group.budget_s for group in others]
    # Side by side, what has not begun when the figures have to begin is left out.
    assert (max(budgets) if side_by_side else sum(budgets)) + figures.budget_s <= gpu_check.BUDGET_S + 1e-6
    devices = [group.environment["UNISONO_TEST_DEVICES"] for group in others if group.kind == "tests"]
    assert devices[0] == every
    assert set(devices) == {"cuda:0", every}
    assert others[0].arguments == [every]
    files = {argument for group in groups if group.kind == "tests" for argument in group.arguments if "/" in argument}
    assert all((REPOSITORY / file).exists() for file in files)


def test_a_dry_run_from_end_to_end(gpu_check, tmp_path):
    """On two devices that are simulated on the CPU, with torch and pytest alone; plain checks with torch alone."""
    hide_packages(gpu_check, tmp_path)
    done = program(tmp_path, "--dry-run", "--output", "results.md")
    assert done.returncode == 0, done.stdout + done.stderr
    if torch.__version__ < (2, 13) and "The simulated device cannot be built" in done.stdout:
        pytest.skip("this torch is too old for the asynchronous device")
    assert re.search(r"Complete: \d+ checks passed\.", done.stdout)
    report = (tmp_path / "results.md").read_text()
    assert report.startswith("# gpu-check\n\n**Dry run on 2 devices simulated on the CPU: not a measurement.**")
    _, _, _, _, *figures = report.split("\n## Figures ")[1].split("\n\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in figure.split("|")[1:-1]] for figure in figures]
    assert {state for _, state in cells} == {
        "can be measured",
        "not run: the profiler sees no kernels here",
        "not run: CUDA graphs need CUDA",
        "not run: it has no copies for queued",
    }
    assert any("on 2 devices" in name for name, _ in cells)
    assert "| two ranks under torchrun train as the plain module | passed |" in report


def test_a_dry_run_without_a_compiler(gpu_check, monkeypatch, capsys):
    """It stays on the CPU, and says so."""

    def describe(environment: dict[str, str], limit_s: float | None = None) -> dict[str, Any]:
        if "UNISONO_TEST_DEVICES" in environment:
            raise gpu_check.UnusableError("torch cannot be used here:\nTraceback\nRuntimeError: no compiler")
        return dict(NOWHERE)

    monkeypatch.setattr(gpu_check, "describe_machine", describe)
    environment = {"PYTHONPATH": "src"}
    machine = gpu_check.dry_machine(environment)
    assert "cannot be built (RuntimeError: no compiler): on the CPU instead" in capsys.readouterr().out
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert {group.environment["UNISONO_TEST_DEVICES"] for group in gpu_check.dry_groups(machine["kind"])} == {"cpu,cpu"}
    assert "**Dry run on the CPU: not a measurement.**" in gpu_check.gpu_report.render(
        machine, [], "complete", 1, dry=True
    )
