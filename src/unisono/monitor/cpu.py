"""The CPU: cores and threads that this process may use, limits of control groups (cgroups), memory, NUMA nodes.

Everything that the system does not say is None. The files are those of Linux; elsewhere there are fewer figures.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from unisono.bench import machine

_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of versions 2 and 1 of cgroups
_UNLIMITED_BYTES = 2**60  # version 1 has a number near 2**63 for "no limit"


@dataclass(frozen=True)
class Cpu:
    """The CPU as this process may use it."""

    processor: str  # its name
    cores: int  # logical cores of the machine
    allowed: int  # those that this process may run on
    physical: int | None  # physical cores among them; None if not known
    cgroup_cores: float | None  # how many cores' time the control group has; None without a limit
    memory_bytes: int | None  # of the machine
    available_bytes: int | None  # of these
    cgroup_memory_bytes: int | None  # the control group's limit; None without one
    intra_op_threads: int  # torch's
    omp_num_threads: str | None  # the variable; None if it is not set
    numa_nodes: dict[int, str]  # the cores of each NUMA node by its number; empty if not known

    @property
    def usable_cores(self) -> int:
        """How many threads can compute at once."""
        return self.allowed if self.cgroup_cores is None else max(1, min(self.allowed, math.ceil(self.cgroup_cores)))


def describe(root: Path = Path("/")) -> Cpu:
    """Return what is known about the CPU. (`root`: of the system's files, for tests.)"""
    memory = _memory(root)
    return Cpu(
        processor=machine.processor(),
        cores=os.cpu_count() or 1,
        allowed=machine.num_cores(),
        physical=_physical_cores(root),
        cgroup_cores=_cgroup_cores(root),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        cgroup_memory_bytes=_cgroup_memory(root),
        intra_op_threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        numa_nodes=_numa_nodes(root),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _memory(root: Path) -> dict[str, int]:
    """Return the figures of the machine's memory in bytes."""
    found = re.findall(r"(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _physical_cores(root: Path) -> int | None:
    """Return how many physical cores the allowed logical ones are parts of."""
    folders = [root / f"sys/devices/system/cpu/cpu{core}/topology" for core in machine.usable_cores()]
    parts = {(_read(folder / "physical_package_id"), _read(folder / "core_id")) for folder in folders}
    return None if any("" in part for part in parts) else len(parts)


def _numa_nodes(root: Path) -> dict[int, str]:
    folders = {int(path.name[4:]): path for path in (root / "sys/devices/system/node").glob("node[0-9]*")}
    return {number: _read(folder / "cpulist") for number, folder in sorted(folders.items())}


def _cgroup_cores(root: Path) -> float | None:
    limits = []
    for folder in _cgroup_folders(root, "cpu"):
        version_1 = [_read(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        quota, period = _read(folder / "cpu.max").split() or version_1
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", or no file
            limits.append(int(quota) / int(period))
    return min((limit for limit in limits if limit > 0), default=None)


def _cgroup_memory(root: Path) -> int | None:
    files = [folder / name for folder in _cgroup_folders(root, "memory") for name in _MEMORY_LIMITS]
    limits = [int(text) for text in map(_read, files) if text.isdecimal()]
    return min((limit for limit in limits if 0 < limit < _UNLIMITED_BYTES), default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group, then those of the groups that it is in, up to the top.

    Version 1 has folders of its own for each controller, "cpu" or "memory". Inside a container the path may be the
    host's, and only the top is there: other folders do not exist.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        inner = PurePosixPath(path.lstrip("/"))
        yield from (root / "sys/fs/cgroup" / controllers / folder for folder in (inner, *inner.parents))
