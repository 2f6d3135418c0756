"""How do the ranks that train one model together meet, and what do they send each other?

torch.distributed carries all data. Added here: how ranks wait (waiting.py) and learn of a failure (failures.py).

Guarantees
    - Ranks have met when each of them has wrapped a model; one that never does is named in an error.
    - Each purpose has a process group of its own where collectives may overlap, and one group for all where they may
      not.
    - The groups end before the interpreter does.

Assumes that all processes make their communicators, wrap their models and call collectives in the same order. Where a
difference can be detected, the error names the first one.
"""

import atexit
import contextlib
import ctypes
import datetime
import functools
import hashlib
import os
import pickle
import uuid
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from unisono.distributed.environment import WRAPPING, start_default_group
from unisono.distributed.failure_store import STORE_ERRORS, FailureStore, host_id
from unisono.distributed.failures import Failures, brief
from unisono.distributed.waiting import Waits
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import Bucket, Form, buckets_of
from unisono.runtime.errors import log_once
from unisono.runtime.forks import in_forked_child, leak_process_group
from unisono.runtime.torch_private import foreach, process_groups

_MARGIN_S = 5.0
_NUM_GATHERED = 16  # numbers in each all-gather
_BUCKETS_IN_FLIGHT = 2  # of a broadcast
_REPORTING_MISMATCH = "reporting a mismatch"

_SHARED_DEVICE = (
    "several processes share one GPU ({device} in this one), or slices of one, so their gradients go through "
    "the host, which is slow. Start one process for each GPU, or use unisono.DataParallel without a launcher."
)

_NOT_IN_GROUP = -100  # torch.distributed.GroupMember.NON_GROUP_MEMBER

distributed: Any = torch.distributed


def communicator_for(process_group: Any = None, timeout_s: float | None = None) -> "Communicator | None":
    """Return the communicator of some processes; None if this process is alone.

    Args:
        process_group: the processes. None: all that the launcher has started, or that are in the default process
            group; if there is neither, this process is alone. False: it is alone in any case.
        timeout_s: that of the default process group, if this makes it; None: torch's.

    Raises:
        TypeError: `process_group` is none of these.
        ValueError: it is a group to which this process does not belong.
        RuntimeError: the launcher's variables are incomplete, or processes are missing.
    """
    if process_group is False:
        return None
    if process_group is None:
        if not start_default_group(timeout_s):
            return None
        process_group = distributed.group.WORLD
    elif type(process_group) is int and process_group == _NOT_IN_GROUP:
        raise ValueError(
            "process_group: this process is not a member (torch.distributed.new_group returned "
            "GroupMember.NON_GROUP_MEMBER). Wrap the model only in the group's processes, or with "
            "process_group=False in the others."
        )
    elif not isinstance(process_group, getattr(distributed, "ProcessGroup", ())):
        raise TypeError(f"process_group={process_group!r}: expected a ProcessGroup, None or False")
    if process_group.size() == 1:
        return None
    if process_group not in _communicators:
        communicator = _communicators[process_group] = Communicator(process_group)
        try:
            communicator.connect()
        except BaseException as error:  # Ctrl-C too: a half-made connection cannot be used
            communicator.failures.abort(error)
            raise
    return _communicators[process_group]


class RankDevice(NamedTuple):
    """The device of a rank."""

    host: str
    identity: str  # of the device, on its host
    kind: str


class RankDevices(NamedTuple):
    """The device of each rank, as the ranks have told each other."""

    own: torch.device  # this rank's
    of_all: tuple[RankDevice, ...]  # by rank

    @property
    def are_of_one_kind(self) -> bool:
        return len({device.kind for device in self.of_all}) == 1


