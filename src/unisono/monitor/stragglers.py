"""Which replica the others wait for, and why, where figures tell it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.bench.machine import other_programs
from unisono.monitor.nvml import Gpu

_SLOWER = 1.2  # a straggler takes so many times as long as the others' median
_BUSIER = 0.2  # on GPUs: so much more load than the others' median
_LEAST_S, _LEAST_PART = 1e-3, 0.05  # a shorter wait of the others in a step, or part of it, is nothing to mend


@dataclass(frozen=True)
class ReplicaFigures:
    """One replica, in the mean of the last steps that were published; None where a figure is not known."""

    number: int  # its place among the replicas that had rows
    device: str  # in its process
    gpu: int | None  # nvidia-smi's number of it
    rows: int  # 0 if not known
    share: float | None  # of the rows, from 0 to 1
    forward_s: float | None  # in which it computed
    backward_s: float | None
    wait_s: float | None  # in a step, for others; on GPUs the time without load beyond the busiest one's


@dataclass(frozen=True)
class Straggler:
    """The replica that the others wait for."""

    replica: int  # its number
    cause: str | None  # in words; None where the figures do not tell it


def find(
    replicas: Sequence[ReplicaFigures],
    step_s: float,
    gpus: Sequence[Gpu] = (),
    own_pids: Sequence[int] = (),
    core_loads: Sequence[float] = (),
    own_cores: float = 0.0,
) -> Straggler | None:
    """Return the straggler among the replicas of a wrapper; None if there is none, or if it cannot be told.

    GPUs and the loads of cores, from 0 to 1, are the machine's; `own_cores` is how many of them the wrapper keeps busy.
    """
    if len(replicas) < 2:
        return None
    times = [r.forward_s + r.backward_s for r in replicas if r.forward_s is not None and r.backward_s is not None]
    if len(times) == len(replicas):
        slowest = max(range(len(times)), key=times.__getitem__)
        others_s = _median_without(times, slowest)
        if times[slowest] < _SLOWER * others_s or not _matters(times[slowest] - others_s, step_s):
            return None
        causes = [_rows(slowest, replicas), other_programs(sum(core_loads), own_cores, len(core_loads))]
        return Straggler(slowest, "; ".join(filter(None, causes)) or None)

    by_number = {gpu.number: gpu for gpu in gpus}
    found = [by_number[r.gpu] for r in replicas if r.gpu in by_number]
    loads = [gpu.load for gpu in found if gpu.load is not None]
    if len(loads) < len(replicas) or len({gpu.number for gpu in found}) < len(replicas):  # or two on one GPU
        return None
    busiest = max(range(len(loads)), key=loads.__getitem__)
    more = loads[busiest] - _median_without(loads, busiest)  # the others are idle while they wait for it
    if more < _BUSIER or not _matters(more * step_s, step_s):
        return None
    return Straggler(busiest, _gpu_cause(busiest, replicas, found, own_pids))


def _matters(wait_s: float, step_s: float) -> bool:
    return wait_s >= max(_LEAST_S, _LEAST_PART * step_s)


def _gpu_cause(
    busiest: int, replicas: Sequence[ReplicaFigures], gpus: Sequence[Gpu], own_pids: Sequence[int]
) -> str | None:
    gpu = gpus[busiest]
    if gpu.slowdown is not None:
        return f"GPU {gpu.number} runs at a low clock: {gpu.slowdown}"
    if others := [pid for pid in gpu.pids if pid not in own_pids]:
        return f"process {others[0]} computes on GPU {gpu.number} too"
    if said := _rows(busiest, replicas):
        return said
    if len({each.name for each in gpus}) > 1:
        return f"GPU {gpu.number} is {gpu.name}: give it a smaller share"
    return None


def _rows(slowest: int, replicas: Sequence[ReplicaFigures]) -> str | None:
    """Return that its rows are why, if they alone make it a straggler."""
    rows = [replica.rows for replica in replicas]
    if not all(rows) or rows[slowest] < _SLOWER * _median_without(rows, slowest):
        return None
    return f"it has {rows[slowest]} of {sum(rows)} rows: change shares"


def _median_without(values: Sequence[float], index: int) -> float:
    """Return the median of the other values."""
    return statistics.median([value for i, value in enumerate(values) if i != index])
