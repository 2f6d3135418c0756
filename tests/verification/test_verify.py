"""verify: it finds and explains differences, reports no others, and leaves everything as it was."""

import contextlib
import copy
import dataclasses
import functools
import math
import os
import random
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from helpers.as_accelerators import simulated_as_accelerators
from helpers.modules import Calls, Composed, Fn, WithBackward
from unisono import DataParallel, SampleList, verify
from unisono.runtime import devices as _devices
from unisono.runtime import draws_off
from unisono.testing import simulated_accelerators
from unisono.verification.report import Cause, Kind, Report

BOTH = ("training", "eval")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def compared(model: nn.Module, inputs: Any, *arguments: Any, num_replicas: int = 2, **options: Any) -> Report:
    """Compare on CPU replicas, and print nothing."""
    return verify(model, inputs, *arguments, device_ids=["cpu"] * num_replicas, show=False, **options)


# ---- modules -------------------------------------------------------------------------------------


def calls(function: Callable[..., Any], *children: nn.Module) -> nn.Module:
    """Return a module of children, and of a function of (self, inputs) that calls them."""
    return Calls(function, layers=nn.ModuleList(children))


def center() -> nn.Module:
    """Return a module whose rows interact."""
    return Fn(lambda x: x - x.mean(0))


class Running(nn.Module):
    """Has numbers in its attributes, as a metric has, which forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.steps = torch.zeros(2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total, self.steps = self.total + x.detach().sum(), self.steps + 1
        return x


class Caching(nn.Module):
    """Fills attributes with what is the same for all rows, and with what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.name, self.scale = "", 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table, self.function, self.name = torch.ones(x.shape[1]), lambda: 0, self.name + "x"
        return x * self.table


def average() -> nn.Module:
    """Return a module whose buffer follows the rows, and which does nothing else."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        if model.training:
            model.mean.lerp_(x.mean(0), 0.1)
        return x

    return Calls(forward, mean=nn.Buffer(torch.zeros(5)))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))


def mean_loss(reduction: str = "mean") -> nn.Module:
    return calls(lambda self, x, t: F.cross_entropy(self.layers[0](x), t, reduction=reduction), nn.Linear(5, 4))


def token_loss() -> nn.Module:
    def forward(self: Any, x: torch.Tensor, t: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers[1](self.layers[0](x), t), "tokens": (t != 0).sum()}

    return calls(forward, nn.Linear(5, 4), nn.CrossEntropyLoss(ignore_index=0))


def recurrent() -> nn.Module:
    return calls(lambda self, x: self.layers[0](x), nn.LSTM(5, 4, num_layers=2, batch_first=True))


def checkpointed(use_reentrant: bool) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](checkpoint(self.layers[0], x, use_reentrant=use_reentrant))

    return calls(forward, nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 2))


def attention(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


ROWS = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
CLASSES = torch.tensor([1, 0, 2, 3, 0, 0, 0, 3, 1])


# ---- the same ------------------------------------------------------------------------------------


def halve(net: Any, x: torch.Tensor) -> None:
    net.layers[0].bias.data.mul_(0.5)


def take_mean(net: Any, x: torch.Tensor) -> None:
    net.layers[0].bias.data = x.mean(0)


def fill(net: Any, x: torch.Tensor) -> None:
    net.layers[0].bias.data.fill_(0.5)


@pytest.mark.parametrize(("write", "same"), [(halve, True), (take_mean, False), (fill, True)])
def test_parameters_that_forward_writes_into(write: Any, same: bool) -> None:
    """R22: through `.data`, which no version counter sees. A row compares what is there after the step."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        write(net, x)
        return net.layers[0](x)

    report = compared(calls(forward, nn.Linear(5, 5)), ROWS)
    assert report.same is same
    written = [row.name for row in report.rows if row.kind is Kind.PARAMETER]
    assert set(written) == {"layers.0.bias"}
    if not same:
        assert report.cause is Cause.PARAMETERS_OF_REPLICAS
        assert report.first_module == "layers.0"
        assert "call the plain module once before you wrap it" in " ".join(str(report).split())


def test_another_cause_beside_a_write_that_is_right() -> None:
    """R22: the forward that finds out that replicas write runs again, and what ran before it is not compared."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        halve(net, x)
        return net.layers[1](net.layers[0](x))

    report = compared(calls(forward, nn.Linear(5, 5), nn.BatchNorm1d(5)), ROWS)
    assert (report.cause, report.first_module) == (Cause.PER_SHARD_BATCH_NORM, "layers.1")


def make_a_layer(net: Any, x: torch.Tensor) -> torch.Tensor:
    if len(net.layers) < 2:
        net.layers.append(nn.Linear(5, 5))
    return net.layers[1](x)


def make_a_parameter(net: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(net.layers[0], "scale"):
        net.layers[0].scale = nn.Parameter(torch.ones(5))
    return x * net.layers[0].scale


@pytest.mark.parametrize(
    ("make", "where", "name"),
    [(make_a_layer, "layers", "layers.1.weight"), (make_a_parameter, "layers.0", "layers.0.scale")],
)
def test_parameters_that_forward_makes(make: Any, where: str, name: str) -> None:
    """R6: the model that is compared has none of their modules: a KeyError of verify's own. It is advised of once."""
    report = compared(calls(lambda net, x: make(net, net.layers[0](x)), nn.Linear(5, 5)), ROWS)
    assert not report.same
    assert (report.first_module, report.cause) == (where, Cause.ATTRIBUTES_OF_REPLICAS)
    said = " ".join(str(report).split())
    assert f"forward creates {name}" in said
    assert "forward writes into" not in said
    assert "forward stores" not in said  # what is made cannot be returned as an output


@pytest.mark.parametrize(
    ("num_replicas", "rows", "dtype"),
    [
        (2, 7, torch.float32),
        (3, 8, torch.float64),
        (4, 9, torch.float32),
        (2, 1, torch.float32),  # one replica runs
    ],
)
def test_rows_that_do_not_interact_are_the_same(num_replicas: int, rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 5, dtype=dtype)
    report = compared(mlp().to(dtype), x, num_replicas=num_replicas)
    assert report.same
    assert not report.explained
    assert report.differences == ()
    assert (report.first_module, report.cause) == (None, None)
    counts = {
        precision: [sum(row.kind is kind for row in report.rows if row.precision == precision) for kind in Kind]
        for precision in dict.fromkeys(row.precision for row in report.rows)
    }
    # Of each kind in both modes; in the model's own type, gradients in training only.
    own = {} if dtype is torch.float64 else {"float32": [2, 2, 4, 0, 0, 0]}
    assert counts == {"float64": [2, 2, 8, 0, 0, 0], **own}
    assert ("only one replica had rows" in str(report)) == (rows == 1)


