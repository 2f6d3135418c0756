"""All-gathers among replicas that run at the same time.

`Exchange` decides, in one place, when an all-gather is complete. Its replicas run in threads of this process.

    replica i:   submit a request (name, value) ──► wait ──► result: the values of all replicas
                 withdraw, at the end of its pass

Guarantees
    - Every replica gets the values of all replicas, in replica order.
    - The replicas request the same all-gathers in the same order. Where the data leads them different ways, the lowest
      replica that waits raises an error that says where each replica is.
    - A purpose may not need replicas that have withdrawn: the values are then those of the replicas that still run.
    - No replica waits for ever. When a replica has failed, every other one goes on to its own end with its own values:
      the caller gets the error, and what the others compute is dropped.

Assumes that every replica withdraws, however it ends, and that the replicas do run at the same time.
"""

import abc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from unisono.runtime import timeline
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import ReplicaNames, log, log_once
from unisono.runtime.interrupts import WAKE_S, deliver, uninterruptible
from unisono.runtime.rng import waiting_for_others
from unisono.runtime.stuck_threads import StuckThreads, places_of_threads, threads_timed_out
from unisono.runtime.thread_pool import PassContext, ReplicaContext, inside_replica

T = TypeVar("T")


class Purpose(abc.ABC):
    """What an all-gather is for: each use has a subclass, and its requests carry that class."""

    # The error where the data leads the replicas different ways; {ways} is where each one is.
    went_different_ways: ClassVar[str]
    # Whether the result needs the values of replicas that have withdrawn. If not, it has the others' values, and a
    # request's value says whether an exception is on its way through the replica.
    needs_withdrawn: ClassVar[bool] = True

    @staticmethod
    def describe(request: "Request") -> str:
        """Return what a replica called, in words."""
        return request.name


@dataclass(frozen=True)
class Result:
    """The result of an all-gather, which the replicas of a process share."""

    # The replicas' values, in replica order. With a cross-process all-gather: each process's value, by rank.
    values: dict[int, Any]
    number: int  # identifies this all-gather, for the one in backward
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _combined: list[Any] = field(default_factory=list, repr=False, compare=False)

    def once(self, combine: Callable[[dict[int, Any]], T]) -> T:
        """Return `combine(values)`, which the first replica that asks computes for all of them."""
        with self._lock:
            if not self._combined:
                self._combined.append(combine(self.values))
        combined: T = self._combined[0]
        return combined


class CrossProcess(Protocol):
    """From the name of a request and the values of this process's replicas to the value of each process, by rank.

    Attributes:
        one_kind_of_device: as in `Exchange`.
    """

    @property
    def one_kind_of_device(self) -> bool: ...

    def __call__(self, name: str, values: Mapping[int, Any], /) -> dict[int, Any]: ...


class Request(NamedTuple):
    """What a replica submits to take part in an all-gather."""

    purpose: type[Purpose]  # what it is for
    name: str  # of what is exchanged
    value: Any  # the replica's value
    forward: int | None = None  # in backward, the number of the all-gather in forward that this is the backward of

    @property
    def key(self) -> tuple[type[Purpose], str, int | None]:
        """What the requests of all replicas have in common."""
        return self.purpose, self.name, self.forward

    def __str__(self) -> str:
        return self.purpose.describe(self)


LOGGED_AFTER_S = 10.0  # without progress; sooner where the replicas that have not come do not move
_NO_PROGRESS = (
    "no progress for {seconds:.0f} s, while replicas wait for each other: {places}. If one waits for a lock "
    "that another one holds, this is a deadlock: release the lock around that call of the model, or give "
    "timeout=."
)

# What a request gets: its result, or why the replicas cannot go on.
Response: TypeAlias = Result | str


