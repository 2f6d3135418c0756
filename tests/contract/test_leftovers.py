"""What forward leaves behind: it is lost, or one replica's, and a warning says so; hooks that it registers are its own.

The oracle of the hooks is the plain module; of the warnings, that the plain module would have kept what they name.
"""

import contextlib
import copy
import ctypes
import functools
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from helpers import shared_values
from helpers.comparisons import assert_alike, assert_same, one_step, twins
from helpers.contract import DEVICES, Wrap, at_one_place, said_by
from helpers.losses import loss_of
from helpers.modules import Calls
from unisono import data_parallel, verify
from unisono.primitives.object_state import same_state, state_of

Forward = Callable[[Any, torch.Tensor], object]


def steps_of(model: Any, rows: int = 7) -> dict[str, Callable[[], object]]:
    def x() -> torch.Tensor:
        return torch.randn(rows, 4)

    return {
        "training": lambda: model(x()).sum().backward(),
        "without gradients": torch.no_grad()(lambda: model(x())),
        "map": lambda: list(model.map([x(), x(), x()])),
        "the verbs": lambda: data_parallel(model.module, x(), model.device_ids).sum().backward(),
    }


def assigning(assign: Forward, **attributes: Any) -> nn.Module:
    """Return a module whose forward does something, and returns what a linear layer does."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        assign(module, x)
        return module.layer(x) * module.weight

    return Calls(forward, layer=nn.Linear(4, 4), weight=nn.Parameter(torch.ones(4)), **attributes)


class Square(nn.Linear):
    total = 1000

    @functools.cached_property
    def squared(self) -> torch.Tensor:
        return self.weight.detach() ** 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.squared.sum()


def grown(m: Any, x: torch.Tensor) -> None:
    length = x.shape[1] + m.steps
    if m.table is None or len(m.table) < length:
        m.table = torch.arange(float(length), device=x.device)
    m.steps += 1


def first_time(m: Any, x: torch.Tensor) -> None:
    if not m.is_ready:
        m.is_ready, m.scale = True, 2.0


# What all replicas set alike.
ALIKE: dict[str, Forward] = {
    "a counter": lambda m, x: setattr(m, "steps", m.steps + 1),
    "a text": lambda m, x: setattr(m, "text", f"step {m.steps}"),
    "None": lambda m, x: setattr(m, "attention", None),
    "a number": lambda m, x: setattr(m, "width", x.shape[1]),
    "sizes": lambda m, x: setattr(m, "size", (x.shape[1:], [x.dtype, 1.5])),
    "a first time": first_time,
    "a table that grows": grown,
    "deleted": lambda m, x: vars(m).pop("steps", None),
    "a mode": lambda m, x: m.layer.eval(),
    "of a layer": lambda m, x: setattr(m.layer, "calls", getattr(m.layer, "calls", 0) + 1),
}


def attributes_in(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}{path}": value.cpu() if isinstance(value, torch.Tensor) else value
        for name, module in model.named_modules()
        for path, value in state_of({k: v for k, v in vars(module).items() if not k.startswith("_")}).items()
        if path != "['table']['layer']"
    }


@pytest.mark.parametrize("name", ALIKE)
def test_what_all_replicas_assign_alike_is_kept(wrap: Wrap, name: str) -> None:
    """R6: the module has what one device would have left, in each way but a map, and in all kinds of steps in turn.

    It was lost, with a warning.
    """
    for ways in (["training", "without gradients", "training", "training"], ["the verbs"] * 2):
        plain = with_attributes(ALIKE[name])
        plain.table, plain.is_ready = None, False
        model, x = wrap(copy.deepcopy(plain), 2), torch.randn(22, 4)
        device = next(model.module.parameters()).device
        plain.to(device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for way in ways:
                steps_of(model, 22)[way]()
                plain(x.to(device))
                found, expected = attributes_in(model.module), attributes_in(plain)
                assert same_state(found, expected), (way, found, expected)


class WithEntry(nn.Linear):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        batch["y"] = super().forward(batch["x"])
        return batch


class Timed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun, self.ended, self.output = time.perf_counter(), time.time(), super().forward(x)
        return self.output


@pytest.mark.parametrize("module", [Square, WithEntry, Timed])
def test_what_no_program_misses_is_not_said(wrap: Wrap, module: type[nn.Module]) -> None:
    """R6: an entry or attribute that it returns, clocks. It was said."""
    model, x = wrap(module(4, 4)), torch.randn(6, 4)
    assert [str(each.message) for each in said_by(lambda: model({"x": x} if module is WithEntry else x))] == []


class Capturing(nn.Module):
    """Installs hooks in its first forward, as the models of transformers do for hidden states."""

    def __init__(self, captures: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.is_ready, self.captures = False, captures

    def forward(self, x: torch.Tensor) -> Any:
        if not self.is_ready:
            for layer in self.layers:
                if self.captures:
                    layer.register_forward_hook(lambda layer, args, output: output * 2)
                else:
                    layer.scale = nn.Parameter(torch.full((), 2.0, dtype=x.dtype, device=x.device))
            self.is_ready = True
        y = self.layers(x)
        return y if self.captures else y * self.layers[0].scale


@pytest.mark.parametrize("captures", [True, False], ids=["hooks", "parameters"])
def test_a_flag_is_kept_with_what_it_stands_for(wrap: Wrap, captures: bool) -> None:
    """R6: hooks that all install stay. Layers and parameters are lost, and then so is the flag that they are there."""
    plain, model = twins(wrap, Capturing(captures))
    x = torch.randn(6, 4)
    plain.to(next(model.parameters()).device)
    for way in ("threads", "the verbs", "threads"):
        mode = torch.autograd.graph.save_on_cpu if way == "the verbs" else contextlib.nullcontext
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("error" if captures else "ignore")
            found = model(x)
        torch.testing.assert_close(found, plain(x.to(found.device)), check_device=False)
    assert model.module.is_ready is captures


outside = nn.Parameter(torch.full((4,), 2.0))


def late_parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    y = m.layer(x)
    return y * outside.to(y) if m.steps % 2 else y


def initialised(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.is_ready:
        m.is_ready, m.mean = True, x.mean(0)
    output: torch.Tensor = m.layer(x * 0 + m.mean * 0)
    return output


@pytest.mark.parametrize("forward", [late_parameter, initialised])
def test_what_is_kept_leads_forward_as_on_one_device(wrap: Wrap, forward: Any) -> None:
    """R6: a graph that follows from a counter is searched; a flag is kept only with the value for which it stands."""
    plain, model = twins(wrap, Calls(forward, layer=nn.Linear(4, 4), steps=0, is_ready=False, mean=None))
    plain.to(next(model.parameters()).device)
    for _ in range(4):
        gradients = []
        for each in (plain, model):
            outside.grad = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                each(torch.ones(6, 4).to(next(plain.parameters()))).sum().backward()
            gradients.append(outside.grad)
        assert (gradients[0] is None) == (gradients[1] is None)
        if gradients[0] is not None:
            torch.testing.assert_close(*gradients)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, check_device=False)


@at_one_place
def test_a_counter_makes_no_other_replicas(wrap: Wrap) -> None:
    """R6, R8: nor does a text that is another one in each step."""
    found: set[int] = set()

    def count(m: Any, x: torch.Tensor) -> None:
        found.add(id(m))
        m.steps, m.text = m.steps + 1, str(m.steps)

    model = wrap(with_attributes(count))
    for number in range(6):
        model(torch.randn(6, 4)).sum().backward()
        if number < 2:  # the text makes another structure, of whose first step the replicas may be others
            found.clear()
    assert len(found) == 2
    assert model.module.steps == 6


# What forward assigns, and its path in the warning.
ASSIGNED: dict[str, tuple[Forward, str]] = {
    "a count of rows": (lambda m, x: setattr(m, "steps", m.steps + len(x)), "steps"),
    "what was None": (lambda m, x: setattr(m, "attention", x.softmax(-1)), "attention"),
    "a loss": (lambda m, x: setattr(m, "aux_loss", m.layer(x).square().mean()), "aux_loss"),
    "to a layer": (lambda m, x: setattr(m.layer, "seen", len(x)), "layer.seen"),
    "a layer": (lambda m, x: setattr(m, "head", nn.Linear(4, 4)), "head"),
    "another layer": (lambda m, x: setattr(m, "layer", nn.Linear(4, 4).to(x.device)), "layer"),
    "a parameter": (lambda m, x: setattr(m.layer, "scale", nn.Parameter(x.mean(0).detach())), "layer.scale"),
    "a method": (lambda m, x: setattr(m, "way", m.layer.forward), "way"),
    "a parameter's hook": (lambda m, x: m.weight.register_hook(lambda grad: grad * 2), "weight (a hook)"),
    "a hook that stays": (lambda m, x: m.layer.register_forward_hook(lambda *_: (m, None)[1]), "layer (a hook)"),
}


def with_attributes(assign: Forward) -> nn.Module:
    model = assigning(assign, steps=0, attention=None, square=Square(4, 4))
    model.table = {"layer": model.layer, "rows": 0}
    return model


class Slotted(Square):
    __slots__ = ("times",)

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.times = 0


@pytest.mark.parametrize("name", ASSIGNED)
def test_what_forward_assigns_is_said_once(wrap: Wrap, name: str) -> None:
    """R6: in each way in which replicas run; where the user's line is. It was lost in silence."""
    assign, path = ASSIGNED[name]
    for way in ("training", "without gradients", "map", "the verbs"):
        model = wrap(with_attributes(assign), 3)
        (said,) = said_by(steps_of(model)[way])
        assert said.filename == __file__
        assert f"forward of Calls assigns {path}:" in str(said.message)
    assert model.module.steps == 0


