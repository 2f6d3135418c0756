"""Running a step again: after a worker's death, and in smaller parts where a replica ran out of memory. And parts.

A forward that fails has changed nothing, so it is run again as it was called. A backward that fails leaves the graphs
of its forward half used. So a forward whose backward may have to be run again keeps what it began with (`Replay`),
until its graphs are released: the inputs, the random state, the buffers, the module's attributes and the state of the
caller's thread. From these its graphs are made anew, and then the backward runs again. All replicas run again, at once:
that takes no longer than one of them would, and their sums begin anew, too.

A replica runs its shard in parts, each with an activation checkpoint (`run_in_parts`), if the caller says so
(`Call.parts`), or if it ran out of memory: then in parts of half as many rows. Of one part only, at a time, are
activations in memory. The engine remembers how many rows fit (`FailurePolicy.row_limits`).

Guarantees
    - After a death the step ends with exactly the numbers that it would have had: the same rows for each replica, the
      same random numbers, sums in the same order. The outputs of a forward that is run again are compared with those of
      the first one: others are an error.
    - Each time it is logged why a step was run again, and what that took.

Assumes that forward has no effects outside the module: they happen twice. The random numbers of `random` and `numpy`
are not repeated.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.autograd.replica_graph import ReplicaGraphs
from unisono.engines.base import Call, Parts
from unisono.engines.failure_policy import FailurePolicy
from unisono.primitives import pytree
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.change_tracking import fill, restore
from unisono.primitives.inputs import Arguments, scattered
from unisono.primitives.outputs import Group, Outputs
from unisono.primitives.placements import PaddedShard, Shard, Stack
from unisono.primitives.replicate import unchanged_on_failure, write_values
from unisono.primitives.split_sizes import split_rows
from unisono.runtime import devices as _devices
from unisono.runtime import torch_private
from unisono.runtime.buckets import fingerprint, is_plain
from unisono.runtime.errors import ReplicaLost, log
from unisono.runtime.thread_state import ThreadState

T = TypeVar("T")
_requires_grad = attrgetter("requires_grad")

_MOST_DEATHS = 3  # in one forward or backward: a shard that ends its process each time would go on for ever
_OTHER_PROCESSES = "the step was not run again: the other processes, with which batch norm is shared, cannot repeat it"
_TOO_MANY = f"the step was run again {_MOST_DEATHS} times, and a worker died each time"
_CHANGED = (
    "the step was not run again: between forward and backward {number} parameters were changed, an optimizer step "
    "perhaps, so that forward would no longer give the same outputs"
)
_OTHER_OUTPUTS = (
    "a worker died, the step's forward was run again, and it gave other outputs than the first time: its gradients "
    "would not be theirs. The module draws random numbers with `random` or `numpy`, or uses what has changed since."
)
_AGAIN = "%s\nThe step was run again, which took %.2f s."
_NO_PARTS = "the shard of {where} cannot be run in parts (rescue=True, parts=): {reason}"
_NO_SHARD_IN_PARTS = "the shard of a replica cannot be run in parts (rescue=True, parts=): {reason}."
_OTHER_IN_PARTS = (
    "a replica on the same device as %s ran out of memory with a single row. From now on this one runs its %d rows in "
    "parts of %d rows at most, and computes each part again in backward. To give it fewer rows, use shares=."
)
_IN_PARTS = (
    "%s ran out of memory with %d rows. From now on it runs them in parts of %d rows at most, and computes each part "
    "again in backward. To give it fewer rows, use shares=."
)


# ---- the loop -------------------------------------------------------------------------------------


def run_recovering(
    policy: FailurePolicy,
    call: Call,
    module: nn.Module,
    run: Callable[[bool], T],
    why_not: Callable[[], str | None] = lambda: None,
) -> T:
    """Run a forward or a backward, again after each failure from which the engine recovers.

    Args:
        run: is told whether it has failed before.
        why_not: tells why it cannot be run again, if that is so.
    """
    if policy.rescue:
        torch_private.load_checkpoints()  # as long as there is memory
    causes: list[str] = []
    failed_at = 0.0
    while True:
        try:
            result = run(bool(causes))
        except Exception as error:
            cause = _cause(policy, call, module, error, causes, why_not)
            if cause is None:
                raise
            failed_at = failed_at or time.perf_counter()
            causes.append(cause)
        else:
            if causes:
                log.warning(_AGAIN, "\n".join(causes), time.perf_counter() - failed_at)
            return result


def _cause(
    policy: FailurePolicy,
    call: Call,
    module: nn.Module,
    error: Exception,
    causes: Sequence[str],
    why_not: Callable[[], str | None],
) -> str | None:
    """Return why a step that raised `error` is run again; None, with a note on the error, if it is not."""
    # A thread that is stuck has no process.
    if policy.retries and isinstance(error, ReplicaLost) and error.pid is not None:
        reason = _OTHER_PROCESSES if call.cross_process is not None else why_not()
        if reason is None and len(causes) >= _MOST_DEATHS:
            reason = _TOO_MANY
        if reason is None:
            return error.cause
    elif policy.rescue and _devices.is_out_of_memory(error):
        reason = why_not() or _lower_limits(policy.row_limits, call, module, error)
        if reason is None:
            return f"{type(error).__name__}: {error}"
    else:
        return None
    error.add_note(reason)
    return None


# ---- a backward that is run again ------------------------------------------------------------------


class Repeatable(NamedTuple):
    """Graphs that can be made anew, and whose backward can therefore be run again.

    Attributes:
        policy, call, module: as in `run_recovering`.
        renew: makes the graphs that it is given anew.
        why_not: tells why they cannot be made anew, if that is so.
    """

    policy: FailurePolicy
    call: Call
    module: nn.Module
    renew: Callable[[ReplicaGraphs], None]
    why_not: Callable[[], str | None]

    def run(self, graphs: ReplicaGraphs, backward: Callable[[], T]) -> T:
        """Run a backward of the graphs, again after each failure from which the engine recovers."""

        def run(has_failed: bool) -> T:
            if has_failed:
                self.renew(graphs)
            return backward()

        return run_recovering(self.policy, self.call, self.module, run, self.why_not)

    def of_gradients(self, graphs: ReplicaGraphs, make: Callable[[], ReplicaGraphs]) -> "Repeatable":
        """Return that of the graphs of the gradients of `graphs`, which `make` makes."""

        def renew(higher: ReplicaGraphs) -> None:
            higher.drop()
            self.renew(graphs)
            with torch.enable_grad():
                higher.take_from(make())

        return self._replace(renew=renew)


class Replay:
    """What a forward began with, and how to make its graphs anew.

    Args:
        policy, call, blueprint: the engine's, the forward's (its inputs are copied), and the live module's.
        buffers: those of the live module, and what they were when the forward began.
        devices: of the replicas in this process.
        forward: runs the call's forward again: it shows its outputs to the replay, and lets it `take` its graphs.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        call: Call,
        blueprint: Blueprint,
        buffers: unchanged_on_failure,
        devices: Sequence[torch.device],
        forward: Callable[[Call, "Replay"], object],
    ) -> None:
        self._policy, self._module = policy, blueprint.root
        self._call = replace(call, arguments=call.arguments.copied())
        self._forward = forward
        self._thread = ThreadState.capture()
        self._devices, self._random = devices, _devices.random_states(devices)
        self._parameters = [*blueprint.parameters.values()]
        self._flags = [*map(_requires_grad, self._parameters)]
        self._trained = [*compress(self._parameters, self._flags)]
        self._dicts = blueprint.attribute_dicts
        self._attributes = [*map(dict, blueprint.attribute_dicts)]
        self._versions: list[Any] = []  # after the forward
        self._buffers = buffers
        self._limits = dict(policy.row_limits)
        self._outputs: list[torch.Tensor] | None = None  # their fingerprints
        self._graphs: ReplicaGraphs | None = None  # those that failed

    def repeatable(self) -> Repeatable:
        """Return what runs a backward of the forward's graphs again."""
        return Repeatable(self._policy, self._call, self._module, self._renew, self._why_not)

    def see_outputs(self, groups: Sequence[Group]) -> None:
        """Take note of the outputs that the forward gave.

        Raises:
            RuntimeError: it was run again, and gave others than the first time.
        """
        self._versions = _versions(self._trained)
        if not self._policy.retries or self._limits != self._policy.row_limits:
            return  # in parts, others within float rounding
        outputs, before = _fingerprints(groups), self._outputs
        if before is not None and not all(map(torch.equal, outputs, before)):
            raise RuntimeError(_OTHER_OUTPUTS)
        self._outputs = outputs

    def take(self, graphs: ReplicaGraphs) -> None:
        """Take the graphs of the forward that was run again, in the place of those that failed."""
        assert self._graphs is not None
        for graph in graphs.graphs():
            graph.take_gradients()  # of a backward inside forward: they have been passed on already
        self._graphs.take_from(graphs)

    def _why_not(self) -> str | None:
        changed = [k for k, version in enumerate(_versions(self._trained)) if version != self._versions[k]]
        if changed:
            return _CHANGED.format(number=len(changed))
        return None

    def _renew(self, graphs: ReplicaGraphs) -> None:
        """Run the forward again for its graphs, with everything as it was; leave everything else as it is."""
        graphs.drop()
        self._graphs = graphs
        buffers = [*chain(*self._buffers.buffers)]
        random, values = _devices.random_states(self._devices), torch_private.clones(buffers)
        flags, attributes = [*map(_requires_grad, self._parameters)], restore(self._dicts, self._attributes)
        try:
            _set_flags(self._parameters, self._flags)
            _devices.set_random_states(self._random, self._devices)
            self._buffers.restore()
            with self._thread.applied():
                run_recovering(self._policy, self._call, self._module, lambda _: self._forward(self._call, self))
        finally:
            self._graphs = None
            write_values(buffers, values)
            _devices.set_random_states(random, self._devices)
            _set_flags(self._parameters, flags)
            for target, items in attributes:
                fill(target, items)


