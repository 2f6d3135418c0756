"""The all-reduce of the gradients of one backward, in buckets that are sent while backward still runs.

    gradients, in any order ──► (1) scaled, into their places in buckets ──► (2) sent as soon as it is their turn
                                                                                  │
    gradients of the one loss over all rows   ◄── (3) late gradients ◄────────────┘

    (1) `BucketPlan` gives each tensor a place in a bucket. A tensor without a gradient on this rank counts as zeros. A
        gradient is scaled by its rank's share of all weights while it is copied, so it waits until these are known.
        They come with the first bucket, which is small: its gradients are multiplied by this rank's weight, and divided
        by the sum of the weights after. Where a hook or an accelerator has the buckets, the weights come before them.
    (2) A bucket is sent when it is full and the buckets before it are sent. So all ranks send buckets in the same
        order, whatever the order in which gradients arrive.
    (3) Some gradients have no place, because they are sparse, or arrive after another one of their tensor (reentrant
        checkpoints give a tensor's gradient in several parts). They are summed tensor by tensor at the end. Flags say
        which they are, and which tensors have a gradient on any rank at all. They are summed too: at the end of the
        last bucket, or by themselves where a hook or an accelerator has that bucket.

Every rank ends with the same bits, in memory that its buckets share with nothing else. A step makes no calls in Python
for each tensor, except where gradients arrive one by one, or have no place.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeAlias

import torch

from unisono.distributed.consistency import SLOT_BYTES, description_of
from unisono.distributed.process_group import AllReduceWork, Communicator, digest_of
from unisono.runtime import torch_private
from unisono.runtime.buckets import BUCKET_BYTES, LARGE_BYTES, Bucket, Form, buckets_of, dense_first

CommHook: TypeAlias = Callable[[Any, Any], Any]

FIRST_BUCKET_BYTES = 1 << 20  # small, so that it is sent early; as in torch's DistributedDataParallel
# Where the first bucket has slots, it has a size of its own, the same in every reduction, so that must be small.
FIRST_COMPARED_BYTES = 1 << 16
_FIRST_FULL_BYTES = 1 << 10  # if it cannot hold all gradients, it is sent with the first ones, for the weights' sake
DOING = "summing gradients over the processes"
_PLACED, _LATE, _SPARSE = range(3)
_NUM_FLAGS = 3  # of each tensor


class BucketPlan(NamedTuple):
    """The buckets of the gradients of some tensors.

    `early` are the tensors whose gradients should be added as soon as they are computed: all outside of the last
    bucket, so that it can be sent, and large ones, which are then freed early.
    """

    buckets: tuple[Bucket, ...]
    bucket_of: Mapping[int, int]  # the place in `buckets` of the bucket of each tensor that has one, by its number
    places: Sequence[int]  # of each tensor, its place among the tensors of all buckets; -1 if it has none
    early: Set[int]
    digest: int  # equal on ranks with equal plans
    has_slots: bool  # whether the first bucket has slots, by which the ranks compare their steps

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], without: Callable[[torch.Tensor], bool], *, has_slots: bool
    ) -> "BucketPlan":
        """Plan the buckets of the gradients of `tensors`, the last tensor first: backward computes it first.

        Args:
            without: whether a tensor gets no place.
        """
        forms = {
            number: Form.of(tensor.detach())
            for number, tensor in reversed(list(enumerate(tensors)))
            if tensor.numel() and not without(tensor)
        }
        digest = digest_of(repr([(*description_of(tensor), number in forms) for number, tensor in enumerate(tensors)]))
        buckets = _with_slots(forms, tensors[0].device, len(tensors)) if has_slots else _small_bucket_first(forms)
        bucket_of = {number: b for b, bucket in enumerate(buckets) for number in bucket.numbers}
        place_of = {number: place for place, number in enumerate(bucket_of)}
        places = [place_of.get(number, -1) for number, _ in enumerate(tensors)]
        early = {n for n, b in bucket_of.items() if b < len(buckets) - 1 or forms[n].num_bytes >= LARGE_BYTES}
        return cls(buckets, bucket_of, places, early, digest, has_slots)


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
    flag_bytes = _NUM_FLAGS * num_tensors * dtype.itemsize  # in the last bucket
    num_bytes = sum(form.num_bytes for form in forms.values())
    if num_bytes + flag_bytes <= FIRST_COMPARED_BYTES and all(form.dtype == dtype for form in forms.values()):
        return (Bucket(dtype, device, tuple(forms.items())),)
    first: list[tuple[int, Form]] = []
    num_bytes = 0
    for number, form in forms.items():
        num_bytes += form.num_bytes
        if form.dtype != dtype or num_bytes > FIRST_COMPARED_BYTES:
            break
        first.append((number, form))
        if num_bytes >= _FIRST_FULL_BYTES:
            break
    rest = _small_bucket_first(dict([*forms.items()][len(first) :]))
    return (Bucket(dtype, device, tuple(first)), *(rest or (Bucket(dtype, device, ()),)))


@dataclass
class _FillingBucket:
    """A bucket that is being filled."""

    bucket: Bucket
    flat: torch.Tensor
    missing: set[int]  # tensors without a gradient so far

    @functools.cached_property
    def pieces(self) -> dict[int, torch.Tensor]:
        """Views of `flat`, by the numbers of the tensors."""
        return self.bucket.pieces(self.flat)


class GradBucket:
    """A bucket for a communication hook, like `torch.distributed.GradBucket`, which Python cannot construct.

    Hooks written for torch's DistributedDataParallel, such as compression to bf16 or PowerSGD, work unchanged. They
    return the mean over the processes as the result, so a bucket is scaled before a hook gets it.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, index: int, is_last: bool, tensors: Sequence[Any]) -> None:
        self._bucket, self._flat, self._index, self._is_last = bucket, flat, index, is_last
        self._tensors = tensors

    def index(self) -> int:
        """Return the bucket's place in the order in which buckets are sent."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one of this backward."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return all its gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer."""
        self._flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return its gradients as views of the buffer."""
        return list(self._bucket.pieces(self._flat).values())

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it holds."""
        return [self._tensors[number] for number, _ in self._bucket.items]


