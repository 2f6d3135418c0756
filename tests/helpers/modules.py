"""Modules for tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono import DataParallel


class Calls(nn.Module):
    """A module with the given attributes, whose forward is a function of the module and the inputs."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.function(self, *inputs, **kwargs)


class Fn(nn.Module):
    """A module that calls a function, after a layer if it is given one."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.layer is not None:
            inputs = (self.layer(inputs[0]), *inputs[1:])
        return self.function(*inputs, **kwargs)


class WithBackward(torch.autograd.Function):
    """The identity, with the backward that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.run_backward = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.run_backward(grad), None


class PassingMode(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Composed(DataParallel):
    """A wrapper with an overridden verb, which therefore runs the plain composition."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return super().gather(outputs, output_device)


def mlp(width: int = 5, out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, out))


class ForceField(nn.Module):
    """Differentiates inside its own forward, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(5, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -force


def rows_of(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *shape)
