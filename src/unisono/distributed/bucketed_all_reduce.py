"""The all-reduce of the gradients of one backward, in buckets that are sent while backward still runs.

    gradients of a bucket, from its autograd node ──► (1) scaled, flat ──► (2) sent as soon as it is their turn
                                                                                      │
    gradients of the one loss over all rows   ◄── (3) late gradients ◄────────────────┘

    (1) The replicas' nodes have the plan that `plan_for_ranks` makes, so a bucket comes as a whole. A parameter without
        a gradient on this rank counts as zeros. Gradients are scaled by their rank's share of all weights, so they wait
        until these are known.
    (2) A bucket is sent when it is complete and the buckets before it are sent. So all ranks send buckets in the same
        order, whatever the order in which gradients arrive. What is not complete is sent when backward has ended.
    (3) Some gradients have no place, because they are sparse, or arrive after another one of their parameter (reentrant
        checkpoints give a parameter's gradient in several parts). They are summed one by one at the end. Flags say
        which they are, and which parameters have a gradient on any rank at all. They are summed too: at the end of the
        last bucket, or by themselves where a hook or an accelerator has that bucket.

A small model's reduction is one message: its only bucket brings the weights as well. So gradients are multiplied by
this rank's weight, and divided by the sum of the weights after. Such messages have one size, so that ranks that reduce
different models find out.

Every rank ends with the same bits, in memory that its buckets share with nothing else. A step makes no calls in Python
for each parameter, except where a gradient is missing or has no place.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from unisono.distributed.consistency import SLOT_BYTES, SLOT_WORDS, RankSteps
from unisono.distributed.process_group import AllReduceWork, Communicator
from unisono.runtime.buckets import BUCKET_BYTES, Bucket, BucketPlan, Form, added, buckets_of
from unisono.runtime.devices import has_streams
from unisono.runtime.streams import current_stream, wait_for_makers
from unisono.runtime.torch_private import foreach

CommHook: TypeAlias = Callable[[Any, Any], Any]

FIRST_BUCKET_BYTES = 1 << 20  # small, so that it is sent early; as in torch's DistributedDataParallel
ONE_MESSAGE_BYTES = 1 << 16  # of a model's gradients and flags, if they are all in one message
DOING = "summing gradients over the processes"
_NUM_FLAGS = 3  # of each parameter: whether its gradient is placed, late, sparse


def plan_for_ranks(parameters: Sequence[torch.Tensor], without: Callable[[torch.Tensor], bool]) -> BucketPlan:
    """Plan the buckets of `parameters`, the last one first: backward computes its gradient first.

    The first bucket is small, so that it is sent early.

    Args:
        without: whether a parameter gets no place.
    """
    rest = {
        number: Form.of(parameter.detach())
        for number, parameter in reversed(list(enumerate(parameters)))
        if parameter.numel() and not without(parameter)
    }
    first: dict[int, Form] = {}
    num_bytes = 0
    while rest and num_bytes < FIRST_BUCKET_BYTES:
        number = next(iter(rest))
        first[number] = rest.pop(number)
        num_bytes += first[number].num_bytes
    return BucketPlan.of(parameters, (*buckets_of(first), *buckets_of(rest, BUCKET_BYTES)))


@dataclass(frozen=True, eq=False)
class Structure:
    """What the reductions of one list of parameters look up, found once.

    Args:
        tensors: the parameters that need gradients.
        plan, digest: their buckets; equal on ranks with equal plans.
        group, on_host: the process group of the gradients; whether the host waits for its work.
        hook: a communication hook and its state, or None.
        accumulates: whether there has been a backward in no_sync(), on all ranks.
        rank, world_size: of this process.
    """

    tensors: Sequence[torch.Tensor]
    plan: BucketPlan
    digest: int
    group: Any
    on_host: bool
    hook: tuple[Any, CommHook] | None
    accumulates: bool
    rank: int
    world_size: int

    @cached_property
    def has_streams(self) -> bool:
        """Whether gradients are computed on streams."""
        return has_streams(self.tensors[0].device)

    @cached_property
    def numbers(self) -> set[int]:
        """The numbers of all buckets."""
        return {*range(len(self.plan.buckets))}

    @cached_property
    def flagged(self) -> int:
        """The bucket with the flags at its end; -1: none. Hooks may not keep them; an accelerator is not waited for."""
        return len(self.plan.buckets) - 1 if self.hook is None and self.on_host else -1

    @cached_property
    def flags(self) -> slice:
        """Where the flags are in the sum that has them."""
        start = self.plan.buckets[-1].num_entries if self.flagged >= 0 else 0
        return slice(start, start + _NUM_FLAGS * len(self.tensors))

    @cached_property
    def usual_flags(self) -> list[int]:
        """The flags of a rank that has one gradient for each place, and no others."""
        return [1] * len(self.tensors) + [0] * (_NUM_FLAGS - 1) * len(self.tensors)

    @cached_property
    def usual_sum(self) -> torch.Tensor:
        """The sum of the flags if they are so on all ranks."""
        dtype, device = torch.int32, torch.device("cpu")
        if self.flagged >= 0:
            dtype, device = self.plan.buckets[-1].dtype, self.plan.buckets[-1].device
        return torch.tensor(self.usual_flags, dtype=dtype, device=device) * self.world_size

    @cached_property
    def in_one_message(self) -> bool:
        """Whether a reduction is one message: a small one, for which the host waits.

        What no_sync() has left in `grad` is multiplied by what is not known before: then it is not.
        """
        if self.flagged or self.accumulates:
            return False
        dtype = self.plan.buckets[0].dtype
        return dtype in (torch.float32, torch.float64) and self.flags.stop * dtype.itemsize <= ONE_MESSAGE_BYTES

    @cached_property
    def slots(self) -> tuple[int, int]:
        """Where the ranks' slots begin in the one message; the entries of each."""
        itemsize = self.plan.buckets[0].dtype.itemsize
        return ONE_MESSAGE_BYTES // itemsize, SLOT_BYTES // itemsize

    @cached_property
    def tail(self) -> list[torch.Tensor]:
        """What is behind the gradients of the flagged bucket: the usual flags, and zeros before and after a slot."""
        bucket = self.plan.buckets[-1]
        flags = torch.tensor(self.usual_flags, dtype=bucket.dtype, device=bucket.device)
        if not self.in_one_message:
            return [flags]
        start, size = self.slots
        before = start + self.rank * size - self.flags.stop
        after = (self.world_size - self.rank) * size - SLOT_WORDS
        return [flags, flags.new_zeros(before), flags.new_zeros(after)]


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


