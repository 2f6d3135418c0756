"""The fork server: the process that workers are forked from, seen from both sides; how workers start and end.

The first forward starts it: a fresh interpreter that has imported torch and does nothing else, so that it may be forked
at any time. Each worker (worker.py) is a fork of it, and gets one end of a channel. `ForkServer` is the caller's side,
`serve_forks` runs in the server's process.

Guarantees
    - A worker ends when the caller's end of its channel closes. In the middle of a computation it does not notice; then
      it ends with the fork server, which ends as soon as the caller does (Linux; elsewhere the worker ends its step
      first).
    - Only the caller handles Ctrl-C and SIGTERM: workers ignore them. A scheduler sends SIGTERM to all processes of a
      job.
"""

import contextlib
import ctypes
import gc
import io
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence

from unisono.engines.processes.channel import Channel, ChannelClosedError
from unisono.engines.processes.limits import explained, explanation, share_with
from unisono.engines.processes.post_mortem import is_stopped, write_stacks_to
from unisono.engines.processes.worker import Worker
from unisono.runtime.malloc import keep_freed_memory

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_START_S = 120.0  # within which a fork server has started, on a busy machine
_STATUS_S = 10.0  # how long to wait for what is only good to know
_LOOK_S = 1.0  # how often the fork server looks whether its caller lives


class ForkServerDiedError(Exception):
    """The fork server has ended by itself, more than once if it was to fork: its process id and its return code."""

    def __init__(self, pid: int, code: int) -> None:
        super().__init__(pid, code)
        self.pid, self.code = pid, code


class ForkServerStuckError(Exception):
    """The fork server has not replied in time, and has been ended: its process id, and whether it was stopped."""

    def __init__(self, pid: int, stopped: bool) -> None:
        super().__init__(pid, stopped)
        self.pid, self.stopped = pid, stopped


class ForkServer:
    """This process's fork server, started when first needed, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}  # by process id of the servers that have died: their return codes
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._channel is not None

    def fork(self, seed: int, stack_fd: int, timeout_s: float | None = None) -> tuple[int, int, Channel]:
        """Start a worker; return its process id, that of its fork server, and the channel to it.

        Args:
            stack_fd: the file descriptor of the worker's `StackFile`.
            timeout_s: for how long to wait for a fork server that is running; None: for ever.

        Raises:
            ForkServerStuckError: that time is over. The fork server is ended, and with it all workers.
            ForkServerDiedError: the fork server has died, and so has the one that was started in its place.
            OSError: the system allows no further process, or no more file descriptors.
        """
        own, other = Channel.pair()
        fd = other.detach()
        try:
            environment = {name: value for name, value in os.environ.items() if not _is_launcher_variable(name)}
            request = ("fork", environment, _working_folder(), seed)
            fds = [fd, _descriptor(sys.__stdout__, 1), _descriptor(sys.__stderr__, 2), stack_fd]
            pid, server_pid = self._request(request, fds, timeout_s)
            if isinstance(pid, OSError):
                raise explanation(pid, "a worker process")
        except BaseException:
            own.close()
            raise
        finally:
            os.close(fd)
        assert isinstance(pid, int)
        return pid, server_pid, own

    def status(self, pid: int, server_pid: int) -> tuple[int | None, int | None]:
        """Return how a worker ended, and how its fork server did if that died first, as `os.waitpid` has it.

        None: it is not known; the fork server is running.

        Args:
            server_pid: of the fork server that forked the worker.
        """
        if self._process is not None and self._process.pid == server_pid:
            with contextlib.suppress(ForkServerDiedError, ForkServerStuckError):
                status, _ = self._request(("status", pid), [], _STATUS_S, start=False)
                return status if isinstance(status, int) else None, None
        return None, self._codes.get(server_pid)

    def _request(
        self, request: object, fds: Sequence[int], timeout_s: float | None, start: bool = True
    ) -> tuple[object, int]:
        """Return the reply to a request, and the process id of the server that replied."""
        with self._lock:
            for last_try in (False, True):
                is_new = self._channel is None
                if is_new:
                    self._start()
                assert self._channel is not None
                self._channel.set_timeout(None if timeout_s is None else max(timeout_s, _START_S if is_new else 0.0))
                assert self._process is not None
                pid = self._process.pid
                share_with(pid)  # and with the workers that are forked from it
                try:
                    self._channel.send(pickle.dumps(request), fds)
                    body, _ = self._channel.receive()
                    return pickle.loads(body), pid
                except ChannelClosedError:
                    self._codes[pid] = code = self._end()
                    if last_try or not start:
                        raise ForkServerDiedError(pid, code) from None
                except TimeoutError:
                    stopped = is_stopped(pid)
                    self._end()
                    raise ForkServerStuckError(pid, stopped) from None
                except BaseException:
                    self._end()  # half a reply may be in the channel
                    raise
            raise AssertionError("unreachable")

    def _start(self) -> None:
        own, other = Channel.pair()
        fd = other.detach()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from unisono.engines.processes.fork_server import serve_forks; "
            f"serve_forks({fd}, {os.getpid()})"
        )
        try:
            # A process group of its own, so that Ctrl-C in a terminal reaches the caller only.
            with explained("the fork server"):
                self._process = subprocess.Popen(
                    [sys.executable, *_interpreter_options(), "-c", code],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
        except BaseException:
            own.close()
            raise
        finally:
            os.close(fd)
        self._channel = own

    def _end(self) -> int:
        """End the server; return its return code, as `subprocess` has it: its own if it has died by itself."""
        channel, process = self._channel, self._process
        self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is None:
            return 0
        process.kill()  # it has no state, and while it imports torch it does not notice the closed channel
        return process.wait()

    def end(self) -> None:
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Close what belongs to the parent process, in the child of a fork."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child: not waited for, no warning
        self.__init__()  # type: ignore[misc]


server = ForkServer()  # this process's


def _is_launcher_variable(variable: str) -> bool:
    """Return whether an environment variable gives a process its rank in a launcher's job: workers have none."""
    return variable in _LAUNCHER_VARIABLES or variable.startswith("TORCHELASTIC_")


