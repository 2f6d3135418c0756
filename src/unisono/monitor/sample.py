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
        return Sample(time.time(), gpus, core_loads, used_bytes, memory.total, tuple(wrappers), tuple(problems))

    def _read(self) -> tuple[list[Published], list[str]]:
        published, problems = read_all()
        return [each for each in published if self._pid in (None, each.pid)], problems


def _wrapper(kept: Sequence[Published], command: str, gpus: Sequence[Gpu]) -> Wrapper:
    last = kept[-1]
    same = [each for each in kept if _layout(each) == _layout(last)]  # a last batch may be shorter
    replicas = _with_waits([_replica(of, gpus) for of in zip(*[each.replicas for each in same], strict=True)])
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
        replicas=tuple(_with_waits_by_load(replicas, gpus, last.step_s)),
        straggler=None,
    )


def _layout(status: Published) -> list[tuple[str, int]]:
    return [(replica.device, replica.rows) for replica in status.replicas]


def _replica(of: Sequence[ReplicaStatus], gpus: Sequence[Gpu]) -> Replica:
    """Return a replica in the mean of several steps; its share and waits are not known yet."""
    last = of[-1]
    is_timed = last.on_host and last.forward_s > 0
    return Replica(
        number=last.number,
        device=printable(last.device),
        gpu=next((gpu.number for gpu in gpus if last.pci and gpu.pci == last.pci), None),
        rows=last.rows,
        share=None,
        forward_s=statistics.mean(each.forward_s for each in of) if is_timed else None,
        backward_s=statistics.mean(each.backward_s for each in of) if is_timed else None,
        wait_s=None,
    )


def _with_waits(replicas: Sequence[Replica]) -> list[Replica]:
    """Fill in shares, and how long each replica waits at the end of forward and of backward for the slowest."""
    total = sum(replica.rows for replica in replicas)
    timed = [replica for replica in replicas if replica.forward_s is not None and replica.backward_s is not None]
    forward_s = max((replica.forward_s or 0.0 for replica in timed), default=0.0)
    backward_s = max((replica.backward_s or 0.0 for replica in timed), default=0.0)
    shares = [replace(replica, share=replica.rows / total if total else None) for replica in replicas]
    return [
        replica if replica.compute_s is None else replace(replica, wait_s=forward_s + backward_s - replica.compute_s)
        for replica in shares
    ]


def _with_waits_by_load(replicas: Sequence[Replica], gpus: Sequence[Gpu], step_s: float) -> list[Replica]:
    """Fill in waits on GPUs: the times of their replicas are those of queuing work, but the driver knows the load."""
    load_of = {gpu.number: gpu.load for gpu in gpus if gpu.load is not None}
    loads = [load_of.get(replica.gpu) if replica.gpu is not None else None for replica in replicas]
    most = max((load for load in loads if load is not None), default=0.0)
    return [
        replica if load is None else replace(replica, wait_s=(most - load) * step_s)
        for replica, load in zip(replicas, loads, strict=True)
    ]


def _process(pid: int) -> tuple[str, list[int], float]:
    """Return a process's command, the numbers of it and of those that it has started, and their CPU time in seconds."""
    processes = family([pid])
    try:
        words = processes[0].cmdline() or [processes[0].name()]
    except (IndexError, psutil.Error):  # it has ended meanwhile
        return "", [pid], 0.0
    command = " ".join([os.path.basename(words[0]), *words[1:]])
    return printable(command), [each.pid for each in processes], cpu_seconds(processes)
