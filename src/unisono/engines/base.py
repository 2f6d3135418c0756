"""The engine contract: run the replicas of one forward over their shards.

An engine returns the gathered output of one forward. The backward that belongs to it is part of that output's autograd
graph; nothing calls it. For inference it also gives lanes, one a device, each of which computes whole batches.
tests/contract/ is the contract's test suite, and runs over every engine.
"""

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from unisono.primitives.dims import OutputRules
from unisono.primitives.inputs import Arguments
from unisono.runtime.errors import ReplicaNames
from unisono.runtime.timeline import ReplicaTiming


@dataclass(frozen=True)
class Call:
    """One call of the module: the caller's inputs, and how their rows go to the replicas and come back.

    Attributes:
        arguments: the caller's inputs, not split yet.
        sizes: the number of rows of each replica, one a device in `devices`. Only a single replica may have 0.
        devices: the devices that have a share, in replica order.
        replica_numbers: the replicas' numbers in messages: their places in the wrapper's `device_ids`.
        source: the device of the live module's parameters.
        output_device, rules: where and how outputs are joined.
        part_rules: how the parts of a replica's shard are joined; None: by `rules`.
        method: the module's method that is called; None: the module itself.
        sync_batch_norm: whether batch norms in training see the rows of all replicas.
        sync_context: what this call counts for in sums of gradients over several processes (a `SyncContext` of
            distributed/gradient_sync.py); None: there are no such sums.
        parts: in how many parts each replica runs its shard.
        cross_process: a `CrossProcess`, which exchanges batch norm's statistics with other processes; None: they stay
            in this one.
        is_timed: whether a replica on an accelerator waits for its forward's end, so that `forward_s` is all of it.
    """

    arguments: Arguments
    sizes: tuple[int, ...]
    devices: Sequence[torch.device]
    replica_numbers: Sequence[int]
    source: torch.device
    output_device: torch.device
    rules: OutputRules
    part_rules: OutputRules | None = None
    method: str | None = None
    sync_batch_norm: bool = False
    parts: int = 1
    sync_context: Any = None
    cross_process: Any = None
    is_timed: bool = False

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


class Parts(NamedTuple):
    """How a replica runs its shard in parts, one after the other, so that it needs less memory.

    Attributes:
        sizes: the rows of each.
        axes: of each leaf of the inputs, the axis that holds the rows.
        rules: how outputs are joined.
    """

    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]
    rules: OutputRules


@dataclass(frozen=True)
class LaneCall:
    """The calls that lanes make, one a batch.

    Attributes:
        devices: one a lane.
        source, output_device, method: as in `Call`.
    """

    devices: Sequence[torch.device]
    source: torch.device
    output_device: torch.device
    method: str | None = None

    def where(self) -> ReplicaNames:
        """Return each replica's name in messages."""
        names = ReplicaNames([f"replica {i} on {device}" for i, device in enumerate(self.devices)])
        names.numbers, names.devices = range(len(names)), self.devices
        return names


@dataclass
class LaneOutput:
    """What a lane made of a batch.

    Attributes:
        value: the output, on the call's output device.
        drew: whether random numbers were drawn.
        wait: lets the calling thread's streams wait for the output; called before it is used.
    """

    value: Any
    drew: bool
    wait: Callable[[], None] = lambda: None


RunBatch: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], Any], LaneOutput]  # inputs, and a seed or None


class OneGraphNeededError(Exception):
    """The replicas have to be a part of the caller's graph: a hook keeps tensors of theirs for the caller.

    Raised before anything has run.
    """


class LaneEndedError(Exception):
    """A lane cannot take this batch, nor another; the batch is as it was."""