def frozen(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = layer(x)
    return y.clone()


KINDS: list[tuple[nn.Module, Any]] = [
    (nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 2)), ROWS),
    (nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 2)), ROWS),
    (nn.Sequential(nn.Linear(5, 5), nn.utils.spectral_norm(nn.Linear(5, 8)).requires_grad_(False)), ROWS),
    (nn.Sequential(nn.Linear(5, 8), DataParallel(mlp()[2:], ["cpu", "cpu"])), ROWS),
    (checkpointed(True), ROWS.clone().requires_grad_()),
    (checkpointed(False), ROWS),
    (attention(batch_first=True), torch.randn(5, 3, 8)),
    (calls(lambda self, x: self.layers[0](x).argmax(1), nn.Linear(5, 8)), ROWS),
    (calls(lambda self, x: torch.view_as_complex(self.layers[0](x)), nn.Linear(5, 2)), ROWS),
    (calls(lambda self, x: {"y": self.layers[0](x), "name": "a", "none": None}, nn.Linear(5, 2)), ROWS),
    (calls(lambda self, x: (self.layers[0](x), len(x), 2.5), nn.Linear(5, 2)), ROWS),
    (calls(lambda self, x: self.layers[0](x) / 0, nn.Linear(5, 2)), ROWS),
    (calls(lambda self, a, b: self.layers[0](a) * b, nn.Linear(5, 8)), {"b": torch.randn(9, 8), "a": ROWS}),
    (calls(lambda self, x: Output(self.layers[0](x)), nn.Linear(5, 2)), ROWS),
    (calls(lambda self: torch.ones(2)), ()),
    (calls(lambda self, x: self.layers[0](frozen(self.layers[1], x)), nn.Linear(5, 2), nn.Linear(5, 5)), ROWS),
    (nn.Identity(), ROWS),
]
# Where numbers would differ, with the options that a report names.
REMEDIES: list[tuple[nn.Module, Any, dict[str, Any]]] = [
    (mean_loss(), (ROWS, CLASSES), {"scalars": "mean"}),
    (mean_loss("sum"), (ROWS, CLASSES), {"scalars": "sum"}),
    (token_loss(), (ROWS, CLASSES), {"scalars": {"loss": "mean:tokens", "tokens": "sum"}}),
    (mean_loss(), (ROWS[:8], CLASSES[:8]), {}),
    (recurrent(), torch.randn(9, 3, 5), {"out_dims": (0, (1, 1))}),
    (recurrent(), pack_sequence([torch.randn(n, 5) for n in (4, 1, 3, 3, 2)], False), {"out_dims": (0, 1)}),
    (attention(), torch.randn(4, 9, 8), {"dim": 1}),
    (
        calls(lambda self, x: {"y": self.layers[0](x), "w": self.layers[0].weight.sin()}, nn.Linear(5, 4)),
        ROWS,
        {"out_dims": {"y": 0, "w": None}},
    ),
    (calls(lambda self, x: (self.layers[0](x), self.layers[0].weight), nn.Linear(5, 4)), ROWS, {}),
    (calls(lambda self, x, w: x @ w), (ROWS, torch.randn(5, 2)), {"in_dims": (0, None)}),
    (mlp(), ROWS, {"shares": [2, 1]}),
    (mlp(), ROWS, {"shares": [0, 1]}),
    (with_batch_norm(), ROWS, {"sync_batch_norm": True}),
    (with_batch_norm().double(), ROWS.double(), {"sync_batch_norm": True}),
]


WARNED = pytest.mark.filterwarnings("ignore:Each replica returned a scalar")  # where `scalars` is left out


@pytest.mark.parametrize(
    ("model", "inputs", "options"),
    [*((*kind, {}) for kind in KINDS), *(pytest.param(*each, marks=WARNED) for each in REMEDIES)],
)
def test_models_of_many_kinds_are_the_same(model: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
    assert compared(model, inputs, **options).differences == ()


def test_the_precision_is_that_of_the_coarsest_type() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(33, 64)
    with torch.autocast("cpu", torch.bfloat16):
        report = compared(model, x)
    assert report.same
    allowed = {row.precision: row.allowed / row.scale for row in report.rows if row.kind is Kind.OUTPUT}
    assert allowed == pytest.approx({"float64": 1e-6, "bfloat16": 4e-2})
    assert not compared(center(), ROWS, rtol=1e-9).same
    assert compared(center(), ROWS, rtol=1e3).same


# ---- precision -----------------------------------------------------------------------------------


def scaled(scale: float, function: Callable[[torch.Tensor], torch.Tensor], behind: nn.Module) -> nn.Module:
    """Return a layer beside a branch of little weight, in which rows may interact."""
    layers = nn.Linear(5, 5), nn.Linear(5, 5), behind
    return calls(lambda self, x: self.layers[0](x) + scale * self.layers[2](function(self.layers[1](x))), *layers)


def centered(h: torch.Tensor) -> torch.Tensor:
    return h - h.mean(0)


def sigmoids() -> nn.Module:
    """Return a branch whose gradients are small beside those of other layers."""
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(5, 5), nn.Sigmoid())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "behind"), [(1.0, sigmoids), (1e-6, nn.Tanh)])
def test_a_small_gradient_is_judged_by_its_own_size(
    scale: float, behind: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """N16: it was 14 to 47 % off, and the same, because others are larger."""
    faulty = compared(scaled(scale, centered, behind()).to(dtype), ROWS.to(dtype))
    assert {"layers.1.weight"} <= {row.name for row in faulty.differences}
    assert compared(scaled(scale, torch.sin, behind()).to(dtype), ROWS.to(dtype)).same


def test_batch_norm_under_autocast_is_found() -> None:
    """The rounding of one product in bfloat16 had excused every value."""
    model, x = with_batch_norm(), torch.randn(64, 5)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers[0](x).float()

    report = compared(calls(forward, model), x)
    assert (report.cause, report.first_module) == (Cause.PER_SHARD_BATCH_NORM, "layers.0.1")
    assert compared(calls(forward, model), x, sync_batch_norm=True).same


def test_batch_norm_over_a_shard_is_found_where_its_numbers_are_the_same() -> None:
    report = compared(nn.BatchNorm1d(5), torch.cat([ROWS[:4], ROWS[:4]]))
    assert report.cause is Cause.PER_SHARD_BATCH_NORM
    assert not report.same
    assert report.differs


class Rounding(torch.autograd.Function):
    """A kernel for float32 only, as those of other libraries are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.float32, "this kernel takes float32"
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_where_float64_raises_an_error_float32_decides() -> None:
    report = compared(calls(lambda self, x: Rounding.apply(self.layers[0](x)), nn.Linear(5, 4)), ROWS)
    assert report.same
    assert {row.precision for row in report.rows} == {"float32"}
    assert any("compared in float32" in note and "this kernel takes float32" in note for note in report.notes)
    report = compared(calls(lambda self, x: Rounding.apply(centered(self.layers[0](x))), nn.Linear(5, 4)), ROWS)
    assert report.cause is Cause.ROWS_INTERACT


def test_a_device_without_float64_is_compared_on_the_cpu(
    simulated_accelerators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_float64 = _devices.has_float64
    monkeypatch.setattr(_devices, "has_float64", lambda device: device.type == "cpu" and has_float64(device))
    with simulated_accelerators(2):
        report = verify(mlp().to("sim:0"), ROWS, shares=[2, 1], show=False)
    assert report.same
    assert {row.precision for row in report.rows} == {"float32", "float64"}


def test_code_of_one_type_only_is_compared_in_that_type() -> None:
    """The model's own type is compared, too: in float64 this branch does not run."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        return centered(y) if y.dtype is torch.bfloat16 else y

    report = compared(calls(forward, nn.Linear(5, 4)).bfloat16(), ROWS.bfloat16())
    assert report.cause is Cause.ROWS_INTERACT
    assert {row.precision for row in report.differences} == {"bfloat16"}


def test_what_rounding_decides_is_not_judged() -> None:
    """N16: one row of nine lies at the kink of each ReLU, and rounding decides on which side."""
    layer = nn.Linear(5, 8)
    kink = copy.deepcopy(layer).double()(ROWS.double())[0].detach()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        rounding_error = 1e-13 if len(x) == 9 else -1e-13
        return F.relu(self.layers[0](x) + (rounding_error - kink).to(x.dtype))

    report = compared(calls(forward, layer), ROWS)
    assert {row.name for row in report.not_judged} == {"layers.0.weight", "layers.0.bias"}
    assert not report.same
    assert not report.differs
    assert f"not judged: {len(report.not_judged)} values" in str(report)


def test_a_submodule_that_differs_without_effect_is_named() -> None:
    """Its output is not used, say, or only its shape is."""
    model = calls(lambda self, x: self.layers[1](x) + 0 * self.layers[0](x), center(), nn.Linear(5, 5))
    report = compared(model, ROWS)
    assert report.same
    assert any("the output of layers.0 differs, but nothing depends on it" in note for note in report.notes)


class Teacher(nn.Linear):
    """Is not copied with the model that has it."""

    def __deepcopy__(self, memo: Any) -> "Teacher":
        return self


@functools.cache
def table(n: int) -> torch.Tensor:
    return torch.linspace(0, 1, n)


CONSTANT, CLASS_WEIGHTS = torch.eye(5) * 0.5, torch.tensor([1.0, 2.0])


def through_numpy(x: torch.Tensor) -> torch.Tensor:
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy().astype("f4") * np.float32(0.1)).to(x.dtype)

    name = {"forward": staticmethod(forward), "backward": staticmethod(lambda ctx, grad: grad * 0.1)}
    return type("Kernel", (torch.autograd.Function,), name).apply(x)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.layers[0](x) * table(5),
        lambda self, x: self.layers[0](x) @ CONSTANT,
        lambda self, x: through_numpy(self.layers[0](x)),
        lambda self, x: torch.vmap(self.layers[0])(x),
        lambda self, x: self.layers[0](x) + self.layers[1](x),
        lambda self, x: torch.cat([self.layers[2](row[None, None])[0] for row in self.layers[0](x)]),
    ],
    ids=["a cached table", "a constant", "numpy", "vmap", "a teacher", "batch norm a row"],
)
def test_right_models_stay_as_they_are(function: Callable[..., Any]) -> None:
    """N16: with constants and modules that are not copied with the model, whose types stay, too."""
    teacher = Teacher(5, 5).requires_grad_(False)
    model = calls(function, nn.Linear(5, 5), teacher, nn.BatchNorm1d(1, track_running_stats=False))
    table.cache_clear()
    expected = model(ROWS[:1])
    assert compared(model, ROWS).same
    assert teacher.weight.dtype is CONSTANT.dtype is table(5).dtype is torch.float32
    torch.testing.assert_close(model(ROWS[:1]), expected)


