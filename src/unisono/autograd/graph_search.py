"""What do the replicas' graphs lead to beside their own tensors, and which outputs lie on the way to others?

A live tensor of the module that a replica reaches is an error: its gradient would be wrong. A graph is searched once a
structure.
"""

from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from unisono.autograd.live_gradients import Collector, collectors_with_nodes, is_bucket_node
from unisono.autograd.replica_graph import CapturedTensors, OutputPaths, ReplicaGraphs
from unisono.primitives.blueprint import Blueprint
from unisono.primitives.gather import Group
from unisono.runtime.torch_private import engine, graph_nodes

_GOES_ON = (
    "{place} used a tensor that another forward has stored (in a dict, or in an object that is not a module) without "
    "detach(). Its gradient cannot go on into that forward's replicas. Return the tensor from that forward and pass it "
    "to this one as an input; or detach() it."
)


class Recorded(NamedTuple):
    """What the replicas have recorded in forward.

    Attributes:
        num_nodes: that each replica has made.
        has_hooks, has_reentrant_checkpoint: whether saved-tensor hooks, which a checkpoint has, or a reentrant
            checkpoint have begun in forward, or in one that runs at the same time.
    """

    num_nodes: tuple[int, ...]
    has_hooks: bool
    has_reentrant_checkpoint: bool


class GraphSearch:
    """Searches the graphs of replicas with `search_graphs`, once per structure if nothing is found there.

    A structure is that of the module and of the inputs, and what a global or a buffer may decide: how many nodes
    forward has made, and whether a checkpoint has begun. Whether graphs go on into those of earlier forwards depends on
    what forward finds where it keeps tensors: that is looked for each time, by torch.
    """

    def __init__(self) -> None:
        # Structures in whose graphs no captured tensor was found; what else was.
        self._self_contained: dict[Hashable, CapturedTensors] = {}

    def captured_tensors(
        self,
        blueprint: Blueprint,
        groups: Sequence[Group],
        names: Sequence[str],
        collectors: Sequence[Collector],
        recorded: Recorded,
        *,
        structure: Hashable,
        may_differ: bool,
        numbers_of_linked: tuple[int, ...],
        in_parts: bool,
        in_callers_graph: bool,
    ) -> CapturedTensors:
        """Return the leaves in the graphs behind `groups` that belong neither to the module nor to a replica.

        The next forward of a structure `may_differ` where the inputs carry objects. In replicas `in_parts` outputs are
        joined of parts.
        `numbers_of_linked` are those of `Shards`. `in_callers_graph` with the caller's, graphs may go on into those of
        earlier forwards, and outputs may lead to others: that is torch's matter.
        """
        ends = [tensor for group in groups for tensor in group.tensors if tensor is not None]
        flags = (*map(_requires_grad, ends),)
        kind = len(groups), in_parts, numbers_of_linked, flags, recorded, in_callers_graph, structure
        found = None if may_differ else self._self_contained.get(kind)
        if found is not None and (in_callers_graph or not lead_to_others(ends, collectors)):
            return found
        captured = search_graphs(blueprint, groups, names, collectors, in_callers_graph=in_callers_graph)
        has_reentrant_checkpoint = recorded.has_reentrant_checkpoint or captured.has_reentrant_checkpoint
        captured = captured._replace(
            has_reentrant_checkpoint=has_reentrant_checkpoint,
            has_checkpoint=has_reentrant_checkpoint or recorded.has_hooks,
            paths=OutputPaths() if in_callers_graph else paths_between(groups, in_parts=in_parts),
        )
        if in_callers_graph or not (captured.tensors or may_differ):
            if len(self._self_contained) >= _MOST_STRUCTURES:
                self.clear()
            self._self_contained[kind] = captured
        return captured

    def clear(self) -> None:
        """Search again."""
        self._self_contained.clear()


_MOST_STRUCTURES = 64
_requires_grad = attrgetter("requires_grad")


def search_graphs(
    blueprint: Blueprint,
    groups: Sequence[Group],
    names: Sequence[str],
    collectors: Sequence[Collector],
    *,
    in_callers_graph: bool,
) -> CapturedTensors:
    """Return what replicas' graphs lead to; check that none leads to a tensor of the live module.

    Args:
        collectors: those of the forward.
        in_callers_graph: as in `GraphSearch.captured_tensors`.

    Raises:
        RuntimeError: one does, and its gradient would be wrong. Names the tensor, and the cause. Or a graph goes on
            into that of another forward.
    """
    if not groups:  # outputs without tensors
        return CapturedTensors()
    captured: dict[int, torch.Tensor] = {}
    reached_by: dict[Any, int] = {}  # nodes of tensors' histories, each with the first replica that leads to it
    has_reentrant_checkpoint = are_linked = has_batch_norm = share_nodes = False
    histories = {tensor.grad_fn: tensor for tensor in blueprint.histories.values()}
    of_replicas = zip(names, zip(*(group.tensors for group in groups), strict=True), strict=True)
    for index, (place, outputs) in enumerate(of_replicas):
        for reached in leaves_and_nodes([output for output in outputs if output is not None]):
            if isinstance(reached, torch.Tensor) and id(reached) in blueprint.parameters:
                if not any(reached is live for collector in collectors for live in collector.live):
                    raise RuntimeError(
                        f"{place}: forward has switched on the gradient of {blueprint.name_of(reached)}, which was off "
                        "when forward began, so replicas collect none for it. Switch it on before the call "
                        "(model.module.requires_grad_(True), or only that of this layer)."
                    )
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(reached)} of the original module instead of its own "
                    "copy: something in the module refers to the original, and unisono cannot replace it. "
                    "Examples are an object that stores the module or one of its methods, or a hook that "
                    "uses a variable for its module. In forward, use self; in a hook, use its argument."
                )
            if isinstance(reached, torch.Tensor):
                if reached.requires_grad:
                    captured[id(reached)] = reached
                continue
            # In the caller's graph that of an earlier forward goes on; ranks do not sum what leads to live parameters.
            if reached in histories and (not in_callers_graph or _leads_to_parameters(histories[reached], blueprint)):
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(histories[reached])}, a tensor that was computed "
                    "outside forward and requires grad. Pass it to the model as an input, compute it in "
                    "forward, or detach() it."
                )
            if is_bucket_node(reached):
                are_linked |= reached.replica != index
                if reached.collector not in collectors and not in_callers_graph:
                    raise RuntimeError(_GOES_ON.format(place=place))
            elif not hasattr(reached, "variable"):
                share_nodes |= reached_by.setdefault(reached, index) != index
            has_reentrant_checkpoint |= is_reentrant_checkpoint(reached)
            has_batch_norm |= graph_nodes.is_batch_norm_in_training(reached)
    return CapturedTensors([*captured.values()], has_reentrant_checkpoint, are_linked, has_batch_norm, share_nodes)


