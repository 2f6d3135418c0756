"""Gradients summed over processes, while backward still runs.

    rank r:   backward of its own batch ──► gradient of its own loss, tensor by tensor
                                              │ (1) times weight r / all weights, into its place in a bucket
                                              ▼
              bucket 0 full ──► (2) summed over the processes ──► ... ──► (3) gradients of the one loss over all rows
              bucket 1 full ──► (2) ...

    (1) The weight of a rank is its number of rows (or what it says), so that nothing is averaged per process. The ranks
        exchange their weights when backward begins. A rank whose weight is 0 gives zeros: its own gradients, which may
        be NaN, are never read.
    (2) Buckets leave in their order on every rank, whatever the order in which gradients come; what a rank has no
        gradient for is zeros. A communication hook may take the place of the plain sum.
    (3) Which tensors some rank used is summed too: what nobody used has no gradient, anywhere.

Together with the weights every rank says what it is about to sum. Where they do not all say the same, each raises an
error that names the first difference; nobody waits for what will not come.

Guarantees
    - Every rank ends with the same bits.
    - A tensor's gradient may come in several parts (reentrant checkpoints, graphs of a higher order): what comes after
      its bucket has left goes in one more bucket at the end.

Sources: buckets and their order, S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020.
"""

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from manyhands.buckets import BUCKET_BYTES, Bucket, Form, buckets_of
from manyhands.cluster import Cluster, distributed, first_difference, ranks_of

FIRST_BUCKET_BYTES = 1 << 20  # a small one goes out early; that of torch's DistributedDataParallel
_DOING = "summing gradients over the processes"
_USED, _LATE, _SPARSE = range(3)

CommHook: TypeAlias = Callable[[Any, Any], Any]


class GradBucket:
    """What a communication hook gets: the methods of `torch.distributed.GradBucket`, which cannot be made in Python.

    The buffer is scaled so that the mean over the processes is the result, as hooks written for
    DistributedDataParallel take it.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, index: int, is_last: bool, of: Sequence[Any]) -> None:
        self._bucket, self._flat, self._index, self._is_last, self._of = bucket, flat, index, is_last, of

    def index(self) -> int:
        """Return the bucket's place in the order in which buckets leave."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one of this backward."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return all its gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in the place of the buffer."""
        self._flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return its gradients as views of the buffer."""
        return list(self._bucket.pieces(self._flat).values())

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it holds."""
        return [self._of[number] for number, _ in self._bucket.items]


class _Plan(NamedTuple):
    """How the gradients of some tensors travel, and a number by which ranks see whether theirs are the same tensors."""

    buckets: tuple[Bucket, ...]
    digest: int