def test_class_weights_of_a_criterion_are_widened() -> None:
    criterion = partial(F.cross_entropy, weight=CLASS_WEIGHTS)
    report = compared(mlp(), ROWS, CLASSES % 2, criterion)
    assert report.same
    assert any(row.precision == "float64" for row in report.rows)


@pytest.mark.parametrize("start", [0, 4])
def test_parts_of_one_memory_are_compared_in_the_models_own_type(start: int) -> None:
    """Each would get memory of its own, also if they have one number in common."""
    model = calls(lambda self, x: centered(self.layers[0](x)) * self.last, nn.Linear(5, 5))
    memory = torch.ones(9)
    model.table, model.last = nn.Buffer(memory[:5]), memory[start : start + 5]
    report = compared(model, ROWS)
    assert report.cause is Cause.ROWS_INTERACT
    assert any("share memory" in note for note in report.notes)


def test_in_bfloat16_alone_small_gradients_are_not_judged() -> None:
    """Where neither float64 nor float32 is possible: a change by one step of the type moves all of them."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.bfloat16
        return self.layers[0](x) + 1e-2 * self.layers[2](self.layers[3](centered(self.layers[1](x))))

    model = calls(forward, nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), sigmoids()).bfloat16()
    report = compared(model, ROWS.bfloat16())
    assert report.not_judged
    assert not report.differences
    assert not report.same
    assert {row.precision for row in report.rows} == {"bfloat16"}


def test_values_that_are_no_numbers_are_not_judged() -> None:
    report = compared(calls(lambda self, x: self.layers[0](x) * float("nan"), nn.Linear(5, 2)), ROWS)
    assert report.not_judged
    assert not report.same


def test_a_step_that_shows_nothing() -> None:
    """N17: it calls another model; it returns nothing."""
    net = mlp()
    with pytest.raises(ValueError, match="did not call the model that it is given"):
        compared(net, ROWS, step=lambda model, x: net(x))
    assert not compared(center(), ROWS, step=lambda model, x: [model(x)].clear()).same


# ---- steps with several forwards -----------------------------------------------------------------


def test_a_step_of_several_forwards() -> None:
    """N17: a buffer that each forward reads and changes shows there only."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layers[0](x) * (1 if len(x) == 9 or self.count < 2 else 7)

    def two(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        with torch.no_grad():
            model(x)
        return y + model(x)

    model = Calls(forward, layers=nn.ModuleList([nn.Linear(5, 4)]), count=nn.Buffer(torch.zeros(())))
    assert compared(model, ROWS).same
    report = compared(model, ROWS, step=two)
    assert not report.same
    assert {row.kind for row in report.differences} >= {Kind.OUTPUT, Kind.LOSS, Kind.GRADIENT}
    with_target = compared(mlp(), ROWS, torch.randn(9, 2), nn.MSELoss(), step=two)
    assert with_target.same
    assert with_target.rows[0].shape == (9, 2)
    with pytest.raises(TypeError, match="step=3: expected a function, called as step"):
        compared(mlp(), ROWS, step=3)


def test_a_step_that_gives_the_model_other_inputs() -> None:
    """N17, S18: `in_dims` describes what the model is called with, and so does what is said of its inputs."""
    table = torch.randn(9, 5)
    model = calls(lambda self, x, table: x + table.sum(0))
    report = compared(model, {"x": ROWS}, step=lambda model, x: model(x, table))
    assert report.cause is Cause.SPLIT_WRONGLY
    assert "in_dims={1: None}" in report.findings[0].text
    report = compared(
        calls(lambda self, x, table: centered(x) + table.sum(0)), {"x": ROWS},
        step=lambda model, x: model(x, table), in_dims=(0, None),
    )  # fmt: skip
    assert report.cause is Cause.ROWS_INTERACT


def test_what_backward_runs_again_is_not_recorded() -> None:
    """N13: replicas keep the hooks that record; a layer for some rows seemed to be called as often as on one device."""
    experts = calls(
        lambda self, x: torch.stack([self.layers[int(row[0] > 0)](row) for row in x]), nn.Linear(5, 2), nn.Linear(5, 2)
    )
    report = compared(experts.double(), ROWS.double(), parts=2)
    assert report.same, str(report)


# ---- what differs, and why -----------------------------------------------------------------------


class Case(NamedTuple):
    """A model that differs, and what is found."""

    model: nn.Module
    inputs: Any
    cause: Cause
    says: str
    module: str = ""
    modes: tuple[str, ...] = BOTH


def draws_another_number_each_time(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + int.from_bytes(os.urandom(3))


LINEAR = nn.Linear(5, 4)
SAMPLES = torch.randn(9, 3, 5)
TRAINING = ("training",)
CASES = [
    Case(with_batch_norm(), ROWS, Cause.PER_SHARD_BATCH_NORM, "sync_batch_norm=True", "1", TRAINING),
    Case(  # the first in the order of execution
        calls(lambda self, x: self.layers[0](self.layers[1](x)), nn.BatchNorm1d(5), nn.BatchNorm1d(5)), ROWS,
        Cause.PER_SHARD_BATCH_NORM, "sync_batch_norm=True", "layers.1", TRAINING,
    ),
    Case(  # behind a wrapper inside the model
        nn.Sequential(DataParallel(nn.Linear(5, 8), ["cpu"] * 2), nn.BatchNorm1d(8)), ROWS,
        Cause.PER_SHARD_BATCH_NORM, "sync_batch_norm=True", "1", TRAINING,
    ),
    Case(
        nn.Sequential(nn.Linear(5, 8), center(), nn.Linear(8, 2)), ROWS, Cause.ROWS_INTERACT,
        "depends on other rows", "1",
    ),
    Case(
        calls(lambda self, x: self.layers[1](self.layers[0](x) - x.mean()), nn.Linear(5, 5), nn.Linear(5, 2)), ROWS,
        Cause.ROWS_INTERACT,
        "in the code before layers.1",
    ),
    Case(center(), ROWS, Cause.ROWS_INTERACT, "depends on other rows"),
    Case(
        attention(), torch.randn(4, 9, 8), Cause.ROWS_INTERACT, "not 0? Pass dim=", "layers.0.self_attn"
    ),
    Case(mean_loss(), (ROWS, CLASSES), Cause.ONE_NUMBER_A_SHARD, "scalars='mean'"),
    Case(mean_loss("sum"), (ROWS, CLASSES), Cause.ONE_NUMBER_A_SHARD, "scalars='sum'"),
    Case(token_loss(), (ROWS, CLASSES), Cause.ONE_NUMBER_A_SHARD, "scalars='mean:name'", "layers.1"),
    Case(
        calls(lambda self, x: Output(self.layers[0](x), self.layers[0](x).mean()), LINEAR), ROWS,
        Cause.ONE_NUMBER_A_SHARD, "scalars='mean'",
    ),
    Case(recurrent(), SAMPLES[:8], Cause.JOINED_ON_ANOTHER_AXIS, "out_dims=(0, (1, 1))"),
    Case(recurrent(), SAMPLES, Cause.JOINED_ON_ANOTHER_AXIS, "out_dims=(0, (1, 1))"),  # uneven: it cannot be gathered
    Case(calls(draws_another_number_each_time), ROWS, Cause.NONDETERMINISTIC, "two runs on one device"),
    Case(
        nn.Sequential(average(), nn.Linear(5, 2)), ROWS, Cause.FIRST_REPLICAS_BUFFERS, "forward updates 0.mean",
        "0", TRAINING,
    ),
    Case(  # a metric: it said "same", and the metric stayed 0
        nn.Sequential(Running(), nn.Linear(5, 2)), ROWS, Cause.ATTRIBUTES_OF_REPLICAS, "updates 0.total", "0"
    ),
    Case(  # a buffer with an entry a row
        Calls(lambda self, x: setattr(self, "last", x.detach().clone()) or x, last=nn.Buffer(torch.zeros(9, 5))), ROWS,
        Cause.FIRST_REPLICAS_BUFFERS, "those of the other replicas are missing: return it from forward",
    ),
    Case(  # the submodule that loses the axis of its rows
        nn.Sequential(nn.Linear(5, 1), nn.Sequential(nn.ReLU(), calls(lambda self, x: x.squeeze())), nn.Tanh()),
        ROWS[:3], Cause.LOST_AXIS, "in a replica with one row", "1.1",
    ),
    Case(  # in one of several inputs: no other way to split them gives one device's numbers
        calls(lambda self, x, y: x - x.mean(0) + y), (ROWS[:4], ROWS[4:8]), Cause.ROWS_INTERACT,
        "depends on other rows",
    ),
    Case(  # a number of rows, assigned to what was None: all replicas assign the same, so it stays
        Calls(lambda self, x: setattr(self, "size", x.numel()) or self.layer(x), layer=LINEAR, size=None), ROWS[:8],
        Cause.ATTRIBUTES_OF_REPLICAS, "updates size",
    ),
    Case(
        nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True)), torch.randn(9, 2, 7),
        Cause.FIRST_REPLICAS_BUFFERS, "Nothing else differs", "1", TRAINING,
    ),
    Case(
        calls(lambda self, x: self.layers[0](x) @ self.layers[0](x).T, LINEAR), ROWS[:8], Cause.ROWS_INTERACT,
        "compares rows with each other",
    ),
    Case(  # uneven: it cannot be gathered
        calls(lambda self, x: (x @ x.T, self.layers[0](x)), LINEAR), ROWS, Cause.ROWS_INTERACT,
        "output[0] compares rows with each other",
    ),
    Case(
        calls(lambda self, x: {"y": self.layers[0](x), "w": self.layers[0].weight.sin()}, LINEAR), ROWS,
        Cause.JOINED_ON_ANOTHER_AXIS, "out_dims={'y': 0, 'w': None}",
    ),
    Case(
        calls(lambda self, x: self.layers[0](x).mean().view(1), LINEAR), ROWS, Cause.JOINED_ON_ANOTHER_AXIS,
        "each replica's value is joined along dimension 0",
    ),
]  # fmt: skip


