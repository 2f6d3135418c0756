"""The clock of measured shares: runs a call, and has its step recorded.

primitives/measured_shares.py decides on the shares from the times of steps; ways.py chooses the calls that are timed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from unisono.engines.base import Engine
from unisono.primitives import pytree
from unisono.primitives.measured_shares import MeasuredShares, StepTime
from unisono.runtime import devices as _devices
from unisono.runtime.step_timer import StepTimer
from unisono.runtime.timeline import ReplicaTiming


def timed(
    call: Callable[[], Any], shares: MeasuredShares, rows: int, engine: Engine, devices: Sequence[torch.device]
) -> Any:
    """Return what a call of `rows` rows returns; its step is recorded in `shares`."""
    step = StepTime(shares.weights, shares.sizes(rows), (), 0.0, ())
    timings: list[ReplicaTiming] = []
    bytes_before = [*map(_devices.allocated_bytes, devices)]
    record = partial(_record, shares, step, devices, timings, engine.row_limits, bytes_before)
    before, timer = engine.timings(), StepTimer(devices, record)
    output = call()
    now = engine.timings()
    if now is not before and [timing.rows for timing in now] == [size for size in step.sizes if size]:
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