class Exchange:
    """The all-gathers of replicas 0 to `num_replicas` - 1, in one pass.

    Attributes:
        failed: whether some replica is known to have failed, so that results are of the replica's own values.
        one_kind_of_device: whether all whose values meet here compute on devices of one kind.
        error: what `cross_process` has raised, or a `ReplicaTimeout`. After that no other replica gets a result.
        threads: in which replicas of this process take part, by index.

    Args:
        num_replicas: how many replicas take part.
        cross_process: takes the name of a request and the values of this process's replicas; returns the values of
            all processes, which become the result. None: there are no other processes.
        timeout_s: for how long a replica waits while none submits or withdraws; None: for ever. Then every replica that
            waits raises `ReplicaTimeout`, and so does one that comes later. Where replica 0 is the one that does not
            come, the caller's own thread is stuck, and nothing can be raised there: the error is logged, too.
        names: of the replicas, for messages.
    """

    def __init__(
        self,
        num_replicas: int,
        cross_process: CrossProcess | None = None,
        timeout_s: float | None = None,
        names: ReplicaNames | None = None,
    ) -> None:
        self._timeout_s, self._names, self._progress_at = timeout_s, names, time.monotonic()
        self.threads: dict[int, int] = {}
        self._stuck: StuckThreads | None = None
        self._cross_process = cross_process
        self.failed = self._is_logged = False
        self.one_kind_of_device = cross_process is None or cross_process.one_kind_of_device
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._withdrawn: set[int] = set()
        self._cut_off: dict[int, str] = {}  # replicas whose requests have no result, and why
        self._present = set(range(num_replicas))  # have not withdrawn
        self._waiting: dict[int, tuple[Request, Callable[[Response], None]]] = {}  # by replica

    def all_gather(self, index: int, request: Request) -> Result:
        """Submit replica `index`'s request; wait for the other replicas' and return all values.

        Raises:
            RuntimeError: another replica is at another all-gather, or has ended.
        """
        response = self.submit_and_wait(index, request)
        if isinstance(response, str):
            raise RuntimeError(response)
        return response

    @uninterruptible
    def submit_and_wait(self, index: int, request: Request) -> Response:
        """Submit a request; wait for the response."""
        responses: list[Response] = []
        with timeline.during(timeline.WAIT), waiting_for_others(), self._condition:
            if self.error is None:
                self.submit(index, request, responses.append)
            while not responses:
                if self.error is not None:
                    raise self.error
                self._condition.wait(WAKE_S)
                deliver()
                self._check_progress()
        return responses[0]

    def _check_progress(self) -> None:
        """Take note of an error if no replica has submitted or withdrawn for too long while some wait."""
        if self.error is not None or not self._waiting:
            return
        waited_s = time.monotonic() - self._progress_at
        self._stuck = self._stuck or StuckThreads()
        late = [self.threads[i] for i in sorted(self._present - self._waiting.keys()) if i in self.threads]
        if not self._is_logged and (waited_s > LOGGED_AFTER_S or self._stuck.are_found(late, waited_s)):
            self._is_logged = True
            self._log_places(waited_s)
        if self._timeout_s is None or waited_s <= self._timeout_s:
            return
        stuck = {i: self.threads.get(i, 0) for i in sorted(self._present - self._waiting.keys())}
        self.error = threads_timed_out(stuck, self._timeout_s, self._names)
        if 0 not in self._waiting:
            log.error("%s", self.error)
        self._condition.notify_all()

    def _log_places(self, waited_s: float) -> None:
        """Log where each replica of this process is: one may wait for what another one holds, for ever."""
        places = places_of_threads(self.threads)
        texts = []
        for i in sorted(self._present & self.threads.keys()):
            waits = f" waits for the others at {self._waiting[i][0]}," if i in self._waiting else " has not come:"
            texts.append(f"{self._names[i] if self._names else f'replica {i}'}{waits} {places.get(i, 'place unknown')}")
        log_once(_NO_PROGRESS.format(seconds=waited_s, places="; ".join(texts)))

    def submit(self, index: int, request: Request, callback: Callable[[Response], None]) -> None:
        """Submit a replica's request; `callback` is called with the response, now or as soon as it is known."""
        with self._condition:
            self._progress_at = time.monotonic()
            self._waiting[index] = request, callback
            self._respond()

    def withdraw(self, index: int, *, failed: bool) -> None:
        """Let no other replica wait for replica `index` any more."""
        with self._condition:
            self._progress_at = time.monotonic()
            self.failed |= failed
            self._present.discard(index)
            self._withdrawn.add(index)
            self._waiting.pop(index, None)
            self._respond()
            error = self._cut_off.pop(index, None)
        if error is not None and not failed:
            raise RuntimeError(error)  # it went on, under settings that may not be its own

    def is_last(self, index: int) -> bool:
        """Return whether all other replicas have withdrawn."""
        return self._present == {index}

    def _respond(self) -> None:
        """Respond to the replicas that wait, if all wait that have not withdrawn, or if one has failed."""
        if not self._waiting or not (self.failed or self._present <= self._waiting.keys()):
            return
        requests = {index: request for index, (request, _) in sorted(self._waiting.items())}
        for index, response in self._responses(requests).items():
            _, callback = self._waiting.pop(index)
            callback(response)
        self._condition.notify_all()

    def _responses(self, requests: Mapping[int, Request]) -> dict[int, Response]:
        changes = {i: request for i, request in requests.items() if not request.purpose.needs_withdrawn}
        if changes and (self.failed or len(changes) == len(requests)):
            others = {i: request for i, request in requests.items() if i not in changes}
            return self._changes(changes) if not others else self._responses(others)
        alone: dict[int, Response] = {i: Result({i: request.value}, next(_numbers)) for i, request in requests.items()}
        if self.failed:
            return alone
        if self._withdrawn or len({request.key for request in requests.values()}) > 1:
            self.failed = True
            lowest = min(requests, key=lambda i: (not (i in changes and requests[i].value), i))
            text = requests[lowest].purpose.went_different_ways.format(ways=_ways(requests, self._withdrawn))
            own: Response = text
            if lowest in changes:
                self._cut_off[lowest] = text
                self._present.discard(lowest)
                if requests[lowest].value:  # it raises already: its own error says more
                    own = Result({}, next(_numbers))
            return {i: response for i, response in {**alone, lowest: own}.items() if i not in changes or i == lowest}
        values = {index: request.value for index, request in requests.items()}
        if self._cross_process is not None:
            try:
                values = self._cross_process(next(iter(requests.values())).name, values)
            except BaseException as error:
                self.error = error
                self._condition.notify_all()
                raise
        return dict.fromkeys(requests, Result(values, next(_numbers)))

    def _changes(self, requests: Mapping[int, Request]) -> dict[int, Response]:
        """Respond to requests that do not need withdrawn replicas, where no replica waits for anything else.

        If they differ, one replica is cut off: one that raises already, else the lowest, which then does. The others
        go on without it.
        """
        cut_off: dict[int, Response] = {i: Result({}, next(_numbers)) for i in requests if i in self._cut_off}
        if cut_off or not self._present <= requests.keys():
            return cut_off
        if len({request.key for request in requests.values()}) == 1:
            values = {i: request.value for i, request in requests.items()}
            return dict.fromkeys(requests, Result(values, next(_numbers)))
        self.failed = True
        lowest = min(requests, key=lambda i: (not requests[i].value, i))
        text = requests[lowest].purpose.went_different_ways.format(ways=_ways(requests, self._withdrawn))
        self._cut_off[lowest] = text
        self._present.discard(lowest)
        return {lowest: Result({}, next(_numbers)) if requests[lowest].value else text}


