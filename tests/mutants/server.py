"""The process that runs tests: it has imported torch and pytest, and forks a process for each job.

So a job does not pay for these imports, and begins with clean modules: nothing of the sources is imported before the
fork, and no thread has been started. A job is a line of JSON on standard input; the answers are lines on standard
output: the id of the forked process, which is also its process group, then its exit status.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# The last ones are what backward and the first optimizer import.
_IMPORTS = ["pytest", "coverage", "numpy", "torch", "torch.distributed", "torch._dynamo"]
_IMPORTS += ["torch.fx.experimental.symbolic_shapes"]


def serve() -> None:
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_run(job))
        print(child, flush=True)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what it has started; before its id may be another process's
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(job: dict[str, Any]) -> int:
    """Run pytest in the folder of a job; return its exit status."""
    try:
        os.setsid()
        null, log = os.open(os.devnull, os.O_RDONLY), os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for opened, number in ((null, 0), (log, 1), (log, 2)):
            os.dup2(opened, number)
        root, folder = job["root"], job["folder"]
        own = [os.path.join(folder, "src"), os.path.join(folder, "tests")]
        # Nothing of the checkout itself: of it, only an environment may be found.
        others = [path for path in sys.path if "site-packages" in path or not os.path.abspath(path).startswith(root)]
        sys.path[:] = [*own, *others]
        os.environ.update(PYTHONPATH=os.pathsep.join(own))
        os.chdir(folder)
        importlib.invalidate_caches()
        with open(job["report"], "w", encoding="utf-8", buffering=1) as report:
            plugin = _Report(report) if job["record"] is None else _Recorder(report, job["record"])
            import pytest

            status = int(pytest.main(job["arguments"], plugins=[plugin]))
            plugin.end()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:  # noqa: BLE001 - the log has it
        traceback.print_exc()
        sys.stderr.flush()
        return 70
    return status


class _Report:
    """Writes what happens to a file, line by line: it is there too if the process is ended."""

    def __init__(self, report: Any) -> None:
        self._report, self._began = report, time.monotonic()

    def write(self, what: str, **more: object) -> None:
        self._report.write(json.dumps({"what": what, **more}) + "\n")

    def pytest_collection_finish(self) -> None:
        self.write("collected", seconds=time.monotonic() - self._began)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write("not collected", test=report.nodeid, text=str(report.longrepr)[-2000:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = time.monotonic()
        self.write("begun", test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr)
            self.write("failed", test=report.nodeid, text=text[:500])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write("ended", test=nodeid, seconds=time.monotonic() - self._began)

    def end(self) -> None:
        pass


class _Recorder(_Report):
    """Records which lines a test runs: in this process, in its threads, and in the processes that it starts.

    A process writes what it has run to a file of its own, when it ends. So a file that is new after a test is of it.
    """

    def __init__(self, report: Any, settings: str) -> None:
        super().__init__(report)
        from coverage import Coverage

        os.environ["COVERAGE_PROCESS_START"] = settings  # coverage begins in each Python that starts with it
        self._files = Path(settings).parent
        self._seen = set(os.listdir(self._files))
        self._coverage = Coverage(config_file=settings)
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        super().pytest_runtest_logstart(nodeid)
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._coverage.switch_context("")
        super().pytest_runtest_logfinish(nodeid)
        files = set(os.listdir(self._files)) - self._seen
        self._seen |= files
        if files:
            self.write("files", test=nodeid, names=sorted(files))

    def end(self) -> None:
        self._coverage.stop()
        self._coverage.save()


if __name__ == "__main__":
    serve()
