"""DataParallel: how it is made and reached, what goes in and what comes out. Each test cites its row of the behaviour.

The oracles are the plain module on the whole batch, and `unisono.data_parallel`.
"""

import collections
import copy
import inspect
import io
import pickle
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from helpers.modules import Calls, Composed, Fn
from unisono import DataParallel, data_parallel, gather, verify
from unisono.data_parallel import ARGUMENTS

CPU = torch.device("cpu")
SIM = [f"sim:{i}" for i in range(4)]  # of the fixture `sim`

both = pytest.mark.parametrize("wrap", [DataParallel, Composed])


class Reporter(nn.Module):
    """A linear layer that reports the rows and the device of each call in `seen`, a list that all replicas share."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = []

    def forward(self, x, *args, **kwargs):
        self.seen.append((str(x.device), x.shape[0]))
        output = self.layer(x)
        assert {tensor.device for tensor in (*self.parameters(), *self.buffers(), output)} == {x.device}
        return output


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def numbered(rows: int, *more: int) -> torch.Tensor:
    """Return a tensor whose rows all differ."""
    shape = (rows, *more)
    return torch.arange(torch.Size(shape).numel()).reshape(shape).double() / 10


def train_once(model: nn.Module, *inputs: Any, **kwargs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output of one step and the gradients that its backward pass left."""
    model.zero_grad()
    output = model(*inputs, **kwargs)
    output.square().mean().backward()
    return output.detach().cpu(), [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def assert_like_plain(wrapper: DataParallel, *inputs: Any, **kwargs: Any) -> None:
    """Check output and gradients against the plain module, on the CPU."""
    plain = copy.deepcopy(wrapper.module).cpu()
    torch.testing.assert_close(train_once(wrapper, *inputs, **kwargs), train_once(plain, *inputs, **kwargs))


# Construction and access


def test_signature():
    """A1: torch's arguments, in torch's order, and ours by keyword only."""
    ours = inspect.signature(DataParallel).parameters
    theirs = [name for name in inspect.signature(nn.DataParallel.__init__).parameters if name != "self"]
    assert list(ours)[:4] == theirs == ["module", "device_ids", "output_device", "dim"]
    assert [ours[name].default for name in theirs[1:]] == [None, None, 0]
    assert {p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY} == {*ours} - {*theirs, "unknown"}


# Of DataParallel, and of verify, which takes its options; also those of other libraries.
UNKNOWN = [
    ("share", "did you mean shares?"),
    ("devices", "did you mean device_ids?"),
    ("sync_bn", "did you mean sync_batch_norm?"),
    ("find_unused_parameters", "leave it out"),
    ("find_unused_parameter", "did you mean find_unused_parameters? leave it out"),
    ("mixed_precision", "use torch.autocast"),
    ("precision", "use torch.autocast"),
    ("gradient_accumulation_steps", "call backward several times"),
    *(
        (name, "leave it out")
        for name in ("broadcast_buffers", "forward_sync_buffers", "static_graph", "bucket_cap_mb", "split_batches")
    ),
    *((name, "leave it out") for name in ("strategy", "num_nodes", "num_processes", "device_placement")),
    *((name, "write device_ids=[0, 1]") for name in ("accelerator", "num_gpus", "num_replicas")),
    ("weights", "did you mean shares?"),
    ("colour", "it has ...device_ids"),
]
OF_FUNCTIONS = [
    ("install", "share", "did you mean shares?"),
    ("install", "gpus", "did you mean device_ids?"),
    ("install", "timeout", "unisono.DataParallel has it"),
    ("install", "mesh", "it has device_ids, shares"),
    ("data_parallel", "devices", "did you mean device_ids?"),
    ("data_parallel", "shares", "unisono.DataParallel has it"),
    ("data_parallel", "share", "did you mean shares? unisono.DataParallel has it"),
    ("data_parallel", "kwargs", "did you mean module_kwargs?"),
]


@pytest.mark.parametrize(
    ("function", "name", "says"),
    [*((function, *unknown) for function in ("DataParallel", "verify") for unknown in UNKNOWN), *OF_FUNCTIONS],
)
def test_unknown_arguments_name_the_line_to_write(function: str, name: str, says: str) -> None:
    """A1: an argument that only `DataParallel` has is said to be there."""
    arguments = [nn.Linear(5, 2), torch.ones(4, 5)][: {"install": 0, "DataParallel": 1}.get(function, 2)]
    message = f"{function} has no argument '{name}'; {says}"
    with pytest.raises(TypeError, match=".*".join(map(re.escape, message.split("...")))):
        getattr(unisono, function)(*arguments, **{name: True})


@pytest.mark.parametrize(
    ("device_ids", "public", "places"),
    [
        *((ids, [0, 1, 2, 3], SIM) for ids in (None, [0, 1, 2, 3], SIM, (0, "sim:1", 2, 3))),
        *((["cpu"] * n, [CPU] * n, ["cpu"] * n) for n in (1, 2, 3)),
        ([0, 0], [0, 0], ["sim:0"] * 2),
        ([1, 1, 2], [1, 1, 2], ["sim:1", "sim:1", "sim:2"]),
        (["sim:2"] * 3, [2] * 3, ["sim:2"] * 3),
    ],
    ids=repr,
)
@both
def test_device_ids(sim, wrap, device_ids, public, places):
    """A1, A12: ints, strings and devices, also one of them twice; what is public is what torch shows."""
    model = wrap(Reporter().to(places[0]), device_ids)
    assert (model.device_ids, model.output_device, model.dim) == (public, public[0], 0)
    model(torch.ones(12, 3))
    assert sorted(model.module.seen) == [(place, 12 // len(places)) for place in places]
    assert_like_plain(model, torch.ones(12, 3))


@pytest.mark.parametrize("num_devices", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 7, 30])
@pytest.mark.parametrize("input_on", ["cpu", "sim:0", "sim:1"])
def test_inputs_from_any_device(simulated_accelerators, num_devices, rows, input_on):
    """A1, S11, G1, N1: device_ids left out; the gradient of the input is where the input is."""
    with simulated_accelerators(num_devices):
        model = DataParallel(Reporter().double().to("sim:0"))
        plain = copy.deepcopy(model.module).cpu()
        x, x_there = numbered(rows, 3).requires_grad_(), numbered(rows, 3).to(input_on).requires_grad_()
        torch.testing.assert_close(train_once(model, x_there), train_once(plain, x))
        torch.testing.assert_close(x_there.grad.cpu(), x.grad)
        assert str(x_there.grad.device) == input_on
        sizes = [len(chunk) for chunk in torch.arange(rows).chunk(num_devices)]
        assert sorted(model.module.seen) == [(f"sim:{i}", size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("device_ids", [None, [], [0, 1]], ids=repr)
def test_without_accelerators_it_is_the_plain_module(no_accelerators, caplog, device_ids):
    """A2: the whole batch in one call; the attributes are there; said once in the log. The functional form, too."""
    model, again = (DataParallel(Reporter(), device_ids, output_device=0, dim=1) for _ in range(2))
    assert 'DataParallel(model, ["cpu"] * n)' in caplog.text
    assert (model.device_ids, model.output_device, model.dim) == ([], None, 1)
    x = torch.ones(8, 3)
    for output in (model(x), data_parallel(model.module, x, device_ids)):
        assert torch.equal(output, model.module.layer(x))
    assert (model.module.seen, again.module.seen) == ([("cpu", 8)] * 2, [])
    assert data_parallel(Fn(lambda: "called"), None) == "called"
    assert data_parallel(Fn(lambda x, scale: x * scale), (2,), module_kwargs={"scale": 3}) == 6
    assert caplog.text.count("no accelerator") == 1


def test_rescue_with_one_device_says_that_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """F11"""
    DataParallel(nn.Linear(5, 2), ["cpu"], rescue=True)
    assert "rescue=True does nothing with one device (cpu), where the plain module runs: give parts=2" in caplog.text


def test_one_device_is_a_direct_call(sim):
    """A3: the module is moved there and called itself, inputs follow, 0-dim outputs stay 0-dim."""
    module = Reporter()
    model = DataParallel(module, [1])
    assert {p.device for p in module.parameters()} == {sim[1]}
    called = []
    module.forward = lambda batch, scale: called.append(batch) or (batch["x"].sum() * scale[0])
    output = model({"x": torch.ones(4, 3)}, scale=(torch.tensor(2.0),))
    assert (output.device, output.dim(), output.item()) == (sim[1], 0, 24.0)
    assert len(called) == 1


def test_one_device_keeps_what_is_there_already():
    """A3: the very tensors and objects; nothing is copied, joined or turned into lists."""
    model = DataParallel(Fn(lambda *args, **kwargs: (args, kwargs, 3)), ["cpu"])
    x, marker = torch.ones(3), object()
    args, kwargs, number = model(x, [x], marker=marker)
    assert args[0] is args[1][0] is x
    assert kwargs["marker"] is marker
    assert number == 3
    assert data_parallel(Fn(lambda x: x.sum()), torch.ones(3), ["cpu"]).dim() == 0  # without a warning


with_one_elsewhere = pytest.mark.parametrize(
    ("move", "name", "device"),
    [
        (lambda module: module[0].to("sim:1"), "0.weight", "sim:1"),
        (lambda module: setattr(module[1], "running_mean", module[1].running_mean.cpu()), "1.running_mean", "cpu"),
    ],
    ids=["parameter", "buffer"],
)


@with_one_elsewhere
def test_one_device_adds_a_note_to_the_modules_own_error(sim, move, name, device):
    """A3: the tensor that is elsewhere, and the fix; to errors of another kind, none."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    model = DataParallel(module, [0])
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        model(torch.ones(4, 7))
    assert not hasattr(caught.value, "__notes__")
    del caught
    move(module)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(4, 3))
    assert f"'{name}' is not on sim:0, the wrapper's device. Move the module: model.to('sim:0')" in "".join(
        caught.value.__notes__
    )


@both
@with_one_elsewhere
def test_a_tensor_off_the_first_device_is_named(sim, wrap, move, name, device):
    """A4: RuntimeError that names both devices, the tensor and the fix."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("sim:0")
    model, x = wrap(module, [0, 1], sync_batch_norm=False), torch.ones(4, 3)
    move(module)
    message = rf"on device sim:0 \(device_ids\[0\]\), but {name} is on {device}.*model.to\('sim:0'\)"
    with pytest.raises(RuntimeError, match=message):
        model(x)
    with pytest.raises(RuntimeError, match=message):
        data_parallel(module, x, [0, 1])
    module.to("sim:0")
    assert model(x).shape == (4, 3)


def test_unequal_devices_are_warned_about(sim, monkeypatch):
    """A5: when the wrapper is made, and where the user made it."""

    def facts(device):
        return SimpleNamespace(total_memory=(16, 4)[device.index], multi_processor_count=8)

    monkeypatch.setattr(torch, "get_device_module", lambda device=None: SimpleNamespace(get_device_properties=facts))
    monkeypatch.setattr("unisono.runtime.devices.computes_on_host", lambda device: device.type == "cpu")
    with pytest.warns(UserWarning, match=r"less than 75 % of the memory of sim:0.*shares=\[1.0, 0.25\]") as warned:
        DataParallel(mlp().to("sim:0"), [0, 1])
    assert warned[0].filename == __file__


@both
@pytest.mark.parametrize("device_ids", [[0], [0, 1]], ids=repr)
@pytest.mark.parametrize(
    ("output_device", "expected", "public"),
    [(None, "sim:0", 0), (2, "sim:2", 2), ("sim:3", "sim:3", 3), ("cpu", "cpu", CPU), (CPU, "cpu", CPU)],
)
def test_output_device(sim, wrap, device_ids, output_device, expected, public):
    """A3, A6: any device; gradients still arrive where the parameters are."""
    model = wrap(mlp().to("sim:0"), device_ids, output_device=output_device)
    assert model.output_device == public
    output = model(numbered(5, 3))
    assert output.device == torch.device(expected)
    output.sum().backward()
    assert {p.grad.device for p in model.parameters()} == {sim[0]}
    assert_like_plain(model, numbered(5, 3))
    assert data_parallel(model.module, numbered(5, 3), device_ids, output_device).device == torch.device(expected)


def test_output_device_minus_one(sim):
    """A6: the CPU, with torch's deprecation warning, shown where the user wrote it."""
    with pytest.warns(FutureWarning, match="output_device=-1 is deprecated") as warned:
        model = DataParallel(mlp().to("sim:0"), [0, 1], output_device=-1)
    assert warned[0].filename == __file__
    assert model(numbered(4, 3)).device == CPU


def test_tensors_in_attributes_follow_their_replica(sim):
    """R7: those on the first device; mixed devices would be an error. Others stay where they are."""
    shift, on_cpu = torch.ones(3, device=sim[0]), torch.ones(3)
    model = DataParallel(Calls(lambda self, x: x + self.shift + self.on_cpu.sum(), shift=shift, on_cpu=on_cpu), [0, 1])
    for _ in range(2):
        assert model(torch.zeros(4, 3)).unique().tolist() == [4]


# Hooks of others


def recorded_by(layer: nn.Module, saved: dict[Any, Any]) -> Any:
    """Register a hook that keeps outputs as captum's do: by the module that it is registered for, and by device."""

    def wrapper(original: nn.Module) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            saved[original][output.device] = output

        return hook

    return layer.register_forward_hook(wrapper(layer))


@both
def test_what_a_hook_keeps_by_its_module_is_found_by_it(sim, wrap):
    """R9: a hook that has a variable for its module had the replica there, so that the caller found nothing.

    What it keeps belongs to the caller's graph: the gradient for it, too.
    """
    model, x = wrap(mlp().to("sim:0"), [0, 1]), numbered(5, 3)
    plain = copy.deepcopy(model.module).cpu()
    for place in (0, 1):
        layer, saved = model.module[place], collections.defaultdict(dict)
        recorded_by(layer, saved)
        hidden = plain[: place + 1](x)
        [expected] = torch.autograd.grad(plain[place + 1 :](hidden).square().sum(), hidden)
        for _ in range(2):
            output = model(x)
            kept = [saved[layer][device] for device in sim[:2]]
            grads = torch.autograd.grad(output.square().sum(), kept)
            torch.testing.assert_close(torch.cat([grad.cpu() for grad in grads]), expected)
    with torch.no_grad():
        model(x)
    torch.testing.assert_close(saved[layer][sim[0]], kept[0])


@both
def test_a_hook_that_cannot_tell_replicas_apart_is_warned_about(wrap):
    """R9: by device, one replica's output took the other one's place, in silence."""
    model = wrap(mlp(), ["cpu"] * 2)
    recorded_by(model.module[0], collections.defaultdict(dict))
    with pytest.warns(UserWarning, match=r"hook .* holds its module \('0', a Linear\).* model\.module"):
        model(numbered(5, 3))


# State dicts


def child_named_module(**more: nn.Parameter) -> nn.Module:
    """A module whose own child is called as the wrapper calls it."""
    return Calls(lambda self, x: self.module(x), module=nn.Linear(3, 3), **more)


def child_named_module_and_more() -> nn.Module:
    """Its names, clean, are partly those of a wrapped module's."""
    return child_named_module(weight=nn.Parameter(torch.full((3, 3), 7.0)), bias=nn.Parameter(torch.full((3,), 8.0)))


def changed(module: nn.Module) -> nn.Module:
    """Return a copy with other values."""
    twin = copy.deepcopy(module)
    for tensor in twin.state_dict().values():
        tensor.add_(1)
    return twin


def test_state_dict_has_torchs_names():
    """A8: `module.` in front; without it through `.module`."""
    model = DataParallel(mlp(), ["cpu", "cpu"])
    assert list(model.state_dict()) == [f"module.{name}" for name in model.module.state_dict()]
    assert list(model.module.state_dict()) == list(mlp().state_dict())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda part: DataParallel(part, []),
        lambda part: DataParallel(part, ["cpu"]),
        lambda part: DataParallel(part, ["cpu", "cpu"]),
        lambda part: nn.Sequential(nn.Linear(3, 3), DataParallel(part, ["cpu", "cpu"])),
    ],
    ids=["no device", "one device", "two devices", "a submodule"],
)
@pytest.mark.parametrize(
    "part",
    [lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), child_named_module, child_named_module_and_more],
)
@pytest.mark.parametrize("form", ["wrapped", "clean"])
def test_load_state_dict_takes_both_forms(no_accelerators, wrap, part, form):
    """A8, A10: also where the module's own names begin with `module.`, and where the wrapper is a submodule."""
    model = wrap(part())
    other = changed(model)
    plain = copy.deepcopy(other)
    if isinstance(plain, nn.Sequential):
        plain[1] = plain[1].module
    else:
        plain = plain.module
    given = (other if form == "wrapped" else plain).state_dict()
    before = list(given)
    result = model.load_state_dict(given, assign=form == "clean")
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    torch.testing.assert_close(model.state_dict(), other.state_dict())
    assert list(given) == before


@pytest.mark.parametrize("form", ["module.", ""])
def test_load_state_dict_of_some_names(form):
    """A8: with strict=False, what is missing or unexpected is reported, and the rest is loaded."""
    model = DataParallel(mlp(), ["cpu", "cpu"])
    given = {f"{form}0.weight": torch.full((5, 3), 9.0).double(), "other": torch.ones(1)}
    result = model.load_state_dict(given, strict=False)
    assert (model.module[0].weight == 9).all()
    assert "other" in result.unexpected_keys
    assert "module.0.bias" in result.missing_keys
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(given)


# The class, and its verbs


def overriding(verb, called):
    """Return a subclass of DataParallel that notes the calls of one verb."""

    def override(self, *args):
        called.append(args)
        return getattr(DataParallel, verb)(self, *args)

    return type("Mine", (DataParallel,), {verb: override})


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("verb", ["scatter", "replicate", "parallel_apply", "gather"])
def test_a_verb_that_is_overridden_is_used(sim, verb, assigned):
    """A9: by a subclass of torch's, or on the instance; once a forward, with torch's arguments; the numbers stay."""
    called = []
    model = (DataParallel if assigned else overriding(verb, called))(mlp().to("sim:0"), [0, 1, 2])
    if assigned:
        original = getattr(model, verb)
        setattr(model, verb, lambda *args: called.append(args) or original(*args))
    assert isinstance(model, nn.DataParallel)  # so that other libraries' unwrap helpers keep working
    assert_like_plain(model, numbered(7, 3))
    (arguments,) = called
    expected = {
        "scatter": lambda inputs, kwargs, device_ids: len(inputs) == 1 and kwargs == {} and device_ids == [0, 1, 2],
        "replicate": lambda module, device_ids: module is model.module and device_ids == [0, 1, 2],
        "parallel_apply": lambda replicas, inputs, kwargs: len(replicas) == len(inputs) == len(kwargs) == 3,
        "gather": lambda outputs, output_device: len(outputs) == 3 and output_device == 0,
    }
    assert expected[verb](*arguments)


AsksForOurs = overriding("scatter", [])  # with `super().scatter(...)`


class OpensSealed(DataParallel):
    """For batches that only its own scatter can open."""

    def scatter(self, inputs, kwargs, device_ids):
        (sealed, *_), parts = inputs, len(device_ids)
        return [(x.to(f"sim:{i}"),) for i, x in enumerate(sealed.x.chunk(parts))], [{}] * parts


@pytest.mark.parametrize("n", [1, 2, 4])
def test_an_overridden_scatter_opens_what_ours_cannot(sim, n):
    """A9: it is given all the devices whatever the inputs are, as in torch; also where there is one device."""
    model = OpensSealed(Reporter().to("sim:0"), list(range(n)))
    output = model(SimpleNamespace(x=torch.ones(8, 3)))
    assert output.shape == (8, 2)
    assert sorted(model.module.seen) == [(f"sim:{i}", 8 // n) for i in range(n)]


@pytest.mark.parametrize("shares", ["even", [2, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]], ids=repr)
@pytest.mark.parametrize("wrap", [DataParallel, Composed, AsksForOurs])
def test_shares_hold_for_an_overridden_verb_too(sim, wrap, shares):
    """S2, A9: a share of 0 leaves that replica idle, wherever it is; an overridden scatter fills the first devices."""
    model = wrap(Reporter().to("sim:0"), [0, 1, 2], shares=shares)
    expected = {"even": [4, 3, 3], (2, 1, 1): [5, 3, 2], (0, 1, 1): [0, 5, 5], (1, 0, 1): [5, 0, 5], (1, 1, 0): [5, 5]}
    sizes = expected[shares if isinstance(shares, str) else tuple(shares)]
    x = torch.arange(30.0).reshape(10, 3)
    torch.testing.assert_close(model(x).cpu(), copy.deepcopy(model.module).cpu().layer(x))
    where = [(i, size) for i, size in enumerate(sizes) if size]
    if wrap is AsksForOurs:
        where = [(i, size) for i, (_, size) in enumerate(where)]
    assert sorted(model.module.seen) == [(f"sim:{i}", size) for i, size in where]
    if wrap is DataParallel:
        assert [(t.device, t.rows) for t in model.replica_timings] == [(sim[i], size) for i, size in where]


# Wrappers inside models


@pytest.mark.parametrize(
    "wrap_middle",
    [
        DataParallel,
        lambda block: DataParallel(block, [0]),
        lambda block: DataParallel(block, [0, 1], output_device=1),
        lambda block: DataParallel(DataParallel(block)),
        Composed,
    ],
    ids=["all", "one device", "output elsewhere", "twice", "overridden verb"],
)
@pytest.mark.parametrize("middle", ["with parameters", "without parameters", "with a buffer only"])
@both
def test_a_wrapper_inside_a_wrapped_module(sim, wrap, wrap_middle, middle):
    """A10: inside a replica everything stays on that replica's device."""
    shift = Calls(lambda self, x: x + self.shift, shift=nn.Buffer(torch.ones(4)))
    modules = {"with parameters": nn.Linear(4, 4), "without parameters": nn.Tanh(), "with a buffer only": shift}
    plain = nn.Sequential(nn.Linear(3, 4), modules[middle], nn.Linear(4, 2)).double()
    model = copy.deepcopy(plain).to("sim:0")
    model[1] = wrap_middle(model[1])
    model = wrap(model, [0, 1, 2])
    torch.testing.assert_close(train_once(model, numbered(8, 3)), train_once(plain, numbered(8, 3)))
    assert {p.grad.device for p in model.parameters()} == {sim[0]}


def halved(rest: nn.Module) -> nn.Module:
    """The front stays on the CPU."""
    front = nn.Linear(3, 4).double()
    return Calls(lambda self, x: self.rest(self.front(x).to("sim:0")), front=front, rest=rest)


@both
def test_half_of_the_model_on_the_cpu(sim, wrap):
    """A11: outside the wrapper it works, and gradients arrive on both; inside it is a clear error."""
    rest = nn.Linear(4, 2).double().to("sim:0")
    model = halved(wrap(rest))
    plain = nn.Sequential(copy.deepcopy(model.front), copy.deepcopy(rest).cpu())
    torch.testing.assert_close(train_once(model, numbered(7, 3)), train_once(plain, numbered(7, 3)))
    assert (model.front.weight.grad.device, rest.weight.grad.device) == (CPU, sim[0])
    with pytest.raises(RuntimeError, match=r"on device sim:0 .* but front.weight is on cpu"):
        wrap(halved(rest))(numbered(7, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"module": lambda x: x}, TypeError, "module: expected a torch.nn.Module, got <function"),
        ({"module": None}, TypeError, "got None"),
        ({"dim": "0"}, TypeError, "dim='0': expected an int"),
        ({"dim": True}, TypeError, "dim=True"),
        ({"shares": [1]}, ValueError, "has 1 weight for 2 devices"),
        ({"device_ids": [0, 7]}, ValueError, r"no accelerator 7; .*CUDA_VISIBLE_DEVICES='2,3'.* from 0"),
        ({"output_device": 9}, ValueError, "output_device: there is no accelerator 9.*CUDA_VISIBLE_DEVICES='2,3'"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),  # an id must be the same in every process
)
def test_arguments_that_cannot_be_used(sim, monkeypatch, arguments, error, message):
    """A13: the value, what is there, and what CUDA_VISIBLE_DEVICES does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(error, match=message):
        DataParallel(**{"module": mlp().to("sim:0"), "device_ids": [0, 1], **arguments})


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [("shares", "most", ValueError), ("shares", 3, TypeError), ("output_device", 1.5, TypeError)],
)
def test_wrong_arguments_are_refused_without_accelerators_too(no_accelerators, option, value, error):
    """A13 with A2: a mistake is found where the script is written, not first where it is to run."""
    with pytest.raises(error, match=option):
        DataParallel(mlp(), [0, 1], **{option: value})


@pytest.mark.parametrize(
    ("option", "good", "bad", "error"),
    [
        ("dim", 1, "1", TypeError),
        ("shares", [3, 1], [1, 2, 3], ValueError),
        ("scalars", "mean", "median", ValueError),
        ("in_dims", (0,), ("0",), TypeError),
        ("out_dims", (0,), ("0",), TypeError),
        ("sync_batch_norm", True, "yes", TypeError),
        ("output_device", "cpu", 1.5, TypeError),
        ("rescue", True, 1, TypeError),
        ("parts", 2, 0, ValueError),
        *(("parts", 2, bad, TypeError) for bad in (1.5, True, "two")),
        # 2**32 milliseconds are 0 in 32 bits, so a replica was given up at once; larger numbers were OverflowErrors.
        *(("timeout", 60, bad, ValueError) for bad in (0, -1, float("nan"), float("inf"), 2**32 / 1000, 1e10)),
        *(("timeout", 60, bad, TypeError) for bad in (True, "60", torch.tensor(1.0))),
        ("module", nn.Identity(), None, TypeError),
        ("device_ids", [CPU, "cpu"], ["cpu"], AttributeError),
        ("loss", ..., "sum", AttributeError),
        ("process_group", ..., False, AttributeError),
    ],
)
def test_options_that_change_later_are_checked_as_at_first(option, good, bad, error):
    """A13, F7, F11: an option that cannot be used is refused at first and where it is assigned, and stays what it was.

    `loss` and `process_group` were accepted, and had no effect; they cannot change (`...`).
    """
    model = DataParallel(mlp(), ["cpu"] * 2)
    if good is not ...:
        setattr(model, option, good)
        made_with = {"module": mlp(), "device_ids": ["cpu"] * 2}
        assert getattr(model, option) == getattr(DataParallel(**{**made_with, option: good}), option)
        if error is not AttributeError:
            with pytest.raises(error, match=option):
                DataParallel(**{**made_with, option: bad})
    before = getattr(model, option, ...)
    with pytest.raises(error, match=option):
        setattr(model, option, bad)
    assert getattr(model, option, ...) == before


def test_its_text_names_devices_shares_and_batch_norm():
    """A7: as that of any module names its options; what nothing is shared by has none."""
    text = repr(DataParallel(nn.Linear(3, 2), ["cpu"] * 2, shares=[2, 1]))
    of_both = "  devices=[cpu, cpu], shares=(2.0, 1.0), sync_batch_norm=None"
    assert text.splitlines()[:2] == ["DataParallel(", of_both]
    assert "(module): Linear(" in text
    assert DataParallel(nn.Linear(3, 2), ["cpu"]).extra_repr() == "devices=[cpu]"
    assert "the plain module runs" in DataParallel(nn.Linear(3, 2), [0, 1]).extra_repr()


def test_every_option_is_checked_when_it_is_assigned():
    """A13: one that is added later must not be accepted in silence."""
    assert {*ARGUMENTS} <= {"module", *DataParallel._option_names}


def test_the_module_of_several_processes_cannot_be_replaced(monkeypatch):
    """A13, C7: they would begin with different parameters."""
    model = DataParallel(mlp(), ["cpu"] * 2)
    monkeypatch.setattr(DataParallel, "spans_processes", True)
    with pytest.raises(
        AttributeError, match=r"module cannot be assigned, .* Wrap the module again: DataParallel\(module\)"
    ):
        model.module = mlp()


def test_an_attribute_of_the_modules_may_have_the_name_of_an_option():
    """A7: `loss` is an option that the wrapper does not have as an attribute."""
    model = DataParallel(Calls(lambda self, x: self.loss(x), loss=nn.ReLU()), ["cpu"] * 2)
    model.loss = nn.Tanh()
    x = numbered(5, 3)
    assert torch.equal(model(x), x.tanh())


def test_the_output_device_may_change_between_steps(sim):
    """A6: a subclass assigns it when it is made, as gpytorch's MultiDeviceKernel does: an index, a string, a device."""

    class Own(DataParallel):
        def __init__(self, module, device_ids, output_device):
            super().__init__(module, device_ids)
            self.output_device = output_device

    for wanted in (1, "sim:1", sim[1]):
        model = Own(mlp().to("sim:0"), [0, 1], wanted)
        assert model.output_device == 1
        assert model(numbered(5, 3)).device == sim[1]
        assert_like_plain(model, numbered(5, 3))
    model.output_device = None
    assert model(numbered(5, 3)).device == sim[0]
    with pytest.raises(ValueError, match="output_device: there is no accelerator 9"):
        model.output_device = 9
    assert model(numbered(5, 3)).device == sim[0]


def saved_and_loaded(model: DataParallel) -> DataParallel:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded])
def test_a_copy_of_the_wrapper_is_one_of_its_own(copied):
    """A8, A14: deepcopy, pickle and torch.save, before and after a step; it has the same options."""
    model = DataParallel(mlp(), ["cpu"] * 2, shares=[2, 1], rescue=True, timeout=5)
    for _ in range(2):
        twin = copied(model)
        assert_like_plain(twin, numbered(6, 3))
        assert twin.module[0].weight is not model.module[0].weight
        assert (twin.rescue, twin.timeout) == (True, 5)
        assert [timing.rows for timing in twin.replica_timings] == [4, 2]
        model(numbered(6, 3)).sum().backward()


