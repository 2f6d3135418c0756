"""Replicas on other devices: parameters are broadcast in coalesced buckets, and gradients reduced in them.

    forward    parameters ──► flat buckets ──► each device ──► leaves of the replicas there
    backward   gradients of a replica, in any order ──► flat bucket, when full ──► source ──► (1) ──► .grad
                                                                                               │
               gradients of the replicas on the source ────────────────────────────────────────┘

    "source": the device of the live module.
    (1) When a bucket has arrived from all replicas, it is summed in replica order; so runs repeat bit for bit.

Copies overlap with what the devices compute (`streams.py`), gradients while backward still runs. These tensors are
copied one by one, parameters at once and gradients at the end of backward: sparse tensors, tensors of a subclass,
second gradients of a leaf (backward inside backward, as in reentrant activation checkpointing), and the gradients in
buckets that never become full.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from unisono.autograd.reducer import Emit, PartialSums, Reducer, sum_in_place, sums_of
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import Bucket, Form, buckets_of, is_plain
from unisono.runtime.streams import Copies

_ALIGNED_BYTES = 16  # kernels that load several entries at once need this alignment


def _is_remote(replica: int, device: torch.device, source: torch.device, separate_memory: bool) -> bool:
    """Return whether a replica on `device` needs a copy of what is on `source`."""
    return not _devices.same_device(device, source) or (separate_memory and replica > 0)


class CoalescedBroadcast:
    """Copies tensors to those replicas that are not on the tensors' device, in flat buckets that are planned once.

    Args:
        tensors: by number.
        devices: one a replica.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor], devices: Sequence[torch.device]) -> None:
        self._num_replicas, separate_memory = len(devices), _devices.has_separate_memory()
        sources = {tensor.device for tensor in tensors.values()}
        self._remote = {
            source: [i for i, device in enumerate(devices) if _is_remote(i, device, source, separate_memory)]
            for source in sources
        }
        self._buckets: list[Bucket] = []
        self._others: list[int] = []
        self._tensors: dict[int, torch.Tensor] = {}
        if any(self._remote.values()):
            self._tensors = {number: tensor.detach() for number, tensor in tensors.items()}
            plain = {n: tensor for n, tensor in self._tensors.items() if is_plain(tensor) and tensor.numel()}
            forms = {n: Form.of(tensor) for n, tensor in plain.items()}
            self._buckets = [replace(bucket, aligned_bytes=_ALIGNED_BYTES) for bucket in buckets_of(forms)]
            self._others = [n for n in self._tensors if n not in forms]

    def __call__(self, copies: Copies) -> list[dict[int, torch.Tensor]]:
        """Return each replica's copies, by number; they may be in flight. `copies` has the replicas as readers."""
        found: list[dict[int, torch.Tensor]] = [{} for _ in range(self._num_replicas)]
        for bucket in self._buckets:
            flat = bucket.flat(self._tensors)  # of one tensor too: its own replica may write into it meanwhile
            for i in self._remote[flat.device]:
                # `data` makes each view a tensor of its own: a write into one would otherwise count as one into all.
                views = [view.data for view in bucket.views(copies.to(flat, i))]
                found[i].update(zip(bucket.numbers, views, strict=True))
        for number in self._others:
            for i in self._remote[self._tensors[number].device]:
                found[i][number] = copies.to(self._tensors[number], i)
        return found