def test_a_number_of_rows_that_all_replicas_have_is_said(wrap: Wrap) -> None:
    """R6: one device would have left that of the batch, though all replicas assign the same."""
    for way in ("training", "without gradients", "the verbs"):
        model = wrap(with_attributes(lambda m, x: setattr(m, "steps", len(x))), 3)
        (said,) = said_by(steps_of(model, 9)[way])
        assert "forward of Calls assigns steps:" in str(said.message)
        assert model.module.steps == 0


def test_another_model_is_warned_of_too(wrap: Wrap) -> None:
    """R6: once for a model, not once for a class. A second one of the class was wrong in silence."""
    for _ in range(2):
        (said,) = said_by(steps_of(wrap(with_attributes(ASSIGNED["a count of rows"][0])))["training"])
        assert "assigns steps" in str(said.message)


def test_several_paths_are_in_one_warning(wrap: Wrap) -> None:
    """R6"""
    model = nn.Sequential(*(with_attributes(ASSIGNED["a count of rows"][0]) for _ in range(9)))
    (said,) = said_by(steps_of(wrap(model))["training"])
    assert "0.steps, 1.steps, 2.steps, 3.steps, 4.steps, 5.steps and 3 more" in str(said.message)


def late(module: Any, x: torch.Tensor) -> None:
    module.calls.value += 1
    if module.calls.value > 4:  # as after a warm-up
        module.late = x