_LAUNCHER_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}


def _interpreter_options() -> list[str]:
    """Return the options with which this interpreter was started: with `-I` no sitecustomize of PYTHONPATH's runs."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing's way
    return options


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been deleted
        return os.path.sep


def _descriptor(stream: object, otherwise: int) -> int:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return otherwise


# ---- in the fork server's process ------------------------------------------------------------


def serve_forks(fd: int, caller_pid: int) -> None:
    """Fork workers and report how they ended, until the caller ends: the fork server's whole life.

    It ends when the caller's end of the channel closes. Another process may have a copy of that end (one forked by C
    code, which no hook of Python's closes it in): so it looks, too, whether the caller is still its parent.

    Requests, each of which gets a reply:

        ("fork", environment, working folder, seed), with the file descriptors of the worker's end of a channel, its
            standard output, its standard error and its `StackFile` -> its process id, or an OSError
        ("status", process id) -> its exit status, as `os.waitpid` has it
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    gc.collect()
    gc.freeze()  # workers share these objects' pages until one writes to them
    statuses: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(statuses))
    try:
        while True:
            while not channel.wait(_LOOK_S):
                if os.getppid() != caller_pid:
                    os._exit(0)
            _handle(channel, fd, statuses)
    except ChannelClosedError:  # the caller ended, perhaps without reading its reply: Ctrl-C
        os._exit(0)


def _handle(channel: Channel, fd: int, statuses: dict[int, int]) -> None:
    try:
        body, fds = channel.receive()
    except OSError as error:  # the file descriptors that came with it are more than this process may have
        channel.send(pickle.dumps(error))
        return
    request, *arguments = pickle.loads(body)
    if request == "fork":
        reply: int | OSError
        try:
            reply = os.fork()
        except OSError as error:  # no further process is allowed
            reply = error
        if reply == 0:
            os.close(fd)
            _run_worker(fds, *arguments)
        for received in fds:
            os.close(received)
        channel.send(pickle.dumps(reply))
    else:
        (pid,) = arguments
        if pid not in statuses:
            with contextlib.suppress(ChildProcessError):
                statuses[pid] = os.waitpid(pid, 0)[1]
        channel.send(pickle.dumps(statuses.pop(pid, None)))


def _reap(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            statuses[pid] = status


def _run_worker(fds: Sequence[int], environment: dict[str, str], folder: str, seed: int) -> None:
    """Serve the channel until it closes. Does not return."""
    status = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, stdout, stderr, stack_fd = fds
        write_stacks_to(stack_fd)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        # Line-buffered, so that each printed line is one write.
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        with contextlib.suppress(OSError):  # it is gone, or closed to this user: what looks for it there will say so
            os.chdir(folder)
        random.seed(seed)
        keep_freed_memory()
        with contextlib.closing(Channel(socket.socket(fileno=connection))) as channel:
            Worker(channel).serve()
    except ChannelClosedError:
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends here
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends, also in the middle of a step (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            os._exit(0)
