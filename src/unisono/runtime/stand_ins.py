"""What is in the place of some attributes of torch and Python while replicas run, and only then.

    the first pass begins    each attribute's value is taken out, and a stand-in put in its place
    passes overlap           they are counted
    the last pass ends       each value is back: the process is as it was

Guarantees
    - Outside of passes torch and Python are as they were. An attribute that somebody else has set meanwhile (a mock,
      another library) keeps that value. Where a stand-in is put back later, by a mock that has found it, it does what
      the value did, and the next pass takes it out again.
    - A stand-in refers to the value that was found when the pass began, whoever has put it there.
    - In the child of a fork, where no replica runs, all is as it was, whatever another thread was doing.
    - A finalizer, or a signal's handler that is not deferred, may run a pass in the middle of `enter` and `leave`.
      Where one raises there, or before `leave` is called, the pass ends when the error is freed.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from types import ModuleType
from typing import Any, TypeAlias

from unisono.runtime.forks import in_forked_child

# An object, the name of an attribute that it has, and a function from the attribute's value to its stand-in.
StandIn: TypeAlias = tuple[Any, str, Callable[[Any], Any]]


class StandIns:
    """The stand-ins of one purpose."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._to_come: list[Callable[[], Iterable[StandIn]]] = []
        self._groups: list[_Group] = []
        self._open: set[int] = set()  # the number of each pass
        self._are_in = False
        in_forked_child(self._after_fork)

    def add(self, stand_ins: Callable[[], Iterable[StandIn]]) -> None:
        """Add what a function returns, which is called when the next pass begins."""
        self._to_come.append(stand_ins)

    def enter(self) -> "_Pass":
        """Begin a pass; return what ends it."""
        entry = _Pass(self)
        with self._lock:
            self._open.add(entry.number)  # first: a pass that begins and ends in the middle of this takes nothing out
            if not self._are_in:
                try:
                    self._put_in()
                except BaseException:
                    self.leave(entry)
                    raise
        return entry

    def leave(self, entry: "_Pass") -> None:
        """End a pass; a second time does nothing."""
        with self._lock:
            if entry.number in self._open:
                self._open.remove(entry.number)
                if not self._open:
                    try:
                        self._take_out()
                    except BaseException:
                        self._open.add(entry.number)
                        raise
            entry.has_ended = True

    def _put_in(self) -> None:
        if self._to_come:
            self._groups += [*_grouped([each for new in self._to_come for each in new()])]
            self._to_come.clear()
        for group in self._groups:
            found = (*group.read(),)
            if found != group.seen:
                group.take_note(found)
            (*group.write(group.to_put_in),)
        self._are_in = True

    def _take_out(self) -> None:
        self._are_in = False  # first: a pass that begins in the middle of this puts them in again
        for group in self._groups:
            found = (*group.read(),)
            (*group.write(group.to_take_out if found == group.stand_ins else group.without_stand_ins(found)),)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._open.clear()
        self._take_out()


class _Pass:
    """A pass; it ends with `leave`, with the block of which it is the context, or when it is deleted."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins, self.number, self.has_ended = stand_ins, next(_numbers), False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._stand_ins.leave(self)

    def __del__(self) -> None:
        if not self.has_ended:
            self._stand_ins.leave(self)


class _Group:
    """Some stand-ins, whose places are read and written in C.

    Args:
        makers: one a place.
        read: returns an iterable of what is in the places.
        write: from what `prepared` makes of one value a place, returns an iterable that sets them as it is consumed.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[Any], Any]],
        read: Callable[[], Iterable[Any]],
        write: Callable[[Any], Iterable[None]],
        prepared: Callable[[Sequence[Any]], Any],
    ) -> None:
        self._makers, self.read, self.write, self._prepared = makers, read, write, prepared
        self.values: tuple[Any, ...] = (_NONE,) * len(makers)  # those that the stand-ins are made for
        self.stand_ins = self.values
        self.seen = self.values  # the same, with copies of lists, which may change in place
        self.to_put_in = self.to_take_out = prepared(self.values)

    def take_note(self, found: tuple[Any, ...]) -> None:
        """Make stand-ins for what has been found; a stand-in that was put back later is known."""
        known = zip(found, self._makers, self.values, self.stand_ins, self.seen, strict=True)
        pairs = [
            (v, ours) if now is ours or (now is v and now == seen) else (now, make(now))
            for now, make, v, ours, seen in known
        ]
        self.values, self.stand_ins = zip(*pairs, strict=True)
        self.seen = (*[[*value] if type(value) is list else value for value in self.values],)
        self.to_put_in, self.to_take_out = self._prepared(self.stand_ins), self._prepared(self.values)

    def without_stand_ins(self, found: tuple[Any, ...]) -> Any:
        """Return what is to be written where somebody else has set one of the places."""
        known = zip(found, self.stand_ins, self.values, strict=True)
        return self._prepared([value if now is ours else now for now, ours, value in known])


def _grouped(stand_ins: Iterable[StandIn]) -> Iterator[_Group]:
    """Yield a group for each module with several stand-ins, whose dict is quicker, and one for all others."""
    by_owner: dict[int, list[StandIn]] = {}
    for each in stand_ins:
        by_owner.setdefault(id(each[0]), []).append(each)
    others: list[StandIn] = []
    for of_owner in by_owner.values():
        if len(of_owner) > 1 and type(of_owner[0][0]) is ModuleType:
            yield _in_module(*zip(*of_owner, strict=True))
        else:
            others += of_owner
    if others:
        owners, names, makers = zip(*others, strict=True)
        yield _Group(makers, partial(map, getattr, owners, names), partial(map, setattr, owners, names), tuple)


def _in_module(owners: Sequence[Any], names: Sequence[str], makers: Sequence[Callable[[Any], Any]]) -> _Group:
    namespace = vars(owners[0])
    read = partial(itemgetter(*names), namespace)
    return _Group(makers, read, partial(map, namespace.update), lambda values: [dict(zip(names, values, strict=True))])


_numbers = itertools.count()
_NONE = object()


while_replicas_run = StandIns()
