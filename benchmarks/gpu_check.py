"""Test the accelerator paths on this machine's GPU: run the checks, measure the figures, write gpu-results.md.

    make gpu-check                                         with .venv's Python if there is one, else python3
    make gpu-check PYTHON=/opt/conda/bin/python            with another one
    PYTHONPATH=src python benchmarks/gpu_check.py --help   the same, with options

It needs torch, pytest and numpy, and psutil for the checks of memory. It downloads and installs nothing.
Missing packages can be brought along as wheels, which it takes from the folder `wheels`:

    pip download -d wheels pytest numpy psutil    where there is a network, with the same Python version

The other packages that the project uses (matplotlib, safetensors, rich, hypothesis, pytest-xdist) may be missing; a
check that needs one of them is reported as not run.

Every group of checks runs in its own process with a time budget. A check that crashes or hangs becomes a line in the
report, with the stacks of all threads, and the group goes on after it in a new process. The report is written after
each group. Exit status: 0 all passed, or there is no GPU (then nothing has been run); 1 a check failed; 2 torch cannot
use the GPU, or a package cannot be used; 130 after Ctrl-C.

Only the standard library is imported here: torch itself may be what crashes.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_children
import gpu_report

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
PACKAGES = ("pytest", "numpy")
NEEDED = (*PACKAGES, "iniconfig", "packaging", "pluggy", "pygments")  # the others are what pytest needs
NEEDED_BY_SOME = ("psutil",)
BUDGET_S = 550.0
OVERTIME_S = 30.0  # for the running check, after the time of its group is over
GRACE_S = 20.0  # for a process to end after that
DESCRIBE_S = 120.0  # for torch to be imported and to see the GPUs
MOST_STARTS = 8  # of one group


@dataclass(frozen=True)
class Group:
    """Checks that run in one process.

    Attributes:
        name: what the report calls it.
        kind: "tests" or "figures": how gpu_children.py runs it.
        arguments: pytest's, or the device and the names of figures.
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


def groups_for(kind: str, count: int) -> list[Group]:
    """Return the groups for a machine with `count` accelerators, the most important first."""
    suite = ["tests/contract", "-m", "not slow"]
    every = ",".join(f"{kind}:{index}" for index in range(count))
    groups = [
        Group("GPU tests", "tests", [*GPU_TESTS, "-m", "gpu"], 170, check_limit_s=150),  # torch.compile is slow
        Group("mended defects", "tests", [MENDED], 60, check_limit_s=60),
        Group("contract, replicas on one GPU", "tests", suite, 130, {"UNISONO_TEST_DEVICES": f"{kind}:0"}),
        Group("figures", "figures", [f"{kind}:0"], 220, check_limit_s=150),
        Group("examples", "tests", ["tests/test_examples.py", "-m", "gpu"], 30),
    ]
    if count > 1:
        several = Group("contract, a replica on each GPU", "tests", suite, 100, {"UNISONO_TEST_DEVICES": every})
        groups.insert(3, several)
    budget_s = sum(group.budget_s for group in groups)
    return [replace(group, budget_s=group.budget_s * min(1.0, BUDGET_S / budget_s)) for group in groups]


