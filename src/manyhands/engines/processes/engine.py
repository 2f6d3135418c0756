"""The processes engine: the first replica in this process, each other in a worker process of its own.

One forward, step by step:

    1. take a blueprint of the live module; see what changed since the workers were told (module_sync.py)
    2. cut the inputs into shards; write each worker's into memory that it maps, and send it one message
    3. stamp the first replica and call it in this thread, meanwhile
    4. read the workers' answers: their outputs, in memory that they wrote
    5. match the outputs and join them through the boundary

Backward is the same with output gradients going out and the leaves' gradients coming back: one message and one answer a
worker (remote_graph.py). A worker keeps the graph of each forward until the caller's graph goes.

How parameters reach the workers, and how their gradients come back, is the transport's affair (reducers/base.py).

Guarantees
    - Nothing that a caller gets lies in the memory that messages go through; so that can be used again at once.
    - One step of an engine at a time: calls from several threads take turns. A call from inside a step of the same
      thread (a hook that calls the model) runs all replicas here, one after the other.
    - Whatever leaves a step half done (a dead worker, Ctrl-C) ends the team of workers; the next forward starts
      another.

Assumes, as the threads engine does, that nobody changes the module while a forward runs.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.autograd.boundary import Alias, Boundary, Edge
from manyhands.engines.base import Call, Engine, called, cross_process_all_gather
from manyhands.engines.processes.messages import Answer, Forward, Sent
from manyhands.engines.processes.module_sync import Mirror
from manyhands.engines.processes.pickling import dumps
from manyhands.engines.processes.remote_graph import Divided
from manyhands.engines.processes.shared_memory import Outbox
from manyhands.engines.processes.worker_group import Steps, Team
from manyhands.engines.replica import Inputs, Stamp, carries_objects, look_for_live_tensors, stamped
from manyhands.engines.threads import ThreadsEngine
from manyhands.primitives.outputs import Outputs
from manyhands.primitives.parallel_apply import values_or_raise
from manyhands.primitives.placements import Replicate
from manyhands.primitives.replicate import HOOKS, Blueprint, check_device, unchanged_on_failure
from manyhands.runtime import torch_private
from manyhands.runtime.errors import say_once
from manyhands.runtime.rng import SeededStreams
from manyhands.runtime.streams import Copies
from manyhands.runtime.thread_pool import (
    ReplicaTiming,
    divided_intra_op_threads,
    inside_replica,
    one_pass,
    run_together,
)
from manyhands.runtime.thread_state import ProcessState, ThreadState
from manyhands.sync_batch_norm.function_mode import BatchNormOverReplicas, Walk

_HOOKS_OF_EVERY_MODULE = (
    "hooks are registered for every module of this process, which workers do not have: as long as they are, all "
    'replicas run in this process, as with engine="threads".'
)


class ProcessesEngine(Engine):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._here = ThreadsEngine()  # for calls that cannot leave this thread
        self._steps = Steps()
        self._mirror = Mirror()
        self._team: Team | None = None
        self._timings: list[ReplicaTiming] = []
        self._checked: list[Any] = []  # signature of the blueprint whose first replica's graph has been looked at
        self._outside: list[torch.Tensor] = []  # leaves found there that are not the module's: a global, say

    def forward(self, module: nn.Module, call: Call) -> Any:
        if inside_replica() or len(call.devices) == 1:
            return self._here.forward(module, call)
        with self._steps.begin() as mine:
            if not mine:
                return self._here.forward(module, call)
            if torch_private.hooks_of_every_module():
                say_once(_HOOKS_OF_EVERY_MODULE)
                return self._here.forward(module, call)
            return self._forward(module, call)

    def _forward(self, module: nn.Module, call: Call) -> Any:
        tracked = torch.is_grad_enabled()
        where = call.where()
        timings = [ReplicaTiming(device, size) for device, size in zip(call.devices, call.sizes, strict=True)]
        self._timings = timings
        team = self._team_of(call.devices)
        if len(where) - 1 > team.num_told:
            self._mirror.forget()  # some workers have missed something
        blueprint = self._mirror.look(module)  # step 1
        check_device(module, [*blueprint.parameters.values(), *blueprint.buffers.values()], call.source)
        structure = [call.method, *blueprint.signature()] if tracked else None
        number = next(self._steps.graph_numbers)
        graphs = Divided(timings, where, [], [], team=team, steps=self._steps, mirror=self._mirror, number=number)
        with (
            divided_intra_op_threads(call.devices) as num_threads,
            unchanged_on_failure(blueprint.buffers.values()),
            team.whole_or_ended(),
            Copies(call.devices[:1]) as copies,
        ):
            inputs = Inputs(call, tracked, copies, num_here=1)  # step 2
            streams = SeededStreams(len(where))
            objects = self._send(graphs, blueprint, call, inputs, num_threads, streams.seeds)
            (stamp,) = stamped(blueprint, call.source, call.devices[:1], tracked, copies)  # step 3
            graphs.keep_alive = stamp
            graphs.contribution = call.contribution
            if call.sync_batch_norm:
                new_exchange = partial(team.open_exchange, cross_process=cross_process_all_gather(call))
                replicas = [stamp.replica, *[None] * (len(where) - 1)]
                graphs.begin_walk = [BatchNormOverReplicas(replicas, Walk.APART, new_exchange).one_pass]

            def run() -> Any:
                started = time.perf_counter()
                copies.arrive(0)
                args, kwargs = inputs.shards[0]
                output = called(stamp.replica, call.method)(*args, **kwargs)
                timings[0].forward_s = time.perf_counter() - started
                return output

            with streams, one_pass(graphs.begin_walk) as surroundings:
                outcomes = run_together([run], call.devices[:1], surroundings)
                try:
                    self._mirror.settle()
                    with team.in_step():
                        team.transport.end_sending(lambda: team.attend(where))
                    answers = graphs.take_answers(streams)  # step 4
                    for i, answer in answers.items():
                        timings[i + 1].forward_s = answer.seconds
                    outcomes += graphs.outcomes(answers)
                    outputs = values_or_raise(outcomes, [where[0], *(where[i + 1] for i in sorted(answers))])
                finally:
                    outcomes.clear()  # a traceback refers to this frame: nothing in it may refer to an exception
            matched = Outputs(outputs, call.rules, call.sizes)  # step 5
            del outputs
            if structure is not None:
                own_leaves = [edge.tensors[0] for edge in inputs.edges if edge.tensors[0] is not None] + stamp.leaves
                self._look_at_first_graph(structure, blueprint, call, matched, own_leaves)
            graphs.outputs = [Edge(group.placement, call.output_device, group.tensors) for group in matched.groups]
            output = matched.put_together(self._joined(graphs, inputs, objects, stamp, answers, tracked))
        stamp.commit_buffers()
        return output

    def _look_at_first_graph(
        self, structure: list[Any], blueprint: Blueprint, call: Call, matched: Outputs, own_leaves: list[torch.Tensor]
    ) -> None:
        """See which leaves the first replica's graph has that are not its own, where that is not known."""
        with_objects = carries_objects(call)
        if with_objects or self._checked != structure:
            of_first = [replace(group, tensors=group.tensors[:1]) for group in matched.groups]
            self._outside = look_for_live_tensors(blueprint, of_first, call.where()[:1], own_leaves)
            self._checked = [] if with_objects else structure  # the next call's objects are others

    def _joined(
        self,
        graphs: Divided,
        inputs: Inputs,
        objects: list[torch.Tensor],
        stamp: Stamp,
        answers: dict[int, Answer],
        tracked: bool,
    ) -> Sequence[torch.Tensor]:
        """Return the joined outputs, linked to the caller's tensors through the boundary if any needs a gradient."""
        if not tracked:
            return graphs.joined_outputs()
        live = self._link(graphs, inputs, objects, stamp)
        graphs.pass_on_gradients_of_forward(live, answers)
        if not any(t is not None and t.requires_grad for edge in graphs.outputs for t in edge.tensors):
            return graphs.joined_outputs()
        joined: tuple[torch.Tensor, ...] = Boundary.apply(  # type: ignore[no-untyped-call]
            graphs,
            *(t if t.is_leaf else Alias.apply(t) for t in live),  # type: ignore[no-untyped-call]
        )
        return joined

    def _send(
        self, graphs: Divided, blueprint: Blueprint, call: Call, inputs: Inputs, num_threads: int, seeds: list[int]
    ) -> list[torch.Tensor]:
        """Send every worker its forward; return the tensors inside objects in the inputs that need a gradient."""
        team, mirror = graphs.team, self._mirror
        num_workers = len(call.devices) - 1
        update = mirror.update(blueprint, call.source, team.transport.shares_parameters)
        if update.module is not None:
            _say_if_hooks(blueprint)
            for member in team.members:
                member.gradients = None
        if update.says_something:
            team.num_told = num_workers
        thread, process = ThreadState.capture(), ProcessState.capture()
        tracked = thread.grad_enabled
        leaves = {id(leaf): ~k for k, edge in enumerate(inputs.edges) for leaf in edge.tensors if leaf is not None}
        objects: list[torch.Tensor] = []
        replicas = tuple(range(num_workers + 1))
        for i in range(num_workers):
            outbox = team.members[i].outbox

            def take(tensor: torch.Tensor, outbox: Outbox = outbox, device: torch.device = call.devices[i + 1]) -> Sent:
                leaf = None
                if tracked and tensor.requires_grad:
                    leaf = leaves.get(id(tensor))
                    if leaf is None:  # not a leaf of ours: it came inside an object
                        leaf = leaves[id(tensor)] = ~(len(inputs.edges) + len(objects))
                        objects.append(tensor)
                there = device if id(tensor) in inputs.parts_elsewhere else tensor.device
                standing = Sent.by(outbox, tensor)
                return standing._replace(leaf=leaf, requires_grad=tensor.requires_grad, device=there)

            shard = dumps(inputs.shards[i + 1], take)
            message = Forward(
                places=outbox.flush(),
                thread=thread,
                graph=graphs.number,
                update=update,
                method=call.method,
                shard=shard,
                seed=seeds[i + 1],
                num_threads=num_threads,
                where=graphs.where[i + 1],
                seat=(i + 1, num_workers + 1) if call.sync_batch_norm else None,
                device=call.devices[i + 1],
                rendezvous=team.transport.rendezvous(i + 1) if update.sent else None,
                replicas=replicas,
            )
            segments = [*mirror.segments, *team.transport.segments] if update.sent else mirror.segments
            team.ask(i, message, segments, process, graphs.where[i + 1])
        with team.in_step():
            team.transport.begin_sending(mirror.take_flats(), replicas, lambda: team.attend(graphs.where))
        return objects

    def _link(self, graphs: Divided, inputs: Inputs, objects: list[torch.Tensor], stamp: Stamp) -> list[torch.Tensor]:
        """Give the boundary its input edges; return the live tensors behind them.

        What other processes have for a leaf cannot be seen from here, only that they have one: a tensor stands for it.
        """
        others = len(graphs.where) - 1
        mirror = self._mirror
        edges = [*inputs.edges]
        for tensor in objects:  # the first replica's graph leads through it by itself
            edges.append(Edge(Replicate(), tensor.device, [None, *[tensor.detach()] * others]))
        graphs.parameters = range(len(edges), len(edges) + len(stamp.leaves))
        numbers = mirror.numbers(stamp.live_parameters)
        graphs.keys = [*(~k for k in range(len(edges))), *numbers]
        whole = Replicate()
        for tensor, leaf in zip(stamp.live_parameters, stamp.leaves, strict=True):
            edges.append(Edge(whole, tensor.device, [leaf] * (1 + others)))
        theirs = {id(mirror.tensors[number]): number for number in mirror.outside}
        here = set(map(id, self._outside))
        outside = {id(tensor): tensor for tensor in (*(mirror.tensors[n] for n in mirror.outside), *self._outside)}
        for key, tensor in outside.items():
            stand_in = tensor if key in theirs else None
            edges.append(Edge(whole, tensor.device, [tensor if key in here else None, *[stand_in] * others]))
            graphs.keys.append(theirs.get(key))
        of_the_module = [*zip(numbers, stamp.live_parameters, strict=True)]
        graphs.in_workers = dict(of_the_module + [(n, mirror.tensors[n]) for n in mirror.outside])
        graphs.inputs = edges
        graphs.shared_leaves = bool(self._outside)
        graphs.keep = bool(objects)
        return [*inputs.live, *objects, *stamp.live_parameters, *outside.values()]

    def timings(self) -> list[ReplicaTiming]:
        return self._timings or self._here.timings()

    def refresh(self) -> None:
        with self._steps.begin():
            self._mirror.forget()
            self._checked = []

    def close(self) -> None:
        with self._steps.begin():
            self._timings = []
            self._here.close()
            self._end_team()

    def _team_of(self, devices: Sequence[torch.device]) -> Team:
        team = self._team
        if team is None or team.ended or team.devices[: len(devices)] != list(devices):
            self._end_team()
            team = self._team = Team(devices)
        return team

    def _end_team(self) -> None:
        team, self._team = self._team, None
        self._mirror.forget()
        if team is not None:
            team.end(patient=True)


def _say_if_hooks(blueprint: Blueprint) -> None:
    for module in blueprint.modules:
        for name in HOOKS:
            for hook in module.__dict__[name].values():
                if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                    say_once(
                        f'{type(module).__name__} has hooks: with engine="processes" they run in every worker on '
                        "copies of what they refer to; what they change there stays there."
                    )
                    return
