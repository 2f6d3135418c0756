"""A wrapper, or a model with a wrapped part, that is traced: the trace is the module's, for any number of rows."""

import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.contract import Wrap
from unisono import DataParallel


class WithPart(nn.Module):
    """A model with a wrapped part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(3, 3), part

    def forward(self, x):
        return self.part(self.layer(x)).sin()


def as_it_is(wrapper):
    return wrapper


def traced_by_jit(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.jit.trace(model, x)


TRACERS = {
    "jit": traced_by_jit,
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(model)(x),
}
dynamic = {0: torch.export.Dim("rows", min=2)}


@pytest.mark.parametrize("of", [as_it_is, WithPart])
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_trace_is_the_modules(wrap: Wrap, of, tracer):
    """A15: it held the replicas of one batch, or ended in an error of torch's."""
    model, x = of(wrap(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))), torch.rand(4, 3)
    if (of, tracer) == (as_it_is, "fx"):
        with pytest.raises(TypeError, match=r"torch\.fx\.symbolic_trace\(model\.module\)"):
            TRACERS[tracer](model, x)
        model = model.module
    traced, other = TRACERS[tracer](model, x), torch.rand(7, 3)
    torch.testing.assert_close(traced(x), model(x))
    torch.testing.assert_close(traced(other), model(other))


@pytest.mark.parametrize("of", [as_it_is, WithPart])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program_is_the_modules(wrap: Wrap, of, strict):
    """A15: it held the replicas of one batch."""
    model, x = of(wrap(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))), torch.rand(4, 3)
    shapes = ((dynamic,),) if of is as_it_is else (dynamic,)
    program, other = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict).module(), torch.rand(7, 3)
    torch.testing.assert_close(program(other), model(other))


@pytest.mark.parametrize("of", [as_it_is, WithPart])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_script_names_the_module(of):
    """A15: torch's error was about code of the wrapper's. The model is as it was."""
    wrapper = DataParallel(nn.Linear(3, 2), ["cpu"] * 2)
    model = of(wrapper)
    with pytest.raises(TypeError, match=r"DataParallel\(torch\.jit\.script\(module\)\)"):
        torch.jit.script(model)
    assert wrapper in model.modules()
