"""`make compat`: its table, how it reads pytest's last line, and which Pythons it finds. No environment is set up."""

import datetime
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compat import __main__ as command
from compat import environment, pythons, suite
from compat.pythons import Python
from compat.table import Row, updated

TODAY = datetime.date(2026, 3, 4)
FREE = Python(sys.executable, "3.14.7", True)


def row(python: str, torch: str, passed: int = 1) -> Row:
    return Row(python, torch, passed, 0, 0, [], TODAY)


def test_a_row_replaces_that_of_its_releases_and_others_stay() -> None:
    """A Python without its lock has rows of its own; releases are numbers: 2.9 is before 2.13."""
    table = updated("", [row("3.11.7", "2.13.0"), row("3.14.7", "2.13.0"), row("3.11.7", "2.9.1")])
    free = Row("3.14.7, free-threaded", "2.13.0", 4321, 1, 20, ["tensorboard", "nbmake"], TODAY)
    table = updated(table, [free, row("3.11.9", "2.13.0", passed=2)])
    assert table.splitlines()[2:] == [
        "| 3.11.7 | 2.9.1 | 1 | 0 | 0 | 2026-03-04 | not recorded |",
        "| 3.11.9 | 2.13.0 | 2 | 0 | 0 | 2026-03-04 | not recorded |",
        "| 3.14.7 | 2.13.0 | 1 | 0 | 0 | 2026-03-04 | not recorded |",
        "| 3.14.7, free-threaded | 2.13.0 | 4,321 | 1 | 20; without tensorboard, nbmake | 2026-03-04 | not recorded |",
    ]
    assert updated(table, []) == table


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("===== 2 failed, 30 passed, 1 skipped, 4 errors in 60.00s (0:01:00) =====", [2, 30, 1, 4]),
        ("30 passed, 1 skipped, 51 deselected in 3723.10s (1:02:03)", [0, 30, 1, 0]),
        ("1 error in 0.50s", [0, 0, 0, 1]),
        ("it took 30 passed stations in 3.00s", []),
        ("bringing up nodes...", []),
    ],
)
def test_the_counts_of_the_last_line(line: str, counts: list[int]) -> None:
    found = suite.counted(line)
    assert ([found.get(word, 0) for word in ("failed", "passed", "skipped", "error")] if found else []) == counts


@pytest.mark.parametrize("program", ["exit(1)", "print('3.14.7')"])
def test_what_is_no_python_that_starts_is_passed_over(program: str, tmp_path: Path, monkeypatch) -> None:
    """pyenv's shims are there for Pythons that have not been chosen, and then end with an error."""
    shim = tmp_path / "python9.9"
    shim.write_text(f"#!{sys.executable}\n{program}\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    assert pythons.find("9.9") is None
    assert pythons.find(str(shim)) is None


def test_a_python_is_found_by_its_path_and_by_its_release() -> None:
    found = pythons.find(sys.executable)
    assert found is not None
    assert (found.path, found.version) == (sys.executable, ".".join(map(str, sys.version_info[:3])))
    assert found.release == sys.version_info[:2]
    assert (FREE.key, str(FREE)) == ("3.14t", "3.14.7, free-threaded")


def test_a_row_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With this process's environment in the place of one that is set up."""
    monkeypatch.setattr(suite, "program", lambda _: Path(sys.executable))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    python = FREE._replace(free_threaded=False)
    (tmp_path / "test_two.py").write_text("import pytest\ndef test_a(): pytest.skip('no')\ndef test_b(): assert 0\n")
    shown = suite.run_suite(tmp_path, python, ["tensorboard"], ["-n", "0", "-p", "no:cacheprovider"], tmp_path / "logs")
    assert (shown.passed, shown.failed, shown.skipped, shown.left_out) == (0, 1, 1, ["tensorboard"])
    assert "test_two.py::test_b" in capfd.readouterr().out
    assert "1 failed, 1 skipped" in next((tmp_path / "logs").iterdir()).read_text()
    nothing = suite.run_suite(tmp_path, python, [], ["-n", "0", "no-such-file"], tmp_path / "logs")
    assert nothing.how == "pytest ended with status 4"


def test_a_free_threaded_python_runs_without_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a package would turn it on. The variable would end another Python at its start."""
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    assert suite.environment_of(FREE)["PYTHON_GIL"] == "0"
    assert "PYTHON_GIL" not in suite.environment_of(FREE._replace(free_threaded=False))


@pytest.mark.parametrize(("keep", "is_left"), [([], False), (["--keep"], True)])
def test_a_part_of_the_suite_leaves_the_page(keep: list[str], is_left: bool, tmp_path: Path, monkeypatch) -> None:
    """The whole suite writes its row. An environment is removed, or kept."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- written by make compat -->\n<!-- end -->\nafter\n")
    folders = list[Path]()

    def set_up(folder: Path, *_: object) -> list[str]:
        folder.mkdir(exist_ok=True)
        folders.append(folder)
        return []

    monkeypatch.setattr(environment, "set_up", set_up)
    monkeypatch.setattr(command, "run_suite", lambda *_: row("3.11.7", "2.9.1"))
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    before = page.read_text()
    assert command.main(["--torch", "2.9.1", *keep, "--", "-k", "malloc"]) == 0
    assert page.read_text() == before
    assert command.main(["--torch", "2.9.1", *keep]) == 0
    assert "| 3.11.7 | 2.9.1 | 1 | 0 | 0 | 2026-03-04 | not recorded |\n<!-- end -->\nafter\n" in page.read_text()
    assert [folder.exists() for folder in folders] == [is_left, is_left]
    assert [path.name for path in tmp_path.glob(".venv-compat-downloads-*")] == []