class Communicator:
    """Collectives among some processes, of which this is one.

    Attributes:
        rank, world_size: this process's rank among them, and their number.
        timeout_s: how long a rank waits for the others.
        is_world: whether these are all processes of the program.
        failures, waits: how this rank learns of failures, and how it waits.
        reduction: the latest `RankReduction`; None: there has been none.
        num_models: how many models have been wrapped for these processes.

    Args:
        process_group: the processes.
    """

    def __init__(self, process_group: Any) -> None:
        self.rank: int = process_group.rank()
        self.world_size: int = process_group.size()
        self.timeout_s = process_groups.timeout_of_group(process_group).total_seconds()
        self._ranks = distributed.get_process_group_ranks(process_group)
        self.is_world = self.world_size == distributed.get_world_size()
        self._store = distributed.PrefixStore("unisono", process_group.get_group_store())
        self.num_models = self._num_groups = 0
        self._groups: dict[tuple[tuple[RankDevice, ...], str], Any] = {}
        self._host_groups: set[Any] = set()  # those of gloo
        # torch keeps every group until it is destroyed. NCCL's are for the program's end, when all ranks end theirs.
        self._made: list[Any] = []  # of gloo
        on_break = partial(_abort_groups, self._groups, self._made)  # without a reference to this object
        self.failures = Failures(FailureStore(self._store, self.rank), self.rank, self.world_size, on_break)
        self.waits = Waits(self.failures, self._store, self.timeout_s)
        self.reduction: weakref.ref[Any] | None = None
        self._control: Any = None
        weakref.finalize(self, end_groups, self._made).atexit = False
        _all_communicators.add(self)
        _end_at_exit()

    def connect(self) -> None:
        """Wait for all processes, and connect them. To be called once."""
        store = self.failures.store
        store.register()
        self.barrier(WRAPPING)
        self._control = self._new_group("gloo", "control")
        store.locations = self.all_gather_object(store.location, "connecting")

    def barrier(self, name: str) -> None:
        """Wait until every rank has called this as often as this one; errors name the barrier.

        It uses the store only, and so works before the ranks are connected.
        """
        self.failures.raise_if_broken()
        try:
            self.waits.barrier(name)
        except STORE_ERRORS as error:
            raise self.failures.of_connection(error, name) from error

    # ---- collectives -----------------------------------------------------------------------------

    def all_gather(self, values: Sequence[float], doing: str) -> "AllGatherWork":
        """Start to all-gather a few numbers; whole numbers are exact below 2**53.

        Args:
            values: as many on each rank, 15 at most.
            doing: what is being done. If a rank does something else, the error names both.
        """
        # Of one length, so that ranks that do not do the same notice it. A sum with zeros in the others' places, in an
        # array of Python's: for the calling thread that is half the work of an all-gather of new tensors.
        own = array("d", [digest_of(doing), *values, *[0.0] * (_NUM_GATHERED - 1 - len(values))])
        before, after = self.rank, self.world_size - self.rank - 1
        table = array("d", bytes(8 * _NUM_GATHERED * before)) + own + array("d", bytes(8 * _NUM_GATHERED * after))
        tensor = torch.frombuffer(table, dtype=torch.float64)
        number = self.waits.next_comparison()
        work = self.start(partial(self._control.allreduce, [tensor]))
        return AllGatherWork(self, work, table, len(values), doing, number)

    def all_reduce(self, tensor: torch.Tensor, doing: str, group: Any = None, comparison: int = 0) -> "AllReduceWork":
        """Start to sum a tensor, a small one if no group is given.

        Args:
            comparison: its number, if the ranks compare what they do by this sum; see `AllReduceWork.wait`.
        """
        group = self._control if group is None else group
        work = self.start(partial(group.allreduce, [tensor]))
        return AllReduceWork(self, work, tensor, doing, group, comparison)

    def all_reduce_sparse(self, tensor: torch.Tensor, group: Any, doing: str) -> torch.Tensor:
        """Return the sum of the ranks' sparse tensors; each is coalesced."""
        lengths = [int(length) for (length,) in self.all_gather([tensor._nnz()], doing).wait()]
        indices = torch.cat(self._all_gather_padded(lengths, tensor.indices().t(), group, doing))
        values = torch.cat(self._all_gather_padded(lengths, tensor.values(), group, doing))
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()

    def _all_gather_padded(
        self, lengths: Sequence[int], mine: torch.Tensor, group: Any, doing: str
    ) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order; they differ in their `lengths` only."""
        all_ranks, work = self.start_all_gather(_padded(mine, lengths), group)
        self.wait(work, doing, group)
        return [tensor[:length] for tensor, length in zip(all_ranks, lengths, strict=True)]

    def start_all_gather(self, mine: torch.Tensor, group: Any) -> tuple[list[torch.Tensor], Any]:
        """Start to all-gather a tensor of one form on every rank; return each rank's, in rank order, and the work."""
        if self.waits_on_host(group):
            tensors = [torch.empty_like(mine) for _ in range(self.world_size)]
            return tensors, self.start(partial(distributed.all_gather, tensors, mine, group, True))
        # Into one tensor: into several, they would be copied once more.
        flat = mine.new_empty(self.world_size, *mine.shape)
        return list(flat), self.start(partial(_all_gather_into, flat, mine, group))

    def _pickled(self, value: Any, doing: str) -> tuple[torch.Tensor, list[int]]:
        """Return a value as bytes, and how many every rank's has."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return mine, [int(length) for (length,) in self.all_gather([len(mine)], doing).wait()]

    def all_gather_object(self, value: Any, doing: str) -> list[Any]:
        """Return every rank's value, in rank order. Slow: values are pickled."""
        mine, lengths = self._pickled(value, doing)
        return [*map(_unpickled, self._all_gather_padded(lengths, mine, self._control, doing))]

    def gather_object(self, value: Any, doing: str) -> list[Any]:
        """Return every rank's value on rank 0, in rank order; an empty list on the others. Values are pickled."""
        mine, lengths = self._pickled(value, doing)
        mine = _padded(mine, lengths)
        all_ranks = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else []
        gather = partial(distributed.gather, mine, all_ranks or None, self._ranks[0], self._control, True)
        self.wait(self.start(gather), doing)
        return [_unpickled(tensor[:length]) for tensor, length in zip(all_ranks, lengths, strict=False)]

    def broadcast(
        self, source: int, tensors: Sequence[torch.Tensor], group: Any, doing: str, plan: Sequence[Bucket] | None = None
    ) -> Callable[[], None]:
        """Start to overwrite `tensors`, of which `plan` is the plan, by those of rank `source`; return what waits.

        A bucket takes memory of its own, so few are on their way at a time.
        """
        to_send = iter(broadcast_plan(tensors) if plan is None else plan)
        in_flight: deque[tuple[Bucket, torch.Tensor, Any]] = deque()

        def start_next() -> None:
            for bucket in islice(to_send, 1):
                flat = bucket.flat(tensors)
                octets = flat.view(torch.uint8)  # every dtype is sent the same way
                send = partial(distributed.broadcast, octets, self._ranks[source], group, True)
                in_flight.append((bucket, flat, self.start(send)))

        def end_first() -> None:
            bucket, flat, work = in_flight.popleft()
            self.wait(work, doing, group)
            if self.rank != source:
                # Through .data, unseen by autograd: graphs may have saved buffers for their backward.
                targets = [tensors[number].data for number in bucket.numbers]
                foreach.copy_all_in_place(targets, [*bucket.pieces(flat).values()])

        def wait() -> None:
            while in_flight:
                end_first()
                start_next()

        for _ in range(_BUCKETS_IN_FLIGHT):
            start_next()
        return wait

    def agree_on_devices(self, device: torch.device) -> RankDevices:
        """Return the devices of all ranks; this one's is `device`. A collective."""
        identity = RankDevice(host_id(), _devices.identity(device), device.type)
        return RankDevices(device, tuple(self.all_gather_object(identity, "connecting the devices")))

    def group_for(self, devices: RankDevices, purpose: str) -> Any:
        """Return the process group for tensors on these devices, one for each purpose: their collectives may overlap.

        Its backend is NCCL or similar if every rank has an accelerator of its own, gloo otherwise. The first call for
        these devices and a purpose is a collective.

        NCCL's collectives may not overlap: groups that share a GPU wait for each other for ever where two ranks start
        them in different orders. So there all purposes have one group, and callers use it in one order on all ranks.
        """
        key = devices.of_all, purpose
        if key in self._groups:
            return self._groups[key]
        alone = devices.are_of_one_kind and not _devices.computes_on_host(devices.own)
        if alone and len(set(devices.of_all)) < self.world_size:  # NCCL does not connect several processes on one GPU
            alone = False
            log_once(_SHARED_DEVICE.format(device=devices.own))
        backend = distributed.get_default_backend_for_device(devices.own) if alone else "gloo"
        known = [group for (of, _), group in self._groups.items() if of == devices.of_all]
        shared = [group for group in known if not self.waits_on_host(group)]
        group = shared[0] if shared else self._new_group(backend, purpose)
        self._groups[key] = group
        return group

    def _new_group(self, backend: str, purpose: str) -> Any:
        # Longer than `Waits.until` waits, whose error names the missing ranks.
        timeout = datetime.timedelta(seconds=self.timeout_s + _MARGIN_S)
        self._num_groups += 1
        try:
            # A name that no other group has had, on which the ranks agree.
            name = self._store.compare_set(f"group/{self._num_groups}", "", uuid.uuid4().hex).decode()
            unbound = contextlib.nullcontext() if self.is_world else process_groups.default_group_unbound()
            with process_groups.group_named(f"unisono {name}"), unbound:
                group = distributed.new_group(
                    self._ranks,
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=True,
                    group_desc=f"unisono: {purpose}",
                )
        except RuntimeError as error:
            raise self.failures.failure(f"the processes could not connect: {brief(error)}") from error
        if backend == "gloo":
            self._host_groups.add(group)
            self._made.append(group)
        return group

    # ---- waiting -----------------------------------------------------------------------------------

    def start(self, collective: Callable[[], Any]) -> Any:
        """Start an asynchronous collective of torch.distributed, unless this communicator is broken."""
        self.failures.raise_if_broken()
        if self.failures.raised:
            self.failures.take_back_exception()
        try:
            return collective()
        except RuntimeError as error:
            raise self.failures.of_connection(error, "starting a collective") from error

    def waits_on_host(self, group: Any) -> bool:
        """Return whether `wait` returns only when work of this group is done, because its backend is gloo."""
        return group is None or group in self._host_groups

    def wait(
        self,
        work: Any,
        doing: str,
        group: Any = None,
        check: Callable[[], None] | None = None,
        key: str = "",
    ) -> None:
        """Wait for `work`, done in `group`; on an accelerator's own backend, have the current stream wait.

        Args:
            check, key: as in `Waits.until`.

        Raises:
            RuntimeError: it failed, another rank failed, or the timeout has passed. Says which.
        """
        if self.waits_on_host(group):
            self.waits.until(work.is_completed, doing, check=check, block=partial(_block, work), key=key)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failures.of_connection(error, doing) from error

    def wait_for_future(self, future: Any, doing: str) -> Any:
        """Wait for a communication hook's future; return its tensor."""
        self.waits.until(future.done, doing)
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self.failures.of_connection(error, doing) from error
        return value[0] if isinstance(value, list | tuple) else value

    def raise_mismatch(self, doing: str) -> None:
        """Raise an error that says what each rank does; all ranks call this."""
        all_do = None
        while all_do is None:  # until all ranks, which may have started more collectives, have noticed the mismatch
            with contextlib.suppress(_NotNoticedError):
                all_do = self.all_gather_object(doing, _REPORTING_MISMATCH)
        other = next((rank for rank, other in enumerate(all_do) if other != all_do[0]), None)
        where = (
            f"rank 0 is at {all_do[0]}, rank {other} at {all_do[other]}"
            if other is not None
            else (f"all are at {doing}, but not at the same one")
        )
        error = RuntimeError(
            f"the processes do different things: {where}. Take the same steps in every process; for loaders "
            "of different lengths use DataParallel.batches(loader)."
        )
        self.failures.abort(error)
        raise error

    def end(self, why: str) -> None:
        """End the groups. Their collectives have ended; a later one is an error."""
        self.failures.broken = f"the processes are no longer connected: {why}"
        others = [group for group in self._groups.values() if group not in self._host_groups]
        self._control = None
        self._groups.clear()
        self._host_groups.clear()
        end_groups(self._made)
        end_groups(others)

    def leak_groups(self) -> None:
        """Do without the groups, in a forked child."""
        self.failures.broken = (
            f"this process was forked by rank {self.rank} and takes no part in the training of the ranks. "
            "Use model.module in it, or torch.no_grad()."
        )
        for group in (self._control, *self._groups.values()):
            leak_process_group(group)
        self._made.clear()


