"""How long a step takes, by a clock of the test's own."""

import weakref

import pytest
import torch

from helpers.modules import Fn, WithBackward
from unisono import DataParallel
from unisono.runtime.step_timer import StepTimer

CPU = [torch.device("cpu")]


@pytest.mark.parametrize("wrapped", [False, True])
def test_forward_and_backward_count_and_nothing_between(clock, wrapped):
    """S16: neither does the backward of what the caller computes from the output."""

    def ticking(x: torch.Tensor, seconds: float) -> torch.Tensor:
        def backward(grad: torch.Tensor) -> torch.Tensor:
            clock.now += seconds
            return grad

        return WithBackward.apply(x, backward)

    def forward(x: torch.Tensor) -> torch.Tensor:
        clock.now += 1
        return ticking(x, 20)

    model = DataParallel(Fn(forward), ["cpu"]) if wrapped else forward
    x = torch.ones(3, requires_grad=True)
    seconds = []
    timer = StepTimer(CPU, seconds.append)
    first = model(x)
    last = ticking(first, 7)
    timer.forward_ended([first, last])
    clock.now += 300
    loss = ticking(last.sum(), 4000)
    loss.backward(retain_graph=True)
    assert seconds == [28], "from the first output that backward reaches"
    clock.now += 50_000
    loss.backward()
    assert seconds == [28], "once"


def test_replicas(clock):
    """S16: their boundary is the node that backward reaches."""
    seconds = []
    model = DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 2)
    timer = StepTimer(CPU * 2, seconds.append)
    output = model(torch.ones(4, 3))
    timer.forward_ended([output])
    clock.now += 300
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: vars(clock).update(now=clock.now + 5))
    output.sum().backward()
    assert seconds == [10]


def test_without_gradients_forward_is_the_step(clock):
    """S16"""
    seconds = []
    timer = StepTimer(CPU, seconds.append)
    clock.now += 2
    timer.forward_ended([torch.ones(3)])
    assert seconds == [2]


def test_without_a_backward_there_is_no_time_and_no_graph_is_kept():
    """S16"""
    seconds = []
    timer = StepTimer(CPU, seconds.append)
    model = torch.nn.Linear(3, 2)
    output = model(torch.ones(4, 3))
    timer.forward_ended([output])
    alive = weakref.ref(timer)
    del timer, output
    assert alive() is None
    assert seconds == []
