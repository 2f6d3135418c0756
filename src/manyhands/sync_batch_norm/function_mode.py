"""Batch norm over all replicas: in training, the statistics of the whole batch instead of one shard's.

    replica i:   input ──► count, mean, variance of my rows ──┐                     ┌──► normalised input
                              (1) meet the other replicas     └──► of all rows ─────┘
    backward:    gradient of mean and variance ──► (2) summed over the replicas ──► gradient of my rows

How it gets into a replica. While a replica runs, a `TorchFunctionMode` is active in its thread, which takes over every
`torch.nn.functional.batch_norm` that asks for batch statistics: of torch's layers, of a user's subclass, of a plain
call. No class and no attribute is touched; the live module keeps its types and its `state_dict`. The mode is active
while replicas' graphs are walked backward too, because activation checkpoints run parts of the forward again there.

Who meets whom. Replicas exchange what they have (sync_batch_norm/exchange.py) under the name that the batch norm's
tensors have in the
replica, and in backward under the number of the exchange in forward. A batch norm that not every replica comes to,
because the data led them into different branches, is over the rows of those that did, which is said once in the log.

Who waits in backward. It depends on how the replicas' graphs are walked (`Walk`):

    APART      each by a thread of its own, as on the host: the replicas wait for each other there as well (2)
    TOGETHER   all by one call of ours, as on accelerators: nothing may wait. The replicas hand over statistics with
               their history, and what is computed of them is part of one graph. Where an activation checkpoint runs a
               batch norm again, the other replicas' statistics are those that were noted in forward.
    ELSEWHERE  all by a call of the caller's, as with the plain composition: likewise, but without checkpoints

Equal calls give equal bits: statistics and gradients are put together in replica order.

Assumes that the replicas of a pass run at the same time, each in a thread or a process of its own.
"""

import contextlib
import enum
import math
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

from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.errors import log_once
from manyhands.runtime.thread_pool import inside_replica
from manyhands.sync_batch_norm.exchange import Exchange, LocalExchange, Result
from manyhands.sync_batch_norm.statistics import OfGradient, Statistics

