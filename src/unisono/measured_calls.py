"""Calls with measured shares: which steps are timed, and what the shares of each call are.

primitives/measured_shares.py decides on the shares from the times of steps; this file has the clock and the module.
Forwards with gradients, without them, and each method of the module have shares of their own.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from unisono.primitives import pytree
from unisono.primitives.measured_shares import MeasuredShares, StepTime
from unisono.runtime import devices as _devices
from unisono.runtime.step_timer import StepTimer
from unisono.runtime.thread_state import modes_that_stay
from unisono.runtime.timeline import ReplicaTiming
from unisono.ways import Invocation, Runnable, Way, arguments_of, on_all_devices, on_one_device, overridden_verb


class MeasuredCalls:
    """See the module's docstring; one a wrapper.

    Attributes:
        by_kind: the shares, by: are gradients on, and the method.
    """

    def __init__(self) -> None:
        self.by_kind: dict[tuple[bool, str | None], MeasuredShares] = {}

    def run(self, wrapper: Runnable, invocation: Invocation, way: Way, *, may_use_one_device: bool) -> Any:
        """Run a call with the shares of its kind; time it while they are measured.

        Args:
            way: how it is run on several devices.
            may_use_one_device: whether the module may run outside of the engine where one device is fastest.
        """
        shares = self._shares_of(wrapper, invocation)
        if shares.on_first_device and may_use_one_device and wrapper._options.parts == 1:
            way = on_one_device
        invocation.split = shares
        if shares.should_time_next() and way in (on_one_device, on_all_devices) and not modes_that_stay():
            return _run_timed(wrapper, invocation, way, shares)
        return way(wrapper, invocation)

    def _shares_of(self, wrapper: Runnable, invocation: Invocation) -> MeasuredShares:
        with_gradients, method = kind = torch.is_grad_enabled(), invocation.method
        shares = self.by_kind.get(kind)
        if shares is None:
            name = ("training" if with_gradients else "forwards without gradients") + (f", {method}" if method else "")
            ids = [id if isinstance(id, int) else str(id) for id in wrapper._options.device_ids]
            shares = self.by_kind.setdefault(kind, MeasuredShares(ids, name))
        return shares


def _run_timed(wrapper: Runnable, invocation: Invocation, way: Way, shares: MeasuredShares) -> Any:
    """Run a call and have its step recorded in `shares`."""
    try:
        rows = arguments_of(wrapper, invocation).rows
    except (TypeError, ValueError):  # several devices refuse such inputs, with this error; one takes them
        rows = None
    if not rows or overridden_verb(wrapper):
        return way(wrapper, invocation)
    engine, devices, weights, sizes = wrapper._engine, wrapper._options.devices, shares.weights, shares.sizes(rows)
    timings: list[ReplicaTiming] = []
    step, bytes_before = StepTime(weights, sizes, (), 0.0, ()), [*map(_devices.allocated_bytes, devices)]
    record = partial(_record, shares, step, devices, timings, engine.row_limits, bytes_before)
    before, timer = engine.timings(), StepTimer(devices, record)
    invocation.is_timed = True
    output = way(wrapper, invocation)
    now = engine.timings()
    if now is not before and [timing.rows for timing in now] == [size for size in sizes if size]:
        timings += now
    timer.forward_ended([tensor for _, tensor in pytree.tensors(output)])
    return output


def _record(
    shares: MeasuredShares,
    step: StepTime,
    devices: Sequence[torch.device],
    timings: Sequence[ReplicaTiming],
    row_limits: Mapping[int, int],
    bytes_before: Sequence[int],
    seconds: float,
) -> None:
    """Take note of a step's time. It refers to nothing that a graph may not keep alive.

    Args:
        step: its weights and sizes.
        timings: of the replicas that had rows; empty where they are not known.
        row_limits: how many rows a replica can bear, by its number, where that is known.
        bytes_before: what was allocated on each device when it began.
        seconds: how long it took.
    """
    of_replicas, on_host = iter(timings), _devices.all_on_host(devices)
    replica_s = [_seconds(next(of_replicas), on_host) if size else 0.0 for size in step.sizes] if timings else []
    most_rows = [
        min(row_limits.get(i, math.inf), _devices.most_rows(device, step.sizes[i], bytes_before[i]))
        for i, device in enumerate(devices)
    ]
    shares.record(step._replace(replica_s=replica_s, seconds=seconds, most_rows=most_rows))


def _seconds(timing: ReplicaTiming, on_host: bool) -> float:
    """Return how long a replica computed; on an accelerator, forward only: backward's time is that of queueing it."""
    return timing.forward_s + timing.backward_s if on_host else timing.forward_s
