"""Compiled modules: replicas run one after the other while torch.compile may have something to compile.

torch.compile looks up compiled code, and compiles if none fits. Replicas that look at the same moment all find none,
and all compile the same function: one after the other, because torch compiles one function at a time, and into n of the
few versions that it keeps of a function (8 in torch 2.13), after which it compiles no more. So replicas take turns in a
pass over inputs of a new kind: the first one compiles, and the others find its code. All later passes run in parallel.

Guarantees that no replica waits for ever: after `_PATIENCE_S` it runs without the lock. So replicas that wait for each
other inside forward are late, and still right. A pass that compiles although its kind is not new (an attribute has
changed, say) costs time; its numbers are right.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint
from unisono.runtime import devices as _devices
from unisono.runtime import process_state
from unisono.runtime.contexts import contextmanager
from unisono.runtime.interrupts import acquire
from unisono.runtime.stand_ins import StandIns
from unisono.runtime.thread_pool import PassContext, ReplicaContext
from unisono.runtime.torch_private import compiler

_MOST_KINDS = 32  # torch keeps 8 versions of a function: for training and eval, with and without gradients
_PATIENCE_S = 60.0


def check_cuda_graphs(blueprint: Blueprint, devices: Sequence[torch.device], refusal: str) -> None:
    """Raise RuntimeError with a `refusal` for a module that replays CUDA graphs, on accelerators."""
    if blueprint.replays_cuda_graphs and not _devices.all_on_host(devices):
        raise RuntimeError(refusal)


class CompileLock:
    """Remembers the kinds of inputs that the replicas of one wrapper have run on."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._lock = threading.Lock()  # of replicas that do not begin together

    def if_new(self, kinds: Iterable[Hashable], timeout_s: float | None = None) -> list[PassContext]:
        """Return the context of a pass over inputs of these kinds: a lock that replicas hold in turn, or none.

        Args:
            kinds: one a replica; equal for inputs that the same compiled code fits.
            timeout_s: a replica that waits for longer runs without the lock, and the caller sees which one is stuck.
        """
        new = set(kinds) - self._known
        if not new or len(self._known) >= _MOST_KINDS:
            return []
        self._known |= new
        return [partial(_one_at_a_time, _PATIENCE_S if timeout_s is None else min(timeout_s, _PATIENCE_S))]

    @contextmanager
    def while_new(self, kind: Hashable) -> Iterator[None]:
        """Enter the context of one replica that runs alone on its inputs: a lock, until one of their kind has run."""
        with compiler_prepared():
            if kind in self._known or len(self._known) >= _MOST_KINDS:
                yield
                return
            with _held(self._lock, _PATIENCE_S):
                yield
                self._known.add(kind)


@contextmanager
def compiler_prepared() -> Iterator[ReplicaContext]:
    """The context of a pass over replicas of a compiled module: torch.compile is set for several threads, and devices.

    Its settings are those of the process; they are put back when the last pass ends.
    """
    entry = _while_compiled_replicas_run.enter()
    try:
        yield lambda index: contextlib.nullcontext()
    finally:
        _while_compiled_replicas_run.leave(entry)


def kind_of(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[Hashable]:
    """Yield what torch.compile looks at in inputs, more or less."""
    for _, tensor in pytree.tensors(inputs):
        yield tensor.shape, tensor.dtype, tensor.requires_grad


@contextmanager
def _one_at_a_time(patience_s: float) -> Iterator[ReplicaContext]:
    lock = threading.Lock()
    yield lambda index: _held(lock, patience_s, alone=True)


@contextmanager
def _held(lock: threading.Lock, patience_s: float, *, alone: bool = False) -> Iterator[None]:
    mine = acquire(lock, patience_s)
    try:
        with process_state.alone() if mine and alone else contextlib.nullcontext():
            yield
    finally:
        if mine:
            lock.release()


_while_compiled_replicas_run = StandIns()
_while_compiled_replicas_run.add(compiler.settings_of_compiler)
