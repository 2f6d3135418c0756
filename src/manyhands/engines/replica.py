"""A replica's inputs, its parameters, and a search of its graph; for every engine.

`Inputs` splits the caller's inputs into shards, with leaves where a gradient is needed. `Stamp` is one replica with
leaves of its own for the parameters. `look_for_live_tensors` finds tensors in a replica's graph that are not its own.
Copies to other devices may still be in flight when these objects exist: see `streams.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.autograd.broadcast import broadcast_coalesced
from manyhands.autograd.replica_graph import BoundaryTensor, ReplicaGraphs
from manyhands.engines.base import Call
from manyhands.primitives.batch_types import batch_type_of
from manyhands.primitives.blueprint import Blueprint
from manyhands.primitives.outputs import Group
from manyhands.primitives.placements import Placement, Replicate
from manyhands.primitives.references import INERT
from manyhands.runtime import devices as _devices
from manyhands.runtime import torch_private
from manyhands.runtime.streams import Copies


class Inputs:
    """The inputs of every replica, and the leaves behind those that need a gradient.

    Attributes:
        shards: (positional, keyword) inputs, one a replica. The first `num_here` replicas run in this process, and
            their shards are on their devices. The other shards hold the caller's rows or leaves, not copied yet.
        live, edges: the caller's tensors that need a gradient, and the boundary's inputs made of them.
        parts_elsewhere: ids of the tensors in the other shards that have to go to the replica's device.
    """

    def __init__(self, call: Call, tracked: bool, copies: Copies, num_here: int | None = None) -> None:
        here = range(len(call.devices) if num_here is None else num_here)
        self.live: list[torch.Tensor] = []
        self.edges: list[BoundaryTensor] = []
        self.parts_elsewhere: set[int] = set()

        def place(tensor: torch.Tensor, placement: Placement) -> list[torch.Tensor | None]:
            parts = [placement.part(tensor.detach(), i) for i in range(len(call.devices))]
            if tracked and tensor.requires_grad:
                parts = [part if part is None else part.detach().requires_grad_() for part in parts]
                self.live.append(tensor)
                self.edges.append(BoundaryTensor(placement, tensor.device, parts))
            # A copy even on the same device, so that a module that writes into its input writes into its own; and
            # made in the replica's graph, because writing into a leaf is forbidden.
            numbered = enumerate(zip(parts, call.devices, strict=True))
            self.parts_elsewhere.update(id(part) for i, part in enumerate(parts) if i not in here)
            placed = [p if p is None or i not in here else _copied(p, i, d, copies) for i, (p, d) in numbered]
            if tensor.requires_grad and not tracked:  # a module may switch gradients on for what it does inside
                placed = [copy if copy is None else copy.requires_grad_() for copy in placed]
            return placed

        self.shards = call.arguments.deal(call.sizes, place)


def _copied(part: torch.Tensor, replica: int, device: torch.device, copies: Copies) -> torch.Tensor:
    """Return a copy for a replica; a copy linked to a leaf is made at once, on the stream of the rest of the graph."""
    if part.requires_grad or _devices.same_device(part.device, device):
        return _devices.copied_to(part, device)
    return copies.to(part, replica)


def stamped(
    blueprint: Blueprint,
    source: torch.device,
    devices: Sequence[torch.device],
    tracked: bool,
    copies: Copies,
    *,
    with_live_buffers: bool = True,
    separate_memory: bool = False,
) -> list["Stamp"]:
    """Return a replica for each device, the first with the live module's buffers unless these are elsewhere."""
    # A plain tensor in an attribute is copied with the module if it is on the module's device.
    constants = {key: c for key, c in blueprint.constants.items() if _devices.same_device(c.device, source)}
    tensors = {**blueprint.parameters, **blueprint.buffers, **constants}
    copied = broadcast_coalesced(tensors, devices, copies, separate_memory=separate_memory)
    return [Stamp(blueprint, own, tracked, with_live_buffers and i == 0) for i, own in enumerate(copied)]