def _leads_to_parameters(tensor: torch.Tensor, blueprint: Blueprint) -> bool:
    """Return whether a tensor was computed from live parameters, not by way of a forward's buckets."""
    reached = leaves_and_nodes([tensor])
    return any(id(each) in blueprint.parameters for each in reached if isinstance(each, torch.Tensor))


def paths_between(groups: Sequence[Group], *, in_parts: bool) -> OutputPaths:
    """Return which outputs lie on the way to others, in the graph of any replica."""
    upstream: list[set[int]] = [set() for _ in groups]
    for tensors in zip(*(group.tensors for group in groups), strict=True):
        edges = {k: torch.autograd.graph.get_gradient_edge(t) for k, t in enumerate(tensors) if _needs_gradient(t)}
        if len(edges) < 2:
            continue
        places: dict[tuple[Any, int], set[int]] = {}
        for k, edge in edges.items():
            for place in edge.node.next_functions if in_parts else [(edge.node, edge.output_nr)]:
                places.setdefault(place, set()).add(k)
        reached: dict[Any, set[int]] = {}  # the outputs behind each node
        for k, edge in edges.items():
            pending: list[Any] = [edge.node]
            while pending:
                following = () if is_bucket_node(pending[-1]) else pending[-1].next_functions
                following = [place for place in following if place[0] is not None]
                if missing := [node for node, _ in following if node not in reached]:
                    pending += missing
                else:
                    behind = [places.get(place, set()) | reached[place[0]] for place in following]
                    reached[pending.pop()] = set().union(*behind)
            upstream[k] |= reached[edge.node] - {k}
    on_way = sorted(set().union(*upstream))
    levels = [0] * len(groups)
    for _ in on_way:  # the longest path has no more outputs
        levels = [max([levels[other] + 1 for other in behind], default=0) for behind in upstream]
    return OutputPaths(levels, on_way) if on_way else OutputPaths()


def _needs_gradient(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def is_reentrant_checkpoint(node: Any) -> bool:
    """Return whether a node of a graph runs a backward inside backward for an activation checkpoint.

    The checkpoint may be in the replicas of a wrapper inside the module, behind the node of its boundary.
    """
    inner = getattr(node, "graphs", None)
    if isinstance(inner, ReplicaGraphs):
        return inner.captured.has_reentrant_checkpoint
    return "CheckpointFunctionBackward" in node.name()


def leaves_and_nodes(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield every leaf tensor and every node in the graph behind `outputs`, as far as the nodes of buckets."""
    pending: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            pending.append(output.grad_fn)
        elif output.requires_grad:
            yield output
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        if is_bucket_node(node):
            continue
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def lead_to_others(ends: Sequence[torch.Tensor], collectors: Sequence[Collector]) -> bool:
    """Return whether graphs lead to the bucket nodes of other forwards than the one that has `collectors`.

    True, too, if they do so through the caller's graph, behind the forward's inputs. No node is seen from Python:
    torch's engine looks, and only where other forwards' bucket nodes may exist. Not looked for are those of a forward
    that still runs, around this one or in another thread.

    Args:
        ends: the tensors where the graphs end.
    """
    alive = [collector for ref in collectors_with_nodes.valuerefs() if (collector := ref()) is not None]
    marks = [each.mark for each in alive if each.inside is None and each not in collectors]
    if not marks:
        return False
    roots = [end for end in ends if end.requires_grad]
    try:
        if roots:
            engine.gradients([_look(*roots)], marks, [_ONE], keep=True)
    except _LeadingError:
        return True
    return False


class _LeadingError(Exception):
    pass


class _Look(torch.autograd.Function):
    """A node whose backward ends at once: torch calls it only where a graph behind it leads to what is looked for."""

    @staticmethod
    def forward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, ...]:
        raise _LeadingError


_look: Any = super(torch.autograd.Function, _Look).apply  # as in boundary.py
_ONE = torch.ones((), dtype=torch.float32, device="cpu")
