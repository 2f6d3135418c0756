"""Test the accelerator paths on this machine's GPU: run the checks, measure the figures, write gpu-results.md.

    make gpu-check                                         with .venv's Python if there is one, else python3
    make gpu-check PYTHON=/opt/conda/bin/python            with another one
    PYTHONPATH=src python benchmarks/gpu_check.py --help   the same, with options

It needs torch, and pytest for most checks. Where pytest is missing, it takes pytest from the package index into a
temporary folder, for this run; nothing that is installed changes. Without a network, packages can be brought along as
wheels, which it takes from the folder `wheels`:

    pip download -d wheels pytest    where there is a network, with the same Python version

Without either, it runs what needs torch alone: plain checks, examples and figures. A check that needs another package
which is missing (numpy, psutil, matplotlib, safetensors, rich, hypothesis, pytest-xdist) is reported as not run.

Every group of checks runs in its own process with a time budget; where there are cores and memory for it, some groups
of tests run side by side, and figures alone. A check that crashes or hangs becomes a line in the report, with the
stacks of all threads, and the group goes on after it in a new process. The report is written after each group. Exit
status: 0 all that was run passed, or there is no GPU (then nothing has been run); 1 a check failed; 2 torch cannot use
the GPU; 130 after Ctrl-C.

Only the standard library is imported here: torch itself may be what crashes.
"""

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_children
import gpu_report

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
BUDGET_S = 550.0
OVERTIME_S = 30.0  # for the running check, after the time of its group is over
GRACE_S = 20.0  # for a process to end after that
DESCRIBE_S = 120.0  # for torch to be imported and to see the GPUs
BUILD_S = 900.0  # for the asynchronous device of a dry run, which is compiled once
FETCH_S = 60.0  # for pytest to be downloaded
SIDE_BY_SIDE, CORES, MEMORY_GIB = 3, 8, 16  # so many groups of tests at once, with at least these cores and GPUs
QUEUED = "queued:0,queued:1"  # devices that are simulated on the CPU (tests/async_device)
MOST_STARTS = 8  # of one group


@dataclass(frozen=True)
class Group:
    """Checks that run in one process.

    Attributes:
        name: what the report calls it.
        kind: "tests", "programs" or "figures": how gpu_children.py runs it. Only tests need pytest.
        arguments: pytest's, or the devices, then options.
        budget_s: after so many seconds no further check begins.
        environment: variables in addition to the caller's.
        check_limit_s: a check that takes longer counts as hung.
    """

    name: str
    kind: str
    arguments: Sequence[str]
    budget_s: float
    environment: dict[str, str] = field(default_factory=dict)
    check_limit_s: float = 90.0


MENDED = "tests/gpu/test_mended.py"
GPU_TESTS = (
    "tests/gpu/test_gpu.py",
    "tests/gpu/test_order.py",
    "tests/gpu/test_processes.py",
    "tests/gpu/test_training.py",
)


def groups_for(kind: str, count: int, *, data: str = "", side_by_side: bool = False) -> list[Group]:
    """Return the groups for a machine with `count` accelerators, the most important first; figures, alone, last.

    Seconds are those of the first runs, on an H200, and some more. One after the other, all of it takes longer than
    there is time: each group gets its share. Side by side, each may take all the time that is not for the figures.

    Args:
        data: a folder of real pictures for the figures; "" for none.
        side_by_side: whether groups of tests run beside each other.
    """
    devices = [f"{kind}:{index}" for index in range(count)]
    every, suite = ",".join(devices), ["tests/contract", "-m", "not slow"]
    seen = {"UNISONO_TEST_DEVICES": every}  # else tests/conftest.py hides them
    groups = [
        Group("plain checks", "programs", [every], 60),
        Group("GPU tests", "tests", [*GPU_TESTS, "-m", "gpu"], 280, seen, check_limit_s=150),  # torch.compile is slow
        Group("contract, replicas on one GPU", "tests", suite, 240, {"UNISONO_TEST_DEVICES": devices[0]}),
        Group("mended defects", "tests", [MENDED], 70, seen, check_limit_s=60),
        Group("examples", "tests", ["tests/test_examples.py", "-m", "gpu"], 50, seen),
        Group("figures", "figures", [devices[0], data], 220 if count == 1 else 250, check_limit_s=150),
    ]
    if count > 1:
        groups.insert(1, Group("contract, a replica on each GPU", "tests", suite, 240, seen))
    if side_by_side:
        *others, figures = groups
        return [*(replace(group, budget_s=BUDGET_S - figures.budget_s) for group in others), figures]
    share = min(1.0, BUDGET_S / sum(group.budget_s for group in groups))
    return [replace(group, budget_s=group.budget_s * share) for group in groups]