@WARNED
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cause}: {case.says}")
def test_causes(case: Case) -> None:
    """G6, N4, N5, N14, R5, R6, S18: what differs from one device is found, and named with its cause."""
    report = compared(case.model, case.inputs)
    assert not report.same
    assert not report.explained
    assert (report.first_module, report.cause) == (case.module, case.cause)
    assert tuple(finding.mode for finding in report.findings) == case.modes
    assert tuple(dict.fromkeys(row.mode for row in report.differences)) == case.modes
    module_class = type(case.model.get_submodule(case.module)).__name__
    for finding in report.findings:
        assert case.says in finding.text
        assert finding.module_class == module_class


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.compile(model, backend="eager")])
def test_models_whose_calls_cannot_be_recorded(make: Callable[[nn.Module], nn.Module]) -> None:
    """A scripted model that differed ended in an error of torch.jit's: it has no get_submodule."""
    report = compared(make(with_batch_norm()), ROWS)
    assert (report.same, report.first_module, report.cause) == (False, "", Cause.UNKNOWN)


def test_a_gradient_that_differs_alone() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return WithBackward.apply(self.layers[0](x), lambda grad: grad.mean(0).expand_as(grad))

    report = compared(calls(forward, nn.Linear(5, 2)), ROWS)
    assert {row.kind for row in report.differences} == {Kind.GRADIENT}
    assert report.cause is Cause.UNKNOWN
    assert "the backward differs" in report.findings[0].text


def test_gradients_that_jump_where_outputs_do_not() -> None:
    """Rounding errors decide on which side of a ReLU's kink an activation lies: a step that is nudged shows it."""
    layer, x = nn.Linear(5, 8), torch.randn(400, 5)
    kink = layer(x)[0].detach()  # that of the first row, in each column

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        rounding_error = (1e-6 if len(x) == 400 else -1e-6) if x.dtype is torch.float32 else 0.0
        return F.relu(y + rounding_error - kink)

    report = compared(calls(forward, layer), x)
    assert report.same
    assert any("kink" in note for note in report.notes)
    assert max(row.difference / row.scale for row in report.rows if row.kind is Kind.GRADIENT) > 1e-3
    assert not compared(calls(forward, layer), x, rtol=1e-5).same  # who asks for a tolerance gets it


def test_gradients_of_inputs_are_compared() -> None:
    x = ROWS.clone().requires_grad_()
    report = compared(calls(lambda self, pair: pair[0] * pair[1]), ([x, ROWS],))
    assert report.same
    assert x.grad is None
    assert [row.name for row in report.rows if row.kind is Kind.GRADIENT] == ["inputs[0][0]"] * 3


