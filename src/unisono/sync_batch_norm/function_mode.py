"""Batch norm over all replicas: in training, the statistics of the whole batch instead of one shard's.

    replica i:   input ──► count, mean, variance of its rows ──┐                     ┌──► normalised input
                               (1) all-gather                  └──► of all rows ─────┘
    backward:    gradient of mean and variance ──► (2) all-reduce ──► gradient of the replica's rows

Interception. While a replica runs, a `TorchFunctionMode` is active in its thread. It replaces every call of
`torch.nn.functional.batch_norm` that asks for batch statistics: from torch's layers, from a user's subclass, a plain
call. No class and no attribute is changed; the live module keeps its types and its `state_dict`. The mode is active in
backward too, because activation checkpoints run parts of the forward again there.

Names. A batch norm is named after its tensors in the replica. All replicas have to call the same ones in the same
order, in forward and in backward; otherwise the exchange (runtime/exchange.py) raises an error with the names.
In backward that is no more than the numbers need: a replica without a part in it would miss the gradient that reaches
its rows through the mean and the variance.

Backward depends on how the replicas' graphs run backward (`BackwardMode`):

    PER_REPLICA   each in a thread of its own, as on the host: the replicas wait for each other there too (2)
    ONE_CALL      all in one call of ours, as on accelerators: nothing may wait. The replicas all-gather statistics
                  with their history, so that all graphs become one. Where an activation checkpoint recomputes a batch
                  norm, the other replicas' statistics are those recorded in forward.
    CALLERS       all in a call of the caller's, as with the plain composition: like ONE_CALL, but without checkpoints

Equal calls give equal bits: statistics and gradients are combined in replica order.

Assumes that the replicas of a pass run at the same time, each in a thread or a process of its own.
"""

import contextlib
import enum
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.exchange import (
    Exchange,
    Purpose,
    Request,
    Result,
    current_exchange,
    taking_part,
)
from unisono.runtime.interrupts import deliver, interruptibly, uninterruptible
from unisono.runtime.streams import current_stream, wait_for_maker
from unisono.runtime.thread_pool import inside_replica
from unisono.sync_batch_norm.kernels import KernelStatistics, dense
from unisono.sync_batch_norm.statistics import ReduceGrad, Statistics

_NOT_RUNNING_TOGETHER = (
    "batch norm over all replicas (sync_batch_norm=True) needs the other replicas' values here, and they do not run "
    "at the same time: gradients that are batched (is_grads_batched=True, vectorize=True), a dispatch or function mode "
    "around backward, or a backward inside of another replica. Ask for gradients one by one and outside of such a "
    "mode, or make the wrapper with sync_batch_norm=False."
)
_CHECKPOINT = (
    "batch norm over all replicas (sync_batch_norm=True) inside an activation checkpoint: on accelerators the "
    "checkpoint has to be of the non-reentrant kind (use_reentrant=False), and the batch norm has to have a tensor of "
    "its own (a parameter or running statistics); with a verb of DataParallel overridden it cannot be done. Checkpoint "
    "parts without batch norm, or make the wrapper with sync_batch_norm=False."
)
_INSIDE_FORWARD = (
    "batch norm over all replicas (sync_batch_norm=True) was differentiated inside forward, where a replica has only "
    "its own part of the gradient. This works for replicas on the host, with none of DataParallel's verbs overridden."
)
_TRANSFORM = (
    "batch norm over all replicas (sync_batch_norm=True) inside a torch.func transform that forward applies: replicas "
    "cannot exchange what exists in a transform only. Make the wrapper with sync_batch_norm=False."
)

Tensors: TypeAlias = Sequence[torch.Tensor | None]


class StatisticsOfBatchNorm(Purpose):
    """The statistics of a batch norm in forward, and their gradients in backward."""

    went_different_ways = (
        "batch norm over all replicas (sync_batch_norm=True) needs every replica, and the replicas went different "
        "ways: {ways}. Let all replicas call the same batch norms in the same order, whatever their rows and random "
        "numbers are, and let the output of each depend on all of them (output + 0 * unused.sum() does). Or make the "
        "wrapper with sync_batch_norm=False."
    )

    @staticmethod
    def describe(request: Request) -> str:
        of = "" if request.forward is None else "the backward of "
        return f"{of}the batch norm of {request.name}"


class BackwardMode(enum.Enum):
    """How the replicas' graphs run backward; see above."""

    PER_REPLICA = enum.auto()
    ONE_CALL = enum.auto()
    CALLERS = enum.auto()


