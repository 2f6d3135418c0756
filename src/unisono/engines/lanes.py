"""Lanes in this process: each has a replica on its device, and computes whole batches without gradients.

    open     live module ──► replicas of all lanes, in one broadcast ──► each lane's blueprint and pool
    a batch  inputs ──► the lane's device ──► a replica of the lane's pool ──► output ──► the output device

A batch takes a replica from its lane's pool and gives it back, so what forward assigned to it or wrote into its buffers
is undone. Parameters on the live module's device are the live module's own.

Guarantees
    - No output is in memory that a later batch overwrites.
    - On an accelerator a lane has two batches queued at most. So a batch goes to a device that is free, not to one
      whose queue takes it fastest.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from unisono.engines.base import Lane, LaneCall, LaneOutput, called
from unisono.engines.compile_lock import CompileLock, kind_of, prepare_accelerators
from unisono.engines.replica import ReplicaPool, Replicas
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint, collector_paused
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import is_plain
from unisono.runtime.interrupts import critical, interruptibly
from unisono.runtime.process_state import LaneTurns
from unisono.runtime.rng import SeededDraws
from unisono.runtime.streams import Copies

_CUDA_GRAPHS = (
    'map and evaluate of a module that is compiled with CUDA graphs (torch.compile(mode="reduce-overhead" or '
    '"max-autotune")): a graph writes every output in one place, and lanes go on to the next batch before an output is '
    'used. Compile it in another mode (mode="max-autotune-no-cudagraphs", or none), or call the model batch by batch.'
)


def open_local_lanes(
    blueprint: Blueprint,
    call: LaneCall,
    compile_lock: CompileLock,
    *,
    separate_memory: bool = False,
) -> list[Lane]:
    """Return a lane in this process for each device of `call`; `blueprint` is the live module's.

    Raises:
        RuntimeError: the module replays CUDA graphs.
    """
    if blueprint.compiled:
        prepare_accelerators(blueprint, call.devices, _CUDA_GRAPHS)
    with torch.no_grad(), collector_paused, Copies(call.devices) as copies:
        pool = ReplicaPool(blueprint, call.source, separate_memory=separate_memory)
        replicas = pool.take(call.devices, tracked=False, copies=copies, with_live_buffers=False)
        for i in range(len(call.devices)):
            copies.wait_copies(i)
        lock = compile_lock if blueprint.compiled else None
        turns = LaneTurns()
        return [LocalLane(i, call, Blueprint(root), lock, turns) for i, root in enumerate(replicas.roots)]


class LocalLane(Lane):
    """See the module's docstring.

    Args:
        blueprint: of its own module, which is on its device.
        compile_lock: None if nothing is compiled.
        turns: of all lanes.
    """

    def __init__(
        self, number: int, call: LaneCall, blueprint: Blueprint, compile_lock: CompileLock | None, turns: LaneTurns
    ) -> None:
        super().__init__(call, number)
        self._compile_lock, self._turns = compile_lock, turns
        self._pool = ReplicaPool(blueprint, self.device)
        self._unchanged: Replicas | None = None  # the last batch's, if it has left nothing to undo
        self._queued: list[Callable[[bool], bool]] = []

    @critical
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> LaneOutput:
        for is_done in self._queued[:-1]:
            is_done(True)
        del self._queued[:-1]
        name = type(self._pool.blueprint.root).__name__
        draws = None if seed is None else SeededDraws(name, seed, self.device)
        with Copies([self.device]) as copies:
            args, kwargs = _on_device((args, kwargs), self.device, lambda tensor: copies.to(tensor, 0))
            replicas, self._unchanged = self._unchanged, None
            if replicas is not None:
                replicas.renew_buffers()
            else:
                with collector_paused:
                    replicas = self._pool.take([self.device], tracked=False, copies=copies, with_live_buffers=False)
            copies.wait_copies(0)
            with self._turn((args, kwargs)), self._turns.batch(), draws or contextlib.nullcontext():
                output = interruptibly(called(replicas.roots[0], self.call.method), *args, **kwargs)
        output = _apart_from(replicas.each[0].own_buffers, output)
        # With a seed the thread is the lane's own, whose state stays. Nothing outside refers to unchanged replicas, so
        # they need no other look before the next batch.
        can_stay = seed is not None and self._pool.blueprint.is_reusable and not replicas.is_remote
        if can_stay and replicas.are_unchanged():
            self._unchanged = replicas
        else:
            replicas.give_back()
        self._queued.append(_devices.queued_work(self.device))
        target = self.call.output_device
        outgoing = Copies([target])
        with outgoing:
            value = _on_device(output, target, lambda tensor: outgoing.to(tensor, 0))
        return LaneOutput(value, draws is not None and draws.drew, lambda: outgoing.wait_copies(0))

    def _turn(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> contextlib.AbstractContextManager[None]:
        if self._compile_lock is None:
            return contextlib.nullcontext()
        return self._compile_lock.while_new((False, self._pool.blueprint.root.training, *kind_of(inputs)))


def _on_device(value: Any, device: torch.device, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors on `device`, each itself if it is there already; else `copy` makes it."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if _devices.same_device(tensor.device, device):
            return tensor
        copied = copy(tensor.detach())
        # Also without grad mode: the module may switch it on inside.
        return copied.requires_grad_() if tensor.requires_grad else copied

    return pytree.map_all_tensors(place, value)


def tensors_to_place(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value that have to be on the device of the replica that gets it."""
    found: list[torch.Tensor] = []
    pytree.map_all_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def _apart_from(buffers: list[torch.Tensor], output: Any) -> Any:
    """Return an output without history, and not in the memory of a replica's buffers: the next batch overwrites it."""
    memory = {buffer.untyped_storage().data_ptr() for buffer in buffers if is_plain(buffer) and buffer.numel()}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach() if tensor.requires_grad else tensor
        is_shared = is_plain(tensor) and tensor.numel() and tensor.untyped_storage().data_ptr() in memory
        return tensor.clone() if is_shared else tensor

    return pytree.map_all_tensors(apart, output)
