"""The fork server, and the beginning and end of the processes that come from it.

It is started by the first forward: a fresh interpreter that has imported torch and does nothing else, so that it may be
forked at any time. Each worker (worker.py) is a fork of it, with one end of a channel.

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
import sys
import traceback
from collections.abc import Sequence

from manyhands import cores
from manyhands.engines.channel import Channel, ChannelClosedError
from manyhands.engines.worker import Worker

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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
        cores.bind(own_cores)
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