class Reduction:
    """Sums the gradients of one module over processes.

    Args:
        cluster: the processes.
        device: on which the gradients are.
        loss: "mean" if each process's loss is a mean over its rows, "sum" if it is a sum.
    """

    def __init__(self, cluster: Cluster, device: torch.device, loss: str) -> None:
        self.cluster = cluster
        self.loss = loss
        self._device = device
        self.hook: tuple[Any, CommHook] | None = None
        self.synchronised = True  # False inside no_sync()
        self.next_weight: float | None = None  # what the next forward weighs, where its rows are not what counts
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of no_sync(): by id, a tensor and its sum
        self._sparse: set[int] = set()  # ids of tensors whose gradients have been sparse
        self._number = 0  # of the model among those that are wrapped
        self._num_forwards = 0
        self._plans: dict[Any, _Plan] = {}
        self.group = cluster.group_for(device, "gradients")

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduction, (self.cluster, self._device, self.loss)  # a copied model has summed nothing yet

    def begin_with(self, module: nn.Module) -> None:
        """Have `module` start alike in all processes: check that it is the same, and send the first one's values."""
        self._number = self.cluster.next_number()
        check_alike(self.cluster, module)
        tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        self.cluster.send_from(0, tensors, self.group, "sending the first process's parameters to all")

    def contribution(self, module: nn.Module, rows: int | None) -> "Contribution":
        """Return what a forward of so many rows is to count for."""
        self._number = self._number or self.cluster.next_number()
        self._num_forwards += module.training
        given, self.next_weight = self.next_weight, None
        weight = given if given is not None else float(1 if rows is None else rows)
        return Contribution(self, weakref.ref(module), weight, given is not None, self._num_forwards, self.synchronised)

    def plan(self, tensors: Sequence[torch.Tensor]) -> _Plan:
        """Return the buckets for the gradients of `tensors`, those of the last first, as backward makes them."""
        key = tuple((id(tensor), tensor.dtype, tensor.size()) for tensor in tensors)
        if key not in self._plans:
            described = repr([_described(tensor) for tensor in tensors])
            digest = int.from_bytes(hashlib.blake2b(described.encode(), digest_size=6).digest())  # exact in a double
            forms = {
                number: Form.of(tensor.detach(), tensor.device)
                for number, tensor in reversed(list(enumerate(tensors)))
                if tensor.numel() and not (tensor.is_sparse or id(tensor) in self._sparse)
            }
            self._plans = {key: _Plan(_with_small_first(forms), digest)}  # the latest only
        return self._plans[key]

    def has_sparse_gradient(self, tensor: torch.Tensor) -> None:
        """Give a tensor no place in a bucket from now on."""
        if id(tensor) not in self._sparse:
            self._sparse.add(id(tensor))
            self._plans = {}

    def step(self, contribution: "Contribution", plan: _Plan) -> list[float]:
        """Return what this rank says about the sum that it begins; all but the weight has to be alike on all."""
        return [
            contribution.weight,
            self._number,
            contribution.number,
            plan.digest,
            contribution.synchronised,
            contribution.weight_given,
            self.loss == "sum",
            self.hook is not None,
        ]

    def check(
        self, steps: Sequence[Sequence[float]], tensors: Sequence[torch.Tensor], module: nn.Module | None
    ) -> None:
        """Check that all ranks have begun the same sum, of gradients of parameters of `module`.

        Raises:
            RuntimeError: they have not; names the first difference. All ranks raise it.
        """
        others = [rank for rank, step in enumerate(steps) if step[1:] != steps[0][1:]]
        if not others:
            return
        rank = others[0]
        known = {} if module is None else {id(tensor): name for name, tensor in module.named_parameters()}
        names = [known.get(id(tensor), "?") for tensor in tensors]
        lists = self.cluster.exchange([(name, *_described(t)) for name, t in zip(names, tensors, strict=True)], _DOING)
        error = RuntimeError(_difference(steps[0], steps[rank], lists[0], lists[rank], rank))
        self.cluster.failed_with(error)
        raise error

    def send_buffers(self, source: int, module: nn.Module | None) -> None:
        """Give every process the buffers of the one of rank `source`."""
        if module is not None and module.training:
            buffers = [buffer for buffer in module.buffers() if not buffer.is_sparse]
            self.cluster.send_from(source, buffers, self.group, "sending one process's buffers to all")


