"""What runs on this machine at one moment: GPUs, cores, memory, and the replicas of every wrapper of this user."""

import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from unisono.bench.processes import cpu_seconds, family
from unisono.monitor.nvml import Gpu, GpuReader
from unisono.monitor.report import printable
from unisono.monitor.stragglers import Replica, Straggler, find
from unisono.runtime.step_status import Published, ReplicaStatus, read_all

_KEPT = 5  # publications whose mean is shown
_STOPPED_STEPS, _STOPPED_S = 10, 10.0  # a wrapper without a step for longer than both has stopped


@dataclass(frozen=True)
class Wrapper:
    """A wrapper of this user that runs."""

    pid: int
    command: str  # of its process
    module: str  # this and the next three are what it published
    engine: str
    steps: int
    step_s: float
    age_s: float  # seconds since it published a step
    has_stopped: bool  # whether that is so long that no step runs; its replicas are those of the last one
    replicas: tuple[Replica, ...]
    straggler: Straggler | None  # None, too, if it has stopped: no replica waits for another one


@dataclass(frozen=True)
class Sample:
    """One moment."""

    at: float  # seconds since 1970
    gpus: tuple[Gpu, ...]
    core_loads: tuple[float, ...]  # of each core of the machine, from 0 to 1, since the sample before
    memory_used_bytes: int
    memory_bytes: int
    wrappers: tuple[Wrapper, ...]
    pid: int | None  # of the only process whose wrappers are wanted; None: all
    problems: tuple[str, ...]  # what could not be read


class Sampler:
    """Takes samples, one after the other; loads and means are of the time between them.

    Args:
        reader: of NVIDIA's GPUs.
        pid: of the only process whose wrappers are wanted; None: all.
    """

    def __init__(self, reader: GpuReader, pid: int | None = None) -> None:
        self._reader, self._pid = reader, pid
        self._published: dict[str, deque[Published]] = {}
        self._cpu_seconds = {each.pid: _process(each.pid)[2] for each in self._read()[0]}
        self._taken_at = time.monotonic()
        psutil.cpu_percent(percpu=True)  # the first one counts from here

    def take(self) -> Sample:
        """Return what is so now; wrappers that have stopped come last."""
        now = time.monotonic()
        elapsed_s, self._taken_at = max(now - self._taken_at, 1e-3), now
        gpus = tuple(self._reader.read())
        core_loads = tuple(percent / 100 for percent in psutil.cpu_percent(percpu=True))
        memory = psutil.virtual_memory()
        published, problems = self._read()
        self._published = {each.name: self._published.get(each.name, deque(maxlen=_KEPT)) for each in published}
        before, self._cpu_seconds = self._cpu_seconds, {}
        wrappers = []
        for each in published:
            kept = self._published[each.name]
            if not kept or kept[-1].steps != each.steps:
                kept.append(each)
            command, pids, cpu_seconds = _process(each.pid)
            self._cpu_seconds[each.pid] = cpu_seconds
            own_cores = sum(core_loads)  # if it is not known yet
            if each.pid in before:
                own_cores = max(cpu_seconds - before[each.pid], 0) / elapsed_s
            wrapper = _wrapper(kept, command, gpus)
            if not wrapper.has_stopped:
                straggler = find(wrapper.replicas, gpus, pids, core_loads, own_cores)
                wrapper = replace(wrapper, straggler=straggler)
            wrappers.append(wrapper)
        wrappers.sort(key=lambda wrapper: wrapper.has_stopped)
        used_bytes = memory.total - memory.available
        found = (tuple(wrappers), self._pid, tuple(problems))
        return Sample(time.time(), gpus, core_loads, used_bytes, memory.total, *found)

    def _read(self) -> tuple[list[Published], list[str]]:
        published, problems = read_all()
        return [each for each in published if self._pid in (None, each.pid)], problems


def _wrapper(kept: Sequence[Published], command: str, gpus: Sequence[Gpu]) -> Wrapper:
    last = kept[-1]
    same = [each for each in kept if _layout(each) == _layout(last)]  # a last batch may be shorter
    step_s = statistics.median(each.step_s for each in kept)  # the first may have started workers
    age_s = max(time.time() - last.published_at, 0.0)
    return Wrapper(
        pid=last.pid,
        command=command,
        module=printable(last.module),
        engine=printable(last.engine),
        steps=last.steps,
        step_s=step_s,
        age_s=age_s,
        has_stopped=age_s > max(_STOPPED_STEPS * step_s, _STOPPED_S),
        replicas=_replicas(same, gpus),
        straggler=None,
    )


def _layout(status: Published) -> list[tuple[str, int]]:
    return [(replica.device, replica.rows) for replica in status.replicas]


def _replicas(steps: Sequence[Published], gpus: Sequence[Gpu]) -> tuple[Replica, ...]:
    """Return the replicas in the mean of several steps, with how long each waits for the others.

    On the host a replica waits at the end of forward, and of backward, for the slowest one. On accelerators their times
    are those of queuing work, but the driver knows the load: a GPU waits while it is idle beyond the busiest one.
    """
    of_replicas = [*zip(*[each.replicas for each in steps], strict=True)]
    total = sum(of[-1].rows for of in of_replicas)
    on = [next((gpu for gpu in gpus if of[-1].pci and gpu.pci == of[-1].pci), None) for of in of_replicas]
    most_load = max((gpu.load for gpu in on if gpu is not None and gpu.load is not None), default=0.0)
    times = [_mean_times(of) for of in of_replicas]
    slowest_s = sum(map(max, zip(*filter(None, times), strict=True)))
    found: list[Replica] = []
    for of, gpu, time_s in zip(of_replicas, on, times, strict=True):
        last = of[-1]
        wait_s = None if time_s is None else slowest_s - sum(time_s)
        if gpu is not None and gpu.load is not None:
            wait_s = (most_load - gpu.load) * steps[-1].step_s
        number, share = None if gpu is None else gpu.number, last.rows / total if total else None
        device = printable(last.device)
        forward_s, backward_s = time_s or (None, None)
        found.append(Replica(last.number, device, number, last.rows, share, forward_s, backward_s, wait_s))
    return tuple(found)


def _mean_times(of: Sequence[ReplicaStatus]) -> tuple[float, float] | None:
    """Return how long a replica's forward and backward take, in the mean of its steps; None if that is not known."""
    if not of[-1].on_host or of[-1].forward_s <= 0:
        return None
    return statistics.mean(each.forward_s for each in of), statistics.mean(each.backward_s for each in of)


def _process(pid: int) -> tuple[str, list[int], float]:
    """Return a process's command, the numbers of it and of those that it has started, and their CPU time in seconds."""
    processes = family([pid])
    try:
        words = processes[0].cmdline() or [processes[0].name()]
    except (IndexError, psutil.Error):  # it has ended meanwhile
        return "", [pid], 0.0
    command = " ".join([os.path.basename(words[0]), *words[1:]])
    return printable(command), [each.pid for each in processes], cpu_seconds(processes)
