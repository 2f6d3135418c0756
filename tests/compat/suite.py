"""A run of the suite in an environment, and its row."""

import contextlib
import datetime
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from compat.environment import ROOT, program
from compat.pythons import Python
from compat.table import Row
from helpers.page_tables import commit


def run_suite(folder: Path, python: Python, left_out: Sequence[str], options: Sequence[str], logs: Path) -> Row:
    """Run pytest, show what it writes, and keep that in a file of `logs`."""
    says = [str(program(folder)), "-c", "import importlib.metadata as m; print(m.version('torch'))"]
    torch = subprocess.run(says, capture_output=True, text=True, check=True).stdout.strip().partition("+")[0]
    command = [str(program(folder)), "-m", "pytest", "-n", "auto", "--dist", "worksteal", *options]
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{python.key}-{torch}.log"
    print(shlex.join(command), flush=True)
    counts: dict[str, int] = {}
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment_of(python),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as running,
    ):
        assert running.stdout is not None
        with contextlib.closing(running.stdout):
            for line in running.stdout:
                print(line, end="", flush=True)
                file.write(line)
                counts = counted(line) or counts
    ended = running.returncode in (0, 1) and counts
    how = "" if ended else f"pytest ended with status {running.returncode}"
    failed = counts.get("failed", 0) + counts.get("error", 0)
    today = datetime.datetime.now(datetime.UTC).date()
    row = Row(
        str(python), torch, counts.get("passed", 0), failed, counts.get("skipped", 0), left_out, today, how, commit()
    )
    print(f"{row}\nThe whole output: {log.relative_to(ROOT) if log.is_relative_to(ROOT) else log}", flush=True)
    return row


def environment_of(python: Python) -> dict[str, str]:
    """Return the variables that pytest gets."""
    env = {**os.environ, "PYTHON_GIL": "0"} if python.free_threaded else {**os.environ}
    env.pop("PYTHONPATH", None)  # it is for this program; the environment has unisono
    return env


def counted(line: str) -> dict[str, int]:
    """Return the counts of pytest's last line, such as "2 failed, 30 passed, 1 skipped in 60.00s"; else nothing."""
    if not re.fullmatch(r"(=+ )?(\d+ [a-z]+, )*\d+ [a-z]+ in [\d.]+s( \([\d:, a-z]+\))?( =+)?", line.strip()):
        return {}
    return {
        word.removesuffix("s") if word == "errors" else word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", line)
    }
