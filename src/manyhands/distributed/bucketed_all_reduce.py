"""The sum over processes of the gradients of one backward, in buckets that leave while backward still runs.

    gradients, in any order ──► (1) their places in buckets ──► (2) scaled, and sent as soon as it is their turn
                                                                          │
    gradients of the one loss over all rows   ◄── (3) what is late ◄──────┘

    (1) `BucketPlan` gives each tensor a place. What a process has no gradient for is zeros.
    (2) A bucket leaves when it is full, those before it have left, and all processes have said what they weigh. So
        they leave in the same order in all processes, whatever the order in which gradients come.
    (3) What has no place, being sparse or coming after its bucket has left (a tensor's gradient may come in several
        parts: reentrant checkpoints), goes tensor by tensor at the end. Which ones, and which tensors have a gradient
        in any process at all, is summed too.

Every process ends with the same bits, in memory that its buckets share with nothing else.
"""

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from manyhands.distributed.comm_hooks import CommHook, GradBucket
from manyhands.distributed.consistency import RankStep, description_of
from manyhands.distributed.process_group import AllGatherWork, Communicator, digest_of, distributed
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import BUCKET_BYTES, Bucket, Form, buckets_of

FIRST_BUCKET_BYTES = 1 << 20  # a small one goes out early; that of torch's DistributedDataParallel
DOING = "summing gradients over the processes"
_PLACED, _LATE, _SPARSE = range(3)


class BucketPlan(NamedTuple):
    """How the gradients of some tensors travel, and a number by which processes see whether theirs are the same."""

    buckets: tuple[Bucket, ...]
    digest: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], without: Callable[[torch.Tensor], bool]) -> "BucketPlan":
        """Plan for the gradients of `tensors`, those of the last first, as backward makes them.

        Args:
            without: which tensors are to have no place.
        """
        forms = {
            number: Form.of(tensor.detach(), tensor.device)
            for number, tensor in reversed(list(enumerate(tensors)))
            if tensor.numel() and not without(tensor)
        }
        digest = digest_of(repr([(*description_of(tensor), number in forms) for number, tensor in enumerate(tensors)]))
        return cls(_with_small_first(forms), digest)


def _with_small_first(forms: Mapping[int, Form]) -> tuple[Bucket, ...]:
    """Return the buckets for tensors in the order given, the first of them small, so that it leaves early."""
    first: dict[int, Form] = {}
    num_bytes = 0
    rest = dict(forms)
    while rest and num_bytes < FIRST_BUCKET_BYTES:
        number = next(iter(rest))
        first[number] = rest.pop(number)
        num_bytes += first[number].num_bytes
    return (*buckets_of(first), *buckets_of(rest, BUCKET_BYTES))


@dataclass
class _Begun:
    """A bucket that is being filled."""

    bucket: Bucket
    flat: torch.Tensor
    pieces: dict[int, torch.Tensor]
    missing: set[int]
    unscaled: list[torch.Tensor] = field(default_factory=list)


