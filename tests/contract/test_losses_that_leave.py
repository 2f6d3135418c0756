"""Losses on tensors that leave forward by another way than `return`, and backwards inside forward.

A list, a hook or an object of the caller's keeps what replicas have computed, such as an auxiliary loss of a layer.
All that is kept is a sum over rows, so the sum over the replicas is what the plain module keeps, and the gradients are
the plain module's, whichever losses are differentiated, together or one after the other.
"""

import contextlib
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from helpers.comparisons import assert_alike, assert_same_gradients, twins
from helpers.contract import DEVICES, ON_CPU, Wrap, at_one_place, at_the_same_time
from helpers.garbage import wait_for_workers
from helpers.in_time import WAIT_S
from helpers.losses import loss_of
from helpers.modules import Calls
from unisono.runtime import devices

# On an accelerator, two threads go through a replica's graph for the output and for what is kept: neither may free it.
KEEP = {} if ON_CPU else {"retain_graph": True}
# Forward reads `.grad` of a replica's parameters, which are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Call = Callable[..., Any]
Steps = Callable[[Call, Any], Any]


class Store:
    """An object of a class that unisono does not know; every replica gets this one."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []


class Keeps(nn.Module):
    """Keeps losses of four kinds; each replica keeps that of its rows.

    "inside": of what the output is computed from, "beside": of a layer that nothing else uses, "first" and "last": of
    the row that `marks` calls so, which a single replica has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.foot, self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.side = nn.Linear(5, 3)
        self.kept: dict[str, list[torch.Tensor]] = {"inside": [], "beside": [], "first": [], "last": []}

    def forward(self, x: torch.Tensor, marks: torch.Tensor, store: Store | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.body(torch.tanh(self.foot(x))))
        self.kept["inside"].append(hidden.square().sum())
        self.kept["beside"].append(self.side(x).pow(3).sum())
        for mark, name in enumerate(("first", "last"), 1):
            if (marks == mark).any():
                self.kept[name].append(hidden[marks == mark].pow(3).sum())
        if store is not None:
            store.losses.append(hidden.pow(4).sum())
        return self.head(hidden)


