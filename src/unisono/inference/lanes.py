"""Lanes: each has a replica on its device, and computes whole batches without gradients.

    open     live module ──► replicas of all lanes, in one broadcast ──► each lane's blueprint and pool
    a batch  inputs ──► the lane's device ──► a replica of the lane's pool ──► output ──► the output device

A batch takes a replica from its lane's pool and gives it back, so what forward assigned to it or wrote into its buffers
is undone. To look for what was assigned takes as long as a few layers: of short batches in a row, only the last one is
followed by a look. Parameters on the live module's device are the live module's own.

Guarantees
    - No output is in memory that a later batch overwrites.
    - A lane does not wait until an output is on the host: who calls it does, when it has given the lane the next batch.
    - On an accelerator a lane has two batches queued at most. So a batch goes to a device that is free, not to one
      whose queue takes it fastest.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from unisono.engines.compiled_modules import CompileLock, check_cuda_graphs, kind_of
from unisono.engines.replica import Replica, ReplicaPool, Replicas
from unisono.engines.step_memory import StepMemory
from unisono.engines.step_plan import called
from unisono.leftovers.first_steps import FirstSteps, Look
from unisono.leftovers.shared import Search
from unisono.leftovers.written_parameters import IN_LANES, LookAtParameters
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint, collector_paused
from unisono.primitives.tensor_attributes import carry_attributes
from unisono.primitives.visitor import INERT
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import is_plain
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import ReplicaNames
from unisono.runtime.interrupts import interruptibly
from unisono.runtime.process_state import LaneTurns
from unisono.runtime.rng import SeededDraws
from unisono.runtime.streams import Copies, CopiesToHost, current_stream, wait_for_maker

_CUDA_GRAPHS = (
    "map and evaluate cannot run a module that is compiled with CUDA graphs "
    '(torch.compile(mode="reduce-overhead" or "max-autotune")): a graph overwrites its output with the next '
    'batch. Compile it in another mode (mode="max-autotune-no-cudagraphs", or none), or call the model batch '
    "by batch."
)


@dataclass(frozen=True)
class LaneCall:
    """The calls that lanes make, one a batch."""

    devices: Sequence[torch.device]  # one a lane
    # As in `StepPlan`.
    source: torch.device
    output_device: torch.device
    method: str | None = None
    in_ranks: bool = False  # whether other processes have lanes for other batches
    is_first: bool = False  # whether no lanes before had this structure

    @property
    def has_others(self) -> bool:
        """Whether other lanes have other batches."""
        return len(self.devices) > 1 or self.in_ranks


@dataclass
class LaneOutput:
    """What a lane made of a batch."""

    value: Any  # the output, on the call's output device; there, if `to_host` is None
    drew: bool  # whether random numbers were drawn
    say_leftovers: Callable[[], object]
    stream: torch.Stream | None = None  # the lane's on the output device; None: that has no streams
    copies: Copies | None = None  # to the output device; they may be in flight
    to_host: CopiesToHost | None = None  # those of the output that may be in flight

    def arrived(self) -> "LaneOutput":
        """Return this output, when it is on the host, if it is to be there."""
        copies, self.to_host = self.to_host, None
        if copies is not None:
            copies.have_ended(wait=True)
            self.value = pytree.map_tensors(copies.result, self.value)
        return self

    def given(self) -> Any:
        """Return the output, for what the calling thread's streams do next."""
        if self.copies is not None:
            self.copies.wait_copies(0)
        if self.stream is not None and self.stream != current_stream(self.stream.device):
            wait_for_maker(self.stream, pytree.all_tensors(self.value))
        self.say_leftovers()
        return self.value


RunBatch: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], Any], LaneOutput]  # inputs, and a seed or None