def test_what_a_later_step_assigns_is_said(wrap: Wrap) -> None:
    """R6: replicas that have run before are compared where they are given back."""
    model = wrap(assigning(late, calls=ctypes.c_int(0)))
    said = said_by(steps_of(model)["training"])
    assert [str(each.message).split(":")[0] for each in said] == ["forward of Calls assigns late"]


def test_parts(wrap: Wrap) -> None:
    """R6, N13: what the last part has assigned."""
    model = wrap(with_attributes(ASSIGNED["a count of rows"][0]), parts=2)
    (said,) = said_by(steps_of(model)["training"])
    assert "assigns steps:" in str(said.message)


# What it leaves on tensors, in inputs, and in containers of which each replica has its own: only `verify` looks there.
LEFT: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "to a parameter": (lambda m, batch: setattr(m.weight, "grad_sample", batch["x"]), "weight.grad_sample"),
    "to an input": (lambda m, batch: setattr(batch["x"], "scale", 2.0), "kwargs['batch']['x'].scale"),
    "into an input": (lambda m, batch: batch.update(seen=batch["x"].detach()), "kwargs['batch']['seen']"),
    "into a list": (lambda m, batch: batch["scales"].pop(), "kwargs['batch']['scales'][1]: all replicas write into it"),
    "into a dict with a layer": (lambda m, batch: m.table.update(rows=len(batch["x"])), "table"),
    "in slots": (lambda m, batch: setattr(m.slotted, "times", m.slotted.times + 1), "slotted.times"),
}


@at_one_place
@pytest.mark.parametrize("name", LEFT)
def test_verify_says_what_forward_leaves_on_tensors_and_in_inputs(wrap: Wrap, name: str) -> None:
    """R6: a step says nothing of it."""
    leave, path = LEFT[name]
    forward = Calls(lambda m, batch: (leave(m, batch), m.layer(batch["x"]) * m.weight)[1], layer=nn.Linear(4, 4))
    forward.weight, forward.table = nn.Parameter(torch.ones(4)), {"layer": forward.layer, "rows": 0}
    forward.slotted = Slotted()
    inputs = {"batch": {"x": torch.randn(7, 4), "scales": [2.0, 3.0, 5.0]}}
    assert path in str(verify(wrap(forward), inputs, show=False))


