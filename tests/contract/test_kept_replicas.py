"""What is kept between steps is what it would be if it were made anew: no change is missed, nothing is left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.comparisons import assert_alike, assert_all_same, assert_same, twins
from helpers.contract import Wrap
from helpers.losses import loss_of
from helpers.modules import Calls
from unisono.engines import replica


class Table(dict[str, Any]):
    """A container of a class of its own."""


class Uncounted(tuple[Any, ...]):
    """A tuple that refuses its length, as e3nn's Irreps does."""

    def __len__(self) -> int:
        raise NotImplementedError


def use_head(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = model.body(x)
    return model.head(x) if hasattr(model, "head") else 2 * x


def use_all(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model.head(x) + model.shift
    return y if model.extra is None else y * model.extra


def parts() -> dict[str, Any]:
    return {"head": nn.Linear(4, 4), "extra": None, "shift": nn.Buffer(torch.ones(4))}


def body_and_head() -> dict[str, Any]:
    return {"body": nn.Sequential(nn.Linear(4, 4)), "head": nn.Linear(4, 4)}


def one_head() -> dict[str, Any]:
    return {"head": nn.Linear(4, 4), "table": Table(scale=2.0), "rate": rate_of(2.0)}


def rate_of(value: float) -> Callable[[], float]:
    return lambda: value


def move_child(model: nn.Module) -> None:
    head = model.head
    del model.head
    model.body.add_module("head", head)


def replace_forward(model: nn.Module) -> None:
    forward = model.forward
    model.forward = lambda x: forward(x) * 2


def two_hooks(model: nn.Module) -> object:
    model.head.register_forward_hook(lambda layer, args, output: output * 2)
    return model.head.register_forward_hook(lambda layer, args, output: output + 1)


def change_their_order(model: nn.Module) -> None:
    model.head._forward_hooks.move_to_end(next(iter(model.head._forward_hooks)))


def use_layers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = model.layers
    return second(first(x))


def layers_in_a_list() -> dict[str, Any]:
    head, tail = nn.Linear(4, 4), nn.Linear(4, 4)
    return {"head": head, "tail": tail, "layers": [head, tail]}


Change = Callable[[Any], object]
# Name -> what forward computes, the module's attributes, and changes, one before each step.
CHANGES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], dict[str, Any]], list[Change]]] = {
    "new parameter": (use_all, parts, [lambda model: setattr(model, "extra", nn.Parameter(torch.full((4,), 2.0)))]),
    "hooks in another order": (use_all, parts, [two_hooks, change_their_order]),
    "pre-hook": (use_all, parts, [lambda model: model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))]),
    "forward": (use_all, parts, [replace_forward]),
    "no child": (use_head, body_and_head, [lambda model: delattr(model, "head")]),
    "a child that moves": (use_head, body_and_head, [move_child]),
    "layers in a list that change places": (use_layers, layers_in_a_list, [lambda model: model.layers.reverse()]),
    "a module in a container of another class": (
        lambda model, x: model.table["layer"](x) if "layer" in model.table else model.head(x) * model.table["scale"],
        one_head,
        [lambda model: model.table.update(layer=model.head)],
    ),
    "an attribute of a parameter that becomes an equal one": (
        lambda model, x: model.head(x) * (3 if model.head.weight.flag is True else 1),
        one_head,
        [lambda model: setattr(model.head.weight, "flag", True)],
    ),
    "a variable that a function closes over": (
        lambda model, x: model.head(x) * model.rate(),
        one_head,
        [lambda model: setattr(model.rate.__closure__[0], "cell_contents", 5.0)],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_steps_are_seen(wrap: Wrap, name: str) -> None:
    """R8: whatever the caller changes, the next forward runs with it."""
    forward, attributes, changes = CHANGES[name]
    plain, model = twins(wrap, Calls(forward, **attributes()), 3)
    x = torch.randn(6, 4)
    for module in (plain, model.module):
        module.head.weight.flag = 1
    before = None
    for change in (None, None, *changes, None):
        for root in (plain, model.module) if change else ():
            change(root)
        output, expected = model(x), plain(x)
        assert_same(output, expected)
        gradients = [
            torch.autograd.grad(loss_of(y), [*m.parameters()], allow_unused=True)
            for y, m in ((output, model), (expected, plain))
        ]
        assert_all_same(*gradients)
        assert change is None or not torch.equal(output, before)
        before = output


def test_conjugated_data(wrap: Wrap) -> None:
    """R8: `.data =` with the same memory, read in another way."""
    plain, model = twins(wrap, Calls(lambda model, x: x * model.factor, factor=nn.Parameter(torch.tensor([1 + 2j]))), 2)
    x = torch.randn(4, 1, dtype=torch.complex64)
    for _ in range(3):
        assert_same(model(x), plain(x), rtol=1e-6)
        for module in (plain, model.module):
            module.factor.data = module.factor.data.conj()


class Remembers(nn.Module):
    """Keeps itself, if forward is asked to, and what it computed."""

    def __init__(self, kept: list[nn.Module]) -> None:
        super().__init__()
        self.layer, self.kept, self.way = nn.Linear(4, 4), kept, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = self.layer(x)
        if self.way == "itself":
            self.kept.append(self)
        return self.layer(x)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def backward_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model.tail(model.head(x))
    if model.inside:
        model.tail(model.head(x)).square().sum().backward()
    return y


def test_a_backward_inside_forward_after_a_parameter_was_frozen(wrap: Wrap) -> None:
    """R8: the gradients go to the parameters that need one now."""

    def steps(call: Callable[..., torch.Tensor], root: nn.Module) -> list[torch.Tensor | None]:
        grads = []
        for step in range(4):
            root.inside = step >= 2
            root.head.weight.requires_grad_(step != 2)
            root.zero_grad()
            loss_of(call(torch.randn(9, 4))).backward()
            grads += [p.grad for p in root.parameters()]
        return grads

    assert_alike(wrap, Calls(backward_inside, head=nn.Linear(4, 4), tail=nn.Linear(4, 5), inside=False), steps, 3)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore:forward of")
def test_a_replica_that_the_caller_keeps_stays_as_it_is(wrap: Wrap, grad: bool) -> None:
    """R6: what forward assigned can be read as long as the replica is referred to."""
    kept: list[nn.Module] = []
    model = wrap(Remembers(kept), 2)
    x = torch.randn(6, 4)
    for way in ("", "itself", "", ""):
        model.module.way = way
        with torch.set_grad_enabled(grad):
            y = model(x)
        if grad:
            y.sum().backward()
        model.module.kept = kept
    assert sum(len(replica.aux) for replica in kept) == len(x)


# What forward does to its replica. The next one begins with what the live module has.
LEFT: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "an attribute": lambda model, x: setattr(model, "factor", model.factor + x.sum().item()),
    "a class": lambda model, _: setattr(model.head, "__class__", Doubled),
    "a layer in a list": lambda model, _: model.layers.append(model.head),
    "a parameter's hook": lambda model, _: model.head.weight.register_hook(lambda gradient: gradient * 2),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:forward of")
def test_what_forward_does_to_a_replica_goes_with_the_call(wrap: Wrap, name: str) -> None:
    """R6: numbers and gradients of the same batch are the same in each step."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in model.layers:
            y = layer(y) * model.factor
        LEFT[name](model, x)
        return y

    model = wrap(Calls(forward, factor=1.0, **layers_in_a_list()), 3)
    x, first = torch.randn(7, 4), None
    for _ in range(4):
        y = model(x)
        found = [y, *torch.autograd.grad(loss_of(y), [*model.parameters()])]
        first = first or found
        assert_all_same(found, first)


class Accumulates(nn.Module):
    """Keeps in a dict what it has computed, as spikingjelly's neurons keep their voltages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.memories = nn.Parameter(torch.ones(4)), {"sum": 0.0}

    def _replicate_for_data_parallel(self) -> nn.Module:
        replica = super()._replicate_for_data_parallel()
        replica.memories = self.memories.copy()
        return replica

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            self.memories["sum"] = self.memories["sum"] + x * self.weight
        return self.memories["sum"]


class MadeAnew(Accumulates):
    """Makes a copy without torch's help, whose children are others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.layer.weight)

    def _replicate_for_data_parallel(self) -> nn.Module:
        return MadeAnew()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(super().forward(x))


@pytest.mark.parametrize("cls", [Accumulates, MadeAnew])
def test_a_class_says_itself_what_its_replicas_do_not_share(wrap: Wrap, cls: type[nn.Module]) -> None:
    """R6: by torch's `_replicate_for_data_parallel`. It was not called, and replicas in threads wrote into one dict."""
    model = wrap(cls().double(), 2)
    x = torch.randn(6, 4).double()
    for _ in range(2):
        y = model(x)
        assert_same(y, 3 * x)
        y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.module.parameters())
    assert_same(model.module.weight.grad, 6 * x.sum(0))
    assert model.module.memories == {"sum": 0.0}


