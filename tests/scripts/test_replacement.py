"""replacement: what is left alone; what is replaced, test_install.py shows."""

from typing import Any

from unisono.scripts.replacement import replace


class Old:
    pass


class New:
    pass


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
