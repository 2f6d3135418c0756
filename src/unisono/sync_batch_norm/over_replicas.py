"""Batch norm over all replicas: in training, the statistics of the whole batch instead of one shard's.

    replica i:   input ──► count, mean, variance of its rows ──┐                     ┌──► normalised input
                               (1) all-gather                  └──► of all rows ─────┘
    backward:    gradient of mean and variance ──► (2) all-reduce ──► gradient of the replica's rows

Interception. While a replica runs, a `TorchFunctionMode` is active in its thread. It replaces every call of
`torch.nn.functional.batch_norm` that asks for batch statistics: from torch's layers, from a user's subclass, a plain
call. No class and no attribute is changed; the live module keeps its types and its `state_dict`. The mode is active in
backward too, because activation checkpoints run parts of the forward again there. torch takes it along to the threads
that it has for accelerators.

Names. A batch norm is named after its tensors in the replica. All replicas have to call the same ones in the same
order, in forward and in backward; otherwise the exchange (runtime/exchange.py) raises an error with the names.
In backward that is no more than the numbers need: a replica without a part in it would miss the gradient that reaches
its rows through the mean and the variance.

Backward. Each replica's is a call of its own, and the replicas wait for each other there too (2). On accelerators torch
runs the nodes in the one thread that it has for each device, so

    - a node finds its replica's pass by way of `_Identity`, not in a variable of its thread
    - two replicas cannot be on one accelerator: the second one's nodes would have to run while the first one's wait
    - backwards that use an accelerator take turns (`_Turn`): each of two could wait for a thread that the other one has

In the plain composition all replicas are one graph, and backward is one call, the caller's: no node can wait. There a
batch norm that takes statistics is an error (`not_running_together`).

Equal calls give equal bits: statistics and gradients are combined in replica order, once for all replicas.

Assumes that the replicas of a pass run at the same time, each in a thread or a process of its own.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unisono.autograd.live_gradients import is_bucket_node
from unisono.autograd.replica_graph import while_backward_runs
from unisono.runtime import devices as _devices
from unisono.runtime.contexts import contextmanager
from unisono.runtime.exchange import (
    CrossProcess,
    Exchange,
    Purpose,
    Request,
    current_exchange,
    taking_part,
)
from unisono.runtime.interrupts import acquire, deliver, interruptibly, uninterruptible
from unisono.runtime.streams import current_stream, wait_for_maker
from unisono.runtime.thread_pool import inside_replica
from unisono.runtime.torch_private import compiler, modes
from unisono.sync_batch_norm.kernels import KernelStatistics, dense
from unisono.sync_batch_norm.statistics import ReduceGrad, Statistics

_NOT_RUNNING_TOGETHER = (
    "batch norm over all replicas (sync_batch_norm=True) needs values of the other replicas, which do not "
    "run now. Causes: batched gradients (is_grads_batched=True, vectorize=True), a dispatch or function mode "
    "around backward, a backward inside another replica, or a subclass that overrides replicate, scatter, "
    "parallel_apply or gather. Compute gradients one by one, outside such a mode, without the override, or pass "
    "sync_batch_norm=False."
)
_TRANSFORM = (
    "batch norm over all replicas (sync_batch_norm=True) inside a torch.func transform in forward: replicas "
    "cannot exchange values inside a transform. Pass sync_batch_norm=False."
)

T = TypeVar("T")
Tensors: TypeAlias = Sequence[torch.Tensor | None]


class StatisticsOfBatchNorm(Purpose):
    """The statistics of a batch norm in forward, and their gradients in backward."""

    went_different_ways = (
        "batch norm over all replicas (sync_batch_norm=True) needs every replica, but they differ: {ways}. "
        "Call the same batch norms in the same order in every replica, whatever its rows and random numbers, "
        "and let the output of each depend on all of them (output + 0 * unused.sum()). Or pass "
        "sync_batch_norm=False."
    )

    @staticmethod
    def describe(request: Request) -> str:
        of = "" if request.forward is None else "the backward of "
        return f"{of}the batch norm of {request.name}"


@dataclass(frozen=True)
class ReplicaStatistics:
    """The statistics of a batch norm's input: of one replica, or of several."""

    statistics: Statistics | KernelStatistics
    rows: int
    stream: torch.Stream | None  # on which they are computed; None: their device has no streams

    def here(self) -> Statistics | KernelStatistics:
        """Return the statistics, for what the calling thread queues next."""
        if self.stream is not None:
            wait_for_maker(self.stream, self.statistics.tensors)
        return self.statistics


