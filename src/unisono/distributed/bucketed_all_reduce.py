"""The all-reduce of the gradients of one backward, in buckets that are sent while backward still runs.

    gradients, in any order ──► (1) their places in buckets ──► (2) scaled, and sent as soon as it is their turn
                                                                          │
    gradients of the one loss over all rows   ◄── (3) late gradients ◄────┘

    (1) `BucketPlan` gives each tensor a place in a bucket. A tensor without a gradient on this rank counts as zeros.
    (2) A bucket is sent when it is full, the buckets before it are sent, and the weights of all ranks are known. So all
        ranks send buckets in the same order, whatever the order in which gradients arrive. The weights come with the
        first bucket, whose gradients are multiplied by this rank's weight, and divided by the sum of the weights after;
        or before all buckets, where a hook or an accelerator has these.
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
from unisono.distributed.consistency import SLOT_BYTES, description_of
from unisono.distributed.process_group import Communicator, digest_of
from unisono.runtime import torch_private
from unisono.runtime.buckets import BUCKET_BYTES, Bucket, Form, buckets_of, dense_first

FIRST_BUCKET_BYTES = 1 << 20  # small, so that it is sent early; as in torch's DistributedDataParallel
FIRST_COMPARED_BYTES = 1 << 16  # of the first bucket where it has slots: in every reduction, so that it must be small
DOING = "summing gradients over the processes"
_PLACED, _LATE, _SPARSE = range(3)
_NUM_FLAGS = 3  # of each tensor


class BucketPlan(NamedTuple):
    """The buckets of the gradients of some tensors.

    Attributes:
        bucket_of: the place in `buckets` of the bucket of each tensor that has one, by the tensor's number.
        early: the tensors whose gradients should be added as soon as they are computed: all outside of the last bucket.
        digest: equal on ranks with equal plans.
        has_slots: whether the first bucket has slots, by which the ranks compare their steps.
    """

    buckets: tuple[Bucket, ...]
    bucket_of: Mapping[int, int]
    early: Set[int]
    digest: int
    has_slots: bool

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], without: Callable[[torch.Tensor], bool], *, has_slots: bool
    ) -> "BucketPlan":
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
        buckets = _with_slots(forms, tensors[0].device, len(tensors)) if has_slots else _small_bucket_first(forms)
        bucket_of = {number: b for b, bucket in enumerate(buckets) for number in bucket.numbers}
        early = bucket_of.keys() - set(buckets[-1].numbers if buckets else ())
        if sum(form.num_bytes for form in forms.values()) <= FIRST_BUCKET_BYTES:
            early = set()  # to send a part of so little early would take longer
        return cls(buckets, bucket_of, early, digest, has_slots)


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


def _with_slots(forms: Mapping[int, Form], device: torch.device, num_tensors: int) -> tuple[Bucket, ...]:
    """Return the buckets for tensors in the order given; the first one has `FIRST_COMPARED_BYTES`, and slots."""
    dtype = next((form.dtype for form in forms.values() if form.dtype in (torch.float32, torch.float64)), torch.float32)
    free = FIRST_COMPARED_BYTES
    first = []
    for number, form in forms.items():
        if form.dtype != dtype or form.num_bytes > free:
            break
        free -= form.num_bytes
        first.append((number, form))
    rest = buckets_of(dict([*forms.items()][len(first) :]))
    if not rest and free < _NUM_FLAGS * num_tensors * dtype.itemsize:
        rest = (Bucket(dtype, device, ()),)  # the last bucket has the flags
    return (Bucket(dtype, device, tuple(first)), *rest)


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
        local_grads: by number, gradients to add to this rank's part of the mean over the ranks; none if the plan has
            slots.
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
        self._scale: float | None = None  # for this rank's gradients, once it is known
        self.sparse: list[int] = []  # tensors with sparse gradients on some rank, known at the end
        # A hook returns the mean over the ranks, where the sum is wanted: so it gets gradients this much larger.
        self._hook_factor = communicator.world_size if hook is not None else 1
        # The bucket with the flags at its end. A hook may not keep them; an accelerator would have to be waited for.
        self._flagged = len(plan.buckets) - 1 if hook is None and communicator.waits_on_host(group) else -1
        self._flags: torch.Tensor | None = None  # known when all gradients are: see `_own_flags`
        if plan.has_slots and not plan.buckets[0].items and early:
            self._bucket(0)
            self._send_full(may_wait=False)

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
            piece, factor = filling.pieces[number], self._factor(b)
            if factor is None:
                piece.copy_(gradient)
                filling.unscaled.append(piece)
            elif factor:
                torch.mul(gradient, factor, out=piece)
            else:
                piece.zero_()
            filling.missing.discard(number)
            if self._early and not filling.missing:
                self._send_full(may_wait=False)

    def _add_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add each tensor's gradient, as `add` does, with few operations; send nothing yet."""
        given = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}
        for b, bucket in enumerate(self._plan.buckets):
            placed = self._placed
            numbers = [n for n in bucket.numbers if n in given and n not in placed and not given[n].is_sparse]
            if numbers and len(numbers) == len(bucket.numbers) and bucket.is_plain:
                # Without the views, which are made while this bucket is being summed.
                tail = torch.empty(self._length(b) - bucket.num_entries, dtype=bucket.dtype, device=bucket.device)
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
            wait_for_flags = None
            if self._flagged < 0:
                self._wait_for_scale()  # only ranks that do the same may send them
                wait_for_flags = self._communicator.all_reduce(flags, DOING).wait
            for b in range(len(self._in_flight), len(self._plan.buckets)):
                filling = self._bucket(b)
                for number in filling.missing:
                    filling.pieces[number].zero_()
                filling.missing.clear()
            self._send_full(may_wait=True)
            views = [filling.pieces for filling, _ in self._in_flight]
            wait_for_more = meanwhile()
            self._wait_for_scale()
            sums = [(filling, wait()) for filling, wait in self._in_flight]
            placed, late, sparse = self._all_flags(sums[-1][1] if wait_for_flags is None else wait_for_flags())
            if self._plan.has_slots:
                filling, flat = sums[0]
                flat[: filling.bucket.num_entries].div_(self._steps.total_weight())
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
            flat = torch.empty(self._length(b), dtype=bucket.dtype, device=bucket.device)
            self._filling[b] = _FillingBucket(bucket, flat, set(bucket.numbers))
        return self._filling[b]

    def _length(self, b: int) -> int:
        """Return the entries of a bucket: its tensors', perhaps flags; and those of the first one with slots."""
        bucket = self._plan.buckets[b]
        if self._has_slots(b):
            return (FIRST_COMPARED_BYTES + SLOT_BYTES * self._communicator.world_size) // bucket.dtype.itemsize
        return bucket.num_entries + (_NUM_FLAGS * len(self._tensors) if b == self._flagged else 0)

    def _has_slots(self, b: int) -> bool:
        return b == 0 and self._plan.has_slots

    def _factor(self, b: int) -> float | None:
        """Return the factor for this rank's gradients in a bucket: 0 if they must not be read; None if not known."""
        return self._steps.own_weight if self._has_slots(b) else self._scale

    def _wait_for_scale(self) -> float:
        """Return the factor for this rank's gradients; wait for the other ranks' weights."""
        if self._scale is None:
            self._scale = self._steps.scale() * self._hook_factor
        return self._scale

    def _send_full(self, *, may_wait: bool) -> None:
        """Send the full buckets whose turn it is; one with flags when these are known.

        Args:
            may_wait: whether to wait until the weights of all ranks are known.
        """
        while (b := len(self._in_flight)) in self._filling and not self._filling[b].missing:
            if b == self._flagged and self._flags is None:
                return
            if self._factor(b) is None:
                if not (may_wait or self._steps.work.is_completed()):
                    return
                self._wait_for_scale()
            filling, factor = self._filling.pop(b), self._factor(b)
            is_unscaled = len(filling.unscaled) == len(filling.bucket.numbers)
            for part in [filling.flat] if is_unscaled else filling.unscaled:
                if factor:
                    part.mul_(factor)
                else:
                    part.zero_()
            self._fill_tail(filling, b)
            for number, piece in filling.pieces.items() if self._local_grads else ():
                local = self._local_grads.get(number)
                if local is not None and not local.is_sparse:
                    piece.add_(local, alpha=self._hook_factor / self._communicator.world_size)
            self._in_flight.append((filling, self._send(filling, b)))

    def _fill_tail(self, filling: _FillingBucket, b: int) -> None:
        """Write what a bucket has behind its gradients."""
        tail = filling.flat[filling.bucket.num_entries :]
        if self._has_slots(b):
            tail.zero_()
            self._steps.work.write(tail)
        if b == self._flagged and self._flags is not None:
            tail[: self._flags.numel()] = self._flags.flatten()

    def _all_flags(self, summed: torch.Tensor) -> list[list[int]]:
        """Return the flags of all ranks, from a sum in which they are, or from that of the last bucket."""
        start = self._plan.buckets[-1].num_entries if self._flagged >= 0 else 0
        flags = summed.flatten()[start : start + _NUM_FLAGS * len(self._tensors)]
        return flags.view(_NUM_FLAGS, len(self._tensors)).tolist()

    def _send(self, filling: _FillingBucket, index: int) -> Callable[[], torch.Tensor]:
        """Send a bucket; return the function that waits for its sum."""
        communicator, group, flat = self._communicator, self._group, filling.flat
        if self._has_slots(index):
            work = communicator.all_reduce(flat, DOING, group, self._steps.work.number)
            self._steps.work.sent(work)
            return work.wait
        if self._hook is None:
            return communicator.all_reduce(flat, DOING, group).wait
        state, call = self._hook
        is_last = index == len(self._plan.buckets) - 1
        future = call(state, GradBucket(filling.bucket, flat, index, is_last, self._tensors))
        if not all(hasattr(future, name) for name in ("done", "wait")):
            got = type(future).__name__
            raise TypeError(f"the communication hook returned a {got}: expected a torch.futures.Future of a tensor")
        return lambda: _of_size(communicator.wait_for_future(future, DOING), flat)

    def _own_flags(self) -> torch.Tensor:
        """Return flags for what this rank has for each tensor."""
        if not self._steps.own_weight:
            self._placed.clear()
            self._late.clear()
        placed, parts = set(self._placed), [*self._late.items()]
        for number, local in self._local_grads.items():
            if number in self._plan.bucket_of and not local.is_sparse:
                placed.add(number)  # `_send_full` adds it there; the rest of this gradient may be late
            else:
                parts.append((number, local))
        flags = torch.zeros(_NUM_FLAGS, len(self._tensors), dtype=torch.int32, device="cpu")
        if len(placed) == len(self._plan.bucket_of):
            flags[_PLACED] = 1  # also of tensors that have no place, where nothing reads it
        else:
            flags[_PLACED, list(placed)] = 1
        for number, part in sorted(parts, key=lambda item: not item[1].is_sparse):
            # Of a sparse and a dense part the sum is dense.
            flags[_SPARSE, number], flags[_LATE, number] = part.is_sparse, not part.is_sparse
        return flags

    def _late_part(self, number: int) -> torch.Tensor | None:
        """Return what this rank adds to the sum of a tensor's late gradients."""
        part, local = self._late.get(number), self._local_grads.get(number)
        if part is not None:
            part = part * self._steps.scale()
        if local is None or (number in self._plan.bucket_of and not local.is_sparse):
            return part
        local = local / self._communicator.world_size
        return local if part is None else torch.add(*dense_first(part, local))

    def _sum_of_late(self, number: int) -> torch.Tensor:
        """Sum dense gradients that arrived after their bucket was sent, or have no place in one."""
        tensor, part = self._tensors[number].detach(), self._late_part(number)
        total = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if part is not None and not part.is_sparse:
            total.copy_(part)
        return self._communicator.all_reduce(total, DOING, self._group).wait()

    def _sum_of_sparse(self, number: int) -> torch.Tensor:
        """Sum sparse gradients: every rank all-gathers the entries, and adds up those with equal indices."""
        tensor, part = self._tensors[number].detach(), self._late_part(number)
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