@dataclass(frozen=True)
class Contribution:
    """What one forward counts for when gradients are summed.

    Attributes:
        module: whose forward it is.
        weight: how much, compared with the other processes' weights.
        weight_given: whether the caller has said so; else it is the number of rows.
        number: how many forwards of a training step there were before it, and this one.
        synchronised: whether its gradients go to the other processes at once.
    """

    reduction: Reduction
    module: "weakref.ref[nn.Module]"
    weight: float
    weight_given: bool
    number: int
    synchronised: bool

    @property
    def weight_of_loss(self) -> float:
        """What the loss of this process weighs in the one of all processes, compared with the others'."""
        return self.weight if self.reduction.loss == "mean" else float(self.weight > 0)

    def begin(self, tensors: Sequence[torch.Tensor]) -> "Sum":
        """Begin to sum the gradients of `tensors` over the processes."""
        return Sum(self, tensors)

    def of_callers_graph(
        self, module: nn.Module, method: str | None
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """Return what calls `module` with parameters whose gradients are summed, as part of the caller's own graph."""
        function = _Calling(module, method)
        parameters = {name: p for name, p in function.named_parameters() if p.requires_grad}
        summed = _OverProcesses.apply(self, *parameters.values())  # type: ignore[no-untyped-call]
        return partial(functional_call, function, dict(zip(parameters, summed, strict=True)))

    def differentiable(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the sums of gradients that have a history.

        What is computed of the sums, every process computes alike, and its gradient reaches each through its own part:
        so a sum is its own derivative.
        """
        there = [k for k, gradient in enumerate(gradients) if gradient is not None]
        results = _DifferentiableSum.apply(self, tensors, there, *(gradients[k] for k in there))  # type: ignore[no-untyped-call]
        return list(results)


@dataclass
class _Begun:
    """A bucket that is being filled."""

    bucket: Bucket
    flat: torch.Tensor
    pieces: dict[int, torch.Tensor]
    missing: set[int]
    unscaled: list[torch.Tensor] = field(default_factory=list)


class Sum:
    """The sum over the processes of the gradients of one backward; its methods may be called from several threads."""

    def __init__(self, contribution: Contribution, tensors: Sequence[torch.Tensor]) -> None:
        self._contribution, self._tensors = contribution, tensors
        self._reduction = contribution.reduction
        self._cluster = self._reduction.cluster
        self._plan = self._reduction.plan(tensors)
        self._bucket_of = {n: b for b, bucket in enumerate(self._plan.buckets) for n, _ in bucket.items}
        self._lock = threading.RLock()
        self._begun: dict[int, _Begun] = {}
        self._flying: list[tuple[Bucket, Callable[[], torch.Tensor]]] = []
        self._given: set[int] = set()
        self._beside: dict[int, torch.Tensor] = {}  # late, sparse, or of a form that was not planned
        self._scale: float | None = None  # not known before all have said their weights
        self._first_with_rows = 0
        self._kept: dict[int, torch.Tensor] = {}  # by number, what no_sync() has kept
        if contribution.synchronised:
            pending, self._reduction.pending = self._reduction.pending, {}
            self._kept = {n: pending[id(t)][1] for n, t in enumerate(tensors) if id(t) in pending}
        self._agree = self._cluster.gather(self._reduction.step(contribution, self._plan), _DOING)

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Take a part of the gradient of tensor `number`; send what is full now."""
        with self._lock, torch.no_grad():
            gradient = gradient.detach()
            b = self._bucket_of.get(number)
            if not self._contribution.synchronised or number in self._given or b is None or gradient.is_sparse:
                before = self._beside.get(number)
                self._beside[number] = gradient.clone() if before is None else before + gradient
                return
            self._given.add(number)
            begun = self._bucket(b)
            self._fill(begun, begun.pieces[number], gradient)
            begun.missing.discard(number)
            if not begun.missing:
                self._send_full(wait=False)

    def finish(self, rest: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Take what was not given yet, wait for the others, and return the gradient of each tensor.

        None for a tensor that no process used; and for all, in no_sync().
        """
        for number, gradient in rest.items():
            self.add(number, gradient)
        with self._lock, torch.no_grad():
            scale = self._scaled()
            self._beside = {number: part * scale for number, part in self._beside.items() if scale}
            if not self._contribution.synchronised:
                self._keep_for_later()
                return [None] * len(self._tensors)
            flags = self._flags()
            wait_for_flags = self._cluster.sum_of_flags(flags, _DOING)
            for b in range(len(self._flying), len(self._plan.buckets)):
                begun = self._bucket(b)
                for number in begun.missing:
                    begun.pieces[number].zero_()
                begun.missing.clear()
            self._send_full(wait=True)
            wait_for_flags()
            found: list[torch.Tensor | None] = [None] * len(self._tensors)
            for bucket, result in self._flying:
                for number, piece in bucket.pieces(result()).items():
                    if flags[_USED, number]:
                        found[number] = piece
            self._add_late(found, flags)
            self._add_sparse(found, flags)
            self._reduction.send_buffers(self._first_with_rows, self._contribution.module())
            return found

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that this one cannot go on."""
        self._cluster.failed_with(error)

    # ---- what each step is -----------------------------------------------------------------------

    def _bucket(self, b: int) -> _Begun:
        if b not in self._begun:
            bucket = self._plan.buckets[b]
            flat = torch.empty(bucket.num_entries, dtype=bucket.dtype, device=bucket.device)
            pieces = bucket.pieces(flat)
            self._begun[b] = _Begun(bucket, flat, pieces, set(pieces))
        return self._begun[b]

    def _fill(self, begun: _Begun, piece: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._contribution.weight == 0:
            piece.zero_()
        elif self._scale is not None:
            torch.mul(gradient, self._scale * self._factor, out=piece)
        else:
            piece.copy_(gradient)
            begun.unscaled.append(piece)

    @property
    def _factor(self) -> int:
        """What a bucket is multiplied by so that a hook's mean over the processes is the sum."""
        return self._cluster.world_size if self._reduction.hook is not None else 1

    def _scaled(self) -> float:
        """Return what this process's gradients are multiplied by; wait for the others' weights."""
        if self._scale is None:
            steps = self._agree()
            self._reduction.check(steps, self._tensors, self._contribution.module())
            weight, total = self._contribution.weight, sum(step[0] for step in steps)
            # As of all replicas it is the first whose buffers persist.
            self._first_with_rows = next((rank for rank, step in enumerate(steps) if step[0]), 0)
            self._scale = 0.0 if weight == 0 else 1.0 if self._reduction.loss == "sum" else weight / total
        return self._scale

    def _send_full(self, wait: bool) -> None:
        """Send the buckets whose turn it is and that are full; if not `wait`, only once the weights are known."""
        while (b := len(self._flying)) in self._begun and not self._begun[b].missing:
            if not wait and self._scale is None and not self._agree.is_there():
                return
            scale = self._scaled()
            begun = self._begun.pop(b)
            for piece in begun.unscaled:
                piece.mul_(scale * self._factor)
            for number, piece in begun.pieces.items():
                kept = self._kept.get(number)
                if kept is not None and not kept.is_sparse:
                    piece.add_(kept, alpha=self._factor)
            self._flying.append((begun.bucket, self._sent(begun, b)))

    def _sent(self, begun: _Begun, index: int) -> Callable[[], torch.Tensor]:
        """Send a bucket; return what waits for its sum."""
        cluster, group, hook = self._cluster, self._reduction.group, self._reduction.hook
        flat = begun.flat
        if hook is None:
            work = cluster.start(lambda: distributed.all_reduce(flat, group=group, async_op=True))

            def result() -> torch.Tensor:
                cluster.wait(work, _DOING, group)
                return flat

            return result
        state, call = hook
        is_last = index == len(self._plan.buckets) - 1
        future = cluster.start(lambda: call(state, GradBucket(begun.bucket, flat, index, is_last, self._tensors)))
        return lambda: cluster.wait_for_future(future, _DOING).view_as(flat)

    def _flags(self) -> torch.Tensor:
        """Return what this process has for each tensor; and count what it kept in no_sync() and has no bucket."""
        for number, kept in self._kept.items():
            if number not in self._bucket_of or kept.is_sparse:
                before = self._beside.get(number)
                self._beside[number] = kept if before is None else before + kept
        flags = torch.zeros(3, len(self._tensors), dtype=torch.int32)
        counting = {*self._given, *self._beside} if self._contribution.weight else set(self._beside)
        for number in {*counting, *self._kept}:
            flags[_USED, number] = 1
        for number, part in self._beside.items():
            flags[_SPARSE if part.is_sparse else _LATE, number] = 1
        return flags

    def _add_late(self, found: list[torch.Tensor | None], flags: torch.Tensor) -> None:
        """Sum what came after its bucket had left, or has no bucket."""
        for number in flags[_LATE].nonzero().flatten().tolist():
            part = self._beside.get(number)
            if part is None or part.is_sparse:
                part = torch.zeros_like(self._tensors[number], memory_format=torch.contiguous_format)
            total = self._cluster.sum(part.contiguous(), self._reduction.group, _DOING)
            before = found[number]
            found[number] = total if before is None else before + total

    def _add_sparse(self, found: list[torch.Tensor | None], flags: torch.Tensor) -> None:
        """Sum sparse gradients: every process gets all entries, and adds up those of one place."""
        for number in flags[_SPARSE].nonzero().flatten().tolist():
            tensor, part = self._tensors[number], self._beside.get(number)
            if part is None or not part.is_sparse:
                part = torch.zeros_like(tensor).to_sparse(1)  # no entries
            total = self._cluster.sum_sparse(part.coalesce(), self._reduction.group, _DOING)
            dense = found[number] if flags[_USED, number] > flags[_SPARSE, number] else None
            found[number] = total if dense is None else dense + total
            self._reduction.has_sparse_gradient(tensor)

    def _keep_for_later(self) -> None:
        """Add this process's part to what the next synchronised backward will send."""
        for number, part in self._beside.items():
            tensor = self._tensors[number]
            _, before = self._reduction.pending.get(id(tensor), (tensor, None))
            self._reduction.pending[id(tensor)] = tensor, part if before is None else before + part


class _DifferentiableSum(torch.autograd.Function):
    """The sum of gradients that have a history; see `Contribution.differentiable`."""

    @staticmethod
    def forward(
        ctx: Any, contribution: Contribution, tensors: Sequence[torch.Tensor], there: Sequence[int], *gradients: Any
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.there = there
        ctx.set_materialize_grads(False)
        return tuple(contribution.begin(tensors).finish(dict(zip(there, gradients, strict=True))))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *(grads[k] for k in ctx.there))


class _Calling(nn.Module):
    """A module whose forward is any method of another."""

    def __init__(self, module: nn.Module, method: str | None) -> None:
        super().__init__()
        self.module = module
        self._method = method

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        called = self.module if self._method is None else getattr(self.module, self._method)
        return called(*inputs, **kwargs)


class _OverProcesses(torch.autograd.Function):
    """Parameters as they are; in backward their gradients are summed over the processes.

    For a forward that is part of the caller's own graph, where no gradient can be sent before backward has made all.
    """

    @staticmethod
    def forward(ctx: Any, contribution: Contribution, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.contribution, ctx.tensors = contribution, tensors
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        contribution: Contribution = ctx.contribution
        if torch.is_grad_enabled():
            return (None, *contribution.differentiable(ctx.tensors, grads))
        there = {number: grad for number, grad in enumerate(grads) if grad is not None}
        return (None, *contribution.begin(ctx.tensors).finish(there))


# ---- the same on all processes ---------------------------------------------------------------------


def check_alike(cluster: Cluster, module: nn.Module) -> None:
    """Check that `module` has the same parameters and buffers in every process.

    Raises:
        RuntimeError: it has not; names the first difference and the ranks.
    """
    doing = "comparing the models"
    described = [
        *((f"parameter {name}", *_described(t), f"requires_grad={t.requires_grad}") for name, t in _parameters(module)),
        *((f"buffer {name}", *_described(t)) for name, t in module.named_buffers(remove_duplicate=False)),
    ]
    digest = int.from_bytes(hashlib.blake2b(repr(described).encode(), digest_size=6).digest())
    digests = [int(d) for (d,) in cluster.gather([digest], doing)()]
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    lists = cluster.exchange(described, doing)
    mine, theirs = next(first_difference(lists[0], lists[different[0]]))
    raise RuntimeError(
        f"the models of the processes differ: rank 0 has {_shown(mine)}, {ranks_of(different)} {_shown(theirs)}. "
        "Every process has to make the same model, layer by layer; the values may differ, and are then rank 0's."
    )


def _parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_parameters(remove_duplicate=False)


def _difference(
    first: Sequence[float], other: Sequence[float], tensors: Sequence[Any], others: Sequence[Any], rank: int
) -> str:
    """Return in words what two ranks, 0 and `rank`, do not do alike."""
    head = "the processes do not sum the same gradients: "
    tail = " Every process has to run the same models, in the same order, as often."
    _, model, number, digest, synchronised, given, is_sum, _ = range(8)
    if first[model] != other[model]:
        which = f"rank 0 is in backward of wrapped model {first[model]:.0f}, rank {rank} in that of {other[model]:.0f},"
        return f"{head}{which} in the order in which they were wrapped.{tail}"
    if first[digest] != other[digest]:
        mine, theirs = next(first_difference(tensors, others))
        return f"{head}where rank 0 has {_shown(mine)}, rank {rank} has {_shown(theirs)}.{tail}"
    if first[number] != other[number]:
        which = f"rank 0 is in backward of its forward {first[number]:.0f}, rank {rank} of its {other[number]:.0f}"
        return f"{head}{which} (forwards in training mode, with gradients, from 1).{tail}"
    if first[synchronised] != other[synchronised]:
        return f"{head}{_one_of(first[synchronised], rank)} is inside no_sync(), the other is not.{tail}"
    if first[given] != other[given]:
        return f"{head}{_one_of(not first[given], rank)} has set the weight of its batch, the other has not.{tail}"
    if first[is_sum] != other[is_sum]:
        return f'{head}one of ranks 0 and {rank} has loss="sum", the other has not.{tail}'
    return f"{head}one of ranks 0 and {rank} has a communication hook, the other has not.{tail}"


def _one_of(other: Any, rank: int) -> str:
    return f"rank {rank if other else 0}"


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    return str(tensor.dtype), tuple(tensor.shape), stride


def _shown(described: Any) -> str:
    return "nothing more" if described is None else " ".join(str(part) for part in described)


def _with_small_first(forms: Mapping[int, Form]) -> tuple[Bucket, ...]:
    """Return the buckets for tensors in the order given, the first of them small, so that it leaves early."""
    first: dict[int, Form] = {}
    rest = dict(forms)
    while rest and sum(form.num_bytes for form in first.values()) < FIRST_BUCKET_BYTES:
        number = next(iter(rest))
        first[number] = rest.pop(number)
    return (*buckets_of(first), *buckets_of(rest, BUCKET_BYTES))
