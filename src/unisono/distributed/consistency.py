"""Checks that all ranks have the same model and take the same steps, and errors that name the first difference.

Ranks that wait for each other have to do the same things in the same order. Before a reduction, each rank all-gathers
a few numbers that describe it (`RankStep`). If they differ, the ranks all-gather the descriptions behind the numbers,
and every rank raises an error that names the first difference and the ranks.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.distributed.process_group import Communicator, digest_of, ranks_of


class RankStep(NamedTuple):
    """One rank's description of a reduction that it starts; all but the weight must be equal on all ranks.

    Attributes:
        weight: of the rank's gradients.
        model: the number of the model, in the order of wrapping, from 1.
        forward: the number of the forward among the model's forwards in training mode with gradients, from 1.
        training: whether that forward was in training mode.
        digest: of the tensors whose gradients are reduced, and of their buckets.
        buffers: digest of the forms of the buffers that one rank broadcasts; 0 if none does.
        in_no_sync: whether that forward was inside of no_sync().
        weight_given: whether the caller has set the weight.
        is_sum: whether the loss is a sum over rows.
        has_hook: whether a communication hook is registered.
    """

    weight: float
    model: float
    forward: float
    training: float
    digest: float
    buffers: float
    in_no_sync: float
    weight_given: float
    is_sum: float
    has_hook: float


_SAYS = {  # of the one of two ranks for which it is true
    "training": "has run forward in training mode, the other has not",
    "in_no_sync": "is inside no_sync(), the other is not",
    "weight_given": "has set the weight of its batch, the other has not",
    "is_sum": 'has loss="sum", the other has not',
    "has_hook": "has a communication hook, the other has not",
}


def check_same_model(communicator: Communicator, module: nn.Module) -> None:
    """Check that `module` has the same parameters and buffers on every rank.

    Raises:
        RuntimeError: they differ; names the first difference and the ranks.
    """
    doing = "comparing the models"
    all_parameters = module.named_parameters(remove_duplicate=False)
    mine = [
        *((f"parameter {name}", *description_of(t), f"requires_grad={t.requires_grad}") for name, t in all_parameters),
        *((f"buffer {name}", *description_of(t)) for name, t in module.named_buffers(remove_duplicate=False)),
    ]
    digests = [int(digest) for (digest,) in communicator.all_gather([digest_of(repr(mine))], doing).wait()]
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    lists = communicator.all_gather_object(mine, doing)
    of_first, of_other = _differences(lists[0], lists[different[0]])[0]
    raise RuntimeError(
        f"the models of the processes differ: rank 0 has {_shown(of_first)}, {ranks_of(different)} "
        f"{_shown(of_other)}. Every process has to make the same model, layer by layer; where the values differ, rank "
        "0's are used."
    )


def check_same_step(
    communicator: Communicator,
    steps: Sequence[RankStep],
    tensors: Sequence[torch.Tensor],
    module: nn.Module | None,
    doing: str,
) -> None:
    """Check that all ranks have started the same reduction, of the gradients of `tensors`, parameters of `module`.

    Raises:
        RuntimeError: they have not; names the first difference. All ranks raise it.
    """
    rank = next((rank for rank, step in enumerate(steps) if step[1:] != steps[0][1:]), None)
    if rank is None:
        return
    known = {} if module is None else {id(tensor): name for name, tensor in module.named_parameters()}
    parameters = [(known.get(id(tensor), "?"), *description_of(tensor)) for tensor in tensors]
    named = [] if module is None else module.named_buffers()
    buffers = [(f"buffer {name}", *description_of(buffer)[:2]) for name, buffer in named]
    lists = communicator.all_gather_object((parameters, buffers), doing)
    raise RuntimeError(
        f"the processes do not sum the same gradients: {_difference(steps, lists, rank)}. Every process has to run "
        "the same models, in the same order, as often."
    )


def _difference(steps: Sequence[RankStep], tensors: Sequence[tuple[Sequence[Any], Sequence[Any]]], rank: int) -> str:
    """Return, in words, the first difference between ranks 0 and `rank`; `tensors` are their parameters and buffers."""
    first, other = steps[0], steps[rank]
    (parameters, buffers), (other_parameters, other_buffers) = tensors[0], tensors[rank]
    if first.model != other.model:
        return (
            f"rank 0 is in backward of wrapped model {first.model:.0f}, rank {rank} in that of {other.model:.0f}, in "
            "the order in which they were wrapped"
        )
    if first.digest != other.digest:
        differences = _differences(parameters, other_parameters)
        if not differences:
            return f"ranks 0 and {rank} have seen sparse gradients for different parameters"
        of_first, of_other = differences[0]
        return f"where rank 0 has {_shown(of_first)}, rank {rank} has {_shown(of_other)}"
    if first.forward != other.forward:
        return (
            f"rank 0 is in backward of its forward {first.forward:.0f}, rank {rank} of its {other.forward:.0f} "
            "(forwards in training mode, with gradients, from 1)"
        )
    if first.buffers and other.buffers and first.buffers != other.buffers:
        of_first, of_other = _differences(buffers, other_buffers)[0]
        return (
            f"after a forward, rank 0 has {_shown(of_first)}, rank {rank} has {_shown(of_other)}, and all ranks would "
            "get those of one. A tensor whose form depends on the rows should be no buffer"
        )
    name, says = next((name, says) for name, says in _SAYS.items() if getattr(first, name) != getattr(other, name))
    return f"of ranks 0 and {rank}, rank {rank if getattr(other, name) else 0} {says}"


def description_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that must be equal on all ranks: dtype, shape, strides."""
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    return str(tensor.dtype), tuple(tensor.shape), stride


def _differences(first: Sequence[Any], other: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs of entries that differ; None stands for a missing entry."""
    return [(a, b) for a, b in zip_longest(first, other) if a != b]


def _shown(entry: Any) -> str:
    return "nothing more" if entry is None else " ".join(map(str, entry))
