"""All-gathers among replicas that run at the same time.

`LocalExchange` decides, in one place, which requests complete and when. Its replicas run in threads of this process, or
in other processes, whose requests arrive as messages; `Exchange` is what a replica sees of it, wherever it runs.

    replica i:   submit a request (name, value) ──► wait ──► result: the values of all participants
                 withdraw, at the end of its pass

Guarantees
    - Every participant of an all-gather gets the values of all participants, in replica order.
    - No replica waits for one that has withdrawn, because it is done or because it failed.
    - No replica waits for ever. If every replica waits, and no request has all its participants (the data led the
      replicas into different branches), one request completes without the missing ones.
      Deadlock tie-break: lowest rank first, then the replica with the fewest exchanges.

Assumes that every replica withdraws, however it ends, and that the replicas do run at the same time.
"""

import abc
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

_WAKE_S = 0.1  # a waiting replica checks for Ctrl-C this often: Ctrl-C cannot always wake it

_TOO_LATE = (
    "the replicas' backward passes reached the same exchanges in different orders, so that the parts of a gradient "
    "cannot be summed. Let every replica take the same way through the module."
)


@dataclass(frozen=True)
class Result:
    """The result of an all-gather.

    Attributes:
        values: the participants' values, in replica order. With a cross-process all-gather: each process's value, by
            rank.
        number: identifies this all-gather, for the one in backward. A later all-gather has a higher number.
        participants: the replicas that submitted a value.
    """

    values: dict[int, Any]
    number: int
    participants: frozenset[int]


# From the name of an all-gather and the values of this process's replicas to the value of each process, by rank.
CrossProcess: TypeAlias = Callable[[Hashable, dict[int, Any]], dict[int, Any]]


class Request(NamedTuple):
    """What a replica submits to take part in an all-gather.

    Attributes:
        name: of the all-gather.
        value: the replica's value.
        participants: the replicas that take part; None: all.
        rank: the priority in the deadlock tie-break, lowest first.
    """

    name: Hashable
    value: Any
    participants: frozenset[int] | None
    rank: tuple[int, float]


class Exchange(abc.ABC):
    """A replica's view of the all-gathers of one pass.

    Attributes:
        failed: whether some replica is known to have withdrawn because of an exception.
        all_withdrawn: whether all replicas are known to have withdrawn.
    """

    failed = False
    all_withdrawn = False

    def all_gather(self, index: int, name: str, value: Any, place: float = math.inf) -> Result:
        """Submit replica `index`'s value under a name; wait for the other replicas' values and return all.

        A name may be used again: the n-th call of one replica belongs to the n-th call of each other.

        Args:
            index, name, value: the replica, the name of the all-gather, the replica's value.
            place: the position of the name in the order in which replicas usually use the names: the rank in the
                deadlock tie-break.
        """
        result = self.submit_and_wait(index, Request(name, value, participants=None, rank=(0, place)))
        assert result is not None
        return result

    def all_gather_backward(self, index: int, number: int, participants: frozenset[int], value: Any) -> Result:
        """All-gather again among the participants of all-gather `number`, of this exchange or of an earlier one.

        Raises:
            RuntimeError: the deadlock tie-break has completed it without this replica.
        """
        # Backward reaches the all-gathers of forward in reverse order: the latest first.
        result = self.submit_and_wait(index, Request(number, value, participants, rank=(1, -number)))
        if result is None:
            raise RuntimeError(_TOO_LATE)
        return result

    @abc.abstractmethod
    def submit_and_wait(self, index: int, request: Request) -> Result | None:
        """Submit a request; wait for its result. None: a backward request that completed without this replica."""

    @abc.abstractmethod
    def withdraw(self, index: int, *, failed: bool) -> None:
        """Let no other replica wait for replica `index` any more."""


@dataclass
class _Pending:
    """An all-gather that waits for participants: the values so far, and the callbacks that take the result."""

    participants: frozenset[int]
    rank: tuple[int, float]
    values: dict[int, Any] = field(default_factory=dict)
    callbacks: list[Callable[[Result], None]] = field(default_factory=list)


class LocalExchange(Exchange):
    """The all-gathers of replicas 0 to `num_replicas` - 1, decided in this process.

    Attributes:
        error: what `cross_process` has raised. After that no other replica gets a result.

    Args:
        num_replicas: how many replicas take part.
        serve: receives the requests of replicas in other processes, until the function that it is given returns True.
            A replica of this process calls it while it waits. None: it sleeps until another thread wakes it.
        cross_process: takes the name of an all-gather and the values of this process's replicas; returns the values of
            all processes, which become the result. None: there are no other processes.
    """

    def __init__(
        self,
        num_replicas: int,
        serve: Callable[[Callable[[], bool]], None] | None = None,
        cross_process: CrossProcess | None = None,
    ) -> None:
        self._serve = serve
        self._cross_process = cross_process
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._all = frozenset(range(num_replicas))
        self._present = set(self._all)  # have not withdrawn
        self._pending: dict[tuple[Hashable, int], _Pending] = {}
        self._completed_early: set[tuple[Hashable, int]] = set()  # backward requests that the tie-break completed
        self._num_calls: Counter[Hashable] = Counter()  # of each replica, and of each replica under each name

    def submit_and_wait(self, index: int, request: Request) -> Result | None:
        results: list[Result | None] = []
        with self._condition:
            self.submit(index, request, results.append)
            while not results:
                if self.error is not None:
                    raise self.error
                if self._serve is not None:
                    self._serve(lambda: bool(results))
                else:
                    self._condition.wait(_WAKE_S)
        return results[0]

    def submit(self, index: int, request: Request, callback: Callable[[Result | None], None]) -> None:
        """Submit a replica's request; `callback` is called with the result, now or as soon as it is known."""
        with self._condition:
            self._num_calls.update([index, (index, request.name)])
            key = (request.name, self._num_calls[index, request.name])
            if key in self._completed_early:
                callback(None)
                return
            pending = self._pending.setdefault(key, _Pending(request.participants or self._all, request.rank))
            pending.values[index] = request.value
            pending.callbacks.append(callback)
            self._complete_pending()

    def withdraw(self, index: int, *, failed: bool) -> None:
        with self._condition:
            self.failed |= failed
            self._present.discard(index)
            self.all_withdrawn = not self._present
            self._complete_pending()

    def _complete_pending(self) -> None:
        """Complete every all-gather that has all the participants that can still submit."""
        while self._pending:
            complete = [key for key, pending in self._pending.items() if not self._missing(pending)]
            if not complete:
                waiting = {index for pending in self._pending.values() for index in pending.values}
                if self._present - waiting:
                    return
                complete = [min(self._pending, key=self._rank)]
                self._completed_early.update(key for key in complete if not isinstance(key[0], str))
            for key in complete:
                pending = self._pending.pop(key)
                values = dict(sorted(pending.values.items()))
                if self._cross_process is not None:
                    try:
                        values = self._cross_process(key[0], values)
                    except BaseException as error:
                        self.error = error
                        self._condition.notify_all()
                        raise
                result = Result(values, next(_numbers), frozenset(pending.values))
                for callback in pending.callbacks:
                    callback(result)
            self._condition.notify_all()

    def _missing(self, pending: _Pending) -> set[int]:
        return (self._present & pending.participants) - pending.values.keys()

    def _rank(self, key: tuple[Hashable, int]) -> tuple[tuple[int, float], int, int]:
        pending = self._pending[key]
        return pending.rank, *min((self._num_calls[index], index) for index in pending.values)


_numbers = itertools.count()