class BucketedAllReduce:
    """See the module's docstring. `add` may be called from several threads.

    Args:
        communicator, group: the ranks, and the process group of these tensors.
        plan, tensors: the tensors, and the buckets of their gradients.
        hook: a communication hook and its state, or None.
        steps: what all ranks do; gives this rank's scale.
        local_grads: by number, gradients to add to this rank's part of the mean over the ranks; none if the plan has
            slots.
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
    ) -> None:
        self._communicator, self._group, self._plan, self._tensors = communicator, group, plan, tensors
        self._hook, self._steps, self._local_grads = hook, steps, local_grads
        self._lock = threading.RLock()
        self._filling: dict[int, _FillingBucket] = {}
        # Each bucket that is sent, with the function that waits for its sum.
        self._in_flight: list[tuple[_FillingBucket, Callable[[], torch.Tensor]]] = []
        self._placed: set[int] = set()
        self._waiting: dict[int, torch.Tensor] = {}  # gradients that have a place, and wait for the ranks' weights
        self._late: dict[int, torch.Tensor] = {}  # gradients that are late, sparse, or without a place
        self.sparse: list[int] = []  # tensors with sparse gradients on some rank, known at the end
        # A hook returns the mean over the ranks, where the sum is wanted: so it gets gradients this much larger.
        self._hook_factor = communicator.world_size if hook is not None else 1
        # The bucket with the flags at its end. A hook may not keep them; an accelerator would have to be waited for.
        self._flagged = len(plan.buckets) - 1 if hook is None and communicator.waits_on_host(group) else -1
        self._flags: torch.Tensor | None = None  # known when all gradients are: see `_own_flags`
        self._flags_work: AllReduceWork | None = None  # where no bucket has them
        if plan.has_slots and not plan.buckets[0].items:
            self._bucket(0)
            self._send_full()

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of tensor `number`; send full buckets. To be called with gradients off."""
        with self._lock:
            if number not in self._plan.bucket_of or number in self._placed or gradient.is_sparse:
                self._add_late(number, gradient)
                return
            self._placed.add(number)
            self._waiting[number] = gradient
            del gradient
            # One question for all that wait: of a rank that is early, that is all of its gradients.
            ready = [number] if self._has_slots(self._plan.bucket_of[number]) else []
            for waiting in list(self._waiting) if self._steps.is_known() else ready:
                self._place(self._plan.bucket_of[waiting], waiting, self._waiting.pop(waiting))
            self._send_full()

    def send(self, rest: Sequence[torch.Tensor | None]) -> None:
        """Add the rest of the gradients; send everything."""
        with self._lock, torch.no_grad():
            given = self._with_places(rest)
            self._flags = self._own_flags()
            if self._flagged < 0:
                self._steps.scale()  # only ranks that do the same may send them
                self._flags_work = self._communicator.all_reduce(self._flags, DOING)
            for b in range(len(self._in_flight), len(self._plan.buckets)):
                self._fill(b, given)
                self._send_full()

    def wait(self, meanwhile: Callable[[], Callable[[], None]]) -> list[torch.Tensor | None]:
        """Wait for the other ranks; return each gradient, None if no rank has one.

        `meanwhile` is called first, and what it returns when the sums are known.
        """
        with self._lock, torch.no_grad():
            pieces = [filling.pieces for filling, _ in self._in_flight]
            wait_for_more = meanwhile()
            total_weight = self._steps.total_weight()
            sums = [(filling, wait()) for filling, wait in self._in_flight]
            placed, late, sparse = self._all_flags(sums[-1][1] if self._flags_work is None else self._flags_work.wait())
            if self._plan.has_slots:
                filling, flat = sums[0]
                flat[: filling.bucket.num_entries].div_(total_weight)
            for b, (filling, flat) in enumerate(sums):
                if flat is not filling.flat:  # a hook's
                    pieces[b] = filling.bucket.pieces(flat)
            by_place = [*chain.from_iterable(map(dict.values, pieces)), None]
            found = [*map(by_place.__getitem__, self._plan.places)]
            if 0 in placed:
                found = [piece if flag else None for piece, flag in zip(found, placed, strict=True)]
            self.sparse = [number for number, flag in enumerate(sparse) if flag]
            unplaced = [number for number, flag in enumerate(late) if flag]
            for sum_of, numbers in ((self._sum_of_late, unplaced), (self._sum_of_sparse, self.sparse)):
                for number in numbers:
                    before, total = found[number], sum_of(number)
                    found[number] = total if before is None else before + total
            wait_for_more()
            return found

    # ---- steps -----------------------------------------------------------------------------------

    def _add_late(self, number: int, gradient: torch.Tensor) -> None:
        before = self._late.get(number)
        self._late[number] = gradient if before is None else torch.add(*dense_first(before, gradient))

    def _with_places(self, rest: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Return the gradients that have a place and are not in it yet; note the others as late."""
        given = {number: gradient for number, gradient in enumerate(rest) if gradient is not None}
        bucket_of, placed = self._plan.bucket_of, self._placed
        for number in [n for n, grad in given.items() if n in placed or n not in bucket_of or grad.is_sparse]:
            self._add_late(number, given.pop(number))
        placed.update(given)
        given.update(self._waiting)
        self._waiting.clear()
        return given

    def _fill(self, b: int, given: dict[int, torch.Tensor]) -> None:
        """Fill the rest of a bucket with gradients, which are taken out of `given`, and with zeros."""
        bucket, factor = self._plan.buckets[b], self._factor(b)
        if not factor:
            given = {}
        if b in self._filling or not bucket.is_plain:
            filling = self._bucket(b)
            for number in list(filling.missing):
                self._place(b, number, given.pop(number, None))
            return
        # In few operations, and without the views, which are made while this bucket is being summed.
        of_kind: Any = {"dtype": bucket.dtype, "device": bucket.device}
        parts: list[Any] = [*map(given.pop, bucket.numbers, repeat(None))]
        for place in [place for place, part in enumerate(parts) if part is None]:
            parts[place] = torch.zeros(bucket.items[place][1].size, **of_kind)
        parts.append(torch.empty(self._length(b) - bucket.num_entries, **of_kind))
        flat = torch_private.flattened(parts)
        flat[: bucket.num_entries].mul_(factor)
        self._filling[b] = _FillingBucket(bucket, flat, set())

    def _place(self, b: int, number: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into its place in a bucket, scaled; zeros if there is none, or if it must not be read."""
        filling, factor = self._bucket(b), self._factor(b)
        if gradient is None or not factor:
            filling.pieces[number].zero_()
        else:
            torch.mul(gradient, factor, out=filling.pieces[number])
        filling.missing.discard(number)

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

    def _factor(self, b: int) -> float:
        """Return the factor for this rank's gradients in a bucket, 0 if they must not be read; may wait for weights."""
        if self._has_slots(b):
            return float(self._steps.own_weight)
        return float(self._steps.scale() * self._hook_factor)

    def _send_full(self) -> None:
        """Send the full buckets whose turn it is; one with flags when these are known."""
        while (b := len(self._in_flight)) in self._filling and not self._filling[b].missing:
            if b == self._flagged and self._flags is None:
                return
            filling = self._filling.pop(b)
            tail = filling.flat[filling.bucket.num_entries :]  # what a bucket has behind its gradients
            if self._has_slots(b):
                tail.zero_()
                self._steps.work.write(tail)
            if b == self._flagged and self._flags is not None:
                tail[: self._flags.numel()] = self._flags.flatten()
            for number, piece in filling.pieces.items() if self._local_grads else ():
                local = self._local_grads.get(number)
                if local is not None and not local.is_sparse:
                    piece.add_(local, alpha=self._hook_factor / self._communicator.world_size)
            self._in_flight.append((filling, self._send(filling, b)))

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