@dataclass(frozen=True)
class ReplicaStatistics:
    """One replica's statistics of a batch norm's input."""

    statistics: Statistics | KernelStatistics
    rows: int  # how many rows the replica has
    # On which an accelerator computes the statistics: a module's branch may have one of its own. None: the calling
    # threads' streams have no need to wait.
    stream: torch.Stream | None = None

    def here(self) -> Statistics | KernelStatistics:
        """Return the statistics, for what the calling thread queues next."""
        if self.stream is not None:
            wait_for_maker(self.stream, *self.statistics.tensors)
        return self.statistics


@dataclass(frozen=True)
class Gradients:
    """One replica's part of what the gradient of its rows needs of all: gradients of mean and variance, or sums.

    `weighted` matters between processes (across_processes.py): whether they are summed with the weights of the
    processes' losses or, being the adjoint of such a sum, without.
    """

    tensor: torch.Tensor
    weighted: bool


@dataclass(frozen=True)
class _Recorded:
    """A batch norm that a checkpoint will recompute: its name, the replica's own mean, all replicas' statistics."""

    name: str
    mean: torch.Tensor
    parts: dict[int, ReplicaStatistics]


class BatchNormOverReplicas:
    """Batch norm over the rows of all replicas of one forward, for that forward and its backward passes.

    Args:
        replicas: the replicas.
        backward_mode: how their graphs will run backward.
    """

    def __init__(self, replicas: Sequence[Callable[..., Any]], backward_mode: BackwardMode) -> None:
        self.backward_mode = backward_mode
        self.identity = _Identity()  # for the graphs: a reference to this object would keep the replicas alive
        self.num_replicas = len(replicas)
        self._replicas = replicas
        self._named: list[dict[int, tuple[str, torch.Tensor]] | None] = [None] * len(replicas)
        self._recorded: list[list[_Recorded]] = [[] for _ in replicas]

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """A forward or (`BackwardMode.PER_REPLICA`) a backward of all replicas, as a context in that of their exchange.

        It yields the context of replica i in its thread.
        """
        tracked = torch.is_grad_enabled()
        yield lambda index: self.in_replica(index, tracked)

    @contextlib.contextmanager
    def in_replica(self, index: int, tracked: bool) -> Iterator[None]:
        """One pass of replica `index`, as a context; `tracked` says whether a backward can follow."""
        exchange = current_exchange()
        replica_pass = _ReplicaPass(self, exchange, index, tracked) if exchange is not None else None
        before = _current_pass()
        _thread.replica_pass = replica_pass
        try:
            with torch_private.with_function_mode(_BatchNormMode(lambda tensors: replica_pass)):
                yield
        finally:
            _thread.replica_pass = before

    @contextlib.contextmanager
    def single_replica(self, new_exchange: Callable[[int], Exchange]) -> Iterator[None]:
        """The backward of a single replica, as a context: there is no other replica in this process.

        torch may run its nodes in the thread of an accelerator, while the caller's thread waits.

        Args:
            new_exchange: makes the exchange, in which other processes may take part.
        """
        exchange = None if inside_replica() else new_exchange(1)
        with taking_part(exchange, 0), self.in_replica(0, torch.is_grad_enabled()):
            before, self.identity.single = self.identity.single, _current_pass()
            try:
                yield
            finally:
                self.identity.single = before

    def recomputation(self) -> AbstractContextManager[Any]:
        """Return the context of a backward of all graphs (`BackwardMode.ONE_CALL`), for recomputed batch norms."""
        return torch_private.with_function_mode(_BatchNormMode(lambda tensors: _Recomputation(self, tensors)))

    def name_of(self, index: int, tensors: Tensors) -> str | None:
        """Return the name of the first of `tensors` that replica `index` has."""
        named = self._named[index]
        if named is None:
            named = {}
            replica = self._replicas[index]
            for path, module in replica.named_modules() if isinstance(replica, nn.Module) else ():
                for name, tensor in chain(module.named_buffers(path, False), module.named_parameters(path, False)):
                    named[id(tensor)] = (name, tensor)  # the tensor too, so that its id stays its own
            self._named[index] = named  # only now: other replicas' threads read it
        return next((named[id(tensor)][0] for tensor in tensors if id(tensor) in named), None)

    def owner_of(self, tensors: Tensors) -> int | None:
        """Return the replica whose batch norm has `tensors`; None if it is not exactly one."""
        owners = [index for index in range(self.num_replicas) if self.name_of(index, tensors) is not None]
        return owners[0] if len(owners) == 1 else None

    def record(self, index: int, name: str, parts: dict[int, ReplicaStatistics]) -> None:
        """Record a batch norm of replica `index` that a checkpoint will recompute."""
        leaves = {i: ReplicaStatistics(part.statistics.detached(), part.rows) for i, part in parts.items()}
        self._recorded[index].append(_Recorded(name, leaves[index].statistics.mean, leaves))

    def recorded(self, index: int, name: str, mine: Statistics | KernelStatistics) -> dict[int, ReplicaStatistics]:
        """Return all replicas' statistics of a batch norm that replica `index` recomputes with statistics `mine`."""
        same_name = [recorded for recorded in self._recorded[index] if recorded.name == name]
        if len(same_name) > 1:  # used more than once
            same_name = [recorded for recorded in same_name if torch.equal(recorded.mean, mine.mean)]
        if not same_name:
            raise RuntimeError(_CHECKPOINT)
        return same_name[0].parts


