"""What runs on this machine at one moment: GPUs, cores, memory, and the replicas of every wrapper of this user."""

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from unisono.bench.processes import cpu_seconds, family
from unisono.monitor.nvml import Gpu, GpuReader
from unisono.monitor.report import printable
from unisono.monitor.stragglers import ReplicaFigures, Straggler, find
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
    replicas: tuple[ReplicaFigures, ...]
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
    notes: tuple[str, ...]  # processes that were killed, and what could not be read


class Sampler:
    """Takes samples, of the wrappers of all processes or of one; loads and means are of the time between them."""

    def __init__(self, reader: GpuReader, pid: int | None = None) -> None:
        self._reader, self._pid = reader, pid
        self._kept: dict[str, deque[Published]] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._notes: list[str] = []  # a killed process is noted once, when its file is removed
        self._taken_at = time.monotonic()
        self.take()  # the next one counts from here

    def take(self) -> Sample:
        """Return what is so now; wrappers that have stopped come last."""
        now = time.monotonic()
        elapsed_s, self._taken_at = max(now - self._taken_at, 1e-3), now
        gpus = tuple(self._reader.read())
        core_loads = tuple(percent / 100 for percent in psutil.cpu_percent(percpu=True))
        published, notes = read_all()
        self._notes += [note for note in map(printable, notes) if note not in self._notes]
        published = [each for each in published if self._pid in (None, each.pid)]
        self._kept = {each.name: self._kept.get(each.name, deque(maxlen=_KEPT)) for each in published}
        before, self._cpu_seconds = self._cpu_seconds, {}
        wrappers = []
        for each in published:
            kept = self._kept[each.name]
            if not kept or kept[-1].steps != each.steps:
                kept.append(each)
            command, pids, seconds = _process(each.pid)
            self._cpu_seconds[each.pid] = seconds
            # If it is not known yet how many cores are its own, all are.
            own_cores = max(seconds - before[each.pid], 0) / elapsed_s if each.pid in before else sum(core_loads)
            step_s = statistics.median(one.step_s for one in kept)  # the first may have started workers
            age_s = max(time.time() - each.published_at, 0.0)
            has_stopped = age_s > max(_STOPPED_STEPS * step_s, _STOPPED_S)
            replicas = tuple(_replicas(kept, gpus))
            straggler = None if has_stopped else find(replicas, step_s, gpus, pids, core_loads, own_cores)
            names = (printable(each.module), printable(each.engine))
            wrappers.append(
                Wrapper(each.pid, command, *names, each.steps, step_s, age_s, has_stopped, replicas, straggler)
            )
        wrappers.sort(key=lambda wrapper: wrapper.has_stopped)
        memory = psutil.virtual_memory()
        used_bytes = memory.total - memory.available
        found = (tuple(wrappers), self._pid, tuple(self._notes))
        return Sample(time.time(), gpus, core_loads, used_bytes, memory.total, *found)


def _replicas(kept: Sequence[Published], gpus: Sequence[Gpu]) -> Iterator[ReplicaFigures]:
    """Yield the replicas in the mean of the last steps that had the same rows, with how long each waits for the others.

    On the host a replica waits at the end of forward, and of backward, for the slowest one. On accelerators their times
    are those of queuing work, but the driver knows the load: a GPU waits while it is idle beyond the busiest one.
    """
    last = kept[-1]
    layout = [(replica.device, replica.rows) for replica in last.replicas]
    same = [each for each in kept if [(replica.device, replica.rows) for replica in each.replicas] == layout]
    means = [_mean_times(of) for of in zip(*(each.replicas for each in same), strict=True)]
    slowest_s = sum(map(max, zip(*filter(None, means), strict=True)))
    on = [next((gpu for gpu in gpus if replica.pci and gpu.pci == replica.pci), None) for replica in last.replicas]
    most_load = max((gpu.load for gpu in on if gpu is not None and gpu.load is not None), default=0.0)
    total = sum(replica.rows for replica in last.replicas)
    for replica, gpu, mean in zip(last.replicas, on, means, strict=True):
        wait_s = None if mean is None else slowest_s - sum(mean)
        if gpu is not None and gpu.load is not None:
            wait_s = (most_load - gpu.load) * last.step_s
        number, share = None if gpu is None else gpu.number, replica.rows / total if total else None
        forward_s, backward_s = mean or (None, None)
        device = printable(replica.device)
        yield ReplicaFigures(replica.number, device, number, replica.rows, share, forward_s, backward_s, wait_s)


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