def dry_groups(kind: str) -> list[Group]:
    """Return a few checks of each kind, to show that this program works: on simulated devices, or on the CPU."""
    several, one = (QUEUED, "queued:0") if kind == "queued" else ("cpu,cpu", "cpu,cpu")
    simulated = {"UNISONO_TEST_DEVICES": several}
    suite = ["tests/contract/test_gradients.py", "-m", "not slow", "-k", "unused_rows"]
    few = ["tests/gpu/test_gpu.py", MENDED, "-k", "each_replica_stands or outputs_on_the_host or checkpoints"]
    return [  # with time enough for a busy machine
        Group("plain checks", "programs", [several], 200, simulated),
        Group("contract, a replica on each GPU", "tests", suite, 150, simulated),
        Group("GPU tests", "tests", few, 150, simulated),
        Group("contract, replicas on one GPU", "tests", suite, 150, {"UNISONO_TEST_DEVICES": one}),
        Group("figures", "figures", [several.split(",")[0], "", "--dry"], 200, simulated),
    ]


def without_pytest(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with the plain checks extended by the examples, which tests run otherwise."""
    return [
        replace(group, arguments=[*group.arguments, "--examples"], budget_s=2 * group.budget_s)
        if group.kind == "programs"
        else group
        for group in groups
    ]


# ---- one group -----------------------------------------------------------------------------------


@dataclass
class Check:
    """One check and its outcome: passed, failed, skipped, hung, crashed, or cut (the time of its group was over)."""

    name: str
    outcome: str = "cut"
    seconds: float = 0.0
    text: str = ""


@dataclass
class Done:
    """The outcome of a group."""

    group: Group
    checks: dict[str, Check] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problem: str = ""  # why the group as a whole could not be run, which is a failure
    not_run: str = ""  # why it was left out, which is none
    seconds: float = 0.0
    running: str | None = None  # the check
    limit_s: float = 0.0  # of the running check

    def take(self, event: dict[str, Any]) -> None:
        """Add one event of a child's journal."""
        match event.pop("event"):
            case "collected":
                for name in event["names"]:
                    self.checks.setdefault(name, Check(name))
            case "began":
                self.running, self.limit_s = event["name"], event["limit_s"]
                self.checks.setdefault(event["name"], Check(event["name"]))
            case "ended":
                self.running = None
                self.checks[event["name"]] = Check(**event)
            case "figure":
                self.figures.append(event)
            case "warning":
                self.warnings.append(event["text"])

    def count(self, *outcomes: str) -> int:
        """Return how many checks ended in one of these ways."""
        return sum(check.outcome in outcomes for check in self.checks.values())

    @property
    def failed(self) -> bool:
        return bool(self.problem or self.count("failed", "hung", "crashed"))


_results = threading.RLock()  # held while outcomes are added, or written: groups run side by side
_children: set["subprocess.Popen[bytes]"] = set()  # those that run now
_stopping = threading.Event()  # no further child begins


def run_group(done: Done, environment: dict[str, str], budget_s: float) -> None:
    """Run a group in as many processes as it takes; `done` is always up to date."""
    group = done.group
    began = time.monotonic()
    deadline = began + budget_s
    with tempfile.TemporaryDirectory() as folder:
        for start in range(MOST_STARTS):
            ended = [check.name for check in done.checks.values() if check.outcome != "cut"]
            journal, log = Path(folder, f"journal-{start}"), Path(folder, f"log-{start}")
            orders = {
                "kind": group.kind,
                "arguments": list(group.arguments),
                "ended": ended,
                "seconds": deadline - time.monotonic(),
                "check_limit_s": group.check_limit_s,
                "overtime_s": OVERTIME_S,
                "journal": str(journal),
            }
            try:
                status = _run_child(orders, {**environment, **group.environment}, log)
            finally:
                with _results:
                    finished = _take_journal(journal, done)
                    done.seconds = time.monotonic() - began
            if finished or _stopping.is_set():
                return
            text = log.read_text(errors="replace") if log.exists() else ""
            if status == gpu_children.GPU_LOST:
                continue
            if done.running is None and len(done.checks) - done.count("cut") == len(ended):
                done.problem = f"its process ended before a check ({_how(status)})\n{_tail(text)}"
                return
            with _results:
                done.take(_ended_by_itself(done, group, status, text))
            if time.monotonic() > deadline:
                return
        done.problem = f"given up after {MOST_STARTS} processes that hung or crashed"


def _ended_by_itself(done: Done, group: Group, status: int | None, text: str) -> dict[str, Any]:
    """Return the outcome of the check during which a process ended, or after which, with the stacks that it wrote."""
    timed_out = status is None or "Timeout (" in text
    if not timed_out:
        outcome, reason = "crashed", f"its process ended: {_how(status)}"
    elif done.limit_s < group.check_limit_s:
        outcome, reason = "cut", f"its group's time was over; it had {done.limit_s:g} s"
    else:
        outcome, reason = "hung", f"no end after {done.limit_s:g} s"
    stacks = text[text.rfind("Timeout (") :] if "Timeout (" in text else text
    seconds = done.limit_s if timed_out else 0.0
    report = f"{reason}\n{_tail(stacks)}"
    ended = [name for name, check in done.checks.items() if check.outcome != "cut"]
    name = done.running or f"the process, after {ended[-1]}"
    return {"event": "ended", "name": name, "outcome": outcome, "seconds": seconds, "text": report}


def _run_child(orders: dict[str, Any], environment: dict[str, str], log: Path) -> int | None:
    """Run gpu_children.py; return its status, or None if it had to be killed. Its child processes end with it."""
    limit_s = max(orders["seconds"], 0) + orders["overtime_s"] + GRACE_S
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_children.py"), json.dumps(orders)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _children.add(child)
        try:
            if _stopping.is_set():
                return None
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(child)
            child.wait()
            _children.discard(child)


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child with all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _stop() -> None:
    """Let all groups end."""
    _stopping.set()
    for child in list(_children):
        _kill(child)


def _take_journal(journal: Path, done: Done) -> bool:
    """Add the events of a child's journal; return whether the child finished."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # a line that a crash has truncated
            event = json.loads(line)
            if event["event"] == "finished":
                return True
            done.take(event)
    return False


def _how(status: int | None) -> str:
    if status is None:
        return "it had to be killed"
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _tail(text: str, num_lines: int = 60) -> str:
    return "\n".join(text.strip().splitlines()[-num_lines:])


# ---- the whole run -------------------------------------------------------------------------------


@contextlib.contextmanager
def packages_on_path(wheels: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Unpack the wheels of a folder into a temporary one.

    Yields:
        the environment in which unisono and what lies in that folder can be imported, and the folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        path = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", ""), folder]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}, Path(folder)


class UnusableError(Exception):
    """Nothing can be checked here; the text says why."""


def describe_machine(environment: dict[str, str], limit_s: float | None = None) -> dict[str, Any]:
    """Return a description of the machine from a child process, which imports torch.

    Raises:
        UnusableError: torch cannot be imported, or hangs.
    """
    limit_s = limit_s or DESCRIBE_S
    try:
        asked = subprocess.run(
            [sys.executable, str(HERE / "gpu_children.py"), json.dumps({"kind": "machine"})],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        raise UnusableError(f"torch and the GPU's driver did not answer in {limit_s:g} s\n{_tail(said)}") from error
    if asked.returncode:
        raise UnusableError(f"torch cannot be used here:\n{_tail(asked.stderr)}")
    machine: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    machine["said"] = "\n".join([*machine["said"], _tail(asked.stderr)]).strip()
    return machine


def expect_usable(machine: dict[str, Any]) -> None:
    """Check that torch can use the GPU that is there, if one is.

    Raises:
        UnusableError: there is a driver, and torch sees no GPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if machine["accelerators"] or hidden or "driver" not in machine["versions"]:
        return
    torch, cuda, driver = (machine["versions"].get(name) for name in ("torch", "CUDA", "driver"))
    raise UnusableError(
        f"NVIDIA's driver is here ({driver}), but torch {torch} (CUDA: {cuda}) sees no GPU. Most often the driver is "
        "older than the CUDA of this torch: take a newer driver or a torch for an older CUDA. "
        f"{'torch says:' if machine['said'] else 'torch does not say why.'}\n{machine['said']}"
    )


def dry_machine(environment: dict[str, str]) -> dict[str, Any]:
    """Return this machine with the asynchronous device for accelerators; without a compiler, with none.

    Real ones are hidden in the environment, and the device can be imported.
    """
    environment.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    environment["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY / 'tests'}"
    print("Dry run: the first time, the simulated device is compiled, which takes minutes.", flush=True)
    try:
        return describe_machine({**environment, "UNISONO_TEST_DEVICES": QUEUED}, BUILD_S)
    except UnusableError as error:
        print(f"The simulated device cannot be built ({_last_line(str(error))}): on the CPU instead.", flush=True)
        return describe_machine(environment)


# ---- pytest --------------------------------------------------------------------------------------


def why_no_pytest(environment: dict[str, str]) -> str:
    """Return why pytest cannot be imported; "" if it can."""
    code = "import pytest; assert hasattr(pytest, 'version_tuple'), f'{pytest.__version__} is older than 7'"
    asked = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return (_last_line(asked.stderr) or _how(asked.returncode)) if asked.returncode else ""


def fetch_pytest(folder: Path, environment: dict[str, str]) -> str:
    """Have pip install pytest into a folder, and change nothing else; return why that failed, "" if it did not."""
    pip = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is None:  # as in environments that uv has made; Python brings a pip along
        ensurepip = importlib.util.find_spec("ensurepip")
        places = (ensurepip.submodule_search_locations or []) if ensurepip else []
        wheels = [wheel for place in places for wheel in Path(place, "_bundled").glob("pip-*.whl")]
        if not wheels:
            return "there is no pip"
        pip = [sys.executable, str(wheels[0] / "pip")]
    quick = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "10"]
    try:
        done = subprocess.run(
            [*pip, "install", *quick, "--no-cache-dir", "--target", str(folder), "pytest"],
            env={**environment, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer from the package index in {FETCH_S:g} s"
    return (_last_line(done.stderr) or _how(done.returncode)) if done.returncode else ""


def provide_pytest(folder: Path, environment: dict[str, str]) -> str:
    """Get pytest for this run if it is missing, and say so; return why there is none, "" if there is."""
    reason = why_no_pytest(environment)
    if not reason:
        return ""
    print(f"pytest cannot be used in {sys.executable} ({reason}): taking it from the package index ...", flush=True)
    reason = fetch_pytest(folder, environment) or why_no_pytest(environment)
    if reason:
        print(f"  That failed ({reason}): running what needs torch alone.", flush=True)
    else:
        print("  It is in a temporary folder, for this run; nothing that is installed has changed.", flush=True)
    return reason


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


# ---- the whole run -------------------------------------------------------------------------------


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-results.md"), help="the report (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="packages brought along (%(default)s)")
    parser.add_argument("--data", type=Path, help="IDX files for the accuracy, best a few thousand pictures")
    parser.add_argument("--only", action="append", metavar="WORD", help="only groups whose name contains WORD")
    parser.add_argument(
        "--dry-run", action="store_true", help="a few checks without a GPU, to see that this program works"
    )
    options = parser.parse_args(arguments)
    if options.dry_run and HERE in options.output.resolve().parents:
        parser.error("a dry run measures nothing: its report does not belong into benchmarks/")
    if options.output.is_dir() or not os.access(options.output.resolve().parent, os.W_OK):
        parser.error(f"--output {options.output}: it cannot be written there")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    options = options_from(arguments)
    with packages_on_path(options.wheels) as (environment, folder):
        try:
            if importlib.util.find_spec("torch") is None:
                raise UnusableError(
                    f"torch: missing in {sys.executable}. Name another Python: make gpu-check PYTHON=..."
                )
            machine = dry_machine(environment) if options.dry_run else describe_machine(environment)
            if not options.dry_run:
                expect_usable(machine)
        except UnusableError as error:
            print(f"{error}\nNothing has been run.")
            return 2
        if not machine["accelerators"] and not options.dry_run:
            print("There is no GPU here (torch sees no accelerator): nothing has been run.")
            return 0
        beside = not options.dry_run and has_room(machine)
        if options.dry_run:
            groups = dry_groups(machine["kind"])
        else:
            data = str(options.data.resolve()) if options.data else ""
            groups = groups_for(machine["kind"], len(machine["accelerators"]), data=data, side_by_side=beside)
        if options.only:
            groups = [group for group in groups if any(word in group.name for word in options.only)]
        if any(group.kind == "tests" for group in groups):
            machine["no_pytest"] = provide_pytest(folder, environment)
        return run_all(groups, machine, environment, options, SIDE_BY_SIDE if beside else 1)


def has_room(machine: dict[str, Any]) -> bool:
    """Return whether groups of tests can run side by side."""
    memory_gib = min((each["memory_gib"] for each in machine["accelerators"]), default=0)
    return machine["cores"] >= CORES and memory_gib >= MEMORY_GIB


def run_all(
    groups: Sequence[Group],
    machine: dict[str, Any],
    environment: dict[str, str],
    options: argparse.Namespace,
    side_by_side: int = 1,
) -> int:
    """Run groups, so many at a time, and figures alone at the end; write the report after each."""
    began = time.monotonic()
    no_pytest = machine.get("no_pytest", "")
    finished: list[Done] = [Done(group) for group in (without_pytest(groups) if no_pytest else groups)]
    for done in finished:
        if no_pytest and done.group.kind == "tests":
            done.not_run = f"pytest is missing ({no_pytest})"
    state, status = "under way", 1

    def write() -> None:
        with _results:
            report = gpu_report.render(machine, finished, state, time.monotonic() - began, dry=options.dry_run)
            unfinished = options.output.with_name(options.output.name + ".part")
            unfinished.write_text(report, encoding="utf-8")
            unfinished.replace(options.output)

    def run(done: Done, end_s: float) -> None:
        left_s = end_s - (time.monotonic() - began)
        if left_s < GRACE_S:
            done.problem = "not begun: the ten minutes were over"
            return
        print(f"{done.group.name} ...", flush=True)
        run_group(done, environment, min(done.group.budget_s, left_s))
        print(f"  {done.group.name}: {gpu_report.in_one_line(done)}", flush=True)
        write()

    figures = [done for done in finished if done.group.kind == "figures"]
    others = [done for done in finished if done.group.kind != "figures" and not done.not_run]
    figures_s = sum(done.group.budget_s for done in figures)
    write()
    try:
        _run_at_once(others, side_by_side, lambda done: run(done, BUDGET_S - figures_s))
        _run_at_once(figures, 1, lambda done: run(done, BUDGET_S))
        state, status = "complete", int(any(done.failed for done in finished))
    except KeyboardInterrupt:
        state, status = "interrupted", 130
    finally:
        write()
    print(f"{options.output}: {gpu_report.verdict(finished, state)}")
    return status


def _run_at_once(groups: Sequence[Done], count: int, run: Callable[[Done], None]) -> None:
    """Run `count` groups at a time; raise what one raises, or Ctrl-C, once all have ended."""
    try:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            begun = [pool.submit(run, done) for done in groups]
            try:
                for future in concurrent.futures.as_completed(begun):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _stop()
                raise
    finally:
        _stopping.clear()


if __name__ == "__main__":
    sys.exit(main())