@dataclass(frozen=True)
class StatisticsGradients:
    """One replica's part of what the gradient of its rows needs of all: gradients of mean and variance, or sums.

    `weighted` matters between processes (across_processes.py): whether they are summed with the weights of the
    processes' losses or, being the adjoint of such a sum, without.
    """

    tensor: torch.Tensor
    weighted: bool
    stream: torch.Stream | None  # as above

    def here(self) -> torch.Tensor:
        """Return the tensor, for what the calling thread queues next."""
        if self.stream is not None:
            wait_for_maker(self.stream, [self.tensor])
        return self.tensor


class BatchNormOverReplicas:
    """Batch norm over the rows of all replicas of one forward, for that forward and its backward passes.

    Args:
        replicas: the replicas.
        devices: one a replica; on accelerators all are different.
    """

    def __init__(self, replicas: Sequence[Callable[..., Any]], devices: Sequence[torch.device] = ()) -> None:
        self.identity = _Identity()  # for the graphs: a reference to this object would keep the replicas alive
        self._replicas, self._devices = replicas, devices
        self._is_forward = True
        self._named: list[dict[int, tuple[str, torch.Tensor]] | None] = [None] * len(replicas)

    @contextmanager
    def one_pass(self) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """The forward, and later each backward, of all replicas, as a context in that of their exchange.

        It yields the context of replica i in its thread.
        """
        turn = _Turn([] if inside_replica() else self._devices)
        try:
            if not self._is_forward:
                turn.take()
                self._named = [None] * len(self._replicas)  # a backward may find other buffers (`BuffersInBackward`)
            self._is_forward = False
            yield lambda index: self.in_replica(index, turn)
        finally:
            turn.end()

    @contextmanager
    def in_replica(self, index: int, turn: "_Turn") -> Iterator[None]:
        """One pass of replica `index`, as a context."""
        exchange, passes = current_exchange(), self.identity.passes
        replica_pass = _ReplicaPass(self, exchange, index, turn) if exchange is not None else None
        before, before_in_thread = passes.get(index), _current_pass()
        passes[index] = _thread.replica_pass = replica_pass
        try:
            with modes.with_function_mode(_BatchNormMode(replica_pass)):
                yield
        finally:
            passes[index], _thread.replica_pass = before, before_in_thread

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


def run_as_replica(module: nn.Module, call: Callable[[], T], cross_process: CrossProcess) -> T:
    """Return what `call` returns, which calls `module` itself, as the only replica of its process."""
    with taking_part(Exchange(1, cross_process), 0), BatchNormOverReplicas([module]).in_replica(0, _Turn([])):
        return call()


