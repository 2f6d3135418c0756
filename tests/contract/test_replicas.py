"""Replicas are as the module is at each call, and gradients arrive however a module refers to its own layers."""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from helpers.comparisons import assert_alike, assert_all_same, assert_same, assert_same_gradients, one_step, twins
from helpers.contract import Wrap, in_one_memory, in_turn
from helpers.failing import FailureError
from helpers.losses import fresh, loss_of
from helpers.modules import Calls, Composed, Fn, mlp


def count(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    model.rows += len(x)
    model.latest = len(x)
    model.log.append(float(x[0, 0]))
    return model.linear(x) * 0 + model.calls


@pytest.mark.filterwarnings("ignore:forward of")
def test_what_forward_writes(wrap: Wrap) -> None:
    """R5, R6: the first replica's writes into buffers persist; the other ones' are lost, and every forward starts every
    replica from the live buffers. Assigned attributes are lost, and lists persist."""
    buffers = {"calls": nn.Buffer(torch.zeros(1)), "rows": nn.Buffer(torch.zeros(1), persistent=False)}
    model = wrap(Calls(count, linear=nn.Linear(2, 2), log=[], latest=0, **buffers), 3)
    calls, rows = model.module.calls, model.module.rows
    for step in range(1, 4):
        assert model(torch.arange(14.0).view(7, 2)).tolist() == [[step] * 2] * 7  # the same in every replica
        assert model.module.calls is calls
        assert (calls.item(), rows.item()) == (step, 3 * step)  # the first replica's rows
        assert model.module.latest == 0
        assert sorted(model.module.log) == sorted([0.0, 6.0, 12.0] * step)
    calls.fill_(10)
    assert model(torch.zeros(7, 2))[-1, 0].item() == 11


class ReassignsBuffers(nn.Module):
    """Its buffers depend on no row, so those of the first replica are the plain module's."""

    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("late", None)
        self.register_buffer("early", torch.ones(1), persistent=False)
        self.register_buffer("shared", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.mean.sum()
        self.mean = torch.cat([0.9 * self.mean, self.mean[:1]])
        self.late, self.early = self.mean if self.late is None else None, None
        self.register_buffer("extra", self.mean + 1, persistent=len(self.mean) % 2 == 0)
        if len(self.mean) == 4:
            del self.extra
        if x.max() > 50:
            raise FailureError(1, "after it has reassigned buffers")
        return y


def reassigns_buffers() -> nn.Module:
    """Return a model of which a part is used twice, and another one shares a buffer with it."""
    shared = torch.zeros(1)
    twice = ReassignsBuffers(shared)
    return nn.Sequential(twice, nn.Sequential(nn.Tanh(), twice, nn.Tanh(), ReassignsBuffers(shared)))


def buffers_of(model: nn.Module) -> list[dict[str, torch.Tensor | None]]:
    return [dict(module._buffers) for module in model.modules()]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("rescue", [False, True])
def test_reassigned_buffers_persist(wrap: Wrap, grad: bool, rescue: bool) -> None:
    """R5, A9: `self.mean = 0.9 * self.mean` was lost. A buffer may also become None, or a tensor, be registered or
    deleted. The old tensor is not written into, and a buffer that forward does not reassign is the same object."""
    plain, model = twins(wrap, reassigns_buffers(), 3, rescue=rescue)
    composed = Composed(copy.deepcopy(plain), in_turn(3))
    x, shared, root = torch.randn(7, 3), model.module[0].shared, model.module
    for _ in range(3):
        old = root[0].mean
        value = old.clone()
        for module in (plain, model, composed):
            module.zero_grad()
            with torch.set_grad_enabled(grad):
                output = module(x)
            if grad:
                loss_of(output).backward()
        for replicated in (root, composed.module):
            torch.testing.assert_close(buffers_of(replicated), buffers_of(plain))
            assert replicated.state_dict().keys() == plain.state_dict().keys()
            assert_same_gradients(replicated, plain)
        assert root[0].shared is root[1][3].shared is shared
        assert torch.equal(old, value)


def test_reassigned_buffers_of_what_changes_no_buffer(wrap: Wrap) -> None:
    """N11, I4: a forward of which a replica fails, `map`, and the plain composition of a step that fails."""
    model = wrap(reassigns_buffers(), 3)
    before, x = buffers_of(model.module), torch.ones(6, 3)
    list(model.map([x, x]))
    x[5] = 100
    composed = Composed(model.module, in_turn(3))
    for call in (model, composed):
        with pytest.raises(FailureError):
            call(x)
    ids = [[(name, id(buffer)) for name, buffer in of_module.items()] for of_module in before]
    after = [[(name, id(buffer)) for name, buffer in of_module.items()] for of_module in buffers_of(model.module)]
    assert after == ids


def test_a_reassigned_buffer_with_a_history(wrap: Wrap) -> None:
    """R5, N1: it has the plain module's history, through all replicas' graphs: a later loss may use it, and it may be
    detached after the backward that frees its graph."""

    def forward(net: nn.Module, x: torch.Tensor, use: bool, detach: bool) -> torch.Tensor:
        state = net.state.detach() if detach else net.state
        y = net.linear(x) * state if use else net.linear(x)
        net.state = state * 0.5 + net.cell.weight.sum(0)
        return y

    def steps(call: Callable[..., torch.Tensor], root: nn.Module) -> torch.Tensor:
        for i, (use, detach) in enumerate([(False, False), (False, False), (True, False), (True, True), (True, True)]):
            loss_of(call(torch.randn(5, 3), use, detach)).backward(retain_graph=i < 3)
        assert root.state.requires_grad
        return root.state

    layers = {"linear": nn.Linear(3, 2), "cell": nn.Linear(2, 2)}
    assert_alike(wrap, Calls(forward, state=nn.Buffer(torch.ones(2)), **layers), steps, 3)


@pytest.mark.filterwarnings("ignore:a hook stores")
def test_hooks_run_once_a_replica_and_those_of_parameters_and_the_wrapper_once(wrap: Wrap) -> None:
    """R9: parameter hooks see the summed gradient, and may change it. Hooks of the wrapper see the whole batch."""
    plain, model = twins(wrap, mlp(), 3)
    x = torch.randn(8, 5)
    loss_of(plain(x)).backward()
    events: list[str] = []
    grads: list[torch.Tensor] = []
    layer = model.module[0]
    layer.register_forward_pre_hook(lambda module, args: events.append(f"pre {len(args[0])}"))
    layer.register_forward_hook(lambda module, args, output: events.append(f"post {len(output)}"))
    layer.register_full_backward_hook(lambda module, into, out: events.append(f"backward {len(out[0])}"))
    layer.weight.register_hook(lambda grad: grads.append(grad.clone()) or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: events.append("accumulated"))
    whole: list[int] = []
    model.register_forward_hook(lambda module, args, output: whole.append(len(output)))
    model.register_full_backward_hook(lambda module, into, out: whole.append(len(out[0])))
    loss_of(model(fresh(x))).backward()
    assert whole == [8, 8]
    once_a_replica = [f"{what} {n}" for what in ("pre", "post", "backward") for n in (3, 3, 2)]
    assert sorted(events) == sorted([*once_a_replica, "accumulated"])
    assert events[-1] == "accumulated"
    assert len(grads) == 1
    assert_same(grads[0], plain[0].weight.grad)
    assert_same(layer.weight.grad, plain[0].weight.grad * 2)
    assert_same(model.module[2].weight.grad, plain[2].weight.grad)


def test_hooks_of_a_parameter_that_no_replica_used(wrap: Wrap) -> None:
    """R9: they are not called, and later they are; one that clamps got None: TypeError; one that steps when a gradient
    has been accumulated had none. torch's own, which wait for the gradients of several parameters, count their calls.
    """

    def forward(net: nn.Module, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        hidden = net.first(x)
        return net.second(hidden if bool(use.all()) else hidden.detach())

    plain, model = twins(wrap, Calls(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 3)), 2)
    x = torch.randn(6, 3)
    calls: list[tuple[list[bool], list[bool], list[list[bool]]]] = []
    for module, root in ((plain, plain), (model, model.module)):
        seen: list[bool] = []
        accumulated: list[bool] = []
        together: list[list[bool]] = []
        root.first.weight.register_hook(lambda grad, seen=seen: seen.append(grad is not None))
        root.first.weight.register_post_accumulate_grad_hook(
            lambda parameter, done=accumulated: done.append(parameter.grad is not None)
        )
        weights = [root.first.weight, root.second.weight]
        register_multi_grad_hook(weights, lambda grads, all=together: all.append([grad is not None for grad in grads]))
        for used in (False, True, False):
            root.zero_grad()
            loss_of(module(x, torch.full((6,), used))).backward()
            assert (root.first.weight.grad is not None) == used
        for both in ((False, True), (True, False)):  # one of two forwards uses it
            root.zero_grad()
            sum(loss_of(module(x, torch.full((6,), used))) for used in both).backward()
        calls.append((seen, accumulated, together))
    of_all = [[False, True], [True, True], [False, True], [True, True], [True, True]]
    assert calls[1] == calls[0] == ([True] * 3, [True] * 3, of_all)


def test_another_method_is_called_in_parallel(wrap: Wrap) -> None:
    """R12."""

    class Generator(Calls):
        def generate(self, x: torch.Tensor, *, steps: int) -> torch.Tensor:
            self.seen.append(len(x))
            for _ in range(steps):
                x = torch.tanh(self.layer(x))
            return x

    model, x = Generator(len, layer=nn.Linear(5, 5), seen=[]), torch.randn(7, 5, requires_grad=True)
    wrapped = wrap(model, 3)
    plain = model.generate(x, steps=3)
    model.seen.clear()
    output = wrapped.call("generate", x, steps=3)
    assert sorted(model.seen) == [1, 3, 3]
    assert_same(output, plain)
    assert_all_same(*(torch.autograd.grad(y.sum(), list(model.parameters())) for y in (output, plain)))
    with pytest.raises(AttributeError, match="Generator has no method 'generat'"):
        wrapped.call("generat", x)


# ---- what a replica cannot be given --------------------------------------------------------------


class Holder:
    """An object of a class that unisono does not know."""

    def __init__(self, held: Any) -> None:
        self.held = held


class Hidden(nn.Module):
    """In training, reaches its own layer through an object into which unisono cannot look."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.hiding_place: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = self.hiding_place
        if not self.training:
            return self.first(x)
        return (place.held if isinstance(place, Holder) else place)(self.first(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def a_module(module: Hidden) -> Holder:
    return Holder(module.layer)


# Name -> what hides the layer; and what lets a first step succeed, where there is one.
HIDING_PLACES: dict[str, tuple[Callable[[Hidden], Any], Callable[[Hidden], object] | None]] = {
    "a module": (a_module, None),
    "a bound method": (lambda module: Holder(module.run), None),
    "a cached method": (lambda module: functools.lru_cache(module.run), None),
    "frozen at first": (a_module, lambda module: module.layer.requires_grad_(False)),
    "hidden later": (a_module, lambda module: setattr(module, "hiding_place", module.run)),
    "used in training only": (a_module, lambda module: module.eval()),  # with gradients on
}


@in_one_memory
@pytest.mark.parametrize("name", HIDING_PLACES)
def test_a_live_module_behind_an_unknown_object_is_an_error(wrap: Wrap, name: str) -> None:
    """R7, R4, R8: the replica would train the live module behind our back; the error names the parameter. A forward
    that succeeded proves nothing about the next one."""
    hide, let_succeed = HIDING_PLACES[name]
    model = wrap(Hidden())
    module, x = model.module, torch.randn(7, 5)
    module.hiding_place = hide(module)
    if let_succeed is not None:
        let_succeed(module)
        loss_of(model(x)).backward()
        model.zero_grad()
        module.layer.requires_grad_(True)
        module.train()
    if name == "hidden later":
        module.hiding_place = hide(module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 'layer\.(weight|bias)' of the original module"):
            model(x)
    assert all(p.grad is None for p in model.parameters())
    module.hiding_place = module.layer  # and mended
    loss_of(model(x)).backward()
    assert module.layer.weight.grad is not None


@in_one_memory
def test_a_live_module_that_only_a_later_forward_uses_is_an_error(wrap: Wrap) -> None:
    """R7: nothing in the module tells it. The first forward was taken for all, and the gradient was lost in silence."""
    switch = SimpleNamespace(live=None)

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.layer(x)
        return h if switch.live is None else switch.live.layer(h)

    model, x = wrap(Calls(forward, layer=nn.Linear(5, 5))), torch.randn(7, 5)
    model(x).sum().backward()
    switch.live = model.module
    with pytest.raises(RuntimeError, match=r"parameter 'layer\.(weight|bias)' of the original module"):
        model(x)
    switch.live = None
    model(x).sum().backward()


def test_a_gradient_that_forward_switches_on_is_an_error(wrap: Wrap) -> None:
    """R7, R4: of a layer that the caller has frozen. The error says so, and the next call works."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.layer.requires_grad_(True)(x)

    plain, model = twins(wrap, Calls(forward, layer=nn.Linear(5, 5).requires_grad_(False)), 2)
    x = torch.randn(7, 5)
    with pytest.raises(RuntimeError, match=r"switched on the gradient of parameter 'layer\.(weight|bias)'.*before"):
        model(x)
    model.module.requires_grad_(True)
    for each in (model, plain):
        loss_of(each(x)).backward()
    assert_same_gradients(model.module, plain)


@in_one_memory
def test_a_tensor_with_a_history_as_attribute_is_an_error(wrap: Wrap) -> None:
    """R7: the error names the attribute; unused, it does no harm."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.linear(x) + (model.memory["state"] if model.use else 0)

    remembers = Calls(forward, linear=nn.Linear(5, 5), memory={"state": torch.zeros(5)}, use=True)
    model = wrap(nn.Sequential(remembers))
    x = torch.randn(7, 5)
    model.module[0].memory["state"] = torch.exp(torch.zeros(5, requires_grad=True))
    model.module[0].use = False
    loss_of(model(x)).backward()
    model.module[0].use = True
    model.module[0].memory = dict(model.module[0].memory)
    with pytest.raises(RuntimeError, match=r"attribute '0\.memory'"):
        model(x)
    model.module[0].memory["state"] = torch.ones(5)
    loss_of(model(x)).backward()


@pytest.mark.parametrize(
    "place_in",
    [lambda m: [m], lambda m: (m,), lambda m: {"a": [m]}, lambda m: m.forward],
    ids=["list", "tuple", "dict", "method"],
)
def test_a_template_on_the_meta_device(wrap: Wrap, place_in: Callable[[nn.Module], Any]) -> None:
    """R7, A4: of ensembles by functional_call. A tensor without data has nothing to copy; it was torch's error."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            template = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2, affine=False)).to("meta").eval()
            self.base = place_in(template)
            self.shapes = {name: [tensor.detach(), tensor] for name, tensor in template.named_parameters()}
            self.like = torch.empty(2, device="meta")
            self.register_buffer("unused", torch.empty(3, device="meta"), persistent=False)
            self.weight, self.bias = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(2))
            self.register_buffer("mean", torch.randn(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = self.base
            while not isinstance(base, nn.Module):
                base = base.__self__ if callable(base) else base["a"] if isinstance(base, dict) else base[0]
            own = {"0.weight": self.weight, "0.bias": self.bias, "1.running_mean": self.mean}
            own["1.running_var"] = torch.ones_like(self.mean)
            return torch.func.functional_call(base, own, (x,)) * len(self.shapes["0.weight"][0]) + self.like.numel()

    model = assert_alike(wrap, Ensemble(), lambda *step: [one_step(7, 5)(*step) for _ in range(2)])
    with torch.no_grad():
        assert_same(model(x := torch.randn(7, 5)), model.module(x))
    model.module.template = nn.Linear(5, 2, device="meta")
    with pytest.raises(RuntimeError, match=r"template\.weight is on the meta device.*self\.base = \[base\]"):
        model(x)


def test_slots_of_a_modules_class(wrap: Wrap) -> None:
    """R7: `__slots__` beside the attributes; the slots of replicas were empty."""

    class Base(nn.Module):
        __slots__ = ("__factor", "behind", "empty")

        def __init__(self) -> None:
            super().__init__()
            self.__factor = 3.0
            slot.__set__(self, 1.0)

        def factor(self) -> float:
            return self.__factor * slot.__get__(self)

    slot: Any = Base.behind

    class Slotted(Base):
        __slots__ = ("layers", "op", "table")
        behind = property(lambda self: 2.0)

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.linear = nn.Linear(5, 5)
            self.layers, self.op, self.table = [self.linear, nn.Linear(5, 5)], self.run, torch.randn(5)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x)) + self.linear(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.op(x) * self.factor() + self.table

    plain, model, x = Slotted(), wrap(nn.Sequential(Slotted()), 3), torch.randn(7, 5)
    for factor in (3.0, 2.0):
        plain._Base__factor = model.module[0]._Base__factor = factor
        loss_of(plain(x)).backward()
        loss_of(model(x)).backward()
        assert_same_gradients(nn.ModuleList(model.module[0].layers), nn.ModuleList(plain.layers))
    assert model.module[0].layers[0] is model.module[0].linear


@in_one_memory
def test_objects_that_carry_tensors_with_a_history(wrap: Wrap) -> None:
    """S4: an object of an unknown class reaches every replica as it is, and gradients flow through what it holds."""

    def steps(call: Callable[..., torch.Tensor], root: nn.Module) -> list[Any]:
        grads = []
        for _ in range(3):  # other objects in each step, with other tensors
            x, weight, leaf = torch.randn(7, 5), fresh(torch.arange(3.0)), fresh(torch.ones(3))
            loss_of(call(x, Holder(torch.exp(weight) * 2))).backward()
            loss_of(call(x, Holder(leaf))).backward()
            grads += [weight.grad, leaf.grad]
        return grads

    assert_alike(wrap, Fn(lambda y, batch: y * batch.held, nn.Linear(5, 3)), steps)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_a_method_that_is_kept_as_an_attribute(wrap: Wrap, reentrant: bool) -> None:
    """R7, R13: it is called again in backward, and still is the replica's."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: model.kept(torch.tanh(model.kept(x))), x, use_reentrant=reentrant)

    block = nn.Linear(3, 3)
    assert_alike(wrap, Calls(forward, block=block, kept=block.forward), one_step(6, 3))


@pytest.mark.filterwarnings("ignore:forward of")
def test_a_hook_from_outside_that_sets_an_attribute_of_its_layer(wrap: Wrap) -> None:
    """R7, R9: it sets that of the replica: weights that a helper scales before each forward, for one."""

    def scaled(layer: nn.Module) -> nn.Module:
        def hook(module: nn.Module, inputs: Any) -> None:
            layer.factor = inputs[0].abs().amax(1, keepdim=True) + 1

        layer.register_forward_pre_hook(hook)
        return layer

    plain = Calls(lambda module, x: module.layer(x) * module.layer.factor, layer=scaled(nn.Linear(3, 2)))
    plain.layer.factor = torch.ones(1, 1)
    x, results = torch.randn(5, 3), []
    for call in (wrap(plain), plain):
        plain.zero_grad()
        output = call(x)
        output.sum().backward()
        results.append([output, plain.layer.weight.grad])
    assert_all_same(*results)
