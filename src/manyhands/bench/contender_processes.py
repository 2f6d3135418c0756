"""A contender that has been started: its processes are asked together, answer together, and end together.

Each process is the leader of a process group, so that Ctrl-C in a terminal reaches the benchmark only, which then ends
them all.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from manyhands.bench.contenders import Contender
from manyhands.bench.serving import Failure, Program, Ready, StepTimes, Turn

_PATIENCE_S = 600.0
_EXIT_WAIT_S = 10.0


class ContenderFailedError(Exception):
    """A contender cannot go on: one line that says why."""


class ContenderProcesses:
    """The processes of one contender on one target, until the block ends.

    Attributes:
        contender: what they are.
        ready: what each has said when it was set up.
    """

    def __init__(self, contender: Contender, target: str) -> None:
        self.contender = contender
        self.ready: list[Ready] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="manyhands-bench-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        try:
            for rank in range(contender.num_programs):
                self._start(folder / f"log-{rank}")
                self._connections[rank].send(Program(contender, rank, target, folder))
        except BaseException:
            self.close(patient=False)
            raise

    def wait_until_ready(self) -> None:
        """Wait until all processes are set up.

        Raises:
            ContenderFailedError: one is not.
        """
        self.ready = self._answers()

    def take(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        """Let every process take steps at the same time; return what each has said.

        Raises:
            ContenderFailedError: one could not.
        """
        self.ask(num_untimed, num_timed)
        return self._answers()

    def ask(self, num_untimed: int, num_timed: int) -> None:
        """Begin a turn, whose answers are still to be waited for."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended: the answer will say so
                connection.send(Turn(num_untimed, num_timed))

    def answered(self, within_s: float) -> bool:
        """Wait so long for a sign of the turn's end."""
        return bool(wait(self._connections, within_s))

    def taken(self) -> list[StepTimes]:
        """Return the answers of the turn that was begun.

        Raises:
            ContenderFailedError: a process could not.
        """
        return self._answers()

    @property
    def process_ids(self) -> list[int]:
        """The processes that were started; they may have started others."""
        return [process.pid for process in self._processes]

    def close(self, patient: bool = True) -> None:
        """End the processes: by closing their connections if `patient`, and with a signal those that stay."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + (_EXIT_WAIT_S if patient else 0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it has left in its group
            process.wait()
        self._folder.cleanup()

    def __enter__(self) -> "ContenderProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(patient=kind is None)

    def _start(self, log: Path) -> None:
        own, others = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from manyhands.bench.serving import serve; serve({{}})"
        with others, log.open("wb") as output:
            self._connections.append(Connection(own.detach()))
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code.format(others.fileno())],
                    pass_fds=[others.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            )

    def _answers(self) -> list[Any]:
        """Wait for the answer of every process; the first that fails speaks for all."""
        answers: dict[Any, Any] = {}
        while waiting := [connection for connection in self._connections if connection not in answers]:
            answered = wait(waiting, _PATIENCE_S)
            if not answered:
                raise ContenderFailedError(f"no answer for {_PATIENCE_S:.0f} seconds")
            for connection in answered:
                answers[connection] = self._answer(connection)
        return [answers[connection] for connection in self._connections]

    def _answer(self, connection: Any) -> Any:
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            raise ContenderFailedError(self._how_it_ended(self._connections.index(connection))) from None
        if isinstance(answer, Failure):
            raise ContenderFailedError(answer.reason)
        return answer

    def _how_it_ended(self, rank: int) -> str:
        status = self._processes[rank].wait()
        said = (Path(self._folder.name) / f"log-{rank}").read_text(errors="replace").strip().splitlines()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"its process {how}{f', and said: {said[-1]}' if said else ''}"


def close_all(started: Sequence[ContenderProcesses], patient: bool) -> None:
    """Close several contenders, the connections of all first, so that they end at the same time."""
    for one in started:
        for connection in one._connections:
            connection.close()
    for one in started:
        one.close(patient)