def test_a_wrapper_inside_says_its_own(wrap: Wrap) -> None:
    """R6, A10"""
    inner = wrap(with_attributes(ASSIGNED["a count of rows"][0]))
    model = wrap(nn.Sequential(nn.Linear(4, 4), inner))
    (said,) = said_by(lambda: model(torch.randn(8, 4)).sum().backward())
    assert "forward of Calls assigns steps:" in str(said.message)
    assert said.filename == __file__


def derived() -> nn.Module:
    """Return layers whose weights torch computes in front of each forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = nn.utils.weight_norm(nn.Linear(4, 4))
    pruned = prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.3)
    return nn.Sequential(normed, nn.utils.spectral_norm(nn.Linear(4, 4)), pruned)


def use_lstm(module: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module.lstm(x.unsqueeze(1))[0]
    return output.squeeze(1)


def without_a_trace(module: Any, x: torch.Tensor) -> None:
    module.steps, module.attention, module.own = 0, None, x
    del module.own
    module.empty = []
    module.layer.register_full_backward_hook(lambda *_: None).remove()


# Nothing of what forward does here is lost.
KEPT: dict[str, Callable[[], nn.Module]] = {
    "nothing": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()),
    "what it had": lambda: assigning(without_a_trace, steps=0, attention=None, empty=[]),
    "buffers": lambda: assigning(lambda m, x: setattr(m, "mean", m.mean + 1), mean=nn.Buffer(torch.zeros(4))),
    "torch's own": derived,
    "an LSTM": lambda: Calls(use_lstm, lstm=nn.LSTM(4, 4, batch_first=True)),
    "a cache in a dict": lambda: assigning(lambda m, x: m.cache.setdefault(4, torch.ones(4)), cache={}),
}


@pytest.mark.parametrize("name", KEPT)
def test_where_nothing_is_lost_nothing_is_said(wrap: Wrap, name: str) -> None:
    """R6"""
    for way, step in steps_of(wrap(KEPT[name](), sync_batch_norm=False)).items():
        assert not [str(each.message) for each in said_by(step) if "assigns" in str(each.message)], way


def test_weights_that_torch_computes_hide_nothing(wrap: Wrap) -> None:
    """R6: layers of which nothing is lost come before one that assigns."""
    (said,) = said_by(steps_of(wrap(nn.Sequential(derived(), with_attributes(ASSIGNED["to a layer"][0]))))["training"])
    assert "forward of Sequential assigns 1.layer.seen:" in str(said.message)


# What replicas share and write into


kept_by_name: dict[str, Any] = {}
number_of_calls = 0
masks: dict[Any, torch.Tensor] = {}
lazy: torch.Tensor | None = None
was_told = False


def count_in_file(x: torch.Tensor) -> None:
    shared_values.number_of_rows += len(x)


class Meter:
    total = 0.0
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[float] = []

    def update(self, x: torch.Tensor) -> None:
        self.values.append(float(x.sum()))


def count_calls(module: Any, x: torch.Tensor) -> None:
    global number_of_calls  # noqa: PLW0603
    number_of_calls += 1


def count_in_class() -> None:
    Meter.total += 1.0


def count_around() -> Forward:
    rows = 0

    def count(module: Any, x: torch.Tensor) -> None:
        nonlocal rows
        rows += len(x)

    return count


# What forward writes into, and its name in the warning.
SHARED: dict[str, tuple[Forward, str]] = {
    "a global by name": (lambda m, x: kept_by_name.__setitem__("y", m.layer(x)), "kept_by_name (global of {file})"),
    "without a history": (lambda m, x: kept_by_name.__setitem__("x", x), "kept_by_name (global of {file})"),
    "a mean": (lambda m, x: kept_by_name.__setitem__("mean", float(x.mean())), "kept_by_name (global of {file})"),
    "a global counter": (count_calls, "number_of_calls (global of {file})"),
    "by a function": (lambda m, x: add_to_kept(x), "kept (global of {file})"),
    "a closure": (count_around(), "rows (variable of count)"),
    "a default": (lambda m, x, found=[]: found.append(1), "found (variable of <lambda>)"),
    "a list of the module": (lambda m, x: m.square.seen.append(x), "square.seen"),
    "a dict of the module": (lambda m, x: m.stats.__setitem__("n", m.stats["n"] + len(x)), "stats"),
    "an object of the module": (lambda m, x: m.meter.update(x), "meter.values"),
    "a deque": (lambda m, x: m.last.append(x), "last"),
    "an array": (lambda m, x: m.sums.__setitem__(0, float(x.detach().sum())), "sums"),
    "a tensor that is no buffer": (lambda m, x: m.mean.copy_(x.detach().mean(0)), "mean"),
}

# What programs rarely write into: only `verify` looks there.
RARELY_SHARED: dict[str, tuple[Forward, str]] = {
    "in another file": (lambda m, x: shared_values.add(x), "values (global of shared_values.py)"),
    "in another file, by its name": (
        lambda m, x: shared_values.values.append(x),
        "values (global of shared_values.py)",
    ),
    "a number in another file": (lambda m, x: count_in_file(x), "number_of_rows (global of shared_values.py)"),
    "a number in another file, by setattr": (
        lambda m, x: setattr(shared_values, "number_of_rows", shared_values.number_of_rows + len(x)),
        "number_of_rows (global of shared_values.py)",
    ),
    "a class, by a function": (lambda m, x: count_in_class(), "Meter.total"),
    "its class": (lambda m, x: setattr(type(m.square), "total", type(m.square).total + 1), "Square.total"),
    "a set": (lambda m, x: m.lengths.add(len(x)), "lengths"),
}


def with_shared(write: Forward) -> Any:
    model = assigning(write, stats={"n": 0}, meter=Meter(), last=deque(maxlen=2), lengths=set(), sums=np.zeros(3))
    model.square, model.mean, model.cache = Square(4, 4), torch.zeros(4), {}
    model.square.seen = []
    return model


@pytest.fixture
def files_as_before() -> Iterator[None]:
    """What forward has written into variables of files is gone afterwards."""
    yield
    for each in (kept, kept_by_name, shared_values.values, masks):
        each.clear()
    globals().update(number_of_calls=0, lazy=None, was_told=False)
    Square.total, Meter.total, shared_values.number_of_rows = 1000, 0.0, 0


@pytest.mark.usefixtures("files_as_before")
@pytest.mark.parametrize("name", SHARED)
def test_what_forward_writes_into_is_said_once(wrap: Wrap, name: str) -> None:
    """R6: in each way in which replicas run. It was one replica's, or in the order of arrival, in silence."""
    write, path = SHARED[name]
    for way in ("training", "without gradients", "map", "the verbs"):
        kept_by_name.clear()
        found = said_by(steps_of(wrap(with_shared(write), 3), 9)[way])
        assert [each.filename for each in found] == [__file__], way
        expected = f"forward of Calls writes into {path.format(file=Path(__file__).name)}, which all replicas share:"
        assert str(found[0].message).startswith(expected), way


