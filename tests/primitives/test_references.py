"""rebind: what an attribute leads to is found, and replaced, wherever it is."""

import functools
import gc
import re
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unisono import DataParallel
from unisono.primitives.references import is_inert, observes, rebind, references

Pair = namedtuple("Pair", ["first", "second"])


class Live(nn.Module):
    def method(self) -> "Live":
        return self


class AttributeDict(dict):  # a user's mapping: `settings.layer`
    def __getattr__(self, name: str) -> Any:
        return self[name]


class TwoLayers(list):  # a user's list, whose constructor takes other arguments than list's
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])


class ReadOnly(dict):  # a user's settings, after `freeze()`
    __slots__ = ("held",)

    def __setitem__(self, *_: Any) -> None:
        raise RuntimeError("read only")

    update = pop = clear = setdefault = __delitem__ = __copy__ = __reduce_ex__ = __setitem__


class ReadOnlyList(list):
    __setitem__ = append = extend = insert = __copy__ = __reduce_ex__ = ReadOnly.__setitem__


class TwoOf(tuple):
    def __new__(cls, first: Any, second: Any) -> "TwoOf":
        return super().__new__(cls, (first, second))


class Named(dict):
    def __init__(self, *args: Any, layer: Any = None) -> None:
        super().__init__(*args)
        self.layer = layer


live, replica = Live(), Live()
tensor, own_tensor = torch.zeros(2), torch.ones(2)
REPLACED = {id(live): replica, id(tensor): own_tensor}


def returns(value: Any) -> Any:
    return value


# How to put something into a value, and how to get it out again.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda m: [1, m], lambda v: v[1]),
    "tuple": (lambda m: ("a", m), lambda v: v[1]),
    "namedtuple": (lambda m: Pair(m, 2), lambda v: v.first),
    "set": (lambda m: {m}, lambda v: next(iter(v))),
    "frozenset": (lambda m: frozenset([m]), lambda v: next(iter(v))),
    "deque": (lambda m: deque([m], maxlen=3), lambda v: v[0]),
    "dict": (lambda m: {"a": m}, lambda v: v["a"]),
    "dict key": (lambda m: {m: 1}, lambda v: next(iter(v))),
    "OrderedDict": (lambda m: OrderedDict(z=1, a=m), lambda v: v["a"]),
    "defaultdict": (lambda m: defaultdict(list, a=m), lambda v: v["a"]),
    "dict of a class": (lambda m: AttributeDict(a=m), lambda v: v.a),
    "list of a class": (lambda m: TwoLayers(m, 1), lambda v: v[0]),
    "dict that refuses": (lambda m: ReadOnly(a=m), lambda v: v["a"]),
    "list that refuses": (lambda m: ReadOnlyList([m]), lambda v: v[0]),
    "tuple of a class": (lambda m: TwoOf(m, 1), lambda v: v[0]),
    "view of a dict": (lambda m: types.MappingProxyType({"a": m}), lambda v: v["a"]),
    "attribute of a dict with items": (lambda m: Named({"a": m}, layer=m), lambda v: v.layer),
    "bound method": (lambda m: m.method, lambda v: v()),
    "partial's argument": (lambda m: functools.partial(returns, m), lambda v: v()),
    "partial's keyword": (lambda m: functools.partial(returns, value=m), lambda v: v()),
    "partial of a method": (lambda m: functools.partial(m.method), lambda v: v()),
    "closure": (lambda m: lambda: m, lambda v: v()),
    "default": (lambda m: lambda held=m: held, lambda v: v()),
    "keyword default": (lambda m: lambda *, held=m: held, lambda v: v()),
    "weak reference": (weakref.ref, lambda v: v()),
    "weak proxy": (weakref.proxy, lambda v: v.__repr__.__self__),
    "list of weak proxies": (lambda m: [weakref.proxy(m)], lambda v: v[0].__repr__.__self__),
    "deep": (lambda m: [{"a": (Pair([deque([lambda: m])], 0),)}], lambda v: v[0]["a"][0].first[0][0]()),
}


FOR_TENSORS = [name for name in PLACES if "method" not in name]


