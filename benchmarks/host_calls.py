"""How many Python calls a training step makes for its caller, for each parameter and fixed.

    python benchmarks/host_calls.py

A step is forward, loss, backward, foreach SGD, gradients set to None, of many small layers: nothing in it takes long
but the calls themselves. Steps of a short and of a long model are counted; the difference, divided by that of their
parameters, is the number of calls for each parameter, and the rest is fixed. The plain module's are subtracted. Calls
do not depend on the clock, so the figures repeat exactly: calls of functions that wait are left out, and those that sum
the replicas' gradients are counted in every thread, because the replica that is last makes them; all others are those
of the caller's thread. The replicas share the module's memory, or have memory of their own as on several devices.
"""

import argparse
import contextlib
import functools
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import unisono
from unisono.autograd.gradient_sums import BucketSums
from unisono.console.tables import table
from unisono.testing import separate_memory

MEMORIES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "one memory": contextlib.nullcontext,
    "separate memory": separate_memory,
}
REPLICAS = (1, 2, 4, 8)
_NUM_LAYERS = (20, 60)
_ROWS, _WIDTH = 16, 4
_WARM_UP, _COUNTED = 4, 15
# How often they are called depends on time.
_WAITING = {"poll", "sched_yield", "perf_counter", "monotonic", "sleep"}
# Sums parts of two replicas' gradients, in the thread of either.
_SUM = BucketSums._add_next.__code__


class Calls(NamedTuple):
    """Calls in one step of a model, and the model's number of parameters."""

    calls: int
    parameters: int


class Cost(NamedTuple):
    """What a wrapped model's step costs beyond the plain module's, in calls: for each parameter, and the rest."""

    per_parameter: float
    fixed: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("Python calls for the caller in one step, beyond the plain module's\n")
    rows = []
    for name in MEMORIES:
        for batch_norm in (False, True):
            for replicas in REPLICAS:
                found = cost(name, replicas, batch_norm=batch_norm)
                layers = "Linear, BatchNorm1d" if batch_norm else "Linear"
                rows.append([name, layers, str(replicas), f"{found.per_parameter:.2f}", f"{found.fixed:.0f}"])
        found = cost(name, 2, batch_norm=False, returns_all=True)
        rows.append([name, "Linear, each with an output", "2", f"{found.per_parameter:.2f}", f"{found.fixed:.0f}"])
    print(table(["replicas in", "layers", "replicas", "a parameter", "fixed"], rows, text_columns=2))


def cost(memory: str, replicas: int, *, batch_norm: bool, returns_all: bool = False) -> Cost:
    """Return what `replicas` replicas on the CPU cost in one of `MEMORIES`.

    A layer has two parameters, and an output if the model `returns_all`.
    """
    kind: dict[str, bool] = {"batch_norm": batch_norm, "returns_all": returns_all}
    differences = []
    for num_layers in _NUM_LAYERS:
        plain = plain_calls(num_layers, **kind)
        module = layers(num_layers, **kind)
        wrapped = unisono.DataParallel(module, ["cpu"] * replicas, sync_batch_norm=False)
        with MEMORIES[memory](), sums_in_workers_counted():
            ours = calls_of(wrapped)
        differences.append(Calls(ours.calls - plain.calls, plain.parameters))
    short, long = differences
    slope = (long.calls - short.calls) / (long.parameters - short.parameters)
    return Cost(slope, short.calls - slope * short.parameters)


@functools.cache
def plain_calls(num_layers: int, *, batch_norm: bool, returns_all: bool = False) -> Calls:
    """Return the calls of a steady step without a wrapper."""
    return calls_of(layers(num_layers, batch_norm=batch_norm, returns_all=returns_all))


class ReturnsAll(nn.Sequential):
    """Returns what each layer returns, as a model returns its hidden states."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for layer in self:
            x = layer(x)
            found.append(x)
        return found


def layers(number: int, *, batch_norm: bool, returns_all: bool = False) -> nn.Sequential:
    """Return a model of small layers."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH)) for _ in range(number)]
    return (ReturnsAll if returns_all else nn.Sequential)(
        *(layer for pair in pairs for layer in pair[: 1 + batch_norm])
    )


def calls_of(model: nn.Module) -> Calls:
    """Return the calls of a steady step of a model."""
    calls_of_steps(model, _WARM_UP)
    # The fewest of several steps: in the others a wait may be long.
    return Calls(min(calls_of_steps(model, 1) for _ in range(_COUNTED)), sum(1 for _ in model.parameters()))


def calls_of_steps(model: nn.Module, number: int) -> int:
    """Return the calls of the next steps of a model."""
    step, calls = training_step(model), 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += _is_call(event, arg)

    gc.disable()  # what it finalizes is not the step's
    _sums_in_workers.clear()
    sys.setprofile(count)  # of this thread; since Python 3.12 cProfile counts the calls of all
    for _ in range(number):
        step()
    sys.setprofile(None)
    gc.enable()
    return calls + len(_sums_in_workers)


_sums_in_workers: list[str] = []  # an entry a call


@contextlib.contextmanager
def sums_in_workers_counted() -> Iterator[None]:
    """The context in which threads that start have their calls counted that sum gradients, for as long as they live."""

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if _is_call(event, arg) and any(caller.f_code is _SUM for caller, _ in traceback.walk_stack(frame)):
            _sums_in_workers.append(event)

    before = threading.getprofile()
    threading.setprofile(count)
    try:
        yield
    finally:
        threading.setprofile(before)


def training_step(model: nn.Module) -> Callable[[], None]:
    """Return the step of a model of `layers` that is counted."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    inputs = torch.randn(_ROWS, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        output: Any = model(inputs)
        joined: Any = output if type(output) is torch.Tensor else torch.cat(output)
        joined.square().mean().backward()
        optimizer.step()

    return step


def _is_call(event: str, arg: Any) -> bool:
    return event == "call" or (event == "c_call" and not _waits(arg))


def _waits(function: Any) -> bool:
    # One that waits long in a SimpleQueue looks for Ctrl-C now and then.
    return function.__name__ in _WAITING or "SimpleQueue" in getattr(function, "__qualname__", "")


if __name__ == "__main__":
    main()
