"""`unisono plan`: what it prints and saves, and how it ends."""

import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import assert_misused, status_of
from unisono.bench import measure
from unisono.plan import command

SCRIPT = """\
import torch
from torch import nn

def build():
    return nn.Linear(5, 4), torch.randn(8, 5)

def frozen():
    return nn.Linear(5, 4).requires_grad_(False), torch.randn(8, 5, requires_grad=True)

class Failing(nn.Linear):
    def forward(self, x):
        raise RuntimeError("no such layer")

def failing():
    return Failing(5, 4), torch.randn(8, 5)
"""
STEP = ["--compute", "300ms", "--gradients", "100MB"]


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.setattr(command, "_SECONDS", 0.0)
    Path("own.py").write_text(SCRIPT)


def run(*arguments: str) -> int:
    return status_of("plan", *arguments)


def test_a_step_that_is_described(capsys: pytest.CaptureFixture[str]):
    assert run(*STEP, "--between", "10us,10Gbit/s", "--devices-per-machine", "4") == 0
    out = capsys.readouterr().out
    assert out.startswith("How far will it scale? An upper bound\n\nA step computes for 300 ms")
    assert "4 buckets: as given. 4 devices a machine" in out.partition("| devices")[0]
    assert "computes for 300 ms on one device, 200 ms of it backward, and has 100 MB of gradients, in 4 buckets" in out
    assert "between machines: 10 us, 1.25 GB/s" in out
    assert "Weak scaling: every device has as many rows (samples) as one device alone" in out
    assert "Efficiency stays above 90 % up to" in out
    saved = Path("runs/plan/plan.md").read_text()
    assert saved.startswith("# How far will it scale? An upper bound\n")
    assert [line.split()[1] for line in saved.splitlines() if line.startswith("| ")][2:] == ["1", "2", "4", "8"]
    assert "|       99 % |" in saved
    assert sorted(path.name for path in Path("runs/plan").iterdir()) == ["plan.md", "plan.png"]
    assert Path("runs/plan/plan.png").read_bytes().startswith(b"\x89PNG")


def test_options_change_the_prediction(capsys: pytest.CaptureFixture[str]):
    outputs = []
    for options in (
        [],
        ["--strong"],
        ["--all-reduce", "tree"],
        ["--bucket", "1MiB"],
        ["--inside", "nvlink2"],
        ["--devices", "64"],
    ):
        assert run(*STEP, *options, "--output", "deep/folder") == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 6
    assert "Strong scaling: the devices share one device's batch" in outputs[1]


def test_a_step_that_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "accelerators", list)
    assert run("own:build") == 0
    out = capsys.readouterr().out
    assert "9.6e-05 MB of gradients, in one bucket: measured with 8 rows on cpu, in " in out
    assert "steps, whose quartiles are" in out
    assert " 1 device a machine; between machines" in out
    assert "# How far will own:build scale? An upper bound" in Path("runs/plan/plan.md").read_text()


def test_no_verdict_from_a_disturbed_measurement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The judgement is that of `unisono bench`; it gave a conclusion from such figures."""
    monkeypatch.setattr(command, "accelerators", list)
    monkeypatch.setattr(measure, "other_programs", lambda *_: "other programs use 0.8 of 2 cores")
    assert run("own:build") == 0
    for shown in (capsys.readouterr().out, Path("runs/plan/plan.md").read_text()):
        assert "ms; other programs use 0.8 of 2 cores. 1 device" in shown.partition("| devices")[0]
        assert "**No verdict**: other programs use 0.8 of 2 cores, so do not rely on these figures." in shown
        assert "Efficiency stays above" not in shown
        assert "Efficiency is" not in shown


def test_without_matplotlib_the_picture_is_left_out(without_package: Any, capsys: pytest.CaptureFixture[str]):
    without_package("matplotlib")
    assert run(*STEP) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("no picture: matplotlib not installed: pip install matplotlib")
    assert last.endswith("; the table is in runs/plan/plan.md")
    assert "plan.png" not in Path("runs/plan/plan.md").read_text()
    assert [path.name for path in Path("runs/plan").iterdir()] == ["plan.md"]


def test_the_help_is_plain_ascii(capsys: pytest.CaptureFixture[str]):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert "  25gbe     9.6 us, 3.125 GB/s\n" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "--compute is missing: give your model (package.module:build), or --compute and --gradients"),
        (["--compute", "3ms"], "--gradients is missing"),
        (["--compute", "300", "--gradients", "1MB"], "expected a number above 0 with one of the units s, ms"),
        (["--compute", "0ms", "--gradients", "1MB"], "expected a number above 0 with one of the units"),
        (
            ["--compute", "-3ms", "--gradients", "1MB"],  # it was "expected one argument"
            "--compute: expected a number above 0 with one of the units s, ms",
        ),
        (
            ["--compute", "3ms", "--gradients", "-.5MB"],
            "--gradients: expected a number above 0 with one of the units B",
        ),
        ([*STEP, "--bucket", "1B"], "--bucket 1B makes 100,000,000 buckets of 100 MB: expected 10,000 at most"),
        (
            [*STEP, "--between", "ethernet"],
            "expected a latency and a bandwidth, such as 10us,25Gbit/s, or one of",
        ),
        (
            [*STEP, "--between", "25gbe"],
            "add --devices 64: --between is not used, because all 8 devices are in one",
        ),
        ([*STEP, "--devices", "2048"], "--devices: expected a whole number from 2 to 1024; got '2048'"),
        ([*STEP, "--devices-per-machine", "0"], "--devices-per-machine: expected a whole number from 1 up; got '0'"),
        ([*STEP, "--all-reduce", "butterfly"], "invalid choice: 'butterfly'"),
        ([*STEP, "--output", "own.py"], "--output own.py: "),
        ([*STEP, "--output", "own.py/deeper"], "own.py is not a folder"),
        pytest.param(
            *([*STEP, "--output", "/proc/deeper"], "--output /proc/deeper: cannot write to /proc"),
            marks=pytest.mark.only_on("linux", because="no such folder elsewhere"),
        ),
        (["own:frozen"], "own:frozen: backward gave no parameter a gradient"),
        (["own:failing"], "cannot measure own:failing: RuntimeError: no such layer"),
        (["own:build", "--compute", "3ms"], "give either own:build, which is measured, or --compute: leave one out"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]):
    assert_misused(["plan", *arguments], error, capsys)
    assert not Path("runs").exists()
    assert Path("own.py").read_text() == SCRIPT


def test_a_picture_that_cannot_be_drawn_leaves_the_old_plan(monkeypatch: pytest.MonkeyPatch):
    assert run(*STEP) == 0
    before = {path: path.read_bytes() for path in Path("runs/plan").iterdir()}

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert run("--compute", "1s", "--gradients", "1GB") == 1
    assert {path: path.read_bytes() for path in Path("runs/plan").iterdir()} == before
