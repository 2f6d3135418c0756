"""Training features: each is a script, run once with the plain module and once with the wrapped one.

A script builds a model, gives it to `wrap`, trains it for five steps on batches of different sizes, and returns
everything that it has made: parameters, buffers, gradients, and what the feature itself keeps. In the oracle's run
`wrap` returns the module as it is; then it returns the wrapped one. Results agree within 1e-5 of a tensor's largest
entry in float32 and 1e-12 in float64 (row N9 of docs/behaviour.md).

A last test runs every script with a wrapper that loses the gradient of one row, and expects it to be noticed. More of
what users do is in tests/fuzz/actions.py, which tests/fuzz/test_actions.py does too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from helpers.contract import DEVICES, in_turn, on_first_device
from helpers.modules import Calls, mlp
from unisono import DataParallel

SIZES = (7, 8, 9, 5, 1)  # rows of the five batches: shares are uneven, and the last batch leaves replicas idle
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
ROUNDED = {("autocast", torch.float32): 5e-2}  # computed in bfloat16, which rounds to one part in 256
FIRST = torch.device(DEVICES[0])

Wrap = Callable[[nn.Module], nn.Module]
Results = dict[str, torch.Tensor]


Script = Callable[[Wrap], Results]

SCRIPTS: dict[str, Script] = {}


def script(run: Script) -> Script:
    """Add a function to the scripts."""
    SCRIPTS[run.__name__] = run
    return run


# ---- what the scripts share ----------------------------------------------------------------------


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for rows in SIZES:
        yield torch.randn(rows, 5, generator=generator, device="cpu").to(FIRST)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The mean squared distance from numbers that differ from entry to entry."""
    target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
    return F.mse_loss(output, target)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    output = model(x)
    loss_of(output).backward()
    optimizer.step()
    return output.detach()


def train(model: nn.Module) -> Results:
    optimizer = sgd(model)
    for x in batches():
        output = step(model, optimizer, x)
    return results(model, output=output)


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DataParallel) else model