class Lane(abc.ABC):
    """One replica that computes whole batches, without gradients, one after the other.

    Every batch finds the module as it was when the lanes were opened: what an earlier one changed is undone.

    Attributes:
        call: the batches'.
        name: in messages.
        device: the replica's.
        number: of the replica.
        has_ended: whether it can compute no more: its process has died in the middle of a batch, or it is stuck.
        has_own_timeout: whether `run` itself raises `ReplicaTimeout`; else its caller notices, as far as it waits.
        left_unchanged: whether all batches of the first lane's last `run` or `in_a_row` have left the module unchanged.
        inputs_unchanged: if they have not, whether it is known that none has written into its inputs.
    """

    has_ended = has_own_timeout = False
    left_unchanged = inputs_unchanged = False

    def __init__(self, call: LaneCall, number: int) -> None:
        self.call, self.number, self.device = call, number, call.devices[number]
        self.name = f"replica {number} on {self.device}"

    def names(self) -> ReplicaNames:
        """Return its name as messages about several replicas have theirs."""
        names = ReplicaNames([self.name])
        names.numbers, names.devices = [self.number], [self.device]
        return names

    @abc.abstractmethod
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> LaneOutput:
        """Compute a batch. Called in a thread of the lane's own; the first lane's, also in the caller's.

        Args:
            args, kwargs: the inputs, on any devices.
            seed: of the random numbers; None: they come from the generators as they are.

        Raises:
            LaneEndedError: it cannot take the batch, nor another.
            BaseException: what the module raised.
        """

    def in_a_row(self) -> AbstractContextManager[RunBatch]:
        """Return the context in which the first lane computes several batches. At its end it looks at the module once.

        Its value is called as `run` is, with seeds.
        """
        raise NotImplementedError


class Lanes:
    """The open lanes of a map.

    Attributes:
        each: one a device.
        timeout_s: for how long the caller waits for a batch without progress; None: for ever.
    """

    def __init__(self, each: Sequence[Lane], timeout_s: float | None = None) -> None:
        self.each, self.timeout_s = list(each), timeout_s

    def stop(self) -> None:
        """Take note that no lane will be given another batch; some may still compute one. From any thread."""

    def close(self) -> None:
        """Give back what the lanes hold; called after `stop`, when none computes any more. From any thread."""
        self.each = []


def called(module: nn.Module, method: str | None) -> Callable[..., Any]:
    """Return what a call of `method` calls; None: the module itself, with its hooks."""
    return module if method is None else getattr(module, method)


class Engine(abc.ABC):
    """Runs replicas. An engine belongs to one wrapper; a deep-copied or unpickled wrapper has a new one like it.

    An engine whose constructor takes arguments defines `__reduce__`, so that it can be made anew with them.
    """

    _owner: "weakref.ref[nn.Module] | None" = None

    @abc.abstractmethod
    def forward(self, module: nn.Module, call: Call) -> Any:
        """Run `module` on every shard of `call` at once; return the gathered output, differentiable.

        Raises:
            OneGraphNeededError: the plain composition has to run instead.
            RuntimeError: parameters or buffers that are not on `call.source`, or that a replica reaches in a way
                that cannot be followed.
            BaseException: what a replica raised, the same object with a note. Then no buffer has changed.
        """

    @abc.abstractmethod
    def open_lanes(self, module: nn.Module, call: LaneCall) -> Lanes:
        """Return lanes on the devices of `call`, all with the module as it is now. Gradients are off.

        Until they are closed, forwards work as usual, and so do other lanes; either may be slower.

        Raises:
            RuntimeError: parameters or buffers that are not on `call.source`.
        """

    @abc.abstractmethod
    def timings(self) -> list[ReplicaTiming]:
        """Return what each replica did in the last step; an empty list before the first."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Forget what is known about the module; the next forward looks at all of it again."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the engine holds; a later forward starts again. May be called twice."""

    def check(self, devices: Sequence[torch.device], *, sync_batch_norm: bool) -> None:  # noqa: B027  nothing to refuse
        """Check that the engine can run replicas on these devices.

        Raises:
            ValueError: it cannot; says what was given and what to use instead.
        """

    @property
    def row_limits(self) -> Mapping[int, int]:
        """How many rows fit in a replica's memory, by its number, where that is known."""
        return {}

    @property
    def spans_processes(self) -> bool:
        """Whether several processes train the module together."""
        return False

    def gradient_sync(self, module: nn.Module) -> Any:
        """Return what sums the gradients of `module` over several processes; None if this process is alone."""
        return None

    def must_run(self, module: nn.Module) -> bool:
        """Return whether a forward must go through the engine even if the plain module would give the same output."""
        return False

    def why_no_verbs(self, module: nn.Module) -> str | None:
        """Return why the engine cannot call verbs that a subclass of `DataParallel` overrides; None if it can."""
        return None

    def claim(self, wrapper: nn.Module) -> None:
        """Take the engine for a wrapper; what it knew about the module of an earlier one is forgotten.

        Raises:
            ValueError: another wrapper has it.
        """
        if self._owner is not None and self._owner() is not None:
            raise ValueError(f"engine={self!r}: it belongs to another DataParallel; make an engine for each")
        if self._owner is not None:
            self.close()
            self.refresh()
        self._owner = weakref.ref(wrapper)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
