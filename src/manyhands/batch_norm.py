"""Batch norm over all replicas: in training, the statistics of the whole batch instead of one shard's.

    replica i:   input ──► count, mean, variance of my rows ──┐                     ┌──► normalised input
                              (1) meet the other replicas     └──► of all rows ─────┘
    backward:    gradient of mean and variance ──► (2) summed over the replicas ──► gradient of my rows

How it gets into a replica. While a replica runs, a `TorchFunctionMode` is active in its thread, which takes over every
`torch.nn.functional.batch_norm` that asks for batch statistics: of torch's layers, of a user's subclass, of a plain
call. No class and no attribute is touched; the live module keeps its types and its `state_dict`. The same mode is
active while a replica's graph is walked backward, because activation checkpoints run parts of the forward again there.

Where replicas meet. All replicas of one pass (a forward, or one walk of their graphs) share a `Meeting`. They exchange
what they have under a name: in forward the name of the batch norm's tensors in the replica, in backward the number that
the forward's exchange was given. A replica that is done, or has failed, leaves the meeting and is waited for no longer.

Who waits in backward. Where every replica's graph is walked by a thread of its own (the host), replicas wait for each
other there too (2). Where one call walks all graphs (accelerators, the plain composition), nothing may wait: there the
replicas hand over tensors with their history, and what is computed of them is part of one graph.

Guarantees
    - A replica that fails releases the others. Replicas that call different batch norms, because the data led them
      into different branches, do not wait for ever: a batch norm that not all of them can reach any more is over the
      rows of those that did, which is said once in the log.
    - Equal calls give equal bits: statistics are put together in replica order.
    - The graph holds what torch's own batch norm holds: the input, and some numbers a channel.

Assumes that the replicas of a pass run at the same time, each in a thread of its own.
"""

import contextlib
import itertools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from manyhands import devices as _devices
from manyhands import torch_private
from manyhands.errors import say_once
from manyhands.workers import inside_replica

_WAKE_S = 0.1  # a waiting replica looks this often for Ctrl-C, which cannot always wake it

_CANNOT_MEET = (
    "batch norm over all replicas (sync_batch_norm=True) needs the other replicas' part here, and they do not run "
    "beside this one: gradients that are batched (is_grads_batched=True, vectorize=True), a dispatch or function mode "
    "around backward, or a backward inside of another replica. Ask for gradients one by one and outside of such a "
    "mode, or make the wrapper with sync_batch_norm=False."
)
_DIFFERENT_ORDER = (
    "batch norm over all replicas (sync_batch_norm=True): the replicas came to their batch norms in different orders "
    "in backward, so that their parts of a gradient cannot be brought together. Let every replica take the same way "
    "through the module, or make the wrapper with sync_batch_norm=False."
)
_CHECKPOINT = (
    "batch norm over all replicas (sync_batch_norm=True) inside an activation checkpoint needs replicas that compute "
    "on the host, each with a graph of its own; here one graph leads through all of them. Checkpoint parts without "
    "batch norm, or make the wrapper with sync_batch_norm=False."
)
_INSIDE_FORWARD = (
    "batch norm over all replicas (sync_batch_norm=True) was differentiated inside forward, where a replica has only "
    "its own part of the gradient. This works for replicas on the host, with none of DataParallel's verbs overridden."
)
_TRANSFORM = (
    "batch norm over all replicas (sync_batch_norm=True) inside a torch.func transform that forward applies: replicas "
    "cannot exchange what exists in a transform only. Make the wrapper with sync_batch_norm=False."
)


# ---- meetings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Met:
    """What an exchange came to.

    Attributes:
        values: what each replica gave, in replica order; without those that did not come.
        number: of two exchanges, the later one's is higher. Names what answers to this exchange in backward.
    """

    values: dict[int, Any]
    number: int


