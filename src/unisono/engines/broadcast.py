"""Replicas on other devices: parameters and buffers are broadcast in coalesced buckets.

    live tensors ──► a flat tensor a bucket ──► flat memory on each device, of which the replica's tensors are views

A replica's flat memory stays: a forward copies values into it, whether the parameters have changed or not, because no
version counter counts what is written through `.data`. Copies overlap with what the devices compute (`streams.py`).
Sparse tensors and tensors of a subclass are copied one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.buckets import Bucket, Form, buckets_of, is_plain
from unisono.runtime.streams import Copies

_ALIGNED_BYTES = 16  # kernels that load several entries at once need this alignment


def _is_remote(replica: int, device: torch.device, source: torch.device, separate_memory: bool) -> bool:
    """Return whether a replica on `device` needs a copy of what is on `source`."""
    return not _devices.same_device(device, source) or (separate_memory and replica > 0)


class _Memory:
    """A replica's memory for the tensors of one device: a flat tensor a bucket, and its views.

    Attributes:
        computing: the stream that reads from it in the last forward; None where the device has no streams.
        readers: after the work that has read from it.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, computing: torch.Stream | None) -> None:
        # Forwards in inference mode are not the only ones that will write into it.
        with torch.inference_mode(False), torch.no_grad():
            self.flats = [torch.empty(b.num_entries, dtype=b.dtype, device=device) for b in buckets]
            # `data` gives each view a version counter of its own: a write into one would otherwise count as one into
            # all.
            self.views = [view.data for b, flat in zip(buckets, self.flats, strict=True) for view in b.views(flat)]
        self.numbers = [number for bucket in buckets for number in bucket.numbers]
        self.computing = computing
        # The device may not be done with what this memory was before.
        self.readers = [] if computing is None else [_devices.Event(computing)]

    def note_readers(self) -> None:
        """Take note of what is queued now on the streams that have read from it."""
        if self.computing is not None:
            # A backward has let the stream of the thread that called it wait for those on which it ran.
            streams = {self.computing, torch.accelerator.current_stream(self.computing.device)}
            self.readers = [*map(_devices.Event, streams)]


class CoalescedBroadcast:
    """Copies tensors to those replicas that are not on the tensors' device, in flat buckets that are planned once.

    The replicas' memory is made by the first copy, and stays.

    Guarantees
        - A copy waits until what was queued on the memory's last readers, at `note_readers`, has been done.
        - A graph that has saved a tensor before a copy into it raises torch's error in a later backward ("modified by
          an inplace operation").

    Assumes that one forward at a time uses it, from a copy until `note_readers`.

    Args:
        tensors: by number.
        devices: one a replica.
        separate_memory: whether each replica but the first gets copies even on the tensors' own device.
    """

    def __init__(
        self, tensors: Mapping[int, torch.Tensor], devices: Sequence[torch.device], *, separate_memory: bool
    ) -> None:
        self._devices = list(devices)
        sources = {tensor.device for tensor in tensors.values()}
        self._remote = {
            source: [i for i, device in enumerate(devices) if _is_remote(i, device, source, separate_memory)]
            for source in sources
        }
        self._buckets: dict[torch.device, list[Bucket]] = {}  # by source
        self._others: list[int] = []
        self._memory: dict[tuple[int, torch.device], _Memory] = {}  # by replica and source
        self._tensors: dict[int, torch.Tensor] = {}
        if any(self._remote.values()):
            self._tensors = {number: tensor.detach() for number, tensor in tensors.items()}
            plain = {n: tensor for n, tensor in self._tensors.items() if is_plain(tensor) and tensor.numel()}
            forms = {n: Form.of(tensor) for n, tensor in plain.items()}
            for bucket in buckets_of(forms):
                if self._remote[bucket.device]:
                    of_source = self._buckets.setdefault(bucket.device, [])
                    of_source.append(replace(bucket, aligned_bytes=_ALIGNED_BYTES))
            self._others = [n for n in self._tensors if n not in forms]

    def __call__(self, copies: Copies) -> list[dict[int, torch.Tensor]]:
        """Return each replica's copies, by number; they may be in flight. `copies` has the replicas as readers.

        Those in buckets are in the memory that stays, as objects of their own in each call.
        """
        self.renew(copies)
        found = [self.memory_of(i) for i, _ in enumerate(self._devices)]
        for number in self._others:
            for i in self._remote[self._tensors[number].device]:
                found[i][number] = copies.to(self._tensors[number], i)
        return found

    def memory_of(self, replica: int) -> dict[int, torch.Tensor]:
        """Return a replica's memory that stays, as tensors by number, as objects of their own in each call."""
        found: dict[int, torch.Tensor] = {}
        for (i, _), memory in self._memory.items():
            if i == replica:
                found.update(zip(memory.numbers, [view.detach() for view in memory.views], strict=True))
        return found

    def renew(self, copies: Copies) -> None:
        """Copy what the tensors in buckets hold now into the replicas' memory; `copies` is as above."""
        for source, buckets in self._buckets.items():
            # Of one tensor, too, not itself: its own replica may write into it meanwhile.
            values = [bucket.flat(self._tensors) for bucket in buckets]
            for i in self._remote[source]:
                computing = copies.computing_on(i)
                if (i, source) not in self._memory:
                    self._memory[i, source] = _Memory(buckets, self._devices[i], computing)
                self._memory[i, source].computing = computing
            memories = [self._memory[i, source] for i in self._remote[source]]
            flats, readers = [each.flats for each in memories], [each.readers for each in memories]
            copies.fill(flats, values, self._remote[source], readers)
            for memory in memories:
                torch.autograd.graph.increment_version(memory.views)

    def note_readers(self) -> None:
        """Take note that what is queued now reads from the replicas' memory, and nothing that is queued later."""
        for memory in self._memory.values():
            memory.note_readers()
