"""Stand-ins: in their places while a pass is open, and never after it, whoever has set what meanwhile."""

import gc
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.forks import in_a_fork
from unisono.runtime.stand_ins import StandIns


class Class:
    def method(self) -> str:
        return "own"


def places() -> list[tuple[Any, str]]:
    """A module with several attributes, objects with one each, and a class."""
    module = ModuleType("module")
    module.one, module.two = "own one", "own two"  # type: ignore[attr-defined]
    return [(module, "one"), (module, "two"), (SimpleNamespace(three="own three"), "three"), (Class, "method")]


@pytest.fixture
def of_places() -> tuple[StandIns, list[tuple[Any, str]]]:
    found, stand_ins = places(), StandIns()
    stand_ins.add(lambda: [(owner, name, lambda value: ("in the place of", value)) for owner, name in found[:2]])
    stand_ins.add(lambda: [(owner, name, lambda value: ("in the place of", value)) for owner, name in found[2:]])
    return stand_ins, found


def values(found: list[tuple[Any, str]]) -> list[Any]:
    return [getattr(owner, name) for owner, name in found]


def test_while_some_pass_is_open(of_places: Any) -> None:
    """R17: passes may end in any order, and twice."""
    stand_ins, found = of_places
    before = values(found)
    for _ in range(2):
        first, second = stand_ins.enter(), stand_ins.enter()
        stand_ins.leave(first)
        stand_ins.leave(first)
        assert values(found) == [("in the place of", value) for value in before]
        stand_ins.leave(second)
        assert [now is value for now, value in zip(values(found), before, strict=True)] == [True] * 4


def test_a_list_may_change_in_place() -> None:
    """R17: as `warnings.filters` does by `filterwarnings`; the stand-in of the next pass has the change."""
    stand_ins, owner = StandIns(), SimpleNamespace(items=["first"])
    items = owner.items
    stand_ins.add(lambda: [(owner, "items", lambda value: ["ours", *value])])
    for expected in (["ours", "first"], ["ours", "first", "second"]):
        entry = stand_ins.enter()
        assert owner.items == expected
        stand_ins.leave(entry)
        assert owner.items is items
        items.append("second")


def test_what_somebody_else_sets_stays(of_places: Any) -> None:
    """R17: set meanwhile, and before the next pass, whose stand-ins refer to it."""
    stand_ins, found = of_places
    for owner, name in (found[0], found[2]):
        before = values(found)
        entry = stand_ins.enter()
        setattr(owner, name, "theirs")
        stand_ins.leave(entry)
        assert getattr(owner, name) == "theirs"
        entry = stand_ins.enter()
        assert getattr(owner, name) == ("in the place of", "theirs")
        stand_ins.leave(entry)
        assert getattr(owner, name) == "theirs"
        setattr(owner, name, before[found.index((owner, name))])
        stand_ins.leave(stand_ins.enter())
        assert values(found) == before


def test_a_stand_in_that_is_put_back_later_goes_with_the_next_pass(of_places: Any) -> None:
    """R17: by a mock that was made in a pass, and ends after it."""
    stand_ins, found = of_places
    before = values(found)
    entry = stand_ins.enter()
    found_by_mock = values(found)
    stand_ins.leave(entry)
    for (owner, name), value in zip(found, found_by_mock, strict=True):
        setattr(owner, name, value)
    entry = stand_ins.enter()
    assert values(found) == found_by_mock  # no stand-in for a stand-in
    stand_ins.leave(entry)
    assert values(found) == before


@pytest.mark.only_on("linux", "macos", because="forks")
def test_in_the_child_of_a_fork_no_replica_runs(of_places: Any) -> None:
    """R17, F5: and what ends there, ends nothing else."""
    stand_ins, found = of_places
    before = values(found)
    entry = stand_ins.enter()

    def child() -> int:
        is_as_before = values(found) == before
        stand_ins.leave(entry)
        own = stand_ins.enter()
        return is_as_before and values(found) != before and not stand_ins.leave(own)

    assert in_a_fork(child) == 1
    stand_ins.leave(entry)
    assert values(found) == before


def test_what_fails_leaves_nothing_in_its_place(of_places: Any) -> None:
    """R17: the system's memory, or Python's stack, ends in the middle of the beginning of a pass."""
    stand_ins, found = of_places
    before, last = values(found), SimpleNamespace(four="own four")

    def fails(value: str) -> None:
        raise RecursionError

    stand_ins.leave(stand_ins.enter())
    stand_ins.add(lambda: [(last, "four", fails)])
    for _ in range(2):
        with pytest.raises(RecursionError):
            stand_ins.enter()
        assert values(found) == before


def test_a_pass_that_nobody_can_end_any_more(of_places: Any) -> None:
    """R17: an error came before its end did, as that of a time limit which forward has set."""
    stand_ins, found = of_places
    before = values(found)

    def interrupted() -> None:
        _entry = stand_ins.enter()
        raise TimeoutError

    with pytest.raises(TimeoutError):
        interrupted()
    gc.collect()
    assert values(found) == before


def test_a_pass_in_the_middle_of_a_beginning_and_an_end() -> None:
    """R17: a finalizer or a signal's handler runs one there."""
    stand_ins, asked = StandIns(), [0]

    class Place:
        """Begins a pass and ends it whenever it is read or set."""

        def __init__(self) -> None:
            self._value = "own"

        @property
        def value(self) -> str:
            self._pass()
            return self._value

        @value.setter
        def value(self, new: str) -> None:
            self._pass()
            self._value = new
            self._pass()

        def _pass(self) -> None:
            asked[0] += 1
            if asked[0] % 7 == 3:
                stand_ins.leave(stand_ins.enter())

    place, other = Place(), SimpleNamespace(value="own")
    stand_ins.add(lambda: [(other, "value", lambda _: "ours"), (place, "value", lambda _: "ours")])
    for _ in range(20):
        entry = stand_ins.enter()
        assert (place._value, other.value) == ("ours", "ours")
        stand_ins.leave(entry)
        assert (place._value, other.value) == ("own", "own")


@pytest.mark.only_on("linux", "macos", because="forks")
def test_a_fork_while_another_thread_begins_and_ends_passes(of_places: Any) -> None:
    """R17, F5: at any moment of it."""
    stand_ins, found = of_places
    before, has_forked = values(found), threading.Event()

    def run_passes() -> None:
        while not has_forked.is_set():
            stand_ins.leave(stand_ins.enter())

    thread = threading.Thread(target=run_passes)
    thread.start()
    try:
        assert all(in_a_fork(lambda: values(found) == before) == 1 for _ in range(20))
    finally:
        has_forked.set()
        thread.join()
    assert values(found) == before