def layers_with(change: Callable[[nn.Linear], object]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    change(model[0])
    return model


OWN = {"sync_batch_norm": False}
STEADY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "several kinds of layers": (lambda: layers_with(lambda layer: None), OWN),
    "synchronised": (lambda: layers_with(lambda layer: None), {"sync_batch_norm": True}),
    "forward assigns an attribute": (lambda: Remembers([]), {}),
    "a forward hook": (lambda: layers_with(lambda layer: layer.register_forward_hook(lambda *_: None)), OWN),
    "a tuple that refuses its length": (
        lambda: layers_with(lambda layer: setattr(layer, "size", Uncounted([4]))),
        OWN,
    ),
    "layers in a list": (lambda: Calls(use_layers, **layers_in_a_list()), {}),
    "weights in a list": (lambda: Calls(lambda model, x: model.lstm(x)[0], lstm=nn.LSTM(4, 4)), {}),
    "a backward hook": (
        lambda: layers_with(lambda layer: layer.register_full_backward_hook(lambda *_: None)),
        OWN,
    ),
}


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.filterwarnings("ignore:forward of")
def test_steady_calls_make_no_replicas(wrap: Wrap, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """N10: neither in training nor in evaluation, once there are some."""
    make, options = STEADY[name]
    made: list[object] = []
    make_replica = replica.Replica.__init__
    monkeypatch.setattr(replica.Replica, "__init__", lambda *args: made.append(args[0]) or make_replica(*args))
    model = wrap(make(), 2, **options)
    x = torch.randn(8, 4, requires_grad=True)
    for call in (lambda: model(x).sum().backward(), torch.no_grad()(lambda: model(x))):
        for step in range(4):
            made.clear()
            call()
            assert bool(made) <= (step < 2)


def test_memory_that_a_conversion_replaces_is_freed(wrap: Wrap) -> None:
    """N10: replicas share the parameters' memory, and must not keep it."""
    model = wrap(nn.Linear(4, 4), 2)
    model(torch.randn(6, 4)).sum().backward()
    storage = model.module.weight.untyped_storage()
    model.half()
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def test_lists_of_buffers_have_one_dtype(wrap: Wrap) -> None:
    """N10: batch norm has floats and an integer. Of a list with both, CUDA would copy each tensor by itself."""
    model = wrap(nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3))), sync_batch_norm=False)
    model(torch.randn(8, 4))
    lists = model._step_memory._pool.buffers
    assert sorted(map(len, lists)) == [3, 6]
    assert [len({tensor.dtype for tensor in each}) for each in lists] == [1, 1]
