"""One forward, for every engine whose replicas have graphs of their own.

    1. open what the engine needs meanwhile, and restore the live buffers if anything fails
    2. run the replicas
    3. match their outputs, leaf by leaf
    4. link the replicas' leaves with the caller's tensors: they are the boundary's inputs
    5. join the outputs through the boundary, whose backward runs the replicas' (autograd/boundary.py)
    6. give the live module the first replica's buffers

Buffers: the first replica has the live ones, so its updates persist; the others have copies. Those that forward has
reassigned in the first replica are put into the live module at the end.

An engine says how (1), (2) and (4) are done. A worker process does (2) for one replica, with the same functions, and
replies with its outputs (processes/worker.py). How a step is run again is in replay.py.
"""

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from unisono.autograd.boundary import join
from unisono.autograd.replica_graph import BoundaryTensor, ReplicaGraphs
from unisono.engines.base import Call
from unisono.engines.replay import Replay
from unisono.engines.replica import ReplicaPool, Replicas
from unisono.primitives.outputs import Group, Outputs
from unisono.primitives.placements import Single
from unisono.primitives.reassigned_buffers import Change, histories
from unisono.primitives.replicate import unchanged_on_failure
from unisono.runtime import timeline
from unisono.runtime.timeline import ReplicaTiming

T = TypeVar("T")


class ForwardPass(abc.ABC, Generic[T]):
    """The forward of a call; see the module's docstring.

    Attributes:
        call: what is called, with what.
        tracked: whether a graph is built.
        timings: one a replica.
        pool, replicas: those in this process; the first of them is the first of all.
        buffers: restores the live buffers if the step fails.
        graphs: the replicas' graphs, as far as they are known.
        replay: lets the backward be run again; None: a failure is final.
        is_again: whether this forward is run again itself: then its graphs are all that is wanted.
    """

    call: Call
    tracked: bool
    timings: list[ReplicaTiming]
    pool: ReplicaPool
    replicas: Replicas
    buffers: unchanged_on_failure
    graphs: ReplicaGraphs
    replay: Replay | None
    is_again: bool

    def __init__(self, call: Call, again: Replay | None) -> None:
        self.call, self.tracked = call, torch.is_grad_enabled()
        self.replay, self.is_again = again, again is not None
        self.timings = [ReplicaTiming(device, size) for device, size in zip(call.devices, call.sizes, strict=True)]

    @abc.abstractmethod
    def opened(self) -> AbstractContextManager[T]:
        """Return what is entered around the step, and gives what `run` needs."""

    @abc.abstractmethod
    def run(self, opened: T) -> list[Any]:
        """Run the replicas; return their outputs, in order; raise what one has raised."""

    @abc.abstractmethod
    def link(self, groups: Sequence[Group]) -> Sequence[torch.Tensor]:
        """Give the graphs all that they need for backwards, and pass on gradients of a backward inside forward.

        Args:
            groups: the replicas' outputs.

        Returns:
            The caller's tensors behind the boundary's inputs, without the parameters.
        """

    def release(self) -> None:
        """Give back what a forward without a graph has used."""
        self.replicas.give_back()

    def forward(self) -> Any:
        """Return the joined output."""
        with self.buffers, self.opened() as opened:
            outputs = self.run(opened)
            if timeline.recording:
                timeline.mark(timeline.GATHER)
            matched = Outputs(outputs, self.call.rules, self.call.sizes)
            del outputs
            if self.replay is not None:
                self.replay.see_outputs(matched.groups)
            changes = self.replicas.each[0].registries.changes()
            of_buffers = _groups_of(changes, len(self.call.devices)) if changes and self.tracked else []
            self.graphs.outputs = _boundary_outputs(self.call, matched.groups, of_buffers)
            if self.tracked:
                live = self.link([*matched.groups, *of_buffers])
                if self.replay is not None:
                    if self.is_again:
                        return self.replay.take(self.graphs)
                    self.graphs.replay = self.replay.repeatable()
                joined = join(self.graphs, live)
            else:
                joined = self.graphs.joined_outputs()
            output = matched.put_together(joined)
        self.replicas.each[0].commit_buffers(self.pool, changes, joined[len(matched.groups) :])
        if not self.tracked:
            self.release()
        return output


def _groups_of(changes: Sequence[Change], num_replicas: int) -> list[Group]:
    """Return the buffers that forward has reassigned and that have a history: they are outputs of the first replica."""
    return [Group((tensor, *[None] * (num_replicas - 1)), Single(0)) for tensor in histories(changes)]


def _boundary_outputs(call: Call, groups: Sequence[Group], of_buffers: Sequence[Group]) -> list[BoundaryTensor]:
    """Return the boundary's outputs: those of forward on the output device, then buffers where they are."""
    outputs = [BoundaryTensor(group.placement, call.output_device, group.tensors) for group in groups]
    for group in of_buffers:
        outputs += [BoundaryTensor(group.placement, t.device, group.tensors) for t in group.tensors if t is not None]
    return outputs