def results(model: nn.Module, **more: torch.Tensor) -> Results:
    """Everything that training has changed in `model`; names do not show whether it is wrapped."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name.replace("module.", ""): tensor for name, tensor in found.items()}
    return {name: tensor.detach().to_dense().clone() for name, tensor in {**found, **more}.items()}


def run(name: str, wrap: Wrap, dtype: torch.dtype) -> Results:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with on_first_device(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            return SCRIPTS[name](wrap)
    finally:
        torch.set_default_dtype(before)


def differences(results: Results, expected: Results) -> dict[str, float]:
    """Return how far each tensor is from what is expected, as a part of its largest entry; names must agree."""
    assert results.keys() == expected.keys()
    found = {}
    for name, theirs in expected.items():
        mine = results[name]
        assert mine.shape == theirs.shape, name
        assert mine.dtype == theirs.dtype, name
        assert torch.isfinite(theirs).all(), f"{name}: training went wrong, the test shows nothing"
        if theirs.dtype is torch.bool:
            mine, theirs = mine.double(), theirs.double()
        largest = theirs.abs().max().item() if theirs.numel() else 0.0
        found[name] = ((mine - theirs).abs().max().item() / largest) if largest else mine.abs().sum().item()
    return found


# ---- modules: trained in the usual way -----------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


@script
def cached_parametrizations(wrap: Wrap) -> Results:
    """Within `parametrize.cached()` a weight is computed once, however often the model is called."""
    model = wrap(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
    for parametrization in (Symmetric(), Scaled()):
        parametrize.register_parametrization(unwrapped(model)[0], "weight", parametrization)
    optimizer = sgd(model)
    for x in batches():
        with parametrize.cached():
            optimizer.zero_grad()
            loss_of(model(torch.tanh(model(x)) + model(-x))).backward()
            optimizer.step()
    return results(model)


@script
def parametrizations_added_and_removed(wrap: Wrap) -> Results:
    model = wrap(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
    layer = unwrapped(model)[0]
    for number, x in enumerate(batches()):
        if number == 1:
            parametrize.register_parametrization(layer, "weight", Symmetric())
        if number == 3:
            parametrize.remove_parametrizations(layer, "weight")
        step(model, sgd(model), x)
    return results(model)


class LoRA(nn.Module):
    """Holds a frozen layer and adds a product of two small matrices; in eval mode that is merged into the weight."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 3)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 3)
        self.merged = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def train(self, mode: bool = True) -> "LoRA":
        if self.merged == mode:
            self.base.weight.data += (self.up @ self.down).data * (-1 if mode else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.in_features == x.size(-1)
        return self.base(x) if self.merged else self.base(x) + F.linear(F.linear(x, self.down), self.up)


@script
def lora(wrap: Wrap) -> Results:
    """Low-rank layers around frozen ones; the optimizer has the trainable parameters only; eval merges."""
    layers = mlp()
    for name, child in list(layers.named_children()):
        if isinstance(child, nn.Linear):
            setattr(layers, name, LoRA(child))
    model = wrap(layers)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for x in batches():
        step(model, optimizer, x)
        model.eval()
        with torch.no_grad():
            merged = model(x)
        model.train()
    return results(model, merged=merged)


def with_saved_tensor_hooks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return model.block(x)


# Name of a script -> the module that it trains.
TRAINED: dict[str, Callable[[], nn.Module]] = {
    "saved_tensor_hooks_inside": lambda: Calls(with_saved_tensor_hooks, block=mlp()),
    "traced_by_fx": lambda: torch.fx.symbolic_trace(mlp()),
    "shared_memory": lambda: mlp().share_memory(),  # as in Hogwild training
}
SCRIPTS |= {name: lambda wrap, make=make: train(wrap(make())) for name, make in TRAINED.items()}


@script
def several_wrapped_blocks(wrap: Wrap) -> Results:
    """One of them wrapped twice, as where two losses use one encoder."""
    block = mlp(5, 5)
    return train(nn.Sequential(wrap(block), nn.ReLU(inplace=True), wrap(mlp(5, 5)), nn.Tanh(), wrap(block)))


@script
def autocast(wrap: Wrap) -> Results:
    """Around the model only, as torch recommends; the replicas' gradients are rounded each for itself."""
    model = wrap(mlp())
    optimizer = sgd(model)
    for x in batches():
        optimizer.zero_grad()
        with torch.autocast(FIRST.type, torch.bfloat16):
            output = model(x)
        assert output.dtype is torch.bfloat16 or x.dtype is torch.float64  # which autocast leaves as it is
        loss_of(output.float()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return results(model)


@script
def grad_scaler_and_a_fused_optimizer(wrap: Wrap) -> Results:
    """With clipping; the third batch has an infinity in it: its step is skipped, and the scale halved."""
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(FIRST.type, init_scale=1024.0, growth_interval=2)
    scales = []
    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss_of(model(x)) * (torch.inf if number == 2 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(p, held) for p, held in zip(model.parameters(), before, strict=True))
        assert unchanged == (number == 2)
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    return results(model, scales=torch.tensor(scales))


# ---- how a step is taken -------------------------------------------------------------------------


@script
def an_optimizer_step_inside_backward(wrap: Wrap) -> Results:
    """A hook on each parameter steps its own optimizer as soon as its gradient is there, and drops the gradient."""
    model = wrap(mlp())
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def take_step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(take_step)
    for x in batches():
        loss_of(model(x)).backward()
    return results(model)


@script
def parameters_as_one_vector(wrap: Wrap) -> Results:
    """`vector_to_parameters` makes all parameters views of one block of memory; so do flat optimizers."""
    model = wrap(mlp())
    for x in batches():
        model.zero_grad()
        loss_of(model(x)).backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        vector = nn.utils.parameters_to_vector(model.parameters()).detach() - 0.1 * gradient
        nn.utils.vector_to_parameters(vector, model.parameters())
    return results(model)


@script
def gradients_as_views_of_one_vector(wrap: Wrap) -> Results:
    """Flat gradients: `.grad` is given beforehand, as views of one block, and filled by backward in place."""
    model = wrap(mlp())
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = view.view_as(parameter)
    optimizer = sgd(model)
    for x in batches():
        flat.zero_()
        loss_of(model(x)).backward()
        assert parameters[0].grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        optimizer.step()
    return results(model, flat=flat)


@script
def meta_learning(wrap: Wrap) -> Results:
    """An inner step whose result has a history, and a loss after it: second derivatives through functional_call.

    torch refuses a DataParallel as functional_call's module, and takes one as a part of it.
    """
    model = nn.Sequential(wrap(mlp()))
    optimizer = sgd(model)
    for x in batches():
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss_of(model(x)), list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        loss_of(torch.func.functional_call(model, fast, (x * 0.5,))).backward()
        optimizer.step()
    return results(model)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_wrapped_module_trains_as_the_plain_one(name: str, dtype: torch.dtype) -> None:
    """N7, N9, R4, R8, R9, R10, R13, R14, A10, A14"""
    expected = run(name, lambda module: module, dtype)
    limit = ROUNDED.get((name, dtype), TOLERANCES[dtype])
    for num_replicas in (2, 3):
        actual = run(name, lambda module, n=num_replicas: DataParallel(module, in_turn(n)), dtype)
        found = differences(actual, expected)
        worst = max(found, key=found.__getitem__)
        assert found[worst] <= limit, f"{num_replicas} replicas: {worst} differs by {found[worst]:.1e} of its size"