def run_synchronised(
    replicas: Sequence[Callable[..., Any]], calls: Sequence[Callable[..., Any]]
) -> list[Callable[..., Any]]:
    """Return `calls`, one a replica, with batch norm over all replicas. Each is to be called once, all at once."""
    batch_norm = BatchNormOverReplicas(replicas, BackwardMode.CALLERS)
    exchange = Exchange(len(replicas)) if not inside_replica() else None
    tracked = torch.is_grad_enabled()

    def synchronised(index: int) -> Callable[..., Any]:
        def run(*inputs: Any, **kwargs: Any) -> Any:
            with taking_part(exchange, index), batch_norm.in_replica(index, tracked):
                return calls[index](*inputs, **kwargs)

        return run

    return [synchronised(index) for index in range(len(replicas))]


def inside_synchronised_replica() -> bool:
    """Return whether the calling thread runs a replica whose batch norms see the rows of all replicas."""
    return _current_pass() is not None


# ---- one replica's view --------------------------------------------------------------------------


class _ReplicaPass:
    """One replica in one pass; `tracked` says whether a backward can follow."""

    def __init__(self, batch_norm: BatchNormOverReplicas, exchange: Exchange, index: int, tracked: bool) -> None:
        self.batch_norm = batch_norm
        self.exchange = exchange
        self.index = index
        self._tracked = tracked
        self._num_checkpoints_around = _num_checkpoints()

    def gather_statistics(self, x: torch.Tensor, tensors: Tensors, eps: float) -> "_Gathered":
        """Return every replica's statistics of the batch norm of `x` that has `tensors`, and those of all rows."""
        name = self.batch_norm.name_of(self.index, tensors) or f"{x.size(1)} channels"
        mine = statistics_of(x, eps, kernels=self.exchange.one_kind_of_device)
        if self.batch_norm.backward_mode is BackwardMode.PER_REPLICA:
            result = self._all_gather(name, mine, x)
            forward = _ForwardExchange(self.batch_norm.identity, name, result.number)
            total = combine_statistics(result.values, x.device)
            return _Gathered(result.values, total, lambda grad: _AllReduce.apply(grad, forward))  # type: ignore[no-untyped-call]

        is_checkpointed = self._tracked and _num_checkpoints() > self._num_checkpoints_around
        if is_checkpointed and (
            self.batch_norm.backward_mode is not BackwardMode.ONE_CALL
            or not torch.is_grad_enabled()  # reentrant: it runs backward of each replica's part by itself
            or self.batch_norm.owner_of(tensors) != self.index
        ):
            raise RuntimeError(_CHECKPOINT)
        exchange = self.exchange

        def check_forward_is_over(grad: torch.Tensor) -> torch.Tensor:
            if not exchange.all_withdrawn:
                raise RuntimeError(_INSIDE_FORWARD)
            return grad

        result = self._all_gather(name, mine.with_history(x, check_forward_is_over), x, current_stream(x.device))
        if is_checkpointed:
            self.batch_norm.record(self.index, name, result.values)
        # A checkpoint counts the tensors that are saved inside it, which have to be as many when it is recomputed.
        if isinstance(mine, KernelStatistics) and not is_checkpointed:
            total = combine_statistics({0: result.once(_combined_for_all)[self.index]}, x.device)
        else:
            total = combine_statistics(result.values, x.device)
        return _Gathered(result.values, total, None)

    def _all_gather(
        self, name: str, statistics: Statistics | KernelStatistics, x: torch.Tensor, stream: torch.Stream | None = None
    ) -> Result:
        return self.exchange.all_gather(
            self.index, Request(StatisticsOfBatchNorm, name, ReplicaStatistics(statistics, x.size(0), stream))
        )


