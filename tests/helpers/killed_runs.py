"""Runs of `manyhands train` that are killed with SIGKILL at a chosen line of the package's training code.

`python -m helpers.killed_runs` loads everything once and forks a process for each run, so that a run takes a fraction
of a second. A line is a moment that can be chosen again, which a time is not. Between two lines is at most one write,
one fsync or one rename.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import manyhands

_PACKAGE = Path(manyhands.__file__).parent
ALL = tuple(str(_PACKAGE / name) for name in ("training", "console", "data_parallel.py"))
WRITING = tuple(
    str(_PACKAGE / name)
    for name in ("training/checkpoint.py", "training/run_folder.py", "training/metrics.py", "console/files.py")
)


class KilledRuns:
    """A program that runs `manyhands` in processes of its own, one after the other.

    Example:
        with KilledRuns() as runs:
            status, num_lines = runs.run(["train", "--output", "out"], cwd)
            assert runs.run(["train", "--output", "other"], cwd, kill_at=num_lines // 2)[0] == -9
    """

    def __enter__(self) -> "KilledRuns":
        path = os.pathsep.join([str(Path(__file__).parents[1]), str(_PACKAGE.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.killed_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        *,
        kill_at: int | None = None,
        within: Sequence[str] = ALL,
        save_each_step: bool = False,
    ) -> tuple[int, int]:
        """Run `manyhands` with these arguments.

        Args:
            arguments: of the command.
            cwd: the folder to run in.
            kill_at: the number of the line at which it kills itself, from 1; None: it does not.
            within: the files and folders whose lines count.
            save_each_step: whether there is a checkpoint after each step, as after some minutes in long epochs.

        Returns:
            The exit status, negative for a signal; and the number of lines, 0 if it was killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        json.dump([list(arguments), str(cwd), kill_at, list(within), save_each_step], self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        status, num_lines = json.loads(self._process.stdout.readline())
        return status, num_lines


def _serve() -> None:
    import matplotlib.figure  # noqa: F401
    import safetensors.torch  # noqa: F401
    import sklearn.datasets  # noqa: F401

    from manyhands.training import loop, pending_steps  # noqa: F401

    save_every_s = pending_steps._SAVE_EVERY_S
    for line in sys.stdin:
        arguments, cwd, kill_at, within, save_each_step = json.loads(line)
        pending_steps._SAVE_EVERY_S = 0.0 if save_each_step else save_every_s
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            _run(arguments, cwd, kill_at, tuple(within), writing)
        os.close(writing)
        with open(reading) as pipe:
            num_lines = int(pipe.read() or "0")
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), num_lines]), flush=True)


def _run(arguments: Sequence[str], cwd: str, kill_at: int | None, within: tuple[str, ...], result: int) -> None:
    status, num_lines = 99, 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(within) else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    try:
        os.chdir(cwd)
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        from manyhands.cli import main

        sys.settrace(trace)
        status = main(arguments)
        sys.settrace(None)
        os.write(result, str(num_lines).encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    _serve()