# Scatter


def idle(batch: str, sizes: list[int], which: str, remedy: str) -> list[str]:
    """Return what the log has."""
    return [f"a batch of {batch} gives {sizes} rows to the {len(sizes)} devices: {which} idle. Use {remedy}."]


@both
@pytest.mark.parametrize(
    ("n", "shares", "rows", "messages"),
    [
        (
            4,
            "chunk",
            (2, 2),
            idle("2 rows", [1, 1, 0, 0], "2 of them (sim:2, sim:3) stay", "batches of at least 4 rows"),
        ),
        (4, "chunk", (9,), idle("9 rows", [3, 3, 3, 0], "1 of them (sim:3) stays", 'shares="even"')),
        (2, "chunk", (1,), idle("1 row", [1, 0], "1 of them (sim:1) stays", "batches of at least 2 rows")),
        (4, "chunk", (8, 8, 1), []),  # a short last batch
        (3, [1, 0, 1], (8,), []),
        (3, "chunk", (0,), []),
        (3, "even", (3,), []),
    ],
)
def test_devices_without_rows_are_logged_once(sim, caplog, wrap, n, shares, rows, messages):
    """S0, S2: full batches that leave a device idle that should have rows, with what would use it."""
    model = wrap(Reporter().to("sim:0"), list(range(n)), shares=shares)
    for number in rows:
        model(torch.ones(number, 3))
    assert caplog.messages == messages


