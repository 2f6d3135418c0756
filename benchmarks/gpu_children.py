"""The child processes of gpu_check.py: they run tests and plain checks, measure figures, or describe the machine.

    python benchmarks/gpu_children.py '{"kind": ..., ...}'

Every event is written to a journal at once, one line of JSON each, so that nothing is lost when a process crashes or is
killed. A check that takes too long ends the process, after the stacks of all threads have been written. So does a check
after which the GPU can no longer be used in this process, because all later checks would fail too.
"""

import contextlib
import faulthandler
import functools
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A check that needs one of these is skipped if it is missing.
OPTIONAL = ("hypothesis", "matplotlib", "numpy", "psutil", "rich", "safetensors", "sklearn", "transformers", "xdist")
# After these errors the CUDA context is lost, and everything later in the process fails.
_CONTEXT_IS_LOST = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure")
GPU_LOST = 97  # the exit status then


class Journal:
    """The record of a process.

    Args:
        path: the file.
        check_limit_s: a check that takes longer ends the process.
        seconds: after so many no further check begins.
        overtime_s: for the check that is running then.
    """

    def __init__(self, path: Path, check_limit_s: float, seconds: float, overtime_s: float) -> None:
        self._file = path.open("a", buffering=1)
        self._stacks = os.fdopen(os.dup(2), "w")  # pytest replaces stderr
        self._check_limit_s, self._overtime_s = check_limit_s, overtime_s
        self._deadline = time.monotonic() + seconds

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")

    def begin(self, name: str) -> None:
        left_s = max(self._deadline - time.monotonic(), 0.0) + self._overtime_s
        limit_s = min(self._check_limit_s, left_s)
        self.write("began", name=name, limit_s=round(limit_s, 1))
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stacks)

    def end(self, name: str, outcome: str, seconds: float, text: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.write("ended", name=name, outcome=outcome, seconds=round(seconds, 3), text=text)
        if outcome == "failed" and any(sign in text for sign in _CONTEXT_IS_LOST):
            os._exit(GPU_LOST)

    def time_is_over(self) -> bool:
        return time.monotonic() > self._deadline


def missing_module(text: str) -> str | None:
    """Return the optional package whose absence caused an error; None if it was another error."""
    if "Numpy is not available" in text:  # torch's words
        return "numpy"
    absent = "Error: No module named '{name}", "Error: import of {name} halted"  # torch also warns in these words
    return next((name for name in OPTIONAL if any(words.format(name=name) in text for words in absent)), None)


class Recorder:
    """A pytest plugin: records every test, and leaves out those that have ended in an earlier process."""

    def __init__(self, journal: Journal, ended: list[str]) -> None:
        self._journal, self._ended = journal, set(ended)
        self._outcome, self._text, self._seconds = "passed", "", 0.0
        self._warnings: set[str] = set()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._end_with(report.nodeid, 0.0, str(report.longrepr))

    def pytest_collection_finish(self, session: Any) -> None:
        session.items[:] = [item for item in session.items if item.nodeid not in self._ended]
        self._journal.write("collected", names=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._text, self._seconds = "passed", "", 0.0
        self._journal.begin(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds += report.duration
        if report.failed:
            self._outcome, self._text = "failed", (self._text + "\n" + report.longreprtext).strip()
        elif report.skipped and self._outcome == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._outcome, self._text = "skipped", reason.removeprefix("Skipped: ")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._outcome == "failed":
            self._end_with(nodeid, self._seconds, self._text)
        else:
            self._journal.end(nodeid, self._outcome, self._seconds, self._text)

    def pytest_runtestloop(self, session: Any) -> None:
        self._session = session

    def pytest_runtest_teardown(self) -> None:
        if self._journal.time_is_over():
            self._session.shouldstop = "its time is over"

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        text = f"{warning_message.category.__name__}: {str(warning_message.message).strip().splitlines()[0][:300]}"
        if text not in self._warnings:
            self._warnings.add(text)
            self._journal.write("warning", text=text)

    def _end_with(self, name: str, seconds: float, text: str) -> None:
        absent = missing_module(text)
        outcome, text = ("skipped", f"not run: {absent} is missing") if absent else ("failed", text)
        self._journal.end(name, outcome, seconds, text)


def run_tests(journal: Journal, ended: list[str], arguments: list[str]) -> None:
    """Run pytest. Warnings are recorded and are no errors, because other versions of packages give other warnings."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed with this Python
    import pytest

    settings = ["filterwarnings=default", "faulthandler_timeout=0"]  # the journal has a limit of its own
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += [f"--override-ini={setting}" for setting in settings]
    status = pytest.main([*arguments, *options], plugins=[Recorder(journal, ended)])
    errors = {pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR}
    if not ended:  # a process that goes on after the last test has none left
        errors.add(pytest.ExitCode.NO_TESTS_COLLECTED)
    if status in errors:
        sys.exit(int(status))


def run_programs(journal: Journal, ended: list[str], arguments: list[str]) -> None:
    """Run the plain checks, which need torch alone."""
    import gpu_programs

    devices, *options = arguments
    checks = gpu_programs.checks_on(devices.split(","), examples="--examples" in options)
    run_checks(journal, {name: check for name, check in checks.items() if name not in ended})


def run_figures(journal: Journal, ended: list[str], arguments: list[str]) -> None:
    """Measure the figures, with their assertions; a missing package is no failure."""
    import gpu_figures

    device, data, *options = arguments
    bench = gpu_figures.bench_on(device, dry="--dry" in options, data=Path(data) if data else None)
    names = [name for name in gpu_figures.FIGURES if name not in (*gpu_figures.MINUTES_LONG, *ended)]

    def measure(name: str) -> None:
        for figure in gpu_figures.FIGURES[name](bench):
            journal.write("figure", **figure._asdict())

    run_checks(journal, {name: functools.partial(measure, name) for name in names})


def run_checks(journal: Journal, checks: dict[str, Callable[[], None]]) -> None:
    """Run checks that are not pytest's, as long as there is time."""
    journal.write("collected", names=list(checks))
    for name, check in checks.items():
        if journal.time_is_over():
            return
        run_check(journal, name, check)


def run_check(journal: Journal, name: str, check: Callable[[], None]) -> None:
    """Run one check, and record how it ended."""
    journal.begin(name)
    began = time.monotonic()
    outcome, text = "passed", ""
    try:
        check()
    except Exception:  # noqa: BLE001 - every error is recorded
        text = traceback.format_exc()
        absent = missing_module(text)
        outcome, text = ("skipped", f"not run: {absent} is missing") if absent else ("failed", text)
    journal.end(name, outcome, time.monotonic() - began, text)


def machine() -> dict[str, Any]:
    """Return the accelerators and versions."""
    import torch

    if torch.version.cuda:
        torch.cuda.is_available()  # which warns of a driver that is too old
    kind = torch.accelerator.current_accelerator(check_available=True)
    found: list[dict[str, Any]] = []
    for index in range(torch.accelerator.device_count() if kind else 0):
        properties = torch.get_device_module(kind).get_device_properties(index)
        memory = getattr(properties, "total_memory", 0)
        capability = ".".join(str(getattr(properties, name, "?")) for name in ("major", "minor"))
        found.append({"name": properties.name, "memory_gib": round(memory / 2**30, 1), "capability": capability})
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["CUDA"] = torch.version.cuda or torch.version.hip or "none"
    with contextlib.suppress(Exception):  # a build without it
        versions["cuDNN"] = str(torch.backends.cudnn.version())
    with contextlib.suppress(Exception):
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(OSError):
        versions["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    with contextlib.suppress(ImportError):
        import unisono

        versions["unisono"] = unisono.__version__
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no clone
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
        versions["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "kind": kind.type if kind else None,
        "accelerators": found,
        "versions": versions,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def main() -> None:
    """Run the orders in the only argument."""
    orders = json.loads(sys.argv[1])
    if "queued" in os.environ.get("UNISONO_TEST_DEVICES", ""):  # a dry run
        async_device = importlib.import_module("async_device")  # of tests/async_device
        os.environ.update(async_device.environment())  # the processes that checks start have it too
    if orders["kind"] == "machine":
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            found = machine()
        print(json.dumps({**found, "said": [str(warning.message) for warning in given]}))
        return
    faulthandler.enable()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # equal bits on whatever stream
    limits = (orders[name] for name in ("check_limit_s", "seconds", "overtime_s"))
    journal = Journal(Path(orders["journal"]), *limits)
    run = {"tests": run_tests, "programs": run_programs, "figures": run_figures}[orders["kind"]]
    run(journal, orders["ended"], orders["arguments"])
    journal.write("finished")


if __name__ == "__main__":
    main()
