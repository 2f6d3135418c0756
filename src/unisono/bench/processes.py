"""Processes with those that they have started: their memory and their time. It needs psutil."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from unisono.bench.machine import usable_cores

# What `memory_bytes` sums. The proportional set size (PSS), which Linux has, counts a page that several processes share
# once in all; the resident set size (RSS) counts it once for each.
MEMORY_KIND = "PSS" if psutil.LINUX else "RSS"


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """Return these processes and all that descend from them; those that have ended are left out."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the memory of processes together."""
    memories = _each(processes, psutil.Process.memory_full_info)
    return sum(getattr(memory, "pss", memory.rss) for memory in memories)


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the time that processes have computed so far, together."""
    return float(sum(times.user + times.system for times in _each(processes, psutil.Process.cpu_times)))


def busy_cores() -> float:
    """Return how many of the cores that this process may use were busy since the call before, on average."""
    percent = psutil.cpu_percent(percpu=True)
    return float(sum(percent[core] for core in usable_cores() if core < len(percent)) / 100)


def _each(processes: Iterable[psutil.Process], ask: Callable[[psutil.Process], Any]) -> list[Any]:
    """Return what each process says; one that has ended says nothing."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(ask(process))
    return found