class BucketedAllReduce:
    """See the module's docstring. `add` may be called from several threads.

    All else is called with gradients off.

    Args:
        communicator: the ranks.
        structure: what is known about the parameters.
        steps: what all ranks do; has this rank's scale.
        local_grads: by number, gradients to add to this rank's part of the mean over the ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        structure: Structure,
        steps: RankSteps,
        local_grads: Mapping[int, torch.Tensor],
    ) -> None:
        self._communicator, self._structure, self._steps = communicator, structure, steps
        self._plan, self._tensors, self._local_grads = structure.plan, structure.tensors, local_grads
        self._lock = threading.RLock()
        # By bucket, its gradients until it is sent: some may be missing; or one flat tensor of all of them.
        self._waiting: dict[int, list[torch.Tensor | None] | torch.Tensor] = {}
        self._complete: set[int] = set()
        # The buckets that are sent, and what waits for the sum of each.
        self._sent: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        self._next = 0  # the bucket that is sent next
        self._streams: list[torch.Stream] = []  # on which gradients have been added
        self._late: dict[int, torch.Tensor] = {}  # gradients that are late, sparse, or without a place
        self.sparse: list[int] = []  # parameters with sparse gradients on some rank, known at the end
        # A hook returns the mean over the ranks, where the sum is wanted: so it gets gradients this much larger.
        self._hook_factor = 1 if structure.hook is None else structure.world_size
        self._flags_work: AllReduceWork | None = None  # where no bucket has them

    def add(self, b: int, gradients: Sequence[torch.Tensor | None] | torch.Tensor) -> None:
        """Add gradients of bucket `b`; send complete buckets.

        Args:
            gradients: one a parameter, or all in one flat tensor that nothing else refers to.
        """
        with self._lock:
            if self._structure.has_streams:
                stream = current_stream(self._tensors[0].device)
                if stream is not None and stream not in self._streams:
                    self._streams.append(stream)
            self._take(b, gradients)
            del gradients
            if self._next != self._structure.flagged:
                self._send_complete()

    def settle(self) -> None:
        """Send the buckets that are complete now, once it is known how they are scaled."""
        with self._lock, torch.no_grad():
            if self._next < len(self._plan.buckets) and not self._structure.in_one_message:
                self._steps.scale()
                self._send_complete()

    def send(self, rest: Sequence[torch.Tensor | None]) -> None:
        """Add the rest of the gradients; send everything."""
        with self._lock:
            if [gradient for gradient in rest if gradient is not None]:
                for b, numbers in enumerate(self._plan.numbers):
                    self._take(b, [*map(rest.__getitem__, numbers)])
            if self._structure.flagged < 0:
                flags = torch.tensor(self._own_flags(), dtype=torch.int32, device="cpu")
                self._steps.scale()  # only ranks that do the same may send them
                self._flags_work = self._communicator.all_reduce(flags, DOING)
            for _ in range(self._next, len(self._plan.buckets)):
                self._send_next()

    def wait(self, meanwhile: Callable[[], Callable[[], None]] | None = None) -> list[torch.Tensor | None]:
        """Wait for the other ranks; return each gradient, None if no rank has one.

        Args:
            meanwhile: called when all ranks are known to do the same; what it returns, when the sums are known.
        """
        structure, buckets = self._structure, self._plan.buckets
        pieces = [[*bucket.views(flat)] for bucket, (flat, _) in zip(buckets, self._sent, strict=True)]
        sums: list[torch.Tensor] = []
        if structure.in_one_message:
            sums += [self._steps.read(self._sent[0][1], structure.slots)]
            sums[0][: buckets[0].num_entries].div_(self._steps.total_weight())
        if meanwhile is not None and self._streams:
            wait_for_makers(self._streams, ())  # an activation checkpoint may have written into buffers there
        wait_for_more = None if meanwhile is None else meanwhile()
        sums = sums or [wait() for _, wait in self._sent]
        if structure.hook is not None:
            pieces = [[*bucket.views(flat)] for bucket, flat in zip(buckets, sums, strict=True)]
        by_place = [*chain.from_iterable(pieces), None]
        found = [*map(by_place.__getitem__, self._plan.places)]
        flags = (sums[-1] if self._flags_work is None else self._flags_work.wait())[structure.flags]
        if not torch.equal(flags, structure.usual_sum):
            self._add_unusual(found, flags.tolist())
        if wait_for_more is not None:
            wait_for_more()
        return found

    # ---- steps -----------------------------------------------------------------------------------

    def _take(self, b: int, gradients: Sequence[torch.Tensor | None] | torch.Tensor) -> None:
        """Keep gradients of a bucket until it is sent; those that have no place in it, for the end."""
        has_room = self._next <= b < len(self._plan.buckets)
        is_new = has_room and b not in self._waiting
        if isinstance(gradients, torch.Tensor):
            if is_new:
                self._waiting[b] = gradients
                self._complete.add(b)
                return
            gradients = [*self._plan.buckets[b].views(gradients)]
        elif is_new and _are_dense(gradients):
            self._waiting[b] = [*gradients]
            self._complete.add(b)
            return
        waiting = self._waiting.setdefault(b, [None] * len(gradients)) if has_room else None
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if isinstance(waiting, list) and waiting[place] is None and not gradient.is_sparse:
                waiting[place] = gradient
            else:
                number = self._plan.numbers[b][place]
                self._late[number] = added(self._late.get(number), gradient)
        if isinstance(waiting, list) and not [None for gradient in waiting if gradient is None]:
            self._complete.add(b)

    def _send_complete(self) -> None:
        """Send the complete buckets whose turn it is, except one that has the flags."""
        while self._next in self._complete and self._next != self._structure.flagged:
            if not self._steps.is_known():
                return
            self._send_next()

    def _send_next(self) -> None:
        """Send the next bucket, whatever it has."""
        b, structure = self._next, self._structure
        bucket, flat = self._plan.buckets[b], self._flat(b)
        for number, piece in bucket.pieces(flat).items() if self._local_grads else ():
            local = self._local_grads.get(number)
            if local is not None and not local.is_sparse:
                piece.add_(local, alpha=self._hook_factor / structure.world_size)
        self._next += 1
        self._sent.append((flat, self._start(bucket, flat, b)))

    def _flat(self, b: int) -> torch.Tensor:
        """Return a bucket's gradients, scaled, and what it has behind them; may wait for the weights."""
        # A rank whose factor is 0 must not read its gradients.
        in_one_message = self._structure.in_one_message
        factor = self._steps.own_weight if in_one_message else self._steps.scale() * self._hook_factor
        tail = self._tail() if b == self._structure.flagged else []
        bucket, waiting = self._plan.buckets[b], self._waiting.pop(b, None)
        of_kind: Any = {"dtype": bucket.dtype, "device": bucket.device}
        if self._streams and waiting is not None:  # what waits for its turn may be sent from another thread
            wait_for_makers(self._streams, [waiting] if isinstance(waiting, torch.Tensor) else waiting)
        if waiting is None or not factor:
            waiting = torch.zeros(bucket.num_entries, **of_kind)
        elif isinstance(waiting, list) and not bucket.is_plain:
            flat, has = torch.zeros(bucket.num_entries, **of_kind), [gradient is not None for gradient in waiting]
            sources: list[Any] = [*compress(waiting, has)]
            foreach.copy_all_in_place([*compress(bucket.views(flat), has)], sources)
            waiting = flat
        if isinstance(waiting, torch.Tensor):
            flat = torch.cat([waiting, *tail]) if tail else waiting
        else:
            gradients: list[Any] = waiting
            if b not in self._complete:
                forms = zip(waiting, bucket.items, strict=True)
                gradients = [torch.zeros(form.size, **of_kind) if g is None else g for g, (_, form) in forms]
            # A tensor more than the gradients: of a single one, the flat tensor would be a view.
            flat = foreach.flattened([*gradients, *(tail or [torch.empty(0, **of_kind)])])
        flat[: bucket.num_entries].mul_(factor)
        return flat

    def _tail(self) -> list[torch.Tensor]:
        """Return what is behind the gradients of the flagged bucket."""
        flags, *zeros = self._structure.tail
        if self._late or self._local_grads or not self._steps.own_weight or self._complete != self._structure.numbers:
            flags = flags.new_tensor(self._own_flags())
        if not zeros:
            return [flags]
        return [flags, zeros[0], flags.new_tensor(self._steps.words()), zeros[1]]

    def _start(self, bucket: Bucket, flat: torch.Tensor, index: int) -> Callable[[], torch.Tensor]:
        """Start to sum a bucket; return the function that waits for its sum."""
        communicator, structure = self._communicator, self._structure
        if structure.hook is None:
            return communicator.all_reduce(flat, DOING, structure.group, self._steps.comparison).wait
        state, call = structure.hook
        is_last = index == len(self._plan.buckets) - 1
        future = call(state, GradBucket(bucket, flat, index, is_last, self._tensors))
        if not all(hasattr(future, name) for name in ("done", "wait")):
            got = type(future).__name__
            raise TypeError(f"the communication hook returned a {got}: expected a torch.futures.Future of a tensor")
        return lambda: communicator.wait_for_future(future, DOING).view_as(flat)

    def _own_flags(self) -> list[int]:
        """Return flags for what this rank has for each parameter: placed, late, sparse."""
        num = len(self._tensors)
        placed, late, sparse = [0] * num, [0] * num, [0] * num
        if not self._steps.own_weight:
            self._late.clear()
        else:
            placed = [1] * num  # also of parameters that have no place, where nothing reads it
            for n in self._missing():
                placed[n] = 0
        parts = [*self._late.items()]
        for number, local in self._local_grads.items():
            if self._plan.places[number] >= 0 and not local.is_sparse:
                placed[number] = 1  # `_send_next` adds it there; the rest of this gradient may be late
            else:
                parts.append((number, local))
        for number, part in sorted(parts, key=lambda item: not item[1].is_sparse):
            # Of a sparse and a dense part the sum is dense.
            sparse[number], late[number] = int(part.is_sparse), int(not part.is_sparse)
        return [*placed, *late, *sparse]

    def _missing(self) -> list[int]:
        """Return the numbers of the parameters whose place in a bucket is empty."""
        missing: list[int] = []
        for b, bucket in enumerate(self._plan.buckets):
            if b not in self._complete:
                waiting = self._waiting.get(b, [None] * len(bucket.numbers))
                missing += [n for n, gradient in zip(bucket.numbers, waiting, strict=True) if gradient is None]
        return missing

    def _add_unusual(self, found: list[torch.Tensor | None], flags: Sequence[float]) -> None:
        """Take away gradients that no rank has; add those that have no place."""
        num = len(found)
        placed, late, self.sparse = flags[:num], flags[num : 2 * num], [n for n in range(num) if flags[2 * num + n]]
        for number, flag in enumerate(placed):
            if not flag:
                found[number] = None
        unplaced = [number for number, flag in enumerate(late) if flag]
        for sum_of, numbers in ((self._sum_of_late, unplaced), (self._sum_of_sparse, self.sparse)):
            for number in numbers:
                found[number] = added(found[number], sum_of(number))

    def _late_part(self, number: int) -> torch.Tensor | None:
        """Return what this rank adds to the sum of a parameter's late gradients."""
        part, local = self._late.get(number), self._local_grads.get(number)
        if part is not None:
            wait_for_makers(self._streams, [part])
            part = part * self._steps.scale()
        if local is None or (self._plan.places[number] >= 0 and not local.is_sparse):
            return part
        local = local / self._structure.world_size
        return added(part, local)

    def _sum_of_late(self, number: int) -> torch.Tensor:
        """Sum dense gradients that arrived after others of their parameter, or have no place in a bucket."""
        tensor, part = self._tensors[number].detach(), self._late_part(number)
        total = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if part is not None and not part.is_sparse:
            total.copy_(part)
        return self._communicator.all_reduce(total, DOING, self._structure.group).wait()

    def _sum_of_sparse(self, number: int) -> torch.Tensor:
        """Sum sparse gradients: every rank all-gathers the entries, and adds up those with equal indices."""
        tensor, part = self._tensors[number].detach(), self._late_part(number)
        if part is None or not part.is_sparse:  # no entries
            indices = torch.empty(1, 0, dtype=torch.int64, device=tensor.device)
            values = tensor.new_empty(0, *tensor.shape[1:])
            part = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
        return self._communicator.all_reduce_sparse(part.coalesce(), self._structure.group, DOING)


_layout = attrgetter("layout")


def _are_dense(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether no gradient is missing, sparse or of a class of its own."""
    return {*map(type, gradients)} == {torch.Tensor} and {*map(_layout, gradients)} == {torch.strided}