def test_a_wrapper_inside_a_replica_does_not_log_its_idle_devices(caplog):
    """S0, A10: its batch is a shard, and its replicas run one after the other: no other batch size would help."""
    model = nn.Sequential(DataParallel(mlp(), ["cpu"] * 4))
    DataParallel(model, ["cpu"] * 2)(numbered(4, 3))
    assert caplog.messages == []


@both
def test_a_module_with_buffers_whose_first_share_is_0(sim, wrap):
    """S2 with R5: the first replica that runs is the one whose buffers persist."""
    model = wrap(nn.BatchNorm1d(3).to("sim:0"), [0, 1], shares=[0, 1])
    plain = nn.BatchNorm1d(3)
    x = torch.arange(12.0).reshape(4, 3)
    torch.testing.assert_close(model(x).cpu(), plain(x))
    torch.testing.assert_close(model.module.running_mean.cpu(), plain.running_mean)
    assert model.module.running_mean.device == sim[0]


@both
@pytest.mark.parametrize("inputs", [(), ((),), ([],), ({},), (None,), ("text", 3)], ids=repr)
def test_inputs_without_rows_are_one_call_on_the_first_device(sim, wrap, inputs):
    """S8."""
    seen = []

    def constant(module, *args, **kwargs):
        seen.append((module.weight.device, args, kwargs))
        return module.weight * 2

    model = wrap(Calls(constant, weight=nn.Parameter(torch.ones(2))).to("sim:1"), [1, 2, 3])
    model(*inputs).sum().backward()
    model(*inputs, flag=True)
    assert seen == [(sim[1], inputs, {}), (sim[1], inputs, {"flag": True})]
    assert model.module.weight.grad.tolist() == [2, 2]