def _versions(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return what changes when a tensor's values or memory change; in C, because a module has many parameters."""
    return [*zip(map(attrgetter("_version"), tensors), map(torch.Tensor.data_ptr, tensors), strict=True)]


def _set_flags(parameters: Sequence[torch.Tensor], flags: Sequence[bool]) -> None:
    for parameter, flag in zip(parameters, flags, strict=True):
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


def _fingerprints(groups: Sequence[Group]) -> list[torch.Tensor]:
    return [fingerprint(t) for group in groups for t in group.tensors if t is not None and is_plain(t) and t.numel()]


# ---- a shard in parts -----------------------------------------------------------------------------


def _lower_limits(row_limits: dict[int, int], call: Call, module: nn.Module, error: Exception) -> str | None:
    """Halve the rows of the replica that raised an error, or of all if that is not known; return why not, if so."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    where = call.where()
    failed = [i for i, place in enumerate(where) if place in notes] or range(len(where))
    if reason := _why_no_parts(call, module):
        return _NO_PARTS.format(where=" and ".join(where[i] for i in failed), reason=reason)
    limits = [
        min(-(-rows // call.parts), row_limits.get(number, rows))
        for number, rows in zip(call.replica_numbers, call.sizes, strict=True)
    ]
    lowered = {i for i in failed if limits[i] > 1}
    for i in set(failed) - lowered:
        # What a single row lacks, another replica on its device may have: not the greediest one fails.
        others = {j for j, limit in enumerate(limits) if limit > 1 and call.devices[j] == call.devices[i]}
        if not others:
            row_limits.pop(call.replica_numbers[i], None)  # parts did not help
            return _NO_PARTS.format(where=where[i], reason="a single row needs more memory than there is.")
        lowered |= others
    for i in sorted(lowered):
        row_limits[call.replica_numbers[i]] = limits[i] // 2
        log.warning(_IN_PARTS if i in failed else _OTHER_IN_PARTS, where[i], call.sizes[i], limits[i] // 2)
    return None


def parts_of(row_limits: Mapping[int, int], call: Call, root: nn.Module, index: int) -> Parts | None:
    """Return how a replica runs its shard in parts; None: as a whole.

    Args:
        row_limits: how many rows fit in each replica's memory, by its number, where that is known.
        index: of the replica in the call.

    Raises:
        RuntimeError: the caller wants parts, and its module or the other options do not allow them.
    """
    rows = call.sizes[index]
    if rows < 2:
        return None
    limit = row_limits.get(call.replica_numbers[index], rows)
    number = max(-(-rows // limit), min(call.parts, rows))
    if number <= 1:
        return None
    if reason := _why_no_parts(call, root):
        if call.parts == 1:
            return None
        raise RuntimeError(_NO_PARTS.format(where=call.where()[index], reason=reason))
    return Parts(tuple(split_rows(rows, number, "even")), tuple(call.arguments.axes), call.part_rules or call.rules)


def _why_no_parts(call: Call, root: nn.Module) -> str | None:
    """Return why no replica of a call can run its shard in parts; None if they can."""
    if call.sync_batch_norm:
        return "its replicas wait for each other in forward."
    if call.arguments.rows is None:
        return "the inputs have no rows."
    if call.rules.amounts is not None:
        return "of its parts it is not known over how much each one's mean is."
    of_batch = (
        f"{name or 'the model itself'} ({type(module).__name__}) normalises over all of its rows."
        for name, module in root.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats)
    )
    return next(of_batch, None)


def run_in_parts(
    root: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: Parts,
    device: torch.device,
) -> Any:
    """Call a replica's function with its shard in parts, one after the other; return the joined output.

    Raises:
        RuntimeError: it writes buffers, or its outputs are not those of the whole shard: it cannot be run in parts.
    """
    function = _with_attributes_of_now(root, function)
    arguments = Arguments(args, kwargs, parts.rules.dim, axes=parts.axes)
    shards = scattered(arguments, [device] * len(parts.sizes), parts.sizes)
    buffers = _written(root)
    if not torch.is_grad_enabled():
        outputs = [function(*args, **kwargs) for args, kwargs in shards]
    else:
        outputs = [checkpoint(function, *args, use_reentrant=False, **kwargs) for args, kwargs in shards]
    if changed := [name for name, state in _written(root).items() if state != buffers.get(name)]:
        raise RuntimeError(_NO_SHARD_IN_PARTS.format(reason=f"its forward changes the buffer {changed[0]!r}"))
    matched = Outputs(outputs, parts.rules, parts.sizes)
    output = matched.put_together([group.placement.join(group.tensors) for group in matched.groups])
    if reason := _not_by_rows(matched.groups, parts.sizes) or _other_structure(output, outputs[0]):
        raise RuntimeError(_NO_SHARD_IN_PARTS.format(reason=reason))
    return output


def _with_attributes_of_now(root: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for which the module's attributes are those of now, in each call: of parts, and in backward.

    What a part assigns is lost, as what a replica assigns is; else the next part, and the second computation of each,
    would find it.
    """
    dicts = [module.__dict__ for module in root.modules()]
    start = [*map(dict, dicts)]

    def part(*args: Any, **kwargs: Any) -> Any:
        before = restore(dicts, start)
        try:
            return function(*args, **kwargs)
        finally:
            restore(dicts, start)
            for target, items in before:
                fill(target, items)

    return part


def _written(root: nn.Module) -> dict[str, tuple[int, int | None]]:
    """Return what changes when a buffer is written or replaced."""
    return {name: (id(b), None if b.is_inference() else b._version) for name, b in root.named_buffers()}


def _not_by_rows(groups: Sequence[Group], sizes: Sequence[int]) -> str | None:
    for group in groups:
        if isinstance(group.placement, Stack):
            return 'it returns 0-dim tensors, which would be one a part. Have them joined: scalars="mean", or "sum"'
        if isinstance(group.placement, Shard | PaddedShard):
            shard = group.placement if isinstance(group.placement, Shard) else group.placement.rows
            lengths = [tensor.shape[shard.dim] for tensor in group.tensors if tensor is not None]
            if lengths != [*sizes]:
                return f"for parts of {[*sizes]} rows it returns tensors of lengths {lengths} along axis {shard.dim}"
    return None


def _other_structure(output: Any, of_part: Any) -> str | None:
    if [path for path, _ in pytree.leaves(output)] == [path for path, _ in pytree.leaves(of_part)]:
        return None
    return "it returns numbers, which would be one a part"