def test_no_gradients_where_backward_fails_in_eval_mode() -> None:
    def refuse(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("can only be called in training mode")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        return y if self.training else WithBackward.apply(y, refuse)

    report = compared(calls(forward, nn.Linear(5, 2)), ROWS)
    assert report.same
    assert {row.mode for row in report.rows if row.kind is Kind.GRADIENT} == {"training"}
    assert any("can only be called in training mode" in note for note in report.notes)


# ---- random numbers ------------------------------------------------------------------------------


class VAE(nn.Module):
    """An encoder, noise, a decoder: the gradient of the variance comes through the noise only."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_variance, self.decoder = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deviation = torch.exp(self.log_variance(x) / 2)
        return self.decoder(self.mean(x) + deviation * torch.randn_like(deviation))


def draws(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a model that changes what it computes by something random, in training."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        return self.layers[1](function(y) if self.training else y)

    return calls(forward, nn.Linear(5, 8), nn.Linear(8, 2))


def one_by_one(x: torch.Tensor) -> torch.Tensor:
    for row in x.detach():
        while torch.rand(()) < row.sigmoid().mean():
            row += 0.1
    return x


# Each operation that draws is in tests/runtime/test_draws_off.py.
SWITCHED_OFF: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {
    "nn.Dropout": (nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.BatchNorm1d(8)), ROWS, {"sync_batch_norm": True}),
    "nn.TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), torch.randn(9, 4, 8), {},
    ),
    "nn.LSTM": (
        calls(lambda self, x: self.layers[0](x)[0], nn.LSTM(5, 4, 3, dropout=0.5, batch_first=True)),
        torch.randn(9, 3, 5), {},
    ),
    "VAE": (VAE(), ROWS, {}),
    "rsample": (draws(lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample()), ROWS, {}),
    "a checkpoint": (draws(lambda x: checkpoint(F.dropout, x, use_reentrant=False)), ROWS, {}),
    "a checkpoint, reentrant": (draws(lambda x: checkpoint(F.dropout, x, use_reentrant=True)), ROWS, {}),
    "parts": (draws(F.dropout), ROWS, {"parts": 2}),
    "a wrapper inside": (nn.Sequential(DataParallel(draws(F.dropout), ["cpu"] * 2), nn.Dropout()), ROWS, {}),
    "a loop": (draws(one_by_one), ROWS, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SWITCHED_OFF)
def test_draws_are_switched_off(case: str) -> None:
    """N12: so a model that draws is compared, and what comes behind a draw is, with its gradients."""
    model, inputs, options = SWITCHED_OFF[case]
    report = compared(model, inputs, **options)
    assert report.same, str(report)
    assert any("dropout drops nothing" in note for note in report.notes)
    gradients = [row for row in report.rows if row.mode == "training" and row.kind is Kind.GRADIENT]
    assert [row.name for row in gradients if not row.value] == []


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.compile(model, backend="aot_eager")])
def test_draws_of_code_that_is_not_python_are_switched_off(make: Callable[[nn.Module], nn.Module]) -> None:
    """N12: and what differs behind them is found."""
    assert compared(make(nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.Linear(8, 2))), ROWS).same
    assert not compared(make(nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.BatchNorm1d(8))), ROWS).same


def test_what_comes_behind_a_draw_is_told() -> None:
    """N12: it ended as "differs, as expected", with what came behind the first draw unseen."""
    report = compared(nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 2)), ROWS)
    assert (report.first_module, report.cause) == ("2", Cause.PER_SHARD_BATCH_NORM)
    report = compared(draws(lambda x: x + x[torch.randperm(len(x))]), ROWS)  # as mixup does
    assert (report.first_module, report.cause) == ("", Cause.ROWS_INTERACT)


class Library:
    """Draws behind torch's back, as a custom operator's kernel does."""

    def rand(self, *shape: int) -> torch.Tensor:
        drawn: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(*shape)))
        thread.start()
        thread.join()
        return drawn[0]


OF_FILE = random.Random(1), np.random.default_rng(1)


class Jitter(nn.Module):
    """Draws in training, in a way that cannot be switched off."""

    def __init__(self, draw: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.draw, self.dice, self.numbers, self.inner = draw, random.Random(1), np.random.default_rng(1), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.draw(self, x) if self.training else x


@pytest.mark.parametrize(
    ("draw", "whose"),
    [
        (lambda self, x: random.random(), "Python's generator (random)"),
        (lambda self, x: self.dice.random(), "a generator of its own"),
        (lambda self, x: np.random.rand(), "numpy's generator"),
        (lambda self, x: self.numbers.random(), "a generator of its own"),
        (lambda self, x: OF_FILE[0].random() * 0 + 1, "a generator of its own"),
        (lambda self, x: OF_FILE[1].random() * 0 + 1, "a generator of its own"),
        (lambda self, x: Library().rand(len(x), 1), "torch's generator"),
        (lambda self, x: Library().rand(1) * 0 + 1, "torch's generator"),  # the numbers are the same, this time
        (lambda self, x: torch.default_generator.seed() % 2, "torch's generator"),
        (lambda self, x: WithBackward.apply(x, lambda grad: grad * random.random()), "Python's generator (random)"),
    ],
)
def test_a_draw_that_cannot_be_switched_off_is_named(draw: Callable[..., Any], whose: str) -> None:
    """N12: the model ends as "not compared", never as "same"; the mode in which nothing is drawn is compared."""
    report = compared(nn.Sequential(nn.Linear(5, 8), Jitter(draw), nn.Dropout(), nn.Linear(8, 2)), ROWS)
    assert (report.same, report.compared, report.explained) == (False, False, False)
    assert report.cause is Cause.RANDOM_NUMBERS
    assert report.first_module in ("1", "")  # "": in backward
    (finding,) = report.findings
    assert finding.text.startswith(f"random numbers come from {whose}, ")
    assert {row.mode for row in report.rows} == {"eval"}
    assert report.differences == ()
    assert str(report).endswith("not compared: training")


def test_a_draw_of_one_replica_only_is_seen() -> None:
    """N12: on one device nothing is drawn."""
    report = compared(draws(lambda x: x * random.random() if len(x) < 9 else x), ROWS)
    assert not report.compared


def test_where_draws_cannot_be_caught_a_model_that_draws_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """N12: a release of torch without the dispatch key."""
    monkeypatch.setattr(draws_off, "_caught", [None])
    assert not compared(nn.Sequential(nn.Linear(5, 8), nn.Dropout()), ROWS).compared
    assert compared(mlp(), ROWS).same


def test_a_loop_that_draws_until_a_condition_holds_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """N12: rejection sampling never ends with fixed values."""
    monkeypatch.setattr(draws_off, "_MOST_DRAWS", 1000)

    def draw(x: torch.Tensor) -> torch.Tensor:
        while bool(torch.rand(()) > 0.1):
            pass
        return x

    with pytest.raises(RuntimeError, match=r"1000 of them, last by rand. .* Draw outside the model"):
        compared(draws(draw), ROWS)


# ---- how it is done ------------------------------------------------------------------------------


class Everything(nn.Module):
    """All that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout()
        self.unused = nn.Parameter(torch.ones(2))
        self.counter, self.seen, self.cache = 0, [], {}
        self.held = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        self.counter += 1
        self.seen.append(len(x))
        self.cache[self.counter] = x.detach()
        self.held += 1
        self.linear.weight.data.mul_(1.1)
        self.drop, self.norm.more = nn.Dropout(), nn.Buffer(torch.zeros(1))
        self.unused = nn.Parameter(torch.zeros(2))
        self.assigned = x.shape
        random.random()
        torch.rand(1, generator=self.generator)
        return self.drop(self.norm(self.linear(x)))


def state_of(*modules: nn.Module) -> list[Any]:
    """Return all that is to be as before: values as copies, objects by identity."""
    state: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    for module in [inner for outer in modules for inner in outer.modules()]:
        state += [id(module), module.training, sorted(vars(module)), list(module._forward_hooks)]
        tensors = [*module.parameters(), *module.buffers()]
        state += [(id(t), id(t.grad), t.tolist(), None if t.grad is None else t.grad.tolist()) for t in tensors]
        if isinstance(module, Everything):
            state += [module.counter, list(module.seen), list(module.cache), module.held.tolist(), id(module.seen)]
            state += [module.generator.get_state().tolist()]
    return state


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_everything_is_as_before(fails: bool, wrapped: bool) -> None:
    torch.manual_seed(7)
    model, head = Everything(), nn.Linear(5, 5)
    model(torch.randn(4, 5))  # so that it holds something
    model.linear.weight.grad = torch.randn(5, 5)
    head.weight.grad = torch.randn(5, 5)
    model.norm.eval()  # frozen, and stays so in training mode
    model.register_forward_hook(lambda module, args, output: modes.append(module.training))
    modes: list[bool] = []
    steps: list[torch.Tensor] = []  # of an optimizer that steps in backward
    model.linear.weight.register_post_accumulate_grad_hook(steps.append)
    given = DataParallel(model, ["cpu", "cpu"]) if wrapped else model
    before, rows = state_of(given, head), ROWS.tolist()

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fails and not modes[-1]:
            raise KeyError("as asked")
        return F.mse_loss(head(output), target)

    with pytest.raises(KeyError, match="as asked") if fails else contextlib.nullcontext():
        verify(given, ROWS, ROWS, criterion, None if wrapped else ["cpu", "cpu"], show=False)
    assert (state_of(given, head), ROWS.tolist(), steps) == (before, rows, [])


def test_objects_among_the_inputs_are_as_before() -> None:
    """What forward writes into them is seen by no other step, and not by the caller; an object may refuse a copy."""

    def forward(self: Any, x: torch.Tensor, state: Any, uncopied: Any) -> torch.Tensor:
        state.calls += 1
        state.features = state.features.add_(1)
        return x * 2

    history = torch.zeros(5, requires_grad=True) * 1
    state = types.SimpleNamespace(calls=0, features=torch.zeros(5), history=history)
    uncopied = (threading.Lock(), object())
    report = compared(calls(forward), (ROWS, state, uncopied))
    assert {row.kind for row in report.differences} == {Kind.ATTRIBUTE}
    assert (state.calls, state.features.tolist(), state.history is history) == (0, [0.0] * 5, True)


def test_what_a_model_keeps_with_its_history_is_copied() -> None:
    """torch copies leaves only: a weight norm of the old kind, after a forward, and features in a list."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(self.layers[0](x))
        return self.kept[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = calls(forward, nn.utils.weight_norm(nn.Linear(5, 2)))
    model.kept = []
    model(ROWS)
    report = compared(model, ROWS)
    assert {row.name for row in report.differences} == {"kept"}  # the list, to which replicas append
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"copy\.deepcopy cannot copy Calls: cannot pickle"):
        compared(model, ROWS)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_whatever_the_callers_mode(mode: Callable[[], Any]) -> None:
    model = mlp()
    with mode():
        report = compared(model, torch.randn(9, 5))
        assert not torch.is_grad_enabled()
    assert report.same
    assert sum(row.kind is Kind.GRADIENT and row.precision == "float64" for row in report.rows) == 8


@pytest.mark.parametrize("training", [True, False])
def test_both_modes_are_run_with_the_flags_of_the_caller(training: bool) -> None:
    """A frozen batch norm stays frozen where the model is in training mode."""
    model = with_batch_norm().train(training)
    model[1].eval()
    seen: list[tuple[bool, bool]] = []
    model.register_forward_hook(lambda module, args, output: seen.append((module.training, module[1].training)))
    assert compared(model, ROWS).same is training
    assert set(seen) == ({(True, False), (False, False)} if training else {(True, True), (False, False)})


def test_hooks_of_the_caller_see_what_they_always_see() -> None:
    """One that changes the output changes it."""
    model = mlp()
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    expected = model(ROWS)
    report = compared(model, ROWS)
    assert report.same
    outputs = [row.value for row in report.rows if row.kind is Kind.OUTPUT]
    assert outputs == pytest.approx([expected.abs().max().item()] * 4)


def test_replicas_that_run_one_after_the_other() -> None:
    """The plain composition: in the caller's thread, for a wrapper with verbs of its own."""
    report = verify(Composed(with_batch_norm(), ["cpu", "cpu"]), ROWS, show=False)
    assert (report.first_module, report.cause) == ("1", Cause.PER_SHARD_BATCH_NORM)


def test_calls_from_several_threads() -> None:
    models = [mlp() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda model: compared(model, ROWS), models))
    assert all(report.same for report in reports)