@dataclass
class _Table:
    """Where replicas wait until all of `among` that can still come have come.

    If all replicas wait, each at another table, the one of the lowest rank is closed first; of equal ones, that of the
    lowest replica.
    """

    among: frozenset[int]
    rank: tuple[int, float]
    values: dict[int, Any] = field(default_factory=dict)
    met: Met | None = None


class Meeting:
    """Where the replicas of one pass exchange values."""

    def __init__(self, num_replicas: int) -> None:
        self.failed = False  # whether some replica has left with an exception
        self._condition = threading.Condition()
        self._all = frozenset(range(num_replicas))
        self._present = set(self._all)
        self._tables: dict[tuple[Hashable, int], _Table] = {}
        self._closed_early: set[tuple[Hashable, int]] = set()
        self._num_calls: Counter[tuple[int, Hashable]] = Counter()

    @property
    def is_over(self) -> bool:
        return not self._present

    def exchange(self, index: int, name: str, value: Any, place: float = math.inf) -> Met:
        """Give replica `index`'s value under a name; wait for the others' and return them all.

        A name may be used again and again: the n-th call of one replica meets the n-th of each other. `place` is
        that of the name in the order in which replicas are likely to come to them. It decides who goes on first where
        the data led replicas into different branches, so that all wait, each for others that wait elsewhere.
        """
        return self._exchange(index, name, value, _Table(self._all, rank=(0, place)))

    def answer(self, index: int, met: "Link", value: Any) -> Met:
        """Exchange among those who took part in an earlier exchange, in an earlier pass or in this one.

        Raises:
            RuntimeError: the others could not wait for this replica, and have gone on with less.
        """
        # Backward comes to batch norms in the reverse of their order in forward: to the latest first.
        return self._exchange(index, met.number, value, _Table(met.replicas, rank=(1, -met.number)))

    def leave(self, index: int, *, failed: bool) -> None:
        """Be waited for no longer."""
        with self._condition:
            self.failed |= failed
            self._present.discard(index)
            self._close_tables()

    def _exchange(self, index: int, name: Hashable, value: Any, new: _Table) -> Met:
        with self._condition:
            self._num_calls[index, name] += 1
            key = (name, self._num_calls[index, name])
            if key in self._closed_early:
                raise RuntimeError(_DIFFERENT_ORDER)
            table = self._tables.setdefault(key, new)
            table.values[index] = value
            self._close_tables()
            while table.met is None:
                self._condition.wait(_WAKE_S)
            return table.met

    def _close_tables(self) -> None:
        """Let everybody go on who need not wait any more."""
        while self._tables:
            full = [key for key, table in self._tables.items() if self._present & table.among <= table.values.keys()]
            if not full:
                waiting = {index for table in self._tables.values() for index in table.values}
                if self._present - waiting:
                    return
                full = [min(self._tables, key=lambda key: (self._tables[key].rank, min(self._tables[key].values)))]
                self._closed_early.update(key for key in full if not isinstance(key[0], str))
            for key in full:
                table = self._tables.pop(key)
                table.met = Met(dict(sorted(table.values.items())), next(_numbers))
            self._condition.notify_all()


_numbers = itertools.count()


@dataclass(frozen=True)
class Link:
    """What backward has to know of an exchange in forward: between which replicas of which wrapper's call it was."""

    replicas_of: "BatchNormOverReplicas"
    number: int
    replicas: frozenset[int]


# ---- replicas ------------------------------------------------------------------------------------