def _takes_statistics(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Return whether a call of `torch.nn.functional.batch_norm` takes the statistics of its input."""
    return args[_TRAINING] if len(args) > _TRAINING else kwargs and kwargs.get("training")


_TRAINING = 5  # the place of `training` among the arguments of batch norm


def not_running_together() -> AbstractContextManager[None]:
    """Return the context in which a batch norm that takes statistics is an error: the other replicas do not wait."""
    return modes.with_function_mode(_BatchNormMode(None))


def inside_synchronised_replica() -> bool:
    """Return whether the calling thread runs a replica whose batch norms see the rows of all replicas."""
    return _current_pass() is not None


# ---- one replica's view --------------------------------------------------------------------------


class _ReplicaPass:
    """One replica in one pass."""

    def __init__(self, batch_norm: BatchNormOverReplicas, exchange: Exchange, index: int, turn: "_Turn") -> None:
        self.batch_norm, self.exchange, self.index, self.turn = batch_norm, exchange, index, turn

    def gather_statistics(self, x: torch.Tensor, tensors: Tensors, eps: float) -> "_Gathered":
        """Return every replica's statistics of the batch norm of `x` that has `tensors`, and those of all rows."""
        name = self.batch_norm.name_of(self.index, tensors) or f"{x.size(1)} channels"
        statistics = statistics_of(x, eps, kernels=self.exchange.one_kind_of_device)
        value = ReplicaStatistics(statistics, x.size(0), current_stream(x.device))
        result = self.exchange.all_gather(self.index, Request(StatisticsOfBatchNorm, name, value))
        total = result.once(_total_statistics).here().on(x.device)
        forward = _ForwardExchange(self.batch_norm.identity, self.index, name, result.number)
        return _Gathered(result.values, total, lambda grad: _AllReduce.apply(grad, forward))  # type: ignore[no-untyped-call]


class _Turn:
    """The turn of one pass to run backward on its devices, from `take` to `end`.

    Args:
        devices: of the replicas. On the host no backward has to wait for its turn.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        accelerators = sorted(str(device) for device in devices if not _devices.computes_on_host(device))
        self._locks = [_device_locks.setdefault(name, threading.Lock()) for name in accelerators]
        self._num_taken, self._taking = 0, threading.Lock()

    @property
    def is_needed(self) -> bool:
        """Whether a backward has to wait for its turn."""
        return bool(self._locks)

    def take(self) -> None:
        """Wait for this turn. Every replica may call it."""
        acquire(self._taking, math.inf)
        try:
            for lock in self._locks[self._num_taken :]:
                acquire(lock, math.inf)
                self._num_taken += 1
        finally:
            self._taking.release()

    def end(self) -> None:
        for lock in self._locks[: self._num_taken]:
            lock.release()


_device_locks: dict[str, threading.Lock] = {}


@dataclass(frozen=True)
class _Gathered:
    """Statistics of a batch norm."""

    parts: dict[int, ReplicaStatistics]  # those of each replica
    total: Statistics | KernelStatistics  # those of all rows
    reduce_grad: ReduceGrad  # reduces the gradient of `total`

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


def sum_gradients(gradients: Mapping[int, StatisticsGradients]) -> StatisticsGradients:
    """Return the sum of all gradients, in the order given, on the device of the first."""
    first = next(iter(gradients.values()))
    device = first.tensor.device
    total = torch.stack([_devices.moved_to(each.here(), device) for each in gradients.values()]).sum(0)
    return StatisticsGradients(total, first.weighted, current_stream(device))


def combine_statistics(parts: Mapping[int, ReplicaStatistics], device: torch.device) -> Statistics | KernelStatistics:
    """Return the statistics of all parts together, combined in the order given."""
    found = [part.here() for part in parts.values()]
    if isinstance(found[0], KernelStatistics):
        return KernelStatistics.of_all(found, device)  # type: ignore[arg-type]
    return Statistics.of_all(found, device)  # type: ignore[arg-type]


def _total_statistics(parts: Mapping[int, ReplicaStatistics]) -> ReplicaStatistics:
    """Return the statistics of all parts together, on the device of the first."""
    device = next(iter(parts.values())).statistics.mean.device
    rows = sum(part.rows for part in parts.values())
    return ReplicaStatistics(combine_statistics(parts, device), rows, current_stream(device))


class _Identity:
    """What the graphs know of a `BatchNormOverReplicas`.

    Attributes:
        passes: the running pass of each replica, by its index.
    """

    def __init__(self) -> None:
        self.passes: dict[int, _ReplicaPass | None] = {}

    def pass_of(self, index: int) -> _ReplicaPass | None:
        """Return the running pass of a replica: the calling thread's, or that for which torch uses this thread."""
        mine = _current_pass()
        return mine if mine is not None and mine.batch_norm.identity is self else self.passes.get(index)


_thread = threading.local()


def _current_pass() -> _ReplicaPass | None:
    return getattr(_thread, "replica_pass", None)


@dataclass(frozen=True)
class _ForwardExchange:
    """An all-gather in forward, as backward knows it: the name of the batch norm, and its number.

    `identity` is that of the replicas' `BatchNormOverReplicas`, `index` that of the replica; `weighted` that of the
    gradients to be summed.
    """

    identity: _Identity
    index: int
    name: str
    number: int
    weighted: bool = True


class _AllReduce(torch.autograd.Function):
    """The sum of a tensor over all replicas, after an all-gather in forward; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, of: _ForwardExchange) -> torch.Tensor:
        replica_pass = of.identity.pass_of(of.index)
        if replica_pass is None:
            raise RuntimeError(_NOT_RUNNING_TOGETHER)
        mine = StatisticsGradients(tensor.detach(), of.weighted, current_stream(tensor.device))
        request = Request(StatisticsOfBatchNorm, of.name, mine, of.number)
        result = replica_pass.exchange.all_gather(of.index, request)
        ctx.of = replace(of, number=result.number, weighted=not of.weighted)
        total = result.once(sum_gradients).here()
        return _devices.moved_to(total.detach(), tensor.device)  # detached: the other replicas get the same tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllReduce.apply(grad, ctx.of), None  # type: ignore[no-untyped-call]


# ---- the function mode ----------------------------------------------------------------------------


class _BatchNormMode(TorchFunctionMode):
    """Runs the batch norms of the threads in which it is active over all replicas.

    Args:
        replica_pass: the pass of the replica that runs in them; None if its replicas do not run at the same time.
    """

    def __init__(self, replica_pass: _ReplicaPass | None) -> None:
        super().__init__()
        self._replica_pass = replica_pass
        self._run_batch_norm = compiler.uncompiled(_BatchNormMode._batch_norm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm and _takes_statistics(args, kwargs):
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

        if input.dim() < 2:  # an error, which torch raises
            return of_torch()
        if eps <= 0:  # newer releases of torch refuse it, and raise an error here; older ones compute with it
            F.batch_norm(input.new_ones(2, 1), None, None, training=True, eps=eps)
        if modes.has_transforms():
            raise RuntimeError(_TRANSFORM)
        replica_pass = self._replica_pass
        if replica_pass is None:
            raise RuntimeError(_NOT_RUNNING_TOGETHER)
        if _devices.has_batch_norm_kernels(input.device):
            input = dense(input)
        gathered = replica_pass.gather_statistics(input, (running_mean, running_var, weight, bias), eps)
        if gathered.count == 0:
            return of_torch()
        if gathered.count == 1 and not replica_pass.exchange.failed:
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
        if self._replica_pass is None or not self._replica_pass.turn.is_needed:
            with modes.with_function_mode(self):
                return interruptibly(func, _edges(outputs), *map(_edges, inputs), **kwargs)
        self._replica_pass.turn.take()
        ends = _ends(_edges(outputs)) if func is torch.autograd.backward and not named else []
        if ends:
            kwargs["inputs"] = ends
        entry = while_backward_runs.enter() if ends else None  # checkpoints are fine: these are all ends
        try:
            with modes.with_function_mode(self):
                return interruptibly(func, _edges(outputs), *map(_edges, inputs), **kwargs)
        finally:
            if entry is not None:
                while_backward_runs.leave(entry)


_BACKWARD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _have_edges(tensors: Any) -> bool:
    if isinstance(tensors, torch.Tensor):
        return tensors.requires_grad and not modes.is_of_transform(tensors)
    return tensors is None or isinstance(tensors, GradientEdge) or all(map(_have_edges, tensors))


def _edges(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return get_gradient_edge(tensors)
    return tensors if isinstance(tensors, GradientEdge) else [_edges(tensor) for tensor in tensors]


def _ends(edges: Any) -> list[GradientEdge]:
    """Return where the graph behind `edges` ends: at leaves, and at the nodes of a replica's buckets.

    A reentrant checkpoint runs a backward in the thread of its replica's accelerator. Beyond the buckets are the live
    tensors, on the first accelerator: its thread may be waiting in a batch norm for the replica that waits for it.
    """
    pending = [edge.node for edge in ([edges] if isinstance(edges, GradientEdge) else edges)]
    seen, found = {*pending}, []
    while pending:
        node: Any = pending.pop()
        if is_bucket_node(node) or not node.next_functions:
            found.append(GradientEdge(node, 0))
            continue
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        pending += following
    return found
