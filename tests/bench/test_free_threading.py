"""benchmarks/free_threading.py: which interpreters take part, and what of a failure is in the table."""

import sys
from types import ModuleType

import pytest

from helpers.benchmarks import benchmark
from unisono.bench.results import Line, Workload


@pytest.fixture
def free_threading() -> ModuleType:
    return benchmark("free_threading")


def test_the_lock_is_on_or_off_whatever_the_variable_is(free_threading: ModuleType) -> None:
    """Where it is 0, a Python that always has the lock would not start, and another one would run without it."""
    taking_part = free_threading.contenders("with", "without")
    assert {(each.python, dict(each.environment)["PYTHON_GIL"]) for each in taking_part} == {
        ("with", "1"),
        ("without", "0"),
    }


def test_a_row_of_failures(free_threading: ModuleType) -> None:
    """Minutes of the others' measurements are not lost."""
    measured = [Line("threads", 2, turns_s=[0.5]) for _ in range(3)]
    failed = [Line("plain", 1, failure="it failed") for _ in range(4)]
    assert free_threading.row(Workload("tiny", failed + measured)) == ["tiny", "failed", "it failed", "", "", ""]
    plain = [Line("plain", 1, turns_s=[step_s]) for step_s in (0.25, 1.0, 0.5, 0.5)]
    assert free_threading.row(Workload("tiny", plain + measured)) == ["tiny", "250.0", *["0.50"] * 4]


@pytest.mark.parametrize("name", ["free_threading", "allocators"])
@pytest.mark.parametrize("output", ["no-such-folder/page.md", "."])
def test_an_output_that_cannot_be_written_is_said_before_anything_is_measured(
    name: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = benchmark(name)
    monkeypatch.setattr(program, "measure", lambda *_: pytest.fail("measures"))
    if name == "free_threading":
        monkeypatch.setattr(program, "_interpreter", lambda *, with_lock: str)
    interpreters = ["--python", sys.executable, "--free-threaded", sys.executable] * (name == "free_threading")
    monkeypatch.setattr(sys, "argv", [name, "--models", "mlp", *interpreters, "--output", output])
    with pytest.raises(SystemExit, match=r"^2$"):
        program.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith("expected a file, in a folder that exists")


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("no-such-python", "no-such-python cannot be started: No such file or directory"),
        (sys.executable, "expected a Python without the lock, torch and psutil"),
    ],
)
def test_an_interpreter_that_cannot_take_part_is_said(
    python: str, says: str, free_threading: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if python == sys.executable and hasattr(sys, "_is_gil_enabled"):
        pytest.skip("this Python may have no lock")
    monkeypatch.setattr(sys, "argv", ["free_threading", "--free-threaded", python, "--python", python])
    with pytest.raises(SystemExit, match=r"^2$"):
        free_threading.main()
    assert says in capsys.readouterr().err