class _NotNoticedError(Exception):
    """Some rank has not noticed yet that the ranks do not do the same."""


class AllGatherWork:
    """An all-gather of numbers that has started."""

    def __init__(
        self, communicator: Communicator, work: Any, table: "array[float]", num_values: int, doing: str, number: int
    ) -> None:
        self._communicator, self._work, self._table = communicator, work, table
        self._num_values, self._doing, self._key = num_values, doing, _gathering(number)

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self._work.is_completed())

    def wait(self) -> list[list[float]]:
        """Wait; return each rank's numbers, in rank order.

        Raises:
            RuntimeError: some rank does something else.
        """
        self._communicator.wait(self._work, self._doing, key=self._key)
        rows = [self._table[i : i + _NUM_GATHERED].tolist() for i in range(0, len(self._table), _NUM_GATHERED)]
        if len({row[0] for row in rows}) > 1:
            if self._doing == _REPORTING_MISMATCH:
                raise _NotNoticedError
            self._communicator.raise_mismatch(self._doing)
        return [row[1 : 1 + self._num_values] for row in rows]


class GatheredElsewhereError(Exception):
    """Some rank all-gathers numbers, where this one compares what the ranks do by a sum."""


class AllReduceWork:
    """A sum of tensors that has started."""

    def __init__(
        self, communicator: Communicator, work: Any, tensor: torch.Tensor, doing: str, group: Any, comparison: int
    ) -> None:
        self._communicator, self._work, self._tensor, self._doing = communicator, work, tensor, doing
        self._group, self._comparison = group, comparison

    def wait(self) -> torch.Tensor:
        """Wait; return the sum.

        Raises:
            GatheredElsewhereError: the ranks compare what they do by this sum, and some rank does so, for as many times
                as this one, in an all-gather of numbers. The sum would never end.
        """
        check = self._check if self._comparison else None
        self._communicator.wait(self._work, self._doing, self._group, check)
        return self._tensor

    def _check(self) -> None:
        if self._communicator.failures.store.get(_gathering(self._comparison)):
            raise GatheredElsewhereError