@pytest.mark.usefixtures("files_as_before")
@at_one_place
@pytest.mark.parametrize("name", RARELY_SHARED)
def test_verify_looks_further(wrap: Wrap, name: str) -> None:
    """R6: a step says nothing of it."""
    write, path = RARELY_SHARED[name]
    model, x = wrap(with_shared(write), 3), torch.randn(9, 4)
    assert said_by(lambda: model(x).sum().backward()) == []
    report = verify(model, x, show=False)
    assert path.format(file=Path(__file__).name) in str(report)


@pytest.mark.usefixtures("files_as_before")
def test_it_is_said_in_the_first_step_and_of_several_replicas(wrap: Wrap) -> None:
    """R6"""
    write, _ = SHARED["a list of the module"]
    with pytest.warns(UserWarning, match="writes into square.seen, which all"):
        wrap(with_shared(write))(torch.randn(6, 4))
    assert said_by(steps_of(wrap(with_shared(write), 2, shares=[1, 0]))["training"]) == []


def lazy_mask(module: Any, x: torch.Tensor) -> None:
    global lazy, was_told  # noqa: PLW0603
    was_told = True
    if lazy is None:
        lazy = torch.ones(7, 7)


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length)


# Caches, of which nothing depends on rows, and flags.
CACHES: dict[str, Forward] = {
    "by size and device": lambda m, x: masks.setdefault((x.shape[1], x.device), torch.ones(4, device=x.device)),
    "by number of rows": lambda m, x: m.cache.setdefault(len(x), torch.ones(len(x), 1)),
    "by name": lambda m, x: m.cache.setdefault("frequencies", torch.arange(5.0)),
    "an object": lambda m, x: m.cache.setdefault("tokens", types.SimpleNamespace(size=4, names=["a"])),
    "a global": lazy_mask,
    "lru_cache": lambda m, x: positions(x.shape[1]),
    "what was said once": lambda m, x: m.lengths.add("a message"),
    "read only": lambda m, x: (kept_by_name.get("y"), m.stats["n"], m.meter.values, Meter.total, number_of_calls),
    "the same again": lambda m, x: m.stats.__setitem__("n", 0),
}


