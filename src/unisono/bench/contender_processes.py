"""The processes of one contender: they start, take steps and end together.

Each leads its own process group, so that Ctrl-C in a terminal reaches the benchmark only, which then ends them all.
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

from unisono.bench.contenders import Contender
from unisono.bench.serving import Failure, Program, Ready, StepTimes, Turn

_TURN_LIMIT_S = 600.0
_EXIT_WAIT_S = 10.0


class ContenderFailedError(Exception):
    """A contender cannot go on: one line that says why."""


class ContenderProcesses:
    """The processes of one contender on one target, until the block ends.

    Attributes:
        contender: which one.
        ready: the first reply of each process, after its setup.
    """

    def __init__(self, contender: Contender, target: str) -> None:
        self.contender = contender
        self.ready: list[Ready] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-bench-", ignore_cleanup_errors=True)
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
        self.ready = self._replies()

    def take(self, num_untimed: int, num_timed: int) -> list[StepTimes]:
        """Let every process take steps at the same time; return their replies.

        Raises:
            ContenderFailedError: a process failed.
        """
        self.begin_turn(num_untimed, num_timed)
        return self.end_turn()

    def begin_turn(self, num_untimed: int, num_timed: int) -> None:
        """Begin a turn without waiting for the replies."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process has ended: reading its reply will say so
                connection.send(Turn(num_untimed, num_timed))

    def has_reply(self, within_s: float) -> bool:
        """Wait for at most so long; return whether a process has replied."""
        return bool(wait(self._connections, within_s))

    def end_turn(self) -> list[StepTimes]:
        """Return the replies of the turn.

        Raises:
            ContenderFailedError: a process failed.
        """
        return self._replies()

    @property
    def process_ids(self) -> list[int]:
        """The processes of this contender; they may have started others."""
        return [process.pid for process in self._processes]

    def close(self, patient: bool = True) -> None:
        """End the processes: by closing their connections if `patient`; kill those that are still there then."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + (_EXIT_WAIT_S if patient else 0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with the rest of its group
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
        code = f"import sys; sys.path[:] = {sys.path!r}; from unisono.bench.serving import serve; serve({{}})"
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

    def _replies(self) -> list[Any]:
        """Wait for the reply of every process; raise the first failure."""
        replies: dict[Any, Any] = {}
        while waiting := [connection for connection in self._connections if connection not in replies]:
            readable = wait(waiting, _TURN_LIMIT_S)
            if not readable:
                raise ContenderFailedError(f"no reply for {_TURN_LIMIT_S:.0f} seconds")
            for connection in readable:
                replies[connection] = self._reply(connection)
        return [replies[connection] for connection in self._connections]

    def _reply(self, connection: Any) -> Any:
        try:
            reply = connection.recv()
        except (EOFError, OSError):
            raise ContenderFailedError(self._how_it_ended(self._connections.index(connection))) from None
        if isinstance(reply, Failure):
            raise ContenderFailedError(reply.reason)
        return reply

    def _how_it_ended(self, rank: int) -> str:
        status = self._processes[rank].wait()
        log = (Path(self._folder.name) / f"log-{rank}").read_text(errors="replace").strip().splitlines()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"its process {how}{f', with the message: {log[-1]}' if log else ''}"


def close_all(contenders: Sequence[ContenderProcesses], patient: bool) -> None:
    """Close several contenders, the connections of all first, so that they end at the same time."""
    for one in contenders:
        for connection in one._connections:
            connection.close()
    for one in contenders:
        one.close(patient)