# Gather


@both
def test_outputs_are_in_the_order_of_the_inputs(sim, wrap):
    """G1: whichever replica is ready first."""
    first_may_go = threading.Event()

    def last_first(x):
        if x[0].item() == 0:
            assert first_may_go.wait(60)
        else:
            first_may_go.set()
        return x

    model = wrap(Fn(last_first).to("sim:0"), [0, 1], output_device=1)
    output = model(torch.arange(6.0))
    assert output.tolist() == [0, 1, 2, 3, 4, 5]
    assert output.device == sim[1]


@both
def test_0_dim_outputs_become_a_vector(wrap):
    """G2, G4: one entry a replica; its mean trains as in torch. Warned about once without gradients and once with."""
    model = wrap(nn.Sequential(mlp(), Fn(lambda y: y.square().mean())), ["cpu"] * 2)
    plain = copy.deepcopy(model.module)
    x = numbered(6, 3)
    with pytest.warns(UserWarning, match="Each replica returned a scalar") as warned:
        _, losses = model(x), model(x)
    assert len(warned) == 1
    assert "grad can be implicitly created only for scalar outputs" in str(warned[0].message)
    with pytest.warns(UserWarning, match="Each replica returned a scalar"), torch.no_grad():
        model(x)
    assert losses.shape == (2,)
    torch.testing.assert_close(losses.detach(), torch.stack([plain(x[:3]), plain(x[3:])]).detach())
    losses.mean().backward()
    plain(x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    with pytest.warns(UserWarning, match="output is a number in each replica"):  # it becomes a list
        assert wrap(Fn(len), ["cpu"] * 3)(torch.ones(4)) == [2, 2]


# ---- attributes of the module (A7) ---------------------------------------------------------------


class Configured(nn.Module):
    kind = "on the class"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.config = {"a": 1}
        self.temperature = 1.0

    @property
    def state(self):
        if "_state" not in self.__dict__:
            raise AttributeError("nothing has been set yet")
        return self._state

    @state.setter
    def state(self, value):
        self._state = value

    def forward(self, x):
        return self.layer(x) * self.temperature

    def __len__(self):
        return 5


@pytest.mark.parametrize("device_ids", [[], ["cpu"], ["cpu"] * 2], ids=str)
def test_attributes_that_only_the_module_has_fall_through(no_accelerators, device_ids):
    """A7: reading, assigning and deleting. Assigning asks no getter, which may fail until something has been set."""
    module = Configured()
    model = DataParallel(module, device_ids)
    assert model.config is module.config
    assert model.layer is module.layer
    assert model.kind == "on the class"
    model.temperature, model.state = 3.0, 5
    assert (module.temperature, module.state, model.state) == (3.0, 5, 5)
    assert not {"temperature", "state"} & vars(model).keys()
    torch.testing.assert_close(model(torch.ones(2, 3)), module(torch.ones(2, 3)))
    model.layer = nn.Identity()
    assert module.layer is model.layer
    assert "layer" not in model._modules
    del model.config
    assert not hasattr(module, "config")


def test_what_the_wrapper_has_itself_stays_its_own():
    """A7: of an unfinished one, as while unpickling, there is nothing, and no recursion."""
    with pytest.raises(AttributeError):
        _ = DataParallel.__new__(DataParallel).anything
    module = Configured()
    module.dim = "the module's"
    model = DataParallel(module, ["cpu"] * 2)
    assert model.dim == 0
    model.dim = 0
    model.note = "new"
    model.training = False
    assert module.dim == "the module's"
    assert not hasattr(module, "note")
    assert module.training
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        _ = model.nowhere
    assert getattr(model, "nowhere", None) is None


class NamedAsTheWrapper(Configured):
    def __init__(self):
        super().__init__()
        self.map, self.timeout, self.loss = nn.Linear(3, 3), 2.0, nn.ReLU()

    def evaluate(self, state, action):
        return state + action


def test_names_of_the_module_that_the_wrapper_has_too_are_said(caplog):
    """A7: an agent's `evaluate`: the wrapper's was taken, an option's in silence."""
    model = DataParallel(NamedAsTheWrapper(), ["cpu"] * 2)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("NamedAsTheWrapper has evaluate, map, timeout, and so has DataParallel: ")
    assert message.endswith("For the module's write model.module.evaluate.")
    wrong_calls = {
        "evaluate": [lambda: model.evaluate(torch.ones(3), torch.ones(3)), lambda: model.evaluate(torch.ones(3))],
        "map": [model.map, lambda: model.map(torch.ones(3), torch.ones(3))],
        "timeout": [lambda: setattr(model, "timeout", -1.0), lambda: setattr(model, "timeout", "never")],
    }
    for name, calls in wrong_calls.items():
        for call in calls:
            with pytest.raises((TypeError, ValueError)) as raised:
                call()
            assert raised.value.__notes__[-1].endswith(f"For the module's write model.module.{name}.")
    with pytest.raises(ValueError, match="parts") as raised:
        model.parts = -1
    assert not hasattr(raised.value, "__notes__")


def test_of_other_names_nothing_is_said(caplog):
    """A7: those of any module, of a wrapper inside, of the user's own wrapper; and of the function."""

    class Own(DataParallel):
        def config(self):
            return self.module.config

    Own(Configured(), ["cpu"] * 2)
    DataParallel(DataParallel(mlp(), ["cpu"] * 2), ["cpu"] * 2)
    data_parallel(NamedAsTheWrapper(), torch.ones(4, 3), ["cpu"] * 2)
    assert caplog.records == []


def test_protocols_are_not_borrowed_from_the_module():
    """A7: a wrapper is copied and pickled as a wrapper, whatever its module defines."""

    class Own(Configured):
        def __deepcopy__(self, memo):
            return "the module's copy"

    assert not hasattr(DataParallel(Own(), ["cpu"] * 2), "__len__")
    assert type(copy.deepcopy(DataParallel(Configured(), ["cpu"] * 2))) is DataParallel
    assert copy.deepcopy(DataParallel(Own(), ["cpu"] * 2)).module == "the module's copy"


def test_a_wrapper_around_a_wrapper_keeps_its_own_settings():
    """A7: the outer wrapper's assignments in its constructor are not the inner one's."""
    inner = DataParallel(Configured(), ["cpu"] * 2, dim=0, shares="even")
    outer = DataParallel(inner, ["cpu"] * 3, shares=[1, 2, 3])
    assert (inner.shares, outer.shares) == ("even", (1.0, 2.0, 3.0))
    assert len(inner.devices) == 2
    assert outer.config is inner.module.config


def test_a_property_of_the_wrapper_that_fails_is_not_the_modules():
    """A7."""

    class Own(DataParallel):
        @property
        def config(self):
            raise AttributeError("the wrapper's own trouble")

    with pytest.raises(AttributeError, match="config"):
        _ = Own(Configured(), ["cpu"] * 2).config


class AttributesOfTheModule(DataParallel):
    """As libraries write it: what `__dict__` and the registries lack is the module's."""

    def __getattr__(self, name):
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(self.module, name)


def test_a_subclass_that_replaces_getattr_keeps_torchs_attributes():
    """A9, A7: they were not in `__dict__`, so they were asked of the module."""
    model = AttributesOfTheModule(nn.Linear(3, 2), ["cpu"] * 2, dim=0)
    for wrapper in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert wrapper.device_ids == [torch.device("cpu")] * 2
        assert (wrapper.output_device, wrapper.dim) == (torch.device("cpu"), 0)
        assert repr(wrapper).startswith("AttributesOfTheModule(\n  devices=[cpu, cpu], shares=")
        assert wrapper.in_features == 3
        assert wrapper(torch.ones(4, 3)).shape == (4, 2)
        wrapper.dim = 1
        assert vars(wrapper)["dim"] == wrapper._options.dim == 1


@pytest.mark.parametrize("wrapped", [["cpu"] * 2, ["cpu"], []])
def test_what_a_wrapper_cannot_do_without_is_an_error_at_once(wrapped):
    """A13"""
    model = DataParallel(nn.Linear(3, 2), wrapped)
    with pytest.raises(TypeError, match=r"module: expected .* got None"):
        model.module = None
    with pytest.raises(AttributeError, match="cannot run"):
        del model.module
    with pytest.raises(ValueError, match="at least one of them above 0"):
        model.shares = [0] * max(1, len(wrapped))
    assert model(torch.ones(4, 3)).shape == (4, 2)


class Subclass(DataParallel):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)


def assigned(model):
    model.output_device = -1


@pytest.mark.parametrize(
    "act",
    [
        lambda: DataParallel(nn.Linear(3, 2), ["cpu"] * 2, output_device=-1),
        lambda: Subclass(nn.Linear(3, 2), ["cpu"] * 2, output_device=-1),
        lambda: assigned(DataParallel(nn.Linear(3, 2), ["cpu"] * 2)),
        lambda: data_parallel(nn.Linear(3, 2), torch.ones(4, 3), ["cpu"] * 2, -1),
        lambda: gather([torch.ones(1), torch.ones(1)], -1),
        lambda: verify(nn.Linear(3, 2), torch.ones(4, 3), device_ids=["cpu"] * 2, output_device=-1, show=False),
        lambda: DataParallel(nn.LSTM(3, 2), ["cpu"] * 2),
    ],
)
def test_a_warning_points_at_the_callers_line(act):
    """A6, G6: it was a line of unisono's."""
    with pytest.warns((UserWarning, FutureWarning)) as seen:
        act()
    assert {each.filename for each in seen} == {__file__}