class Stamp:
    """One replica, and its leaves in place of the live parameters.

    Args:
        blueprint: of the live module.
        copied: by id, copies of the tensors that are not on the replica's device already.
        tracked: whether a graph is built.
        shares_buffers: whether the replica has the live buffers themselves.
    """

    def __init__(
        self, blueprint: Blueprint, copied: Mapping[int, torch.Tensor], tracked: bool, shares_buffers: bool
    ) -> None:
        self.live_parameters: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.is_remote = bool(copied)
        tensors: dict[int, torch.Tensor] = {}
        for key, parameter in blueprint.parameters.items():
            if tracked and parameter.requires_grad:
                tensors[key] = leaf = own_leaf(parameter, copied.get(key, parameter))
                self.live_parameters.append(parameter)
                self.leaves.append(leaf)
            elif key in copied:
                tensors[key] = own_leaf(parameter, copied[key])
        own_buffers = blueprint.buffers_for(copied, shared=shares_buffers)
        self._buffers = [(blueprint.buffers[key], own) for key, own in own_buffers.items()]
        tensors.update(own_buffers)
        for key, constant in blueprint.constants.items():
            tensors[key] = copied.get(key, constant)
        self._stamped = blueprint.stamp(tensors)

    @property
    def replica(self) -> nn.Module:
        return self._stamped.root

    def __del__(self) -> None:
        if hasattr(self, "_stamped"):  # else it was never made
            self._stamped.unlink()

    def renew_buffers(self) -> None:
        """Write the live buffers into this replica's copies."""
        with torch.no_grad():
            torch_private.copy_all_in_place([own for _, own in self._buffers], [live for live, _ in self._buffers])

    def commit_buffers(self) -> None:
        """Write this replica's buffers into the live ones, unless it uses the live ones themselves."""
        for live, own in self._buffers:
            live.data.copy_(own)


def own_leaf(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a parameter like the live one in the memory of `data`: the live one itself, or a copy of it."""
    leaf: torch.Tensor
    if type(parameter) in (nn.Parameter, torch.Tensor):
        leaf = nn.Parameter(data, parameter.requires_grad)
    elif isinstance(parameter, nn.Parameter) and type(parameter.detach()) is torch.Tensor:  # a user's subclass of it
        leaf = data.detach().as_subclass(type(parameter)).requires_grad_(parameter.requires_grad)
    else:  # a subclass of Tensor, which detach() keeps
        leaf = nn.Parameter(data.detach(), parameter.requires_grad)
    for name, value in parameter.__dict__.items():
        leaf.__dict__.setdefault(name, value)
    return leaf


def carries_objects(call: Call) -> bool:
    """Return whether the inputs hold objects of unknown classes.

    Every replica gets the same object. Through a tensor in it the replicas' graphs may share nodes, which no replica's
    backward may free.
    """
    return any(
        not isinstance(leaf, torch.Tensor) and type(leaf) not in INERT and batch_type_of(leaf) is None
        for leaf in call.arguments.leaves
    )


def parameter_edges(live: Sequence[torch.Tensor], leaves: Sequence[Sequence[torch.Tensor]]) -> Iterator[BoundaryTensor]:
    """Yield the boundary's inputs for parameters: `leaves[i][k]` is replica i's leaf for live tensor k."""
    for tensor, of_edge in zip(live, zip(*leaves, strict=True), strict=True):
        yield BoundaryTensor(Replicate(), tensor.device, of_edge)


def pass_on_gradients(graphs: ReplicaGraphs, live: Sequence[torch.Tensor]) -> None:
    """Pass on gradients that the module's own call of backward, inside forward, has left in the replicas' leaves.

    Raises:
        RuntimeError: gradients are to be summed over processes.
    """
    graphs.check_backward_inside_forward()
    parts = zip(graphs.inputs, graphs.take_leaf_gradients(), strict=True)
    gradients = [edge.join_gradients(of_edge) for edge, of_edge in parts]
    reached = [(tensor, grad) for tensor, grad in zip(live, gradients, strict=True) if grad is not None]
    torch_private.run_backward([tensor for tensor, _ in reached], [grad for _, grad in reached], keep=False)


def look_for_live_tensors(
    blueprint: Blueprint, groups: Sequence[Group], where: Sequence[str], own_leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Check that no replica's graph leads to a tensor of the live module.

    Returns:
        The leaves found that belong neither to the module nor to a replica: tensors from outside.

    Raises:
        RuntimeError: one does, and its gradient would be wrong. Names the tensor.
    """
    if not groups:  # outputs without tensors
        return []
    own = set(map(id, own_leaves))
    outside: dict[int, torch.Tensor] = {}
    histories = {tensor.grad_fn: tensor for tensor in blueprint.histories.values()}
    for place, outputs in zip(where, zip(*(group.tensors for group in groups), strict=True), strict=True):
        for reached in leaves_and_nodes([output for output in outputs if output is not None]):
            if isinstance(reached, torch.Tensor) and id(reached) in blueprint.parameters:
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(reached)} of the original module instead of its own: something "
                    "in the module refers to the original in a way that cannot be followed, such as an object that "
                    "holds the module or one of its methods. Reach it through self, in forward."
                )
            if isinstance(reached, torch.Tensor) and reached.requires_grad and id(reached) not in own:
                outside[id(reached)] = reached
            if not isinstance(reached, torch.Tensor) and reached in histories:
                raise RuntimeError(
                    f"{place} used {blueprint.name_of(histories[reached])}, a tensor that was computed outside "
                    "forward and needs gradients. Pass it to the model as an input, compute it in forward, or "
                    "detach() it."
                )
    return list(outside.values())


def leaves_and_nodes(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield every leaf tensor and every node in the graph behind `outputs`."""
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
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