def open_lanes(memory: StepMemory, module: nn.Module, call: LaneCall) -> "list[Lane]":
    """Return a lane for each device of `call`, with the module as it is now. Gradients are off.

    Forwards work as usual meanwhile, and so do other lanes; either may be slower.

    Args:
        memory: the model's.

    Raises:
        RuntimeError: parameters or buffers that are not on `call.source`; the module replays CUDA graphs.
    """
    blueprint, first_steps = memory.pool_for(module, call.source).blueprint, memory.first_steps
    structure = "lanes", call.method, blueprint.signature
    if first_steps.is_first(structure):
        first_steps.counted(structure).end()
        call = replace(call, is_first=True)
    if blueprint.compiled:
        check_cuda_graphs(blueprint, call.devices, _CUDA_GRAPHS)
    with torch.no_grad(), collector_paused, Copies(call.devices) as copies:
        pool = ReplicaPool(blueprint, call.source, first_steps.leftovers)
        replicas = pool.stamp_untracked(call.devices, copies)
        for i in range(len(call.devices)):
            copies.wait_copies(i)
        lock = memory.compile_lock if blueprint.compiled else None
        turns = LaneTurns()
        return [Lane(i, call, replica, lock, turns, first_steps) for i, replica in enumerate(replicas)]


class Lane:
    """One replica that computes whole batches, without gradients, one after the other. See the module's docstring.

    Every batch finds the module as it was when the lanes were opened: what an earlier one changed is undone.

    Args:
        number: the replica's.
        call: the batches'.
        original: the module as it was when lanes were opened, on the lane's device; a batch has a replica of it.
        compile_lock: None if nothing is compiled.
        turns: of all lanes.
        first_steps: of the model; the caller's thread says what batches leave behind.

    Attributes:
        name: in messages.
        device: the replica's.
        left_unchanged: whether all batches of the first lane's last `run` or `in_a_row` have left the module unchanged.
    """

    def __init__(
        self,
        number: int,
        call: LaneCall,
        original: Replica,
        compile_lock: CompileLock | None,
        turns: LaneTurns,
        first_steps: FirstSteps,
    ) -> None:
        self.call, self.number, self.device = call, number, call.devices[number]
        self.name = f"replica {number} on {self.device}"
        self.left_unchanged = False
        self._compile_lock, self._turns = compile_lock, turns
        self._original = original  # its modules refer to each other only as long as it exists
        self._first_steps = first_steps
        self._pool = ReplicaPool(Blueprint(original.modules[0]), self.device, first_steps.leftovers, IN_LANES)
        self._name = type(original.modules[0]).__name__
        self._replicas: Replicas | None = None  # the last batch's
        self._memory_of_buffers: set[int] = set()
        self._is_on_host = _devices.computes_on_host(self.device)
        self._queued: list[Callable[[bool], bool]] = []

    def names(self) -> ReplicaNames:
        """Return its name as messages about several replicas have theirs."""
        names = ReplicaNames([self.name])
        names.numbers, names.devices = [self.number], [self.device]
        return names

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> LaneOutput:
        """Compute a batch. Called in a thread of the lane's own; the first lane's, also in the caller's.

        Args:
            args, kwargs: the inputs, on any devices.
            seed: of the random numbers; None: they come from the generators as they are.

        Raises:
            BaseException: what the module raised.
        """
        with self._turn((args, kwargs)):
            if seed is not None:
                with self.in_a_row() as compute:
                    return compute(args, kwargs, seed)
            with self._turns.batch():
                output = self._compute(args, kwargs)
        self._give_back()  # the thread is the caller's, whose state may be another one at the next batch
        return output

    @contextmanager
    def in_a_row(self) -> Iterator[RunBatch]:
        """The context in which the first lane computes several batches. At its end it looks at the module once.

        Its value is called as `run` is, with seeds.
        """
        self.left_unchanged = False
        with self._turns.batch(), SeededDraws(self._name, self.device) as draws:
            yield lambda args, kwargs, seed: self._compute(args, kwargs, draws, seed)
        replicas = self._replicas
        can_stay = replicas is not None and self._pool.blueprint.is_reusable and not replicas.is_remote
        # Nothing outside refers to unchanged replicas, so they need no other look before the next batch.
        self.left_unchanged = can_stay and replicas is not None and replicas.are_unchanged()
        if not self.left_unchanged:
            self._give_back()

    def _give_back(self) -> None:
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.give_back()

    def _compute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], draws: SeededDraws | None = None, seed: int = 0
    ) -> LaneOutput:
        if self._queued:
            for is_done in self._queued[:-1]:
                is_done(True)
            del self._queued[:-1]
        replicas, self._replicas = self._replicas, None  # one that fails is dropped
        inputs = [*args, *kwargs.values()]
        is_usual = replicas is not None and all([_is_on(value, self.device) for value in inputs])  # with few calls
        with contextlib.nullcontext() if is_usual else Copies([self.device]) as copies:
            if copies is not None:
                args, kwargs = _on_device((args, kwargs), self.device, lambda tensor: copies.to(tensor, 0))
            if copies is not None and replicas is None:
                replicas = self._taken(copies)
            elif replicas is not None:
                replicas.renew_buffers()
            assert replicas is not None
            if copies is not None:
                copies.wait_copies(0)
            if draws is not None:
                draws.begin(seed)
            looks = self._looks(replicas, args, kwargs)
            for look in looks:
                look.begin()
            output = interruptibly(called(replicas.roots[0], self.call.method), *args, **kwargs)
            for look in looks:
                look.end([output])
            if replicas.are_new:
                replicas.rows, replicas.in_map = _rows_of(inputs), True
                replicas.assigned([output])
            replicas.are_new = False
        output = _apart_from(self._memory_of_buffers, output)
        self._replicas = replicas
        if not self._is_on_host:
            self._queued.append(_devices.queued_work(self.device))
        drew, target = draws is not None and draws.drew(), self.call.output_device
        if _is_on(output, target):
            return LaneOutput(output, drew, self._say_leftovers, current_stream(target))
        if _devices.is_cpu(target):
            to_host = CopiesToHost()
            value = _on_device(output, target, to_host.begin)
            return LaneOutput(value, drew, self._say_leftovers, to_host=to_host)
        with Copies([target]) as outgoing:
            value = _on_device(output, target, lambda tensor: outgoing.to(tensor, 0))
        return LaneOutput(value, drew, self._say_leftovers, current_stream(target), outgoing)

    def _looks(self, replicas: Replicas, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Look]:
        """Return what looks at this batch; from the second one on only at parameters that it writes."""
        call, first_steps = self.call, self._first_steps
        looks: list[Look] = []
        if call.has_others:
            looks.append(LookAtParameters(replicas.written, with_values=replicas.are_new and call.is_first))
        if not replicas.are_new or not first_steps.leftovers.looks:
            return looks
        if len(call.devices) > 1:
            inputs = [*args, *kwargs.values()]
            blueprint = self._pool.blueprint
            own = replicas.each[0].modules
            search = Search(blueprint.modules, blueprint.names, observers=blueprint.observers, own=own)
            looks += first_steps.looks(None, search, inputs, call.devices, beside_others=True)
        return looks

    def _say_leftovers(self) -> None:
        if self._first_steps.leftovers.has_more:
            self._first_steps.leftovers.say(self._original.modules[0])

    def _taken(self, copies: Copies) -> Replicas:
        replicas = self._pool.take([self.device], tracked=False, copies=copies, with_live_buffers=False)
        buffers = [buffer for buffer in replicas.each[0].own_buffers if is_plain(buffer) and buffer.numel()]
        self._memory_of_buffers = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        return replicas

    def _turn(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> contextlib.AbstractContextManager[None]:
        if self._compile_lock is None:
            return contextlib.nullcontext()
        return self._compile_lock.while_new((False, self._pool.blueprint.root.training, *kind_of(inputs)))


def _rows_of(inputs: Sequence[Any]) -> list[int]:
    return [len(each) for each in inputs if isinstance(each, torch.Tensor) and each.dim()][:1]


def _is_on(value: Any, device: torch.device) -> bool:
    """Return whether a value is a tensor on a device, or one that is on none, such as a number."""
    if type(value) is torch.Tensor:
        return _devices.same_device(value.device, device)
    return type(value) in INERT


def _on_device(value: Any, device: torch.device, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors on `device`, each itself if it is there already; else `copy` makes it."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if _devices.same_device(tensor.device, device):
            return tensor
        copied = copy(tensor.detach())
        carry_attributes(tensor, [copied])
        # Also without grad mode: the module may switch it on inside.
        return copied.requires_grad_() if tensor.requires_grad else copied

    return pytree.map_tensors(place, value)


def _apart_from(memory_of_buffers: set[int], output: Any) -> Any:
    """Return an output without history, and not in the memory of a replica's buffers: the next batch overwrites it."""

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach() if tensor.requires_grad else tensor
        is_shared = memory_of_buffers and is_plain(tensor) and tensor.numel()
        return tensor.clone() if is_shared and tensor.untyped_storage().data_ptr() in memory_of_buffers else tensor

    return pytree.map_tensors(apart, output)