class ReduceBuckets:
    """The buckets in which the gradients of some parameters are reduced, planned once.

    Attributes:
        separate_memory: as in `runtime.devices.has_separate_memory`.
        sources, source_of: the devices of the parameters, each once; and that of each parameter.
        bucket_of: each parameter's bucket; -1 for one that is copied by itself.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.separate_memory = _devices.has_separate_memory()
        self.sources = list(dict.fromkeys([parameter.device for parameter in parameters]))
        self.source_of = [parameter.device for parameter in parameters]
        # Backward computes the last parameters' gradients first.
        plain = [(k, p.detach()) for k, p in reversed(list(enumerate(parameters))) if is_plain(p)]
        self.buckets = buckets_of({k: Form.of(parameter) for k, parameter in plain})
        self.bucket_of = [-1] * len(parameters)
        for b, bucket in enumerate(self.buckets):
            for k in bucket.numbers:
                self.bucket_of[k] = b


class CoalescedReduce:
    """Copies the gradients of one backward to the source, and sums them. A context; parts may add from several threads.

    Args:
        plan: the parameters' buckets.
        devices: one a replica.
        emit: called with k and the sum of one gradient from each replica, as soon as it is complete, for every k in
            `emitted`; `end` then returns only what was not emitted.
    """

    def __init__(
        self,
        plan: ReduceBuckets,
        devices: Sequence[torch.device],
        emit: Emit | None = None,
        emitted: Collection[int] = (),
    ) -> None:
        self._plan, self._emit, self._emitted = plan, emit, emitted
        self._copies = Copies(plan.sources)
        self._reader = {source: reader for reader, source in enumerate(plan.sources)}
        self._streams = {device: _devices.has_streams(device) for device in (*devices, *plan.sources)}
        self._is_remote = [
            {source: _is_remote(i, device, source, plan.separate_memory) for source in plan.sources}
            for i, device in enumerate(devices)
        ]
        self._num_replicas = len(devices)
        self._lock = threading.Lock()
        # By bucket and replica: the gradients that were added, None once they are on their way.
        self._waiting: dict[tuple[int, int], dict[int, torch.Tensor] | None] = {}
        self._arrived: dict[int, dict[int, list[torch.Tensor | None]]] = {}  # by bucket, then by replica
        self._beside: dict[int, dict[int, list[torch.Tensor]]] = {}  # outside buckets, by parameter, then by replica
        self._totals: dict[int, torch.Tensor] = {}
        self._ending = False

    def of(self, replica: int) -> Reducer:
        """Return a replica's part."""
        return PartialSums(range(len(self._plan.bucket_of)), partial(self._take, replica))

    def __enter__(self) -> "CoalescedReduce":
        self._copies.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._copies.__exit__(*error)

    def _take(self, replica: int, k: int, gradient: torch.Tensor) -> bool:
        """Take a replica's gradient of parameter k; copy its bucket if that is full now."""
        b = self._plan.bucket_of[k]
        with self._lock:
            waiting = self._waiting.setdefault((b, replica), {}) if b >= 0 else None
            if waiting is None or k in waiting or not is_plain(gradient):
                self._beside.setdefault(k, {}).setdefault(replica, []).append(gradient)
                return True
            waiting[k] = gradient
            del gradient
            if len(waiting) == len(self._plan.buckets[b].items):
                self._copy_bucket(b, replica)
        return True

    def end(self) -> dict[int, torch.Tensor]:
        """Copy what still waits, make the calling thread's streams wait for all sums, and return them."""
        with self._lock, torch.set_grad_enabled(False):
            self._ending = True
            for b, replica in sorted([place for place, waiting in self._waiting.items() if waiting]):
                self._copy_bucket(b, replica)
            for b in sorted(self._arrived):
                self._sum(b)
            for reader in self._reader.values():
                self._copies.wait_copies(reader)
            for k, of_parameter in sorted(self._beside.items()):
                self._add_beside(k, of_parameter)
        return self._totals

    def _copy_bucket(self, b: int, replica: int) -> None:
        """Copy a replica's gradients of one bucket to the source."""
        gradients, self._waiting[b, replica] = self._waiting[b, replica], None
        assert gradients is not None
        bucket = self._plan.buckets[b]
        source = self._plan.source_of[bucket.numbers[0]]
        if len(gradients) < len(bucket.items):
            bucket = replace(bucket, items=tuple([item for item in bucket.items if item[0] in gradients]))
        reader = self._reader[source]
        if self._is_remote[replica][source]:
            gradients.update(bucket.pieces(self._copies.to_add(bucket.flat(gradients), reader)))
        else:
            for gradient in gradients.values() if self._streams[source] else ():
                self._copies.record_stream(gradient, reader)
            self._copies.wait_compute(reader)
        here = self._arrived.setdefault(b, {})
        here[replica] = [gradients.get(k) for k in self._plan.buckets[b].numbers]
        gradients.clear()
        if len(here) == self._num_replicas and not self._ending:
            self._sum(b)

    def _sum(self, b: int) -> None:
        """Sum the parts of a bucket that have arrived, in replica order."""
        arrived = self._arrived.pop(b)
        numbers = self._plan.buckets[b].numbers
        reader = self._reader[self._plan.source_of[numbers[0]]]
        with self._copies.on_copy_stream(reader), torch.set_grad_enabled(False):
            totals = sums_of([arrived.pop(replica) for replica in sorted(arrived)])
        found = {k: total for k, total in zip(numbers, totals, strict=True) if total is not None}
        del totals
        for total in found.values() if self._streams[self._plan.source_of[numbers[0]]] else ():
            self._copies.record_stream(total, reader)
        emitted = [] if self._ending else [k for k in found if k in self._emitted]
        if self._emit is not None and emitted:
            with self._copies.read(reader):
                for k in emitted:
                    self._emit(k, found.pop(k))
        self._totals.update(found)

    def _add_beside(self, k: int, of_parameter: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Add the gradients outside buckets: each replica's first one in replica order, then the second ones."""
        for number in range(max(map(len, of_parameter.values()))):
            for replica in sorted(of_parameter):
                if number < len(of_parameter[replica]):
                    part = _devices.copied_to(of_parameter[replica][number], self._plan.source_of[k])
                    self._totals[k] = sum_in_place([self._totals[k], part]) if k in self._totals else part
