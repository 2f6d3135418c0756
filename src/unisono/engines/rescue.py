"""Running a step again, in smaller parts, where a replica ran out of memory: `rescue=True`.

A forward that fails has changed nothing, so it is run again as it was called. A backward that fails leaves the graphs
of its forward half used. So a forward whose backward may have to be run again keeps what it began with (`Replay`),
until its graphs are released: the inputs, the random state, the buffers, the module's attributes and the state of the
caller's thread. From these its graphs are made anew, and then the backward runs again. All replicas run again, at once:
that takes no longer than one of them would, and their sums begin anew, too.

The replica that ran out of memory then runs its shard in parts of half as many rows (parts.py). How many rows fit in
each replica's memory, by its number, is remembered in `row_limits`, which belongs to the model's `StepMemory`. The log
says each time why a step was run again, and what that took.

Assumes that forward has no effects outside the module: they happen twice. The random numbers of `random` and `numpy`
are not repeated.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, compress
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from unisono.autograd.replica_graph import ReplicaGraphs
from unisono.engines.parts import NO_PARTS, why_no_parts
from unisono.engines.step_plan import Call, StepPlan
from unisono.leftovers.buffers import unchanged_on_failure, write_values
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.change_tracking import fill, restore
from unisono.runtime import devices as _devices
from unisono.runtime.errors import add_note, described, log, notes_of
from unisono.runtime.streams import current_streams_of, wait_for_makers
from unisono.runtime.thread_state import ThreadState
from unisono.runtime.torch_private import checkpoints, foreach, modes

T = TypeVar("T")
_requires_grad = attrgetter("requires_grad")

_CHANGED = (
    "the step was not rerun: {number} parameters changed between forward and backward (an optimizer step, or "
    "requires_grad), so forward would give other outputs"
)
_AGAIN = "%s\nThe step was rerun, which took %.2f s."
_OTHER_IN_PARTS = (
    "a replica on the same device as %s ran out of memory with a single row. From now on this replica runs "
    "its %d rows in parts of at most %d rows, and recomputes each part in backward. To give it fewer rows, "
    "use shares=."
)
_IN_PARTS = (
    "%s ran out of memory with %d rows. From now on it runs them in parts of at most %d rows, and recomputes "
    "each part in backward. To give it fewer rows, use shares=."
)


def run_rescued(
    row_limits: dict[int, int],
    plan: StepPlan,
    module: nn.Module,
    run: Callable[[bool], T],
    why_not: Callable[[], str | None] = lambda: None,
) -> T:
    """Run a forward or a backward, again after each time that a replica has run out of memory.

    Args:
        row_limits: how many rows fit in each replica's memory, by its number, as far as that is known; lowered here.
        run: is told whether it has failed before.
        why_not: tells why it cannot be run again, if that is so.
    """
    checkpoints.load_checkpoints()  # as long as there is memory
    causes: list[str] = []
    failed_at = 0.0
    while True:
        if causes:
            _devices.free_cached_memory()
        try:
            result = run(bool(causes))
        except Exception as error:
            if not _devices.is_out_of_memory(error):
                raise
            if reason := why_not() or _lower_limits(row_limits, plan, module, error):
                add_note(error, reason)
                raise
            failed_at = failed_at or time.perf_counter()
            causes.append(described(error))
        else:
            if causes:
                log.warning(_AGAIN, "\n".join(causes), time.perf_counter() - failed_at)
            return result


class Replay:
    """What a forward began with, and how to make its graphs anew.

    Args:
        row_limits: as in `run_rescued`.
        call, blueprint: the forward's (its inputs are copied), and the live module's.
        buffers: those of the live module, and what they were when the forward began.
        forward: runs the call's forward again, and lets the replay `take` its graphs.
        frozen: the live parameters of which the replicas' began frozen.
    """

    def __init__(
        self,
        row_limits: dict[int, int],
        call: Call,
        blueprint: Blueprint,
        buffers: unchanged_on_failure,
        forward: Callable[[Call, "Replay"], object],
        frozen: Sequence[torch.Tensor],
    ) -> None:
        self.frozen = frozen
        self._row_limits, self._module = row_limits, blueprint.root
        self._call = replace(call, arguments=call.arguments.copied())
        self._forward = forward
        self._thread = ThreadState.capture()
        self._random = _devices.random_states(call.plan.devices)
        self._made = pytree.all_tensors(self._call.arguments.leaves)
        self._streams = current_streams_of([*self._made, *blueprint.buffers.values()])
        self._parameters = [*blueprint.parameters.values()]
        self._flags = [*map(_requires_grad, self._parameters)]
        self._trained = [*compress(self._parameters, self._flags)]
        self._dicts = blueprint.attribute_dicts
        self._attributes = [*map(dict, blueprint.attribute_dicts)]
        self._versions: list[Any] = []  # after the forward
        self._buffers = buffers
        self._graphs: ReplicaGraphs | None = None  # those that failed
        self._leaves: Sequence[torch.Tensor] = ()  # to which they lead, beside parameters and inputs

    def run(self, graphs: ReplicaGraphs, backward: Callable[[], T]) -> T:
        """Run a backward of the forward's graphs, again after each time that a replica has run out of memory."""

        def run(has_failed: bool) -> T:
            if has_failed:
                self._renew(graphs)
            return backward()

        return run_rescued(self._row_limits, self._call.plan, self._module, run, self._why_not)

    def forward_has_run(self) -> None:
        """Take note of the parameters with which it ran."""
        self._versions = _versions(self._trained)

    def take(self, graphs: ReplicaGraphs) -> None:
        """Take the graphs of the forward that was run again, in the place of those that failed."""
        assert self._graphs is not None
        self._graphs.take_from(graphs, self._leaves)

    def _why_not(self) -> str | None:
        changed = [k for k, version in enumerate(_versions(self._trained)) if version != self._versions[k]]
        switched = [p for p, flag in zip(self._parameters, self._flags, strict=True) if p.requires_grad != flag]
        if changed or switched:
            return _CHANGED.format(number=len(changed) or len(switched))
        return None

    def _renew(self, graphs: ReplicaGraphs) -> None:
        """Run the forward again for its graphs, with everything as it was; leave everything else as it is."""
        self._leaves = [leaf.live for leaf in graphs.leaves]
        graphs.drop()
        self._graphs = graphs
        buffers = [*chain(*self._buffers.buffers)]
        wait_for_makers(self._streams, [*self._made, *chain(*self._buffers.before)])
        random, values = _devices.random_states(self._call.plan.devices), foreach.clones(buffers)
        attributes = restore(self._dicts, self._attributes)
        try:
            _devices.set_random_states(self._random, self._call.plan.devices)
            self._buffers.restore()
            forward = modes.without_modes(self._forward)
            with self._thread.applied():
                run_rescued(self._row_limits, self._call.plan, self._module, lambda _: forward(self._call, self))
        finally:
            self._graphs, self._leaves = None, ()
            write_values(buffers, values)
            _devices.set_random_states(random, self._call.plan.devices)
            for target, items in attributes:
                fill(target, items)


