"""Which cores replicas on the CPU run on: disjoint parts of the process's own cores.

Cores that share memory and caches stay together: cores are ordered by NUMA node, then by physical core, so the two
hyperthreads of a core are neighbours. So a replica's threads run near each other and near the memory that they wrote,
and no logical core has two replicas.

Replicas are not bound where `UNISONO_BIND_CORES=0` is set, where the system has no such call (Linux has), and where
the machine has fewer cores than replicas.
"""

import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

_SWITCH = "UNISONO_BIND_CORES"
_SYSTEM = Path("/sys/devices/system")
_thread = threading.local()


def cores_per_replica(parts: int) -> list[tuple[int, ...]]:
    """Return the cores of each of `parts` replicas; where they are not divided, each has all of the caller's."""
    if not hasattr(os, "sched_getaffinity"):
        return [()] * parts
    allowed = frozenset(os.sched_getaffinity(0))
    if len(allowed) < parts or os.environ.get(_SWITCH, "1") == "0":
        return [tuple(sorted(allowed))] * parts
    return _divided(allowed, parts)


def bind(cores: Sequence[int]) -> None:
    """Run the calling thread, and threads that it starts from now on, on `cores` only; () changes nothing.

    Meant for threads and processes of our own: it is never undone.
    """
    if cores and tuple(cores) != getattr(_thread, "cores", None):
        os.sched_setaffinity(0, cores)
        _thread.cores = tuple(cores)


@functools.lru_cache(maxsize=64)
def _divided(allowed: frozenset[int], parts: int) -> list[tuple[int, ...]]:
    ordered = sorted(allowed, key=lambda core: (_node_of(core), _number(f"cpu/cpu{core}/topology/core_id"), core))
    each = len(ordered) // parts
    return [tuple(ordered[i * each : (i + 1) * each]) for i in range(parts)]


def _node_of(core: int) -> int:
    """Return the NUMA node of a core; 0 where there is only one, or it is unknown."""
    nodes = (_SYSTEM / f"cpu/cpu{core}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)


def _number(path: str) -> int:
    try:
        return int((_SYSTEM / path).read_text())
    except (OSError, ValueError):
        return 0
