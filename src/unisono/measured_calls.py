"""The clock of measured shares: runs a call, and has its step recorded.

primitives/measured_shares.py decides on the shares from the times of steps; ways.py chooses the calls that are timed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.engines.threads import Threads
from unisono.primitives import pytree
from unisono.primitives.measured_shares import MeasuredShares, StepTime
from unisono.runtime import devices as _devices
from unisono.runtime.step_timer import StepTimer
from unisono.runtime.timeline import ReplicaTiming


def timed(
    call: Callable[[], Any], shares: MeasuredShares, rows: int, threads: Threads, devices: Sequence[torch.device]
) -> Any:
    """Return what a call of `rows` rows returns; its step is recorded in `shares`."""
    weights, sizes, row_limits = shares.weights, shares.sizes(rows), threads.row_limits
    bytes_before = [*map(_devices.allocated_bytes, devices)]
    timings: list[ReplicaTiming] = []  # of the replicas that had rows; empty where they are not known

    def record(seconds: float) -> None:  # the output's graph keeps it alive, so it refers to no tensor
        of_replicas, on_host = iter(timings), _devices.all_on_host(devices)
        replica_s = [_seconds(next(of_replicas), on_host) if size else 0.0 for size in sizes] if timings else []
        most_rows = [
            min(row_limits.get(i, math.inf), _devices.most_rows(device, sizes[i], bytes_before[i]))
            for i, device in enumerate(devices)
        ]
        shares.record(StepTime(weights, sizes, replica_s, seconds, most_rows))

    before, timer = threads.timings(), StepTimer(devices, record)
    output = call()
    now = threads.timings()
    if now is not before and [timing.rows for timing in now] == [size for size in sizes if size]:
        timings += now
    timer.forward_ended([tensor for _, tensor in pytree.tensors(output)])
    return output


def _seconds(timing: ReplicaTiming, on_host: bool) -> float:
    """Return how long a replica computed; on an accelerator, forward only: backward's time is that of queueing it."""
    return timing.forward_s + timing.backward_s if on_host else timing.forward_s
