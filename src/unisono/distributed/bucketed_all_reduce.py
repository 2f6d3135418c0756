"""The all-reduce of the gradients of one backward, in buckets that are sent while backward still runs.

    gradients of a bucket, from its autograd node ──► (1) scaled, flat ──► (2) sent as soon as it is their turn
                                                                                      │
    gradients of the one loss over all rows   ◄── (3) late gradients ◄────────────────┘

    (1) The replicas' nodes have the plan that `plan_for_ranks` makes, so a bucket comes as a whole. A parameter without
        a gradient on this rank counts as zeros. Gradients are scaled by their rank's share of all weights, so they wait
        until these are known. They come with the first bucket, which is small: its gradients are multiplied by this
        rank's weight, and divided by the sum of the weights after. Where a hook or an accelerator has the buckets, the
        weights come before them.
    (2) A bucket is sent when it is complete and the buckets before it are sent. So all ranks send buckets in the same
        order, whatever the order in which gradients arrive. What is not complete is sent when backward has ended.
    (3) Some gradients have no place, because they are sparse, or arrive after another one of their parameter (reentrant
        checkpoints give a parameter's gradient in several parts). They are summed one by one at the end. Flags say
        which they are, and which parameters have a gradient on any rank at all. They are summed too: at the end of the
        last bucket, or by themselves where a hook or an accelerator has that bucket.

Every rank ends with the same bits, in memory that its buckets share with nothing else. A step makes no calls in Python
for each parameter, except where a gradient is missing or has no place.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from unisono.distributed.consistency import SLOT_BYTES
from unisono.distributed.process_group import AllReduceWork, Communicator
from unisono.runtime import torch_private
from unisono.runtime.buckets import BUCKET_BYTES, Bucket, BucketPlan, Form, added, buckets_of
from unisono.runtime.streams import current_stream, wait_for_makers

CommHook: TypeAlias = Callable[[Any, Any], Any]

FIRST_BUCKET_BYTES = 1 << 20  # small, so that it is sent early; as in torch's DistributedDataParallel
# Where the first bucket has slots, it has a size of its own, the same in every reduction, so that must be small.
FIRST_COMPARED_BYTES = 1 << 16
_FIRST_FULL_BYTES = 1 << 10  # if it cannot hold all gradients, it is sent with the first ones, for the weights' sake
DOING = "summing gradients over the processes"
_PLACED, _LATE, _SPARSE = range(3)
_NUM_FLAGS = 3  # of each parameter


def plan_for_ranks(
    parameters: Sequence[torch.Tensor], without: Callable[[torch.Tensor], bool], *, has_slots: bool
) -> BucketPlan:
    """Plan the buckets of `parameters`, the last one first: backward computes its gradient first.

    Args:
        without: whether a parameter gets no place.
    """
    forms = {
        number: Form.of(parameter.detach())
        for number, parameter in reversed(list(enumerate(parameters)))
        if parameter.numel() and not without(parameter)
    }
    buckets = _with_slots(forms, parameters[0].device, len(parameters)) if has_slots else _small_bucket_first(forms)
    return BucketPlan.of(parameters, buckets, has_slots=has_slots)


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
        return [*self._bucket.views(self._flat)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients it holds."""
        return [self._tensors[number] for number in self._bucket.numbers]


class _Sent(NamedTuple):
    """A bucket that is sent, and the function that waits for its sum."""

    bucket: Bucket
    flat: torch.Tensor
    wait: Callable[[], torch.Tensor]


