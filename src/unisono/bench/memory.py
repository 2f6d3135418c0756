"""The memory of a contender: of its processes, and of those that they have started.

The proportional set size (PSS) counts a page that several processes share once in all, so shared memory of the workers
is counted once. Linux reports it (/proc/*/smaps_rollup). Elsewhere the resident set sizes (RSS) are summed, which count
shared pages once for each process.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from unisono.bench.contender_processes import ContenderProcesses

_SAMPLE_EVERY_S = 0.02
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def kind() -> str:
    """Return what this machine reports: PSS or RSS."""
    return "RSS" if _pss(psutil.Process().pid) is None else "PSS"


def peak(processes: ContenderProcesses, num_steps: int) -> int:
    """Return the peak memory of a contender during some steps, in bytes, sampled."""
    most = 0
    processes.begin_turn(0, num_steps)
    while True:
        over = processes.has_reply(_SAMPLE_EVERY_S)
        most = max(most, total(processes.process_ids))
        if over:
            processes.end_turn()
            return most


def total(roots: Iterable[int]) -> int:
    """Return the bytes of these processes and of all their descendants."""
    pids = set(roots)
    for root in list(pids):
        try:
            pids.update(child.pid for child in psutil.Process(root).children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return sum(map(_bytes_of, pids))


def _bytes_of(pid: int) -> int:
    pss = _pss(pid)
    if pss is not None:
        return pss
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _pss(pid: int) -> int | None:
    try:
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