def test_what_cannot_be_run_is_said_and_keeps_its_row(tmp_path: Path, monkeypatch, capsys) -> None:
    """No such Python, and a torch that cannot be installed, which leaves no environment."""
    page = tmp_path / "page.md"
    page.write_text("<!-- written by make compat -->\n" + updated("", [row("3.11.7", "2.9.1")]) + "<!-- end -->\n")
    before = page.read_text()

    def fail(folder: Path, *_: object) -> list[str]:
        folder.mkdir()
        raise environment.NotInstalledError

    monkeypatch.setattr(environment, "set_up", fail)
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main(["--python", "no-such-python"]) == 1
    assert "not run: no no-such-python here" in capsys.readouterr().err
    assert command.main(["--torch", "9.9.9"]) == 1
    assert "not run: torch 9.9.9 cannot be installed" in capsys.readouterr().err
    assert page.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.md"]


def test_a_python_without_venv_is_passed_over(tmp_path: Path, monkeypatch, capsys) -> None:
    """Debian's, without python3-venv. The pairs after it are run."""
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "find", lambda _: FREE)
    monkeypatch.setattr(subprocess, "run", lambda args, **_: subprocess.CompletedProcess(args, 1))
    assert command.main(["--torch", "2.9.1", "--", "-k", "malloc"]) == 1
    assert "not run: torch 2.9.1 cannot be installed" in capsys.readouterr().err


def test_pythons_of_one_release_have_environments_of_their_own(tmp_path: Path, monkeypatch) -> None:
    """The last number counts: with --keep, another Python's environment would be run under this one's name."""
    folders = list[Path]()

    def set_up(folder: Path, *_: object) -> list[str]:
        folders.append(folder)
        return []

    monkeypatch.setattr(environment, "set_up", set_up)
    monkeypatch.setattr(command, "run_suite", lambda *_: row("3.14.7", "2.9.1"))
    monkeypatch.setattr(command, "ROOT", tmp_path)
    for python in (FREE, FREE._replace(version="3.14.10"), FREE._replace(free_threaded=False)):
        monkeypatch.setattr(command, "find", lambda _, python=python: python)
        command.main(["--torch", "2.9.1", "--keep", "--", "-k", "malloc"])
    assert [folder.name for folder in folders] == [
        ".venv-compat-3.14.7t-2.9.1", ".venv-compat-3.14.10t-2.9.1", ".venv-compat-3.14.7-2.9.1",
    ]  # fmt: skip


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--torch", "2.9"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "compat: error: argument --torch: a release of torch, such as 2.9.1, or newest; not '2.9'"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not there")
@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ([], []),
        (["TORCH=2.9.1", "OPTIONS=tests/runtime -x"], ["--torch", "2.9.1", "--", "tests/runtime", "-x"]),
        (["PYTHON=python3", "KEEP=1"], ["--python", "python3", "--keep"]),
        (["OPTIONS=--list"], ["--list"]),
        (["TORCH="], ["--torch", ""]),  # a variable of a script that is not set: an error, not hours with every pair
    ],
)
def test_what_make_says(variables: list[str], arguments: list[str]) -> None:
    of_make = {"MAKEFLAGS", "MAKEOVERRIDES", "PYTHON", "TORCH", "KEEP", "OPTIONS"}  # of one that runs this test
    others = {name: text for name, text in os.environ.items() if name not in of_make}
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "compat", *variables],
        cwd=command.PAGE.parents[1], env=others, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = shlex.split(done.stdout.replace("\\\n", " ").split(" -m compat ")[1].partition("\n")[0])
    assert said == arguments
