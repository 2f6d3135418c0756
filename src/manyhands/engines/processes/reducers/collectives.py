"""Parameters sent and gradients reduced by torch.distributed, for workers that have parameters of their own.

Both travel in flat buckets (buckets.py), on process groups that are the team's own: not the default group, and no
launcher's environment. NCCL where each replica has a GPU of its own; gloo, over the loopback device and buckets in host
memory, elsewhere. The processes find each other through a store in memory that they share.

Gradients: a gradient is copied into its bucket as soon as backward has made it, and a bucket is reduced onto the first
replica as soon as it is full and those before it are on their way, while backward goes on. Which gradients share a
bucket follows from the order in which the first replica had them in the first walk.

Guarantees
    - Every replica that takes part in a walk reduces the same buckets in the same order, also if its graph fails: what
      it has no gradient for it fills with zeros. One that cannot do even that says so, and its team is ended.
    - The caller, whenever it waits, looks now and then whether the workers are still there (`watch`).
    - What the caller gets is memory of its own.

Assumes that a worker may wait for ever: whoever it waits for is alive, or the caller ends it.

The order in which replicas are summed is gloo's or NCCL's affair: here runs need not repeat bit for bit.
"""

import ctypes
import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from manyhands.engines.processes.reducers.base import OnWait, Reducer, Transport, wait_until
from manyhands.engines.processes.shared_memory import Segment, can_lie_in_memory
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import Bucket, BucketFiller, Form, buckets_of

_ENDING_TAKES_S = 1.0


class Rendezvous(NamedTuple):
    """Where processes find each other, and by what they talk.

    Attributes:
        store: the number of the segment whose file descriptor is the store's file.
        team: what the team's entries there begin with.
        replica: which one it is to whom this is said.
    """

    store: int
    team: str
    backend: str
    replica: int


class CollectiveConfig(NamedTuple):
    """What a worker is told about one walk: the buckets (None: those that it was told before), and who takes part."""

    buckets: tuple[Bucket, ...] | None
    rendezvous: Rendezvous
    replicas: tuple[int, ...]