class BucketedAllReduce:
    """See the module's docstring. `add` may be called from several threads.

    Args:
        communicator, group: the ranks, and the process group of these tensors.
        plan, tensors: the parameters, and their buckets.
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
        # By bucket, its gradients until it is sent: some may be missing; or one flat tensor of all of them.
        self._waiting: dict[int, list[torch.Tensor | None] | torch.Tensor] = {}
        self._complete = {b for b, bucket in enumerate(plan.buckets) if not bucket.numbers}
        self._sent: list[_Sent] = []
        self._streams: list[torch.Stream] = []  # on which gradients have been added
        self._late: dict[int, torch.Tensor] = {}  # gradients that are late, sparse, or without a place
        self.sparse: list[int] = []  # parameters with sparse gradients on some rank, known at the end
        # A hook returns the mean over the ranks, where the sum is wanted: so it gets gradients this much larger.
        self._hook_factor = communicator.world_size if hook is not None else 1
        # The bucket with the flags at its end. A hook may not keep them; an accelerator would have to be waited for.
        self._flagged = len(plan.buckets) - 1 if hook is None and communicator.waits_on_host(group) else -1
        self._flags: torch.Tensor | None = None  # known when all gradients are: see `_own_flags`
        self._flags_work: AllReduceWork | None = None  # where no bucket has them
        self._send_complete()

    def add(self, b: int, gradients: Sequence[torch.Tensor | None] | torch.Tensor) -> None:
        """Add gradients of bucket `b`; send complete buckets. To be called with gradients off.

        Args:
            gradients: one a parameter, or all in one flat tensor that nothing else refers to.
        """
        with self._lock:
            stream = current_stream(self._tensors[0].device)
            if stream is not None and stream not in self._streams:
                self._streams.append(stream)
            self._take(b, gradients)
            del gradients
            self._send_complete()

    def settle(self) -> None:
        """Send the buckets that are complete now, once it is known how they are scaled."""
        with self._lock, torch.no_grad():
            if len(self._sent) < len(self._plan.buckets) and (self._sent or not self._plan.has_slots):
                self._steps.scale()
                self._send_complete()

    def send(self, rest: Sequence[torch.Tensor | None]) -> None:
        """Add the rest of the gradients; send everything."""
        with self._lock, torch.no_grad():
            if [gradient for gradient in rest if gradient is not None]:
                for b, numbers in enumerate(self._plan.numbers):
                    self._take(b, [*map(rest.__getitem__, numbers)])
            self._flags = self._own_flags()
            if self._flagged < 0:
                self._steps.scale()  # only ranks that do the same may send them
                self._flags_work = self._communicator.all_reduce(self._flags, DOING)
            while len(self._sent) < len(self._plan.buckets):
                self._send_next()

    def wait(self, meanwhile: Callable[[], Callable[[], None]]) -> list[torch.Tensor | None]:
        """Wait for the other ranks; return each gradient, None if no rank has one.

        `meanwhile` is called first, and what it returns when the sums are known.
        """
        with self._lock, torch.no_grad():
            pieces = [[*bucket.views(flat)] for bucket, flat, _ in self._sent]
            wait_for_more = meanwhile()
            total_weight = self._steps.total_weight()
            sums = [sent.wait() for sent in self._sent]
            placed, late, sparse = self._all_flags(sums[-1] if self._flags_work is None else self._flags_work.wait())
            if self._plan.has_slots:
                sums[0][: self._plan.buckets[0].num_entries].div_(total_weight)
            if self._hook is not None:
                pieces = [[*sent.bucket.views(flat)] for sent, flat in zip(self._sent, sums, strict=True)]
            by_place = [*chain.from_iterable(pieces), None]
            found = [*map(by_place.__getitem__, self._plan.places)]
            if 0 in placed:
                found = [piece if flag else None for piece, flag in zip(found, placed, strict=True)]
            self.sparse = [number for number, flag in enumerate(sparse) if flag]
            unplaced = [number for number, flag in enumerate(late) if flag]
            for sum_of, numbers in ((self._sum_of_late, unplaced), (self._sum_of_sparse, self.sparse)):
                for number in numbers:
                    found[number] = added(found[number], sum_of(number))
            wait_for_more()
            return found

    # ---- steps -----------------------------------------------------------------------------------

    def _take(self, b: int, gradients: Sequence[torch.Tensor | None] | torch.Tensor) -> None:
        """Keep gradients of a bucket until it is sent; those that have no place in it, for the end."""
        waiting = self._waiting.get(b)
        has_room = waiting is None and len(self._sent) <= b < len(self._plan.buckets)
        if isinstance(gradients, torch.Tensor):
            if has_room:
                self._waiting[b] = gradients
                self._complete.add(b)
                return
            gradients = [*self._plan.buckets[b].views(gradients)]
        if has_room:
            waiting = self._waiting[b] = [None] * len(gradients)
            if {*map(_layout, [gradient for gradient in gradients if gradient is not None])} <= {torch.strided}:
                waiting[:], gradients = gradients, ()
        self._take_each(b, gradients, waiting)
        if isinstance(waiting, list) and not [None for gradient in waiting if gradient is None]:
            self._complete.add(b)

    def _take_each(self, b: int, gradients: Sequence[torch.Tensor | None], waiting: Any) -> None:
        """Put gradients of a bucket where none has come before; note the others as late."""
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if type(waiting) is list and waiting[place] is None and not gradient.is_sparse:
                waiting[place] = gradient
            else:
                number = self._plan.numbers[b][place]
                self._late[number] = added(self._late.get(number), gradient)

    def _send_complete(self) -> None:
        """Send the complete buckets whose turn it is, except one that has the flags."""
        while (b := len(self._sent)) in self._complete and b != self._flagged:
            if not self._has_slots(b) and not self._steps.is_known():
                return
            self._send_next()

    def _send_next(self) -> None:
        """Send the next bucket, whatever it has."""
        b = len(self._sent)
        bucket, flat = self._plan.buckets[b], self._flat(b)
        tail = flat[bucket.num_entries :]
        if self._has_slots(b):
            tail.zero_()
            self._steps.work.write(tail)
        if b == self._flagged and self._flags is not None:
            tail[: self._flags.numel()] = self._flags.flatten()
        for number, piece in bucket.pieces(flat).items() if self._local_grads else ():
            local = self._local_grads.get(number)
            if local is not None and not local.is_sparse:
                piece.add_(local, alpha=self._hook_factor / self._communicator.world_size)
        self._sent.append(_Sent(bucket, flat, self._start(bucket, flat, b)))

    def _flat(self, b: int) -> torch.Tensor:
        """Return a bucket's gradients, scaled, and room for what it has behind them; may wait for the weights."""
        # A rank whose factor is 0 must not read its gradients.
        factor = self._steps.own_weight if self._has_slots(b) else self._steps.scale() * self._hook_factor
        bucket, gradients = self._plan.buckets[b], self._waiting.pop(b, None)
        num_entries, room = bucket.num_entries, self._room(b)
        of_kind: Any = {"dtype": bucket.dtype, "device": bucket.device}
        if gradients is None or not factor:
            return torch.zeros(num_entries + room, **of_kind)
        if self._streams:  # what waits for its turn may be sent from another thread
            wait_for_makers(self._streams, [gradients] if isinstance(gradients, torch.Tensor) else gradients)
        if isinstance(gradients, torch.Tensor):
            flat = torch.cat([gradients, gradients.new_empty(room)]) if room else gradients
        elif bucket.is_plain:
            missing = [place for place, gradient in enumerate(gradients) if gradient is None]
            for place in missing:
                gradients[place] = torch.zeros(bucket.items[place][1].size, **of_kind)
            flat = torch_private.flattened([*gradients, torch.empty(room, **of_kind)])  # type: ignore[list-item]
        else:
            flat = torch.zeros(num_entries + room, **of_kind)
            has = [gradient is not None for gradient in gradients]
            torch_private.copy_all_in_place([*compress(bucket.views(flat), has)], [*compress(gradients, has)])  # type: ignore[list-item]
        flat[:num_entries].mul_(float(factor))
        return flat

    def _room(self, b: int) -> int:
        """Return the entries of a bucket behind its gradients: for flags, or slots."""
        bucket = self._plan.buckets[b]
        if self._has_slots(b):
            num_bytes = FIRST_COMPARED_BYTES + SLOT_BYTES * self._communicator.world_size
            return num_bytes // bucket.dtype.itemsize - bucket.num_entries
        return _NUM_FLAGS * len(self._tensors) if b == self._flagged else 0

    def _has_slots(self, b: int) -> bool:
        return b == 0 and self._plan.has_slots

    def _all_flags(self, summed: torch.Tensor) -> list[list[int]]:
        """Return the flags of all ranks, from a sum in which they are, or from that of the last bucket."""
        start = self._plan.buckets[-1].num_entries if self._flagged >= 0 else 0
        flags = summed.flatten()[start : start + _NUM_FLAGS * len(self._tensors)]
        return flags.view(_NUM_FLAGS, len(self._tensors)).tolist()

    def _start(self, bucket: Bucket, flat: torch.Tensor, index: int) -> Callable[[], torch.Tensor]:
        """Start to sum a bucket; return the function that waits for its sum."""
        communicator, group = self._communicator, self._group
        if self._has_slots(index):
            work = communicator.all_reduce(flat, DOING, group, self._steps.work.number)
            self._steps.work.sent(work)
            return work.wait
        if self._hook is None:
            return communicator.all_reduce(flat, DOING, group).wait
        state, call = self._hook
        is_last = index == len(self._plan.buckets) - 1
        future = call(state, GradBucket(bucket, flat, index, is_last, self._tensors))
        if not all(hasattr(future, name) for name in ("done", "wait")):
            got = type(future).__name__
            raise TypeError(f"the communication hook returned a {got}: expected a torch.futures.Future of a tensor")
        return lambda: _of_size(communicator.wait_for_future(future, DOING), flat)

    def _own_flags(self) -> torch.Tensor:
        """Return flags for what this rank has for each parameter."""
        flags = torch.zeros(_NUM_FLAGS, len(self._tensors), dtype=torch.int32, device="cpu")
        if not self._steps.own_weight:
            self._late.clear()
        else:
            flags[_PLACED] = 1  # also of parameters that have no place, where nothing reads it
            flags[_PLACED, self._missing()] = 0
        parts = [*self._late.items()]
        for number, local in self._local_grads.items():
            if self._plan.places[number] >= 0 and not local.is_sparse:
                flags[_PLACED, number] = 1  # `_send_next` adds it there; the rest of this gradient may be late
            else:
                parts.append((number, local))
        for number, part in sorted(parts, key=lambda item: not item[1].is_sparse):
            # Of a sparse and a dense part the sum is dense.
            flags[_SPARSE, number], flags[_LATE, number] = part.is_sparse, not part.is_sparse
        return flags

    def _missing(self) -> list[int]:
        """Return the numbers of the parameters whose place in a bucket is empty."""
        missing: list[int] = []
        for b, bucket in enumerate(self._plan.buckets):
            if b not in self._complete:
                waiting = self._waiting.get(b, [None] * len(bucket.numbers))
                missing += [n for n, gradient in zip(bucket.numbers, waiting, strict=True) if gradient is None]
        return missing

    def _late_part(self, number: int) -> torch.Tensor | None:
        """Return what this rank adds to the sum of a parameter's late gradients."""
        part, local = self._late.get(number), self._local_grads.get(number)
        if part is not None:
            wait_for_makers(self._streams, [part])
            part = part * self._steps.scale()
        if local is None or (self._plan.places[number] >= 0 and not local.is_sparse):
            return part
        local = local / self._communicator.world_size
        return added(part, local)

    def _sum_of_late(self, number: int) -> torch.Tensor:
        """Sum dense gradients that arrived after others of their parameter, or have no place in a bucket."""
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
            values = tensor.new_empty(0, *tensor.shape[1:])
            part = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
        return self._communicator.all_reduce_sparse(part.coalesce(), self._group, DOING)


_layout = attrgetter("layout")


def _of_size(result: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    if result.numel() != flat.numel():
        raise ValueError(
            f"the communication hook returned {result.numel()} entries for a bucket of {flat.numel()}: "
            "expected the mean of bucket.buffer() over the processes"
        )
    return result.view_as(flat)