@pytest.mark.usefixtures("files_as_before")
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_not_said(wrap: Wrap, name: str) -> None:
    """R6: what is put there once may be the same in all replicas; `verify` compares it."""
    for way, step in steps_of(wrap(with_shared(CACHES[name]))).items():
        assert [str(each.message) for each in said_by(step)] == [], way


def test_what_is_written_anew_in_the_second_step_is_no_cache(wrap: Wrap) -> None:
    """R6: an entry without rows or a history, such as a sum over the rows."""
    model = wrap(with_shared(lambda m, x: m.cache.__setitem__("sums", x.detach().sum(0))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(6, 4))
    with pytest.warns(UserWarning, match="writes into cache, which all"):
        model(torch.randn(6, 4))


def test_a_flag_that_changes_in_each_step_is_said(wrap: Wrap) -> None:
    """R6: in the first step it may be that of what is done once."""
    model = wrap(with_shared(lambda m, x: m.stats.__setitem__("way", "a" if m.stats["way"] == "b" else "b")), 3)
    model.module.stats["way"] = "a"
    assert ["writes into stats" in str(each.message) for each in said_by(steps_of(model, 9)["training"])] == [True]


@pytest.mark.parametrize("entry", [len, torch.Tensor.detach], ids=["numbers", "tensors"])
def test_a_list_beside_a_layer_in_a_dict_keeps_what_forward_appends(wrap: Wrap, entry: Any) -> None:
    """R6: replicas have a dict of their own, and share the list in it. It lost numbers in each second step."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.table["layer"](x)
        m.table["seen"].append(entry(y))
        return y

    layer = nn.Linear(4, 4)
    model = wrap(Calls(forward, layer=layer))
    model.module.table = {"layer": layer, "seen": []}
    (said,) = said_by(lambda: model(torch.randn(6, 4)).sum().backward())
    assert "writes into table['seen']" in str(said.message)
    assert len(model.module.table["seen"]) == 2 * 3


def test_a_list_of_tensors_keeps_what_a_map_appends(wrap: Wrap) -> None:
    """R6: after a step had put tensors there, lanes put back what they had found: most batches' were lost."""
    model = wrap(Calls(lambda m, x: (m.seen.append(x.detach()), m.layer(x))[1], layer=nn.Linear(4, 4), seen=[]))
    said_by(lambda: model(torch.randn(6, 4)))
    list(model.map([torch.randn(6, 4) for _ in range(5)]))
    assert sum(map(len, model.module.seen)) == 6 * (3 + 5)


# Attributes that the caller has assigned


def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x) * getattr(x, "scale", 1) * getattr(m.mean, "scale", 1) * getattr(m.table, "scale", 1)


def steps_with_attributes(model: Any) -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "training": model,
        "without gradients": torch.no_grad()(model),
        "map": lambda x: next(iter(model.map([x]))),
        "the verbs": lambda x: data_parallel(model.module, x, model.device_ids),
    }


@pytest.mark.parametrize("options", [{}, {"parts": 2}, {"rescue": True}], ids=str)
def test_attributes_of_tensors_are_those_of_the_callers(wrap: Wrap, options: dict[str, Any]) -> None:
    """R6: of inputs, and of buffers and tensors of the module; parameters had theirs. Replicas did without."""
    net = Calls(scaled, layer=nn.Linear(4, 4), mean=nn.Buffer(torch.zeros(4)))
    net.table = torch.zeros(4)
    plain, model = twins(wrap, net, 3, **options)
    for way, step in steps_with_attributes(model).items():
        for scale in (2.0, 3.0):
            x = torch.randn(7, 4)
            x.scale = scale
            for each in (plain, model.module):
                each.mean.scale, each.table.scale = scale + 1, scale + 2
            torch.testing.assert_close(step(x), plain(x), msg=way)