class Groups:
    """One process's groups: one for each set of replicas that have had something to exchange."""

    def __init__(self, store: Segment, rendezvous: Rendezvous, device: torch.device) -> None:
        self._store, self._rendezvous, self._device = store, rendezvous, device
        self._groups: dict[tuple[int, ...], Any] = {}

    def of(self, replicas: tuple[int, ...], watch: OnWait = lambda: None) -> Any:
        """Return the group of some replicas; made when first asked for, which all of them do at once."""
        if replicas not in self._groups:
            distributed: Any = torch.distributed
            file = distributed.FileStore(f"/proc/self/fd/{self._store.fd}", -1)
            store = distributed.PrefixStore(f"{self._rendezvous.team}{replicas}", file)
            # Making a group waits for the others where nobody can look whether they are there: so they come first.
            store.set(str(self._rendezvous.replica), "is here")
            everybody = [str(replica) for replica in replicas]
            wait_until(lambda: bool(store.check(everybody)), watch)
            rank = replicas.index(self._rendezvous.replica)
            with _devices.using(self._device, []):
                self._groups[replicas] = torch_private.process_group(
                    self._rendezvous.backend, store, rank, len(replicas)
                )
        return self._groups[replicas]

    def place(self) -> torch.device:
        """Return where a bucket has to be."""
        return self._device if self._rendezvous.backend == "nccl" else torch.device("cpu")

    def receive(self, buckets: Iterable[Bucket], replicas: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the buckets that the first replica sends, flat, on this replica's device."""
        group, flats = self.of(replicas), []
        for bucket in buckets:
            flat = torch.empty(bucket.num_entries, dtype=bucket.dtype, device=self.place())
            torch_private.broadcast(group, flat.view(torch.uint8)).wait()
            flats.append(_devices.copy_to(flat, self._device))
        return flats

    def end(self) -> None:
        """Break off what is under way, and let go of the groups."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            torch_private.end_process_group(group)

    def forget(self) -> None:
        """Keep the groups for ever: in the child of a fork, whoever ends one waits for threads that are not there."""
        for group in self._groups.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups = {}


class CollectiveReducer(Reducer):
    """One replica's part in the reduction of the gradients of one walk."""

    def __init__(self, buckets: Sequence[Bucket], group: Any, place: torch.device, device: torch.device) -> None:
        """Prepare to reduce gradients on `device`, in buckets that have to be at `place`."""
        self._buckets, self._group, self._place, self._device = buckets, group, place, device
        self._filling = BucketFiller(buckets, device)
        self._copies: deque[tuple[torch.Tensor, Callable[[bool], bool]]] = deque()  # on their way to `place`
        self._works: list[Any] = []
        self._reduced: list[torch.Tensor] = []

    @property
    def numbers(self) -> Sequence[int]:
        return self._filling.numbers

    @property
    def order(self) -> Sequence[int]:
        """In which order gradients came, by number."""
        return self._filling.order

    def add(self, number: int, gradient: torch.Tensor) -> bool:
        if not can_lie_in_memory(gradient) or not self._filling.add(number, gradient):
            return False
        self._reduce_what_is_full(wait=False)
        return True

    def end(self, watch: OnWait = lambda: None) -> float:
        self._filling.fill_up()
        self._reduce_what_is_full(wait=True)
        started = time.perf_counter()
        for work in self._works:
            wait_for(work, watch)
        return time.perf_counter() - started

    def fail(self, watch: OnWait = lambda: None) -> None:
        self.end(watch)

    def results(self) -> dict[int, torch.Tensor]:
        """Return the sums, by number, in the process of the first replica."""
        found = {}
        for bucket, flat in zip(self._buckets, self._reduced, strict=True):
            pieces = bucket.pieces(flat)
            in_how_many = flat[bucket.num_entries :].tolist()
            for (number, form), count in zip(bucket.items, in_how_many, strict=True):
                if count:
                    own = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self._device)
                    found[number] = own.copy_(pieces[number])
        return found

    def _reduce_what_is_full(self, wait: bool) -> None:
        """Have buckets that are full go where they have to be, and from there on, in their order."""
        for _, flat in self._filling.full():
            if _devices.same_device(self._place, self._device):
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

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._device = devices[0]
        self.segments = [_store()]
        backend = _devices.collective_backend(devices)
        self._rendezvous = Rendezvous(_store().number, secrets.token_hex(8), backend, 0)
        self._groups = Groups(_store(), self._rendezvous, self._device)
        self._like: list[Any] = []  # what the tensors are like that the buckets are for
        self._forms: dict[int, Form] = {}
        self._order_is_known = False
        self._buckets: tuple[Bucket, ...] = ()
        self._told: dict[int, tuple[Bucket, ...]] = {}  # by replica
        self._replicas: tuple[int, ...] = ()
        self._part: CollectiveReducer | None = None
        self._sending: list[Any] = []

    def begin_backward(self, leaves: Mapping[int, torch.Tensor], replicas: tuple[int, ...]) -> bool:
        self._replicas = replicas
        like = [(number, t.dtype, t.size(), t.stride(), t.layout, type(t)) for number, t in leaves.items()]
        if like != self._like:
            plain = {number: t.detach() for number, t in leaves.items()}
            self._forms = {number: Form.of(t) for number, t in plain.items() if can_lie_in_memory(t)}
            self._like, self._order_is_known = like, False
            # At first in the order that is usual: backward begins with the last layer.
            self._buckets = buckets_of({number: self._forms[number] for number in reversed(self._forms)})
        return bool(self._forms)

    def config_for(self, replica: int) -> CollectiveConfig:
        known = self._told.get(replica) is self._buckets
        self._told[replica] = self._buckets
        return CollectiveConfig(None if known else self._buckets, self.rendezvous(replica), self._replicas)

    def part(self, watch: OnWait) -> Reducer:
        group = self._groups.of(self._replicas, watch)
        self._part = CollectiveReducer(self._buckets, group, self._groups.place(), self._device)
        return self._part

    def results(self) -> dict[int, torch.Tensor]:
        part, self._part = self._part, None
        assert part is not None
        if not self._order_is_known:
            self._order_is_known = True
            order = dict.fromkeys([*part.order, *self._forms])
            self._buckets = buckets_of({number: self._forms[number] for number in order})
        return part.results()

    def rendezvous(self, replica: int) -> Rendezvous:
        return self._rendezvous._replace(replica=replica)

    def begin_sending(self, flats: Sequence[torch.Tensor], replicas: tuple[int, ...], watch: OnWait) -> None:
        group = self._groups.of(replicas, watch) if flats else None
        for flat in flats:
            flat = _devices.copy_to(_devices.copy_to(flat, self._device), self._groups.place())
            self._sending.append(torch_private.broadcast(group, flat.view(torch.uint8)))

    def end_sending(self, watch: OnWait) -> None:
        works, self._sending = self._sending, []
        for work in works:
            wait_for(work, watch)

    def end(self) -> None:
        self._groups.end()

    def forget(self) -> None:
        self._groups.forget()


@functools.cache
def _store() -> Segment:
    """Return the memory in which all teams of this process, and their workers, find each other.

    Why one, that is never given back? A store goes by the path of its file, and writes there once more when the last
    group, or the last thing that a group has done, is gone: that may be in a traceback that somebody keeps. By then the
    number of a file descriptor that was closed could be that of a file of the user's.

    Its first page is zeros, which are entries without a name.
    """
    return Segment.create(0)


def wait_for(work: Any, watch: OnWait = lambda: None) -> None:
    """Wait for something that a group does."""
    wait_until(work.is_completed, watch)
    try:
        work.wait()
    except RuntimeError:
        # Most often one of the others has gone. Its connections end one by one: what `watch` looks at may be last.
        until = time.perf_counter() + _ENDING_TAKES_S
        wait_until(lambda: time.perf_counter() > until, watch)
        raise
