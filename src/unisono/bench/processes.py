"""Processes with those that they have started: their memory and their time. It needs psutil."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from unisono.bench.machine import usable_cores


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """Return these processes and all that descend from them; those that have ended are left out."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def is_running(pid: int) -> bool:
    """Return whether there is a process of this number that has not ended."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def memory_kind() -> str:
    """Return what `memory_bytes` sums on this system.

    The proportional set size (PSS) counts a page that several processes share once in all. Linux has it. Elsewhere it
    is the resident set size (RSS), which counts such a page once for each process.
    """
    return "PSS" if hasattr(psutil.Process().memory_full_info(), "pss") else "RSS"


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the memory of processes together."""
    memories = _each(processes, psutil.Process.memory_full_info)
    return sum(getattr(memory, "pss", memory.rss) for memory in memories)


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the time that processes have computed so far, together."""
    return float(sum(times.user + times.system for times in _each(processes, psutil.Process.cpu_times)))


def busy_seconds() -> float:
    """Return the time so far in which the cores that this process may use were busy, summed over them."""
    each = psutil.cpu_times(percpu=True)
    mine = [each[core] for core in usable_cores() if core < len(each)] or each
    idle = [times.idle + getattr(times, "iowait", 0.0) for times in mine]
    twice = [getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0) for times in mine]  # in `user`, too
    return float(sum(map(sum, mine)) - sum(idle) - sum(twice))


def _each(processes: Iterable[psutil.Process], ask: Callable[[psutil.Process], Any]) -> list[Any]:
    """Return what each process says; one that has ended says nothing."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(ask(process))
    return found
