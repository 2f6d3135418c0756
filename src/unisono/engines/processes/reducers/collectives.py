"""Parameters sent and gradients reduced by torch.distributed, for workers that have parameters of their own.

Both travel in flat buckets (buckets.py), on process groups that belong to the worker group: not the default group, and
not a launcher's. The backend is NCCL where each replica has a GPU of its own; elsewhere gloo, over the loopback device
and buckets in host memory. The processes find each other through a store in memory that they share.

One backward, on every replica that takes part:

    1. gradients are copied into their bucket as soon as backward has made all of them
    2. the bucket is reduced onto the first replica as soon as all earlier ones have been submitted; backward goes on
       meanwhile
    3. at the end, gradients that are missing are filled with zeros and the last buckets are submitted

The order in which the first replica's gradients were made in its first backward decides which share a bucket.

Guarantees
    - Every replica that takes part reduces the same buckets in the same order, also if its graph fails. A worker that
      cannot do even that says so (`Reply.out_of_step`), and its group is ended.
    - The caller, whenever it waits, checks regularly that the workers are alive (`on_wait`).
    - The caller's results have memory of their own.

Assumes that a worker may wait without limit: the process it waits for is alive, or the caller ends the worker.

gloo or NCCL decides the order in which replicas are summed: here runs need not repeat bit for bit.
"""

import functools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from unisono.engines.processes.reducers.base import OnWait, Transport, WorkerReducer, wait_on, wait_until
from unisono.engines.processes.shared_memory import Segment, is_plain_strided
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.buckets import Bucket, BucketFiller, Form, buckets_of
from unisono.runtime.forks import leak_process_group

_END_TIMEOUT_S = 1.0


class Rendezvous(NamedTuple):
    """Where the processes find each other, and their backend.

    Attributes:
        store: the number of the segment whose file descriptor is the store's file.
        prefix: of the group's keys in the store.
        replica: the receiver of this message.
    """

    store: int
    prefix: str
    backend: str
    replica: int


class CollectiveConfig(NamedTuple):
    """A worker's configuration for one backward: the buckets (None: unchanged), and the replicas that take part."""

    buckets: tuple[Bucket, ...] | None
    rendezvous: Rendezvous
    replicas: tuple[int, ...]


