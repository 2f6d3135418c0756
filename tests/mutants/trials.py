"""Tries a mutant: runs tests that run its line, quick ones of many files first, until one fails or takes too long.

A test that fails kills the mutant if it passes without it, after the same other tests. This is tried once a test.
"""

import time
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from mutants.mutations import Mutant
from mutants.recording import PYTEST, RecordedTest, Recordings
from mutants.workers import Ended, Worker

KILLED, TIMED_OUT, SURVIVED, NOT_RUN = "killed", "timed out", "survived", "not run"
_LIMIT_S, _LIMIT_TIMES = 20.0, 3.0  # of a test: so long, and so many times as long as when it was recorded


class Outcome(NamedTuple):
    """What became of a mutant.

    Attributes:
        outcome: KILLED, TIMED_OUT, SURVIVED, or NOT_RUN if no recorded test runs its line.
        by: the test that killed it; of a survivor "".
        why: what that test said.
        num_tests: how many tests were to run; if it was killed, not all of them have.
        num_covering: how many tests run the line.
        seconds: how long it took.
        most_seconds: how long its tests might take, as recorded.
    """

    outcome: str
    by: str = ""
    why: str = ""
    num_tests: int = 0
    num_covering: int = 0
    seconds: float = 0.0
    most_seconds: float = 0.0


class Trials:
    """Tries mutants.

    Args:
        root: of the tree.
        recordings: which tests run a line.
        seconds: about how long the tests of a mutant may take together, as recorded.
        most: how many tests may run for a mutant.
    """

    def __init__(self, root: Path, recordings: Recordings, seconds: float, most: int) -> None:
        self._root, self._recordings, self._seconds, self._most = root, recordings, seconds, most
        self._pass_without, self._fail_without = set[str](), set[str]()

    def covering(self, mutant: Mutant) -> list[RecordedTest]:
        """Return the tests that run a mutant's line, and those of the file's own tests that run the file.

        The latter because a line may run once in a process, for all tests: it is recorded for the first of them alone.
        """
        tests = self._recordings.covering(mutant.path, mutant.lines)
        all_lines = range(1, (self._root / mutant.path).read_bytes().count(b"\n") + 2)
        of_file = self._recordings.covering(mutant.path, all_lines) if tests else []
        return [*{*tests, *(test for test in of_file if test.file.endswith(_own_file(mutant.path)))}]

    def try_mutant(self, worker: Worker, mutant: Mutant, covering: list[RecordedTest]) -> Outcome:
        began = time.monotonic()
        source = (self._root / mutant.path).read_bytes()
        while True:
            tests = self._chosen(mutant.path, [test for test in covering if test.id not in self._fail_without])
            if not tests:
                return Outcome(NOT_RUN, num_covering=len(covering))
            with worker.changed(mutant.path, mutant.applied(source)):
                ended = self._run(worker, tests)
            outcome, by, why = _read(ended, worker)
            if outcome == SURVIVED or self._passes_without(worker, tests, by):
                seconds = round(time.monotonic() - began, 1)
                return Outcome(outcome, by, why, len(tests), len(covering), seconds, self._seconds)

    def _chosen(self, path: str, covering: list[RecordedTest]) -> list[RecordedTest]:
        """Return the tests to run: first those of the same name, then one a file, then one a function, then others."""
        own = _own_file(path)
        seen, order = set[str](), list[tuple[int, RecordedTest]]()
        for test in sorted(covering, key=lambda test: (test.seconds, test.id)):
            turn = (
                0 if test.file.endswith(own) else 1 if test.file not in seen else 2 if test.function not in seen else 3
            )
            order.append((turn, test))
            seen |= {test.file, test.function}
        chosen, files, seconds = list[RecordedTest](), set[str](), 0.0
        for _, test in sorted(order, key=itemgetter(0)):
            cost = test.seconds + (0.0 if test.file in files else self._recordings.collected_s(test.file))
            if len(chosen) < self._most and (not chosen or seconds + cost <= self._seconds):
                chosen.append(test)
                files.add(test.file)
                seconds += cost
        return chosen

    def _run(self, worker: Worker, tests: list[RecordedTest]) -> Ended:
        limit_s = _LIMIT_S + _LIMIT_TIMES * max(test.seconds for test in tests)
        each = ["-o", f"faulthandler_timeout={limit_s:.0f}", "-o", "faulthandler_exit_on_timeout=true"]
        files = {test.file for test in tests}
        all_s = sum(test.seconds for test in tests) + sum(self._recordings.collected_s(file) for file in files)
        return worker.run([*(test.id for test in tests), "-x", *each, *PYTEST], 2 * limit_s + _LIMIT_TIMES * all_s)

    def _passes_without(self, worker: Worker, tests: list[RecordedTest], by: str) -> bool:
        """Return whether the tests up to the one that failed pass without the mutant."""
        if by in self._pass_without:
            return True
        index = next((index for index, test in enumerate(tests) if test.id == by), 0)
        ended = self._run(worker, tests[: index + 1])
        if ended.status == 0:
            self._pass_without.add(by)
            return True
        failed = _read(ended, worker)[1]
        self._fail_without.add(failed if failed in {test.id for test in tests} else tests[index].id)
        return False


def _own_file(path: str) -> str:
    return f"/test_{Path(path).stem}.py"


def _read(ended: Ended, worker: Worker) -> tuple[str, str, str]:
    """Return the outcome of a run, the test that made it, and what it said."""
    if ended.status == 0:
        return SURVIVED, "", ""
    for event in ended.events:
        if event["what"] in {"failed", "not collected"}:
            return KILLED, event["test"], event["text"]
    begun, finished = ended.tests("begun"), set(ended.tests("ended"))
    if begun and begun[-1] not in finished:
        crashed = ended.status is not None and ended.status < 0
        return KILLED if crashed else TIMED_OUT, begun[-1], f"exit status {ended.status}"
    # Such as an error in conftest.py, or a process that does not end.
    return KILLED if ended.status is not None else TIMED_OUT, "", worker.last_lines()[-500:]
