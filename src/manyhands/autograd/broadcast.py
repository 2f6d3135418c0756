"""Replicas on other devices: parameters are broadcast in coalesced buckets, and gradients reduced in them.

    forward    parameters ──► flat buckets ──► each device ──► leaves of the replicas there
    backward   gradients of a replica, in any order ──► flat bucket, when full ──► home ──► (1) ──► .grad
                                                                                             │
               gradients of the replicas at home ────────────────────────────────────────────┘

    "home": the device of the live module.
    (1) When a bucket has arrived from all replicas, it is summed in replica order; so runs repeat bit for bit.

Copies overlap with what the devices compute (`streams.py`), gradients while backward still runs. These tensors are
copied one by one, parameters at once and gradients at the end of backward: sparse tensors, tensors of a subclass,
second gradients of a leaf (backward inside backward, as in reentrant activation checkpointing), and the gradients in
buckets that never become full.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial

import torch

from manyhands.autograd.reducer import Emit, sum_in_place
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import Form, buckets_of, is_plain
from manyhands.runtime.streams import Copies, current_stream, join_streams

_ALIGNED_BYTES = 16  # kernels that load several entries at once need this alignment


def _is_remote(replica: int, device: torch.device, home: torch.device, separate_memory: bool) -> bool:
    """Return whether a replica on `device` needs a copy of what is on `home`."""
    return not _devices.same_device(device, home) or (separate_memory and replica > 0)


def broadcast_coalesced(
    tensors: Mapping[int, torch.Tensor],
    devices: Sequence[torch.device],
    copies: Copies,
    *,
    separate_memory: bool = False,
) -> list[dict[int, torch.Tensor]]:
    """Return, for each replica, copies of those tensors that are not on its device already; they may be in flight.

    Args:
        tensors: by number.
        devices: one a replica.
        copies: with the replicas as readers.
        separate_memory: copy to every replica but the first, even on the tensors' own device.
    """
    found: list[dict[int, torch.Tensor]] = [{} for _ in devices]
    homes = {tensor.device for tensor in tensors.values()}
    remote = {
        home: [i for i, device in enumerate(devices) if _is_remote(i, device, home, separate_memory)] for home in homes
    }
    if not any(remote.values()):
        return found
    tensors = {number: tensor.detach() for number, tensor in tensors.items()}
    forms = {n: Form.of(tensor, tensor.device) for n, tensor in tensors.items() if is_plain(tensor) and tensor.numel()}
    for bucket in buckets_of(forms):
        bucket = bucket._replace(aligned_bytes=_ALIGNED_BYTES)
        flat = bucket.flat(tensors)  # of a single tensor too: the replica at home may write into it during the copy
        for i in remote[flat.device]:
            # `data` makes each piece a tensor of its own: a write into one would otherwise count as a write into all.
            found[i].update((n, piece.data) for n, piece in bucket.pieces(copies.to(flat, i)).items())
    for number in tensors.keys() - forms.keys():
        for i in remote[tensors[number].device]:
            found[i][number] = copies.to(tensors[number], i)
    return found


@contextlib.contextmanager
def reduce_coalesced(
    leaves: Sequence[Sequence[torch.Tensor | None]],
    homes: Sequence[torch.device],
    totals: dict[int, torch.Tensor],
    emit: Emit,
    reduced: Set[int],
    *,
    separate_memory: bool = False,
) -> Iterator[None]:
    """Within the block, copy gradients home and sum them: `leaves[k]` are the replicas' leaves for parameter k.

    When the block ends, the sums are in `totals`, by k, and every leaf's `.grad` is None.

    Args:
        homes: each parameter's device.
        emit: called with k and the sum of one gradient from each replica, as soon as it is complete, for every k in
            `reduced`; `totals` then has only what was not emitted.
        separate_memory: as in `broadcast_coalesced`.
    """
    with Copies(list(dict.fromkeys(homes))) as copies:
        reduce = _CoalescedReduce(leaves, homes, copies, emit, reduced, separate_memory)
        handles = [
            leaf.register_post_accumulate_grad_hook(partial(reduce.take, k, i))  # type: ignore[no-untyped-call]
            for k, of_parameter in enumerate(leaves)
            for i, leaf in enumerate(of_parameter)
            if leaf is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        reduce.end()
    totals.update(reduce.totals)


class _CoalescedReduce:
    """Copies the gradients of one backward home and sums them. `take` may be called from several threads."""

    def __init__(
        self,
        leaves: Sequence[Sequence[torch.Tensor | None]],
        homes: Sequence[torch.device],
        copies: Copies,
        emit: Emit,
        reduced: Set[int],
        separate_memory: bool,
    ) -> None:
        self._homes, self._copies, self._emit, self._reduced = homes, copies, emit, reduced
        self._separate_memory = separate_memory
        self.totals: dict[int, torch.Tensor] = {}
        # Backward computes the last parameters' gradients first.
        plain = [
            (k, leaf) for k, (leaf, *_) in reversed(list(enumerate(leaves))) if leaf is not None and is_plain(leaf)
        ]
        self._buckets = buckets_of({k: Form.of(leaf.detach(), homes[k]) for k, leaf in plain})
        self._bucket_of = {k: b for b, bucket in enumerate(self._buckets) for k, _ in bucket.items}
        self._reader = {home: reader for reader, home in enumerate(dict.fromkeys(homes))}
        self._num_replicas = len(leaves[0]) if leaves else 0
        self._lock = threading.Lock()
        self._taken: set[tuple[int, int]] = set()  # (parameter, replica) whose gradient is in a bucket
        self._waiting: dict[tuple[int, int], dict[int, torch.Tensor]] = {}  # by bucket and replica
        self._made_on: dict[tuple[int, int], list[torch.Stream | None]] = {}  # the streams that computed them
        self._at_home: dict[int, dict[int, dict[int, torch.Tensor]]] = {}  # by bucket, then by replica
        # By parameter, then by replica: gradients outside buckets, and the streams that computed them.
        self._beside: dict[int, dict[int, list[tuple[torch.Tensor, torch.Stream | None]]]] = {}
        self._ending = False

    def take(self, k: int, replica: int, leaf: torch.Tensor) -> None:
        """Take the gradient that a leaf has just received; copy its bucket home if that is full now."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:  # a user's hook has taken it
            return
        with self._lock, torch.no_grad():
            b = self._bucket_of.get(k)
            if b is None or (k, replica) in self._taken or not is_plain(gradient):
                self._beside.setdefault(k, {}).setdefault(replica, []).append((gradient, current_stream(leaf.device)))
                return
            self._taken.add((k, replica))
            waiting = self._waiting.setdefault((b, replica), {})
            waiting[k] = gradient
            del gradient  # so that the sum may be made in its memory
            self._made_on.setdefault((b, replica), []).append(current_stream(leaf.device))
            if len(waiting) == len(self._buckets[b].items):
                self._copy_home(b, replica)

    def end(self) -> None:
        """Copy what still waits, and make the calling thread's streams wait for all sums."""
        with self._lock, torch.no_grad():
            self._ending = True
            for b, replica in sorted(self._waiting):
                self._copy_home(b, replica)
            for b in sorted(self._at_home):
                self._sum(b)
            for reader in self._reader.values():
                self._copies.wait_copies(reader)
            for k, of_parameter in sorted(self._beside.items()):
                self._add_beside(k, of_parameter)

    def _copy_home(self, b: int, replica: int) -> None:
        """Copy a replica's gradients of one bucket home."""
        gradients = self._waiting.pop((b, replica))
        bucket, home = self._buckets[b], self._home(b)
        if len(gradients) < len(bucket.items):
            bucket = bucket._replace(items=tuple(item for item in bucket.items if item[0] in gradients))
        device = next(iter(gradients.values())).device
        join_streams(self._made_on.pop((b, replica)), gradients.values(), device)
        if _is_remote(replica, device, home, self._separate_memory):
            parts = bucket.pieces(self._copies.to_add(bucket.flat(gradients), self._reader[home]))
        else:
            parts = {}
            for k in list(gradients):
                gradient = gradients.pop(k)
                # A gradient can be in memory that is not its own: see `sum_in_place`.
                parts[k] = gradient if torch_private.owns_its_memory(gradient) else gradient.clone()
                self._copies.record_stream(parts[k], self._reader[home])
            self._copies.wait_compute(self._reader[home])
        here = self._at_home.setdefault(b, {})
        here[replica] = parts
        if len(here) == self._num_replicas and not self._ending:
            self._sum(b)

    def _sum(self, b: int) -> None:
        """Sum the parts of a bucket that are at home, in replica order."""
        at_home = self._at_home.pop(b)
        totals: dict[int, torch.Tensor] = {}
        reader = self._reader[self._home(b)]
        with self._copies.on_copy_stream(reader):
            for replica in sorted(at_home):
                parts = at_home.pop(replica)
                both = [k for k in parts if k in totals]
                torch_private.add_all_in_place([totals[k] for k in both], [parts[k] for k in both])
                totals.update((k, part) for k, part in parts.items() if k not in totals)
        for total in totals.values():
            self._copies.record_stream(total, reader)
        reduced = [] if self._ending else [k for k in totals if k in self._reduced]
        with self._copies.read(reader) if reduced else contextlib.nullcontext():
            for k in reduced:
                self._emit(k, totals.pop(k))
        self.totals.update(totals)

    def _home(self, b: int) -> torch.device:
        return self._homes[self._buckets[b].items[0][0]]

    def _add_beside(
        self, k: int, of_parameter: Mapping[int, Sequence[tuple[torch.Tensor, torch.Stream | None]]]
    ) -> None:
        """Add the gradients outside buckets: each replica's first one in replica order, then the second ones."""
        for number in range(max(map(len, of_parameter.values()))):
            for replica in sorted(of_parameter):
                if number < len(of_parameter[replica]):
                    gradient, stream = of_parameter[replica][number]
                    join_streams([stream], [gradient] if is_plain(gradient) else [], gradient.device)
                    part = _devices.copied_to(gradient, self._homes[k])
                    self.totals[k] = sum_in_place([self.totals[k], part]) if k in self.totals else part
