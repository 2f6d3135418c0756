"""Meetings: replicas that run at the same time exchange values.

Who waits for whom, and who is released when, is decided in one place, `LocalExchange`. Its replicas run in threads of
this process, or in other processes, whose messages bring what they come with; `Exchange` is what a replica sees of it,
wherever it runs.

Guarantees
    - Everybody who comes to an exchange gets what everybody gave, in replica order.
    - Nobody waits for a replica that has left the meeting: because it is done, or because it failed.
    - Nobody waits for ever. Where every replica waits, each for others that wait elsewhere (the data led them into
      different branches), one exchange goes on without those who are not there.

Assumes that every replica leaves, however it ends, and that the replicas do run at the same time.
"""

import abc
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

_WAKE_S = 0.1  # a waiting replica looks this often for Ctrl-C, which cannot always wake it

_TOO_LATE = (
    "the replicas came to what they exchange in backward in different orders, so that their parts of a gradient cannot "
    "be brought together. Let every replica take the same way through the module."
)


@dataclass(frozen=True)
class Result:
    """What an exchange came to.

    Attributes:
        values: what each replica gave, in replica order; without those that did not come. Of a meeting that goes beyond
            this process: what each process has, by its rank.
        number: names this exchange, so that it can be answered later. The later of two has the higher one.
        participants: the replicas that came.
    """

    values: dict[int, Any]
    number: int
    participants: frozenset[int]


# From the name of an exchange and what this process's replicas gave to what each process has, by rank.
CrossProcess: TypeAlias = Callable[[Hashable, dict[int, Any]], dict[int, Any]]


class Request(NamedTuple):
    """What a replica comes to a meeting with.

    Attributes:
        name: what the exchange is called.
        value: what the replica gives.
        participants: who takes part in it; None: everybody.
        rank: if all replicas wait, each at another exchange, that of the lowest rank goes on first; of equal ones, that
            of the replica with the fewest exchanges behind it.
    """

    name: Hashable
    value: Any
    participants: frozenset[int] | None
    rank: tuple[int, float]


class Exchange(abc.ABC):
    """Where replicas exchange values while they run.

    Attributes:
        failed: whether some replica is known to have left with an exception.
        all_withdrawn: whether everybody is known to have left.
    """

    failed = False
    all_withdrawn = False

    def all_gather(self, index: int, name: str, value: Any, place: float = math.inf) -> Result:
        """Give replica `index`'s value under a name; wait for the others' and return them all.

        A name may be used again and again: the n-th call of one replica meets the n-th of each other.

        Args:
            index, name, value: who gives what.
            place: that of the name in the order in which replicas are likely to come to the names. It decides who
                goes on first where all wait, each elsewhere.
        """
        result = self.submit_and_wait(index, Request(name, value, participants=None, rank=(0, place)))
        assert result is not None
        return result

    def all_gather_backward(self, index: int, number: int, participants: frozenset[int], value: Any) -> Result:
        """Exchange values again among replicas that took part in exchange `number`, of this meeting or of another.

        Raises:
            RuntimeError: the others could not wait for this replica, and have gone on without it.
        """
        # Backward comes to what was exchanged in forward in reverse: to the latest first.
        result = self.submit_and_wait(index, Request(number, value, participants, rank=(1, -number)))
        if result is None:
            raise RuntimeError(_TOO_LATE)
        return result

    @abc.abstractmethod
    def submit_and_wait(self, index: int, request: Request) -> Result | None:
        """Wait for the others; return what the exchange came to, None if they could not wait for an answer."""

    @abc.abstractmethod
    def withdraw(self, index: int, *, failed: bool) -> None:
        """Be waited for no longer."""


@dataclass
class _Pending:
    """Where replicas wait until all of `among` that can still come have come: what they gave, and whom to tell."""

    participants: frozenset[int]
    rank: tuple[int, float]
    values: dict[int, Any] = field(default_factory=dict)
    tell: list[Callable[[Result], None]] = field(default_factory=list)


class LocalExchange(Exchange):
    """A meeting of the replicas 0 to `num_replicas` - 1 that is held in this process.

    Attributes:
        error: what `cross_process` has raised. After that no other replica gets a result.

    Args:
        num_replicas: how many meet.
        serve: what a replica of this process does while it waits, until what it is given returns True: to take in those
            who come from other processes. None: it sleeps until another thread wakes it.
        beyond: takes the name of an exchange, if it is a string, and what the replicas gave; returns what they get in
            its place. By it processes with meetings of their own exchange what each has come to.
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
        self._present = set(self._all)
        self._pending: dict[tuple[Hashable, int], _Pending] = {}
        self._answered_without_all: set[tuple[Hashable, int]] = set()
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

    def submit(self, index: int, request: Request, tell: Callable[[Result | None], None]) -> None:
        """Submit a replica's request; `tell` is called with its result, now or as soon as it is known."""
        with self._condition:
            self._num_calls.update([index, (index, request.name)])
            key = (request.name, self._num_calls[index, request.name])
            if key in self._answered_without_all:
                tell(None)
                return
            pending = self._pending.setdefault(key, _Pending(request.participants or self._all, request.rank))
            pending.values[index] = request.value
            pending.tell.append(tell)
            self._complete_pending()

    def withdraw(self, index: int, *, failed: bool) -> None:
        with self._condition:
            self.failed |= failed
            self._present.discard(index)
            self.all_withdrawn = not self._present
            self._complete_pending()

    def _complete_pending(self) -> None:
        """Let everybody go on who need not wait any more."""
        while self._pending:
            full = [
                key
                for key, pending in self._pending.items()
                if self._present & pending.participants <= pending.values.keys()
            ]
            if not full:
                waiting = {index for pending in self._pending.values() for index in pending.values}
                if self._present - waiting:
                    return
                full = [min(self._pending, key=self._rank)]
                self._answered_without_all.update(key for key in full if not isinstance(key[0], str))
            for key in full:
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
                for tell in pending.tell:
                    tell(result)
            self._condition.notify_all()

    def _rank(self, key: tuple[Hashable, int]) -> tuple[tuple[int, float], int, int]:
        pending = self._pending[key]
        return pending.rank, *min((self._num_calls[index], index) for index in pending.values)


_numbers = itertools.count()