# Hooks that forward registers


def doubled(module: Any, x: torch.Tensor) -> torch.Tensor:
    with module.layer.register_forward_hook(lambda layer, args, output: 2 * output):
        y = module.layer(x)
    return y + module.layer(x)


def with_keywords(module: Any, x: torch.Tensor) -> torch.Tensor:
    def hook(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0] + 1,), kwargs

    y = module.layer(x)
    with module.layer.register_forward_pre_hook(hook, with_kwargs=True):
        return module.layer(y)


def in_backward(module: Any, x: torch.Tensor) -> torch.Tensor:
    with module.layer.register_full_backward_hook(lambda layer, inputs, outputs: tuple(2 * g for g in inputs)):
        y = module.layer(torch.tanh(module.first(x)))
    return y + module.layer(x)


@pytest.mark.parametrize("forward", [doubled, with_keywords, in_backward])
def test_hooks_that_forward_registers_are_the_replicas(wrap: Wrap, forward: Any) -> None:
    """R9: they were in the other replicas, too, while these ran."""
    for _ in range(5):
        assert_alike(wrap, Calls(forward, layer=nn.Linear(4, 4), first=nn.Linear(4, 4)), one_step(9, 4), 3)


def test_hooks_of_the_caller_stay_where_forward_registers_others(wrap: Wrap) -> None:
    """R8, R9: and what the caller removes later is gone."""
    plain, model = twins(wrap, Calls(doubled, layer=nn.Linear(4, 4)), 2)
    handles = [m.layer.register_forward_hook(lambda layer, args, output: output + 1) for m in (plain, model.module)]
    x = torch.randn(6, 4)
    assert_same(model(x), plain(x))
    for handle in handles:
        handle.remove()
    assert_same(model(x), plain(x))
    assert not model.module.layer._forward_hooks


@pytest.mark.parametrize("way", ["threads", "the verbs"])
def test_a_hook_that_is_registered_late_is_said(wrap: Wrap, way: str) -> None:
    """R6, R9: forwards by the verbs were looked at three times, whatever hooks came later."""
    model = wrap(nn.Sequential(nn.Linear(4, 4)))
    with torch.autograd.graph.save_on_cpu() if way == "the verbs" else contextlib.nullcontext():
        for _ in range(4):
            model(torch.randn(6, 4))
        model.module.register_forward_hook(lambda module, args, output: kept.append(output))
        with pytest.warns(UserWarning, match="a hook stores"):
            model(torch.randn(6, 4))


# Hooks that observe


