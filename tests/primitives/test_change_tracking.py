"""Snapshots of dicts and tensors: what is a change, and what is none, with torch's guards and without them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.primitives.change_tracking import GONE, DictSnapshot, TensorSnapshot
from unisono.runtime.torch_private import tensor_objects


@pytest.fixture(params=["guards", "no guards", "gradients off"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let all tests run with torch's guards, with those of a later torch, and where they do not see all."""
    if request.param == "no guards":
        monkeypatch.setattr(tensor_objects, "_guards", SimpleNamespace(TensorGuards=lambda *tensors: None))
        monkeypatch.setattr(tensor_objects, "dict_version", None)
    with torch.set_grad_enabled(request.param != "gradients off"):
        yield


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
    assert snapshot.is_current()
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


def test_what_is_put_is_as_if_it_had_been_there() -> None:
    """R8"""
    items: dict[str, int] = {"a": 1}
    snapshot = DictSnapshot([items, {"b": 2}])
    for key, value in (("a", 3), ("c", 4)):
        items[key] = value
        assert not snapshot.is_current()
        snapshot.put(0, key, value)
        assert snapshot.is_current()
    del items["c"]
    snapshot.put(0, "c", GONE)
    for _ in range(2):
        assert snapshot.is_current()
    items["a"] = 5
    assert not snapshot.is_current()


def _another_type(tensor: torch.Tensor) -> None:
    tensor.__class__ = torch.nn.Parameter


def _of_other_data(other: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.data = other(tensor.detach())

    return change


OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires_grad": lambda tensor: tensor.requires_grad_(not tensor.requires_grad),
    "memory": _of_other_data(torch.clone),
    "shape": _of_other_data(lambda data: data.view(3, 2)),
    "strides": _of_other_data(lambda data: data.as_strided((2, 3), (1, 2))),
    "dtype": _of_other_data(lambda data: data.view(torch.int64).view(torch.float64)),
    "conjugated": _of_other_data(torch.conj),
    "negated": _of_other_data(torch._neg_view),
    "an attribute": lambda tensor: setattr(tensor, "note", 1),
    "class": _another_type,
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_change_of_a_tensor_is_found(name: str) -> None:
    """R8"""
    dtype = torch.complex64 if name in ("dtype", "conjugated") else torch.float32
    tensor, other = torch.zeros(2, 3, dtype=dtype), torch.zeros(3, requires_grad=True)
    snapshot = TensorSnapshot([other, tensor])
    with torch.no_grad():
        tensor.add_(1)
    assert snapshot.is_current()
    OF_TENSORS[name](tensor)
    assert not snapshot.is_current()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_modes_are_no_change_of_a_tensor(context: Callable[[], Any]) -> None:
    """R8"""
    snapshot = TensorSnapshot([torch.zeros(2, requires_grad=True)])
    with context():
        assert snapshot.is_current()


def test_a_snapshot_of_no_tensor_is_current() -> None:
    """R8"""
    assert TensorSnapshot([]).is_current()
