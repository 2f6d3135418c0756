"""Snapshots of dicts: what is a change, and what is none."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from unisono.primitives.change_tracking import GONE, DictSnapshot

CHANGES: dict[str, tuple[Callable[[dict[Any, Any]], Any], Any]] = {
    "another value": (lambda items: items.update(a=3), 3),
    "an equal list": (lambda items: items.update(a=[]), []),
    "True in place of 1": (lambda items: items.update(b=True), True),
    "deleted": (lambda items: items.pop("a"), GONE),
    "added": (lambda items: items.update(c=3), 3),
    "one for another": (lambda items: (items.pop("a"), items.update(c=3)), GONE),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_found_and_undone(kind: type[dict[Any, Any]], name: str) -> None:
    """R8: equal is not identical."""
    change, value = CHANGES[name]
    items, empty = kind(a=[], b=1), kind()
    objects = dict(items)
    snapshot = DictSnapshot([empty, items])
    assert snapshot.is_current()
    change(items)
    assert not snapshot.is_current()
    number, _, found = snapshot.changes()[0]
    assert (number, found) == (1, value)
    assert [now for now, _ in snapshot.restore()] == [items]
    assert [*items] == ["a", "b"]
    assert items["a"] is objects["a"]
    assert snapshot.is_current()


def test_an_empty_dict_that_is_filled_is_changed() -> None:
    """R8"""
    items: dict[str, int] = {}
    snapshot = DictSnapshot([items, {"a": 1}])
    items["b"] = 2
    assert not snapshot.is_current()


def test_the_order_of_an_ordered_dict_is_a_part_of_it() -> None:
    """R8: hooks run in it."""
    items = OrderedDict(a=1, b=2)
    snapshot = DictSnapshot([items])
    items.move_to_end("a")
    assert not snapshot.is_current()


def test_what_is_undone_is_no_change() -> None:
    """R8: an attribute that forward sets and deletes."""
    items = {"a": 1}
    snapshot = DictSnapshot([items])
    items["b"] = 2
    del items["b"]
    for _ in range(2):
        assert snapshot.is_current()
