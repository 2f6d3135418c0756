"""How long one step of a module takes: its forward, and the backward that follows.

What the caller does between the two, and between steps, does not count: the loss, the optimizer, the data. Backward
counts from the moment at which it reaches the module's output to its end, whether that output is the module's own or
that of several replicas. On accelerators the step waits for the devices at each of these four moments, so that the
times are those of the work and not of queueing it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.runtime import devices as _devices
from unisono.runtime.torch_private import engine


def watch_backwards(outputs: Sequence[torch.Tensor], begin: Callable[[], object], end: Callable[[], object]) -> bool:
    """Have functions called whenever a backward reaches the first of some outputs, and at the end of that backward.

    No tensor is kept, and the functions live as long as the outputs' graph.

    Returns:
        Whether a backward can reach any of them.
    """
    nodes: set[Any] = {output.grad_fn for output in outputs} - {None}
    running: int | None = None  # a backward that has failed does not end

    def reached(grads: object) -> None:
        nonlocal running
        number = engine.number_of_backward()
        if number != running:
            engine.call_at_end_of_backward(ended)
            running = number
            begin()

    def ended() -> None:
        nonlocal running
        running = None
        end()

    for node in nodes:
        has_hooks = getattr(node, "has_hooks", False)
        node.register_prehook(reached)
        if hasattr(node, "has_hooks"):
            node.has_hooks = has_hooks  # this one reads no gradient: none has to be computed for it
    return bool(nodes)


class StepTimer:
    """Times one step, from its construction on.

    Args:
        devices: those that compute.
        done: called once with the seconds, after the step's backward; after its forward if the output needs none. If no
            backward follows although one could, it is not called.
    """

    def __init__(self, devices: Sequence[torch.device], done: Callable[[float], object]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if not _devices.computes_on_host(device)]
        self._done: Callable[[float], object] | None = done
        self._forward_s = 0.0
        self._started = self._now()

    def forward_ended(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take note of the end of forward. No tensor of it is kept."""
        self._forward_s = self._now() - self._started
        if not watch_backwards(outputs, self._backward_begins, self._backward_ended):
            self._end(self._forward_s)

    def _backward_begins(self) -> None:
        self._started = self._now()

    def _backward_ended(self) -> None:
        self._end(self._forward_s + self._now() - self._started)

    def _end(self, seconds: float) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(seconds)

    def _now(self) -> float:
        for device in self._devices:
            _devices.queued_work(device)(True)
        return time.perf_counter()