def dry_groups() -> list[Group]:
    """Return a few checks of each kind on the CPU, to show that this program works."""
    suite = ["tests/contract/test_gradients.py", "-m", "not slow", "-k", "without_grad"]
    return [
        Group("GPU tests", "tests", [MENDED, "-k", "checkpoints"], 60),
        Group("contract", "tests", suite, 60, {"UNISONO_TEST_DEVICES": "cpu,cpu"}),  # as if there were GPUs
        Group("figures", "figures", ["cpu", "--dry"], 120),
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
    problem: str = ""  # why the group as a whole could not be run
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
                finished = _take_journal(journal, done)
                done.seconds = time.monotonic() - began
            if finished:
                return
            text = log.read_text(errors="replace") if log.exists() else ""
            if status == gpu_children.GPU_LOST:
                continue
            if done.running is None and len(done.checks) - done.count("cut") == len(ended):
                done.problem = f"its process ended before a check ({_how(status)})\n{_tail(text)}"
                return
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
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with all processes that it has started
            child.wait()


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
def wheels_on_path(folder: Path) -> Iterator[dict[str, str]]:
    """Unpack the wheels of a folder; yield the environment in which their packages and unisono can be imported."""
    with tempfile.TemporaryDirectory() as unpacked:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        path = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", ""), unpacked]  # what is installed comes first
        sys.path.append(unpacked)
        try:
            yield {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
        finally:
            sys.path.remove(unpacked)


def missing(names: Sequence[str]) -> list[str]:
    """Return which of these packages cannot be imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


class UnusableError(Exception):
    """Nothing can be checked here; the text says why."""


def describe_machine(environment: dict[str, str]) -> dict[str, Any]:
    """Return a description of the machine from a child process, which imports torch and the packages that are there.

    Raises:
        UnusableError: torch cannot be imported, or hangs.
    """
    orders = {"kind": "machine", "packages": [name for name in NEEDED if not missing([name])]}
    try:
        asked = subprocess.run(
            [sys.executable, str(HERE / "gpu_children.py"), json.dumps(orders)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DESCRIBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        raise UnusableError(f"torch and the GPU's driver did not answer in {DESCRIBE_S:g} s\n{_tail(said)}") from error
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


def expect_packages(machine: dict[str, Any]) -> None:
    """Check that the packages that all checks need can be imported.

    Raises:
        UnusableError: some are missing or broken; says how to bring them along.
    """
    absent, broken = missing(NEEDED), machine["unusable"]
    reasons = [*[f"{name}: missing in {sys.executable}" for name in absent], *[f"{n}: {e}" for n, e in broken.items()]]
    if reasons:
        raise UnusableError(gpu_report.MISSING.format(reasons="\n".join(reasons), packages=" ".join(PACKAGES)))


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-results.md"), help="the report (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="packages brought along (%(default)s)")
    parser.add_argument("--only", action="append", metavar="WORD", help="only groups whose name contains WORD")
    parser.add_argument("--dry-run", action="store_true", help="a few checks on the CPU: shows that this program works")
    options = parser.parse_args(arguments)
    if options.dry_run and HERE in options.output.resolve().parents:
        parser.error("a dry run measures nothing: its report does not belong into benchmarks/")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    options = options_from(arguments)
    with wheels_on_path(options.wheels) as environment:
        try:
            if missing(["torch"]):
                raise UnusableError(
                    f"torch: missing in {sys.executable}. Name another Python: make gpu-check PYTHON=..."
                )
            machine = describe_machine(environment)
            if not options.dry_run:
                expect_usable(machine)
            if not machine["accelerators"] and not options.dry_run:
                print("There is no GPU here (torch sees no accelerator): nothing has been run.")
                return 0
            expect_packages(machine)
        except UnusableError as error:
            print(f"{error}\nNothing has been run.")
            return 2
        machine["missing"] = missing(NEEDED_BY_SOME)
        groups = dry_groups() if options.dry_run else groups_for(machine["kind"], len(machine["accelerators"]))
        if options.only:
            groups = [group for group in groups if any(word in group.name for word in options.only)]
        return run_all(groups, machine, environment, options)


def run_all(
    groups: Sequence[Group], machine: dict[str, Any], environment: dict[str, str], options: argparse.Namespace
) -> int:
    """Run groups one after the other, and write the report after each."""
    began = time.monotonic()
    finished: list[Done] = [Done(group) for group in groups]
    state, status = "under way", 1

    def write() -> None:
        report = gpu_report.render(machine, finished, state, time.monotonic() - began, dry=options.dry_run)
        unfinished = options.output.with_name(options.output.name + ".part")
        unfinished.write_text(report, encoding="utf-8")
        unfinished.replace(options.output)

    write()
    try:
        for done in finished:
            left_s = BUDGET_S - (time.monotonic() - began)
            if left_s < GRACE_S:
                done.problem = "not begun: the ten minutes were over"
                continue
            print(f"{done.group.name} ...", flush=True)
            run_group(done, environment, min(done.group.budget_s, left_s))
            print("  " + gpu_report.in_one_line(done), flush=True)
            write()
        state, status = "complete", int(any(done.failed for done in finished))
    except KeyboardInterrupt:
        state, status = "interrupted", 130
    finally:
        write()
    print(f"{options.output}: {gpu_report.verdict(finished, state)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