class _Recomputation:
    """A batch norm that a checkpoint recomputes in a backward of all graphs, when no other replica runs."""

    def __init__(self, batch_norm: BatchNormOverReplicas, tensors: Tensors) -> None:
        self.batch_norm = batch_norm
        owner = batch_norm.owner_of(tensors)
        if owner is None:
            raise RuntimeError(_CHECKPOINT)
        self.index = owner

    def gather_statistics(self, x: torch.Tensor, tensors: Tensors, eps: float) -> "_Gathered":
        """Return every replica's statistics as recorded, but its own with a new history."""
        name = self.batch_norm.name_of(self.index, tensors)
        mine = statistics_of(x, eps).with_history(x, lambda grad: grad)
        recorded = self.batch_norm.recorded(self.index, name or "", mine)
        parts = {**recorded, self.index: ReplicaStatistics(mine, x.size(0))}
        return _Gathered(parts, combine_statistics(parts, x.device), None)


@dataclass(frozen=True)
class _Gathered:
    """Statistics of a batch norm."""

    parts: dict[int, ReplicaStatistics]  # those of each replica
    total: Statistics | KernelStatistics  # those of all rows
    reduce_grad: ReduceGrad | None  # where `total` has no history, the function that reduces its gradient

    @property
    def count(self) -> int | None:
        """The values of a channel in all rows; None where the host does not know it."""
        counts = [part.statistics.count for part in self.parts.values()]
        return None if None in counts else sum(counts)  # type: ignore[arg-type]


def statistics_of(x: torch.Tensor, eps: float, *, kernels: bool = True) -> Statistics | KernelStatistics:
    """Return the statistics of x without a history, by torch's kernels for it where x's device has them."""
    if kernels and _devices.has_batch_norm_kernels(x.device):
        return KernelStatistics.of(x, eps)
    return Statistics.of(x)


def sum_gradients(gradients: Mapping[int, Gradients], device: torch.device) -> torch.Tensor:
    """Return the sum of all gradients, in the order given."""
    return torch.stack([_devices.copy_to(each.tensor, device) for each in gradients.values()]).sum(0)


def combine_statistics(parts: Mapping[int, ReplicaStatistics], device: torch.device) -> Statistics | KernelStatistics:
    """Return the statistics of all parts together, combined in the order given."""
    found = [part.here() for part in parts.values()]
    if isinstance(found[0], KernelStatistics):
        return KernelStatistics.of_all(found, device)[0]  # type: ignore[arg-type]
    return Statistics.of_all(found, device)  # type: ignore[arg-type]


def _combined_for_all(parts: Mapping[int, ReplicaStatistics]) -> dict[int, ReplicaStatistics]:
    """Return the statistics of all parts for each replica, combined on the first one's device.

    Combined by each replica for itself, n of them would take n * (n - 1) copies, and as many in backward.
    """
    found: list[Any] = [part.here() for part in parts.values()]
    device = found[0].packed.device
    totals = KernelStatistics.of_all(found, device, len(found))
    rows, stream = sum(part.rows for part in parts.values()), current_stream(device)
    return {i: ReplicaStatistics(total, rows, stream) for i, total in zip(parts, totals, strict=True)}


class _Identity:
    """What the graphs know of a `BatchNormOverReplicas`.

    Attributes:
        single: the running pass of backward, where that is of a single replica, in whatever thread.
    """

    single: "_ReplicaPass | None" = None


_thread = threading.local()


def _current_pass() -> _ReplicaPass | None:
    return getattr(_thread, "replica_pass", None)


