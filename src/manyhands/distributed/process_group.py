"""The processes that train one model together, seen from one of them.

torch.distributed carries everything between them; nothing of it is built again here. What is added is what it leaves
to its users: to notice that the others do something else, to say who has failed and why, and to end every wait.

Guarantees
    - Whoever waits for the others looks now and then whether one of them has failed, and raises an error that says
      which one and why.
    - A wait ends at the latest with the process group's timeout, with an error that names who did not come.
    - After such an error the processes no longer agree on what comes next; every later exchange raises it again.

Assumes that all processes make their communicators, wrap their models and exchange values in the same order. Where a
difference can be seen, the error names the first one.
"""

import atexit
import contextlib
import ctypes
import datetime
import hashlib
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from manyhands.distributed.environment import start_default_group
from manyhands.distributed.failure_store import STORE_ERRORS, FailureStore, machine
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.buckets import Form, buckets_of

_FIRST_NAP_S, _LONGEST_NAP_S = 0.00005, 0.002
_LOOK_EVERY_S = 0.2  # how often one who waits asks the store about failures; with many processes, less often
_LAST_WORDS_S = 2.0  # how long to wait for the reason, when a connection has been lost
_LAST_WORDS_NAP_S = 0.05
_MARGIN_S = 5.0
_MOST_TEXT = 2000
_LENGTH = 16  # of what is gathered
_REPORTING_MISMATCH = "reporting a mismatch"

_NOT_IN_GROUP = -100  # torch.distributed.GroupMember.NON_GROUP_MEMBER

distributed: Any = torch.distributed


