"""`make mutants`: what it changes, and how it tells which changes tests notice."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("coverage")  # a development dependency

from mutants import command
from mutants.mutations import Mutant, differs, mutants_of
from mutants.recording import RecordedTest, Recordings
from mutants.trials import Outcome, Trials
from mutants.workers import Worker

forks = pytest.mark.only_on("linux", "macos", because="its server forks")
SOURCE = """
import threading

def area(width, height):
    return width * height

def larger(left, right):
    if left > right:
        return left
    return right

def empty(numbers):
    while numbers:
        numbers.pop()
    return numbers

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def never_called():
    return 1
"""
TESTS = """
import subprocess, sys, tiny

def test_area():
    assert tiny.area(2, 3) == 6

def test_larger():
    assert tiny.larger(2, 1) == 2

def test_empty():
    assert tiny.empty([1, 2]) == []

def test_in_thread():
    tiny.in_thread(lambda: tiny.larger(1, 1))

def test_in_a_process():
    subprocess.run([sys.executable, "-c", "import tiny; assert tiny.area(1, 5) == 5"], check=True)
"""


def run(tree: Path, *arguments: str) -> int:
    return command.main(["--files", "src/*", "--tests", "tests", "--jobs", "1", *arguments], tree)


def outcomes(tree: Path) -> dict[str, tuple[str, str]]:
    """Return of each change what became of it, and the test that it is by."""
    lines = [json.loads(line) for path in tree.glob("runs/mutants/*.jsonl") for line in path.read_text().splitlines()]
    return {f"{line['line']}: {line['before']}": (line["outcome"], line["by"].partition("::")[2]) for line in lines}


def write_package(tree: Path) -> Path:
    """Write a small package, and its tests."""
    for name, text in (("src/tiny/__init__.py", SOURCE), ("tests/test_tiny.py", TESTS), ("pyproject.toml", "")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small package; two of its mutants have been tried, then it was stopped."""
    tree, num_tried = write_package(tmp_path_factory.mktemp("tree")), 0
    try_mutant = Trials.try_mutant

    def stopped(self: Trials, worker: Worker, mutant: Mutant, covering: list[RecordedTest]) -> Outcome:
        nonlocal num_tried
        num_tried += 1
        if num_tried == 3:
            raise KeyboardInterrupt
        return try_mutant(self, worker, mutant, covering)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mutants.trials._LIMIT_S", 10.0)
        with pytest.MonkeyPatch.context() as until_stopped:
            until_stopped.setattr(Trials, "try_mutant", stopped)
            assert run(tree) == 130
        yield tree


@forks
def test_killed_survived_timed_out_and_not_run(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It continues where it was stopped: nothing is recorded again, and what was tried is not tried again."""
    before = outcomes(tree)
    assert len(before) == 2
    assert run(tree) == 0
    assert "recording" not in capsys.readouterr().out
    found = outcomes(tree)
    assert found.items() > before.items()
    assert found["14: numbers.pop()"] == ("timed out", "test_empty")
    assert found["20: thread.join()"] == ("survived", "")  # the tests do not see whether it is waited for
    assert found["23: 1"] == ("not run", "")
    assert {found[name] for name in found if name.startswith("5: ")} == {("killed", "test_area")}
    page = (tree / "runs/mutants/table.md").read_text()
    assert "src/tiny/__init__.py:20: a call is left out: `thread.join()`" in page
    assert (tree / "src/tiny/__init__.py").read_text() == SOURCE


@forks
def test_what_runs_in_threads_and_processes_counts(tree: Path) -> None:
    recordings = Recordings(tree, tree / "runs/mutants/recorded", ["tests"])

    def functions(line: int) -> set[str]:
        covering = recordings.covering("src/tiny/__init__.py", [line])
        return {test.function.partition("::")[2] for test in covering}

    assert functions(5) == {"test_area", "test_in_a_process"}
    assert functions(8) == {"test_larger", "test_in_thread"}


def test_every_change_of_a_line() -> None:
    source = b"""
def f(a: int = 1, *rest: int) -> int:
    "text"
    with a.lock:
        a.wait(rest, 2, timeout=None)
    if not a:
        raise ValueError("1 + 1")
    a.b = a[:a.c] if a is None else [x for x in range(a.c) if x and a < 2]
    for _ in a: break
    del a.b
    return a
"""
    found = mutants_of("f.py", source)
    assert all(differs(mutant, source) for mutant in found)
    assert [(mutant.line, mutant.kind, mutant.before, mutant.after) for mutant in found if mutant.line != 8] == [
        (2, "another constant", "1", "2"),
        (4, "a context is left out", "a.lock", '__import__("contextlib").nullcontext()'),
        (5, "a call is left out", "a.wait(rest, 2, timeout=None)", "pass"),
        (5, "arguments are swapped", "rest, 2", "2, rest"),
        (5, "an argument is left out", ", timeout=None", ""),
        (5, "another constant", "2", "3"),
        (6, "a condition is turned", "not a", "(a)"),
        (7, "a raise is left out", 'raise ValueError("1 + 1")', "pass"),
        (9, "continue for break", "break", "continue"),
        (10, "a statement is left out", "del a.b", "pass"),
        (11, "None is returned", "a", "None"),
    ]
    assert {mutant.after for mutant in found if mutant.line == 8} == {
        "pass", "is not", "(a.c) + 1", "(a.c) - 1", "(not (x and a < 2))", "or", "<=", "3"
    }  # fmt: skip


def test_what_only_imports_run_is_noticed_where_it_is_used() -> None:
    source = b"MOST = 3\n\ndef f(a=1):\n    return min(a,\n        MOST)\n"
    assert [(mutant.before, mutant.lines) for mutant in mutants_of("f.py", source)] == [
        ("3", (5,)),
        ("1", (4, 5)),
        ("min(a,\n        MOST)", (4, 5)),
        ("a,\n        MOST", (4, 5)),
    ]


def test_other_sources_are_another_set(tmp_path: Path) -> None:
    tree = write_package(tmp_path)
    first, second = (command.drawn(tree, ["src/*"], seed, 5) for seed in (1, 2))
    assert first != second
    assert command.drawn(tree, ["src/*"], 1, 3) == first[:3]