class ProcessGroups:
    """One process's process groups: one for each set of replicas that has exchanged something."""

    def __init__(self, store: Segment, rendezvous: Rendezvous, device: torch.device) -> None:
        self._store, self._rendezvous, self._device = store, rendezvous, device
        self._groups: dict[tuple[int, ...], Any] = {}

    def of(self, replicas: tuple[int, ...], on_wait: OnWait = wait_on) -> Any:
        """Return the process group of some replicas. The first call makes it, in all of them at the same time."""
        if replicas not in self._groups:
            distributed: Any = torch.distributed
            file = distributed.FileStore(f"/proc/self/fd/{self._store.fd}", -1)
            store = distributed.PrefixStore(f"{self._rendezvous.prefix}{replicas}", file)
            # All report in the store first, so that what follows takes no longer than to connect.
            store.set(str(self._rendezvous.replica), "ready")
            keys = [str(replica) for replica in replicas]
            wait_until(lambda: bool(store.check(keys)), on_wait)
            rank = replicas.index(self._rendezvous.replica)
            self._groups[replicas] = self._connected(store, rank, len(replicas), on_wait)
        return self._groups[replicas]

    def _connected(self, store: Any, rank: int, size: int, on_wait: OnWait) -> Any:
        """Return a new process group; it connects in a thread, so that this one notices if another process ends."""
        made: Future[Any] = Future()

        def connect() -> None:
            try:
                with _devices.using(self._device, []):
                    made.set_result(torch_private.process_group(self._rendezvous.backend, store, rank, size))
            except BaseException as error:  # noqa: BLE001 - raised below
                made.set_exception(error)

        threading.Thread(target=connect, name="unisono-connect", daemon=True).start()
        wait_until(made.done, on_wait)
        return made.result()

    def bucket_device(self) -> torch.device:
        """Return the device of the buckets."""
        return self._device if self._rendezvous.backend == "nccl" else torch.device("cpu")

    def receive(self, buckets: Iterable[Bucket], replicas: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the flat buckets that the first replica sends, on this replica's device."""
        group, flats = self.of(replicas), []
        for bucket in buckets:
            flat = torch.empty(bucket.num_entries, dtype=bucket.dtype, device=self.bucket_device())
            torch_private.broadcast(group, flat.view(torch.uint8)).wait()
            flats.append(_devices.copy_to(flat, self._device))
        return flats

    def end(self) -> None:
        """Abort what is running, and drop the groups."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            torch_private.end_process_group(group)

    def abandon(self) -> None:
        """Drop the groups in the child of a fork, and free none."""
        for group in self._groups.values():
            leak_process_group(group)
        self._groups = {}


class CollectiveReducer(WorkerReducer):
    """One replica's part in reducing the gradients of one backward."""

    def __init__(
        self, buckets: Sequence[Bucket], group: Any, bucket_device: torch.device, device: torch.device
    ) -> None:
        """Prepare to reduce gradients that are on `device`, in buckets on `bucket_device`."""
        self._buckets, self._group, self._bucket_device, self._device = buckets, group, bucket_device, device
        self._filling = BucketFiller(buckets, device)
        # Buckets that are being copied to the buckets' device.
        self._copies: deque[tuple[torch.Tensor, Callable[[bool], bool]]] = deque()
        self._works: list[Any] = []
        self._reduced: list[torch.Tensor] = []

    @property
    def numbers(self) -> Sequence[int]:
        return self._filling.numbers

    @property
    def order(self) -> Sequence[int]:
        """The numbers of the gradients, in the order in which they were added."""
        return self._filling.order

    def add(self, number: int, gradient: torch.Tensor) -> bool:
        if not is_plain_strided(gradient) or not self._filling.add(number, gradient):
            return False
        self._reduce_full_buckets(wait=False)
        return True

    def end(self, on_wait: OnWait = wait_on) -> float:
        self._filling.fill_up()
        self._reduce_full_buckets(wait=True)
        started = time.perf_counter()
        for work in self._works:
            wait_for(work, on_wait)
        return time.perf_counter() - started

    def fail(self, on_wait: OnWait = wait_on) -> None:
        self.end(on_wait)

    def results(self) -> dict[int, torch.Tensor]:
        """Return the sums, by number, in the process of the first replica."""
        found = {}
        for bucket, flat in zip(self._buckets, self._reduced, strict=True):
            pieces = bucket.pieces(flat)
            num_replicas = flat[bucket.num_entries :].tolist()
            for (number, form), count in zip(bucket.items, num_replicas, strict=True):
                if count:
                    own = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self._device)
                    found[number] = own.copy_(pieces[number])
        return found

    def _reduce_full_buckets(self, wait: bool) -> None:
        """Copy full buckets to their device and reduce them there, in their order."""
        for _, flat in self._filling.full():
            if _devices.same_device(self._bucket_device, self._device):
                self._copies.append((flat, lambda wait: True))
            else:
                self._copies.append(_devices.begin_copy_to_host(flat))
        while self._copies and self._copies[0][1](wait):
            flat, _ = self._copies.popleft()
            self._works.append(torch_private.reduce(self._group, flat))
            self._reduced.append(flat)


