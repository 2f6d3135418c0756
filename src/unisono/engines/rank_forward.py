"""What is added to a forward where this process trains a model together with others, under a launcher.

The forward has a sync context (gradient_sync.py) that stays with the graph: its backward sums the gradients over the
processes. Without gradients a forward stays in its process; with sync_batch_norm=True one in training mode exchanges
the statistics of batch norm, as one with gradients does. In eval mode none waits for other processes.

Two cases are special:

    a mode that other threads cannot join    the module runs whole and in the caller's graph; its parameters are behind
                                             a node that sums their gradients
    a batch without rows                     many modules cannot run on no rows, and this process must take part in
                                             every exchange. So the module runs on rows of its first batch (on zeros
                                             before that); the output is cut to no rows, and the gradients are ignored
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call

from unisono.autograd.graph_search import is_reentrant_checkpoint, leaves_and_nodes
from unisono.autograd.linked import link_parameters
from unisono.distributed.gradient_sync import SENT_TWICE, GradientSync, SyncContext, UnboundGradientSync
from unisono.engines.step_memory import StepMemory
from unisono.engines.step_plan import Call, called
from unisono.leftovers.buffers import write_values
from unisono.leftovers.written_parameters import LookAtParameters, WrittenParameters
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.gather import without_rows
from unisono.primitives.scatter import scattered
from unisono.primitives.tensor_attributes import carry_attributes
from unisono.runtime import devices as _devices
from unisono.runtime.errors import add_note, log_once
from unisono.runtime.thread_pool import inside_replica, run_together, values_or_raise
from unisono.runtime.torch_private import process_groups
from unisono.sync_batch_norm.across_processes import CrossProcessAllGather, InEvalMode
from unisono.sync_batch_norm.over_replicas import run_as_replica

T = TypeVar("T")

_RUNS_WHOLE = (
    "DataParallel runs the whole batch of this process on its first device, because a mode is active that "
    "works in one thread only: a dispatch or function mode, a torch.func transform, or saved-tensor hooks."
)
_NO_BATCH_NORM_IN_MODE = (
    "sync_batch_norm=True over several processes cannot train while a mode is active that works in one thread "
    "only (a dispatch or function mode, a torch.func transform, saved-tensor hooks): leave the mode, or use "
    "sync_batch_norm=False. Put activation checkpoints inside the module."
)
_REENTRANT = (
    "a reentrant activation checkpoint inside the module cannot run while a mode is active that works in one "
    "thread only (saved-tensor hooks, a checkpoint around the model): its second forward would use other "
    "parameters than those whose gradients are summed. Use checkpoint(..., use_reentrant=False), or leave "
    "the mode."
)
_NO_ROWS = (
    "this process has an empty batch while others have rows. To take part in the step, the module ran on "
    "rows of its first batch, or on zeros before that, and failed. Give every process the same number of "
    "batches."
)
_STAND_IN_ROWS = 2  # batch norm needs more than one


class Ranks:
    """This process's part in training a model together with other ranks: their backward sums the gradients.

    Args:
        gradient_sync: sums the gradients.
        devices: all devices of this process, with and without rows in a call.
    """

    def __init__(
        self, gradient_sync: GradientSync | UnboundGradientSync | None, devices: Sequence[torch.device]
    ) -> None:
        self._gradient_sync = gradient_sync
        self._devices = devices

    @property
    def train_together(self) -> bool:
        """Whether there are several. A loaded model that has not run yet answers for its old group."""
        return self._gradient_sync is not None

    def gradient_sync(self, module: nn.Module) -> GradientSync | None:
        """Return what sums the gradients of `module`; None if a loaded model has this process to itself."""
        if isinstance(self._gradient_sync, UnboundGradientSync):
            self._gradient_sync = self._gradient_sync.bind(module)
        return self._gradient_sync

    def take_part(self, module: nn.Module, sync_batch_norm: bool | None) -> bool:
        """Return whether a forward of `module` that begins now is one of all ranks."""
        if self._gradient_sync is None or not (torch.is_grad_enabled() or (sync_batch_norm and module.training)):
            return False
        return not inside_replica() and self.gradient_sync(module) is not None

    def run_replicas(self, module: nn.Module, call: Call, run: Callable[[Call], Any] | None, memory: StepMemory) -> Any:
        """Do what `step.run_step` does for a forward of all ranks: the backward of its output sums the gradients.

        Args:
            run: runs a call of the module; None: a mode is active that cannot follow into other threads, and the module
                runs whole, in the caller's graph.
            memory: the model's.
        """
        gradient_sync = self._gradient_sync
        assert isinstance(gradient_sync, GradientSync)  # as `take_part` has said
        if process_groups.runs_in_ddp():
            memory.warnings.give(SENT_TWICE)
        try:
            return self._run_replicas(gradient_sync, module, call, run or partial(self._run_noting_writes, module))
        except BaseException as error:
            gradient_sync.communicator.failures.publish_exception(error)
            raise

    def _run_replicas(
        self, gradient_sync: GradientSync, module: nn.Module, call: Call, run: Callable[[Call], Any]
    ) -> Any:
        plan = call.plan
        sync_context, all_gather = gradient_sync.sync_context(module, plan.rows), None
        if plan.sync_batch_norm and module.training:
            communicator, devices = gradient_sync.communicator, gradient_sync.devices
            all_gather = CrossProcessAllGather(communicator, devices, sync_context.weight_of_loss)
            sync_context = replace(sync_context, has_exchanges=True)
        cross_process = (all_gather or InEvalMode()) if plan.sync_batch_norm else None
        call = Call(plan, call.arguments, sync_context, cross_process)
        output = run(call) if plan.rows != 0 else self._run_on_stand_in(gradient_sync, module, call, run)
        if torch.is_grad_enabled():
            sync_context.has_run()
        if gradient_sync.sample is None and plan.rows:
            gradient_sync.sample = call.arguments.first_rows(_STAND_IN_ROWS)
        if all_gather is not None and not torch.is_grad_enabled():
            gradient_sync.share_buffers(module, all_gather.end_forward())
        return output

    def _run_on_stand_in(
        self, gradient_sync: GradientSync, module: nn.Module, call: Call, run: Callable[[Call], Any]
    ) -> Any:
        buffers = list(module.buffers())
        before = [buffer.detach().clone() for buffer in buffers]
        sample = gradient_sync.sample
        if sample is None or len(sample.leaves) != len(call.arguments.leaves):
            sample = call.arguments.with_rows(_STAND_IN_ROWS)
        # `call` has one replica, as every call without rows: several might have too few rows each.
        # Its inputs need gradients as those of `call` do: so does what other ranks exchange in backward.
        plan = replace(call.plan, sizes=(_STAND_IN_ROWS,), rows=_STAND_IN_ROWS)
        stand_in = replace(call, arguments=call.arguments.with_rows_of(sample), plan=plan)
        try:
            output = without_rows(run(stand_in), plan.part_rules)
        except BaseException as error:
            add_note(error, _NO_ROWS)
            raise
        write_values(buffers, before)
        return output

    def run_plain(self, memory: StepMemory, module: nn.Module, method: str | None, call: Callable[[], T]) -> T:
        """Return what `call` returns, which runs the plain module outside of a step.

        Ranks compare what it writes into parameters, if it is the first of its kind.
        """
        first_steps, structure = memory.first_steps, ("outside of a step", method, module.training)
        # A loaded model is bound to its processes in a step: one of them alone may evaluate it before.
        is_bound = isinstance(self._gradient_sync, GradientSync)
        if not is_bound or inside_replica() or not first_steps.is_first(structure):
            return call()
        output = self._noting_writes(module, call, with_values=True)
        first_steps.counted(structure).end()
        return output

    def _noting_writes(self, module: nn.Module, call: Callable[[], T], *, with_values: bool) -> T:
        gradient_sync = self.gradient_sync(module)
        written = WrittenParameters.of_replicas([module], module, lambda tensor: Blueprint(module).name_of(tensor))
        note = None if gradient_sync is None else gradient_sync.note_written
        look = LookAtParameters(written, note, with_values, known=set())
        look.begin()
        output = call()
        look.end()
        return output

    def _run_noting_writes(self, module: nn.Module, call: Call) -> Any:
        run = partial(self._run_module, module, call)
        return self._noting_writes(module, run, with_values=False)

    @staticmethod
    def _with_own_parameters(module: nn.Module, method: str | None, sync_context: SyncContext) -> Callable[..., Any]:
        """Return a function that calls `module` with parameters whose gradients are summed over the ranks."""
        function = _MethodAsForward(module, method)
        parameters = [parameter for parameter in function.parameters() if parameter.requires_grad]
        if not parameters:
            return function
        linked = link_parameters(parameters, [{}], sync_context.plan(parameters), is_flat=False)
        linked.sum_over_ranks(sync_context)
        by_live = dict(zip(map(id, parameters), linked.own[0], strict=True))
        for parameter in parameters:
            carry_attributes(parameter, [by_live[id(parameter)]], by_live)
        # Each name of a shared parameter, and each module once: torch would untie what it ties.
        places = [(f"{path}.{name}", p) for path, m in function.named_modules() for name, p in m._parameters.items()]
        own = {name: by_live[id(parameter)] for name, parameter in places if id(parameter) in by_live}
        return lambda *args, **kwargs: functional_call(function, own, args, kwargs, tie_weights=False)

    def _run_module(self, module: nn.Module, call: Call) -> Any:
        plan = call.plan
        if plan.sync_batch_norm and module.training:
            raise RuntimeError(_NO_BATCH_NORM_IN_MODE)
        if len(self._devices) > 1:
            log_once(_RUNS_WHOLE)
        run = self._with_own_parameters(module, plan.method, call.sync_context)
        # On the module's device, whether or not the first replica has rows.
        plan = replace(plan, sizes=(plan.rows or 0,), devices=(plan.source,), replica_numbers=(0,))
        [shard] = scattered(call.arguments, plan.devices, plan.sizes, plan.part_rules.warnings)
        # As a replica, so that a wrapper inside the module runs its own replicas one after the other.
        args, kwargs = shard
        task = partial(run, *args, **kwargs)
        if call.cross_process is not None:
            task = partial(run_as_replica, module, task, call.cross_process)
        [output] = values_or_raise(run_together([task], plan.devices), plan.names)
        reached = leaves_and_nodes([tensor for _, tensor in pytree.tensors(output)])
        if any(is_reentrant_checkpoint(node) for node in reached if not isinstance(node, torch.Tensor)):
            raise RuntimeError(_REENTRANT)
        return pytree.map_tensors(lambda tensor: _devices.moved_to(tensor, plan.output_device), output)


class _MethodAsForward(nn.Module):
    """A module whose forward is a method of another module."""

    def __init__(self, module: nn.Module, method: str | None) -> None:
        super().__init__()
        self.module = module
        self._method = method

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return called(self.module, self._method)(*inputs, **kwargs)
