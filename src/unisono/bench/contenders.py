"""The contenders: each takes the same training step in its own way.

A step is forward, loss, backward, SGD with momentum, gradients set to None. `plain`, `threads` and `processes` are
one program, as their users write it. The others are one program for each replica, each with its own rows of the batch,
which communicate by torch.distributed (gloo over the loopback device, rendezvous in a file): `ddp`, and `torchrun`,
which is `DataParallel` under a launcher. The programs of `limit` do not communicate at all, so no correct contender can
be faster, except by chance.

Every process has its part of the cores: the number of intra-op threads that torch would use, divided by the replicas.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.console.targets import TargetError, current_folder_first
from unisono.data_parallel import DataParallel
from unisono.primitives.inputs import Arguments, scattered
from unisono.primitives.scatter_gather import scatter
from unisono.primitives.split_sizes import split_rows
from unisono.verification.compare import tensors_in
from unisono.verification.targets import build_arguments

OURS = ("threads", "processes")
DISTRIBUTED = ("ddp", "torchrun")
CONTENDERS = ("plain", "limit", *DISTRIBUTED, *OURS)
MEASURED = {f"{engine}, measured": engine for engine in OURS}  # with shares="measured"; benchmarks/shares.py has them
STEPS_UNTIL_FROZEN = 130  # with shares="measured" and two replicas, at most

_CPU = torch.device("cpu")
_SEED = 0
_LEARNING_RATE = 0.01
_MOMENTUM = 0.9


@dataclass(frozen=True)
class Contender:
    """One line of a table: a contender, and its number of replicas."""

    name: str
    replicas: int

    @property
    def num_programs(self) -> int:
        """How many processes are started for it, not counting those that these start."""
        return self.replicas if self.name in ("limit", *DISTRIBUTED) else 1

    def __str__(self) -> str:
        return self.name if self.name == "plain" else f"{self.name} on {self.replicas} replicas"


def label(name: str) -> str:
    """Return the name of a contender for tables and charts, which say what is ours.

    >>> label("torchrun"), label("ddp")
    ('unisono, torchrun', 'ddp')
    """
    return f"unisono, {name}" if name in (*OURS, "torchrun") else name


@dataclass
class Task:
    """The training task of one process: a module, its shard of the batch, and how the loss is computed."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    criterion: Callable[..., Any] | None
    options: dict[str, Any] = field(default_factory=dict)  # those of `DataParallel` that the target returned
    rows: int = 0  # of the shard

    @classmethod
    def of_target(cls, target: str) -> "Task":
        """Call `package.module:build`. With equal seeds, every process builds the same.

        Raises:
            TargetError: it cannot be built.
        """
        torch.manual_seed(_SEED)
        with current_folder_first():
            built = build_arguments(target)
        for name in ("device_ids", "output_device", "rtol", "atol"):
            built.pop(name, None)  # options of `verify`; here the replicas are on the CPU
        model, inputs = built.pop("model"), built.pop("inputs")
        model = model.module if isinstance(model, DataParallel) else model
        if not isinstance(model, nn.Module):
            raise TargetError(f"{target} returned a {type(model).__name__} as the model: expected a torch.nn.Module")
        args = () if isinstance(inputs, dict) else inputs if type(inputs) is tuple else (inputs,)
        kwargs = inputs if isinstance(inputs, dict) else {}
        task = cls(model, args, kwargs, built.pop("target", None), built.pop("criterion", None), built)
        task.rows = task._arguments().rows or 0
        return task

    def normalises_shards(self) -> bool:
        """Return whether the model has batch norm over a replica's rows only, unlike `plain`."""
        batch_norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        return bool(batch_norms) and not self.options.get("sync_batch_norm", False)

    def shard(self, rank: int, replicas: int, device: torch.device = _CPU) -> "Task":
        """Return the task of one replica, with its rows on this device.

        Raises:
            ValueError: the batch has no rows for it.
        """
        sizes = split_rows(self.rows, replicas)
        if not all(sizes):
            used = sum(map(bool, sizes))
            raise ValueError(f"a batch of {self.rows} rows has some for {used} replicas only, not for {replicas}")
        devices = [device] * replicas
        args, kwargs = scattered(self._arguments(), devices, sizes)[rank]
        target = scatter(self.target, devices, self.options.get("dim", 0))[rank]
        return Task(self.model, args, kwargs, target, self.criterion, self.options, sizes[rank])

    def _arguments(self) -> Arguments:
        dim, in_dims = self.options.get("dim", 0), self.options.get("in_dims", ...)
        return Arguments(self.args, self.kwargs, dim, in_dims, self.model.forward)

    def loss(self, output: Any) -> Tensor:
        """Return the loss; without a criterion, the mean squares of all floating outputs."""
        if self.criterion is not None:
            given = () if self.target is None else (self.target,)
            return self.criterion(output, *given)  # type: ignore[no-any-return]
        outputs = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
        if not outputs:
            raise ValueError("the model has no floating output to make a loss of: give a criterion")
        return torch.stack([tensor.float().square().mean() for tensor in outputs]).sum()


def use_part_of_cores(contender: Contender, rank: int) -> None:
    """Give the calling process its part of the cores, before it computes anything.

    The limit's programs are bound to their own cores, as the workers of engine="processes" are, because that is
    fastest. The system schedules the others, as it does for their users.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // contender.num_programs))
    if contender.name == "limit" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // contender.replicas
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each] or cores)


def step_of(contender: Contender, rank: int, task: Task, folder: Path) -> Callable[[], Tensor]:
    """Set up one program of a contender; return its training step, which returns the loss.

    Args:
        contender, rank: which program.
        task: of this program.
        folder: for the rendezvous of the contender's programs.
    """
    name, replicas = contender.name, contender.replicas
    if name in DISTRIBUTED:
        _join(rank, replicas, folder)
    if name in (*OURS, *MEASURED):
        options = {**task.options, "shares": "measured"} if name in MEASURED else task.options
        engine = MEASURED.get(name, name)
        task.model = DataParallel(task.model, ["cpu"] * replicas, engine=engine, process_group=False, **options)
    elif name == "torchrun":
        task.model = DataParallel(task.model, ["cpu"], **task.options)
    elif name == "ddp":
        task.model = nn.parallel.DistributedDataParallel(task.model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, foreach=True)

    def step() -> Tensor:
        loss = task.loss(task.model(*task.args, **task.kwargs))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


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
