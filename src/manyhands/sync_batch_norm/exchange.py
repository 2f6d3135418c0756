"""Meetings: replicas that run at the same time exchange values.

Who waits for whom, and who is released when, is decided in one place, `MeetingHere`. Its replicas run in threads of
this process, or in other processes, whose messages bring what they come with; `Meeting` is what a replica sees of it,
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
class Met:
    """What an exchange came to.

    Attributes:
        values: what each replica gave, in replica order; without those that did not come. Of a meeting that goes beyond
            this process: what each process has, by its rank.
        number: names this exchange, so that it can be answered later. The later of two has the higher one.
        among: the replicas that came.
    """

    values: dict[int, Any]
    number: int
    among: frozenset[int]


# From the name of an exchange and what this process's replicas gave to what each process has, by rank.
Beyond: TypeAlias = Callable[[Hashable, dict[int, Any]], dict[int, Any]]


class Visit(NamedTuple):
    """What a replica comes to a meeting with.

    Attributes:
        name: what the exchange is called.
        value: what the replica gives.
        among: who takes part in it; None: everybody.
        rank: if all replicas wait, each at another exchange, that of the lowest rank goes on first; of equal ones, that
            of the replica with the fewest exchanges behind it.
    """

    name: Hashable
    value: Any
    among: frozenset[int] | None
    rank: tuple[int, float]


class Meeting(abc.ABC):
    """Where replicas exchange values while they run.

    Attributes:
        failed: whether some replica is known to have left with an exception.
        is_over: whether everybody is known to have left.
    """

    failed = False
    is_over = False

    def exchange(self, index: int, name: str, value: Any, place: float = math.inf) -> Met:
        """Give replica `index`'s value under a name; wait for the others' and return them all.

        A name may be used again and again: the n-th call of one replica meets the n-th of each other.

        Args:
            index, name, value: who gives what.
            place: that of the name in the order in which replicas are likely to come to the names. It decides who
                goes on first where all wait, each elsewhere.
        """
        met = self.visit(index, Visit(name, value, among=None, rank=(0, place)))
        assert met is not None
        return met

    def answer(self, index: int, number: int, among: frozenset[int], value: Any) -> Met:
        """Exchange values again among replicas that took part in exchange `number`, of this meeting or of another.

        Raises:
            RuntimeError: the others could not wait for this replica, and have gone on without it.
        """
        # Backward comes to what was exchanged in forward in reverse: to the latest first.
        met = self.visit(index, Visit(number, value, among, rank=(1, -number)))
        if met is None:
            raise RuntimeError(_TOO_LATE)
        return met

    @abc.abstractmethod
    def visit(self, index: int, visit: Visit) -> Met | None:
        """Wait for the others; return what the exchange came to, None if they could not wait for an answer."""

    @abc.abstractmethod
    def leave(self, index: int, *, failed: bool) -> None:
        """Be waited for no longer."""


@dataclass
class _Table:
    """Where replicas wait until all of `among` that can still come have come: what they gave, and whom to tell."""

    among: frozenset[int]
    rank: tuple[int, float]
    values: dict[int, Any] = field(default_factory=dict)
    tell: list[Callable[[Met], None]] = field(default_factory=list)


class MeetingHere(Meeting):
    """A meeting of the replicas 0 to `num_replicas` - 1 that is held in this process.

    Attributes:
        error: what `beyond` has raised. After that nobody else is told anything: whoever waits elsewhere waits in vain.

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
        beyond: Beyond | None = None,
    ) -> None:
        self._serve = serve
        self._beyond = beyond
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._all = frozenset(range(num_replicas))
        self._present = set(self._all)
        self._tables: dict[tuple[Hashable, int], _Table] = {}
        self._answered_without_all: set[tuple[Hashable, int]] = set()
        self._num_calls: Counter[Hashable] = Counter()  # of each replica, and of each replica under each name

    def visit(self, index: int, visit: Visit) -> Met | None:
        mets: list[Met | None] = []
        with self._condition:
            self.come(index, visit, mets.append)
            while not mets:
                if self.error is not None:
                    raise self.error
                if self._serve is not None:
                    self._serve(lambda: bool(mets))
                else:
                    self._condition.wait(_WAKE_S)
        return mets[0]

    def come(self, index: int, visit: Visit, tell: Callable[[Met | None], None]) -> None:
        """Give what a replica comes with; `tell` is called with what `visit` would return, now or when it is known."""
        with self._condition:
            self._num_calls.update([index, (index, visit.name)])
            key = (visit.name, self._num_calls[index, visit.name])
            if key in self._answered_without_all:
                tell(None)
                return
            table = self._tables.setdefault(key, _Table(visit.among or self._all, visit.rank))
            table.values[index] = visit.value
            table.tell.append(tell)
            self._close_tables()

    def leave(self, index: int, *, failed: bool) -> None:
        with self._condition:
            self.failed |= failed
            self._present.discard(index)
            self.is_over = not self._present
            self._close_tables()

    def _close_tables(self) -> None:
        """Let everybody go on who need not wait any more."""
        while self._tables:
            full = [key for key, table in self._tables.items() if self._present & table.among <= table.values.keys()]
            if not full:
                waiting = {index for table in self._tables.values() for index in table.values}
                if self._present - waiting:
                    return
                full = [min(self._tables, key=self._rank)]
                self._answered_without_all.update(key for key in full if not isinstance(key[0], str))
            for key in full:
                table = self._tables.pop(key)
                values = dict(sorted(table.values.items()))
                if self._beyond is not None:
                    try:
                        values = self._beyond(key[0], values)
                    except BaseException as error:
                        self.error = error
                        self._condition.notify_all()
                        raise
                met = Met(values, next(_numbers), frozenset(table.values))
                for tell in table.tell:
                    tell(met)
            self._condition.notify_all()

    def _rank(self, key: tuple[Hashable, int]) -> tuple[tuple[int, float], int, int]:
        table = self._tables[key]
        return table.rank, *min((self._num_calls[index], index) for index in table.values)


_numbers = itertools.count()