class BucketedAllReduce:
    """See the module's docstring. `add` may be called from several threads.

    Args:
        communicator, group: the processes, and the group in which tensors like these travel.
        plan, tensors: the tensors, and how their gradients travel.
        hook: a communication hook and its state, or None.
        scale_of: from what all processes have said to what this one's gradients are multiplied by; None where they
            are not to be read. Raises where the processes do not do the same.
        steps: what all say, on its way.
        kept: by number, what is to be added to this process's part of the mean over the processes.
    """

    def __init__(
        self,
        communicator: Communicator,
        group: Any,
        plan: BucketPlan,
        tensors: Sequence[torch.Tensor],
        hook: tuple[Any, CommHook] | None,
        scale_of: Callable[[Sequence[RankStep]], float | None],
        steps: AllGatherWork,
        kept: Mapping[int, torch.Tensor],
    ) -> None:
        self._communicator, self._group, self._plan, self._tensors = communicator, group, plan, tensors
        self._hook, self._scale_of, self._steps, self._kept = hook, scale_of, steps, kept
        self._bucket_of = {n: b for b, bucket in enumerate(plan.buckets) for n, _ in bucket.items}
        self._lock = threading.RLock()
        self._begun: dict[int, _Begun] = {}
        self._flying: list[tuple[_Begun, Callable[[], torch.Tensor]]] = []  # sent, and what waits for the sums
        self._given: set[int] = set()
        self._beside: dict[int, torch.Tensor] = {}  # late, sparse, or without a place
        self._scale: float | None = None
        self._scale_known = False
        self.sparse: list[int] = []  # whose gradients were sparse in some process, known at the end
        # A hook takes the mean over the processes to be the result, so what it is given is this much larger.
        self._enlarged = communicator.world_size if hook is not None else 1

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Take a part of the gradient of tensor `number`; send what is full now. To be called with gradients off."""
        with self._lock:
            b = self._bucket_of.get(number)
            if b is None or number in self._given or gradient.is_sparse:
                before = self._beside.get(number)
                self._beside[number] = gradient if before is None else before + gradient
                return
            self._given.add(number)
            begun = self._bucket(b)
            self._fill(begun, begun.pieces[number], gradient)
            begun.missing.discard(number)
            if not begun.missing and (self._scale_known or self._steps.is_completed()):
                self._send_full()

    def add_all(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Take gradients of many tensors, as `add` does, with few operations; send nothing yet."""
        placed: dict[int, list[int]] = {}  # numbers by bucket
        with self._lock, torch.no_grad():
            for number, gradient in gradients.items():
                b = self._bucket_of.get(number)
                if b is None or number in self._given or gradient.is_sparse:
                    self.add(number, gradient)
                else:
                    placed.setdefault(b, []).append(number)
            for b, numbers in placed.items():
                begun = self._bucket(b)
                pieces = [begun.pieces[number] for number in numbers]
                torch_private.copy_all_in_place(pieces, [gradients[number].detach() for number in numbers])
                begun.unscaled += pieces
                begun.missing.difference_update(numbers)
                self._given.update(numbers)

    @property
    def early(self) -> Set[int]:
        """The tensors whose gradients are to be given as soon as they are there: all but those that are sent last."""
        last = len(self._plan.buckets) - 1
        return {number for number, b in self._bucket_of.items() if b != last}

    def finish(self, meanwhile: Callable[[], None]) -> list[torch.Tensor | None]:
        """Wait for the others; return the gradient of each tensor, None for one that no process used.

        Args:
            meanwhile: called when everything has been sent.
        """
        with self._lock, torch.no_grad():
            flags = self._flags()
            wait_for_flags = self._communicator.all_reduce_flags(flags, DOING)
            for b in range(len(self._flying), len(self._plan.buckets)):
                begun = self._bucket(b)
                for number in begun.missing:
                    begun.pieces[number].zero_()
                begun.missing.clear()
            self._send_full()
            meanwhile()
            wait_for_flags()
            found: list[torch.Tensor | None] = [None] * len(self._tensors)
            for begun, wait in self._flying:
                flat = wait()
                pieces = begun.pieces if flat is begun.flat else begun.bucket.pieces(flat)
                for number, piece in pieces.items():
                    if flags[_PLACED, number]:
                        found[number] = piece
            self._add_late(found, flags)
            self._add_sparse(found, flags)
            return found

    # ---- what each step is -----------------------------------------------------------------------

    def _bucket(self, b: int) -> _Begun:
        if b not in self._begun:
            bucket = self._plan.buckets[b]
            flat = torch.empty(bucket.num_entries, dtype=bucket.dtype, device=bucket.device)
            pieces = bucket.pieces(flat)
            self._begun[b] = _Begun(bucket, flat, pieces, set(pieces))
        return self._begun[b]

    def _fill(self, begun: _Begun, piece: torch.Tensor, gradient: torch.Tensor) -> None:
        if not self._scale_known:
            piece.copy_(gradient)
            begun.unscaled.append(piece)
        elif self._scale is None:
            piece.zero_()
        else:
            torch.mul(gradient, self._scale * self._enlarged, out=piece)

    def _scaled(self) -> float | None:
        """Return what this process's gradients are multiplied by; wait for what the others say."""
        if not self._scale_known:
            self._scale = self._scale_of([RankStep(*step) for step in self._steps.wait()])
            self._scale_known = True
        return self._scale

    def _send_full(self) -> None:
        """Send the buckets whose turn it is and that are full."""
        while (b := len(self._flying)) in self._begun and not self._begun[b].missing:
            scale = self._scaled()
            begun = self._begun.pop(b)
            whole = len(begun.unscaled) == len(begun.pieces)
            for part in [begun.flat] if whole else begun.unscaled:
                if scale is None:
                    part.zero_()
                else:
                    part.mul_(scale * self._enlarged)
            for number, piece in begun.pieces.items() if self._kept else ():
                kept = self._kept.get(number)
                if kept is not None and not kept.is_sparse:
                    piece.add_(kept, alpha=self._enlarged / self._communicator.world_size)
            self._flying.append((begun, self._sent(begun, b)))

    def _sent(self, begun: _Begun, index: int) -> Callable[[], torch.Tensor]:
        """Send a bucket; return what waits for its sum."""
        communicator, group, flat = self._communicator, self._group, begun.flat
        if self._hook is None:
            work = communicator.start(lambda: distributed.all_reduce(flat, group=group, async_op=True))

            def result() -> torch.Tensor:
                communicator.wait(work, DOING, group)
                return flat

            return result
        state, call = self._hook
        is_last = index == len(self._plan.buckets) - 1
        future = call(state, GradBucket(begun.bucket, flat, index, is_last, self._tensors))
        if not all(hasattr(future, name) for name in ("done", "wait")):
            got = type(future).__name__
            raise TypeError(f"the communication hook returned a {got}: expected a torch.futures.Future of a tensor")
        return lambda: _of_size(communicator.wait_for_future(future, DOING), flat)

    def _flags(self) -> torch.Tensor:
        """Return what this process has for each tensor; and scale what goes beside the buckets."""
        scale = self._scaled()
        scaled = {} if scale is None else {number: part * scale for number, part in self._beside.items()}
        for number, kept in self._kept.items():
            if number not in self._bucket_of or kept.is_sparse:
                part = kept / self._communicator.world_size
                scaled[number] = scaled[number] + part if number in scaled else part
        self._beside = scaled
        placed = {number for number in self._kept if number not in scaled}
        if scale is not None:
            placed |= self._given
        flags = torch.zeros(3, len(self._tensors), dtype=torch.int32)
        flags[_PLACED, list(placed)] = 1
        for number, part in scaled.items():
            flags[_SPARSE if part.is_sparse else _LATE, number] = 1
        return flags

    def _add_late(self, found: list[torch.Tensor | None], flags: torch.Tensor) -> None:
        """Sum what came after its bucket had left, or has no place in one."""
        for number in flags[_LATE].nonzero().flatten().tolist():
            tensor, part = self._tensors[number].detach(), self._beside.get(number)
            total = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
            if part is not None and not part.is_sparse:
                total.copy_(part)
            self._communicator.all_reduce(total, self._group, DOING)
            before = found[number]
            found[number] = total if before is None else before + total

    def _add_sparse(self, found: list[torch.Tensor | None], flags: torch.Tensor) -> None:
        """Sum sparse gradients: every process gets all entries, and adds up those of one place."""
        for number in flags[_SPARSE].nonzero().flatten().tolist():
            tensor, part = self._tensors[number].detach(), self._beside.get(number)
            if part is None or not part.is_sparse:  # no entries
                indices = torch.empty(1, 0, dtype=torch.int64, device=tensor.device)
                part = torch.sparse_coo_tensor(indices, tensor.new_empty(0, *tensor.shape[1:]), tensor.shape)
            total = self._communicator.all_reduce_sparse(part.coalesce(), self._group, DOING)
            before = found[number]
            found[number] = total if before is None else before + total
            self.sparse.append(number)


def _of_size(result: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    if result.numel() != flat.numel():
        raise ValueError(
            f"the communication hook brought {result.numel()} entries for a bucket of {flat.numel()}: expected the "
            "mean over the processes of bucket.buffer()"
        )
    return result.view_as(flat)
