"""The machine of a benchmark, in words that can be published: without names of hosts or users."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import unisono


def describe() -> dict[str, Any]:
    """Return processor, cores that this process may use, memory, system and versions."""
    return {
        "processor": _processor(),
        "cores": num_cores(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".rstrip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "unisono": unisono.__version__,
    }


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_one_line(machine: dict[str, Any]) -> str:
    """Return the description as a caption."""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, unisono {machine['unisono']}"
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.processor() or platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
