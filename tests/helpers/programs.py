"""Programs of their own: a script in a fresh interpreter, with warnings as errors; and whether processes have ended."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path

WAIT_S = 60.0


def run_script(script: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def until(condition: Callable[[], bool]) -> bool:
    """Wait until a condition of other processes holds; return whether it does."""
    limit = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def have_ended(pids: Iterable[int]) -> bool:
    """Wait until processes have ended; return whether they have. It reads /proc."""
    pids = list(pids)
    return until(lambda: not any(map(_is_running, pids)))


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
