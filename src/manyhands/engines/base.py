"""The engine contract: run the replicas of one forward over their shards, and be closed.

An engine is asked for the gathered output of one forward. If it needs a backward, it is part of that output's graph;
nobody calls it. tests/contract is the contract's test suite, and runs over every engine.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.distributed.gradient_sync import SyncContext
from manyhands.primitives.dims import OutputRules
from manyhands.primitives.inputs import Arguments
from manyhands.runtime.thread_pool import ReplicaTiming
from manyhands.sync_batch_norm.across_processes import CrossProcessAllGather
from manyhands.sync_batch_norm.exchange import CrossProcess


@dataclass(frozen=True)
class Call:
    """One call of the module: the caller's inputs, and how their rows go to the replicas and come back.

    Attributes:
        arguments: the caller's inputs, not split yet.
        sizes: how many rows each replica gets, one a device in `devices`; only an only share can be 0.
        devices: the devices that have a share, in replica order.
        replica_numbers: what messages call them: their places in the wrapper's `device_ids`.
        source: the device on which the live module's parameters are.
        output_device, rules: where and how outputs are joined.
        method: the module's method that is called; None for the module itself.
        sync_batch_norm: whether batch norms in training see the rows of all replicas.
        sync_context: what the call counts for when gradients are summed over processes; None: they are not.
    """

    arguments: Arguments
    sizes: tuple[int, ...]
    devices: Sequence[torch.device]
    replica_numbers: Sequence[int]
    source: torch.device
    output_device: torch.device
    rules: OutputRules
    method: str | None = None
    sync_batch_norm: bool = False
    sync_context: SyncContext | None = None

    def where(self) -> list[str]:
        """Return how a message calls each replica: its number, its device and its rows."""
        places = []
        start, total = 0, sum(self.sizes)
        for number, device, size in zip(self.replica_numbers, self.devices, self.sizes, strict=True):
            rows = f"rows {start} to {start + size - 1} of {total}" if size else "no rows"
            places.append(f"replica {number} on {device}, {rows}")
            start += size
        return places


def called(module: nn.Module, method: str | None) -> Callable[..., Any]:
    """Return what a call of `method` (None: of the module itself, with its hooks) calls."""
    return module if method is None else getattr(module, method)


def cross_process_all_gather(call: Call) -> CrossProcess | None:
    """Return what takes batch norm's exchanges among the call's replicas to other processes; None if they stay here."""
    sync_context = call.sync_context
    if sync_context is None or not call.sync_batch_norm:
        return None
    return CrossProcessAllGather(sync_context.gradient_sync.cluster, call.source, sync_context.weight_of_loss)


class Engine(abc.ABC):
    """Runs replicas. An engine belongs to one wrapper and is made anew with each copy of it."""

    @abc.abstractmethod
    def forward(self, module: nn.Module, call: Call) -> Any:
        """Run `module` on every shard of `call` at once; return the gathered output, differentiable.

        Raises:
            RuntimeError: parameters or buffers that are not on `call.source`, or that a replica reaches in a way
                that cannot be followed.
            BaseException: what a replica raised, the same object with a note. Then no buffer has changed.
        """

    @abc.abstractmethod
    def timings(self) -> list[ReplicaTiming]:
        """Return what each replica did in the last step; an empty list before the first."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Take nothing for granted in the next forward of what is known about the module."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the engine holds; a later forward starts again. May be called twice."""

    def __reduce__(self) -> tuple[type["Engine"], tuple[()]]:
        return type(self), ()  # a copied or unpickled wrapper has an engine of its own, which has run nothing yet
