"""The ways that a call of a wrapper can go; `run` chooses one.

    plain module        the wrapper has no devices; or the call is traced, or exported
    one device          one replica with the whole batch needs no graph of its own
    plain composition   the four verbs one after the other, in the caller's thread and graph: a subclass has a verb of
                        its own, a mode is active that cannot follow into other threads, or a hook observes its module
    all devices         each replica runs in a thread; under a launcher its backward sums gradients over the ranks

`map` and `evaluate` give whole batches to lanes instead (`whole_batches`). With shares="measured"
(measured_shares.py), and while a profile is recorded, something is done around the way.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from unisono.engines.graphed import refuse, why_without_graphs
from unisono.engines.replica import ReplicaPool
from unisono.engines.step import NOTES, run_step
from unisono.engines.step_memory import StepMemory, freeze
from unisono.engines.step_plan import Call, StepPlan, called, carries_objects, check_replicas, keep_plan
from unisono.inference.batch_map import Callee
from unisono.inference.lane_choice import choice_for
from unisono.inference.lanes import Lane, LaneCall, open_lanes
from unisono.leftovers.attributes import AnyReplicas
from unisono.leftovers.buffers import (
    buffer_registries,
    commit_buffers,
    commit_values,
    unchanged_on_failure,
    versions_of,
)
from unisono.leftovers.first_steps import AtEnd, Look, refuse_scripted_batch_norm
from unisono.leftovers.report import Kind
from unisono.leftovers.shared import Search
from unisono.leftovers.written_parameters import LookAtParameters, WrittenParameters
from unisono.options import Options
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.change_tracking import HOOKS
from unisono.primitives.checks import check_can_be_replicated
from unisono.primitives.dims import OutputRules
from unisono.primitives.gather import LiveTensors
from unisono.primitives.measured_shares import MeasuredShares, StepTime
from unisono.primitives.placements import check_have_data
from unisono.primitives.replicate import live_tensors_of
from unisono.primitives.sample_lists import SampleList, with_entries
from unisono.primitives.scatter import Arguments, scattered
from unisono.primitives.split_sizes import split_rows
from unisono.primitives.tensor_attributes import carry_attributes
from unisono.runtime import devices as _devices
from unisono.runtime import draws_off, timeline
from unisono.runtime.errors import add_note, is_of_replica, log_once, text_of
from unisono.runtime.interrupts import critical, interruptibly
from unisono.runtime.step_timer import StepTimer
from unisono.runtime.streams import Copies
from unisono.runtime.stuck_threads import ReplicaTimeout
from unisono.runtime.thread_pool import inside_replica, replica_device, replica_path
from unisono.runtime.thread_state import modes_that_stay
from unisono.runtime.timeline import ReplicaTiming
from unisono.runtime.torch_private import checkpoints, compiler, foreach
from unisono.runtime.tracebacks import is_raised_by_unisono
from unisono.sync_batch_norm.over_replicas import inside_synchronised_replica, not_running_together
from unisono.wrapper import Wrapper

NO_ACCELERATOR = (
    "this machine has no accelerator, so DataParallel runs the plain module. For replicas on the CPU write "
    'DataParallel(model, ["cpu"] * n).'
)
_VERBS = ("replicate", "scatter", "parallel_apply", "gather")
_RUNS_WHOLE = (
    "DataParallel with sync_batch_norm=True runs the whole batch on its first device, because a mode is "
    "active that works in one thread only (a dispatch or function mode, a torch.func transform, saved-tensor "
    "hooks), or a hook keeps outputs by their module, and replicas cannot wait for each other in one graph."
)
_NO_VERBS_IN_RANKS = (
    "{name}.{verb} is overridden, so its gradients cannot be summed over processes, nor can batch norm's "
    "statistics. Remove the override, or do not sum over processes: process_group=False."
)
_CHECKPOINT_AROUND = (
    "an activation checkpoint with use_reentrant=False is around a DataParallel on several accelerators "
    "({devices}): their backward threads would all recompute the checkpoint at once, which torch cannot do. "
    "Put the checkpoint inside the module: in its forward, checkpoint(self.layers, x, use_reentrant=False). "
    "Or write use_reentrant=True."
)
_CAPTURED = (
    "a CUDA graph is captured around a DataParallel (torch.cuda.graph, torch.cuda.make_graphed_callables), whose "
    "replicas run in threads, on several devices or processes: a graph has the kernels of one thread. Capture the "
    "module inside, and wrap it for one device: model = torch.cuda.make_graphed_callables(model, inputs); "
    "model = DataParallel(model, [0])."
)
_COMPILED_OUTSIDE = (
    "torch.compile stops at a DataParallel. To compile its replicas, compile the module inside: "
    "DataParallel(torch.compile(model))."
)
# An input of other rows, or one that is not split, raises them.
_OF_SHAPES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError)
_TOO_FEW_FOR_BATCH_NORM = "Expected more than 1 value per channel"  # torch's words
_ONE_ROW = (
    "batch norm in training needs more than one row (sample), and each replica normalises its own rows. "
    "sync_batch_norm=True normalises the rows of all replicas; drop_last=True of the DataLoader leaves out a "
    "short last batch."
)
_TRACED = (
    "torch.fx cannot trace a DataParallel, whose forward takes (*inputs, **kwargs): trace the module inside, "
    "torch.fx.symbolic_trace(model.module)"
)
# Runs a call of a wrapper by its method (None: the module itself), its inputs and, if any, the measured shares.
Way: TypeAlias = Callable[..., Any]


def check_method(module: nn.Module, method: str | None) -> None:
    """Raise TypeError or AttributeError if a module has no such method; None stands for its forward."""
    if method is None:
        return
    if not isinstance(method, str):
        raise TypeError(f"method={method!r}: expected the name of a method")
    if not callable(getattr(module, method, None)):
        raise AttributeError(f"method: {type(module).__name__} has no method {method!r}")


def _overrides(wrapper: Wrapper, verb: str) -> bool:
    """Return whether a verb is a subclass's, or was assigned."""
    return verb in wrapper.__dict__ or getattr(type(wrapper), verb) is not getattr(wrapper._class_of_verbs, verb)


