"""What runs on this machine at one moment: GPUs, cores, memory, and the processes that use them. It needs psutil."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from unisono.monitor.nvml import Gpu, GpuReader
from unisono.monitor.report import printable
from unisono.runtime import devices

_LEAST_CORES = 0.1  # a process without a GPU that uses less is left out


@dataclass(frozen=True)
class Process:
    """A process that computes on a GPU or keeps a core busy; None where the system does not know its number."""

    pid: int
    user: str | None = None
    cores: float | None = None  # that it kept busy since the sample before
    memory_bytes: int | None = None  # of the machine's (its resident set)
    command: str | None = None


@dataclass(frozen=True)
class Sample:
    """One moment."""

    at: float  # seconds since 1970
    gpus: tuple[Gpu, ...]
    gpus_unread: str | None  # why `gpus` is empty although torch has accelerators
    core_loads: tuple[float, ...]  # of each core of the machine, from 0 to 1, since the sample before
    memory_used_bytes: int
    memory_bytes: int
    processes: tuple[Process, ...]  # those on GPUs first, then the busiest


class Sampler:
    """Takes samples; loads are of the time between them."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader
        self._gpus_unread = reader.problem if reader.problem and devices.accelerators() else None
        self.take()  # the next one counts from here

    def take(self) -> Sample:
        """Return what is so now."""
        gpus = tuple(self._reader.read())
        core_loads = tuple(percent / 100 for percent in psutil.cpu_percent(percpu=True))
        memory = psutil.virtual_memory()
        used_bytes = memory.total - memory.available
        on_gpus = {process.pid for gpu in gpus for process in gpu.processes}
        found = {process.pid: process for process in _processes(on_gpus)}
        listed = [found.get(pid, Process(pid)) for pid in on_gpus] + [found[pid] for pid in found.keys() - on_gpus]
        listed.sort(key=lambda process: (process.pid not in on_gpus, -(process.cores or 0.0), process.pid))
        return Sample(time.time(), gpus, self._gpus_unread, core_loads, used_bytes, memory.total, tuple(listed))


def _processes(wanted: set[int]) -> Iterator[Process]:
    """Yield the processes of these numbers, and those that keep cores busy."""
    for process in psutil.process_iter():  # each is the same object every time, and knows its times of the time before
        try:
            cores = process.cpu_percent() / 100
            if cores < _LEAST_CORES and process.pid not in wanted:
                continue
            facts = process.as_dict(["username", "memory_info", "cmdline", "name"])  # None for what it may not know
        except psutil.Error:  # it has ended meanwhile, or belongs to someone else
            continue
        words = facts["cmdline"] or [facts["name"] or ""]
        command = printable(" ".join([os.path.basename(words[0]), *words[1:]]))
        memory_bytes = facts["memory_info"] and facts["memory_info"].rss
        yield Process(process.pid, facts["username"] and printable(facts["username"]), cores, memory_bytes, command)
