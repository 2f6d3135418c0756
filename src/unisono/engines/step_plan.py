"""The plan of a step: what follows from its kind alone, found once, and then run by each step of that kind.

A kind is the module as it is, the method, the options, torch's grad mode, and of the inputs the tree, types, flags and
rows. Other sizes do not matter: texts of any length have one plan. The first steps of a structure look for more than
later ones do (first_steps.py), so their plans are not kept. A plan holds no input, no replica and no graph.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from unisono.engines.compiled_modules import check_cuda_graphs
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.blueprint import Blueprint, warn_of_observers
from unisono.primitives.dims import OutputRules
from unisono.primitives.scatter import Arguments, Flags
from unisono.primitives.split_sizes import split_rows
from unisono.primitives.visitor import INERT
from unisono.runtime import devices as _devices
from unisono.runtime.errors import ReplicaNames
from unisono.runtime.model_warnings import ModelWarnings
from unisono.runtime.streams import Copies

_CUDA_GRAPHS = (
    'the module is compiled with CUDA graphs (torch.compile(mode="reduce-overhead" or "max-autotune")): a '
    "graph has one fixed input and output, which replicas cannot share. Compile it in another mode "
    '(mode="max-autotune-no-cudagraphs", or none), or wrap it for one device, DataParallel(model, [0]).'
)
_MOST_PLANS = 8
_CARRIES_NOTHING = INERT | {torch.Tensor}


@dataclass(frozen=True)
class StepPlan:
    """How the steps of one kind run."""

    method: str | None  # the module's method that is called; None: the module itself
    # Of the inputs, leaf by leaf, as `Arguments` has them.
    flags: Flags
    axes: tuple[int | None, ...]
    rows: int | None
    # The number of rows of each replica, one a device in `devices`. Only a single replica may have 0.
    sizes: tuple[int, ...]
    devices: tuple[torch.device, ...]  # the devices that have a share, in replica order
    replica_numbers: tuple[int, ...]  # the replicas' numbers in messages: their places in the wrapper's `device_ids`
    source: torch.device  # the device of the live module's parameters
    output_device: torch.device  # where outputs are joined
    rules: OutputRules  # how they are joined
    part_rules: OutputRules  # how the parts of a replica's shard are joined
    sync_batch_norm: bool | None  # whether batch norms in training see the rows of all replicas; None: not said
    parts: int  # in how many parts each replica runs its shard
    rescue: bool  # whether the step is run again, in parts, where a replica runs out of memory
    timeout_s: float | None  # for how long a wait for a replica may make no progress; None: for ever
    # Whether a replica on an accelerator waits for its forward's end, so that its time is all of it.
    is_timed: bool
    kernel_graphs: bool  # whether the replicas' kernels may be launched as graphs (graphed.py)
    # Whether the only replica's graph may be a part of the caller's (autograd/callers_graph.py).
    may_be_in_callers_graph: bool
    has_several: bool  # whether the module, or a part of it, runs several times
    # Whether an input is an object of an unknown class. Every replica gets the same object, in which the next step may
    # find other tensors.
    carries_objects: bool
    structure: Hashable  # equal for steps that build the same graph, as far as modules and inputs tell
    # By which first steps are counted: the structure. A wrapper inside a replica has a new pool in each step: there it
    # is what stays equal.
    counts_as: Hashable
    is_early: bool  # whether this is one of the first steps

    @cached_property
    def sizes_of_runs(self) -> list[int]:
        """The number of rows of each run of the module: a replica that runs its shard in parts has several."""
        if self.parts == 1:
            return [*self.sizes]
        return [rows for size in self.sizes for rows in split_rows(size, max(1, min(self.parts, size)), "even")]

    @cached_property
    def devices_of_runs(self) -> list[torch.device]:
        """The device of each run of the module."""
        of_replicas = zip(self.devices, self.sizes, strict=True)
        return [device for device, size in of_replicas for _ in range(max(1, min(self.parts, size)))]

    @cached_property
    def has_one_replica(self) -> bool:
        """Whether there is one replica."""
        return len(self.devices) == 1

    @cached_property
    def on_host(self) -> bool:
        """Whether all replicas compute on the host."""
        return _devices.all_on_host(self.devices)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether all replicas are on the CPU."""
        return _devices.are_cpu(self.devices)

    @cached_property
    def copies_on_host(self) -> Copies | None:
        """The copies of each step where one replica computes on the host, which keep nothing; else None."""
        return Copies(self.devices) if self.on_host and self.has_one_replica else None

    @cached_property
    def names(self) -> ReplicaNames:
        """Each replica's name in messages: its number, its device and its rows."""
        names = ReplicaNames()
        names.numbers, names.devices = self.replica_numbers, self.devices
        start, total = 0, sum(self.sizes)
        for number, device, size in zip(self.replica_numbers, self.devices, self.sizes, strict=True):
            rows = "no rows" if not size else f"row {start}" if size == 1 else f"rows {start} to {start + size - 1}"
            rows += f" of {total}" if size else ""
            names.append(f"replica {number} on {device}, {rows}")
            start += size
        return names

    @cached_property
    def runs_whole(self) -> bool:
        """Whether each replica runs once, so that it may write as the module does."""
        return self.parts == 1 and not self.rescue


@dataclass(slots=True)  # not frozen: it would take three times as long to make
class Call:
    """One call of the module, which runs by its plan."""

    plan: StepPlan
    arguments: Arguments  # the caller's inputs, not split yet
    # What this call counts for in sums of gradients over several processes (a `SyncContext` of
    # distributed/gradient_sync.py); None: there are no such sums.
    sync_context: Any = None
    # A `CrossProcess`, which exchanges batch norm's statistics with other processes; None: they stay in this one.
    cross_process: Any = None


def called(module: nn.Module, method: str | None) -> Callable[..., Any]:
    """Return what a call of `method` calls; None: the module itself, with its hooks."""
    return module if method is None else getattr(module, method)


def carries_objects(arguments: Arguments) -> bool:
    """Return whether inputs hold objects of unknown classes."""
    others = [leaf for leaf in arguments.leaves if type(leaf) not in _CARRIES_NOTHING]
    return any(not isinstance(leaf, torch.Tensor) and batch_type_of(leaf) is None for leaf in others)


def check_replicas(plan: StepPlan, blueprint: Blueprint, warnings: ModelWarnings) -> None:
    """Look at what the replicas of a module cannot do together.

    Raises:
        RuntimeError: replay CUDA graphs.
    """
    warn_of_observers(blueprint, plan.devices_of_runs, warnings)
    if not plan.has_one_replica:
        check_cuda_graphs(blueprint, plan.devices, _CUDA_GRAPHS)


def keep_plan(plans: dict[Hashable, StepPlan], kind: Hashable, plan: StepPlan) -> None:
    """Keep the plan of a kind; of too many, the oldest goes."""
    if len(plans) >= _MOST_PLANS:
        plans.pop(next(iter(plans)), None)
    plans[kind] = plan
