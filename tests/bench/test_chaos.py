"""benchmarks/chaos.py in its short form: training under faults gives every number of an undisturbed run."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.benchmarks import BENCHMARKS, benchmark


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "chaos.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def module() -> Any:
    return benchmark("chaos")


def test_training_under_faults(tmp_path: Path) -> None:
    """F10, F3, F1: some of each kind; no step, row or process is lost, and all weights are equal bit for bit."""
    report = tmp_path / "chaos.md"
    run = chaos("--steps", "45", "--faults", "20", "--seed", "5", "--output", str(report))
    assert run.returncode == 0, run.stdout + run.stderr
    assert report.read_text().strip() in run.stdout
    text = " ".join(report.read_text().split())
    injected, survived = re.findall(r"\| all \| (\d+) \| (\d+) \|", text)[0]
    assert int(injected) == int(survived) >= 14, text
    for kind in ("SIGKILL in backward", "segmentation fault", "an exception in a replica", "Ctrl-C at any moment"):
        assert f"| {kind} |" in text
    for what in ("lost steps (another loss than undisturbed)", "lost rows", "orphans (processes that are left)"):
        assert f"| {what} | 0 |" in text
    assert "bit for bit | yes |" in text


def test_a_loss_that_differs_is_counted(module: Any) -> None:
    """What the report says when something was lost, so that its zeros mean something."""
    options = module.parsed(["--steps", "10"])
    calm = module.Run([1.0, 2.0, 3.0], [0.1, 0.1, 0.1], rows=51, state={"weight": module.torch.ones(2)})
    other = module.Run([1.0, 2.5, 3.0], [0.1, 61.0, 0.1], rows=34, state={"weight": module.torch.zeros(2)})
    other.struck["SIGKILL in forward"] += 1
    other.struck_in.add(1)
    report, succeeded = module.described(options, {1: ("SIGKILL in forward", 0.5)}, calm, other, [4711])
    assert not succeeded
    report = " ".join(report.split())
    assert "| SIGKILL in forward | 1 | 0 | 60.90 | 60.90 |" in report
    assert "| lost steps (another loss than undisturbed) | 1 |" in report
    assert "| lost rows | 17 |" in report
    assert "| hangs (a step of more than 60 s) | 1 |" in report
    assert "| orphans (processes that are left) | 1 |" in report
    assert "| no: weight |" in report


def test_a_seed_decides_all_faults(module: Any) -> None:
    """The same ones for the same seed; some of each kind, and a thousand SIGKILLs in the full run."""
    once, again, other = (module.schedule_of(1000, 200, seed) for seed in (1, 1, 2))
    assert once == again != other
    assert len(once) == 200
    assert {kind for kind, _ in once.values()} == set(module.KINDS)
    assert sum(kind in module.KILLS for kind, _ in module.schedule_of(10_000, 1770, 0).values()) >= 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "--steps 3: expected 10 or more"),
        (["--steps", "10", "--faults", "6"], "--faults 6: expected 0 to 5, half of the steps"),
    ],
)
def test_bad_arguments(module: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, no traceback."""
    with pytest.raises(SystemExit, match=r"^2$"):
        module.main(arguments)
    assert message in capsys.readouterr().err