@pytest.mark.parametrize(
    ("place", "held", "own"),
    [*((name, live, replica) for name in PLACES), *((name, tensor, own_tensor) for name in FOR_TENSORS)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_module_or_a_tensor_is_found_and_replaced(place: str, held: Any, own: Any) -> None:
    """R7, R3: a blueprint looks at nothing but what the garbage collector tracks."""
    put, get = PLACES[place]
    value = put(held)
    gc.collect()  # it may decide to track a container no longer
    assert gc.is_tracked(value)
    assert gc.is_tracked(held)
    assert not is_inert(value)
    (found,) = references(value)
    assert found is held
    rebound = rebind(value, REPLACED)
    assert get(rebound) is own
    assert type(rebound) is type(value)
    assert get(value) is held, "the live module's own attribute was changed"


@pytest.mark.parametrize("place", FOR_TENSORS)
def test_what_leads_nowhere_stays_the_same_object(place: str) -> None:
    """R6, R7: lists that replicas change stay the caller's."""
    put, _ = PLACES[place]
    other = Live()
    value = put(other)
    assert rebind(value, REPLACED) is value


def test_containers_keep_their_properties() -> None:
    """R7: order, default factory, maximum length, other items."""
    mapping = rebind(OrderedDict(z=live, a=2), REPLACED)
    assert list(mapping) == ["z", "a"]
    table = rebind(defaultdict(list, a=live), REPLACED)
    assert table["missing"] == []
    assert rebind(deque([live], maxlen=3), REPLACED).maxlen == 3
    assert rebind(Pair(live, "x"), REPLACED).second == "x"
    held = ReadOnly(a=live)
    held.held = 3
    assert rebind(held, REPLACED).held == 3
    limits = torch.return_types.max((tensor, 1))
    assert type(rebind(limits, REPLACED)) is type(limits)
    assert rebind(limits, REPLACED).values is own_tensor


def test_functions_keep_their_properties() -> None:
    """R7: name, attributes, and cells that are shared with other functions; a partial's class too."""
    count = 0

    def forward(x: int, *, y: int = 2) -> tuple[Any, int]:
        nonlocal count
        count += x + y
        return live_here, count

    live_here = live
    forward.tag = [live]
    rebound = rebind(forward, REPLACED)
    assert rebound(1) == (replica, 3)
    assert forward(1) == (live, 6)
    assert count == 6, "both write the same variable"
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(rebound, name) == getattr(forward, name)
    assert rebound.tag == [replica]

    class Named(functools.partial):
        pass

    partial = Named(returns, live)
    partial.name = "p"
    rebound = rebind(partial, REPLACED)
    assert type(rebound) is Named
    assert rebound.name == "p"
    assert rebound() is replica


def test_an_unassigned_cell_is_left_alone() -> None:
    """R7"""

    def outer() -> Callable[[], Any]:
        inner = lambda: (held, not_yet)  # noqa: E731
        held = live
        rebound.append(rebind(inner, REPLACED))
        not_yet = 1
        return inner

    rebound: list[Callable[[], Any]] = []
    assert list(references(outer())) == [live]
    assert rebound[0]() == (replica, 1)


def test_values_shared_by_two_attributes_stay_shared() -> None:
    """R3, R7: with one memo, a list in two attributes is one list in the replica."""
    shared = [live]
    memo: dict[int, Any] = {}
    first = rebind({"a": shared}, REPLACED, memo)
    second = rebind((shared, 1), REPLACED, memo)
    assert first["a"] is second[0]
    assert first["a"] == [replica]


def test_containers_that_contain_themselves() -> None:
    """R7: replaced all the way round: no way leads back to the live module."""
    loop: list[Any] = [live]
    loop.append(loop)
    assert list(references(loop)) == [live]
    rebound = rebind(loop, REPLACED)
    assert rebound[0] is replica
    assert rebound[1][0] is replica
    assert rebound[1][1][0] is replica
    table: dict[str, Any] = {"m": live, "children": []}
    table["children"].append({"parent": table})
    rebound = rebind(table, REPLACED)
    assert rebound["children"][0]["parent"]["m"] is replica


def test_a_function_that_calls_itself() -> None:
    """R7: the recursive call is the replica's too."""

    def descend(depth: int) -> list[Any]:
        return [live_here] if depth == 0 else [live_here, *descend(depth - 1)]

    live_here = live
    assert rebind(descend, REPLACED)(2) == [replica] * 3
    assert descend(2) == [live] * 3


def test_deep_nesting() -> None:
    """R7: followed as deep as a program's own structures go; deeper, and nothing breaks."""
    value: Any = live
    for _ in range(90):
        value = [value]
    assert list(references(value)) == [live]
    rebound = rebind(value, REPLACED)
    while isinstance(rebound, list):
        rebound = rebound[0]
    assert rebound is replica
    for _ in range(3000):
        value = [value]
    assert references(value) == []
    assert rebind(value, REPLACED) is value


INERT = [1, "text", None, torch.float32, [1, 2.0, "x"], {"a": 1}, (None, True), {1, 2}, range(3), list(range(5000))]


@pytest.mark.parametrize("value", [*INERT, Counter("aab"), len, types.ModuleType("some")], ids=lambda v: str(v)[:20])
def test_what_points_at_nothing(value: Any) -> None:
    """R7: common attributes cost nothing and stay as they are."""
    assert list(references(value)) == []
    assert rebind(value, REPLACED) is value
    assert is_inert(value) or isinstance(value, Counter)


def test_a_quick_look_is_never_wrong() -> None:
    """R7: what is called inert leads nowhere, or is too large: what hides there is found in the output's graph."""
    assert not is_inert([[1]])
    assert not is_inert({"a": [live]})
    assert not is_inert(live.method)
    vocabulary = dict.fromkeys(range(2000), live)
    assert is_inert(vocabulary)
    assert list(references(vocabulary)) == []
    assert rebind(vocabulary, REPLACED) is vocabulary


def as_graphed(module: nn.Module) -> nn.Module:
    """Give a module the `forward` that torch.cuda.make_graphed_callables would, as far as can be seen from outside."""
    inside = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return inside(x)

    forward.__module__ = "torch.cuda.graphs"
    module.forward = forward
    return module


def test_a_module_that_replays_cuda_graphs_runs_on_one_device_only() -> None:
    """R13: several replicas would write into the graph's one input; also where it is a part of the model."""
    graphed = as_graphed(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    assert torch.equal(DataParallel(graphed, ["cpu"])(x), graphed(x))
    for model in (graphed, nn.Sequential(nn.Identity(), graphed)):
        with pytest.raises(RuntimeError, match=r"replays CUDA graphs .*Wrap the module for one device"):
            DataParallel(model, ["cpu", "cpu"])(x)


def test_torch_still_makes_graphed_modules_that_can_be_known() -> None:
    """R13: by the module in which the function is defined that takes the place of `forward`."""
    code = Path(torch.cuda.graphs.__file__).read_text()
    assert torch.cuda.graphs.__name__ == "torch.cuda.graphs"
    assert re.search(r"def new_fwd\(", code)
    assert re.search(r"func\.forward = make_graphed_forward\(", code)


class OwnHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hook = lambda module, args, output: self


def captures(module: nn.Module, others: Any = ()) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        return SAVED[module], others

    return hook


def sets(module: nn.Module) -> Callable[..., Any]:
    def hook(*_: Any) -> None:
        SAVED[module] = 1
        module.mult = 2

    return hook


SAVED: dict[Any, Any] = {}


# Name -> makes a hook of a module, and whether it observes that.
OBSERVING: dict[str, tuple[Callable[[OwnHooks], Any], bool]] = {
    "variable": (captures, True),
    "function": (lambda m: captures(Live(), captures(m)), True),
    "default": (lambda m: lambda *_, layer=m: SAVED[layer], True),
    "partial": (lambda m: functools.partial(lambda layer, *_: SAVED[layer], m), True),
    "sets": (sets, False),
    "hands on": (lambda m: functools.partial(returns, m), False),
    "key": (lambda m: captures(Live(), {m: "name"}), False),
    "none": (lambda m: returns, False),
    "own": (lambda m: m.hook, False),
    "own partial": (lambda m: functools.partial(m.hook, m), False),
    "method": (lambda m: m.forward, False),
}


@pytest.mark.parametrize("name", OBSERVING)
def test_a_hook_that_has_its_module_as_a_key_observes_it(name: str) -> None:
    """R9: not one that uses the variable otherwise, nor the model's own code, where it is `self`."""
    hook, expected = OBSERVING[name]
    module = OwnHooks()
    assert observes(hook(module), module, {(OwnHooks.__module__, OwnHooks.__qualname__)}) == expected