# ---- arguments -----------------------------------------------------------------------------------


def test_a_wrapper_is_compared_as_it_is() -> None:
    wrapper = DataParallel(mean_loss(), ["cpu"] * 3, shares=[2, 1, 1], scalars="mean")
    report = verify(wrapper, (ROWS, CLASSES), show=False)
    assert report.same
    assert report.title == "Calls on cpu, and on 3 replicas (cpu 5 rows, cpu 2 rows, cpu 2 rows)"


@pytest.mark.parametrize("device_ids", [None, [], [0, 1, 2]])
def test_without_accelerators_the_cpu_is_used(no_accelerators: None, device_ids: Any) -> None:
    report = verify(mlp(), ROWS, device_ids=device_ids, show=False)
    assert report.same
    assert f"on {len(device_ids or 'ab')} replicas (cpu" in report.title
    assert any("no accelerator" in note for note in report.notes)


def test_one_replica_is_the_plain_module() -> None:
    report = compared(with_batch_norm(), ROWS, num_replicas=1)
    assert report.same
    assert "on one replica (cpu)" in report.title


def test_the_criterion_is_used() -> None:
    def losses(*arguments: Any) -> list[float]:
        report = compared(mlp(), ROWS, *arguments)
        assert report.same
        return [row.value for row in report.rows if row.kind is Kind.LOSS]

    assert losses(None, lambda output: (output * 0 + 1000).mean()) == [1000.0] * 4
    assert losses(torch.randn(9, 2), nn.MSELoss()) != [1000.0] * 4


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"model": F.relu}, TypeError, "model: expected a torch.nn.Module"),
        ({"model": nn.LazyLinear(3)}, ValueError, "LazyLinear does not know the shape of its 'weight'"),
        ({"inputs": (ROWS.to("meta"),)}, TypeError, r"cannot compare inputs\[0\], a tensor on the meta device"),
        ({"model": DataParallel(nn.Linear(5, 2), ["cpu"] * 2)}, ValueError, "already wrapped"),
        ({"target": ROWS}, ValueError, "target without criterion"),
        ({"criterion": "mse"}, TypeError, "criterion: expected a function"),
        ({"criterion": lambda output: output}, ValueError, r"expected one number.*shape \(9, 2\)"),
        ({"shares": "odd"}, ValueError, "shares='odd'"),
        ({"device_ids": ["cpu:nowhere"]}, ValueError, "is not a device"),
        ({"rtol": math.nan}, ValueError, "rtol=nan: expected a finite number, 0 or more"),
        ({"rtol": -1.0}, ValueError, "rtol=-1.0: expected a finite number, 0 or more"),
        ({"rtol": "1e-5"}, TypeError, "rtol='1e-5': expected a finite number, 0 or more"),
        ({"model": nn.Linear}, TypeError, r"got the class Linear; make one: Linear\(\.\.\.\)"),
        ({"target": nn.MSELoss()}, TypeError, r"got MSELoss\(\); write verify\(model, inputs, target, criterion\)"),
        ({"criterion": ROWS}, TypeError, r"got a Tensor of shape \(9, 5\); write verify\(model, inputs"),
        ({"criterion": nn.MSELoss}, TypeError, r"got the class MSELoss; make one: MSELoss\(\)"),
        (
            {"loss": nn.MSELoss()},
            TypeError,
            r"expected 'mean' or 'sum'; write verify\(model, inputs, target, criterion",
        ),
        ({"loss_fn": nn.MSELoss()}, TypeError, r"did you mean criterion\?"),
        ({"labels": ROWS}, TypeError, r"did you mean target\?"),
        ({"inputs": DataLoader(TensorDataset(ROWS))}, TypeError, r"got a DataLoader; take one: inputs, target = next"),
    ],
)
def test_mistakes(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    given: dict[str, Any] = {"model": mlp(), "inputs": ROWS, "device_ids": ["cpu", "cpu"], "show": False} | arguments
    with pytest.raises(error, match=says):
        verify(**given)


def test_a_batch_that_the_model_does_not_take_has_a_note_on_the_target() -> None:
    with pytest.raises(TypeError) as caught:
        compared(mlp(), (ROWS, ROWS))
    assert "the model got 2 positional inputs. If one of them is the target, write verify(" in caught.value.__notes__[0]


@pytest.mark.parametrize("device_ids", [None, ["cpu"]])
def test_a_wrapper_with_fewer_than_two_replicas_is_compared_with_two(no_accelerators: None, device_ids: Any) -> None:
    """With its options: a script for several devices, tried where there is one, or none."""
    for sync_batch_norm in (True, False):
        wrapper = DataParallel(with_batch_norm(), device_ids, sync_batch_norm=sync_batch_norm)
        report = verify(wrapper, ROWS, show=False)
        assert report.same is sync_batch_norm
        assert report.explained is not sync_batch_norm
        assert any("replicas on cpu, cpu" in note for note in report.notes)
    inner = DataParallel(with_batch_norm(), device_ids, sync_batch_norm=True)
    assert verify(DataParallel(inner, device_ids), ROWS, show=False).same


class OwnGather(DataParallel):
    def gather(self, outputs: Any, output_device: Any) -> Any:
        return super().gather(outputs, output_device)


def test_a_mean_over_rows_is_the_same_with_a_primitive_of_ones_own() -> None:
    """N1: the rows of its replicas are not known, so the model's calls, whose means differ, are not compared."""
    report = verify(OwnGather(mean_loss().double(), ["cpu"] * 2, scalars="mean"), (ROWS.double(), CLASSES), show=False)
    assert report.same
    assert report.notes == ()


def test_an_error_in_a_replica_and_outputs_that_cannot_be_gathered_raise() -> None:
    """Batch norm refuses a shard of one row."""
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as raised:
        compared(with_batch_norm(), ROWS[:3])
    assert "raised in replica 1 on cpu" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="along dimension 0: replica 0 returned"):
        compared(calls(lambda self, x: x[:, : len(x)]), ROWS)