def total(losses: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the sum of what replicas on any devices have kept."""
    return sum((loss.to(x.device) for loss in losses), torch.zeros((), device=x.device))


def losses_of(call: Call, root: Any, rows: int = 7, **kwargs: Any) -> Any:
    """Run a forward; return its input, a loss of its output, and what has been kept in it."""
    for losses in root.kept.values():
        losses.clear()
    x, marks = torch.randn(rows, 5, requires_grad=True), torch.zeros(rows, dtype=torch.int64)
    marks[0], marks[-1] = 1, 2
    output = loss_of(call(x, marks, **kwargs))
    return SimpleNamespace(x=x, output=output, **{name: total(losses, x) for name, losses in root.kept.items()})


# ---- which losses, in which order ----------------------------------------------------------------


def alone(call: Call, root: Any) -> Any:
    now = losses_of(call, root)
    (now.inside + now.beside).backward()
    return now.x.grad


def together(call: Call, root: Any) -> Any:
    now = losses_of(call, root)
    (now.output + now.inside + now.beside).backward(**KEEP)
    return now.x.grad


def multiplied(call: Call, root: Any) -> Any:
    now = losses_of(call, root)
    (now.output * (now.inside + now.beside)).backward(**KEEP)
    return now.x.grad


def of_one_replica(call: Call, root: Any) -> Any:
    """That of the caller's thread, and another one; alone, and with the output, which all replicas have."""
    found = []
    for name in ("first", "last"):
        now, both = losses_of(call, root), losses_of(call, root)
        getattr(now, name).backward()
        (both.output + getattr(both, name)).backward(**KEEP)
        found += [now.x.grad, both.x.grad]
    return found


def two_forwards(call: Call, root: Any) -> Any:
    """Of different sizes, before one backward of all losses, and before one of the kept ones."""
    for with_output in (True, False):
        both = [losses_of(call, root, rows) for rows in (7, 4)]
        sum(now.inside + now.beside * (now.output if with_output else 1) for now in both).backward(**KEEP)
    return [now.x.grad for now in both]


# ---- how gradients are asked for -----------------------------------------------------------------


def by_grad(call: Call, root: Any) -> Any:
    """None for what a loss does not use, though the output does; and nothing is accumulated."""
    now, parameters = losses_of(call, root), list(root.parameters())
    found = [torch.autograd.grad(now.inside, [now.x, *parameters], allow_unused=True, retain_graph=True)]
    with pytest.raises(RuntimeError, match=r"unused|not have been used"):
        torch.autograd.grad(now.inside, parameters, retain_graph=True)
    found += [torch.autograd.grad(now.first + now.output, parameters[:4], retain_graph=True)]
    found += [torch.autograd.grad(now.beside + now.output, [root.head.bias, now.x, root.side.weight])]
    assert all(tensor.grad is None for tensor in (now.x, *parameters))
    return found


def penalty(call: Call, root: Any) -> Any:
    """`create_graph=True`: a loss of the gradients of what is kept, and one of those of all losses."""
    found = []
    for with_output in (False, True):
        now = losses_of(call, root)
        kept = now.inside + now.beside * (now.output if with_output else 1)
        of = [now.x, root.body.weight, root.side.bias, root.foot.weight]
        slopes = torch.autograd.grad(kept, of, create_graph=True)
        (now.output + sum(slope.square().sum() for slope in slopes)).backward(**KEEP)
        found += [now.x.grad, *slopes]
    return found


def clamping(call: Call, root: Any) -> Any:
    """A tensor hook of a parameter sees the whole gradient, once a backward: half of it would be clamped elsewhere."""
    calls: list[int] = []
    for parameter in root.parameters():
        limit = 0.5 + torch.rand(())
        parameter.register_hook(lambda grad, limit=limit: (calls.append(1), grad.clamp(-limit, limit))[1])
    found = [steps(call, root) for steps in (together, alone, multiplied, of_one_replica, two_forwards)]
    return [torch.tensor(len(calls)), found]


def stepping(call: Call, root: Any) -> Any:
    """An optimizer in backward: it is called once, when the gradient is complete."""
    calls: list[int] = []

    def step(parameter: torch.Tensor) -> None:
        calls.append(1)
        with torch.no_grad():
            parameter -= 1e-3 * parameter.grad.sign() + 1e-3 * parameter.grad.clamp(-1, 1)
        parameter.grad = None

    for parameter in root.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return [[steps(call, root) for steps in (together, alone, multiplied)], torch.tensor(len(calls))]


STEPS: dict[str, Steps] = {
    "of one replica": of_one_replica,
    "autograd.grad": by_grad,
    "gradient penalty": penalty,
    "tensor hooks": clamping,
    "optimizer in backward": stepping,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_plain_modules(wrap: Wrap, name: str) -> None:
    """N1, N2, N3, N7, R9: returned and accumulated gradients, and the state."""
    assert_alike(wrap, Keeps(), STEPS[name], 3, 1e-10)


@pytest.mark.parametrize("way", ["attribute", "hook", "object"])
@pytest.mark.parametrize("rows", [7, 1])
@pytest.mark.filterwarnings("ignore:a hook stores")
@pytest.mark.filterwarnings("ignore:forward of")
def test_ways_out_of_forward(wrap: Wrap, way: str, rows: int) -> None:
    """N1, S4, R6, R9: it had no gradient, and said nothing. With one row there is one replica."""

    def steps(call: Call, root: Any) -> Any:
        found, parameters = [], list(root.parameters())
        hooked: list[torch.Tensor] = []
        hook = root.body.register_forward_hook(lambda module, inputs, output: hooked.append(output.square().sum()))
        for number in range(3):
            hooked.clear()
            store = Store()
            now = losses_of(call, root, rows, store=store if way == "object" else None)
            loss = total({"attribute": root.kept["inside"], "hook": hooked, "object": store.losses}[way], now.x)
            if number == 2:
                now.output.backward(retain_graph=True)
            (loss + now.output if number == 1 else loss).backward(**KEEP)
            found += [now.x.grad, *(p.grad for p in parameters)]
            root.zero_grad()
        hook.remove()
        return found

    assert_alike(wrap, Keeps(), steps, 3, 1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_losses_in_any_order(wrap: Wrap, seed: int) -> None:
    """N1, N2: forwards of several sizes, and backwards of some of their losses, or `torch.autograd.grad`, at random."""

    def steps(call: Call, root: Any) -> Any:
        choose = random.Random(seed)
        inputs: list[torch.Tensor] = []
        losses: list[torch.Tensor] = []
        found: list[Any] = []
        for _ in range(6):
            if not losses or choose.random() < 0.4:
                now = losses_of(call, root, choose.choice([7, 4, 2]))
                inputs.append(now.x)
                losses += [now.output, now.output, now.inside, now.beside, now.first, now.last]
            some = choose.sample(losses, choose.randint(1, 4))
            loss = torch.stack(some).sum() + (some[0] * some[-1] if choose.random() < 0.3 else 0)
            if choose.random() < 0.3:
                of = [*inputs, *choose.sample(list(root.parameters()), 3)]
                found += torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True)
            else:
                loss.backward(retain_graph=True)
        return [found, [x.grad for x in inputs]]

    assert_alike(wrap, Keeps(), steps, 3, 1e-10)


def test_losses_of_earlier_steps(wrap: Wrap) -> None:
    """N1: the backward of the output has freed what it used; torch's error where a loss needs that too. What has a copy
    of the parameters on another device has new values in it by now: that is torch's error too."""
    plain, model = twins(wrap, Keeps(), 3)
    steps: dict[str, list[Any]] = {"plain": [], "model": []}
    for name, call, root in (("plain", plain, plain), ("model", model, model.module)):
        torch.manual_seed(1)
        for _ in range(3):
            steps[name].append(losses_of(call, root))
            steps[name][-1].output.backward()
    for now in steps["plain"] + steps["model"]:
        with pytest.raises(RuntimeError, match=r"backward through .* a second time|modified by an inplace"):
            now.inside.backward()
    for now in steps["plain"]:
        now.beside.backward()
    has_copies = len(set(DEVICES)) > 1 or devices.has_separate_memory()
    # In the first step, replicas that share memory in later ones have copies of their own, which stay as they were.
    shares = not devices.has_separate_memory() and model.devices.count(model.devices[0]) > 1
    for number, now in enumerate(steps["model"][: -1 if has_copies else None]):
        fails = has_copies and not (shares and number == 0)
        with pytest.raises(RuntimeError, match="modified by an inplace") if fails else contextlib.nullcontext():
            now.beside.backward()
    if not has_copies:
        assert_same_gradients(model.module, plain, 1e-10)


class Box:
    """An object of a class that unisono does not know, which a module has as an attribute."""

    def __init__(self) -> None:
        self.kept: dict[Any, torch.Tensor] = {}

    def __call__(self) -> dict[Any, torch.Tensor]:
        return self.kept


REMEMBERED: dict[Any, torch.Tensor] = {}


def remembered() -> dict[Any, torch.Tensor]:
    return REMEMBERED


class Remembers(nn.Module):
    """Uses what the forward before has kept: of each row, and of the parameters only.

    In what `get` returns, or in an object that is an input.
    """

    def __init__(self, get: Callable[[], dict[Any, torch.Tensor]] = remembered) -> None:
        super().__init__()
        self.layer, self.shift, self.get = nn.Linear(5, 6), nn.Parameter(torch.randn(6)), get

    def forward(self, x: torch.Tensor, number: int, store: Box | None = None) -> torch.Tensor:
        kept = self.get() if store is None else store.kept
        hidden = torch.tanh(self.layer(x))
        rows = x[:, 0].tolist()
        before = [kept[row] for row in rows if row in kept]
        kept.update(zip(rows, hidden, strict=True))
        kept[f"shift {number}"] = self.shift.tanh()  # that of any replica
        if before:
            hidden = hidden * 2 + torch.stack(before).square()
        return hidden * kept[f"shift {number - 1}"].to(x.device) if number else hidden


def remembering(call: Call, root: Any, x: torch.Tensor, num_forwards: int, store: Box | None = None) -> Any:
    """Run forwards after each other on the same rows; return their losses."""
    root.get().clear()
    return [loss_of(call(x, number, store)) for number in range(num_forwards)]


@pytest.mark.parametrize("where", ["global", "object", "input", "closure"])
@pytest.mark.parametrize("history", [False, True])
def test_a_replica_that_remembers_is_an_error(wrap: Wrap, where: str, history: bool) -> None:
    """N1: it says what to write. The gradient of the earlier forward's part was lost in silence; of a structure, too,
    whose first forward had nothing to remember. The forward before has its gradient."""
    kept: dict[Any, torch.Tensor] = {}
    get = {"object": Box(), "closure": lambda: kept}.get(where, remembered)
    model, x = wrap(Remembers(get), 2), torch.randn(6, 5, requires_grad=True)
    given = x.sin() if history else x
    for _ in range(2):
        store = Box() if where == "input" else None
        [loss] = remembering(model, model.module, given, 1, store)
        with pytest.raises(RuntimeError, match=r"[Pp]ass it to (this one|the model) as an input"):
            model(given, 1, store)
        loss.backward(retain_graph=True)
        assert x.grad is not None
    REMEMBERED.clear()


def test_a_replica_that_remembers_by_the_same_operations(wrap: Wrap) -> None:
    """N1: as in a loop over time that begins with zeros. Nothing else tells the second forward from the first."""
    store = Box()

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        row = x[0, 0].item()
        hidden = torch.tanh(net.layer(x) + net.back(store.kept.get(row, x.new_zeros(1, 6))))
        store.kept[row] = hidden.mean(0, keepdim=True)
        return hidden

    model, x = wrap(Calls(forward, layer=nn.Linear(5, 6), back=nn.Linear(6, 6))), torch.randn(6, 5)
    model(x)
    with pytest.raises(RuntimeError, match=r"[Pp]ass it to (this one|the model) as an input"):
        model(x)


class Meeting:
    """Lets two replicas that run at the same time give each other a tensor."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(2), list[torch.Tensor]()

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given.append(tensor)
        self.barrier.wait(WAIT_S)
        first, second = self.given
        return (second if first is tensor else first).to(tensor.device)


@at_the_same_time
@pytest.mark.parametrize("loss", ["output", "kept", "both"])
def test_replicas_that_exchange_tensors(wrap: Wrap, loss: str) -> None:
    """N1: each adds the mean of the other's activations, which links their graphs."""

    def forward(net: Any, x: torch.Tensor, meeting: Meeting | None) -> torch.Tensor:
        hidden = torch.tanh(net.body(x))
        if meeting is None:  # one device has the rows of both
            first, second = hidden.chunk(2)
            others = torch.cat([second.mean(0).expand_as(first), first.mean(0).expand_as(second)])
        else:
            others = meeting.swap(hidden.mean(0))
        hidden = torch.tanh(net.middle(hidden + others))
        net.kept.append(hidden.square().sum())
        return net.head(hidden)

    def steps(call: Call, root: Any) -> Any:
        found = []
        for _ in range(3):
            root.kept.clear()
            x = torch.randn(6, 5, requires_grad=True)
            output = loss_of(call(x, None if call is root else Meeting()))
            kept = total(root.kept, x)
            {"output": output, "kept": kept, "both": output + kept}[loss].backward(**KEEP)
            found.append(x.grad)
        return found

    layers = {"body": nn.Linear(5, 6), "middle": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    assert_alike(wrap, Calls(forward, kept=[], **layers), steps, 2, 1e-10)


@pytest.mark.parametrize("with_output", [False, True])
def test_batch_norm_over_all_rows(wrap: Wrap, with_output: bool) -> None:
    """N1, N5: the replicas exchange statistics in backward, which here does not begin at their outputs. It is an error
    that names the option, and no wait without an end. With the output it may be right on accelerators."""
    plain = Keeps()
    plain.body = nn.BatchNorm1d(6)

    def step(call: Call, root: Any) -> Any:
        now = losses_of(call, root)
        (now.inside + (now.output if with_output else 0)).backward(**KEEP)
        return now.x.grad

    try:
        assert_alike(wrap, plain, step, 2, 1e-10, sync_batch_norm=True)
    except RuntimeError as error:
        assert "sync_batch_norm=True" in str(error)  # noqa: PT017 - on accelerators it depends on time
    else:
        assert with_output
        assert not ON_CPU


def test_an_output_and_what_is_kept_in_a_backward_that_frees_the_graph(wrap: Wrap) -> None:
    """N1: on the CPU it is right. On accelerators it depends on time, and the error says what to write."""
    plain, model = twins(wrap, Keeps(), 3)
    torch.manual_seed(1)
    expected = losses_of(plain, plain)
    (expected.output + expected.inside).backward()
    for _ in range(20):
        model.zero_grad()
        torch.manual_seed(1)
        found = losses_of(model, model.module)
        try:
            (found.output + found.inside).backward()
        except RuntimeError as error:
            if ON_CPU or "retain_graph=True" not in "".join(error.__notes__):
                raise
        else:
            assert_same_gradients(model.module, plain, 1e-10)


@pytest.mark.parametrize("kept_last", [False, True])
def test_what_is_kept_of_the_replica_whose_graph_is_the_longest(wrap: Wrap, kept_last: bool) -> None:
    """N1: its nodes came before the boundary's, as torch numbers them in each thread, and freed the graph."""
    kept: list[torch.Tensor] = []

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = net.body(x)
        for _ in range(int(x[-1, 0])):
            hidden = hidden.clone()
        kept.append(hidden.exp().sum())
        return net.head(hidden).exp()

    def step(call: Call, root: Any) -> None:
        kept.clear()
        output = call(torch.arange(6.0)[:, None].expand(6, 3) * 40)
        losses = [output.sum, lambda: torch.stack([each.to(output) for each in kept]).sum()]
        loss = torch.stack([make() for make in (losses if kept_last else losses[::-1])]).sum()
        loss.backward(**KEEP)

    assert_alike(wrap, Calls(forward, body=nn.Linear(3, 3), head=nn.Linear(3, 3)), step, 2, 1e-10)


def test_backward_hooks_of_modules_and_what_is_kept(wrap: Wrap) -> None:
    """N1, R9: torch keeps a hook's state in the hook: two backwards at the same time had other numbers in silence."""
    plain, model = twins(wrap, Keeps(), 3)
    losses = []
    for call, root in ((plain, plain), (model, model.module)):
        root.body.register_full_backward_hook(lambda module, grad_inputs, grad_outputs: (grad_inputs[0] * 2,))
        torch.manual_seed(1)
        losses.append(losses_of(call, root))
    expected, found = losses
    (expected.output + expected.inside).backward()
    if not ON_CPU:
        with pytest.raises(RuntimeError, match="has backward hooks"):
            (found.output + found.inside).backward(retain_graph=True)
        return
    (found.output + found.inside).backward()
    assert_same_gradients(model.module, plain, 1e-10)


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("how", ["alone", "with the output", "dropped"])
def test_activations_are_freed(wrap: Wrap, how: str) -> None:
    """N10: with the backward that uses what was kept, though the loss is still referred to; or with the last
    reference."""
    if how == "with the output" and not ON_CPU:
        pytest.skip("on accelerators such a backward has to keep the graph")

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(net.body(x))
        net.seen.append(weakref.ref(hidden))
        net.kept.append(hidden.square().sum())
        return net.head(hidden).tanh()

    model = wrap(Calls(forward, body=nn.Linear(5, 6), head=nn.Linear(6, 3), seen=[], kept=[]), 3)
    module: Any = model.module
    for _ in range(3):
        module.kept.clear()
        module.seen.clear()
        x = torch.randn(7, 5)
        output = model(x).sum()
        loss = total(module.kept, x)
        assert all(reference() is not None for reference in module.seen)
        if how == "dropped":
            module.kept.clear()
            del output, loss
        elif how == "alone":
            del output
            loss.backward()
        else:
            loss = loss + output
            loss.backward()
        wait_for_workers()
        assert all(reference() is None for reference in module.seen)


# ---- a backward inside forward -------------------------------------------------------------------


def learns(net: Any, x: torch.Tensor, way: str = "") -> torch.Tensor:
    """Differentiate in forward. Afterwards `.grad` is the gradient of this replica's rows."""
    parameters = list(net.parameters())
    loss = net.head(torch.tanh(net.body(x))).square().sum()
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    if way != "accumulates":
        assert all(p.grad is None for p in parameters)
        loss.backward(retain_graph=True)
        torch.testing.assert_close([p.grad for p in parameters], list(expected), rtol=1e-10, atol=1e-10)
    if way in ("twice", "accumulates"):
        (2 * loss).backward(retain_graph=True)
    if way == "keeps":
        net.kept.append(net.head(torch.tanh(net.body(x))).pow(3).sum())
    return loss if "returns it" in way else loss.detach()


WAYS_INSIDE = ["detached", "returns it", "twice", "accumulates", "keeps", "a history", "a history, returns it"]


@pytest.mark.parametrize("way", WAYS_INSIDE)
def test_a_backward_inside_forward(wrap: Wrap, way: str) -> None:
    """N1: the live parameters have the sum when forward has ended. On two devices it was an error of torch's."""

    def steps(call: Call, root: Any) -> Any:
        found = []
        for _ in range(3):
            if way != "accumulates":
                root.zero_grad()
            root.kept.clear()
            x = torch.randn(7, 5, requires_grad=True)
            loss = call(x.square() if "a history" in way else x, way)
            found += [loss.detach(), x.grad, *(p.grad.clone() for p in root.parameters())]
            if "returns it" in way:
                loss.backward()
            if way == "keeps":
                total(root.kept, x).backward()
            found += [x.grad, *(p.grad.clone() for p in root.parameters())]
        return [None if value is None else value.clone() for value in found]

    def forward(net: Any, x: torch.Tensor, way: str) -> torch.Tensor:
        with torch.enable_grad():
            return learns(net, x, way)

    layers = {"body": nn.Linear(5, 6), "head": nn.Linear(6, 3)}
    assert_alike(wrap, Calls(forward, kept=[], **layers), steps, 3, 1e-10, scalars="sum")


def test_hooks_of_parameters_and_a_backward_inside_forward(wrap: Wrap) -> None:
    """N1, R9: the hooks see the sum over the replicas, once; so do those of an input."""

    def steps(call: Call, root: Any) -> Any:
        calls: list[str] = []
        weight, x = root.body.weight, torch.randn(7, 5, requires_grad=True)
        x.register_hook(lambda grad: calls.append("input"))
        weight.register_hook(lambda grad: (calls.append("tensor"), grad.clamp(-0.5, 0.5))[1])
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
        call(x)
        calls.remove("input")
        assert calls == ["tensor", "accumulated"]
        return x.grad

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        loss = net.head(torch.tanh(net.body(x))).square().sum()
        loss.backward()
        return loss.detach()

    layers = {"body": nn.Linear(5, 6), "head": nn.Linear(6, 3)}
    assert_alike(wrap, Calls(forward, **layers), steps, 3, 1e-10, scalars="sum")


# ---- what is not asked for -----------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Multiplies, and notes of which factors a gradient was asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, asked: list[tuple[bool, bool]]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.asked = asked
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.asked.append(ctx.needs_input_grad[:2])
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        return grad * weight if of_x else None, (grad * x).sum(0) if of_weight else None, None


ASKING: dict[str, Callable[[torch.Tensor, Any, torch.Tensor], Any]] = {
    "the input": lambda loss, root, x: torch.autograd.grad(loss, x, retain_graph=True),
    "a parameter": lambda loss, root, x: torch.autograd.grad(loss, root.weight, retain_graph=True),
    "backward for the input": lambda loss, root, x: loss.backward(inputs=[x], retain_graph=True),
    "backward for a parameter": lambda loss, root, x: loss.backward(inputs=[root.weight], retain_graph=True),
    "create_graph": lambda loss, root, x: torch.autograd.grad(loss, x, create_graph=True),
    "everything": lambda loss, root, x: loss.backward(retain_graph=True),
}


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("loss", ["output", "kept", "both"])
def test_only_what_is_asked_for_is_computed(wrap: Wrap, asking: str, loss: str) -> None:
    """N1, N2: a gradient that the caller does not ask for is not asked of the module's operations."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = Product.apply(x, net.weight, net.asked) + net.bias
        net.kept.append(y.pow(3).sum())
        return y

    def steps(call: Call, root: Any) -> Any:
        root.asked.clear()
        root.kept.clear()
        x = torch.randn(7, 5, requires_grad=True)
        output = call(x).square().sum()
        kept = total(root.kept, x)
        got = ASKING[asking]({"output": output, "kept": kept, "both": output + kept}[loss], root, x)
        return [got, x.grad]

    parameters = {"weight": nn.Parameter(torch.randn(5)), "bias": nn.Parameter(torch.randn(5))}
    plain = Calls(forward, asked=[], kept=[], **parameters)
    model = assert_alike(wrap, plain, steps, 3, 1e-10)
    assert set(model.module.asked) == set(plain.asked)


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, spectral_norm], ids=["parametrization", "hook"])
@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True)], ids=str)
def test_spectral_norm_in_two_forwards_before_a_backward(wrap: Wrap, norm: Any, modes: tuple[bool, bool]) -> None:
    """R10, N1: a forward in training writes buffers that another one has used; torch's error only where the plain
    module has it."""

    def steps(call: Call, root: Any) -> Any:
        losses = []
        for step in range(3):
            root.zero_grad()
            losses = []
            for mode in modes if step else (True,):  # as before a training: the buffers have been written
                root.train(mode)
                losses.append(loss_of(call(torch.randn(7, 5))))
            try:
                sum(losses).backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017 - compared below
                root.zero_grad()  # of what the plain module has computed before the error
                return [torch.tensor(-1.0)]
        return losses

    assert_alike(wrap, nn.Sequential(norm(nn.Linear(5, 4)), nn.Tanh(), norm(nn.Linear(4, 3))), steps, 3, 1e-10)


@at_one_place
def test_what_is_saved_inside_forward(wrap: Wrap) -> None:
    """R15: a state_dict is; a module is an error that says what to save."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        saved.append(pickle.dumps(net.layer.state_dict()))
        with pytest.raises(TypeError, match="save its state_dict"):
            pickle.dumps(net.layer)
        return net.layer(x)

    saved: list[bytes] = []
    model = wrap(Calls(forward, layer=nn.Linear(3, 3)))
    model(torch.randn(4, 3)).sum().backward()
    assert torch.equal(pickle.loads(saved[0])["weight"].to(model.module.layer.weight.device), model.module.layer.weight)
