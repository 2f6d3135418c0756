"""A forward of one process among several that train a model together: its backward sums the gradients over them.

The process's own engine runs it, with a sync_context (gradient_sync.py) that goes with the graph. Two cases are
special:

    a mode that other threads cannot join    the module runs whole and in the caller's graph, with parameters behind a
                                             node that sums their gradients
    a batch without rows                     the module runs on rows of the first batch that it has had (of zeros, if
                                             it has had none), and the output has none of them: many modules cannot
                                             run on no rows, and this process takes part in every exchange. What it
                                             would contribute is never read
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from manyhands.distributed.gradient_sync import GradientSync, SyncContext
from manyhands.engines.base import Call, Engine
from manyhands.engines.replica import leaves_and_nodes
from manyhands.primitives import pytree
from manyhands.primitives.inputs import scattered
from manyhands.primitives.outputs import without_rows
from manyhands.primitives.parallel_apply import values_or_raise
from manyhands.runtime import devices as _devices
from manyhands.runtime.errors import log_once
from manyhands.runtime.thread_pool import run_together
from manyhands.runtime.thread_state import modes_that_stay

_RUNS_WHOLE = (
    "DataParallel runs the whole batch of this process on its first device while a mode is active that cannot follow "
    "into other threads: a dispatch or function mode, a torch.func transform, saved-tensor hooks."
)
_CANNOT_MEET = (
    "sync_batch_norm=True over several processes while a mode is active that cannot follow into other threads (a "
    "dispatch or function mode, a torch.func transform, saved-tensor hooks): leave the mode, or use "
    "sync_batch_norm=False. Activation checkpoints belong inside the module."
)
_REENTRANT = (
    "a reentrant activation checkpoint inside the module, while a mode is active that cannot follow into other threads "
    "(saved-tensor hooks, a checkpoint around the model): it computes again when the parameters whose gradients are "
    "summed over the processes are no longer in their places. Use checkpoint(..., use_reentrant=False), or leave the "
    "mode."
)
_NO_ROWS = (
    "this process has a batch without rows, while others have some: to take part in the step, the module ran on rows "
    "of the first batch that it has had, or of zeros, if it has had none. If it cannot, give every process as many "
    "batches."
)
_STAND_IN_ROWS = 2  # batch norm needs more than one


def forward_over_processes(
    engine: Engine, gradient_sync: GradientSync, devices: Sequence[torch.device], module: nn.Module, call: Call
) -> Any:
    """Run a forward of `module` with `engine`; its backward sums the gradients over the processes.

    Args:
        devices: all that this process has, with and without rows in this call.

    Raises:
        RuntimeError: a mode is active that rules it out.
    """
    rules = call.rules
    if len(devices) == 1:  # as with one device alone: there is nothing to join, and what is 0-dim stays so
        call = replace(call, rules=replace(rules, out_dims=None))
    if call.arguments.rows == 0:
        return without_rows(_on_stand_in(engine, gradient_sync, devices, module, call), rules)
    output = _contributing(engine, devices, module, call, gradient_sync.sync_context(module, call.arguments.rows))
    if gradient_sync.sample is None and call.arguments.rows:
        gradient_sync.sample = call.arguments.first_rows(_STAND_IN_ROWS)
    return output


def _on_stand_in(
    engine: Engine, gradient_sync: GradientSync, devices: Sequence[torch.device], module: nn.Module, call: Call
) -> Any:
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    # One replica, as for no rows: several might have too few each.
    sample = gradient_sync.sample
    if sample is None or len(sample.leaves) != len(call.arguments.leaves):
        sample = call.arguments.with_rows(_STAND_IN_ROWS)
    stand_in = replace(call, arguments=sample, sizes=(_STAND_IN_ROWS,))
    try:
        output = _contributing(engine, devices, module, stand_in, gradient_sync.sync_context(module, 0))
    except BaseException as error:
        error.add_note(_NO_ROWS)
        raise
    for buffer, before in buffers:
        buffer.data.copy_(before)
    return output


def _contributing(
    engine: Engine, devices: Sequence[torch.device], module: nn.Module, call: Call, sync_context: SyncContext
) -> Any:
    if modes_that_stay():
        output = _in_callers_graph(devices, module, call, sync_context)
    else:
        output = engine.forward(module, replace(call, sync_context=sync_context))
    sync_context.has_run()
    return output


def _in_callers_graph(devices: Sequence[torch.device], module: nn.Module, call: Call, sync_context: SyncContext) -> Any:
    if call.sync_batch_norm:
        raise RuntimeError(_CANNOT_MEET)
    if len(devices) > 1:
        log_once(_RUNS_WHOLE)
    run = sync_context.of_callers_graph(module, call.method)
    [shard] = scattered(call.arguments, call.devices[:1], [call.arguments.rows or 0])
    # As a replica, for the wrappers inside.
    [output] = values_or_raise(run_together([lambda: run(*shard)], call.devices[:1]), call.where()[:1])
    reached = leaves_and_nodes([tensor for _, tensor in pytree.tensors(output)])
    if any("CheckpointFunctionBackward" in str(node) for node in reached if not isinstance(node, torch.Tensor)):
        raise RuntimeError(_REENTRANT)
    return pytree.map_tensors(lambda tensor: _devices.copy_to(tensor, call.output_device), output)