class Extractor:
    def __init__(self) -> None:
        self.features: dict[str, torch.Tensor] = {}
        self.calls = 0

    def keep(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.features["first"] = output.detach()

    def count(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1

    def __call__(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.latest = output


class Latest:
    __slots__ = ("output",)

    def __call__(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.output = output


kept: list[Any] = []


def keep_global(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
    add_to_kept(output)


def add_to_kept(value: Any) -> None:
    kept.append(value)


def hooks_that_keep() -> dict[str, Any]:
    by_name: dict[str, Any] = {}
    by_id: dict[int, Any] = {}
    total, sums = torch.zeros((), device="cpu"), np.zeros(4)
    return {
        "by name": lambda layer, args, output: by_name.update(f=output),
        "by id": lambda layer, args, output: by_id.__setitem__(id(layer), output.shape),
        "in a list": lambda layer, args, output, found=[]: found.append(output),
        "of the file, by a function": keep_global,
        "in a partial": functools.partial(lambda found, layer, args, output: found.append(1), []),
        "a method": Extractor().keep,
        "a counter": Extractor().count,
        "an object": Extractor(),
        "an object with slots": Latest(),
        "in an array": lambda layer, args, output: sums.__setitem__(0, float(output.detach().sum())),
        "in a tensor": lambda layer, args, output: [total.add_(output.detach().sum().cpu())][1:] or None,
    }


@pytest.mark.parametrize("name", [*hooks_that_keep()])
def test_a_hook_that_keeps_what_it_sees_is_said_once(wrap: Wrap, name: str) -> None:
    """R9: it kept one replica's rows, or in the order of arrival, in silence."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(hooks_that_keep()[name])
    steps = steps_of(wrap(model))
    (said,) = said_by(steps["training"])
    kept.clear()
    assert "a hook stores" in str(said.message)
    assert " of 0, and each replica" in str(said.message)
    assert said.filename == __file__


@pytest.mark.parametrize(
    "way",
    ["once", "keep the graphs", "of higher order", "an object among the inputs", "a loss that leaves"],
)
def test_a_hook_that_keeps_gradients_is_said_once(wrap: Wrap, way: str) -> None:
    """R9: after the first backward; also of one that does not free the graphs, which nothing was said of."""
    if way == "a loss that leaves" and torch.ones(()).device.type != "cpu":
        pytest.skip("on accelerators an error: the module has backward hooks")
    found: list[Any] = []
    layer = nn.Linear(4, 4)
    layer.register_full_backward_hook(lambda layer, inputs, outputs: found.append(outputs))
    model = wrap(Calls(lambda m, x, given: m.layer(x).tanh(), layer=layer))
    options = {"keep the graphs": {"retain_graph": True}, "of higher order": {"create_graph": True}}.get(way, {})

    losses: list[torch.Tensor] = []
    if way == "a loss that leaves":
        layer.register_forward_pre_hook(lambda layer, args: losses.append(args[0].square().sum()))

    def step() -> None:
        x = torch.randn(6, 4, requires_grad=True)
        losses.clear()
        loss = model(x, object() if "object" in way else None).sum()
        torch.autograd.grad(sum(losses, loss), [x, *model.parameters()], **options)

    (said,) = said_by(step)
    assert "a hook stores" in str(said.message)


def test_a_hook_of_every_module_that_keeps_what_it_sees_is_said_once(wrap: Wrap) -> None:
    """R9"""
    found: list[Any] = []
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with nn.modules.module.register_module_forward_hook(lambda layer, args, output: found.append(output)):
        (said,) = said_by(steps_of(model)["training"])
    assert "of every module, and each replica" in str(said.message)


@pytest.mark.parametrize("shares", [[1], [0, 1]], ids=str)
def test_hooks_of_one_replica_that_runs_in_parts(wrap: Wrap, shares: list[int]) -> None:
    """R9, N13: they are called with the rows of each part. They kept some of the rows, in silence."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(Extractor().keep)
    wrapped = wrap(model, len(shares), shares=shares, parts=2)
    assert said_by(lambda: wrapped(torch.randn(1, 4))) == []
    wrapped.refresh()
    (said,) = said_by(steps_of(wrapped)["training"])
    assert "a hook stores" in str(said.message)


def test_a_hook_that_observes_its_module_in_parts(wrap: Wrap) -> None:
    """R9, N13: without gradients; else replicas run whole."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), {}
    first = model[0]

    def keep(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen[first] = output

    first.register_forward_hook(keep)
    wrapped, x = wrap(model, 1, parts=2), torch.randn(6, 4)
    with torch.no_grad(), pytest.warns(UserWarning, match="several replicas or parts of a batch on one device"):
        wrapped(x)
    wrapped(x)
    assert len(seen[first]) == 6


def test_hooks_that_keep_nothing_are_not_said(wrap: Wrap) -> None:
    """R9: nor are those of one replica, nor what is kept by device where each replica has its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda layer, args, output: 2 * output)
    model[1].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    assert said_by(steps_of(wrap(model))["training"]) == []
    model[0].register_forward_hook(Extractor().keep)
    assert said_by(steps_of(wrap(model, 1))["training"]) == []


# Replicas stay the same objects


@pytest.mark.parametrize("way", ["kept by the program", "an attribute"])
def test_a_layer_is_found_by_its_id_in_each_step(wrap: Wrap, place: str, way: str) -> None:
    """R6: replicas to which the program refers were made anew in each step, and ids came again for other layers.

    Those of the first step are others where later ones share memory.
    """
    found: dict[int, str] = {}

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if way == "kept by the program":
            kept.append(module.first)  # a list of this file: one in a closure of the module would be the module's
        else:
            module.latest = x
        for name in ("first", "second"):
            assert found.setdefault(id(getattr(module, name)), name) == name
        y: torch.Tensor = module.second(module.first(x))
        return y

    model, x = wrap(Calls(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))), torch.randn(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(10):
            loss_of(model(x)).backward()
    kept.clear()
    share_memory = place == "one memory" and len({*DEVICES}) == 1
    assert len(found) == (8 if share_memory else 4)
