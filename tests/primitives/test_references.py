"""rebind: what an attribute leads to is found, and replaced, wherever it is."""

import functools
import gc
import re
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.modules import Calls
from unisono import DataParallel
from unisono.primitives.references import observes

Pair = namedtuple("Pair", ["first", "second"])


class AttributeDict(dict):  # a user's mapping: `settings.layer`
    def __getattr__(self, name: str) -> Any:
        return self[name]


class TwoLayers(list):  # a user's list, whose constructor takes other arguments than list's
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])


class NamedPartial(functools.partial):
    pass


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


def read_only(m: Any) -> ReadOnly:
    settings = ReadOnly(a=m)
    settings.held = 3
    return settings


def returns(value: Any) -> Any:
    return value


def loop(m: Any) -> list[Any]:
    value = [m]
    value.append(value)
    return value


def calls_itself(m: Any) -> Callable[..., Any]:
    def descend(depth: int = 2) -> Any:
        return descend(depth - 1) if depth else m

    return descend


def nested(m: Any) -> Any:
    for _ in range(90):
        m = [m]
    return m


def innermost(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0]
    return value


# How to put a layer or a parameter into a value, and how to get it out again.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda m: [1, m], lambda v: v[1]),
    "tuple": (lambda m: ("a", m), lambda v: v[1]),
    "namedtuple": (lambda m: Pair(m, 2), lambda v: v.first),
    "set": (lambda m: {m}, lambda v: next(iter(v))),
    "frozenset": (lambda m: frozenset([m]), lambda v: next(iter(v))),
    "deque": (lambda m: deque([m], maxlen=3), lambda v: v[0]),
    "dict": (lambda m: {"a": m}, lambda v: v["a"]),
    "dict key": (lambda m: {m: 1}, lambda v: next(iter(v))),
    "OrderedDict": (lambda m: OrderedDict(z=1, a=m), lambda v: v["a"] if [*v] == ["z", "a"] else None),
    "defaultdict": (lambda m: defaultdict(list, a=m), lambda v: v["a"] if v["b"] == [] else None),
    "dict of a class": (lambda m: AttributeDict(a=m), lambda v: v.a),
    "list of a class": (lambda m: TwoLayers(m, 1), lambda v: v[0]),
    "dict that refuses": (read_only, lambda v: v["a"] if v.held == 3 else None),
    "list that refuses": (lambda m: ReadOnlyList([m]), lambda v: v[0]),
    "tuple of a class": (lambda m: TwoOf(m, 1), lambda v: v[0]),
    "attribute of a dict with items": (lambda m: Named({"a": m}, layer=m), lambda v: v.layer),
    "partial's argument": (lambda m: NamedPartial(returns, m), lambda v: v() if type(v) is NamedPartial else None),
    "partial's keyword": (lambda m: functools.partial(returns, value=m), lambda v: v()),
    "closure": (lambda m: lambda: m, lambda v: v()),
    "default": (lambda m: lambda held=m: held, lambda v: v()),
    "keyword default": (lambda m: lambda *, held=m: held, lambda v: v()),
    "weak reference": (weakref.ref, lambda v: v()),
    "list of weak proxies": (lambda m: [weakref.proxy(m)], lambda v: v[0].__repr__.__self__),
    "deep": (lambda m: [{"a": (Pair([deque([lambda: m])], 0),)}], lambda v: v[0]["a"][0].first[0][0]()),
    "a list in itself": (loop, lambda v: v[1][1][0]),
    "a function that calls itself": (calls_itself, lambda v: v()),
    "90 levels": (nested, innermost),
}


@pytest.mark.parametrize("of", ["layer", "weight"])
@pytest.mark.parametrize("place", PLACES)
def test_what_an_attribute_leads_to_is_the_replicas_own(place: str, of: str) -> None:
    """R7, R3: in two attributes it is one object; gradients arrive, and the live module's attribute stays as it is."""
    put, get = PLACES[place]

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = get(net.place)
        assert found is getattr(net, of)
        assert net.again["place"] is net.place
        return found(x) if of == "layer" else x @ found

    net = Calls(forward, layer=nn.Linear(3, 3), weight=nn.Parameter(torch.randn(3, 3)))
    held = getattr(net, of)
    net.place = put(held)
    net.again = {"place": net.place}
    gc.collect()  # it may decide to track a container no longer
    x, gradients = torch.randn(5, 3), []
    for model in (net, DataParallel(net, ["cpu", "cpu"])):
        net.zero_grad()
        model(x).square().sum().backward()
        gradients.append([None if each.grad is None else each.grad.clone() for each in net.parameters()])
        assert get(net.place) is held
    torch.testing.assert_close(*gradients)


def test_functions_share_their_other_variables() -> None:
    """R7: a rebuilt function keeps its name, and the cells that lead nowhere are those of the caller's function."""
    count = 0

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        names.append((forward.__qualname__, forward.tag))
        return layer(x)

    names: list[Any] = []
    layer = nn.Linear(3, 3)
    forward.tag = "tag"  # type: ignore[attr-defined]
    net = Calls(lambda net, x: net.kept(x), layer=layer, kept=forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it writes into a closure
        DataParallel(net, ["cpu", "cpu"])(torch.randn(4, 3)).sum().backward()
    assert count == 2
    assert names == [(forward.__qualname__, "tag")] * 2
    assert layer.weight.grad is not None


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


class Live(nn.Module):
    pass


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
