"""The contenders: each takes the same training step in its own way.

`plain` and `threads` are one program, as their users write it. The others are one program for each replica, each with
its own rows of the batch, which communicate by torch.distributed (gloo over the loopback device, rendezvous in a file):
`ddp`, and `torchrun`, which is `DataParallel` under a launcher. The programs of `limit` do not communicate at all, so
no correct contender can be faster, except by chance.

Every process has its part of the cores: the number of intra-op threads that torch would use, divided by the replicas.
`threads` starts with OMP_WAIT_POLICY=passive, unless that is set: an idle thread of OpenMP, which an operation
outside of the replicas has used, otherwise spins for a while on a core that a replica needs.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from unisono.bench.tasks import Step, Task
from unisono.data_parallel import DataParallel

DISTRIBUTED = ("ddp", "torchrun")
CONTENDERS = ("plain", "limit", *DISTRIBUTED, "threads")
MEASURED = "threads, measured"  # with shares="measured"; benchmarks/shares.py has it
_IN_THREADS = ("threads", MEASURED)
STEPS_UNTIL_FROZEN = 130  # with shares="measured" and two replicas, at most


@dataclass(frozen=True)
class Contender:
    """One line of a table: a contender, its number of replicas, and the setting that its processes start in.

    Attributes:
        python: the path of an interpreter that can import unisono; "": the one that runs the benchmark.
        environment: names and values of environment variables, which override those of the benchmark.
        keeps_freed_memory: whether each process calls `unisono.keep_freed_memory()`.
    """

    name: str
    replicas: int
    python: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    keeps_freed_memory: bool = True

    @property
    def num_programs(self) -> int:
        """How many processes are started for it."""
        return self.replicas if self.name in ("limit", *DISTRIBUTED) else 1

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its processes."""
        own = {"OMP_WAIT_POLICY": wait_policy()} if self.name in _IN_THREADS else {}
        return {**os.environ, **own, **dict(self.environment)}

    def __str__(self) -> str:
        return self.name if self.name == "plain" else f"{self.name} on {self.replicas} replicas"


def wait_policy() -> str:
    """Return what idle threads of OpenMP do in `threads`: "passive" or what OMP_WAIT_POLICY says."""
    return os.environ.get("OMP_WAIT_POLICY", "passive")


def label(name: str) -> str:
    """Return the name of a contender for tables and charts, which say what is ours.

    >>> label("torchrun"), label("ddp")
    ('unisono, torchrun', 'ddp')
    """
    return f"unisono, {name}" if name in ("threads", "torchrun") else name


def use_part_of_cores(contender: Contender, rank: int) -> None:
    """Give the calling process its part of the cores, before it computes anything.

    The limit's programs are bound to their own cores, because that is fastest. The system schedules the others, as it
    does for their users.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // contender.num_programs))
    if contender.name == "limit" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // contender.replicas
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each] or cores)


def step_of(contender: Contender, rank: int, task: Task, folder: Path) -> Callable[[], Step]:
    """Set up one program of a contender; return its training step. The programs meet in the folder."""
    name, replicas = contender.name, contender.replicas
    if name in DISTRIBUTED:
        _join(rank, replicas, folder)
    options = {"sync_batch_norm": False, **task.options}  # the report says what that means for a model with batch norm
    if name in _IN_THREADS:
        options = {**options, "shares": "measured"} if name == MEASURED else options
        task.model = DataParallel(task.model, ["cpu"] * replicas, process_group=False, **options)
    elif name == "torchrun":
        task.model = DataParallel(task.model, ["cpu"], **options)
    elif name == "ddp":
        task.model = nn.parallel.DistributedDataParallel(task.model, gradient_as_bucket_view=True)
    return task.stepper()


def _join(rank: int, replicas: int, folder: Path) -> None:
    """Initialise torch.distributed, with the environment variables of a launcher."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(replicas), LOCAL_WORLD_SIZE=str(replicas),
        NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=replicas
    )
