"""The machine of a benchmark, in words that can be published: without names of hosts or users."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import unisono

_ALL_BUSY = 0.8  # the cores' mean load from which programs take time from each other
_TAKEN = 0.2  # of the cores, by other programs


def describe() -> dict[str, Any]:
    """Return processor, cores that this process may use, memory, system and versions."""
    return {
        "processor": processor(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".rstrip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "unisono": unisono.__version__,
    }


def in_one_line(machine: dict[str, Any]) -> str:
    """Return the description as a caption."""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, unisono {machine['unisono']}"
    )


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(usable_cores())


def other_programs(busy: float, own: float, cores: int) -> str | None:
    """Return in words that of the busy cores other programs than one's own take many; None if they do not.

    >>> other_programs(busy=2.0, own=1.2, cores=2)
    'other programs use 0.8 of 2 cores'
    """
    if not cores or busy < _ALL_BUSY * cores or busy - own < _TAKEN * cores:
        return None
    return f"other programs use {busy - own:.1f} of {cores} cores"


def no_verdict(disturbance: str) -> str:
    """Return what is said in the place of a conclusion where other programs have disturbed a measurement."""
    return (
        f"**No verdict**: {disturbance}, so do not rely on these figures. Measure again when those programs have ended."
    )


def processor() -> str:
    """Return the name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()
