"""The programs in benchmarks/ say what they measure, and how they are called."""

import sys

import pytest

from helpers.benchmarks import BENCHMARKS, benchmark

PARTS = ("gpu_children", "gpu_report", "small_operations", "timed", "verify_models", "verify_programs")  # of programs
PROGRAMS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in PARTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_help_has_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them measured instead, and three had none."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        benchmark(name).main()
    assert f" benchmarks/{name}.py" in capsys.readouterr().out
