"""One call of the module, as it is handed on to what runs the replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.primitives.dims import OutputRules
from unisono.primitives.inputs import Arguments
from unisono.primitives.split_sizes import split_rows
from unisono.runtime.errors import ReplicaNames


@dataclass(frozen=True)
class Call:
    """One call of the module: the caller's inputs, and how their rows go to the replicas and come back."""

    arguments: Arguments  # the caller's inputs, not split yet
    # The number of rows of each replica, one a device in `devices`. Only a single replica may have 0.
    sizes: tuple[int, ...]
    devices: Sequence[torch.device]  # the devices that have a share, in replica order
    replica_numbers: Sequence[int]  # the replicas' numbers in messages: their places in the wrapper's `device_ids`
    source: torch.device  # the device of the live module's parameters
    # Where and how outputs are joined.
    output_device: torch.device
    rules: OutputRules
    part_rules: OutputRules | None = None  # how the parts of a replica's shard are joined; None: by `rules`
    method: str | None = None  # the module's method that is called; None: the module itself
    sync_batch_norm: bool | None = None  # whether batch norms in training see the rows of all replicas; None: not said
    parts: int = 1  # in how many parts each replica runs its shard
    rescue: bool = False  # whether the step is run again, in parts, where a replica runs out of memory
    timeout_s: float | None = None  # for how long a wait for a replica may make no progress; None: for ever
    # What this call counts for in sums of gradients over several processes (a `SyncContext` of
    # distributed/gradient_sync.py); None: there are no such sums.
    sync_context: Any = None
    in_one_graph: bool = False  # whether the only replica's graph may be a part of the caller's (autograd/one_graph.py)
    # A `CrossProcess`, which exchanges batch norm's statistics with other processes; None: they stay in this one.
    cross_process: Any = None
    # Whether a replica on an accelerator waits for its forward's end, so that `forward_s` is all of it.
    is_timed: bool = False

    @property
    def sizes_of_runs(self) -> list[int]:
        """The number of rows of each run of the module: a replica that runs its shard in parts has several."""
        if self.parts == 1:
            return [*self.sizes]
        return [rows for size in self.sizes for rows in split_rows(size, max(1, min(self.parts, size)), "even")]

    @property
    def devices_of_runs(self) -> list[torch.device]:
        """The device of each run of the module."""
        of_replicas = zip(self.devices, self.sizes, strict=True)
        return [device for device, size in of_replicas for _ in range(max(1, min(self.parts, size)))]

    def where(self) -> ReplicaNames:
        """Return each replica's name in messages: its number, its device and its rows."""
        places = ReplicaNames()
        places.numbers, places.devices = self.replica_numbers, self.devices
        start, total = 0, sum(self.sizes)
        for number, device, size in zip(self.replica_numbers, self.devices, self.sizes, strict=True):
            rows = "no rows" if not size else f"row {start}" if size == 1 else f"rows {start} to {start + size - 1}"
            rows += f" of {total}" if size else ""
            places.append(f"replica {number} on {device}, {rows}")
            start += size
        return places


class OneGraphNeededError(Exception):
    """The replicas have to be a part of the caller's graph: a hook keeps tensors of theirs for the caller.

    Raised before anything has run.
    """


def called(module: nn.Module, method: str | None) -> Callable[..., Any]:
    """Return what a call of `method` calls; None: the module itself, with its hooks."""
    return module if method is None else getattr(module, method)