class BatchNormOverReplicas:
    """Makes the batch norms of some replicas see the rows of all of them.

    Args:
        replicas: the replicas of one forward.
        own_graphs: whether each replica's graph will be walked by a thread of its own, so that it may wait there.
    """

    def __init__(self, replicas: Sequence[Callable[..., Any]], *, own_graphs: bool) -> None:
        self.own_graphs = own_graphs
        self.count = len(replicas)
        self._replicas = replicas
        self._names: list[dict[int, tuple[int, str, torch.Tensor]] | None] = [None] * len(replicas)

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """Surround a pass over all replicas; yield what surrounds replica i in its thread."""
        yield self.begin()

    def begin(self) -> Callable[[int], AbstractContextManager[None]]:
        """Begin a pass over all replicas; return what surrounds replica i in its thread."""
        meeting = None if inside_replica() else Meeting(self.count)
        return lambda index: self._taking_part(meeting, index)

    @contextlib.contextmanager
    def _taking_part(self, meeting: Meeting | None, index: int) -> Iterator[None]:
        seat = _Seat(self, meeting, index) if meeting is not None else None
        before = _current_seat()
        _thread.seat = seat
        failed = True
        try:
            with _TakesOverBatchNorm(seat):
                yield
            failed = False
        finally:
            _thread.seat = before
            if meeting is not None:
                meeting.leave(index, failed=failed)

    def name_of(self, index: int, tensors: Sequence[torch.Tensor | None]) -> tuple[int, str] | None:
        """Return the name that the first of `tensors` which is replica `index`'s has there, and its place in order."""
        names = self._names[index]
        if names is None:
            names = self._names[index] = {}
            replica = self._replicas[index]
            for path, module in replica.named_modules() if isinstance(replica, nn.Module) else ():
                for name, tensor in chain(module.named_buffers(path, False), module.named_parameters(path, False)):
                    names[id(tensor)] = (len(names), name, tensor)  # the tensor too, so that its id stays its own
        return next((names[id(tensor)][:2] for tensor in tensors if id(tensor) in names), None)


def run_synchronised(
    replicas: Sequence[Callable[..., Any]], calls: Sequence[Callable[..., Any]]
) -> list[Callable[..., Any]]:
    """Return `calls`, one a replica, with batch norm over all replicas; for one call of each, all at once.

    Raises (when called): RuntimeError where the replicas' common graph does not allow it.
    """
    surroundings = BatchNormOverReplicas(replicas, own_graphs=False).begin()

    def surrounded(index: int) -> Callable[..., Any]:
        def run(*inputs: Any, **kwargs: Any) -> Any:
            with surroundings(index):
                return calls[index](*inputs, **kwargs)

        return run

    return [surrounded(index) for index in range(len(replicas))]


def inside_synchronised_replica() -> bool:
    """Return whether the calling thread runs a replica whose batch norms see the rows of all replicas."""
    return _current_seat() is not None


class _Seat:
    """One replica's place in the meeting of one pass."""

    def __init__(self, replicas: BatchNormOverReplicas, meeting: Meeting, index: int) -> None:
        self.replicas = replicas
        self.meeting = meeting
        self.index = index
        self.num_checkpoints_around = _num_checkpoints()

    def exchange(self, tensors: Sequence[torch.Tensor | None], num_channels: int, value: Any) -> Met:
        """Exchange what the replicas have in forward, in the batch norm that `tensors` belong to."""
        place, name = self.replicas.name_of(self.index, tensors) or (math.inf, f"{num_channels} channels")
        met = self.meeting.exchange(self.index, name, value, place)
        if len(met.values) < self.replicas.count and not self.meeting.failed:
            say_once(
                f"the batch norm of {name} saw the rows of some replicas only: the others did not call it, because "
                "their rows led them into another branch of forward."
            )
        return met

    def link(self, met: Met) -> Link:
        return Link(self.replicas, met.number, frozenset(met.values))


_thread = threading.local()


def _current_seat() -> _Seat | None:
    return getattr(_thread, "seat", None)


