"""How the replicas' tensors are linked to the caller's: inputs that need a gradient, and parameters.

A replica's are outputs of nodes (live_gradients.py), which lead to the live tensors by way of a token. The boundary
(boundary.py) has each live tensor as one input, and each joined output as one output (`BoundaryTensor`).

The parameters are many, and go through in bulk: as one list a replica, without an object or a call for each.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from unisono.autograd.gradient_sums import Contribution
from unisono.autograd.live_gradients import Collector, InsideForward, joined_gradients, leaf_on, own_tensors, token_of
from unisono.autograd.order_of_sums import OverRanks, order_of_sums
from unisono.distributed.gradient_sync import SyncContext
from unisono.primitives.placements import Placement
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import BucketPlan, Gradients, added


class BoundaryTensor(NamedTuple):
    """One input or output of the boundary: its placement, its device, and each replica's tensor.

    Of an input the tensors are those that replicas have of it (None: the replica has no part of it). Of an output they
    are results (None: the replica has none, or it does not count).
    """

    placement: Placement
    device: torch.device
    tensors: Sequence[torch.Tensor | None]
    name: str = ""  # of an output

    @property
    def requires_grad(self) -> bool:
        return bool([tensor for tensor in self.tensors if tensor is not None and tensor.requires_grad])

    def of_gradients(self) -> Self:
        """Return it with the placement by which gradients of the replicas' tensors are joined."""
        return self._replace(placement=self.placement.of_gradients())

    def part(self, tensor: torch.Tensor, index: int, device: torch.device) -> torch.Tensor | None:
        part = self.placement.part(tensor, index)
        return part if part is None or part.device == device else _devices.moved_to(part, device)

    def join(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        on_device = [p if p is None or p.device == self.device else _devices.moved_to(p, self.device) for p in parts]
        return self.placement.join(on_device)

    def join_gradients(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient of an input from those of the replicas' tensors; None if no replica has one."""
        has_any = bool([part for part in parts if part is not None])
        return self.join(self.with_every_part(parts)) if has_any else None

    def with_every_part(self, parts: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return gradients with zeros for rows on which no output depends."""
        if not self.placement.needs_every_part:
            return parts
        return [
            torch.zeros(own.shape, dtype=own.dtype, device=self.device) if part is None and own is not None else part
            for part, own in zip(parts, self.tensors, strict=True)
        ]


class _Alias(torch.autograd.Function):
    """The same tensor with the same history, as another object.

    If a graph referred to the caller's own object, `h += model(h)` would make a cycle of h and the graph.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # None, where no replica used the tensor, stays None
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


class LinkedTensors(NamedTuple):
    """One of the boundary's inputs: a live tensor behind a token, and the replicas' tensors of it."""

    collector: Collector
    token: torch.Tensor
    tensors: BoundaryTensor
    nodes: Sequence[Any]  # the bucket nodes

    @classmethod
    def of_input(cls, tensor: torch.Tensor, placement: Placement, parts: Sequence[torch.Tensor | None]) -> Self:
        """Link parts of one live tensor, one a replica, which need no gradient."""
        if not tensor.is_leaf:
            tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        # The replicas' tensors themselves would make a reference cycle: they refer to the collector.
        forms = [None if p is None else torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parts]
        of_forms = BoundaryTensor(placement, tensor.device, forms)

        def join(contributions: Sequence[Contribution]) -> Gradients:
            return [of_forms.join_gradients(_parts_of(contributions, len(forms)))]

        collector = Collector([tensor], join)
        token = token_of(collector)
        own = [
            None if part is None else own_tensors(token, collector, 0, i, [part.detach()])[0]
            for i, part in enumerate(parts)
        ]
        nodes = [tensor.grad_fn for tensor in own if tensor is not None]
        return cls(collector, token, BoundaryTensor(placement, tensor.device, own), nodes)

    def begin_forward(self) -> None:
        """Keep the gradients of backwards inside forward, for `Collector.end_forward`."""
        self.collector.inside = InsideForward((), ())


def _parts_of(contributions: Sequence[Contribution], num_replicas: int) -> Gradients:
    """Return each replica's gradient of a single tensor."""
    parts: Gradients = [None] * num_replicas
    for each in contributions:
        parts[each.replica] = added(parts[each.replica], each.gradients[0])
    return parts


class LinkedParameters(NamedTuple):
    """The live parameters that need a gradient, and the replicas'."""

    collector: Collector
    token: torch.Tensor
    own: Sequence[Sequence[torch.Tensor]]  # `own[i]` are replica i's, one for each live one
    nodes: Sequence[Any]  # the bucket nodes
    plan: BucketPlan
    is_flat: bool  # whether a replica has memory of its own

    @property
    def live(self) -> Sequence[torch.Tensor]:
        return self.collector.live

    def begin_forward(self) -> None:
        """As `LinkedTensors.begin_forward`."""
        self.collector.inside = InsideForward(self.own, self.plan.numbers)

    def sum_over_ranks(self, sync_context: SyncContext | None) -> None:
        """Have the gradients that come to the live parameters beside a boundary summed over the ranks, if there are."""
        self.collector.over_ranks = None
        if sync_context is not None:
            number = order_of_sums.next_forward(self.token)
            self.collector.over_ranks = OverRanks(partial(sync_context.sum, self.collector.live), number)

    def freeze(self, live: Sequence[torch.Tensor]) -> None:
        """Have the replicas' parameters for some live ones need no gradient, as if forward had switched it off."""
        numbers = [n for n, each in enumerate(self.live) if any(each is parameter for parameter in live)]
        for own in self.own:
            for n in numbers:
                own[n].requires_grad_(False)

    def frozen(self) -> list[torch.Tensor]:
        """Return the live parameters of which all replicas have switched the gradient off, as the module would have."""
        frozen, replicas = self.collector.frozen, range(len(self.own))
        places = ((n, b, place) for b, numbers in enumerate(self.plan.numbers) for place, n in enumerate(numbers))
        return [self.live[n] for n, b, place in places if all((b, i, place) in frozen for i in replicas)]


class LeafTensors(NamedTuple):
    """One of the boundary's inputs behind which the replicas' tensors are leaves: nothing else can lead to them."""

    live: torch.Tensor
    tensors: BoundaryTensor


def link_parameters(
    live: Sequence[torch.Tensor], copied: Sequence[Mapping[int, torch.Tensor]], plan: BucketPlan, *, is_flat: bool
) -> LinkedParameters:
    """Return parameters like the live ones for each replica: outputs of its bucket nodes.

    Args:
        copied: for each replica, copies of the parameters that are not on its device, by id.
        is_flat: whether any has memory of its own.
    """
    collector = Collector(live, partial(joined_gradients, live, plan))
    token = token_of(collector)
    own: list[list[torch.Tensor]] = []
    nodes: list[Any] = []
    for replica, of_replica in enumerate(copied):
        found: dict[int, torch.Tensor] = {}
        for b, numbers in enumerate(plan.numbers):
            if not numbers:
                continue
            given = [own_parameter(live[n], of_replica.get(id(live[n]), live[n])) for n in numbers]
            of_bucket = own_tensors(token, collector, b, replica, given, leaf_on(given[0].device))
            found.update(zip(numbers, of_bucket, strict=True))
            nodes.append(found[numbers[0]].grad_fn)
        own.append([found[n] for n, _ in enumerate(live)])
    return LinkedParameters(collector, token, own, nodes, plan, is_flat)


def own_parameter(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a parameter like the live one in the memory of `data`, which needs no gradient yet."""
    own: torch.Tensor
    if type(parameter) is torch.Tensor:  # a buffer, or a value that functional_call has put there
        own = data.detach()
    elif type(parameter) is not nn.Parameter and isinstance(parameter, nn.Parameter) and _is_plain_inside(parameter):
        own = data.detach().as_subclass(type(parameter))
    else:  # a parameter; or one of a subclass of Tensor, which detach() keeps
        own = nn.Parameter(data.detach(), requires_grad=False)
    return own


def _is_plain_inside(parameter: torch.Tensor) -> bool:
    """Return whether a parameter of a user's class is a plain tensor otherwise."""
    return type(parameter.detach()) is torch.Tensor
