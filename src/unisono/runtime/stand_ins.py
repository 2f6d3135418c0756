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
        self._open: set[int] = set()  # the id of each pass
        self._are_in = False
        in_forked_child(self._after_fork)

    def add(self, stand_ins: Callable[[], Iterable[StandIn]]) -> None:
        """Add what a function returns, which is called when the next pass begins."""
        self._to_come.append(stand_ins)

    def enter(self) -> "_Pass":
        """Begin a pass; return what ends it, with `leave`, or when it is deleted."""
        entry = _Pass(self)
        with self._lock:
            self._open.add(id(entry))  # first: a pass that begins and ends in the middle of this takes nothing out
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
            if id(entry) in self._open:
                self._open.remove(id(entry))
                if not self._open:
                    try:
                        self._take_out()
                    except BaseException:
                        self._open.add(id(entry))
                        raise

    def _put_in(self) -> None:
        if self._to_come:
            self._groups += [*_grouped([each for new in self._to_come for each in new()])]
            self._to_come.clear()
        for group in self._groups:
            group.put_in()
        self._are_in = True

    def _take_out(self) -> None:
        self._are_in = False  # first: a pass that begins in the middle of this puts them in again
        for group in self._groups:
            group.take_out()

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._open.clear()
        self._take_out()


class _Pass:
    __slots__ = ("_stand_ins",)

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def __del__(self) -> None:
        self._stand_ins.leave(self)


class _Group:
    """Some stand-ins.

    Args:
        makers: one a place.
        read: returns what is in the places.
        write: sets it, given what `prepared` returns for a sequence with one value a place.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[Any], Any]],
        read: Callable[[], tuple[Any, ...]],
        write: Callable[[Any], object],
        prepared: Callable[[Sequence[Any]], Any] = tuple,
    ) -> None:
        self._makers, self._read, self._write, self._prepared = makers, read, write, prepared
        self._values = self._stand_ins = (_NONE,) * len(makers)
        self._in = self._out = prepared(self._values)

    def put_in(self) -> None:
        found = self._read()
        if found != self._values:
            known = zip(found, self._makers, self._values, self._stand_ins, strict=True)
            pairs = [(v, ours) if now is v or now is ours else (now, make(now)) for now, make, v, ours in known]
            self._values, self._stand_ins = zip(*pairs, strict=True)
            self._in, self._out = self._prepared(self._stand_ins), self._prepared(self._values)
        self._write(self._in)

    def take_out(self) -> None:
        found = self._read()
        if found == self._stand_ins:
            self._write(self._out)
        else:
            known = zip(found, self._stand_ins, self._values, strict=True)
            self._write(self._prepared([value if now is ours else now for now, ours, value in known]))


def _grouped(stand_ins: Iterable[StandIn]) -> Iterator[_Group]:
    """Yield a group for each module with several stand-ins, and one for all others."""
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
        yield _anywhere(*zip(*others, strict=True))


def _in_module(owners: Sequence[Any], names: Sequence[str], makers: Sequence[Callable[[Any], Any]]) -> _Group:
    namespace = vars(owners[0])  # it is quicker than its attributes
    read = partial(itemgetter(*names), namespace)
    return _Group(makers, read, namespace.update, lambda values: dict(zip(names, values, strict=True)))


def _anywhere(owners: Sequence[Any], names: Sequence[str], makers: Sequence[Callable[[Any], Any]]) -> _Group:
    return _Group(
        makers, lambda: (*map(getattr, owners, names),), lambda values: [*map(setattr, owners, names, values)]
    )


_NONE = object()

while_replicas_run = StandIns()