class CollectiveTransport(Transport):
    """The caller's side of both."""

    shares_parameters = False

    def __init__(self, device: torch.device, backend: str) -> None:
        """Connect the caller, whose replica is on `device`, over a backend of torch.distributed."""
        self._device = device
        self.segments = [_store()]
        self._rendezvous = Rendezvous(_store().number, secrets.token_hex(8), backend, 0)
        self._groups = ProcessGroups(_store(), self._rendezvous, self._device)
        self._leaves: Mapping[int, torch.Tensor] | None = None  # whose gradients the buckets are for
        self._forms: dict[int, Form] = {}
        self._order_is_known = False
        self._buckets: tuple[Bucket, ...] = ()
        self._configured: dict[int, tuple[Bucket, ...]] = {}  # by replica
        self._replicas: tuple[int, ...] = ()
        self._reducer: CollectiveReducer | None = None
        self._sending: list[Any] = []

    def begin_backward(self, leaves: Mapping[int, torch.Tensor], replicas: tuple[int, ...]) -> bool:
        self._replicas = replicas
        if leaves is not self._leaves:
            plain = {number: t.detach() for number, t in leaves.items()}
            self._forms = {number: Form.of(t) for number, t in plain.items() if is_plain_strided(t)}
            self._leaves, self._order_is_known = leaves, False
            # The first time in the usual order: backward begins with the last layer.
            self._buckets = buckets_of({number: self._forms[number] for number in reversed(self._forms)})
        return bool(self._forms)

    def config_for(self, replica: int) -> CollectiveConfig:
        known = self._configured.get(replica) is self._buckets
        self._configured[replica] = self._buckets
        return CollectiveConfig(None if known else self._buckets, self.rendezvous(replica), self._replicas)

    def reducer(self, on_wait: OnWait) -> WorkerReducer:
        group = self._groups.of(self._replicas, on_wait)
        self._reducer = CollectiveReducer(self._buckets, group, self._groups.bucket_device(), self._device)
        return self._reducer

    def results(self) -> dict[int, torch.Tensor]:
        reducer, self._reducer = self._reducer, None
        assert reducer is not None
        if not self._order_is_known:
            self._order_is_known = True
            order = dict.fromkeys([*reducer.order, *self._forms])
            self._buckets = buckets_of({number: self._forms[number] for number in order})
        return reducer.results()

    def rendezvous(self, replica: int) -> Rendezvous:
        return self._rendezvous._replace(replica=replica)

    def begin_sending(self, flats: Sequence[torch.Tensor], replicas: tuple[int, ...], on_wait: OnWait) -> None:
        group = self._groups.of(replicas, on_wait) if flats else None
        for flat in flats:
            flat = _devices.copy_to(_devices.copy_to(flat, self._device), self._groups.bucket_device())
            self._sending.append(torch_private.broadcast(group, flat.view(torch.uint8)))

    def end_sending(self, on_wait: OnWait) -> None:
        works, self._sending = self._sending, []
        for work in works:
            wait_for(work, on_wait)

    def succeed(self, previous: Transport) -> None:
        if isinstance(previous, CollectiveTransport):
            self._leaves, self._forms = previous._leaves, previous._forms
            self._order_is_known, self._buckets = previous._order_is_known, previous._buckets

    def end(self) -> None:
        self._groups.end()

    def abandon(self) -> None:
        self._groups.abandon()


@functools.cache
def _store() -> Segment:
    """Return the memory in which all worker groups of this process, and their workers, find each other.

    It is one segment, never freed. Why: a FileStore opens its file by path, and writes to it once more when the last
    process group, or the last work of one, is freed. A kept traceback can delay that. By then the number of a closed
    file descriptor could be that of a file of the user's.

    Its first page is zeros, which are entries without a name.
    """
    return Segment.create(0)


def wait_for(work: Any, on_wait: OnWait = wait_on) -> None:
    """Wait for a work of a process group."""
    wait_until(work.is_completed, on_wait)
    try:
        work.wait()
    except RuntimeError:
        # Most often another process has died. Its connections close one by one; `on_wait`'s may be the last.
        until = time.perf_counter() + _END_TIMEOUT_S
        wait_until(lambda: time.perf_counter() > until, on_wait)
        raise
