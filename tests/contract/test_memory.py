"""Nothing grows from step to step, with the garbage collector off.

Tensors that Python can see are counted exactly, with the bytes of their storages. Tensors that only torch's graphs hold
show in malloc's own count of allocated bytes, where the C library is glibc; one tensor kept in each step would show
there many times over. benchmarks/memory.py measures how large the peak is.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from helpers.garbage import collected, live_tensors
from helpers.modules import Calls
from unisono import DataParallel

FEW, MANY = 5, 30
WIDTH = 64  # a batch of 32 rows is 8 KiB
SMALLEST_LEAK = 8 * 1024 * (MANY - FEW) // 4  # bytes; a quarter of a batch in each step


# Tensors this small gain nothing from more, and on a busy machine more would wait for each other.
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def large() -> nn.Module:
    """Weights large enough for their gradients to be summed early."""
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, WIDTH))


def checkpointed(reentrant: bool) -> nn.Module:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model.second, model.first(x), use_reentrant=reentrant)

    return Calls(forward, first=nn.Linear(WIDTH, WIDTH), second=mlp())


def wrapped_mlp() -> nn.Module:
    return DataParallel(mlp(), ["cpu"] * 2, sync_batch_norm=False)


def with_a_method_as_attribute() -> nn.Module:
    """Reaches, through a plain list, a module that has a method of its own as an attribute."""
    hidden = nn.Linear(WIDTH, WIDTH)
    hidden.op = hidden.forward
    return Calls(lambda model, x: model.hidden[0].op(model.first(x)), first=nn.Linear(WIDTH, WIDTH), hidden=[hidden])


def with_its_output_as_attribute() -> nn.Module:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.latest = model.norm(model.first(x))  # lost, and not held by what led to it
        return model.latest * 1

    return Calls(forward, first=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "synchronised": with_its_output_as_attribute,
    "large": large,
    "parametrized": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "a method as attribute": with_a_method_as_attribute,
    "checkpointed, reentrant": lambda: checkpointed(True),
    "checkpointed": lambda: checkpointed(False),
    "wrapper inside": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), wrapped_mlp()),
}


def training(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    model.zero_grad()


def forward_and_evaluation(model: nn.Module, x: torch.Tensor) -> None:
    model(x)
    with torch.no_grad():
        model(x)


def accumulation(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def a_kept_graph(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    with contextlib.suppress(RuntimeError):  # a reentrant checkpoint can run backward once only
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)


def gradient_penalty(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    with contextlib.suppress(RuntimeError):  # a reentrant checkpoint refuses torch.autograd.grad
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().mean().backward()


def fail(*_: Any) -> None:
    raise KeyError


def a_forward_that_fails(model: nn.Module, x: torch.Tensor) -> None:
    handle = list(model.modules())[-1].register_forward_hook(fail)
    with contextlib.suppress(KeyError):
        model(x)
    handle.remove()


def a_backward_that_fails(model: nn.Module, x: torch.Tensor) -> None:
    def add_hook(module: nn.Module, args: object, output: Any) -> None:
        if output.requires_grad:  # not so in the first pass of a reentrant checkpoint
            output.register_hook(fail)

    last = next(module for module in reversed(list(model.modules())) if isinstance(module, nn.Linear))
    handle = last.register_forward_hook(add_hook)
    with contextlib.suppress(KeyError):
        model(x).square().mean().backward()
    handle.remove()


STEPS = [training, a_forward_that_fails, a_backward_that_fails]  # of every model
MORE_STEPS = [forward_and_evaluation, accumulation, a_kept_graph, gradient_penalty]  # of these:
WITH_MORE_STEPS = ["mlp", "synchronised", "a method as attribute", "checkpointed", "wrapper inside"]
CASES = [(name, step) for name in MODELS for step in STEPS]
CASES += [(name, step) for name in WITH_MORE_STEPS for step in MORE_STEPS]


class _MallocInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated_bytes() -> int:
    """What is allocated through malloc; 0 where only glibc would know."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def grown(model: nn.Module, step: Callable[[nn.Module, torch.Tensor], None]) -> tuple[tuple[int, int], int, int]:
    """Return what some steps, after a few others, add: tensors and their bytes, allocated bytes, and cycles."""
    x = torch.randn(32, WIDTH)
    for _ in range(FEW):
        step(model, x)
    gc.collect()
    (few, few_bytes), few_allocated = live_tensors(), allocated_bytes()
    for _ in range(MANY - FEW):
        step(model, x)
    (many, many_bytes), many_allocated = live_tensors(), allocated_bytes()
    return (many - few, many_bytes - few_bytes), many_allocated - few_allocated, len(collected())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.filterwarnings("ignore:forward of Calls assigns latest")
@pytest.mark.parametrize(("name", "step"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_nothing_grows(collector_off: None, name: str, step: Callable[[nn.Module, torch.Tensor], None]) -> None:
    """N10: tensors, bytes, and cycles for the garbage collector beyond those that the plain module leaves."""
    synchronised = {"sync_batch_norm": name == "synchronised"}
    wrapped = DataParallel(MODELS[name](), ["cpu"] * 3, **synchronised)
    tensors, allocated, cycles = grown(wrapped, step)
    if allocated >= SMALLEST_LEAK:  # Python and malloc may still be setting things up; a leak goes on
        tensors, allocated, cycles = grown(wrapped, step)
    assert tensors == (0, 0)
    assert allocated < SMALLEST_LEAK
    if cycles:  # torch's checkpoints leave some
        assert cycles <= 3 * grown(MODELS[name](), step)[2]


def test_what_grows_would_be_noticed(collector_off: None) -> None:
    """The counts above can fail: tensors that Python can see, and memory that it cannot."""
    kept: list[object] = []

    def keeps_output(model: nn.Module, x: torch.Tensor) -> None:
        kept.append(model(x).detach())

    def keeps_graph(model: nn.Module, x: torch.Tensor) -> None:
        kept.append(model(x).sum().grad_fn)

    for step in (keeps_output, keeps_graph):
        tensors, allocated, _ = grown(DataParallel(mlp(), ["cpu"] * 3, sync_batch_norm=False), step)
        assert tensors[1] > SMALLEST_LEAK or allocated > SMALLEST_LEAK