_CANNOT_MEET = (
    "batch norm over all replicas (sync_batch_norm=True) needs the other replicas' part here, and they do not run "
    "beside this one: gradients that are batched (is_grads_batched=True, vectorize=True), a dispatch or function mode "
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


class Walk(enum.Enum):
    """How the replicas' graphs are walked backward; see above."""

    APART = enum.auto()
    TOGETHER = enum.auto()
    ELSEWHERE = enum.auto()


@dataclass(frozen=True)
class ReplicaStatistics:
    """What one replica brings to a batch norm."""

    statistics: Statistics
    rows: int


@dataclass(frozen=True)
class Gradients:
    """What one replica brings in backward: gradients of mean and variance.

    `weighted` matters between processes, where each has the gradients of a loss of its own: whether these are
    derivatives of those losses, or, in a derivative of the next order, of what was made of them.
    """

    tensor: torch.Tensor
    weighted: bool


@dataclass(frozen=True)
class _Noted:
    """A batch norm that a checkpoint will run again: its name, the replica's own mean then, and everybody's part."""

    name: str
    mean: torch.Tensor
    parts: dict[int, ReplicaStatistics]


class BatchNormOverReplicas:
    """Makes the batch norms of some replicas see the rows of all of them.

    Args:
        replicas: the replicas of one forward; None for each that runs in another process.
        walk: how their graphs will be walked backward.
        new_exchange: makes the meeting of so many replicas for one pass, in this process's view.
    """

    def __init__(
        self,
        replicas: Sequence[Callable[..., Any] | None],
        walk: Walk,
        new_exchange: Callable[[int], Exchange] = LocalExchange,
    ) -> None:
        self.walk = walk
        self._new_exchange = new_exchange
        self.identity = object()  # what the graphs know this by; if they held this, they would hold the replicas
        self.num_replicas = len(replicas)
        self._replicas = replicas
        self._named: list[dict[int, tuple[str, int, torch.Tensor]] | None] = [None] * len(replicas)
        self._noted: list[list[_Noted]] = [[] for _ in replicas]

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """Surround a pass over all replicas; yield what surrounds replica i in its thread."""
        yield self.begin()

    def begin(self) -> Callable[[int], AbstractContextManager[None]]:
        """Begin a pass over all replicas, forward or (`Walk.APART`) backward; return what surrounds replica i in it."""
        exchange = self._new_exchange(self.num_replicas) if not inside_replica() else None
        tracked = torch.is_grad_enabled()
        return lambda index: self._taking_part(exchange, index, tracked)

    @contextlib.contextmanager
    def _taking_part(self, exchange: Exchange | None, index: int, tracked: bool) -> Iterator[None]:
        seat = _Seat(self, exchange, index, tracked) if exchange is not None else None
        before = _current_seat()
        _thread.seat = seat
        failed = True
        try:
            with _TakesOverBatchNorm(lambda tensors: seat):
                yield
            failed = False
        finally:
            _thread.seat = before
            if exchange is not None:
                exchange.withdraw(index, failed=failed)

    @contextlib.contextmanager
    def only_replica(self) -> Iterator[None]:
        """Surround a walk of the graph of an only replica, which has nobody to wait for in this process."""
        with self.begin()(0):
            yield

    def repeating(self) -> AbstractContextManager[Any]:
        """Return what surrounds a walk of all graphs (`Walk.TOGETHER`), for the batch norms that it runs again."""
        return _TakesOverBatchNorm(lambda tensors: _Repetition(self, tensors))

    def name_of(self, index: int, tensors: Tensors) -> tuple[str, int] | None:
        """Return the name that one of `tensors` has in replica `index`, and its place in the order of all names."""
        named = self._named[index]
        if named is None:
            named = {}
            replica = self._replicas[index]
            for path, module in replica.named_modules() if isinstance(replica, nn.Module) else ():
                for name, tensor in chain(module.named_buffers(path, False), module.named_parameters(path, False)):
                    named[id(tensor)] = (name, len(named), tensor)  # the tensor too, so that its id stays its own
            self._named[index] = named  # not earlier: other replicas' threads look in there
        return next((named[id(tensor)][:2] for tensor in tensors if id(tensor) in named), None)

    def owner_of(self, tensors: Tensors) -> int | None:
        """Return which replica's batch norm has `tensors`; None if that cannot be told."""
        owners = [index for index in range(self.num_replicas) if self.name_of(index, tensors) is not None]
        return owners[0] if len(owners) == 1 else None

    def note(self, index: int, name: str, parts: dict[int, ReplicaStatistics]) -> None:
        """Note a batch norm of replica `index`, which a checkpoint will run again."""
        leaves = {i: ReplicaStatistics(part.statistics.detached(), part.rows) for i, part in parts.items()}
        self._noted[index].append(_Noted(name, leaves[index].statistics.mean, leaves))

    def noted(self, index: int, name: str, mine: Statistics) -> dict[int, ReplicaStatistics]:
        """Return everybody's part in a batch norm that replica `index` runs again, with these statistics."""
        same_name = [noted for noted in self._noted[index] if noted.name == name]
        if len(same_name) > 1:  # used more than once
            same_name = [noted for noted in same_name if torch.equal(noted.mean, mine.mean)]
        if not same_name:
            raise RuntimeError(_CHECKPOINT)
        return same_name[0].parts


def run_synchronised(
    replicas: Sequence[Callable[..., Any]], calls: Sequence[Callable[..., Any]]
) -> list[Callable[..., Any]]:
    """Return `calls`, one a replica, with batch norm over all replicas; for one call of each, all at once."""
    surroundings = BatchNormOverReplicas(replicas, Walk.ELSEWHERE).begin()

    def surrounded(index: int) -> Callable[..., Any]:
        def run(*inputs: Any, **kwargs: Any) -> Any:
            with surroundings(index):
                return calls[index](*inputs, **kwargs)

        return run

    return [surrounded(index) for index in range(len(replicas))]


def inside_synchronised_replica() -> bool:
    """Return whether the calling thread runs a replica whose batch norms see the rows of all replicas."""
    return _current_seat() is not None


# ---- one replica's view --------------------------------------------------------------------------


class _Seat:
    """One replica's place in one pass; `tracked` says whether there can be a backward pass after it."""

    def __init__(self, over: BatchNormOverReplicas, exchange: Exchange, index: int, tracked: bool) -> None:
        self.over = over
        self.exchange = exchange
        self.index = index
        self._tracked = tracked
        self._num_checkpoints_around = _num_checkpoints()

    def parts_of_all(
        self, x: torch.Tensor, tensors: Tensors
    ) -> tuple[dict[int, ReplicaStatistics], Statistics, OfGradient | None]:
        """Return every replica's part in the batch norm of `x` that has `tensors`, and the statistics of all rows.

        Where these have no history: also what links them to x.
        """
        if self.over.walk is Walk.APART:
            result = self._exchange(ReplicaStatistics(Statistics.of(x), x.size(0)), x, tensors)
            link = _Link(self.over.identity, result.number, result.among)
            whole = put_together(result.values, x.device)
            return result.values, whole, lambda grad: _SumOverReplicas.apply(grad, link)  # type: ignore[no-untyped-call]

        repeated = self._tracked and _num_checkpoints() > self._num_checkpoints_around
        if repeated and (
            self.over.walk is not Walk.TOGETHER
            or not torch.is_grad_enabled()  # the reentrant kind, which walks each replica's part by itself
            or self.over.owner_of(tensors) != self.index
        ):
            raise RuntimeError(_CHECKPOINT)
        exchange = self.exchange

        def known_when_all_are_done(grad: torch.Tensor) -> torch.Tensor:
            if not exchange.is_over:
                raise RuntimeError(_INSIDE_FORWARD)
            return grad

        result = self._exchange(
            ReplicaStatistics(Statistics.of(x).with_history(x, known_when_all_are_done), x.size(0)), x, tensors
        )
        if repeated:
            self.over.note(self.index, self._name(x, tensors)[0], result.values)
        return result.values, put_together(result.values, x.device), None

    def _exchange(self, part: ReplicaStatistics, x: torch.Tensor, tensors: Tensors) -> Result:
        name, place = self._name(x, tensors)
        result = self.exchange.all_gather(self.index, name, part, place)
        if len(result.among) < self.over.num_replicas and not self.exchange.failed:
            log_once(
                f"the batch norm of {name} saw the rows of some replicas only: the others did not call it, because "
                "their rows led them into another branch of forward."
            )
        return result

    def _name(self, x: torch.Tensor, tensors: Tensors) -> tuple[str, float]:
        return self.over.name_of(self.index, tensors) or (f"{x.size(1)} channels", math.inf)


class _Repetition:
    """A batch norm that a checkpoint runs again, while one call walks all graphs: nobody is there to meet."""

    def __init__(self, over: BatchNormOverReplicas, tensors: Tensors) -> None:
        self.over = over
        owner = over.owner_of(tensors)
        if owner is None:
            raise RuntimeError(_CHECKPOINT)
        self.index = owner

    def parts_of_all(
        self, x: torch.Tensor, tensors: Tensors
    ) -> tuple[dict[int, ReplicaStatistics], Statistics, OfGradient | None]:
        """Return every replica's part as it was noted, its own with the history of now."""
        name = self.over.name_of(self.index, tensors)
        mine = Statistics.of(x).with_history(x, lambda grad: grad)
        noted = self.over.noted(self.index, name[0] if name else "", mine)
        parts = {**noted, self.index: ReplicaStatistics(mine, x.size(0))}
        return parts, put_together(parts, x.device), None


def sum_of(gradients: Mapping[int, Gradients], device: torch.device) -> torch.Tensor:
    """Return the sum of all gradients, in their order."""
    return torch.stack([_devices.copy_to(each.tensor, device) for each in gradients.values()]).sum(0)


def put_together(parts: Mapping[int, ReplicaStatistics], device: torch.device) -> Statistics:
    """Return the statistics of all parts together, in their order."""
    return Statistics.of_all([part.statistics for part in parts.values()], device)


_thread = threading.local()


def _current_seat() -> _Seat | None:
    return getattr(_thread, "seat", None)


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
class _Link:
    """What backward has to know of an exchange in forward: between which replicas of whose it was.

    `weighted` is that of the gradients that will be exchanged.
    """

    identity: object
    number: int
    replicas: frozenset[int]
    weighted: bool = True


class _SumOverReplicas(torch.autograd.Function):
    """The sum of a tensor over the replicas that are linked; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, link: _Link) -> torch.Tensor:
        seat = _current_seat()
        if seat is None or seat.over.identity is not link.identity:
            raise RuntimeError(_CANNOT_MEET)
        gradients = Gradients(tensor.detach(), link.weighted)
        result = seat.exchange.answer(seat.index, link.number, link.replicas, gradients)
        ctx.link = _Link(link.identity, result.number, result.among, not link.weighted)
        return sum_of(result.values, tensor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _SumOverReplicas.apply(grad, ctx.link), None  # type: ignore[no-untyped-call]


# ---- taking over ---------------------------------------------------------------------------------


class _TakesOverBatchNorm(TorchFunctionMode):
    """Runs the batch norms of the threads in which it is active over all replicas.

    Args:
        seat_of: whose batch norm it is that has these tensors; None if that replica cannot meet the others.
    """

    def __init__(self, seat_of: Callable[[Tensors], "_Seat | _Repetition | None"]) -> None:
        super().__init__()
        self._seat_of = seat_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if func in _BACKWARD:
            return self._stay_on(func, *args, **kwargs)
        return func(*args, **(kwargs or {}))

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
        """Do what `torch.nn.functional.batch_norm` would do with all replicas' rows; return what becomes of `input`."""

        def by_itself() -> torch.Tensor:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

        if not training or eps <= 0 or input.dim() < 2:  # the latter two are errors, and torch's own to tell
            return by_itself()
        if torch_private.has_transforms():
            raise RuntimeError(_TRANSFORM)
        tensors = (running_mean, running_var, weight, bias)
        seat = self._seat_of(tensors)
        if seat is None:
            raise RuntimeError(_CANNOT_MEET)
        parts, whole, of_gradient = seat.parts_of_all(input, tensors)
        if whole.count == 0:
            return by_itself()
        if whole.count == 1 and not (isinstance(seat, _Seat) and seat.exchange.failed):
            size = torch.Size([sum(part.rows for part in parts.values()), *input.shape[1:]])
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
        whole.update(running_mean, running_var, momentum)
        return whole.normalise(input, weight, bias, eps, of_gradient)

    def _stay_on(self, func: Any, ends: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Run a backward pass under this mode: activation checkpoints call batch norms in it.

        A mode is off while one of its functions runs. But torch asks no mode about a backward pass whose ends and
        inputs are given as gradient edges.
        """
        named = kwargs.get("inputs")
        named = list(named.values()) if isinstance(named, dict) else named
        given = (ends, *inputs, named)
        if kwargs.get("materialize_grads") or not all(map(_have_edges, given)):  # errors of torch's own to tell
            return func(ends, *inputs, **kwargs)
        if func is torch.Tensor.backward:
            func = torch.autograd.backward
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        if named is not None:
            kwargs["inputs"] = _edges(named)
        with self:
            return func(_edges(ends), *map(_edges, inputs), **kwargs)


_BACKWARD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _have_edges(tensors: Any) -> bool:
    if isinstance(tensors, torch.Tensor):
        return tensors.requires_grad
    return tensors is None or isinstance(tensors, GradientEdge) or all(map(_have_edges, tensors))


def _edges(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return get_gradient_edge(tensors)
    return tensors if isinstance(tensors, GradientEdge) else [_edges(tensor) for tensor in tensors]
