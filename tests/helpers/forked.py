"""Functions that run as programs, forked from a process that has imported torch and much of unisono.

They start in milliseconds, and end as multiprocessing's processes do, without the end of an interpreter. Scripts that
end as Python ends them are those of helpers/programs.py. Where the system does not fork, each starts anew, in seconds.
"""

import contextlib
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_LIMIT_S = 300  # for what hangs: on a machine that does other things too, a program may take minutes

context: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
# Backward and the first optimizer import these, which takes a second and more in each process.
_LATE_IMPORTS = ["torch.fx.experimental.symbolic_shapes", "torch._dynamo"]
# And these are what `unisono train` imports.
_LATE_IMPORTS += ["unisono.cli", "matplotlib.figure", "matplotlib.backends.backend_agg", "safetensors.torch"]
_LATE_IMPORTS += ["sklearn.datasets"]
_ROOT = Path(__file__).parents[2]  # where a program finds test modules, such as tests.training.test_ranks
if hasattr(os, "fork"):
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "unisono", *_LATE_IMPORTS])


class Program:
    """A program that runs, or has ended.

    Attributes:
        pid: of its process.
        out, err: what it has written so far to standard output and standard error.
    """

    def __init__(self, process: Any, streams: Path) -> None:
        self._process, self._streams = process, streams
        self.pid: int = process.pid

    @property
    def out(self) -> str:
        return self._written("stdout")

    @property
    def err(self) -> str:
        return self._written("stderr")

    def wait_for(self, text: str) -> None:
        """Wait until it has written this."""
        deadline = time.monotonic() + _LIMIT_S
        while text not in self.out + self.err:
            if not self._process.is_alive():
                assert text in self.out + self.err, f"it has ended without {text!r}: {self.out}{self.err}"
            assert time.monotonic() < deadline, f"no {text!r} after {_LIMIT_S} s: {self.out}{self.err}"
            self._process.join(0.02)

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        self._process.join(_LIMIT_S)
        assert self._process.exitcode is not None, f"no end after {_LIMIT_S} s: {self.out}{self.err}"
        return int(self._process.exitcode)

    def _written(self, name: str) -> str:
        path = self._streams / name
        return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def forked(
    function: Callable[..., Any], *args: Any, cwd: Path | None = None, env: Mapping[str, str] = {}
) -> Iterator[Program]:
    """Run `sys.exit(function(*args))` as a program, which does not outlive the block; warnings are errors.

    Those of files left open are not: a signal may come between a library's `open` and its `with`.

    Example:
        with forked(main, ["train", "--output", "out"], cwd=tmp_path) as program:
            assert program.wait() == 0, program.err

    Args:
        function, args: what it does: a function of a module, which the program imports.
        cwd: the folder to run in; None: this process's.
        env: variables of its environment.
    """
    with tempfile.TemporaryDirectory() as streams:
        job = pickle.dumps((function, args))
        folder = str((cwd or Path()).resolve())
        process = context.Process(target=_begin, args=(job, folder, dict(env), streams, [*sys.path, str(_ROOT)]))
        process.start()
        try:
            yield Program(process, Path(streams))
        finally:
            process.kill()
            process.join()


def _begin(job: bytes, cwd: str, env: Mapping[str, str], streams: str, path: list[str]) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(Path(streams, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        # As with python -u: nothing is buffered.
        setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True))
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = path
    torch.set_num_threads(1)
    function, args = pickle.loads(job)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ResourceWarning)
    sys.exit(function(*args))
