"""What Python without its global lock changes for replicas in threads, in one run. Writes free_threading.md.

    python benchmarks/free_threading.py --free-threaded /opt/python3.14t/bin/python3.14t --python python3.14
    python benchmarks/free_threading.py --free-threaded ... --python ... --models tree_lstm tiny

Both interpreters need torch and psutil; unisono is that of this checkout. The speed of everything is
relative to the plain module's in the interpreter with the lock, with one or all cores, whichever is faster.
"""

import argparse
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from unisono.bench import machine
from unisono.bench.contenders import Contender
from unisono.bench.measure import expected_s, measure
from unisono.bench.results import Line, Workload
from unisono.console.progress import Task, for_stdout
from unisono.console.tables import table

HERE = Path(__file__).resolve().parent
REPLICAS = 2
ROUNDS, SECONDS = 3, 0.5
WORKLOADS = "unisono.bench.workloads"
MODELS = {
    "tree_lstm": "small_operations",
    "rows": "small_operations",
    "lstm_cell": "small_operations",
    "thin_blocks": "small_operations",
    "tiny_operations": "small_operations",
    "tiny": WORKLOADS,
    "gpt": WORKLOADS,
    "mlp": WORKLOADS,
}
_PATH = (("PYTHONPATH", f"{HERE}{os.pathsep}{HERE.parent / 'src'}"),)
_LOCK = (*_PATH, ("PYTHON_GIL", "1"))  # whatever the variable is where this runs
_NO_LOCK = (*_PATH, ("PYTHON_GIL", "0"))  # else a module that does not say that it needs no lock switches it on
_ONE_THREAD = ("OMP_NUM_THREADS", "1")
# An idle thread of OpenMP spins for some milliseconds: best for the plain module, whose next operation needs it soon;
# beside replicas it takes the core of one.
_NO_SPINNING = ("OMP_WAIT_POLICY", "passive")
COLUMNS = ("plain, lock", "plain, no lock", "threads, lock", "threads, no lock", "ddp, lock")


def contenders(python: str, free_threaded: str) -> list[Contender]:
    """Return the plain module with one and all cores in both interpreters, then the threads in both, then DDP."""
    return [
        Contender("plain", 1, python, (*_LOCK, _ONE_THREAD)),
        Contender("plain", 1, python, _LOCK),
        Contender("plain", 1, free_threaded, (*_NO_LOCK, _ONE_THREAD)),
        Contender("plain", 1, free_threaded, _NO_LOCK),
        Contender("threads", REPLICAS, python, (*_LOCK, _NO_SPINNING)),
        Contender("threads", REPLICAS, free_threaded, (*_NO_LOCK, _NO_SPINNING)),
        Contender("ddp", REPLICAS, python, (*_LOCK, _NO_SPINNING)),
    ]


def row(workload: Workload) -> list[str]:
    """Return the name of a model, then the speeds of COLUMNS."""
    one, all_cores, free_one, free_all, threads, free_threads, ddp = workload.lines
    best = _faster(one, all_cores)
    columns = (best, _faster(free_one, free_all), threads, free_threads, ddp)
    time = f"{1000 * best.step_s:.1f}" if best.turns_s else "failed"
    return [workload.name, time, *(_speed(line, best) for line in columns[1:])]


def _faster(one: Line, other: Line) -> Line:
    measured = [line for line in (one, other) if line.turns_s]
    return min(measured, key=lambda line: line.step_s) if measured else one


def _speed(line: Line, best: Line) -> str:
    return f"{line.speed_of(best):.2f}" if line.turns_s and best.turns_s else line.failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--free-threaded",
        required=True,
        metavar="PYTHON",
        type=_interpreter(with_lock=False),
        help="a Python without the lock",
    )
    add("--python", required=True, metavar="PYTHON", type=_interpreter(with_lock=True), help="a Python with the lock")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    add("--output", type=Path, default=HERE / "free_threading.md", help="default: beside this file")
    given = parser.parse_args()
    if given.output.is_dir() or not given.output.parent.is_dir():
        parser.error(f"--output {given.output}: expected a file, in a folder that exists")
    taking_part = contenders(given.python, given.free_threaded)
    task = Task(for_stdout(), "free threading", len(given.models) * expected_s(taking_part, ROUNDS, SECONDS))
    workloads = [measure(name, f"{MODELS[name]}:{name}", taking_part, ROUNDS, SECONDS, task) for name in given.models]
    rows = [row(workload) for workload in workloads]
    text = table(["model", "plain, lock: ms a step", *(f"{name}: speed" for name in COLUMNS[1:])], rows)
    described = machine.describe()
    where = (
        f"{described['processor']}, {described['cores']} cores, {described['memory_gib']} GiB; {described['system']}"
    )
    disturbances = {workload.disturbance for workload in workloads if workload.disturbance}
    page = (
        f"# Python without the lock\n\n{where}. {_versions(given.python)} (lock); {_versions(given.free_threaded)} (no "
        f"lock).\n\nWritten by `python benchmarks/free_threading.py`; two replicas on the CPU, the lower quartile of "
        f"{ROUNDS} turns; threads and DDP with OMP_WAIT_POLICY=passive. A speed is relative to the plain module's with "
        f"the lock.\n\n{text}\n"
    )
    page += "".join(f"\n({disturbance})\n" for disturbance in sorted(disturbances))
    given.output.write_text(page, encoding="utf-8")
    print(page)


def _versions(python: str) -> str:
    code = "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}  # "0" ends some
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return run.stdout.strip()


def _interpreter(*, with_lock: bool) -> Callable[[str], str]:
    """Return what takes an interpreter's path from the command line: one with or without the lock, with torch."""

    def checked(python: str) -> str:
        code = "import sys, torch, psutil; print(getattr(sys, '_is_gil_enabled', lambda: True)())"
        environment = {**os.environ, "PYTHON_GIL": "1" if with_lock else "0"}
        try:
            run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, env=environment)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{python} cannot be started: {error.strerror}") from None
        said = (run.stdout or run.stderr).strip().splitlines()[-1:]
        if said != [str(with_lock)]:
            kind = "with the lock" if with_lock else "without the lock"
            raise argparse.ArgumentTypeError(f"{python}: expected a Python {kind}, torch and psutil; it says {said}")
        return python

    return checked


if __name__ == "__main__":
    main()