def _num_checkpoints() -> int:
    """Return how many functions of torch.utils.checkpoint are running in this thread."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code.co_filename == torch.utils.checkpoint.__file__
        frame = frame.f_back  # type: ignore[assignment]
    return count


# ---- batch norm ----------------------------------------------------------------------------------


class _TakesOverBatchNorm(TorchFunctionMode):
    """Runs the batch norms of the thread in which it is active over all replicas."""

    def __init__(self, seat: _Seat | None) -> None:
        super().__init__()
        self._seat = seat

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self._seat, *args, **(kwargs or {}))
        if func in _BACKWARD:
            return self._stay_on(func, *args, **kwargs)
        return func(*args, **(kwargs or {}))

    def _stay_on(self, func: Any, ends: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Run a backward pass under this mode: activation checkpoints call batch norms in it.

        A mode is off while one of its functions runs. But torch asks no mode about a backward pass whose ends and
        inputs are given as gradient edges.
        """
        named = kwargs.get("inputs")
        named = list(named.values()) if isinstance(named, dict) else named
        if kwargs.get("materialize_grads") or not all(
            map(_have_edges, (ends, *inputs, named))
        ):  # errors of torch's own
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


def _batch_norm(
    seat: _Seat | None,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Do what `torch.nn.functional.batch_norm` would do with the rows of all replicas; return this replica's."""

    def by_itself() -> torch.Tensor:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    if not training or eps <= 0 or input.dim() < 2:  # the latter two are errors, and torch's own to tell
        return by_itself()
    if seat is None:
        raise RuntimeError(_CANNOT_MEET)
    if torch_private.has_transforms():
        raise RuntimeError(_TRANSFORM)
    own_graphs = seat.replicas.own_graphs
    if not own_graphs and _num_checkpoints() > seat.num_checkpoints_around:
        raise RuntimeError(_CHECKPOINT)

    mine = _Statistics.of(input)
    if not own_graphs:
        mine = mine.with_history(input, seat)
    met = seat.exchange((running_mean, running_var, weight, bias), input.size(1), (mine, input.size(0)))
    whole = _Statistics.of_all([statistics for statistics, _ in met.values.values()], input.device)
    if whole.count == 0:
        return by_itself()
    if whole.count == 1 and not seat.meeting.failed:
        size = torch.Size([sum(rows for _, rows in met.values.values()), *input.shape[1:]])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    whole.update(running_mean, running_var, momentum)
    if own_graphs:
        whole = whole.with_history(input, seat, met)
    output: torch.Tensor = _Normalise.apply(input, whole.mean, whole.var, weight, bias, eps)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class _Statistics:
    """Mean and (biased) variance of each channel, over `count` values a channel."""

    count: int
    mean: torch.Tensor
    var: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> "_Statistics":
        """Return those of one replica's rows, without a history."""
        x = x.detach()
        num_channels = x.size(1)
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        zeros = torch.zeros(num_channels, dtype=dtype, device=x.device)
        if not x.numel():
            return cls(0, zeros, zeros)
        if _devices.computes_on_host(x.device):
            # Running statistics of a wider type are what makes the kernel compute in that type.
            mean, var = torch.batch_norm_update_stats(x, zeros, torch.ones_like(zeros), 0.0)
        else:
            var, mean = torch.var_mean(x.to(dtype), _all_but_channels(x), correction=0)
        return cls(x.numel() // num_channels, mean, var)

    @classmethod
    def of_all(cls, parts: "Sequence[_Statistics]", device: torch.device) -> "_Statistics":
        """Put the replicas' statistics together, in their order.

        Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing
        sample variances", 1979. Unlike the mean of the squares it stays exact where the mean is large.
        """
        if len(parts) == 1:
            return parts[0]
        count = sum(part.count for part in parts)
        means = torch.stack([_devices.copy_to(part.mean, device) for part in parts])
        variances = torch.stack([_devices.copy_to(part.var, device) for part in parts])
        shares = torch.tensor([[part.count / max(count, 1)] for part in parts], dtype=means.dtype, device=device)
        mean = (shares * means).sum(0)
        return cls(count, mean, (shares * (variances + (means - mean).square())).sum(0))

    def with_history(self, x: torch.Tensor, seat: _Seat, met: Met | None = None) -> "_Statistics":
        """Return the same statistics as a function of `x`; of all replicas' x where they `met`."""
        link = seat.link(met) if met is not None else None
        mean, var = _Moments.apply(x, self, link, seat.meeting)  # type: ignore[no-untyped-call]
        return _Statistics(self.count, mean, var)

    def update(self, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float) -> None:
        """Move running statistics towards these, as torch does: the variance as an estimate for the population."""
        unbiased = self.var.detach() * (self.count / max(self.count - 1, 1))
        with torch.no_grad():
            for running, new in ((running_mean, self.mean.detach()), (running_var, unbiased)):
                if running is not None:
                    running.copy_(running.to(new.dtype) * (1 - momentum) + new * momentum)


class _Moments(torch.autograd.Function):
    """Gives mean and variance, which are known already, their history: the rows of all replicas that are linked."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, known: _Statistics, link: Link | None, meeting: Meeting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, known.mean)
        ctx.count, ctx.link, ctx.meeting = known.count, link, meeting if link is None else None
        return known.mean, known.var

    @staticmethod
    def backward(ctx: Any, grad_mean: torch.Tensor, grad_var: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        if ctx.meeting is not None and not ctx.meeting.is_over:
            raise RuntimeError(_INSIDE_FORWARD)
        if ctx.link is not None:
            both = _SumOverReplicas.apply(torch.stack([grad_mean, grad_var]), ctx.link)  # type: ignore[no-untyped-call]
            grad_mean, grad_var = both.unbind()
        # grad_mean / count + 2 grad_var (x - mean) / count
        slope = 2 / max(ctx.count, 1) * grad_var
        offset = grad_mean / max(ctx.count, 1) - slope * mean
        grad = torch.addcmul(_a_channel(offset, x), x, _a_channel(slope, x))
        return grad.to(x.dtype), None, None, None


class _SumOverReplicas(torch.autograd.Function):
    """The sum of a tensor over the replicas that are linked; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, link: Link) -> torch.Tensor:
        seat = _current_seat()
        if seat is None or seat.replicas is not link.replicas_of:
            raise RuntimeError(_CANNOT_MEET)
        met = seat.meeting.answer(seat.index, link, tensor.detach())
        ctx.link = seat.link(met)
        return torch.stack([_devices.copy_to(part, tensor.device) for part in met.values.values()]).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _SumOverReplicas.apply(grad, ctx.link), None  # type: ignore[no-untyped-call]


class _Normalise(torch.autograd.Function):
    """Batch norm with a given mean and variance, differentiable in these too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps, ctx.bias_dtype = eps, bias.dtype if bias is not None else None
        weight, bias = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        inverse_std = torch.rsqrt(var + ctx.eps)
        scale = inverse_std if weight is None else inverse_std * weight
        grad_x = (grad * _a_channel(scale, x)).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_scaled, grad_shift = _Normalise._sums(grad, x, mean, var, inverse_std, ctx.eps)
        return (
            grad_x,
            -scale * grad_shift,
            -0.5 * scale * inverse_std * grad_scaled,
            grad_scaled.to(weight.dtype) if weight is not None else None,
            grad_shift.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None,
            None,
        )

    @staticmethod
    def _sums(
        grad: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        inverse_std: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each channel, the sum of `grad` times the normalised x, and the sum of `grad`."""
        if x.numel() and not torch.is_grad_enabled() and _devices.computes_on_host(x.device):
            # One pass over both; the kernel is torch's for batch norm in eval mode, without the gradient of x.
            kernel = torch.ops.aten.native_batch_norm_backward
            _, scaled, shift = kernel(grad, x, None, mean, var, None, None, False, eps, [False, True, True])
            return scaled, shift
        normalised = (x - _a_channel(mean, x)) * _a_channel(inverse_std, x)
        axes = _all_but_channels(x)
        return (grad * normalised).sum(axes), grad.to(mean.dtype).sum(axes)


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _a_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a view of one value a channel that broadcasts over x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
