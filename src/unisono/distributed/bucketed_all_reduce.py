"""The all-reduce of the gradients of one backward, in buckets that are sent while backward still runs.

    gradients, in any order ──► (1) their places in buckets ──► (2) scaled, and sent as soon as it is their turn
                                                                          │
    gradients of the one loss over all rows   ◄── (3) late gradients ◄────┘

    (1) `BucketPlan` gives each tensor a place in a bucket. A tensor without a gradient on this rank counts as zeros.
    (2) A bucket is sent when it is full, the buckets before it are sent, and the weights of all ranks are known. So all
        ranks send buckets in the same order, whatever the order in which gradients arrive.
    (3) Some gradients have no place, because they are sparse, or arrive after their bucket was sent (reentrant
        checkpoints give a tensor's gradient in several parts). They are summed tensor by tensor at the end. Flags say
        which they are, and which tensors have a gradient on any rank at all. They are summed too: at the end of the
        last bucket, or by themselves where a hook or an accelerator has that bucket.

Every rank ends with the same bits, in memory that its buckets share with nothing else. A step makes no calls in Python
for each tensor, except where gradients arrive one by one, or have no place.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from unisono.distributed.comm_hooks import CommHook, GradBucket
from unisono.distributed.consistency import description_of
from unisono.distributed.process_group import Communicator, digest_of
from unisono.runtime import torch_private
from unisono.runtime.buckets import BUCKET_BYTES, Bucket, Form, buckets_of, dense_first

FIRST_BUCKET_BYTES = 1 << 20  # small, so that it is sent early; as in torch's DistributedDataParallel
DOING = "summing gradients over the processes"
_PLACED, _LATE, _SPARSE = range(3)


class BucketPlan(NamedTuple):
    """The buckets of the gradients of some tensors.

    Attributes:
        bucket_of: the place in `buckets` of the bucket of each tensor that has one, by the tensor's number.
        early: the tensors whose gradients should be added as soon as they are computed: all outside of the last bucket.
        digest: equal on ranks with equal plans.
    """

    buckets: tuple[Bucket, ...]
    bucket_of: Mapping[int, int]
    early: Set[int]
    digest: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], without: Callable[[torch.Tensor], bool]) -> "BucketPlan":
        """Plan the buckets of the gradients of `tensors`, the last tensor first: backward computes it first.

        Args:
            without: whether a tensor gets no place.
        """
        forms = {
            number: Form.of(tensor.detach(), tensor.device)
            for number, tensor in reversed(list(enumerate(tensors)))
            if tensor.numel() and not without(tensor)
        }
        digest = digest_of(repr([(*description_of(tensor), number in forms) for number, tensor in enumerate(tensors)]))
        buckets = _small_bucket_first(forms)
        bucket_of = {number: b for b, bucket in enumerate(buckets) for number in bucket.numbers}
        return cls(buckets, bucket_of, bucket_of.keys() - set(buckets[-1].numbers if buckets else ()), digest)


def _small_bucket_first(forms: Mapping[int, Form]) -> tuple[Bucket, ...]:
    """Return the buckets for tensors in the order given; the first bucket is small, so that it is sent early."""
    first: dict[int, Form] = {}
    num_bytes = 0
    rest = dict(forms)
    while rest and num_bytes < FIRST_BUCKET_BYTES:
        number = next(iter(rest))
        first[number] = rest.pop(number)
        num_bytes += first[number].num_bytes
    return (*buckets_of(first), *buckets_of(rest, BUCKET_BYTES))


@dataclass
class _FillingBucket:
    """A bucket that is being filled."""

    bucket: Bucket
    flat: torch.Tensor
    missing: set[int]  # tensors without a gradient so far
    unscaled: list[torch.Tensor] = field(default_factory=list)

    @functools.cached_property
    def pieces(self) -> dict[int, torch.Tensor]:
        """Views of `flat`, by the numbers of the tensors."""
        return self.bucket.pieces(self.flat)


class BucketedAllReduce:
    """See the module's docstring. `add` may be called from several threads.

    Args:
        communicator, group: the ranks, and the process group of these tensors.
        plan, tensors: the tensors, and the buckets of their gradients.
        hook: a communication hook and its state, or None.
        steps: what all ranks do; gives this rank's scale.
        local_grads: by number, gradients to add to this rank's part of the mean over the ranks.
        early: whether buckets may be sent while backward runs.
    """

    def __init__(
        self,
        communicator: Communicator,
        group: Any,
        plan: BucketPlan,
        tensors: Sequence[torch.Tensor],
        hook: tuple[Any, CommHook] | None,
        steps: Any,
        local_grads: Mapping[int, torch.Tensor],
        *,
        early: bool = True,
    ) -> None:
        self._communicator, self._group, self._plan, self._tensors = communicator, group, plan, tensors
        self._hook, self._steps, self._local_grads, self._early = hook, steps, local_grads, early
        self._lock = threading.RLock()
        self._filling: dict[int, _FillingBucket] = {}
        # Each bucket that is sent, with the function that waits for its sum.
        self._in_flight: list[tuple[_FillingBucket, Callable[[], torch.Tensor]]] = []
        self._placed: set[int] = set()
        self._late: dict[int, torch.Tensor] = {}  # gradients that are late, sparse, or without a place
        self._scale: float | None = None
        self._scale_known = False
        self.sparse: list[int] = []  # tensors with sparse gradients on some rank, known at the end
        # A hook returns the mean over the ranks, where the sum is wanted: so it gets gradients this much larger.
        self._hook_factor = communicator.world_size if hook is not None else 1
        # The bucket with the flags at its end. A hook may not keep them; an accelerator would have to be waited for.
        self._flagged = len(plan.buckets) - 1 if hook is None and communicator.waits_on_host(group) else -1
        self._flags: torch.Tensor | None = None  # known when all gradients are: see `_own_flags`

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of tensor `number`; send full buckets. To be called with gradients off."""
        with self._lock:
            b = self._plan.bucket_of.get(number)
            if b is None or number in self._placed or gradient.is_sparse:
                before = self._late.get(number)
                self._late[number] = gradient if before is None else torch.add(*dense_first(before, gradient))
                return
            self._placed.add(number)
            filling = self._bucket(b)
            piece = filling.pieces[number]
            if not self._scale_known:
                piece.copy_(gradient)
                filling.unscaled.append(piece)
            elif self._scale is None:
                piece.zero_()
            else:
                torch.mul(gradient, self._scale * self._hook_factor, out=piece)
            filling.missing.discard(number)
            if self._early and not filling.missing and (self._scale_known or self._steps.work.is_completed()):
                self._send_full()

    def _add_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add each tensor's gradient, as `add` does, with few operations; send nothing yet."""
        given = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}
        for b, bucket in enumerate(self._plan.buckets):
            placed = self._placed
            numbers = [n for n in bucket.numbers if n in given and n not in placed and not given[n].is_sparse]
            if len(numbers) == len(bucket.numbers) and bucket.is_plain:
                # Without the views, which are made while this bucket is being summed.
                tail = torch.empty(self._num_flags(b), dtype=bucket.dtype, device=bucket.device)
                flat = torch_private.flattened([*map(given.pop, numbers), tail])
                self._filling[b] = _FillingBucket(bucket, flat, set(), [flat])
                placed.update(numbers)
            elif numbers:
                filling = self._bucket(b)
                pieces = [filling.pieces[number] for number in numbers]
                torch_private.copy_all_in_place(pieces, [*map(given.pop, numbers)])
                filling.unscaled += pieces
                filling.missing.difference_update(numbers)
                placed.update(numbers)
        for number, gradient in given.items():
            self.add(number, gradient)

    def finish(
        self, rest: Sequence[torch.Tensor | None], meanwhile: Callable[[], Callable[[], None]]
    ) -> list[torch.Tensor | None]:
        """Add the rest of the gradients; wait for the other ranks; return each gradient, None if no rank has one.

        `meanwhile` is called when everything is sent, and what it returns when the sums are known.
        """
        with self._lock, torch.no_grad():
            self._add_all(rest)
            self._flags = flags = self._own_flags()
            wait_for_flags = self._communicator.all_reduce(flags, DOING) if self._flagged < 0 else None
            for b in range(len(self._in_flight), len(self._plan.buckets)):
                filling = self._bucket(b)
                for number in filling.missing:
                    filling.pieces[number].zero_()
                filling.missing.clear()
            self._send_full()
            wait_for_more = meanwhile()
            views = [filling.pieces for filling, _ in self._in_flight]
            sums = [(filling, wait()) for filling, wait in self._in_flight]
            flags = wait_for_flags() if wait_for_flags else sums[-1][1][-flags.numel() :].view_as(flags)
            placed, late, sparse = flags.tolist()
            self.sparse = [number for number, flag in enumerate(sparse) if flag]
            found: list[torch.Tensor | None] = [None] * len(self._tensors)
            for (filling, flat), pieces in zip(sums, views, strict=True):
                pieces = pieces if flat is filling.flat else filling.bucket.pieces(flat)
                for number, piece in pieces.items():
                    if placed[number]:
                        found[number] = piece
            unplaced = [number for number, flag in enumerate(late) if flag]
            for sum_of, numbers in ((self._sum_of_late, unplaced), (self._sum_of_sparse, self.sparse)):
                for number in numbers:
                    before, total = found[number], sum_of(number)
                    found[number] = total if before is None else before + total
            wait_for_more()
            return found

    # ---- steps -----------------------------------------------------------------------------------

    def _bucket(self, b: int) -> _FillingBucket:
        if b not in self._filling:
            bucket = self._plan.buckets[b]
            length = bucket.num_entries + self._num_flags(b)
            flat = torch.empty(length, dtype=bucket.dtype, device=bucket.device)
            self._filling[b] = _FillingBucket(bucket, flat, set(bucket.numbers))
        return self._filling[b]

    def _num_flags(self, b: int) -> int:
        return 3 * len(self._tensors) if b == self._flagged else 0

    def _wait_for_scale(self) -> float | None:
        """Return the factor for this rank's gradients; wait for the other ranks' weights."""
        if not self._scale_known:
            self._scale = self._steps.scale()
            self._scale_known = True
        return self._scale

    def _send_full(self) -> None:
        """Send the full buckets whose turn it is; one with flags when these are known."""
        while (b := len(self._in_flight)) in self._filling and not self._filling[b].missing:
            if b == self._flagged and self._flags is None:
                return
            scale = self._wait_for_scale()
            filling = self._filling.pop(b)
            is_unscaled = len(filling.unscaled) == len(filling.bucket.numbers)
            for part in [filling.flat] if is_unscaled else filling.unscaled:
                if scale is None:
                    part.zero_()
                else:
                    part.mul_(scale * self._hook_factor)
            if b == self._flagged and self._flags is not None:
                filling.flat[filling.bucket.num_entries :] = self._flags.flatten()
            for number, piece in filling.pieces.items() if self._local_grads else ():
                local = self._local_grads.get(number)
                if local is not None and not local.is_sparse:
                    piece.add_(local, alpha=self._hook_factor / self._communicator.world_size)
            self._in_flight.append((filling, self._send(filling, b)))

    def _send(self, filling: _FillingBucket, index: int) -> Callable[[], torch.Tensor]:
        """Send a bucket; return the function that waits for its sum."""
        communicator, group, flat = self._communicator, self._group, filling.flat
        if self._hook is None:
            return communicator.all_reduce(flat, DOING, group)
        state, call = self._hook
        is_last = index == len(self._plan.buckets) - 1
        future = call(state, GradBucket(filling.bucket, flat, index, is_last, self._tensors))
        if not all(hasattr(future, name) for name in ("done", "wait")):
            got = type(future).__name__
            raise TypeError(f"the communication hook returned a {got}: expected a torch.futures.Future of a tensor")
        return lambda: _of_size(communicator.wait_for_future(future, DOING), flat)

    def _own_flags(self) -> torch.Tensor:
        """Return flags for what this rank has for each tensor; scale the late gradients."""
        scale = self._wait_for_scale()
        scaled = {} if scale is None else {number: part * scale for number, part in self._late.items()}
        placed: set[int] = set()
        for number, local in self._local_grads.items():
            if number in self._plan.bucket_of and not local.is_sparse:
                placed.add(number)  # `_send_full` adds it there; the rest of this gradient may be late
            else:
                part = local / self._communicator.world_size
                scaled[number] = torch.add(*dense_first(scaled[number], part)) if number in scaled else part
        self._late = scaled
        if scale is not None:
            placed |= self._placed
        flags = torch.zeros(3, len(self._tensors), dtype=torch.int32, device="cpu")
        if len(placed) == len(self._plan.bucket_of):
            flags[_PLACED] = 1  # also of tensors that have no place, where nothing reads it
        else:
            flags[_PLACED, list(placed)] = 1
        for number, part in scaled.items():
            flags[_SPARSE if part.is_sparse else _LATE, number] = 1
        return flags

    def _sum_of_late(self, number: int) -> torch.Tensor:
        """Sum dense gradients that arrived after their bucket was sent, or have no place in one."""
        tensor, part = self._tensors[number].detach(), self._late.get(number)
        total = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if part is not None and not part.is_sparse:
            total.copy_(part)
        return self._communicator.all_reduce(total, DOING, self._group)()

    def _sum_of_sparse(self, number: int) -> torch.Tensor:
        """Sum sparse gradients: every rank all-gathers the entries, and adds up those with equal indices."""
        tensor, part = self._tensors[number].detach(), self._late.get(number)
        if part is None or not part.is_sparse:  # no entries
            indices = torch.empty(1, 0, dtype=torch.int64, device=tensor.device)
            part = torch.sparse_coo_tensor(indices, tensor.new_empty(0, *tensor.shape[1:]), tensor.shape)
        return self._communicator.all_reduce_sparse(part.coalesce(), self._group, DOING)


def _of_size(result: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    if result.numel() != flat.numel():
        raise ValueError(
            f"the communication hook returned {result.numel()} entries for a bucket of {flat.numel()}: expected the "
            "mean over the processes of bucket.buffer()"
        )
    return result.view_as(flat)
