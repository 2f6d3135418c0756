"""Which tests run a line, and how long a test takes: recorded once by coverage, a file of tests at a time.

A recording holds while the sources and the file of tests are as they were; what has changed is recorded again.
"""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from coverage import CoverageData
from coverage.exceptions import DataError

from mutants.workers import Worker, files_of

SOURCES = "src/"
# `patch`: processes that are forked, and those that end without Python's own end, write what they have run, too.
_SETTINGS = """[run]
parallel = true
data_file = {folder}/lines
include = {tree}/src/*
concurrency = thread
core = ctrace
patch =
    fork
    _exit
disable_warnings = no-data-collected, module-not-measured, couldnt-parse
"""


PYTEST = ("-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", "--color=no")
_HAS_RUN = (0, 1, 5)  # statuses of pytest: all have passed, some have failed, there are none


class RecordingError(Exception):
    """A file of tests cannot be run, also without a mutant."""


class RecordedTest(NamedTuple):
    id: str
    seconds: float

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]

    @property
    def function(self) -> str:
        return self.id.partition("[")[0]


class Recordings:
    """The recordings of some files of tests.

    Args:
        root: of the tree.
        folder: where they are kept.
        tests: files or folders of tests, from the root.
    """

    def __init__(self, root: Path, folder: Path, tests: Iterable[str]) -> None:
        self._root, self._folder = root, folder
        names = files_of(root)
        self.sources = _digest(root, [name for name in names if name.startswith(SOURCES)])
        prefixes = tuple(tests)
        below = tuple(prefix.rstrip("/") + "/" for prefix in prefixes)
        files = [name for name in names if name in prefixes or name.startswith(below)]
        self.files = [name for name in files if Path(name).name.startswith("test_") and name.endswith(".py")]

    def missing(self) -> list[str]:
        """Return the files of tests that are to be recorded, the largest first: they are likely to take longest."""
        missing = [file for file in self.files if self._about(file).get("digest") != self._digest_of(file)]
        return sorted(missing, key=lambda file: -(self._root / file).stat().st_size)

    def record(self, worker: Worker, file: str, limit_s: float) -> str:
        """Record a file of tests; return what it was like."""
        own = self._path(file, "parts")
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        settings = own / "settings.ini"
        settings.write_text(_SETTINGS.format(folder=own, tree=worker.folder), encoding="utf-8")
        ended = worker.run([file, *PYTEST], limit_s, settings)
        if ended.status not in {None, *_HAS_RUN}:
            raise RecordingError(f"{file}: pytest ends with status {ended.status}:\n{worker.last_lines()}")
        seconds = {event["test"]: event["seconds"] for event in ended.events if event["what"] == "ended"}
        of_file = {name: event["test"] for event in ended.events if event["what"] == "files" for name in event["names"]}
        self._path(file, "lines").unlink(missing_ok=True)
        lines = CoverageData(basename=str(self._path(file, "lines")))
        for part in own.glob("lines.*"):
            data = CoverageData(basename=str(part))
            try:
                data.read()
            except DataError:  # of a process that was killed while it wrote
                continue
            for context in data.measured_contexts():
                data.set_query_context(context)
                lines.set_context(context or of_file.get(part.name, ""))
                lines.add_lines(
                    {name.removeprefix(f"{worker.folder}/"): data.lines(name) or [] for name in data.measured_files()}
                )
        lines.write()
        lines.close()
        shutil.rmtree(own)
        collected = next((event["seconds"] for event in ended.events if event["what"] == "collected"), 0.0)
        about = {"digest": self._digest_of(file), "collected_s": collected, "tests": seconds}
        self._path(file, "json").write_text(json.dumps(about), encoding="utf-8")
        self._about.cache_clear()
        failed = len(set(ended.tests("failed")))
        end = "" if ended.status is not None else f", ended after {limit_s:.0f} s: the rest is not recorded"
        return f"{len(seconds)} tests, {sum(seconds.values()):.0f} s{f', {failed} failed' * bool(failed)}{end}"

    def covering(self, path: str, lines: Iterable[int]) -> list[RecordedTest]:
        """Return the tests that run one of some lines of a file.

        To ask about one file after the other is quicker: what is known of the last one is kept.
        """
        by_line = self._tests_by_line(path)
        tests = {test for line in lines for test in by_line.get(line, ())}
        return [RecordedTest(name, self._seconds[name]) for name in tests if name in self._seconds]

    def collected_s(self, file: str) -> float:
        """Return how long it takes to import a file of tests, without what each needs."""
        return float(self._about(file)["collected_s"]) - self._least_collected_s

    @cached_property
    def _least_collected_s(self) -> float:
        return min(float(self._about(file)["collected_s"]) for file in self.files)

    @cached_property
    def _seconds(self) -> dict[str, float]:
        return {name: seconds for file in self.files for name, seconds in self._about(file).get("tests", {}).items()}

    @lru_cache(maxsize=1)  # noqa: B019 - there is one object of this class
    def _tests_by_line(self, path: str) -> dict[int, set[str]]:
        found: dict[int, set[str]] = defaultdict(set)
        for file in self.files:
            data = CoverageData(basename=str(self._path(file, "lines")))
            data.read()
            for line, tests in data.contexts_by_lineno(path).items():
                found[line] |= set(tests)
            data.close()
        return found

    @cache  # noqa: B019
    def _about(self, file: str) -> dict[str, Any]:
        path = self._path(file, "json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _digest_of(self, file: str) -> str:
        return f"{self.sources} {_digest(self._root, [file])}"

    def _path(self, file: str, kind: str) -> Path:
        return self._folder / f"{file.removesuffix('.py').replace('/', '-')}.{kind}"


def _digest(root: Path, names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0".encode() + (root / name).read_bytes())
    return digest.hexdigest()[:12]
