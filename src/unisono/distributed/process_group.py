"""The processes that train one model together, as one of them sees them.

torch.distributed carries all data. This file adds what it leaves to its users: a rank notices that another one does
something else, learns which rank failed and why, and never waits without end.

Guarantees
    - A rank that waits for others checks now and then whether one of them has failed; if so, it raises an error that
      names that rank and the reason.
    - A wait ends at the latest with the process group's timeout, with an error that names the missing ranks; one for
      ranks that do not wrap a model ends earlier, and is logged before.
    - After such an error the ranks no longer agree on what comes next; every later call raises it again.

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
import sys
import time
import uuid
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

import torch

from unisono.distributed import environment
from unisono.distributed.environment import FIRST_NAP_S, NOT_THERE, WRAPPING, ranks_of, start_default_group
from unisono.distributed.failure_store import STORE_ERRORS, FailureStore, host_id
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.buckets import Bucket, Form, buckets_of
from unisono.runtime.errors import described, log_once
from unisono.runtime.forks import in_forked_child, leak_process_group
from unisono.runtime.interrupts import deliver

_LONGEST_NAP_S = 0.002
_CHECK_EVERY_S = 0.2  # how often a waiting rank checks the store for failures; with many ranks, less often
_REASON_NAP_S = 0.05
_EXIT_S = 10.0  # how long a rank that has failed may take to say why, and to end
_SLOW_EXIT_S = 60.0  # how long it may take to end if it says that it does
_BLAME_S = 1.0  # a launcher blames the process that ends first: torchrun has times in whole seconds
_WRAPPING_S = environment.RENDEZVOUS_S  # how long a rank waits for others to wrap a model, by default
_PATIENCE_S = 30.0  # how long a rank may take to come to a collective before that is said, or to go on after an error
_MARGIN_S = 5.0
_MOST_TEXT = 2000  # characters of a failure's reason
_NUM_GATHERED = 16  # numbers in each all-gather
_BUCKETS_IN_FLIGHT = 2  # of a broadcast
_REPORTING_MISMATCH = "reporting a mismatch"

_SHARED_DEVICE = (
    "several processes share one GPU ({device} in this one), or slices of one, so their gradients go through "
    "the host, which is slow. Start one process for each GPU, or use unisono.DataParallel without a launcher."
)

_THE_SAME = (
    "Wrap the same models and take the same steps in every process; for loaders of different lengths use "
    "DataParallel.batches(loader)."
)
_WAITING = (
    "rank {rank} has waited {waited_s:g} s for the others at {doing}; {found}. It goes on when they come, or fails "
    "after {limit_s:g} s. Take the same steps in every process: map and evaluate, too, are called in all."
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
        communicator = _communicators[process_group] = Communicator(process_group, timeout_s)
        try:
            communicator.connect()
        except BaseException as error:  # Ctrl-C too: a half-made connection cannot be used
            communicator.abort(error)
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
        failure_store: what the ranks tell each other beside their collectives.
        reduction: the latest `RankReduction`; None: there has been none.

    Args:
        process_group: the processes.
        timeout_s: the timeout that the user has given, if any.
    """

    def __init__(self, process_group: Any, timeout_s: float | None = None) -> None:
        self.rank: int = process_group.rank()
        self.world_size: int = process_group.size()
        timeout = torch_private.timeout_of_group(process_group)
        self.timeout_s = timeout.total_seconds()
        constants = distributed.constants
        is_default = timeout in (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
        is_default = is_default and timeout_s != self.timeout_s
        self._wrapping_s = min(self.timeout_s, _WRAPPING_S) if is_default else self.timeout_s
        self._ranks = distributed.get_process_group_ranks(process_group)
        self.is_world = self.world_size == distributed.get_world_size()
        self._store = distributed.PrefixStore("unisono", process_group.get_group_store())
        self.failure_store = FailureStore(self._store, self.rank)
        self._check_every_s = max(_CHECK_EVERY_S, self.world_size / 500)
        self._num_barriers = self._num_models = self._num_comparisons = self._num_groups = 0
        self._groups: dict[tuple[tuple[RankDevice, ...], str], Any] = {}
        self._host_groups: set[Any] = set()  # those of gloo
        self._broken: str | None = None
        self.reduction: weakref.ref[Any] | None = None
        self._has_left = False  # whether it has left a collective half-way by an exception that is not known here
        self._raised = ""  # what this rank has published of an exception, after which it has not gone on yet
        self._control: Any = None
        # torch keeps every group until it is destroyed. NCCL's are for the program's end, when all ranks end theirs.
        self._made: list[Any] = []  # of gloo
        weakref.finalize(self, end_groups, self._made).atexit = False
        _reporting.add(self)
        _report_program_end()

    def connect(self) -> None:
        """Wait for all processes, and connect them. To be called once."""
        self.failure_store.register()
        self.barrier(WRAPPING)
        self._control = self._new_group("gloo", "control")
        self.failure_store.locations = self.all_gather_object(self.failure_store.location, "connecting")

    @property
    def broken(self) -> bool:
        """Whether the ranks no longer agree on what comes next: some rank has failed or exited."""
        return self._broken is not None

    def next_model_number(self) -> int:
        """Return how many models have been wrapped for these processes, this one included."""
        self._num_models += 1
        return self._num_models

    def next_comparison(self) -> int:
        """Return how often the ranks have compared what they do, now included; equal on ranks that do the same."""
        self._num_comparisons += 1
        return self._num_comparisons

    # ---- collectives -----------------------------------------------------------------------------

    def barrier(self, name: str) -> None:
        """Wait until every rank has called this as often as this one; errors name the barrier.

        It uses the store only, and so works before the ranks are connected.
        """
        if self._broken is not None:
            raise RuntimeError(self._broken)
        self._num_barriers += 1
        key = f"barrier/{self._num_barriers}"

        def missing() -> list[int]:
            return [rank for rank in range(self.world_size) if not self.failure_store.get(f"{key}/{rank}")]

        def is_complete() -> bool:
            return bool(self._store.add(f"{key}/number", 0) >= self.world_size)

        def raise_if_one_cannot_come() -> None:
            exited = [rank for rank in missing() if self.failure_store.has_exited(rank)]
            if exited and not is_complete():
                raise self._failure_of(exited, f"{ranks_of(exited)} {_has(exited)} ended and did not reach {name}")
            for rank in missing():
                num_comparisons, at = self._place_of(rank)
                if num_comparisons > self._num_comparisons:  # it has gone on, and has left this barrier out
                    text = f"rank {self.rank} is at {name}, and rank {rank} at {at}"
                    self.report_failure(text)
                    raise self._failure(f"the processes do different things: {text}. {_THE_SAME}")

        try:
            first = self._store.compare_set(f"{key}/first", "", f"{self.rank}\n{name}").decode()
            self._store.set(f"{key}/{self.rank}", name)
            self._store.add(f"{key}/number", 1)
            self._wait_until(
                is_complete,
                name,
                lambda: f"{ranks_of(missing())} did not reach it",
                check=raise_if_one_cannot_come,
                limit_s=self._wrapping_s,
            )
            self._raise_if_a_rank_failed(name)  # one that has waited for this rank, and has given up
        except STORE_ERRORS as error:
            raise self._connection_error(error, name) from error
        rank, _, other = first.partition("\n")
        if other != name:
            self.report_failure(f"rank {self.rank} is at {name}, and rank {rank} at {other}")
            raise self._failure(f"rank {rank} is at {other}, and this one, rank {self.rank}, at {name}")

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
        number = self.next_comparison()
        work = self.start(partial(torch_private.all_reduce, tensor, self._control))
        return AllGatherWork(self, work, table, len(values), doing, number)

    def all_reduce(self, tensor: torch.Tensor, doing: str, group: Any = None, comparison: int = 0) -> "AllReduceWork":
        """Start to sum a tensor, a small one if no group is given.

        Args:
            comparison: its number, if the ranks compare what they do by this sum; see `AllReduceWork.wait`.
        """
        group = self._control if group is None else group
        work = self.start(partial(torch_private.all_reduce, tensor, group))
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
        return list(flat), self.start(partial(torch_private.all_gather_into, flat, mine, group))

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
                torch_private.copy_all_in_place(targets, [*bucket.pieces(flat).values()])

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
        # Longer than `_wait_until` waits, whose error names the missing ranks.
        timeout = datetime.timedelta(seconds=self.timeout_s + _MARGIN_S)
        self._num_groups += 1
        try:
            # A name that no other group has had, on which the ranks agree.
            name = self._store.compare_set(f"group/{self._num_groups}", "", uuid.uuid4().hex).decode()
            unbound = contextlib.nullcontext() if self.is_world else torch_private.default_group_unbound()
            with torch_private.group_named(f"unisono {name}"), unbound:
                group = distributed.new_group(
                    self._ranks,
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=True,
                    group_desc=f"unisono: {purpose}",
                )
        except RuntimeError as error:
            raise self._failure(f"the processes could not connect: {_brief(error)}") from error
        if backend == "gloo":
            self._host_groups.add(group)
            self._made.append(group)
        return group

    # ---- waiting -----------------------------------------------------------------------------------

    def start(self, collective: Callable[[], Any]) -> Any:
        """Start an asynchronous collective of torch.distributed, unless this communicator is broken."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if self._raised:
            self._take_back_exception()
        try:
            return collective()
        except RuntimeError as error:
            raise self._connection_error(error, "starting a collective") from error

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
            check, key: as in `_wait_until`.

        Raises:
            RuntimeError: it failed, another rank failed, or the timeout has passed. Says which.
        """
        if self.waits_on_host(group):
            self._wait_until(work.is_completed, doing, check=check, block=partial(_block, work), key=key)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._connection_error(error, doing) from error

    def wait_for_future(self, future: Any, doing: str) -> Any:
        """Wait for a communication hook's future; return its tensor."""
        self._wait_until(future.done, doing)
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._connection_error(error, doing) from error
        return value[0] if isinstance(value, list | tuple) else value

    def _wait_until(
        self,
        is_done: Callable[[], bool],
        doing: str,
        missing: Callable[[], str] | None = None,
        check: Callable[[], None] | None = None,
        block: Callable[[float], None] | None = None,
        key: str = "",
        limit_s: float | None = None,
    ) -> None:
        """Wait; now and then check the store for failures.

        Args:
            missing: says, for messages, which ranks are missing; None: those that do not wait for the same.
            check: a further check, for an `is_done` that asks the store too, which should not be asked too often.
            block: waits for at most so many seconds, less if it is done before; None: sleep instead.
            key: is in the store while this waits for long.
            limit_s: how long to wait; None: `timeout_s`.
        """
        started = last_check = time.monotonic()
        num_checks = 0
        nap_s, longest_nap_s = FIRST_NAP_S, _LONGEST_NAP_S if check is None else self._check_every_s / 4
        limit_s = self.timeout_s if limit_s is None else limit_s
        published = said = False
        raised, raised_at = "", started
        while not is_done():
            now = time.monotonic()
            if now - last_check > self._check_every_s:
                last_check = now
                self._raise_if_a_rank_failed(doing)
                before, raised = raised, self.failure_store.get("raised")
                raised_at = raised_at if raised == before else now
                if now - raised_at > _PATIENCE_S:
                    self._raise_if_a_rank_is_gone(raised, doing)
                num_checks += 1
                if check is not None and num_checks.bit_count() == 1:  # ever less often: it asks about every rank
                    check()
                if not published:
                    published = True
                    self.failure_store.set(f"at/{self.rank}", f"{self._num_comparisons}\n{doing}")
                    if key:
                        self.failure_store.set(key, doing)
                if not said and now - started > (said_after_s := environment.SAID_AFTER_S if missing else _PATIENCE_S):
                    said, times = True, {"waited_s": said_after_s, "limit_s": limit_s}
                    if missing is None:
                        log_once(_WAITING.format(rank=self.rank, doing=doing, found=self._others_at(doing), **times))
                    elif who := missing():
                        log_once(NOT_THERE.format(rank=self.rank, doing=doing, missing=who, **times))
                if now - started > limit_s:
                    self._raise_timeout(doing, missing() if missing else "", limit_s)
            if block is not None:
                block(self._check_every_s)
            else:
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.5, longest_nap_s)
            deliver()
        if published:
            self.failure_store.set(f"at/{self.rank}", "")
            if key:
                self.failure_store.delete(key)

    def _place_of(self, rank: int) -> tuple[int, str]:
        """Return where a rank waits, "" if it does not, and how often it had compared what it does when it began to."""
        num_comparisons, _, doing = self.failure_store.get(f"at/{rank}").partition("\n")
        return int(num_comparisons or 0), doing

    def _others_at(self, doing: str, missing: str = "") -> str:
        """Return where other ranks are while this one waits."""
        others = {rank: self._place_of(rank)[1] for rank in range(self.world_size) if rank != self.rank}
        found = [f"rank {rank} waits at {other}" for rank, other in others.items() if other and other != doing]
        not_waiting = [rank for rank, other in others.items() if not other]
        if missing:
            found.insert(0, missing)
        elif not_waiting:
            found.append(f"{ranks_of(not_waiting)} {'is' if len(not_waiting) == 1 else 'are'} in no collective")
        return "; ".join(found) or "all ranks wait at the same place"

    def _raise_timeout(self, doing: str, missing: str, waited_s: float) -> None:
        found = self._others_at(doing, missing)
        text = f"rank {self.rank} has waited {waited_s:g} s for the others at {doing}; {found}. {_THE_SAME}"
        self.report_failure(text)
        raise self._failure(text)

    def _connection_error(self, error: RuntimeError, doing: str) -> RuntimeError:
        """Return the error to raise after torch.distributed has failed, most often because a rank has exited."""
        deadline = time.monotonic() + _EXIT_S
        while time.monotonic() < deadline:
            self._raise_if_a_rank_failed(doing)
            others = (rank for rank in range(self.world_size) if rank != self.rank)
            exited = [rank for rank in others if self.failure_store.has_exited(rank)]
            if exited:
                # The others learn which ranks ended first, before this one ends too.
                self.failure_store.set("failed", " ".join(map(str, exited)) + "\n", first_only=True)
                return self._failure_of(exited, _ended(exited, doing))
            time.sleep(_REASON_NAP_S)
            deliver()
        return self._failure(f"{doing} failed, and no other rank reports why: {_brief(error)}")

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
        self.abort(error)
        raise error

    # ---- failures ------------------------------------------------------------------------------------

    def report_failure(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on. The first report of all ranks counts."""
        if self._broken is None:
            self.failure_store.set("failed", f"{self.rank}\n{reason[:_MOST_TEXT]}", first_only=True)

    def publish_exception(self, error: BaseException) -> None:
        """Tell the other ranks of an exception after which this one may go on, or not, although its process lives.

        So it is with an actor, whose framework catches what ends its function. If this rank takes part in no collective
        for a while, those that wait for it raise.
        """
        if self._broken is None:
            self._raised = f"{self.rank}\n{described(error)}"[:_MOST_TEXT]
            self.failure_store.set("raised", self._raised)

    def leave(self, text: str) -> None:
        """Do what `abort` does, for an exception that is not known here: others learn it if it ends the program."""
        self._has_left = self._broken is None
        self.abort(RuntimeError(text))

    def report_end(self, reason: str = "") -> None:
        """Tell the other ranks that this program ends, with that reason, or with an exception after which it ended."""
        if self._has_left and reason and self.failure_store.get("failed").partition("\n")[0] == str(self.rank):
            self.failure_store.set("failed", f"{self.rank}\n{reason[:_MOST_TEXT]}")
        elif self._broken is None and (reason or self._raised):
            self.failure_store.set(f"ending/{self.rank}", "ending")  # first: who reads the failure knows it
            self.report_failure(reason or self._raised.partition("\n")[2])

    def _take_back_exception(self) -> None:
        if self.failure_store.get("raised") == self._raised:
            self.failure_store.set("raised", "")
        self._raised = ""

    def _raise_if_a_rank_is_gone(self, raised: str, doing: str) -> None:
        rank, _, reason = raised.partition("\n")
        if rank and int(rank) != self.rank:
            raise self._failure(
                f"rank {rank} raised an exception and has not continued for {_PATIENCE_S:g} s, while this one "
                f"was at {doing}. Rank {rank} says: {reason}"
            )

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one has left a collective half-way, because of `error`."""
        self.report_failure(described(error))
        if self._broken is None:
            self._break(
                f"this process left a collective half-way ({described(error)}), so the processes "
                "no longer agree on the next one. Restart them."
            )

    def _raise_if_a_rank_failed(self, doing: str) -> None:
        rank, _, reason = self.failure_store.get("failed").partition("\n")
        failed = [*map(int, rank.split())]
        if not failed or self.rank in failed:
            return
        says = f"rank {rank} failed while this one was at {doing}. Rank {rank} says: "
        error = self._failure_of(failed, f"{says}{reason}" if reason else _ended(failed, doing))
        more = self.failure_store.get("failed").partition("\n")[2]  # a failed rank may have said more when it ended
        raise error if more in ("", reason) else RuntimeError(f"{says}{more}")

    def break_in_child(self) -> None:
        """In a process forked by this one: take part in nothing."""
        self._broken = (
            f"this process was forked by rank {self.rank} and takes no part in the training of the ranks. "
            "Use model.module in it, or torch.no_grad()."
        )

    def end(self, why: str) -> None:
        """End the groups. Their collectives have ended; a later one is an error."""
        self._broken = f"the processes are no longer connected: {why}"
        others = [group for group in self._groups.values() if group not in self._host_groups]
        self._control = None
        self._groups.clear()
        self._host_groups.clear()
        end_groups(self._made)
        end_groups(others)

    def _failure_of(self, ranks: Sequence[int], text: str) -> RuntimeError:
        """Return the error of this rank for a failure of others: later than these end, so that they are blamed."""
        error, have_ended, started = self._failure(text), False, time.monotonic()
        limit_s = _SLOW_EXIT_S if any(self.failure_store.get(f"ending/{rank}") for rank in ranks) else _EXIT_S
        while (waited_s := time.monotonic() - started) < limit_s:
            if not have_ended and all(map(self.failure_store.has_exited, ranks)):
                have_ended, limit_s = True, waited_s + _BLAME_S
            time.sleep(_REASON_NAP_S)
            deliver()
        return error

    def _failure(self, text: str) -> RuntimeError:
        self._break(text)
        return RuntimeError(text)

    def _break(self, text: str) -> None:
        self._broken = text
        environment.failed.set()
        _groups_of_broken.append((self._control, self._groups, [*self._made]))
        self._made.clear()
        # A collective that waits on an accelerator for a missing rank never ends by itself.
        for group in {id(group): group for group in self._groups.values()}.values():
            torch_private.abort_group(group)


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

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self._work.is_completed())

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
        if self._communicator.failure_store.get(_gathering(self._comparison)):
            raise GatheredElsewhereError


