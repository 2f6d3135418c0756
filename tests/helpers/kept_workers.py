"""Worker processes that several tests use one after the other.

A worker that has just started takes many times as long for its first step as for another: it maps memory, and imports
what its module needs. So each model has an engine of its own, as it must, but the workers are those of an earlier test,
as long as no test has ended them.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from unisono.engines.processes.engine import Processes
from unisono.engines.processes.worker_group import WorkerGroup


class KeptWorkers:
    def __init__(self) -> None:
        self._idle: dict[tuple[tuple[str, ...], bool], list[WorkerGroup]] = defaultdict(list)
        self._lent: list[tuple[WorkerGroup, list[WorkerGroup]]] = []

    def engine(self, devices: Sequence[str], share_memory: bool = True) -> Processes:
        """Return a new engine for replicas on these devices, with workers that are idle, or new ones."""
        idle = self._idle[tuple(devices), share_memory]
        group = idle.pop() if idle else WorkerGroup([*map(torch.device, devices)], share_memory)
        self._lent.append((group, idle))
        engine = Processes(share_memory=share_memory)
        engine._worker_group, group.num_in_sync = group, 0
        return engine

    def take_back(self) -> None:
        """Keep the workers of all engines that have been made: their models are used no more."""
        for group, idle in self._lent:
            if not (group.ended or group._awaited):
                idle.append(group)
        self._lent.clear()

    def end(self) -> None:
        for idle in self._idle.values():
            for group in idle:
                group.end(graceful=True)