def _versions(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return what changes when a tensor's values or memory change; in C, because a module has many parameters."""
    return [*zip(map(attrgetter("_version"), tensors), map(torch.Tensor.data_ptr, tensors), strict=True)]


def _lower_limits(row_limits: dict[int, int], plan: StepPlan, module: nn.Module, error: Exception) -> str | None:
    """Halve the rows of the replica that raised an error, or of all if that is not known; return why not, if so."""
    notes = "\n".join(notes_of(error))
    where = plan.names
    failed = [i for i, place in enumerate(where) if place in notes] or range(len(where))
    if reason := why_no_parts(plan, module):
        return NO_PARTS.format(where=" and ".join(where[i] for i in failed), reason=reason)
    limits = [
        min(-(-rows // plan.parts), row_limits.get(number, rows))
        for number, rows in zip(plan.replica_numbers, plan.sizes, strict=True)
    ]
    lowered = {i for i in failed if limits[i] > 1}
    for i in set(failed) - lowered:
        # What a single row lacks, another replica on its device may have: not the greediest one fails.
        others = {j for j, limit in enumerate(limits) if limit > 1 and plan.devices[j] == plan.devices[i]}
        if not others:
            row_limits.pop(plan.replica_numbers[i], None)  # parts did not help
            return NO_PARTS.format(where=where[i], reason="a single row needs more memory than the device has")
        lowered |= others
    for i in sorted(lowered):
        row_limits[plan.replica_numbers[i]] = limits[i] // 2
        log.warning(_IN_PARTS if i in failed else _OTHER_IN_PARTS, where[i], plan.sizes[i], limits[i] // 2)
    return None
