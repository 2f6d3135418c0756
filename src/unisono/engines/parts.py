"""A replica's shard in parts, one after the other: of one part only, at a time, are activations in memory.

Each part runs under an activation checkpoint, so it is computed once more in backward. The caller asks for parts
(`StepPlan.parts`), or a replica has run out of memory (rescue.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.engines.step_plan import StepPlan
from unisono.primitives import pytree
from unisono.primitives.change_tracking import GONE, HOOK_FLAGS, HOOKS, fill, restore
from unisono.primitives.dims import OutputRules
from unisono.primitives.gather import Group, Outputs
from unisono.primitives.object_state import is_equal
from unisono.primitives.placements import PaddedShard, Shard, Stack
from unisono.primitives.references import MODES
from unisono.primitives.scatter import Arguments, scattered
from unisono.primitives.split_sizes import split_rows
from unisono.runtime.torch_private.modes import without_modes

NO_PARTS = "cannot run the rows of {where} in parts (rescue=True, parts=): {reason}."


class Parts(NamedTuple):
    """How a replica runs its shard in parts, one after the other, so that it needs less memory."""

    sizes: tuple[int, ...]  # the rows of each
    axes: tuple[int | None, ...]  # of each leaf of the inputs, the axis that holds the rows
    rules: OutputRules  # how outputs are joined


def parts_of(row_limits: Mapping[int, int], plan: StepPlan, root: nn.Module, index: int) -> Parts | None:
    """Return how a replica runs its shard in parts; None: as a whole.

    Args:
        row_limits: how many rows fit in each replica's memory, by its number, where that is known.
        index: of the replica in the plan.

    Raises:
        RuntimeError: the caller wants parts, and its module or the other options do not allow them.
    """
    rows = plan.sizes[index]
    if rows < 2:
        return None
    limit = row_limits.get(plan.replica_numbers[index], rows)
    number = max(-(-rows // limit), min(plan.parts, rows))
    if number <= 1:
        return None
    if reason := why_no_parts(plan, root):
        if plan.parts == 1:
            return None
        raise RuntimeError(NO_PARTS.format(where=plan.names[index], reason=reason))
    return Parts(tuple(split_rows(rows, number, "even")), tuple(plan.axes), plan.part_rules)


def why_no_parts(plan: StepPlan, root: nn.Module) -> str | None:
    """Return why no replica of a call can run its shard in parts; None if they can."""
    if plan.sync_batch_norm:
        return "its replicas wait for each other in forward"
    if plan.rows is None:
        return "the inputs have no rows"
    if plan.rules.amounts is not None:
        return "the weight of each part in a mean is unknown"
    of_batch = (
        f"{name or 'the model itself'} ({type(module).__name__}) normalises over all its rows"
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
    function, assign_as_last_part = _with_attributes_of_now(root, function)
    arguments = Arguments(args, kwargs, parts.rules.dim).find_rows(axes=parts.axes)
    shards = scattered(arguments, [device] * len(parts.sizes), parts.sizes)
    buffers = _written(root)
    if not torch.is_grad_enabled():
        outputs = [function(*args, **kwargs) for args, kwargs in shards]
    else:
        outputs = [checkpoint(function, *args, use_reentrant=False, **kwargs) for args, kwargs in shards]
    assign_as_last_part()
    if changed := [name for name, state in _written(root).items() if state != buffers.get(name)]:
        raise RuntimeError(NO_PARTS.format(where="a replica", reason=f"forward changes the buffer {changed[0]!r}"))
    live = {id(tensor): tensor for tensor in chain(root.parameters(), root.buffers())}
    rules = replace(parts.rules, warnings=None)  # what is not by rows is an error
    matched = Outputs(outputs, rules, parts.sizes, [live] * len(parts.sizes))
    output = matched.put_together([group.placement.join(group.tensors) for group in matched.groups], device)
    if reason := _not_by_rows(matched.groups, parts.sizes) or _other_structure(output, outputs[0]):
        raise RuntimeError(NO_PARTS.format(where="a replica", reason=reason))
    return output


def _with_attributes_of_now(
    root: nn.Module, function: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Return a function for which the module's attributes are those of now, in each call: of parts, and in backward.

    What a part assigns is lost, as what a replica assigns is; else the next part, and the second computation of each,
    would find it; so are hooks. Also returns what ends the first computation: the replica then has what the last part
    has assigned, and modes around backward do not see the second.
    """
    assigned: list[list[tuple[dict[str, Any], dict[str, Any]]]] | None = []  # by each part
    modules = [*root.modules()]
    hooks = [module.__dict__.get(name) for name in (*HOOKS, *HOOK_FLAGS) for module in modules]
    dicts = [*(module.__dict__ for module in modules), *(each for each in hooks if isinstance(each, dict))]
    start = [*map(dict, dicts)]

    def part(*args: Any, **kwargs: Any) -> Any:
        before = restore(dicts, start)
        try:
            return function(*args, **kwargs)
        finally:
            held = restore(dicts, start)
            if assigned is not None:
                assigned.append(held)
            for target, items in before:
                fill(target, items)

    def end() -> None:
        nonlocal assigned, function
        *earlier, last = assigned or [[]]
        for target, items in last:
            of_earlier = [next((held for each, held in of_part if each is target), target) for of_part in earlier]
            # A flag that not all parts set alike may follow from the rows of one: the replica keeps what it had.
            flags = {key: value for key, value in items.items() if type(value) in MODES}
            unlike = {k for k, v in flags.items() if any(not is_equal(each.get(k, GONE), v) for each in of_earlier)}
            alike = {key: value for key, value in items.items() if key not in unlike}
            fill(target, alike | {key: target[key] for key in unlike if key in target})
        assigned, function = None, without_modes(function)

    return part, end


def _written(root: nn.Module) -> dict[str, tuple[int, int | None]]:
    """Return what changes when a buffer is written or replaced."""
    return {name: (id(b), None if b.is_inference() else b._version) for name, b in root.named_buffers()}


def _not_by_rows(groups: Sequence[Group], sizes: Sequence[int]) -> str | None:
    for group in groups:
        if isinstance(group.placement, Stack):
            return 'it returns scalars, one for each part. Combine them: scalars="mean" or "sum"'
        if isinstance(group.placement, Shard | PaddedShard):
            shard = group.placement if isinstance(group.placement, Shard) else group.placement.rows
            lengths = [tensor.shape[shard.dim] for tensor in group.tensors if tensor is not None]
            if lengths != [*sizes]:
                return (
                    f"for parts of {[*sizes]} rows it returns tensors of lengths {lengths} along dimension {shard.dim}"
                )
    return None


def _other_structure(output: Any, of_part: Any) -> str | None:
    if [path for path, _ in pytree.leaves(output)] == [path for path, _ in pytree.leaves(of_part)]:
        return None
    return "it returns numbers, one for each part"