def _num_checkpoints() -> int:
    """Return how many functions of torch.utils.checkpoint are running in this thread."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")  # older releases import it only where it is used, and slowly
    if checkpoint is None:
        return 0
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code.co_filename == checkpoint.__file__
        frame = frame.f_back  # type: ignore[assignment]
    return count


@dataclass(frozen=True)
class _ForwardExchange:
    """An all-gather in forward, as backward knows it: the name of the batch norm, and its number.

    `identity` is that of the replicas' `BatchNormOverReplicas`; `weighted` that of the gradients to be summed.
    """

    identity: _Identity
    name: str
    number: int
    weighted: bool = True


class _AllReduce(torch.autograd.Function):
    """The sum of a tensor over all replicas, after an all-gather in forward; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, of: _ForwardExchange) -> torch.Tensor:
        replica_pass = _current_pass()
        if replica_pass is None or replica_pass.batch_norm.identity is not of.identity:
            replica_pass = of.identity.single
        if replica_pass is None:
            raise RuntimeError(_NOT_RUNNING_TOGETHER)
        request = Request(StatisticsOfBatchNorm, of.name, Gradients(tensor.detach(), of.weighted), of.number)
        result = replica_pass.exchange.all_gather(replica_pass.index, request)
        ctx.of = _ForwardExchange(of.identity, of.name, result.number, not of.weighted)
        return sum_gradients(result.values, tensor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllReduce.apply(grad, ctx.of), None  # type: ignore[no-untyped-call]


# ---- the function mode ----------------------------------------------------------------------------


class _BatchNormMode(TorchFunctionMode):
    """Runs the batch norms of the threads in which it is active over all replicas.

    Args:
        replica_pass_of: returns the replica whose batch norm has these tensors; None if its replicas do not run at the
            same time.
    """

    def __init__(self, replica_pass_of: Callable[[Tensors], "_ReplicaPass | _Recomputation | None"]) -> None:
        super().__init__()
        self._replica_pass_of = replica_pass_of
        self._run_batch_norm = torch_private.uncompiled(_BatchNormMode._batch_norm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            output = self._run_batch_norm(self, *args, **(kwargs or {}))
            deliver()
            return output
        if func in _BACKWARD:
            return self._run_backward(func, *args, **kwargs)
        return func(*args, **(kwargs or {}))

    @uninterruptible
    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """Do what `torch.nn.functional.batch_norm` does with all replicas' rows; return this replica's output."""

        def of_torch() -> torch.Tensor:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

        if not training or input.dim() < 2:  # the latter is an error, which torch raises
            return of_torch()
        if eps <= 0:  # newer releases of torch refuse it, and raise an error here; older ones compute with it
            F.batch_norm(input.new_ones(2, 1), None, None, training=True, eps=eps)
        if torch_private.has_transforms():
            raise RuntimeError(_TRANSFORM)
        tensors = (running_mean, running_var, weight, bias)
        replica_pass = self._replica_pass_of(tensors)
        if replica_pass is None:
            raise RuntimeError(_NOT_RUNNING_TOGETHER)
        if _devices.has_batch_norm_kernels(input.device):
            input = dense(input)
        gathered = replica_pass.gather_statistics(input, tensors, eps)
        if gathered.count == 0:
            return of_torch()
        if gathered.count == 1 and not (isinstance(replica_pass, _ReplicaPass) and replica_pass.exchange.failed):
            size = torch.Size([sum(part.rows for part in gathered.parts.values()), *input.shape[1:]])
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
        gathered.total.update(running_mean, running_var, momentum)
        return gathered.total.normalise(input, weight, bias, eps, gathered.reduce_grad)

    @uninterruptible
    def _run_backward(self, func: Any, outputs: Any, /, *inputs: Any, **kwargs: Any) -> Any:
        """Run a backward with this mode on, for the batch norms that activation checkpoints call in it.

        A mode is off while one of its functions runs. But torch does not call modes for a backward whose outputs and
        inputs are given as gradient edges.
        """
        named = kwargs.get("inputs")
        named = list(named.values()) if isinstance(named, dict) else named
        given = (outputs, *inputs, named)
        if kwargs.get("materialize_grads") or not all(map(_have_edges, given)):
            # Errors, which torch raises; or a transform's own backward, in which batch norm is an error.
            return func(outputs, *inputs, **kwargs)
        if func is torch.Tensor.backward:
            func = torch.autograd.backward
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        if named is not None:
            kwargs["inputs"] = _edges(named)
        with torch_private.with_function_mode(self):
            return interruptibly(func, _edges(outputs), *map(_edges, inputs), **kwargs)


_BACKWARD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _have_edges(tensors: Any) -> bool:
    if isinstance(tensors, torch.Tensor):
        return tensors.requires_grad and not torch_private.is_of_transform(tensors)
    return tensors is None or isinstance(tensors, GradientEdge) or all(map(_have_edges, tensors))


def _edges(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return get_gradient_edge(tensors)
    return tensors if isinstance(tensors, GradientEdge) else [_edges(tensor) for tensor in tensors]