def _gathering(number: int) -> str:
    """Return the key that is in the store while some rank waits for long in its all-gather of that number."""
    return f"gathering/{number}"


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
# Kept as long as the process: in older releases of torch, destroying a group of gloo while a transfer of it fails is a
# deadlock. The destructor holds the GIL and waits for gloo's thread, which waits for the GIL to free the tensors.
_groups_of_broken: list[Any] = []
_reporting: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


@functools.cache  # once in a process
def _report_program_end() -> None:
    """From now on, have communicators report an exception that ends this program, and its end."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        for communicator in list(_reporting):
            communicator.report_end(described(error))
        before(kind, error, traceback)

    sys.excepthook = report
    atexit.register(_end_communicators)


def end_groups(groups: "list[Any]") -> None:
    """Destroy process groups that torch still knows, each once; the list is empty then."""
    while groups:
        group = groups.pop()
        if group is not None and group not in groups and distributed.is_initialized():
            with contextlib.suppress(ValueError, RuntimeError):  # the program has destroyed them all
                distributed.destroy_process_group(group)


def _after_fork() -> None:
    for process_group, communicator in list(_communicators.items()):
        communicator.break_in_child()
        for group in (process_group, communicator._control, *communicator._groups.values()):
            leak_process_group(group)
        communicator._made.clear()


in_forked_child(_after_fork)


def _end_communicators() -> None:
    """Tell the other ranks that this program ends, and end the groups, while the interpreter still runs.

    gloo's threads free the tensors of a collective a little after its end. In an interpreter that has ended, that
    aborts the process, and a launcher would start again what was finished.
    """
    for communicator in list(_reporting):
        communicator.report_end()
        communicator.failure_store.report_exit()
        if not communicator.broken and os.getpid() == communicator.failure_store.pid:
            communicator.end("the program ends")


@functools.lru_cache(maxsize=64)
def digest_of(text: str) -> int:
    """Return a hash of a text that is the same in every process, and exact in double precision."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


def _block(work: Any, timeout_s: float) -> None:
    """Wait for `work`, at most so long; the caller checks then whether it is done or has failed."""
    with contextlib.suppress(RuntimeError):
        work.wait(datetime.timedelta(seconds=timeout_s))


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _ended(ranks: Sequence[int], doing: str) -> str:
    return f"{ranks_of(ranks)} {_has(ranks)} ended while this one was at {doing}"


def _brief(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
