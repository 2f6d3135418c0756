"""A visit of what values lead to: it calls no code of the objects that it meets, and ends soon."""

import threading
import types
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from unisono.leftovers.shared import Search
from unisono.primitives.references import references
from unisono.primitives.visitor import MOST, Place, held, visit

called: list[str] = []


class Computed:
    """Computes each attribute that it does not have."""

    __slots__ = ("empty", "given")

    def __init__(self) -> None:
        self.given = [1]

    def __getattr__(self, name: str) -> Any:
        called.append(name)
        raise RuntimeError("no connection")


class _Base:
    __slots__ = ("value",)


class Property(_Base):
    @property
    def value(self) -> int:
        called.append("value")
        return 1


class Loaded(Mapping[str, int]):
    """Loads what it has when it is asked."""

    def __getitem__(self, key: str) -> int:
        called.append("[]")
        return 1

    def __iter__(self) -> Iterator[str]:
        called.append("iter")
        return iter(["a"])

    def __len__(self) -> int:
        called.append("len")
        return 1


class LoadedList(list[int]):
    __getitem__ = __len__ = __iter__ = lambda self, *args: called.append("list")  # type: ignore[assignment]


class LoadedDict(dict[str, Any]):
    items = __len__ = __iter__ = lambda self, *args: called.append("dict")  # type: ignore[assignment]


class Proxy:
    """Stands for a dict, as lazy settings do."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        called.append("class")
        return dict

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        called.append("__dict__")
        return {}


class InClass:
    computed = Computed()


OBJECTS = {
    "an attribute that is computed": Computed(),
    "of a class": InClass(),
    "a property in the place of a slot": Property(),
    "a mapping that loads": Loaded(),
    "a list with methods of its own": LoadedList([1]),
    "a dict with methods of its own": LoadedDict(a=1),
    "a proxy": Proxy(),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_visit_calls_no_code_of_the_objects(kind: str) -> None:
    """R6: it loaded what was to be loaded when needed, and asked properties."""
    called.clear()
    for value in (OBJECTS[kind], [OBJECTS[kind]], types.SimpleNamespace(each=OBJECTS[kind])):
        assert any(place.value is OBJECTS[kind] for place, _ in visit([Place(value, "value")], held))
    assert called == []


def test_a_proxy_for_a_dict_is_no_dict() -> None:
    """R6: its length was asked for, an error where what it stands for has none."""
    assert references([Proxy()]) == []


def test_what_objects_hold_is_found_past_their_methods() -> None:
    """R6"""
    values = [Computed(), UserDict(a=[]), LoadedDict(b=[])]
    paths = [str(place) for place, _ in visit([Place(values, "value")], held)]
    assert {"value[0].given", "value[1].data['a']", "value[2]['b']"} < {*paths}


def test_a_visit_of_much_ends_soon() -> None:
    """R6: lists in lists in lists: each was looked into before the number of all was asked for."""
    row = [0] * 500
    much = [[[*row] for _ in range(100)] for _ in range(500)]
    assert sum(1 + len(children) for _, children in visit([Place(much, "value")], held)) < MOST + 1000


def test_what_a_thread_of_its_own_writes_into_is_not_searched() -> None:
    """R6: forward was said to write what the thread of a logger does."""
    ends = threading.Event()
    logger = types.SimpleNamespace(sent=0, thread=threading.Thread(target=ends.wait))
    logger.thread.start()
    search = Search([], [])
    try:
        assert search.inside(logger) == []
    finally:
        ends.set()
        logger.thread.join()
    assert [key for (_, key), _ in search.inside(logger)] == ["sent", "thread"]
