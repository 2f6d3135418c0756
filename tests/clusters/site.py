"""The folder, the processes and the log of one launcher's checks.

Every process that is started here has a mark in its environment, which those that it starts inherit. `close` ends all
that have the mark, so no daemon outlives its checks, also after Ctrl-C.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from clusters.page import ROOT

SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # daemons are in the latter
_MARK = "UNISONO_CLUSTERS"
_POLL_S = 0.1
_SHOWN = 150  # lines of an output in the log, without repetitions
_COLOUR = re.compile(r"\x1b\[\d*m")
_STACK_IN_C = re.compile(r"\bframe #\d+: ")
# What a launcher around this program may have set would be inherited.
_FOREIGN = ("SLURM", "SBATCH", "OMPI_", "PMI", "PMIX_", "RAY_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE")


class CheckError(AssertionError):
    """What was run did not do what it should; the message says what it did."""


class Ended(NamedTuple):
    """How a command has ended."""

    status: int
    output: str
    seconds: float


class Site:
    """Where the checks of one launcher run.

    Attributes:
        folder: for all files; deleted at the end. Its path is short, because sockets have short names.
        environment: of every process.
        log: in lines, of everything that was run.
    """

    def __init__(self, log: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="unisono-"))
        self.log = log
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
        }
        programs = Path(sys.executable).parent
        self.environment = {
            **kept,
            _MARK: self._mark,
            "HOME": str(self.folder),
            "MPLCONFIGDIR": str(Path.home() / ".cache" / "matplotlib"),  # else each site makes its list of fonts anew
            "OMP_NUM_THREADS": "1",
            "PATH": f"{programs}:{SYSTEM_PATH}",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.folder),
        }

    # ---- files -----------------------------------------------------------------------------------

    def new_folder(self, name: str) -> Path:
        """Return a new empty folder."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def write(self, name: str, text: str) -> Path:
        """Write a file, and note it in the log."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        self._note([f"# {name}", *text.splitlines()])
        return path

    # ---- processes -------------------------------------------------------------------------------

    def run(self, *command: str, limit_s: float = 180, env: Mapping[str, str] = {}) -> Ended:
        """Run a command in the folder; one that has not ended at the limit is killed, and the check has failed."""
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = self.start(*command, env=env, output=output.fileno())
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.end_process(process)
                status = None
            seconds = time.monotonic() - began
            output.seek(0)
            text = output.read().decode(errors="replace")
        how = "no end" if status is None else f"status {status}"
        self._note([*text.splitlines(), f"[{how} after {seconds:.1f} s]"])
        if status is None:
            raise CheckError(f"no end after {limit_s:g} s: {_as_typed(command)}")
        return Ended(status, text, seconds)

    def expect(self, *command: str, limit_s: float = 180, env: Mapping[str, str] = {}) -> Ended:
        """Run a command that has to succeed."""
        ended = self.run(*command, limit_s=limit_s, env=env)
        if ended.status:
            raise CheckError(f"status {ended.status}: {_as_typed(command)}: {_last_error(ended.output)}")
        return ended

    def start(
        self, *command: str, env: Mapping[str, str] = {}, output: int | None = None, to: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command in the folder; its output goes to a descriptor, or to a file that `read_log` shows."""
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        self._note([f"$ {given} {_as_typed(command)}".replace("$  ", "$ ")])
        with open(to or os.devnull, "ab") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.environment, **env},
                stdin=subprocess.DEVNULL,
                stdout=file if output is None else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def end_process(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill a process that was started here, and its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def read_log(self, path: Path) -> str:
        """Return what a file of output has, and note it in the log."""
        text = path.read_text(errors="replace") if path.exists() else ""
        self._note([f"# {path.name}", *text.splitlines()])
        return text

    def wait_until(self, holds: Callable[[], object], what: str, limit_s: float = 120) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise CheckError(f"after {limit_s:g} s not yet: {what}")
            time.sleep(_POLL_S)

    def processes(self, **variables: str) -> list[psutil.Process]:
        """Return the processes started from here whose environment has these values."""
        return [process for process in psutil.process_iter() if self._has(process, variables)]

    def _has(self, process: psutil.Process, variables: Mapping[str, str]) -> bool:
        try:
            found = process.environ()
        except psutil.Error:
            return False
        return all(found.get(name) == value for name, value in {_MARK: self._mark, **variables}.items())

    def close(self) -> None:
        """End everything that was started from here, and delete the folder."""
        psutil.wait_procs(self._signal_all(signal.SIGTERM), timeout=5)
        while left := self._signal_all(signal.SIGKILL):  # what ends may have started more
            psutil.wait_procs(left, timeout=5)
        for process in self._started:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal_all(self, number: int) -> list[psutil.Process]:
        found = [each for each in self.processes() if each.status() != psutil.STATUS_ZOMBIE]
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        return found

    def _note(self, lines: Sequence[str]) -> None:
        lines = [_COLOUR.sub("", line) for line in lines]
        lines = [line for line in lines if not _STACK_IN_C.search(line)]
        lines = [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]
        if len(lines) > _SHOWN:
            cut = len(lines) - _SHOWN
            lines = [*lines[: _SHOWN // 2], f"[... {cut} lines ...]", *lines[-(_SHOWN // 2) :]]
        self.log += [line.replace(str(self.folder), "/site") for line in lines]


@contextlib.contextmanager
def site(log: list[str]) -> Iterator[Site]:
    """Return a site that is closed at the end of the block, however that comes."""
    opened = Site(log)
    try:
        yield opened
    finally:
        opened.close()


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _as_typed(command: Sequence[str]) -> str:
    return shlex.join(command)


def _last_error(output: str) -> str:
    """Return the last line of an output that looks like an error, or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line and "traceback :" not in line]
    return (errors or lines or ["no output"])[-1][:300]
