"""What the processes engine has of the system: shared mappings, file descriptors, worker processes."""

import gc
import os
from pathlib import Path

import psutil

from helpers.programs import until
from unisono.engines.processes import fork_server, worker_group


def of_this_process() -> tuple[int, int, int]:
    """Return how many shared mappings, descriptors and workers this process has."""
    mappings = Path("/proc/self/maps").read_text().count("memfd:unisono")
    return mappings, len(os.listdir("/proc/self/fd")), num_workers()


def num_workers() -> int:
    process = fork_server.server._process
    return len(psutil.Process(process.pid).children()) if process is not None else 0


def end_workers_of_earlier_tests() -> None:
    """End the workers of models that earlier tests have left, so that what a test leaves can be counted."""
    gc.collect()
    for group in list(worker_group._groups):
        group.end()
    assert until(lambda: num_workers() == 0)
