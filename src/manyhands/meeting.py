"""Meetings: replicas that run at the same time, each in a thread of its own, exchange values.

Guarantees
    - Everybody who comes to an exchange gets what everybody gave, in replica order.
    - Nobody waits for a replica that has left the meeting: because it is done, or because it failed.
    - Nobody waits for ever. Where every replica waits, each for others that wait elsewhere (the data led them into
      different branches), one exchange goes on without those who are not there.

Assumes that every replica leaves, however it ends, and that the replicas do run at the same time.
"""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

_WAKE_S = 0.1  # a waiting replica looks this often for Ctrl-C, which cannot always wake it

_TOO_LATE = (
    "the replicas came to what they exchange in backward in different orders, so that their parts of a gradient cannot "
    "be brought together. Let every replica take the same way through the module."
)


@dataclass(frozen=True)
class Met:
    """What an exchange came to.

    Attributes:
        values: what each replica gave, in replica order; without those that did not come.
        number: names this exchange, so that it can be answered later. The later of two has the higher one.
    """

    values: dict[int, Any]
    number: int


@dataclass
class _Table:
    """Where replicas wait until all of `among` that can still come have come.

    If all replicas wait, each at another table, the one of the lowest rank is closed first; of equal ones, that of the
    replica with the fewest exchanges behind it.
    """

    among: frozenset[int]
    rank: tuple[int, float]
    values: dict[int, Any] = field(default_factory=dict)
    met: Met | None = None


class Meeting:
    """Where the replicas 0 to `num_replicas` - 1 exchange values while they run.

    Attributes:
        failed: whether some replica has left with an exception.
    """

    def __init__(self, num_replicas: int) -> None:
        self.failed = False
        self._condition = threading.Condition()
        self._all = frozenset(range(num_replicas))
        self._present = set(self._all)
        self._tables: dict[tuple[Hashable, int], _Table] = {}
        self._answered_without_all: set[tuple[Hashable, int]] = set()
        self._num_calls: Counter[Hashable] = Counter()  # of each replica, and of each replica under each name

    @property
    def is_over(self) -> bool:
        """Whether everybody has left."""
        return not self._present

    def exchange(self, index: int, name: str, value: Any, place: float = math.inf) -> Met:
        """Give replica `index`'s value under a name; wait for the others' and return them all.

        A name may be used again and again: the n-th call of one replica meets the n-th of each other.

        Args:
            index, name, value: who gives what.
            place: that of the name in the order in which replicas are likely to come to the names. It decides who
                goes on first where all wait, each elsewhere.
        """
        return self._exchange(index, name, value, _Table(self._all, rank=(0, place)))

    def answer(self, index: int, number: int, among: frozenset[int], value: Any) -> Met:
        """Exchange values again among replicas that took part in exchange `number`, of this meeting or of another.

        Raises:
            RuntimeError: the others could not wait for this replica, and have gone on without it.
        """
        # Backward comes to what was exchanged in forward in reverse: to the latest first.
        return self._exchange(index, number, value, _Table(among, rank=(1, -number)))

    def leave(self, index: int, *, failed: bool) -> None:
        """Be waited for no longer."""
        with self._condition:
            self.failed |= failed
            self._present.discard(index)
            self._close_tables()

    def _exchange(self, index: int, name: Hashable, value: Any, new: _Table) -> Met:
        with self._condition:
            self._num_calls.update([index, (index, name)])
            key = (name, self._num_calls[index, name])
            if key in self._answered_without_all:
                raise RuntimeError(_TOO_LATE)
            table = self._tables.setdefault(key, new)
            table.values[index] = value
            self._close_tables()
            while table.met is None:
                self._condition.wait(_WAKE_S)
            return table.met

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
                table.met = Met(dict(sorted(table.values.items())), next(_numbers))
            self._condition.notify_all()

    def _rank(self, key: tuple[Hashable, int]) -> tuple[tuple[int, float], int, int]:
        table = self._tables[key]
        return table.rank, *min((self._num_calls[index], index) for index in table.values)


_numbers = itertools.count()
