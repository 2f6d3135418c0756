"""Copies of the tree, each with a process that runs tests in it: the checkout itself is never changed."""

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_START_S = 300.0  # for a server to import torch, on a machine that does other things too
_END_S = 30.0
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Ended(NamedTuple):
    """How a run of pytest has ended.

    Attributes:
        status: its exit status, negative for a signal; None: it took longer than the limit.
        events: what happened, in order; server.py writes them.
    """

    status: int | None
    events: list[dict[str, Any]]

    def tests(self, what: str) -> list[str]:
        return [event["test"] for event in self.events if event["what"] == what]


class Worker:
    """A copy of the tree, and a server that runs pytest in it, one run at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self.folder = root, folder / "tree"
        self._log, self._report = folder / "log.txt", folder / "report.jsonl"
        _copy(root, self.folder)
        self._server: subprocess.Popen[bytes] | None = None
        self._child: int | None = None

    def run(self, arguments: list[str], limit_s: float, record: Path | None = None) -> Ended:
        """Run pytest; with `record`, settings of coverage, record which lines each test runs."""
        if self._server is None:
            self._server = self._started()
        job: dict[str, object] = {
            "root": str(self._root),
            "folder": str(self.folder),
            "log": str(self._log),
            "arguments": arguments,
        }
        job |= {"report": str(self._report), "record": None if record is None else str(record)}
        self._report.unlink(missing_ok=True)
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job).encode() + b"\n")
        self._server.stdin.flush()
        self._child = self._answer(_START_S)
        if self._child is None:
            raise RuntimeError("the server of tests does not answer")
        status = self._answer(limit_s)
        if status is None:
            self._end_child()
            self._answer(_END_S)
        self._child = None
        lines = self._report.read_text(encoding="utf-8").splitlines() if self._report.exists() else []
        return Ended(status, [json.loads(line) for line in lines if line.endswith("}")])

    def last_lines(self) -> str:
        """Return the end of what pytest has printed in the last run."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-20:])

    @contextlib.contextmanager
    def changed(self, path: str, source: bytes) -> Iterator[None]:
        """Have another source in a file of the copy."""
        file = self.folder / path
        before, times = file.read_bytes(), file.stat()
        file.write_bytes(source)
        # Compiled files are told apart by the size and the time, in seconds, of their source.
        later = max(time.time_ns(), getattr(self, "_later", 0) + 10**9)
        self._later = later
        os.utime(file, ns=(later, later))
        try:
            yield
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def end(self) -> None:
        self._end_child()
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None

    def _end_child(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child, signal.SIGKILL)

    def _started(self) -> "subprocess.Popen[bytes]":
        own = {"OMP_NUM_THREADS": "1", "UNISONO_BIND_CORES": "0", "PYTHONFAULTHANDLER": "1", "COVERAGE_CORE": "ctrace"}
        others = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST_"))}
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "server.py")],
            env={**others, **own, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for this process alone
        )

    def _answer(self, limit_s: float) -> int | None:
        assert self._server is not None
        assert self._server.stdout is not None
        # Nothing but one answer is ever under way, so nothing is left in a buffer that select does not see.
        if not select.select([self._server.stdout], [], [], limit_s)[0]:
            return None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of tests has ended with status {self._server.wait()}")
        return int(line)


class Workers:
    """Several workers, each of which does one job at a time."""

    def __init__(self, root: Path, folder: Path, num: int) -> None:
        self._all = [Worker(root, folder / f"worker-{index}") for index in range(num)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)

    def map(self, function: Callable[[Worker, _Job], _Result], jobs: Iterable[_Job]) -> Iterator[tuple[_Job, _Result]]:
        """Yield each job with its result, as they end. Leaving the loop ends the jobs that are under way."""

        def do(job: _Job) -> _Result:
            worker = self._idle.get()
            try:
                return function(worker, job)
            finally:
                self._idle.put(worker)

        waiting = iter(jobs)
        pool = ThreadPoolExecutor(len(self._all))
        # The workers come first: zip takes one more from the first when the second has ended.
        futures = {pool.submit(do, job): job for _, job in zip(self._all, waiting, strict=False)}
        try:
            while futures:
                done, _ = wait(futures, return_when=FIRST_COMPLETED)
                for future in done:
                    job = futures.pop(future)
                    for following in waiting:
                        futures[pool.submit(do, following)] = following
                        break
                    yield job, future.result()
        except BaseException:
            self.end()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        for worker in self._all:
            worker.end()


def files_of(root: Path) -> list[str]:
    """Return the files of a tree, from its root: those that git knows or would add; without git, all."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, capture_output=True, check=False).stdout.decode().split("\0")[:-1]
    if not names:
        found = [path for path in root.rglob("*.*") if not {"__pycache__", "runs"} & set(path.relative_to(root).parts)]
        names = [str(path.relative_to(root)) for path in found]
    return sorted(name for name in names if (root / name).is_file())


def _copy(root: Path, folder: Path) -> None:
    """Make a copy of a tree, or make an older copy equal."""
    names = files_of(root)
    if folder.exists():
        for path in [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]:
            if str(path.relative_to(folder)) not in set(names):
                path.unlink()
    for name in names:
        source, copy = root / name, folder / name
        if copy.exists():
            before, now = copy.stat(), source.stat()
            if (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns):
                continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
