"""What training loops do beside a plain step, each with the plain module's numbers; tests/fuzz/actions.py has more."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from helpers.comparisons import assert_alike, assert_same_gradients, assert_same_state
from helpers.contract import DEVICES, Wrap
from helpers.modules import Calls, mlp

SIZES = (7, 8, 9, 5, 1)  # rows of the five batches: shares are uneven, and the last batch leaves replicas idle


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for rows in SIZES:
        yield torch.randn(rows, 5, generator=generator, device="cpu").to(DEVICES[0])


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The mean squared distance from numbers that differ from entry to entry."""
    return F.mse_loss(output, torch.linspace(-1, 1, output.numel()).view(output.shape).to(output))


def sgd(root: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(root.parameters(), lr=0.1, momentum=0.9)


def step(call: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    output: torch.Tensor = call(x)
    loss_of(output).backward()
    optimizer.step()
    return output.detach()


def train(call: Any, root: Any) -> list[torch.Tensor]:
    optimizer = sgd(root)
    return [step(call, optimizer, x) for x in batches()]


# ---- modules -------------------------------------------------------------------------------------


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


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


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


def with_lora() -> nn.Module:
    return nn.Sequential(*(LoRA(layer) if isinstance(layer, nn.Linear) else layer for layer in mlp()))


def with_saved_tensor_hooks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return model.block(x)


# ---- trainings -----------------------------------------------------------------------------------


def in_cached_parametrizations(call: Any, root: Any) -> None:
    """Within `parametrize.cached()` a weight is computed once, however often the model is called."""
    for parametrization in (Symmetric(), Scaled()):
        parametrize.register_parametrization(root[0], "weight", parametrization.to(DEVICES[0]))
    optimizer = sgd(root)
    for x in batches():
        with parametrize.cached():
            optimizer.zero_grad()
            loss_of(call(torch.tanh(call(x)) + call(-x))).backward()
            optimizer.step()


def parametrized_for_a_while(call: Any, root: Any) -> None:
    for number, x in enumerate(batches()):
        if number == 1:
            parametrize.register_parametrization(root[0], "weight", Symmetric())
        if number == 3:
            parametrize.remove_parametrizations(root[0], "weight")
        step(call, sgd(root), x)


def merging(call: Any, root: Any) -> list[torch.Tensor]:
    """The optimizer, a fused one, has the trainable parameters only; eval merges."""
    optimizer = torch.optim.AdamW([p for p in root.parameters() if p.requires_grad], lr=1e-2, fused=True)
    merged = []
    for x in batches():
        step(call, optimizer, x)
        call.eval()
        with torch.no_grad():
            merged.append(call(x))
        call.train()
    return merged


def in_shared_memory(call: Any, root: Any) -> list[torch.Tensor]:
    """As in Hogwild training."""
    root.share_memory()
    return train(call, root)


def with_parameters_as_one_vector(call: Any, root: Any) -> None:
    """`vector_to_parameters` makes all parameters views of one block of memory; so do flat optimizers."""
    for x in batches():
        root.zero_grad()
        loss_of(call(x)).backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in root.parameters()])
        vector = nn.utils.parameters_to_vector(root.parameters()).detach() - 0.1 * gradient
        nn.utils.vector_to_parameters(vector, root.parameters())


def with_gradients_as_views_of_one_vector(call: Any, root: Any) -> torch.Tensor:
    """`.grad` is given beforehand, as views of one block, and filled by backward in place."""
    parameters = list(root.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = view.view_as(parameter)
    optimizer = sgd(root)
    for x in batches():
        flat.zero_()
        loss_of(call(x)).backward()
        assert parameters[0].grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        optimizer.step()
    return flat


def on_what_it_learns(call: Any, root: Any) -> None:
    """An inner step whose result has a history, and a loss after it: second derivatives through functional_call.

    torch refuses a DataParallel as functional_call's module, and takes one as a part of it.
    """
    model, optimizer = nn.Sequential(call), sgd(root)
    for x in batches():
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss_of(model(x)), list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        loss_of(torch.func.functional_call(model, fast, (x * 0.5,))).backward()
        optimizer.step()


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "cached parametrizations": (square, in_cached_parametrizations),
    "parametrizations that are added and removed": (square, parametrized_for_a_while),
    "LoRA": (with_lora, merging),
    "saved-tensor hooks inside": (lambda: Calls(with_saved_tensor_hooks, block=mlp()), train),
    "traced by fx": (lambda: torch.fx.symbolic_trace(mlp()), train),
    "shared memory": (mlp, in_shared_memory),
    "parameters as one vector": (mlp, with_parameters_as_one_vector),
    "gradients as views of one vector": (mlp, with_gradients_as_views_of_one_vector),
    "meta-learning": (mlp, on_what_it_learns),
}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", TRAININGS)
def test_the_wrapped_module_trains_as_the_plain_one(wrap: Wrap, name: str, num_replicas: int) -> None:
    """N7, N9, R4, R8, R9, R10, R13, R14: outputs, gradients, parameters and buffers after five steps."""
    make, steps = TRAININGS[name]
    assert_alike(wrap, make(), steps, num_replicas)


def test_several_wrapped_blocks(wrap: Wrap) -> None:
    """A10, N7: one of them wrapped twice, as where two losses use one encoder."""

    def model(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        block, other = mlp(5, 5), mlp(5, 5)
        layers = wrap(block), nn.ReLU(inplace=True), wrap(other), nn.Tanh(), wrap(block)
        return nn.Sequential(*layers), nn.ModuleList([block, other])

    (wrapped, mine), (plain, theirs) = model(wrap), model(lambda module: module)
    train(wrapped, mine)
    train(plain, theirs)
    assert_same_gradients(mine, theirs)
    assert_same_state(mine, theirs)