def test_it_is_printed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(mlp(), ROWS, device_ids=["cpu", "cpu"])
    assert capsys.readouterr().out == f"{report}\n"
    assert report.is_printed
    compared(mlp(), ROWS)
    assert capsys.readouterr().out == ""


def test_where_tensors_are(simulated_accelerators: Any) -> None:
    """On simulated devices: model and inputs on the first, outputs gathered there or elsewhere."""
    target = torch.randn(9, 2)
    with simulated_accelerators(4):
        differs = with_batch_norm().to("sim:0")
        report = verify(differs, ROWS, target, nn.MSELoss(), device_ids=[0, 1], show=False)
        assert (report.first_module, report.cause) == ("1", Cause.PER_SHARD_BATCH_NORM)
        model = mlp().to("sim:0")
        report = verify(model, ROWS.to("sim:1"), show=False)
        assert report.same
        assert report.title.startswith("Sequential on sim:0, and on 4 replicas (sim:0, ")
        assert verify(model, ROWS, target, nn.MSELoss(), output_device="cpu", show=False).same
        on_the_cpu = mlp()
        assert verify(on_the_cpu, ROWS, show=False).title.startswith("Sequential on sim:0, ")
        assert on_the_cpu[0].weight.device.type == "cpu"
    with simulated_accelerators(1):  # one accelerator has two replicas
        report = verify(mlp().to("sim:0"), ROWS, show=False)
    assert report.title == "Sequential on sim:0, and on 2 replicas (sim:0 5 rows, sim:0 4 rows)"


def test_what_forward_keeps_in_attributes_is_no_difference_unless_it_is_updated() -> None:
    """R6: caches, functions, iterators; what is lost is named, for those who read it."""
    report = compared(nn.Sequential(nn.Linear(5, 5), Caching()), ROWS)
    assert report.same
    assert not [row for row in report.rows if row.kind is Kind.ATTRIBUTE]
    assert "forward stores 1.function: values that a replica assigns" in " ".join(str(report).split())


# ---- inputs that are not split as meant --------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "inputs", "said"),
    [
        (lambda self, x, w: nn.functional.linear(x, w), (torch.randn(4, 5), torch.randn(4, 5)), "in_dims={1: None}"),
        (lambda self, x, w: x[:, :1] * w, {"x": torch.randn(4, 5), "w": torch.randn(4)}, "in_dims={'w': None}"),
        (lambda self, table, x: table.sum(0) + x, (torch.randn(4, 5), torch.randn(4, 5)), "in_dims={0: None}"),
        (
            lambda self, x, p: nn.functional.linear(x, p["w"], p["b"]),
            (torch.randn(4, 5), {"w": torch.randn(4, 5), "b": torch.randn(4)}),
            "in_dims={1: None}",
        ),
        (
            lambda self, x, table: (x + table.sum(0), (x + table.sum(0)).square().mean()),
            (torch.randn(5, 3), torch.randn(5, 3)),
            "in_dims={1: None}, scalars='mean'",
        ),
        (
            lambda self, pictures: torch.stack([picture.sum() for picture in pictures]),
            ([torch.randn(3, 5) for _ in range(4)],),
            "unisono.SampleList(inputs[0])",
        ),
        (
            lambda self, x, f: x * torch.tensor([f[row] for row in range(len(x))])[:, None],
            (torch.randn(4, 5), {row: float(row) for row in range(4)}),
            "unisono.SampleList(inputs[1].values())",
        ),
    ],
    ids=["a layer's weights", "scales", "table", "several", "and a loss", "list", "numbered dict"],
)
def test_an_input_that_is_not_split_as_meant(function: Any, inputs: Any, said: str) -> None:
    """S18: it said that rows interact, or that outputs are joined on the wrong axis."""
    report = compared(calls(function), inputs)
    assert (report.same, report.cause) == (False, Cause.SPLIT_WRONGLY)
    assert all(said in finding.text for finding in report.findings)


@pytest.mark.parametrize("whole", [np.arange(4.0), types.SimpleNamespace(f=torch.arange(4.0))])
def test_an_input_that_goes_whole_and_may_have_rows(whole: Any) -> None:
    """S17: what is no container cannot be split to see whether that helps."""

    def forward(self: Any, x: torch.Tensor, whole: Any) -> torch.Tensor:
        values = getattr(whole, "f", whole)
        return x * torch.tensor([float(values[row]) for row in range(len(x))])[:, None]

    report = compared(calls(forward), (torch.randn(4, 5), whole))
    assert not report.same
    assert all(
        "Or inputs[1], which every replica gets whole, has one entry for each row" in f.text for f in report.findings
    )