def overridden_verb(wrapper: Wrapper) -> str | None:
    """Return a verb that is overridden; None if none is."""
    if type(wrapper) is wrapper._class_of_verbs and wrapper.__dict__.keys().isdisjoint(_VERBS):
        return None
    return next((verb for verb in _VERBS if _overrides(wrapper, verb)), None)


# ---- the choice -----------------------------------------------------------------------------------


def run(wrapper: Wrapper, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call of the wrapper, whichever way it goes."""
    options, ranks = wrapper._options, wrapper._ranks
    is_compiling = torch.compiler.is_compiling()
    if torch.compiler.is_exporting() if is_compiling else (compiler.has_tracer() and _is_traced(inputs, kwargs)):
        return _on_the_module(wrapper, method, inputs, kwargs)
    if not options.devices:
        return _on_the_module(wrapper, method, inputs, kwargs)
    in_ranks = ranks is not None and ranks.take_part(wrapper._modules["module"], options.sync_batch_norm)
    if not in_ranks and (_is_alone(options, method, is_compiling) or _runs_whole(options)):
        if ranks is None or is_compiling:
            return on_one_device(wrapper, method, inputs, kwargs)
        return ranks.run_plain(
            wrapper._step_memory, wrapper.module, method, partial(on_one_device, wrapper, method, inputs, kwargs)
        )
    if is_compiling:  # the wrapper, or a model around it: replicas stay out of its graph
        return torch.compiler.disable(_run_uncompiled)(wrapper, method, inputs, kwargs, in_ranks)  # type: ignore[no-untyped-call]
    return _run_on_devices(wrapper, method, inputs, kwargs, in_ranks)


def _is_traced(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is traced: replicas stay out of the trace, which then holds for any number of rows.

    Raises:
        TypeError: torch.fx traces the wrapper itself, and hands one object on for any number of inputs.
    """
    if not isinstance(inputs, tuple):
        raise TypeError(_TRACED)
    leaves = chain(pytree.leaves(inputs), pytree.leaves(kwargs))
    return (
        compiler.traces_with_jit()
        or compiler.is_tracing()
        or any(isinstance(leaf, torch.fx.Proxy) for _, leaf in leaves)
    )


def _on_the_module(wrapper: Wrapper, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the plain module with the inputs as they are."""
    return called(wrapper.module, method)(*inputs, **kwargs)


def _is_alone(options: Options, method: str | None, is_compiling: bool) -> bool:
    """Return whether the plain module runs: there is no other device, or the first is fastest and no time is needed."""
    if options.parts > 1:
        return False
    if len(options.devices) == 1:
        return not (options.graphs and options.accelerators) or inside_replica() or is_compiling
    if options.measured is None or is_compiling or inside_replica():
        return False
    shares = options.measured_for(method)
    return shares.is_frozen and shares.on_first_device and not shares.should_time_next()


def _is_graphed_alone(options: Options, *, in_ranks: bool) -> bool:
    """Return whether there is one device, and its steps may be graphs of kernels: else the module itself runs."""
    return options.graphs and bool(options.accelerators) and len(options.devices) == 1 and not in_ranks


def _run_uncompiled(
    wrapper: Wrapper, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any], in_ranks: bool
) -> Any:
    if not inside_replica():
        log_once(_COMPILED_OUTSIDE)
    return _run_on_devices(wrapper, method, inputs, kwargs, in_ranks)


def _run_on_devices(
    wrapper: Wrapper, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any], in_ranks: bool
) -> Any:
    """Run a call on several devices.

    Args:
        in_ranks: whether its backward sums gradients over the ranks.
    """
    options, verb = wrapper._options, overridden_verb(wrapper)
    if verb is not None and in_ranks:
        raise RuntimeError(_NO_VERBS_IN_RANKS.format(name=type(wrapper).__name__, verb=verb))
    if options.accelerators and not inside_replica():
        _check_is_not_captured(options.accelerators)
        _prepare_checkpoint(options.accelerators)
    in_callers_thread = not in_ranks and (verb is not None or modes_that_stay())
    way: Way = plain_composition if in_callers_thread else partial(on_all_devices, in_ranks=in_ranks)
    if options.measured is not None and not inside_replica():  # there replicas run one after the other
        may: dict[str, bool] = {"may_time": not in_callers_thread, "may_use_one_device": not in_ranks}
        return _run_measured(wrapper, method, inputs, kwargs, way, **may)
    return way(wrapper, method, inputs, kwargs)


def _check_is_not_captured(accelerators: Sequence[torch.device]) -> None:
    """Raise RuntimeError where the call would become part of a CUDA graph."""
    if _devices.is_captured(accelerators[0]):
        raise RuntimeError(_CAPTURED)


def _prepare_checkpoint(accelerators: Sequence[torch.device]) -> None:
    """Have an activation checkpoint around the wrapper restore the random states of its accelerators.

    Raises:
        RuntimeError: there are several, and the checkpoint is not a reentrant one.
    """
    if torch.is_grad_enabled():  # in a reentrant one it is off
        if not checkpoints.has_checkpoint_hooks():
            return
        if len(accelerators) > 1:
            raise RuntimeError(_CHECKPOINT_AROUND.format(devices=", ".join(map(str, accelerators))))
    checkpoints.add_to_checkpoint(accelerators, _devices.random_state)


def _run_measured(
    wrapper: Wrapper,
    method: str | None,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    way: Way,
    *,
    may_time: bool,
    may_use_one_device: bool,
) -> Any:
    """Run a call with the measured shares of its kind, and time it if that is due."""
    options, rows = wrapper._options, None
    shares = options.measured_for(method)
    if shares.should_time_next() and may_time and not modes_that_stay():
        with contextlib.suppress(TypeError, ValueError):  # several devices refuse such inputs, with this error
            rows = arguments_of(wrapper, method, inputs, kwargs).rows
    call: Callable[[], Any]
    if shares.on_first_device and may_use_one_device and options.parts == 1:
        call = partial(on_one_device, wrapper, method, inputs, kwargs)
    else:
        timed = {"is_timed": True} if rows else {}
        call = partial(way, wrapper, method, inputs, kwargs, shares, **timed)
    return _timed(call, shares, rows, wrapper._step_memory, options.devices) if rows else call()


def _timed(
    call: Callable[[], Any], shares: MeasuredShares, rows: int, memory: StepMemory, devices: Sequence[torch.device]
) -> Any:
    """Return what a call of `rows` rows returns; its step is recorded in `shares`."""
    weights, sizes, row_limits = shares.weights, shares.sizes(rows), memory.row_limits
    bytes_before = [*map(_devices.allocated_bytes, devices)]
    timings: list[ReplicaTiming] = []  # of the replicas that had rows; empty where they are not known

    def record(seconds: float) -> None:  # the output's graph keeps it alive, so it refers to no tensor
        of_replicas, on_host = iter(timings), _devices.all_on_host(devices)
        replica_s = [_seconds(next(of_replicas), on_host) if size else 0.0 for size in sizes] if timings else []
        most_rows = [
            min(row_limits.get(i, math.inf), _devices.most_rows(device, sizes[i], bytes_before[i]))
            for i, device in enumerate(devices)
        ]
        shares.record(StepTime(weights, sizes, replica_s, seconds, most_rows))

    before, timer = memory.timings, StepTimer(devices, record)
    output = call()
    now = memory.timings
    if now is not before and [timing.rows for timing in now] == [size for size in sizes if size]:
        timings += now
    timer.forward_ended([tensor for _, tensor in pytree.tensors(output)])
    return output


def _seconds(timing: ReplicaTiming, on_host: bool) -> float:
    """Return how long a replica computed; on an accelerator, forward only: backward's time is that of queueing it."""
    return timing.forward_s + timing.backward_s if on_host else timing.forward_s


def _runs_whole(options: Options) -> bool:
    """Return whether batch norm needs all rows but the replicas would run one after the other."""
    if inside_replica():
        return bool(options.sync_batch_norm) or inside_synchronised_replica()
    if options.sync_batch_norm and modes_that_stay():
        log_once(_RUNS_WHOLE)
        return True
    return False


def run_recorded(wrapper: Wrapper, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what `run` does, as a step of this model's profile, or in none: another model's is being recorded."""
    if torch.compiler.is_compiling():
        return run(wrapper, method, inputs, kwargs)
    profile = wrapper._profile  # read once: another thread may end it
    if profile is None or inside_replica():
        with timeline.in_no_step():
            return run(wrapper, method, inputs, kwargs)
    step = profile.new_step()
    with step.recorded(timeline.FORWARD, timeline.SCATTER):
        return run(wrapper, method, inputs, kwargs)


# ---- the plan -------------------------------------------------------------------------------------


def plan_of(
    wrapper: Wrapper,
    method: str | None,
    arguments: Arguments,
    pool: ReplicaPool | None,
    measured: MeasuredShares | None = None,
    *,
    is_timed: bool = False,
    in_ranks: bool = False,
) -> StepPlan:
    """Make the plan of a step, which decides among others which rows each replica gets.

    Without rows there is one replica, on the first device.

    Args:
        arguments: their rows are found.
        pool: of the module as it is now; None: the plain composition has none.
        measured: the shares of this kind of call; None: they are not measured.
        is_timed: as in `StepPlan`.
        in_ranks: whether backward sums gradients over the ranks.
    """
    options, memory, tracked = wrapper._options, wrapper._step_memory, torch.is_grad_enabled()
    sizes = options.sizes(arguments.rows or 0, measured)
    used = [i for i, size in enumerate(sizes) if size] or [options.has_share().index(True)]
    here = device_of_replica(wrapper)
    if arguments.rows and here is None and measured is None:
        wrapper._idle_devices.see(sizes, options.devices, options.has_share)
    has_wrappers = pool is not None and pool.has_wrappers
    has_several = len(used) > 1 or (options.parts > 1 and sizes[used[0]] > 1) or has_wrappers
    structure = counts_as = None if pool is None else (has_several, method, arguments.flags, pool.blueprint.signature)
    if pool is not None and inside_replica():  # the pool is for one step
        counts_as = has_several, method, arguments.flags, (tracked, pool.blueprint.root.training, replica_path())
    rules = part_rules = options.rules(memory.warnings)
    is_rank_of_one = in_ranks and len(options.devices) == 1
    # As with one device alone outputs are not joined, and 0-dim ones stay 0-dim.
    if is_rank_of_one or _is_graphed_alone(options, in_ranks=in_ranks):
        rules = OutputRules(options.dim, None, options.scalars)
    # These have something to be done around backward, or run it again.
    has_more = bool(options.rescue or options.parts > 1 or options.sync_batch_norm)
    plan = StepPlan(
        method=method,
        flags=arguments.flags,
        axes=tuple(arguments.axes),
        rows=arguments.rows,
        sizes=tuple([sizes[i] for i in used]),
        devices=tuple([here or options.devices[i] for i in used]),
        replica_numbers=tuple(used),
        source=here or options.devices[0],
        output_device=here or options.gather_on,
        rules=rules,
        part_rules=part_rules,
        sync_batch_norm=options.sync_batch_norm,
        parts=options.parts,
        rescue=options.rescue,
        timeout_s=options.timeout,
        is_timed=is_timed,
        kernel_graphs=False,
        may_be_in_callers_graph=is_rank_of_one and tracked and not has_more,
        has_several=has_several,
        carries_objects=carries_objects(arguments),
        structure=structure,
        counts_as=counts_as,
        is_early=not (pool is None or memory.first_steps.are_past(counts_as)),
    )
    if not options.graphs or pool is None or here or draws_off.are_off():
        return plan
    reason = why_without_graphs(pool.blueprint, plan, in_ranks=in_ranks, has_wrappers=has_wrappers)
    refuse(pool.blueprint, reason, for_good=False)
    return plan if reason or is_timed else replace(plan, kernel_graphs=True)


def _find_plan(
    wrapper: Wrapper,
    method: str | None,
    arguments: Arguments,
    pool: ReplicaPool | None,
    measured: MeasuredShares | None,
    *,
    is_timed: bool,
    in_ranks: bool,
) -> StepPlan:
    """Return the plan of a call's kind: the one that an earlier call has made, or a new one. Args: as for `plan_of`."""
    options, memory = wrapper._options, wrapper._step_memory
    weights = None if measured is None else tuple(measured.weights)
    of_inputs = arguments.kind(on_any_axis=options.in_dims is not ...)
    kind = of_inputs and (method, torch.is_grad_enabled(), in_ranks, options.version, weights, is_timed, of_inputs)
    plan: StepPlan | None = None if pool is None else pool.blueprint.plans.get(kind)
    if plan is not None:
        arguments.rows, arguments.axes = plan.rows, plan.axes
        return plan
    if _is_graphed_alone(options, in_ranks=in_ranks):  # as the module, it takes inputs of any rows
        arguments.rows, arguments.axes = None, [None] * len(arguments.leaves)
    else:
        _with_rows(wrapper, method, arguments)
    plan = plan_of(wrapper, method, arguments, pool, measured, is_timed=is_timed, in_ranks=in_ranks)
    arguments.check_whole(len(plan.sizes), memory.warnings, in_parts=plan.parts > 1)
    if pool is not None:
        check_replicas(plan, pool.blueprint, memory.warnings)
        if kind is not None and not plan.is_early:
            keep_plan(pool.blueprint.plans, kind, plan)
    return plan


def arguments_of(wrapper: Wrapper, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the inputs, leaf by leaf; raise TypeError or ValueError for what cannot be split."""
    return _with_rows(wrapper, method, Arguments(inputs, kwargs, wrapper._options.dim))


def _with_rows(wrapper: Wrapper, method: str | None, arguments: Arguments) -> Arguments:
    return arguments.find_rows(wrapper._options.in_dims, getattr(wrapper._modules["module"], method or "forward"))


def shards_for(
    wrapper: Wrapper, inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device]
) -> list[tuple[Any, Any]]:
    """Return the (positional, keyword) inputs of each device that has rows, as the verb `scatter` splits them."""
    options, arguments = wrapper._options, arguments_of(wrapper, None, inputs, kwargs)
    sizes = options.sizes(arguments.rows or 0) if len(devices) == len(options.devices) else []
    if not any(sizes):  # other devices than the wrapper's: torch's rule
        sizes = split_rows(arguments.rows or 0, len(devices))
    used = [0] * len(devices) if arguments.rows is None else [size for size in sizes if size] or [0]
    return scattered(arguments, devices[: len(used)], used, wrapper._step_memory.warnings)


def whole_batches(wrapper: Wrapper, method: str | None) -> Callee:
    """Return what `map` and `evaluate` call for each batch: a replica, on whichever device is free."""
    check_method(wrapper.module, method)
    if verb := overridden_verb(wrapper):
        raise RuntimeError(
            f"{type(wrapper).__name__}.{verb} is overridden, but map and evaluate do not use it: call the "
            "model batch by batch instead"
        )
    here, options = device_of_replica(wrapper), wrapper._options
    gradient_sync = None if here else wrapper._gradient_sync()
    devices = [here] if here else options.devices or [torch.device("cpu")]
    output_device = options.gather_on if options.devices and not here else devices[0]

    def lanes_on(devices: Sequence[torch.device]) -> list[Lane]:
        if options.accelerators:
            _check_is_not_captured(options.accelerators)
        call = LaneCall(devices, devices[0], output_device, method, in_ranks=gradient_sync is not None)
        return open_lanes(wrapper._step_memory, wrapper.module, call)

    return Callee(
        open_lanes=lanes_on,
        devices=devices,
        output_device=output_device,
        function=getattr(wrapper.module, method or "forward"),
        in_dims=options.in_dims,
        rules=options.rules(wrapper._step_memory.warnings),
        communicator=gradient_sync.communicator if gradient_sync is not None else None,
        # With a timeout the other lanes have to be there, if the first is stuck.
        choice_for=partial(choice_for, wrapper, method) if options.timeout is None else None,
        timeout_s=options.timeout,
    )


# ---- the ways -------------------------------------------------------------------------------------


def on_one_device(wrapper: Wrapper, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the module on the whole batch, on the first device."""
    # The cost of this is mostly code that is in no cache, so it calls few functions.
    options = wrapper._options
    if _overrides(wrapper, "scatter"):
        (inputs, *_), (kwargs, *_) = wrapper.scatter(inputs, kwargs, options.device_ids[:1])
    first, inside = options.devices[0], inside_replica()
    device = (device_of_replica(wrapper) or first) if inside else first
    module: Any = wrapper._modules["module"]
    function = module if method is None else getattr(module, method)
    try:
        output = function(
            *[_moved(value, device) for value in inputs],
            **(kwargs and {name: _moved(value, device) for name, value in kwargs.items()}),
        )
    except RuntimeError as error:
        check_have_data("scatter", inputs, "inputs")
        check_have_data("scatter", kwargs, "kwargs")
        named = chain(wrapper.module.named_parameters(), wrapper.module.named_buffers())
        elsewhere = next((name for name, t in named if not _devices.same_device(t.device, device)), None)
        if elsewhere is not None:
            add_note(
                error,
                f"{elsewhere!r} is not on {device}, the wrapper's device. Move the module: model.to('{device}')",
            )
        raise
    return output if inside or options.gather_on == first else _moved(output, options.gather_on)


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on `device`, each itself if it is there already."""
    if isinstance(value, torch.Tensor):  # the common case, without pytree's cost
        return value if value.device == device else _copied(value, device)
    if isinstance(value, SampleList):
        entries = [_moved(entry, device) for entry in value]
        is_there = all(one is other for one, other in zip(entries, value, strict=True))
        return value if is_there else with_entries(value, entries)
    # Batches of other registered classes stay the objects that they are, as with the plain module.
    is_inside = (torch.Tensor, SampleList)
    return pytree.map_leaves(lambda leaf: _moved(leaf, device) if isinstance(leaf, is_inside) else leaf, value)


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`, with the attributes that the caller has given it.

    From the host it is copied beside what the device still has to compute. Pinned memory that has been written into may
    be what the device has been told to write last (`copy_(..., non_blocking=True)`): it is copied after that, and the
    host waits. A batch of a loader with pin_memory=True has not been written into since it was pinned.
    """
    if torch.compiler.is_compiling():
        return _devices.moved_to(tensor, device)
    from_host = _devices.is_cpu(tensor.device) and _devices.has_streams(device)
    if from_host:
        _prepare_checkpoint([device])
    # A transform, as of torch.func, has no rule for pinned memory, and a mode may see no streams.
    if (
        not from_host
        or tensor.requires_grad
        or modes_that_stay()
        or (tensor.is_pinned() and (tensor.is_inference() or tensor._version))
    ):
        copy = _devices.moved_to(tensor, device)
    else:
        with Copies([device]) as copies:
            copy = copies.to(tensor, 0)
            copies.wait_copies(0)
    carry_attributes(tensor, [copy])
    return copy


@critical
def on_all_devices(
    wrapper: Wrapper,
    method: str | None,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    measured: MeasuredShares | None = None,
    *,
    in_ranks: bool,
    is_timed: bool = False,
) -> Any:
    """Run a replica on every device, each in a thread, by the plan of this kind of step.

    Args: as for `plan_of`.
    """
    options, memory, ranks = wrapper._options, wrapper._step_memory, wrapper._ranks
    module, here = wrapper._modules["module"], device_of_replica(wrapper)
    frozen = memory.thaw() if memory.frozen else ()
    arguments, plan = Arguments(inputs, kwargs, options.dim), None
    try:
        # In a mode that stays in this thread a rank runs the module itself, and needs no replicas.
        stays = in_ranks and modes_that_stay()
        pool = None if stays else memory.pool_for(module, here or options.devices[0])
        if pool is not None and pool.blueprint.observers and torch.is_grad_enabled() and not in_ranks:
            # A hook keeps tensors of the replicas for the caller: they have to be a part of the caller's graph.
            freeze(frozen)
            if options.sync_batch_norm:
                _with_rows(wrapper, method, arguments)  # refuses what cannot be split, as on several devices
                log_once(_RUNS_WHOLE)
                return on_one_device(wrapper, method, inputs, kwargs)
            return plain_composition(wrapper, method, inputs, kwargs, measured)
        plan = _find_plan(wrapper, method, arguments, pool, measured, is_timed=is_timed, in_ranks=in_ranks)
        call = Call(plan if wrapper._weighed is None else wrapper._weighed(plan), arguments)
        run = None if pool is None else partial(run_step, memory, pool, frozen)
        if ranks is not None and in_ranks:
            return ranks.run_replicas(module, call, run, memory)
        assert run is not None  # modes that stay are for other ways, then
        return run(call)
    except BaseException as error:
        freeze(frozen)
        if issubclass(type(error), _OF_SHAPES) and plan is not None:
            if _TOO_FEW_FOR_BATCH_NORM in text_of(error) and not options.sync_batch_norm:
                add_note(error, _ONE_ROW)
            else:
                _note_split(error, plan, arguments)
        raise


def _note_split(error: BaseException, plan: StepPlan, arguments: Arguments) -> None:
    """Say how the inputs of a call were split, if an error may follow from it."""
    of_replica = is_of_replica(error) and not is_raised_by_unisono(error)
    may_follow = of_replica or text_of(error).startswith("cannot gather")
    has_other_cause = any(text in text_of(error) for text in NOTES)  # which a note says
    if not may_follow or has_other_cause or _devices.is_out_of_memory(error) or issubclass(type(error), ReplicaTimeout):
        return
    if note := arguments.how_split(plan.sizes_of_runs):
        add_note(error, note, first=of_replica)  # what to write, before which replica raised it


@critical
def plain_composition(
    wrapper: Wrapper,
    method: str | None,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    measured: MeasuredShares | None = None,
) -> Any:
    """Run the four verbs one after the other. Args: as for `plan_of`."""
    module, options, here = wrapper.module, wrapper._options, device_of_replica(wrapper)
    check_can_be_replicated(module, chain(module.parameters(), module.buffers()), here or options.devices[0])
    plan, arguments = None, Arguments(inputs, kwargs, options.dim)
    if not _overrides(wrapper, "scatter"):  # a user's own may find rows where ours sees none
        plan = plan_of(wrapper, method, _with_rows(wrapper, method, arguments), None, measured)
        plan = plan if wrapper._weighed is None else wrapper._weighed(plan)
    numbers = plan.replica_numbers if plan else range(len(options.devices))
    device_ids = [here or options.device_ids[i] for i in numbers]
    if plan:
        shards, shard_kwargs = zip(*scattered(arguments, plan.devices, plan.sizes, plan.rules.warnings), strict=True)
    else:
        shards, shard_kwargs = interruptibly(wrapper.scatter, inputs, kwargs, device_ids)
    before, no_replicas = plan_of_verbs.set(plan), live_tensors_of_verbs.set(())
    try:
        with unchanged_on_failure(foreach.of_one_kind(module.buffers())):
            replicas = interruptibly(wrapper.replicate, module, device_ids[: len(shards)])
            common = AnyReplicas(replicas, module)
            modules, live_modules = common.modules[0] if common.modules else [], common.live_modules
            live_tensors = live_tensors_of(replicas, module)
            live_tensors_of_verbs.set(live_tensors)
            registries = buffer_registries(modules)
            own, live = _copied_buffers(replicas[0], live_tensors[0]) if replicas else ([], [])
            versions = versions_of(own)
            calls: Sequence[Any] = [called(replica, method) for replica in replicas]
            if options.sync_batch_norm and len(replicas) > 1:
                calls = [partial(_not_synchronised, call) for call in calls]
            shards_of = [*zip(shards, shard_kwargs, strict=False)]
            devices = [here or options.devices[i] for i in numbers][: len(shards)]
            looks = _looks_at_composition(wrapper, method, arguments.leaves, replicas, common, devices)
            for look in looks:
                look.begin()
            outputs = interruptibly(wrapper.parallel_apply, calls, shards, shard_kwargs)
            for look in looks:
                look.end(outputs)
            output = interruptibly(wrapper.gather, outputs, here or options.output_device)
        commit_values(live, own, versions)
        if changes := registries.changes():
            commit_buffers(changes, modules, live_modules, {}, devices[0], here or options.devices[0])
        rows = () if len(replicas) == 1 else _rows_of(shards_of)
        leftovers = wrapper._step_memory.first_steps.leftovers
        leftovers.add(Kind.ASSIGNED, common.commit(rows, outputs))
        leftovers.say(module)
        return output
    except _OF_SHAPES as error:
        if plan is not None:
            _note_split(error, plan, arguments)
        raise
    finally:
        plan_of_verbs.reset(before)
        live_tensors_of_verbs.reset(no_replicas)


def _copied_buffers(
    replica: Any, live_tensors: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a replica's buffers on another device than the live ones, where the first has no rows, and these."""
    buffers = replica.buffers() if isinstance(replica, nn.Module) else ()
    pairs = [(own, live_tensors[id(own)]) for own in buffers if id(own) in live_tensors]
    remote = [(own, live) for own, live in pairs if not _devices.same_device(own.device, live.device)]
    return [own for own, _ in remote], [live for _, live in remote]


def _not_synchronised(call: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
    """Run a replica whose batch norms would need other replicas: that is an error."""
    with not_running_together():
        return call(*inputs, **kwargs)


def _looks_at_composition(
    wrapper: Wrapper,
    method: str | None,
    leaves: Sequence[Any],
    replicas: Sequence[Any],
    common: AnyReplicas,
    devices: Sequence[torch.device],
) -> list[Look]:
    """Return what looks at one plain composition; `devices` are those of the replicas, which have `common`."""
    module, first_steps = wrapper.module, wrapper._step_memory.first_steps
    # Of the module, or of a part of it.
    has_several = len(replicas) > 1 or any(isinstance(part, Wrapper) for part in module.modules())
    num_hooks = sum([len(part.__dict__[kind]) for part in module.modules() for kind in HOOKS])
    structure = "plain composition", has_several, method, num_hooks, *[m.training for m in module.modules()]
    is_early = not first_steps.are_past(structure)
    looks = list[Look]()
    if len(replicas) > 1:
        written = WrittenParameters.of_replicas(replicas, module, lambda tensor: Blueprint(module).name_of(tensor))
        with_values = has_several and not inside_replica() and first_steps.is_first(structure)
        looks.append(LookAtParameters(written, with_values=with_values))
    if not is_early:
        return looks
    if not has_several or inside_replica():
        return [*looks, first_steps.counted(structure)]
    if len(replicas) > 1:
        replica = replicas[0] if isinstance(replicas[0], nn.Module) else module
        if wrapper._options.sync_batch_norm is None:
            looks.append(first_steps.batch_norm(replica, in_one_process=True))
        elif wrapper._options.sync_batch_norm:
            looks.append(AtEnd(partial(refuse_scripted_batch_norm, replica)))
    own = [each for modules in common.modules for each in modules]
    search = Search(common.live_modules, common.names, observers=Blueprint(module).observers, own=own)
    looks += first_steps.looks(structure, search, leaves, devices, in_threads=not modes_that_stay())
    return looks


def _rows_of(shards: Sequence[Any]) -> set[int]:
    return {len(each[0]) for each, _ in shards if each and isinstance(each[0], torch.Tensor) and each[0].dim()}


# The plan by which the plain composition runs: the verbs in it take the replicas' devices and rows from there.
plan_of_verbs: ContextVar[StepPlan | None] = ContextVar("plan_of_verbs", default=None)
live_tensors_of_verbs: ContextVar[LiveTensors] = ContextVar("live_tensors_of_verbs", default=())  # of its replicas


def device_of_replica(wrapper: Wrapper) -> torch.device | None:
    """Return the device of all replicas if the wrapper is inside a replica itself; None if it is not."""
    if not inside_replica():
        return None
    tensors = chain(wrapper.module.parameters(), wrapper.module.buffers())
    tensor = next((tensor for tensor in tensors if not tensor.is_meta), None)
    return tensor.device if tensor is not None else replica_device()
