"""The sums of the replicas' gradients in one backward, bucket by bucket, in an order that does not depend on time."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from unisono.runtime import devices as _devices
from unisono.runtime import timeline
from unisono.runtime.buckets import Bucket, BucketPlan, Gradients, added, all_added, is_plain
from unisono.runtime.streams import Copies, Made, current_streams_of, wait_for_makers
from unisono.runtime.torch_private import foreach, tensor_objects

# Called with a bucket's number and the sums of its gradients, which may be one flat tensor that nothing else refers to.
OnReady: TypeAlias = Callable[[int, Sequence[torch.Tensor | None] | torch.Tensor], None]


class Contribution(NamedTuple):
    """The gradients of one bucket of one replica."""

    replica: int
    bucket: int
    gradients: Sequence[torch.Tensor | None]
    streams: Sequence[torch.Stream]  # those on which they are computed

    @classmethod
    def of(cls, bucket: int, replica: int, gradients: Sequence[torch.Tensor | None]) -> "Contribution":
        """Return gradients that the calling thread computes."""
        return cls(replica, bucket, gradients, current_streams_of(gradients))

    def here(self) -> "Contribution":
        """Let the calling thread's streams wait for the gradients."""
        wait_for_makers(self.streams, self.gradients)
        return self


class BucketSums:
    """The sums of the replicas' gradients in one backward, bucket by bucket. Replicas add from several threads.

    Guarantees
        - The order of additions does not depend on which replica is faster: first every replica's first contribution,
          then every second one, and so on. So runs repeat bit for bit. (A bucket gets several contributions of a
          replica where backward is called inside backward, as reentrant activation checkpointing does.) On one device
          they are added in replica order. On several, along a chain from the last replica to the first: each device
          adds its own to what arrives, and sends the sum on. So each link carries a bucket once, whatever the number of
          devices (for second contributions once more), and what waits for its turn stays on its device.
        - A replica that contributes nothing delays the sum until backward ends, and no longer.
        - What a replica adds when a backward has failed without waiting for it (Ctrl-C, a timeout) is dropped.

    Args:
        plan: the parameters' buckets.
        devices: one a replica.
        is_flat: whether the gradients of a bucket are one flat tensor: where a replica has memory of its own.
        on_ready: called with the number of a bucket and the sums of one contribution from each replica, as soon as
            they are complete; `end` then returns only what is left. None: `end` returns everything.
    """

    def __init__(
        self,
        plan: BucketPlan,
        devices: Sequence[torch.device],
        *,
        is_flat: bool,
        on_ready: OnReady | None = None,
    ) -> None:
        self._plan, self._devices, self._on_ready = plan, devices, on_ready
        self._readers = [*plan.sources, *devices]
        self._copies = Copies(self._readers) if is_flat else None
        # The replicas whose turns follow each other; also the turn of each replica.
        self._order = range(len(devices)) if len({*devices}) == 1 else range(len(devices))[::-1]
        self._buckets = [_InTurn(len(devices)) for _ in plan.numbers]
        self._beside: list[Contribution] = []  # gradients that are in no flat tensor
        self._ending = self._has_failed = False

    def __enter__(self) -> "BucketSums":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._has_failed = True  # a replica that was not waited for may still come
            for turns in self._buckets:
                if turns.lock.acquire(timeout=_PATIENCE_S):
                    turns.lock.release()
        if self._copies is not None:
            self._copies.__exit__(kind, *error)

    def add(self, b: int, replica: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a replica's gradients of bucket `b`; then what waits for them. Frees them as soon as they are added."""
        if torch.is_grad_enabled():  # a backward inside this one has create_graph=True
            with torch.no_grad():
                self.add(b, replica, gradients)
            return
        with timeline.during(timeline.REDUCE) if timeline.recording else _NOTHING:
            turns = self._buckets[b]
            with turns.lock:
                if self._has_failed:
                    return
                turns.waiting[self._order[replica]].append(self._part(b, replica, gradients))
                del gradients
                while turns.waiting[turns.turn]:
                    self._add_next(b)

    def end(self) -> Gradients:
        """Add what still waits; return the sum of each parameter's gradients, which are there when the block ends.

        To be called with gradients off.
        """
        self._ending = True
        found: Gradients = [None] * self._plan.num_parameters
        for b, turns in enumerate(self._buckets):
            while any(turns.waiting):
                self._add_next(b)
            if self._copies is not None and turns.total is not None:
                turns.total = self._moved(self._plan.source[b], turns.total)
        for b, turns in enumerate(self._buckets):
            if turns.total is not None:
                if self._copies is not None and turns.total.flat is not None:
                    self._copies.record_stream(turns.total.flat, self._reader(b))
                for n, gradient in zip(self._plan.numbers[b], self._gradients(b, turns.total), strict=True):
                    found[n] = gradient
        if self._beside and self._copies is not None:
            self._copies.join()
        for each in sorted(self._beside, key=attrgetter("replica")):
            for n, gradient in zip(self._plan.numbers[each.bucket], each.here().gradients, strict=True):
                if gradient is not None:
                    found[n] = added(found[n], _devices.copied_to(gradient, self._plan.source_of[n]))
        return found

    def _add_next(self, b: int) -> None:
        turns = self._buckets[b]
        waiting = turns.waiting[turns.turn]
        turns.turn = (turns.turn + 1) % len(turns.waiting)
        if waiting:
            part = waiting.popleft()
            if self._copies is None:
                turns.total = part if turns.total is None else _sum(turns.total, part)
            else:
                turns.total = part if turns.total is None else self._next_total(turns.total, part)
                if turns.turn == 0:
                    turns.total = self._moved(self._plan.source[b], turns.total)
        if self._on_ready is not None and turns.turn == 0 and not self._ending and turns.total is not None:
            total, turns.total = turns.total, None
            if self._copies is None:
                self._on_ready(b, self._gradients(b, total))
            else:
                if total.flat is not None:
                    self._copies.record_stream(total.flat, self._reader(b))
                with self._copies.read(self._reader(b)):
                    is_whole = total.flat is not None and total.bucket is self._plan.forms[b]
                    self._on_ready(b, total.flat if is_whole else self._gradients(b, total))

    def _part(self, b: int, replica: int, gradients: Sequence[torch.Tensor | None]) -> Any:
        """Return a replica's gradients where they are summed: a list of them, or one flat tensor."""
        if self._copies is None:
            if len(gradients) > 1:
                return _Listed([*gradients], False)
            (gradient,) = gradients  # a view, perhaps; without its base it may have its memory to itself
            return _Listed([gradient if gradient is None else gradient.detach()], False)
        given = [gradient for gradient in gradients if gradient is not None]
        if self._plan.forms[b] is None or not _all_plain(given):
            beside = [g is not None and (self._plan.forms[b] is None or not is_plain(g)) for g in gradients]
            others = [gradient if is_beside else None for gradient, is_beside in zip(gradients, beside, strict=True)]
            self._beside.append(Contribution.of(b, replica, others))
            gradients = [None if is_beside else g for g, is_beside in zip(gradients, beside, strict=True)]
            given = [gradient for gradient in gradients if gradient is not None]
            if not given:
                return _Flat(None, None)
        bucket = self._plan.part(b, [gradient is not None for gradient in gradients])
        flat = bucket.flat(dict(zip(bucket.numbers, given, strict=True)))
        return _Flat(bucket, flat, self._copies.keep(flat))

    def _reader(self, b: int) -> int:
        return self._readers.index(self._plan.source[b])

    def _moved(self, device: torch.device, flat: "_Flat") -> "_Flat":
        """Return a flat tensor on a device, for the work that its copy stream gets next."""
        assert self._copies is not None
        if flat.flat is None:
            return flat
        reader = self._readers.index(device)
        if flat.flat.device == device:
            self._copies.wait_made(flat.made, reader)
            return flat
        return _Flat(flat.bucket, *self._copies.pass_on(flat.flat, flat.made, reader))

    def _next_total(self, total: "_Flat", part: "_Flat") -> "_Flat":
        """Return the sum of two parts, on the device of the second one."""
        if total.flat is None or part.flat is None:
            return part if total.flat is None else total
        assert self._copies is not None
        device, reader = part.flat.device, self._readers.index(part.flat.device)
        total, part = self._moved(device, total), self._moved(device, part)
        with self._copies.on_copy_stream(reader):
            found = _flat_sum(total, part)
        return found._replace(made=self._copies.last_of(reader))

    def _gradients(self, b: int, total: Any) -> Sequence[torch.Tensor | None]:
        if self._copies is None:
            gradients: Sequence[torch.Tensor | None] = total.gradients
            return gradients
        pieces: Mapping[int, torch.Tensor] = {} if total.bucket is None else total.bucket.pieces(total.flat)
        return [*map(pieces.get, self._plan.numbers[b])]


class _InTurn:
    """What the replicas have contributed to one bucket."""

    __slots__ = ("lock", "total", "turn", "waiting")

    def __init__(self, num_replicas: int) -> None:
        self.lock = threading.Lock()
        self.waiting: list[deque[Any]] = [deque() for _ in range(num_replicas)]
        self.turn = 0  # the replica whose contribution is added next
        self.total: Any = None


class _Listed(NamedTuple):
    """The gradients of a bucket; `is_own` says whether they are in memory that nothing else refers to."""

    gradients: list[torch.Tensor | None]
    is_own: bool


class _Flat(NamedTuple):
    """The gradients of some parameters of a bucket, in one flat tensor of its own."""

    bucket: Bucket | None
    flat: torch.Tensor | None
    made: Made | None = None  # when it is there; None: at once


def _sum(total: _Listed, part: _Listed) -> _Listed:
    """Return the sum of two parts in replica order, in place where possible."""
    mine, others = total.gradients, part.gradients
    if len(mine) == 1 and not total.is_own and _can_be_added(mine, others):
        for target, addend in ((mine, others), (others, mine)):
            if tensor_objects.is_only_reference(target):  # type: ignore[arg-type]
                foreach.add_all_in_place(target, addend)  # type: ignore[arg-type]
                return _Listed(target, True)
    # The first sum is in new memory: a gradient can be a view of what the caller gave to backward, or of another one.
    # (a.view(-1) + b.view(-1)).backward(g) leaves both gradients in the memory of g.
    both = [
        n
        for n, (one, other) in enumerate(zip(mine, others, strict=True))
        if one is not None and other is not None and not one.is_sparse and not other.is_sparse
    ]
    if len(both) == len(mine):
        if total.is_own:
            foreach.add_all_in_place(mine, others)  # type: ignore[arg-type]
            return total
        return _Listed([*foreach.add_all(mine, others)], True)  # type: ignore[arg-type]
    return _Listed(all_added(mine, others), False)


def _can_be_added(mine: Gradients, others: Gradients) -> bool:
    """Return whether two lists of one gradient each have dense ones of one type."""
    (one,), (other,) = mine, others
    return (
        one is not None
        and other is not None
        and one.layout == other.layout == torch.strided
        and one.dtype == other.dtype
    )


def _flat_sum(total: _Flat, part: _Flat) -> _Flat:
    """Return the sum of two parts on one device, in the memory of the second one if they have the same parameters."""
    assert total.bucket is not None
    assert part.bucket is not None
    assert total.flat is not None
    assert part.flat is not None
    if total.bucket is part.bucket:
        part.flat.add_(total.flat)
        return part
    forms = dict(chain(total.bucket.items, part.bucket.items))
    bucket = replace(total.bucket, items=tuple(forms.items()))
    flat = torch.zeros(bucket.num_entries, dtype=bucket.dtype, device=part.flat.device)
    pieces = bucket.pieces(flat)
    for of, values in ((total.bucket, total.flat), (part.bucket, part.flat)):
        for n, piece in of.pieces(values).items():
            pieces[n].add_(piece)
    return _Flat(bucket, flat)


def _all_plain(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all are plain tensors; without Python code for each in the usual case."""
    return {*map(type, gradients)} <= {torch.Tensor} and {*map(_layout, gradients)} <= {torch.strided}


_layout = attrgetter("layout")


_PATIENCE_S = 1.0  # for a replica that is adding while a backward fails
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