def _ways(requests: Mapping[int, Request], ended: Set[int]) -> str:
    """Return in words at which request each replica is, and which replicas have ended."""
    replicas_at: dict[tuple[type[Purpose], str, int | None], list[int]] = {}
    for index, request in requests.items():
        replicas_at.setdefault(request.key, []).append(index)
    ways = [f"{_replicas(at)} called {requests[at[0]]}" for at in replicas_at.values()]
    if ended:
        ways.append(f"{_replicas(sorted(ended))} called no further one")
    return ", ".join(ways)


def _replicas(indices: Sequence[int]) -> str:
    return ("replica " if len(indices) == 1 else "replicas ") + " and ".join(map(str, indices))


_numbers = itertools.count()


# ---- the exchange of the calling thread -----------------------------------------------------------


def exchanging(num_replicas: int, new_exchange: Callable[[int], Exchange]) -> PassContext:
    """Return the context of a pass in which the replicas can exchange values.

    A pass inside a replica has no exchange: its replicas run one after the other.

    Args:
        new_exchange: makes the exchange of so many replicas for one pass.
    """

    @contextmanager
    def one_pass() -> Iterator[ReplicaContext]:
        exchange = None if inside_replica() else new_exchange(num_replicas)
        yield lambda index: taking_part(exchange, index)

    return one_pass


@contextmanager
def taking_part(exchange: Exchange | None, index: int) -> Iterator[None]:
    """The context in which the calling thread is replica `index` of an exchange; at its end the replica withdraws.

    It goes around everything that uses the exchange.
    """
    before = current_exchange()
    _thread.exchange = exchange
    if exchange is not None:
        exchange.threads[index] = threading.get_ident()
        _thread.outermost = exchange
    failed = True
    try:
        yield
        failed = False
    finally:
        _thread.exchange = before
        if exchange is not None:
            _thread.outermost = None
            exchange.withdraw(index, failed=failed)


def current_exchange() -> Exchange | None:
    """Return the exchange in which the calling thread takes part; None if it takes part in none."""
    return getattr(_thread, "exchange", None)


def replica_exchange() -> Exchange | None:
    """Return the exchange of the calling thread's replica, also inside a wrapper within it, which has none."""
    return getattr(_thread, "outermost", None)


_thread = threading.local()
