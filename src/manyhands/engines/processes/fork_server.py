"""The fork server, seen from both sides, and the beginning and end of the processes that come from it.

It is started by the first forward: a fresh interpreter that has imported torch and does nothing else, so that it may be
forked at any time. Each worker (worker.py) is a fork of it, with one end of a channel. `ForkServer` is what the caller
asks, `serve_forks` what answers in the other process.

Guarantees
    - A worker ends when the caller's end of its channel does. While it computes it does not look; then it ends with the
      fork server, which ends at once when the caller does (Linux; elsewhere after its step).
    - Ctrl-C is the caller's affair: workers ignore it.
"""

import contextlib
import ctypes
import gc
import importlib
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

from manyhands.engines.processes.channel import Channel, ChannelClosedError
from manyhands.engines.processes.worker import Worker
from manyhands.runtime import affinity

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG

# What some of torch's functions import when they are called, activation checkpoints among them. It takes a second; so
# where the caller has it, the fork server had better have it too than each worker by itself.
_SLOW_TO_IMPORT = ("torch._dynamo",)


class ForkServer:
    """This process's fork server, started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._channel is not None

    def fork(self, own_cores: Sequence[int], seed: int) -> tuple[int, Channel]:
        """Start a worker; return its process id and the channel to it."""
        own, others = Channel.pair()
        fd = others.detach()
        try:
            environment = {name: value for name, value in os.environ.items() if not _is_a_launchers(name)}
            imported = [name for name in _SLOW_TO_IMPORT if name in sys.modules]
            request = ("fork", imported, environment, list(own_cores), seed)
            pid = self._ask(request, [fd, _descriptor(sys.__stdout__, 1), _descriptor(sys.__stderr__, 2)])
        except BaseException:
            own.close()
            raise
        finally:
            os.close(fd)
        assert isinstance(pid, int)
        return pid, own

    def status(self, pid: int) -> int | None:
        """Return how a worker ended, as `os.waitpid` has it, once it has; None if nobody knows."""
        try:
            status = self._ask(("status", pid), [], start=False)
        except ChannelClosedError:
            return None
        return status if isinstance(status, int) else None

    def _ask(self, request: object, fds: Sequence[int], start: bool = True) -> object:
        with self._lock:
            for last_try in (False, True):
                if self._channel is None:
                    if not start:
                        raise ChannelClosedError
                    self._start()
                assert self._channel is not None
                try:
                    self._channel.send(pickle.dumps(request), fds)
                    body, _ = self._channel.receive()
                    return pickle.loads(body)
                except ChannelClosedError:
                    self._end()
                    if last_try or not start:
                        raise
                except BaseException:
                    self._end()  # half an answer may be on its way
                    raise
            raise AssertionError("unreachable")

    def _start(self) -> None:
        own, others = Channel.pair()
        fd = others.detach()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from manyhands.engines.processes.fork_server import serve_forks; "
            f"serve_forks({fd})"
        )
        try:
            # A process group of its own, so that Ctrl-C in a terminal reaches the caller only.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[fd], stdin=subprocess.DEVNULL, process_group=0
            )
        finally:
            os.close(fd)
        self._channel = own

    def _end(self) -> None:
        channel, process = self._channel, self._process
        self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()  # it has nothing to lose, and while it imports torch it does not see that the channel closed
            process.wait()

    def end(self) -> None:
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Let go of the parent's, in the child of a fork."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.returncode = 0  # not this process's child: nothing to wait for, nothing to warn of
        self.__init__()  # type: ignore[misc]


server = ForkServer()  # this process's


def _is_a_launchers(variable: str) -> bool:
    """Return whether an environment variable says what part a process has in a launcher's job: not the workers'."""
    return variable in _LAUNCHERS or variable.startswith("TORCHELASTIC_")


_LAUNCHERS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}


def _descriptor(stream: object, otherwise: int) -> int:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return otherwise


# ---- in the fork server's process ------------------------------------------------------------


def serve_forks(fd: int) -> None:
    """Fork a worker whenever asked to, until the caller goes; tell how workers ended. The fork server's whole life.

    Messages, each answered: ("fork", modules to import first, environment, cores, seed) with the worker's end of a
    channel, and what its standard output and error are to be -> its process id; ("status", process id) -> its exit
    status, as `os.waitpid` has it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    _import_what_workers_need()
    gc.collect()
    gc.freeze()  # workers share these objects' memory as long as nobody writes into it
    statuses: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _collect(statuses))
    try:
        while True:
            _answer(channel, fd, statuses)
    except ChannelClosedError:  # the caller has gone, perhaps without waiting for its answer: Ctrl-C
        os._exit(0)


def _answer(channel: Channel, fd: int, statuses: dict[int, int]) -> None:
    body, fds = channel.receive()
    request, *given = pickle.loads(body)
    if request == "fork":
        modules, *given = given
        for name in modules:
            with contextlib.suppress(Exception):  # a worker that needs it will say what is wrong
                importlib.import_module(name)
        pid = os.fork()
        if not pid:
            os.close(fd)
            _be_a_worker(fds, *given)
        for received in fds:
            os.close(received)
        channel.send(pickle.dumps(pid))
    else:
        (pid,) = given
        if pid not in statuses:
            with contextlib.suppress(ChildProcessError):
                statuses[pid] = os.waitpid(pid, 0)[1]
        channel.send(pickle.dumps(statuses.pop(pid, None)))


def _collect(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            statuses[pid] = status


def _import_what_workers_need() -> None:
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # the first backward of a process imports it


def _be_a_worker(fds: Sequence[int], environment: dict[str, str], own_cores: Sequence[int], seed: int) -> None:
    """Answer messages until the channel closes. Does not return."""
    status = 1
    try:
        _die_with_the_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, stdout, stderr = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        # Whole lines: what is printed leaves with the end of its line, in one write.
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        random.seed(seed)
        affinity.bind(own_cores)
        Worker(Channel(socket.socket(fileno=connection))).serve()
    except ChannelClosedError:
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _die_with_the_parent() -> None:
    """Have the kernel end this process with the fork server, also in the middle of a step (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            os._exit(0)
