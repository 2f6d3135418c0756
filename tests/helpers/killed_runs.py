"""Runs of `unisono train` that are killed with SIGKILL at a chosen line of the package's training code.

A line is a moment that can be chosen again, which a time is not. Between two lines is at most one write, one fsync or
one rename.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import unisono
from helpers.forked import forked

_PACKAGE = Path(unisono.__file__).parent
ALL = tuple(str(_PACKAGE / name) for name in ("training", "console", "data_parallel.py"))
WRITING = tuple(
    str(_PACKAGE / name)
    for name in ("training/checkpoint.py", "training/run_folder.py", "training/metrics.py", "console/files.py")
)
KILLED = -9  # SIGKILL, which Windows does not name


def run_killed(
    arguments: Sequence[str],
    cwd: Path,
    *,
    kill_at: int | None = None,
    within: Sequence[str] = ALL,
    save_each_step: bool = False,
) -> int:
    """Run `unisono` with these arguments in the folder `cwd`; return the number of lines, 0 if it was killed.

    Args:
        kill_at: the number of the line at which it kills itself, from 1; None: it does not.
        within: the files and folders whose lines count.
        save_each_step: whether there is a checkpoint after each step, as after some minutes in long epochs.
    """
    with forked(_run, list(arguments), kill_at, tuple(within), save_each_step, cwd=cwd) as program:
        status = program.wait()
        assert status == 0 or (status == KILLED and kill_at), program.out + program.err
        return 0 if status else int(program.out.splitlines()[-1])


def _run(arguments: Sequence[str], kill_at: int | None, within: tuple[str, ...], save_each_step: bool) -> int:
    from unisono.cli import main
    from unisono.training import run

    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(within) else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    if save_each_step:
        run._SAVE_EVERY_S = 0.0
    sys.settrace(trace)
    status = main(arguments)
    sys.settrace(None)
    print(num_lines)
    return status