def communicator_for(process_group: Any = None) -> "Communicator | None":
    """Return the processes that belong together; None where this process is alone.

    Args:
        process_group: of whom it consists. None: of all processes that the launcher has started, or that are in the
            default process group; this process is alone if there is neither. False: it is alone in any case.

    Raises:
        TypeError: `process_group` is none of these.
        ValueError: it is a group to which this process does not belong.
        RuntimeError: the launcher's variables are incomplete, or processes are missing.
    """
    if process_group is False:
        return None
    if process_group is None:
        if not start_default_group():
            return None
        process_group = distributed.group.WORLD
    elif type(process_group) is int and process_group == _NOT_IN_GROUP:
        raise ValueError(
            "process_group: this process does not belong to it (torch.distributed.new_group has returned "
            "GroupMember.NON_GROUP_MEMBER). Wrap the model in the processes of the group only, or with "
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
        except BaseException as error:  # Ctrl-C, for one: who has half met them cannot go on with them
            communicator.abort(error)
            raise
    return _communicators[process_group]


class Communicator:
    """Some processes, of which this is one.

    Attributes:
        rank, world_size: this process's place among them, and how many they are.
        timeout_s: how long one waits for the others.
        is_world: whether these are all processes of the program.
    """

    def __init__(self, process_group: Any) -> None:
        self.rank: int = process_group.rank()
        self.world_size: int = process_group.size()
        self.timeout_s = torch_private.timeout_of_group(process_group).total_seconds()
        self._ranks = distributed.get_process_group_ranks(process_group)
        self.is_world = self.world_size == distributed.get_world_size()
        self._store = distributed.PrefixStore("manyhands", process_group.get_group_store())
        self._failure_store = FailureStore(self._store, self.rank)
        self._look_every_s = max(_LOOK_EVERY_S, self.world_size / 500)
        self._num_arrivals = self._num_models = 0
        self._groups: dict[tuple[str, str], Any] = {}
        self._broken: str | None = None
        self._control: Any = None
        _report_the_end_to(self)

    def connect(self) -> None:
        """Wait for all processes, and connect them. To be called once."""
        self._failure_store.introduce()
        self.barrier("a DataParallel that spans processes")
        self._control = self._new_group("gloo", "control")
        self._failure_store.places = self.all_gather_object(self._failure_store.place, "connecting")

    @property
    def broken(self) -> bool:
        """Whether the processes no longer agree on what comes next: some have failed, or gone."""
        return self._broken is not None

    def next_model_number(self) -> int:
        """Return how many models have been wrapped for these processes, this one included."""
        self._num_models += 1
        return self._num_models

    def __deepcopy__(self, memo: object) -> "Communicator":
        return self  # a copied model belongs to the same processes

    def __reduce__(self) -> tuple[Callable[[], "Communicator | None"], tuple[()]]:
        return communicator_for, ()

    # ---- exchanging values -----------------------------------------------------------------------

    def barrier(self, at: str) -> None:
        """Wait until every process has come here as often as this one; `at` says in messages where that is.

        It goes through the store, and so works before there is any connection between the processes.
        """
        self._raise_if_broken()
        self._num_arrivals += 1
        key = f"arrival/{self._num_arrivals}"

        def missing() -> list[int]:
            return [rank for rank in range(self.world_size) if not self._failure_store.text(f"{key}/{rank}")]

        def all_there() -> bool:
            return bool(self._store.add(f"{key}/number", 0) >= self.world_size)

        def look() -> None:
            gone = [rank for rank in missing() if self._failure_store.has_gone(rank)]
            if gone and not all_there():
                raise self._failure(f"{ranks_of(gone)} {_has(gone)} ended and did not come to {at}")

        try:
            first = self._store.compare_set(f"{key}/first", "", f"{self.rank}\n{at}").decode()
            self._store.set(f"{key}/{self.rank}", at)
            self._store.add(f"{key}/number", 1)
            self._wait_until(all_there, at, lambda: f"{ranks_of(missing())} did not come to it", look)
        except STORE_ERRORS as error:
            raise self._connection_error(error, at) from error
        rank, _, other = first.partition("\n")
        if other != at:
            self.report_failure(f"rank {self.rank} has come to {at}, and rank {rank} to {other}")
            raise self._failure(f"rank {rank} has come to {other}, and this one, rank {self.rank}, to {at}")

    def all_gather(self, values: Sequence[float], doing: str) -> "AllGatherWork":
        """Begin to send some numbers to everybody; whole numbers are exact below 2**53.

        Args:
            values: not many; as many as the others give who do the same.
            doing: says what is being done. Where others do something else, it becomes an error that names both.
        """
        numbers = [digest_of(doing), *values]
        numbers += [0.0] * (_LENGTH - len(numbers))  # equal lengths, so that those can meet who do not do the same
        mine = torch.tensor(numbers, dtype=torch.float64)
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = self.start(lambda: distributed.all_gather(everybody, mine, group=self._control, async_op=True))
        return AllGatherWork(self, work, everybody, len(values), doing)

    def all_reduce(self, tensor: torch.Tensor, group: Any, doing: str) -> torch.Tensor:
        """Sum a tensor over the processes, in place; return it."""
        self.wait(self.start(lambda: distributed.all_reduce(tensor, group=group, async_op=True)), doing, group)
        return tensor

    def all_reduce_sparse(self, tensor: torch.Tensor, group: Any, doing: str) -> torch.Tensor:
        """Return the sum of the processes' sparse tensors, which are coalesced, as this one."""
        lengths = [int(length) for (length,) in self.all_gather([tensor._nnz()], doing).wait()]
        indices = torch.cat(self._all_of_lengths(lengths, tensor.indices().t(), group, doing))
        values = torch.cat(self._all_of_lengths(lengths, tensor.values(), group, doing))
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()

    def _all_of_lengths(self, lengths: Sequence[int], mine: torch.Tensor, group: Any, doing: str) -> list[torch.Tensor]:
        """Return every process's tensor, in rank order; they differ in their `lengths` only."""
        padded = mine.new_zeros(max(lengths), *mine.shape[1:])
        padded[: len(mine)] = mine
        everybody = [torch.empty_like(padded) for _ in lengths]
        self.wait(self.start(partial(distributed.all_gather, everybody, padded, group, True)), doing, group)
        return [tensor[:length] for tensor, length in zip(everybody, lengths, strict=True)]

    def all_reduce_flags(self, flags: torch.Tensor, doing: str) -> Callable[[], None]:
        """Begin to sum a tensor of small whole numbers on the CPU, in place; return what waits for it."""
        work = self.start(lambda: distributed.all_reduce(flags, group=self._control, async_op=True))
        return lambda: self.wait(work, doing)

    def all_gather_object(self, value: Any, doing: str) -> list[Any]:
        """Return what every process gives, in rank order. For rare occasions: values are pickled."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(length) for (length,) in self.all_gather([len(mine)], doing).wait()]
        everybody = self._all_of_lengths(lengths, mine, self._control, doing)
        return [pickle.loads(ctypes.string_at(tensor.data_ptr(), len(tensor))) for tensor in everybody]

    def broadcast_object(self, value: Any, doing: str) -> Any:
        """Return what the first process gives. For rare occasions: it is pickled."""
        pickled = bytearray(pickle.dumps(value) if self.rank == 0 else b"")
        (length,), *_ = self.all_gather([len(pickled)], doing).wait()
        pickled = pickled or bytearray(int(length))
        octets = torch.frombuffer(pickled, dtype=torch.uint8)
        first = self._ranks[0]
        self.wait(self.start(lambda: distributed.broadcast(octets, first, self._control, async_op=True)), doing)
        return pickle.loads(pickled)

    def broadcast(self, source: int, tensors: Sequence[torch.Tensor], group: Any, doing: str) -> Callable[[], None]:
        """Begin to overwrite `tensors` by what the process of rank `source` has; return what waits for it."""
        forms = {i: Form.of(tensor.detach(), tensor.device) for i, tensor in enumerate(tensors) if tensor.numel()}
        flying = []
        for bucket in buckets_of(forms):
            flat = bucket.flat(tensors)
            octets = flat.view(torch.uint8)  # every dtype travels alike
            send = partial(distributed.broadcast, octets, self._ranks[source], group, True)
            flying.append((bucket, flat, self.start(send)))

        def wait() -> None:
            for bucket, flat, work in flying:
                self.wait(work, doing, group)
                for number, piece in bucket.pieces(flat).items() if self.rank != source else ():
                    # Not seen by autograd: most buffers are constants, which graphs have kept for their backward.
                    tensors[number].data.copy_(piece)

        return wait

    def group_for(self, device: torch.device, purpose: str) -> Any:
        """Return the process group for tensors on `device`, one for each purpose: their exchanges may overlap.

        NCCL or its like where every process has an accelerator of its own, gloo otherwise. To be asked for the first
        time by all processes at once.
        """
        if (str(device), purpose) in self._groups:
            return self._groups[str(device), purpose]
        # Several processes on one GPU cannot talk by NCCL.
        places = self.all_gather_object((machine(), _devices.identity(device)), "choosing how to talk to each other")
        alone = len(set(places)) == self.world_size and not _devices.computes_on_host(device)
        backend = distributed.get_default_backend_for_device(device) if alone else "gloo"
        group = self._groups[str(device), purpose] = self._new_group(backend, purpose)
        return group

    def _new_group(self, backend: str, purpose: str) -> Any:
        # Longer than one waits here, where it can be said who has not come.
        timeout = datetime.timedelta(seconds=self.timeout_s + _MARGIN_S)
        try:
            return distributed.new_group(
                self._ranks,
                timeout=timeout,
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"manyhands: {purpose}",
            )
        except RuntimeError as error:
            raise self._failure(f"the processes could not be connected: {_brief(error)}") from error

    # ---- waiting -----------------------------------------------------------------------------------

    def start(self, begin: Callable[[], Any]) -> Any:
        """Begin something that torch.distributed does meanwhile, unless the processes no longer agree."""
        self._raise_if_broken()
        try:
            return begin()
        except RuntimeError as error:
            raise self._connection_error(error, "starting an exchange") from error

    def wait(self, work: Any, doing: str, group: Any = None) -> None:
        """Wait for `work`, done in `group`; on an accelerator's own backend, have the current stream wait.

        Raises:
            RuntimeError: it failed, somebody else failed, or nobody came in time. Says which.
        """
        if group is None or distributed.get_backend(group) == "gloo":
            self._wait_until(work.is_completed, doing, block=partial(_block, work))
        try:
            work.wait()
        except RuntimeError as error:
            raise self._connection_error(error, doing) from error

    def wait_for_future(self, future: Any, doing: str) -> Any:
        """Return the tensor that a communication hook's future brings."""
        self._wait_until(future.done, doing)
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._connection_error(error, doing) from error
        return value[0] if isinstance(value, list | tuple) else value

    def _wait_until(
        self,
        done: Callable[[], bool],
        doing: str,
        who: Callable[[], str] = lambda: "",
        look: Callable[[], None] | None = None,
        block: Callable[[float], None] | None = None,
    ) -> None:
        """Wait; now and then look at the store.

        Args:
            who: says in a message who has not come.
            look: what else to look at; given where `done` asks the store too, which is not to be asked too often.
            block: waits for so many seconds at most, and is woken as soon as it is done; None: there is no such thing.
        """
        started = last_look = time.monotonic()
        num_looks = 0
        nap_s, longest_nap_s = _FIRST_NAP_S, _LONGEST_NAP_S if look is None else self._look_every_s / 4
        told = False
        while not done():
            now = time.monotonic()
            if now - last_look > self._look_every_s:
                last_look = now
                self._raise_if_a_rank_failed(doing)
                num_looks += 1
                if look is not None and num_looks.bit_count() == 1:  # ever less often: it asks about every process
                    look()
                if not told:
                    told = True
                    self._failure_store.say(f"at/{self.rank}", doing)
                if now - started > self.timeout_s:
                    self._raise_timeout(doing, who())
            if block is not None:
                block(self._look_every_s)
            else:
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.5, longest_nap_s)
        if told:
            self._failure_store.say(f"at/{self.rank}", "")

    def _raise_timeout(self, doing: str, who: str) -> None:
        places = {rank: self._failure_store.text(f"at/{rank}") for rank in range(self.world_size) if rank != self.rank}
        found = [f"rank {rank} waits at {place}" for rank, place in places.items() if place and place != doing]
        silent = [rank for rank, place in places.items() if not place]
        if who:
            found.insert(0, who)
        elif silent:
            found.append(f"{ranks_of(silent)} {'does' if len(silent) == 1 else 'do'} not wait for anybody")
        text = (
            f"rank {self.rank} has waited {self.timeout_s:g} s for the others at {doing}; "
            f"{'; '.join(found) or 'all wait at the same'}. Every process has to wrap the same models and to take the "
            "same steps; for loaders of different lengths there is DataParallel.batches(loader)."
        )
        self.report_failure(text)
        raise self._failure(text)

    def _connection_error(self, error: RuntimeError, doing: str) -> RuntimeError:
        """Return what is to be raised where torch.distributed has failed, most often because somebody has gone."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            self._raise_if_a_rank_failed(doing)
            gone = [rank for rank in range(self.world_size) if rank != self.rank and self._failure_store.has_gone(rank)]
            if gone:
                return self._failure(f"{ranks_of(gone)} {_has(gone)} ended while this one was at {doing}")
            time.sleep(_LAST_WORDS_NAP_S)
        return self._failure(f"{doing} has failed, and no other process says why: {_brief(error)}")

    def raise_mismatch(self, doing: str) -> None:
        """Raise an error that says what the processes have come to; all of them call it."""
        all_do = None
        while all_do is None:  # until the others, who may have begun more than one exchange, have noticed it too
            with contextlib.suppress(_NotNoticedError):
                all_do = self.all_gather_object(doing, _REPORTING_MISMATCH)
        other = next((rank for rank, other in enumerate(all_do) if other != all_do[0]), None)
        where = (
            f"rank 0 is at {all_do[0]}, rank {other} at {all_do[other]}"
            if other is not None
            else (f"all are at {doing}, but not at the same one")
        )
        error = RuntimeError(
            f"the processes do not do the same: {where}. Every process has to take the same steps; for loaders of "
            "different lengths there is DataParallel.batches."
        )
        self.abort(error)
        raise error

    # ---- failures ------------------------------------------------------------------------------------

    def report_failure(self, reason: str) -> None:
        """Tell the others that this process will not go on; only the first to do so is heard."""
        if self._broken is None:
            self._failure_store.say("failed", f"{self.rank}\n{reason[:_MOST_TEXT]}", first_only=True)

    def abort(self, error: BaseException) -> None:
        """Tell the others that this process has ended an exchange half-way, because of `error`."""
        self.report_failure(f"{type(error).__name__}: {error}")
        if self._broken is None:
            self._broken = (
                f"this process has left an exchange with the others half-way ({type(error).__name__}: {error}): the "
                "processes no longer agree on what comes next. Restart them."
            )

    def _raise_if_a_rank_failed(self, doing: str) -> None:
        rank, _, reason = self._failure_store.text("failed").partition("\n")
        if not rank or int(rank) == self.rank:
            return
        # A launcher takes whoever ends first for the cause: that is to be the one that has failed.
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline and not self._failure_store.has_gone(int(rank)):
            time.sleep(_LAST_WORDS_NAP_S)
        raise self._failure(f"rank {rank} has failed while this one was at {doing}. Rank {rank} says: {reason}")

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if os.getpid() != self._failure_store.pid:
            raise RuntimeError(
                f"this is a process forked by rank {self.rank}: it does not belong to the processes that train the "
                "model together. Use model.module in it, or torch.no_grad()."
            )

    def _failure(self, text: str) -> RuntimeError:
        self._broken = text
        return RuntimeError(text)

    def report_exit(self) -> None:
        """Tell the others that this process's program has ended."""
        self._failure_store.end()


