"""replacement: where a program's modules refer to something, and how each reference is replaced."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from unisono.scripts.replacement import replace


class Old:
    pass


class New:
    pass


def default(wrapper: type = Old, *, other: type = Old) -> tuple[type, type]:
    return wrapper, other


class Trainer:
    wrapper = Old

    def __init__(self, wrapper: type = Old) -> None:
        self.wrapper_of_object = wrapper


@dataclasses.dataclass(frozen=True)
class Options:
    wrapper: type = Old


CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "registry": (OrderedDict(a=1, parallel=[Old]), lambda value: value["parallel"][0]),
    "pairs": ([("parallel", Old)], lambda value: value[0][1]),
    "default": (default, lambda value: value()[0]),
    "keyword default": (default, lambda value: value()[1]),
    "class": (Trainer, lambda value: value.wrapper),
    "method's default": (Trainer, lambda value: value().wrapper_of_object),
    "dataclass": (Options, lambda value: value().wrapper),
}


@pytest.mark.parametrize(("value", "read"), CASES.values(), ids=CASES)
def test_what_a_module_leads_to_is_replaced_and_put_back(value: Any, read: Callable[[Any], Any]) -> None:
    """X2: containers, default arguments, attributes of classes."""
    module = {"name": value}
    assert read(module["name"]) is Old
    places = replace([(Old, New)], [("program", module)])
    assert places
    assert all(place.startswith("program.name") for place in places)
    assert read(module["name"]) is New
    assert replace([(Old, New)], [("program", module)]) == []
    replace([(New, Old)], [("program", module)])
    assert read(module["name"]) is Old


def test_nothing_else_is_touched() -> None:
    """X2: classes that load what they are asked for are not asked; annotations, cycles and data stay as they are."""

    class Lazy(dict):
        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("loaded")

        items = values = __iter__ = __len__ = __getitem__

    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("works in a request only")

    def annotated(wrapper: Old) -> Old:
        return wrapper

    cycle: list[Any] = []
    cycle.append(cycle)
    data = [Old] * 5000
    module = {"lazy": Lazy(a=1), "proxy": Proxy(), "annotated": annotated, "cycle": cycle, "data": data}
    module["__annotations__"] = {"wrapper": Old}
    assert replace([(Old, New)], [("program", module)]) == []
    assert annotated.__annotations__ == {"wrapper": Old, "return": Old}
    assert data == [Old] * 5000