# ---- no errors of verify's own -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rows", "path", "shapes"),
    [
        (calls(lambda self, x: self.layers[0](x).squeeze(), nn.Linear(5, 1)), 3, "", ((3,), ())),
        (calls(lambda self, x: (x.sum(1), x.squeeze())), 3, "[1]", ((3, 5), (5,))),
        (calls(lambda self, x: {"best": x.argmax(1).squeeze()}), 7, "['best']", ((7,), ())),
    ],
    ids=["0-dim", "vector", "integers"],
)
def test_an_output_without_its_axis_of_rows(model: nn.Module, rows: int, path: str, shapes: tuple[Any, Any]) -> None:
    """N14: with one row in the last replica it was an error of verify's own, or of gather's."""
    report = verify(model, torch.randn(rows, 5), device_ids=["cpu"] * (rows // 2 + 1), shares="chunk", show=False)
    assert report.cause == Cause.LOST_AXIS
    one, shard = shapes
    assert (
        f"output{path} has shape {one} on one device, but {shard} in a replica with one row" in report.findings[0].text
    )
    assert str(report)


def test_a_default_device_without_data() -> None:
    """N14: the numbers that verify makes for itself have data."""
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    with torch.device("meta"):
        assert compared(model, ROWS).same


def test_what_replicas_change_in_place_is_found() -> None:
    """R6: a list of the model, and an object that counts; hooks that keep what they see are named."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.seen.append(x.sum())
        model.state.calls += 1
        return x

    report = compared(Calls(forward, seen=[], state=types.SimpleNamespace(calls=0)), ROWS)
    assert {row.name for row in report.differences} == {"seen", "state"}
    assert report.cause is Cause.ATTRIBUTES_OF_REPLICAS
    assert "in the order in which they finish" in " ".join(str(report).split())
    features: dict[str, torch.Tensor] = {}
    model = mlp()
    model[0].register_forward_hook(lambda layer, args, output: features.update(first=output.detach()))
    report = compared(model, ROWS)
    assert report.same
    assert "hooks store " in str(report)


def test_batch_norm_over_all_replicas_where_there_is_one_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """N14, N5: replicas that wait for each other need one each, so they are on the CPU, as the report says."""
    with simulated_accelerators(1), simulated_as_accelerators(monkeypatch):
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).to("sim:0")
        report = verify(model, torch.randn(8, 5), sync_batch_norm=True, show=False)
    assert report.same
    assert "batch norm over all replicas needs one accelerator for each" in " ".join(str(report).split())


# ---- outputs without tensors ---------------------------------------------------------------------


def floats(x: torch.Tensor) -> list[float]:
    return [float(each) for each in x[:, 0]]


@pytest.mark.parametrize(
    ("function", "cause", "says"),
    [
        (floats, Cause.LIST_OF_ROWS, "the output has 10 entries on one device, 5 on several"),
        (lambda x: {"a": [x, floats(x)]}, Cause.LIST_OF_ROWS, "output['a'][1] has 10 entries"),
        (lambda x: {"a": ["same" for _ in x]}, Cause.LIST_OF_ROWS, "return unisono.SampleList(entries)"),
        (lambda x: [bool(each > 0) for each in x[:, 0]], Cause.LIST_OF_ROWS, "return unisono.SampleList(entries)"),
        (
            lambda x: float(x.max()),
            Cause.ONE_NUMBER_A_SHARD,
            "each replica returned one number for its own rows (5 + 4)",
        ),
        (lambda x: {"n": float(x.sum())}, Cause.ONE_NUMBER_A_SHARD, "one number, output['n'], for its own rows"),
        (lambda x: {"n": float(x.sum())}, Cause.ONE_NUMBER_A_SHARD, "Fix: scalars='sum'"),
        (lambda x: (x, float(x.mean())), Cause.ONE_NUMBER_A_SHARD, "Fix: scalars='mean'"),
        (lambda x: (x, np.float32(x.mean())), Cause.ONE_NUMBER_A_SHARD, "Fix: scalars='mean'"),
        (lambda x: (x, Fraction(len(x))), Cause.ONE_NUMBER_A_SHARD, "Fix: scalars='sum'"),
        (lambda x: bool(len(x) > 5), Cause.ONE_NUMBER_A_SHARD, "each replica returned one number"),
        (
            lambda x: (x, f"{len(x[::2]) // 2}"),
            Cause.VALUE_OF_A_SHARD,
            "output[1] is '2' on one device, '1' on several",
        ),
        (lambda x: (x, x.shape), Cause.VALUE_OF_A_SHARD, "output[1] is torch.Size([8, 5]) (2 entries) on one device"),
    ],
)
def test_outputs_without_tensors(function: Any, cause: Cause, says: str) -> None:
    """N15: they are compared too, by path; numbers as 0-dim outputs are."""
    rows = {Cause.VALUE_OF_A_SHARD: 8, Cause.LIST_OF_ROWS: 10}.get(cause, 9)
    report = compared(calls(lambda self, x: function(x)), ROWS.repeat(2, 1)[:rows])
    assert report.cause is cause
    assert all(says in finding.text for finding in report.findings)
    assert len(report.findings) == 2
    assert all("on one device" in row.note for row in report.differences)


@pytest.mark.parametrize(
    "function",
    [
        len,
        lambda x: {"n": 3, "name": "a", "pair": (1.5, True), "none": None, "complex": 1j},
        lambda x: SampleList(f"{each:.2f}" for each in floats(x)),
        lambda x: (x, [float("nan"), 2**70]),
        lambda x: torch.Size([3, 4]),
    ],
)
def test_outputs_without_tensors_that_are_the_same(function: Any) -> None:
    """N15: a number of rows is the sum of the replicas'; constants are equal in all of them."""
    report = compared(calls(lambda self, x: function(x)), ROWS)
    assert report.same
    assert report.rows


def test_floats_are_compared_with_the_tolerance() -> None:
    """N15: the sum of a shard is rounded in another way."""

    def forward(self: Any, x: torch.Tensor) -> float:
        return float(self.layers[0](x).detach().double().sum()) * (1 + 1e-12 * (len(x) == 9))

    model = calls(forward, nn.Linear(5, 4))
    assert compared(model, ROWS, scalars="sum").same
    assert not compared(model, ROWS, scalars="sum", rtol=1e-14).same


# ---- what forward writes into --------------------------------------------------------------------

KEPT: dict[Any, Any] = {}
LISTED: list[float] = []


def by_size(cache: dict[Any, Any]) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in cache:
            cache[len(x)] = torch.ones(len(x), 1)
        return x * cache[len(x)]

    return forward


def last_size(self: Any, x: torch.Tensor) -> torch.Tensor:
    if len(KEPT.get("table", ())) != len(x):
        KEPT["table"] = torch.ones(len(x), 1)
    return x * KEPT["table"]


def of_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    return by_size(self.cache)(self, x)


@pytest.mark.parametrize("forward", [by_size(KEPT), last_size, of_attribute])
def test_a_cache_is_no_difference(forward: Any) -> None:
    """R6: with another number of rows it holds other keys; repeated with other numbers, it stays as it is."""
    KEPT.clear()
    model = calls(forward)
    model.cache = {}
    assert compared(model, ROWS[:6]).same


def append_to_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.cache.setdefault("seen", []).extend(floats(x))
    return x


def append(self: Any, x: torch.Tensor) -> torch.Tensor:
    LISTED.append(float(x.detach().mean()))
    return x


def count(self: Any, x: torch.Tensor) -> torch.Tensor:
    KEPT["calls"] = KEPT.get("calls", 0) + 1
    return x


def keep(self: Any, x: torch.Tensor) -> torch.Tensor:
    KEPT["x"] = x.detach()
    return x


def return_what_is_kept(self: Any, x: torch.Tensor) -> Any:
    self.cache.setdefault("seen", []).extend(floats(x))
    return x, self.cache["seen"]


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (append_to_attribute, "cache"),
        (append, "LISTED (global of test_verify.py)"),
        (count, "KEPT (global of test_verify.py)"),
        (keep, "KEPT (global of test_verify.py)"),
        (return_what_is_kept, "cache"),
    ],
)
def test_what_all_replicas_write_into(forward: Any, name: str) -> None:
    """R6: whatever the order in which they arrive: it may be that of one device by accident."""
    KEPT.clear()
    LISTED.clear()
    model = calls(forward)
    model.cache = {}
    report = compared(model, ROWS)
    assert not report.same
    said = [finding for finding in report.findings if finding.cause is Cause.ATTRIBUTES_OF_REPLICAS]
    assert [finding.mode for finding in said] == [*BOTH]
    assert all(f"forward updates {name}" in finding.text for finding in said)


@pytest.mark.parametrize("returned", [torch.Tensor.detach, torch.Tensor.item])
def test_gradients_of_a_backward_in_forward_are_compared(returned: Callable[[torch.Tensor], Any]) -> None:
    """R4: each replica has called backward of the mean over its own rows; the sum of these is no mean."""

    def forward(self: Any, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        value = loss(self.layers[0](x).square())
        value.backward()
        return returned(value)

    for loss, is_same in ((torch.sum, True), (torch.mean, False)):
        report = compared(calls(partial(forward, loss=loss), nn.Linear(5, 4)), ROWS, scalars=loss.__name__)
        of_gradients = [row for row in report.rows if row.kind is Kind.GRADIENT]
        assert {row.differs for row in of_gradients} == {not is_same}
        assert report.same == is_same