class _NotNoticedError(Exception):
    """Some process does not know yet that the processes do not do the same."""


class AllGatherWork:
    """Numbers on their way from everybody to everybody."""

    def __init__(
        self, communicator: Communicator, work: Any, everybody: Sequence[torch.Tensor], num_values: int, doing: str
    ) -> None:
        self._communicator, self._work, self._everybody = communicator, work, everybody
        self._num_values, self._doing = num_values, doing

    def is_completed(self) -> bool:
        """Return whether there is nothing to wait for."""
        return bool(self._work.is_completed())

    def wait(self) -> list[list[float]]:
        """Wait for all; return each process's numbers, in rank order.

        Raises:
            RuntimeError: some process does something else.
        """
        self._communicator.wait(self._work, self._doing)
        digests, *columns = zip(*(tensor.tolist() for tensor in self._everybody), strict=True)
        if len(set(digests)) > 1:
            if self._doing == _REPORTING_MISMATCH:
                raise _NotNoticedError
            self._communicator.raise_mismatch(self._doing)
        return [list(row) for row in zip(*columns[: self._num_values], strict=True)]


_communicators: "weakref.WeakKeyDictionary[Any, Communicator]" = weakref.WeakKeyDictionary()
_reporting: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
_is_reporting = False
_lock = threading.Lock()


def _report_the_end_to(communicator: Communicator) -> None:
    """From now on, tell `communicator` when an exception ends this program, and when it ends."""
    global _is_reporting  # noqa: PLW0603 - once in a process
    with _lock:
        _reporting.add(communicator)
        if _is_reporting:
            return
        _is_reporting = True
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        for communicator in list(_reporting):
            communicator.report_failure(f"{kind.__name__}: {error}")
        before(kind, error, traceback)

    sys.excepthook = tell
    atexit.register(_report_exits)


def _report_exits() -> None:
    for communicator in list(_reporting):
        communicator.report_exit()


def digest_of(text: str) -> int:
    """Return a number that is the same in every process for the same text, and exact in double precision."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())


def ranks_of(ranks: Iterable[int]) -> str:
    """Return ranks in words."""
    ranks = list(ranks)
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _block(work: Any, at_most_s: float) -> None:
    """Wait for `work`, but no longer than so. Whether it is done, and has failed, is to be asked then."""
    with contextlib.suppress(RuntimeError):
        work.wait(datetime.timedelta(seconds=at_most_s))


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _brief(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