def _gathering(number: int) -> str:
    """Return the key that is in the store while some rank waits for long in its all-gather of that number."""
    return f"gathering/{number}"


def _all_gather_into(flat: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any:
    """Start to all-gather a tensor into `flat`, whose first axis is the rank; return the work. gloo cannot do it."""
    # Older releases have it under another name, which newer ones warn about.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    return gather(flat.view(-1), tensor.reshape(-1), group, True)


def _padded(tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return a tensor with zeros behind it, as long as the longest rank's."""
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded


def _unpickled(tensor: torch.Tensor) -> Any:
    return pickle.loads(ctypes.string_at(tensor.data_ptr(), len(tensor)))


def broadcast_plan(tensors: Sequence[torch.Tensor]) -> tuple[Bucket, ...]:
    """Return the buckets in which `Communicator.broadcast` sends tensors."""
    return buckets_of({i: Form.of(t.detach()) for i, t in enumerate(tensors) if t.numel()})


_communicators: "weakref.WeakKeyDictionary[Any, Communicator]" = weakref.WeakKeyDictionary()
_all_communicators: "weakref.WeakSet[Communicator]" = weakref.WeakSet()  # also where the program has ended the group
# Kept as long as the process: in older releases of torch, destroying a group of gloo while a transfer of it fails is a
# deadlock. The destructor holds the GIL and waits for gloo's thread, which waits for the GIL to free the tensors.
_groups_of_broken: list[Any] = []


def _abort_groups(groups: "dict[Any, Any]", made: "list[Any]") -> None:
    """End what waits on an accelerator for a missing rank: it never ends by itself."""
    _groups_of_broken.extend([*groups.values(), *made])
    made.clear()
    for group in {id(group): group for group in groups.values()}.values():
        process_groups.abort_group(group)


def end_groups(groups: "list[Any]") -> None:
    """Destroy process groups that torch still knows, each once; the list is empty then."""
    while groups:
        group = groups.pop()
        if group is not None and group not in groups and distributed.is_initialized():
            with contextlib.suppress(ValueError, RuntimeError):  # the program has destroyed them all
                distributed.destroy_process_group(group)


def _after_fork() -> None:
    for process_group in list(_communicators):
        leak_process_group(process_group)
    for communicator in list(_all_communicators):
        communicator.leak_groups()


in_forked_child(_after_fork)


@functools.cache  # once in a process
def _end_at_exit() -> None:
    atexit.register(_end_communicators)


def _end_communicators() -> None:
    """Tell the other ranks that this program ends, and end the groups, while the interpreter still runs.

    gloo's threads free the tensors of a collective a little after its end. In an interpreter that has ended, that
    aborts the process, and a launcher would start again what was finished.
    """
    for communicator in list(_all_communicators):
        failures = communicator.failures
        failures.report_end()
        failures.store.report_exit()
        if failures.broken is None and os.getpid() == failures.store.pid:
            communicator.end("the program ends")


@functools.lru_cache(maxsize=64)
def digest_of(text: str) -> int:
    """Return a hash of a text that is the same in every process, and exact in double precision."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


def _block(work: Any, timeout_s: float) -> None:
    """Wait for `work`, at most so long; the caller checks then whether it is done or has failed."""
    with contextlib.suppress(RuntimeError):
        work.wait(datetime.timedelta(seconds=timeout_s))
