"""Run a function in several processes, as a launcher's, connected by gloo over the loopback device.

The processes are forked from a server that has imported torch, so that starting them takes milliseconds. What a rank
raises is raised here, with its traceback; a rank that is still running at the limit is killed, and the test fails.
"""

import contextlib
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers.forked import LIMIT_S, context, import_path


class Ended(NamedTuple):
    """How a rank has ended: what it returned, or its traceback; neither if it was killed."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call `function(rank, *args)` in each of `world_size` processes; return what they return, in rank order.

    The options are those of `end_ranks`. Raises AssertionError with the traceback of each rank that has failed.
    """
    ended = end_ranks(world_size, function, *args, **options)
    failed = [f"rank {rank}: {end.error or end.exit_code}" for rank, end in enumerate(ended) if end.exit_code]
    assert not failed, "\n".join(failed)
    return [end.value for end in ended]


def end_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 240,
    init: bool = True,
    env: Mapping[str, str] = {},
) -> list[Ended]:
    """Call `function(rank, *args)`, a function of a module, in each process; return how each has ended.

    Args:
        timeout_s: that of the process group.
        init: whether to make the default process group, by way of a file; else the function has to.
        env: variables of their environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = pickle.dumps((function, args))
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            store = str(Path(folder, "store")) if init else None
            own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)} if not init else {}
            process = context.Process(
                target=_run, args=(sender, job, rank, world_size, store, timeout_s, {**own, **env}, import_path())
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        deadline = time.monotonic() + LIMIT_S
        # Asked once a turn: of no process at all, wait() would wait until the deadline.
        while (alive := [p.sentinel for p in processes if p.is_alive()]) and time.monotonic() < deadline:
            wait(alive, timeout=deadline - time.monotonic())
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        assert not late, f"ranks {late} were still running after {LIMIT_S} s"
        return [_ended(process, pipe) for process, pipe in zip(processes, pipes, strict=True)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _ended(process: Any, pipe: Any) -> Ended:
    with contextlib.suppress(EOFError):
        if pipe.poll():
            value, error = pickle.loads(pipe.recv_bytes())
            return Ended(value, error, process.exitcode)
    return Ended(exit_code=process.exitcode)


def _run(
    pipe: Any,
    job: bytes,
    rank: int,
    world_size: int,
    store: str | None,
    timeout_s: float,
    env: Mapping[str, str],
    path: list[str],
) -> None:
    os.environ.update(env)
    sys.path[:] = path
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # unequal on purpose: the library has to make equal what must be
    try:
        if store is not None:
            torch.distributed.init_process_group(
                "gloo",
                store=torch.distributed.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        function, args = pickle.loads(job)
        outcome = function(rank, *args), None
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the test gets it
        text = traceback.format_exc()
        pipe.send_bytes(pickle.dumps((None, text)))
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter would
        sys.exit(1)
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
