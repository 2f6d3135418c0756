"""What has to be the same in all processes, and in words what is not.

Processes that wait for each other have to do the same things in the same order. Before they sum anything, each says in
a few numbers what it is about to sum (`RankStep`); where they do not all say the same, the descriptions behind the
numbers are exchanged, and every process raises an error that names the first difference and the ranks.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from manyhands.distributed.process_group import Communicator, digest_of, ranks_of


class RankStep(NamedTuple):
    """What one process says about a sum that it begins; all but the weight has to be alike in all.

    Attributes:
        weight: what its gradients count for.
        model: which one it is among those that were wrapped, from 1.
        forward: which forward of the model, among those in training mode with gradients, from 1.
        training: whether it was in training mode.
        digest: of the tensors whose gradients are summed, and of how they travel.
        synchronised: whether the forward was outside of no_sync().
        weight_given: whether the caller has said what it weighs.
        is_sum: whether the loss is a sum over rows.
        has_hook: whether a communication hook sums.
    """

    weight: float
    model: float
    forward: float
    training: float
    digest: float
    synchronised: float
    weight_given: float
    is_sum: float
    has_hook: float


def check_alike(communicator: Communicator, module: nn.Module) -> None:
    """Check that `module` has the same parameters and buffers in every process.

    Raises:
        RuntimeError: it has not; names the first difference and the ranks.
    """
    doing = "comparing the models"
    all_parameters = module.named_parameters(remove_duplicate=False)
    said = [
        *((f"parameter {name}", *described(t), f"requires_grad={t.requires_grad}") for name, t in all_parameters),
        *((f"buffer {name}", *described(t)) for name, t in module.named_buffers(remove_duplicate=False)),
    ]
    digests = [int(digest) for (digest,) in communicator.all_gather([digest_of(repr(said))], doing).wait()]
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    lists = communicator.all_gather_object(said, doing)
    mine, theirs = _differences(lists[0], lists[different[0]])[0]
    raise RuntimeError(
        f"the models of the processes differ: rank 0 has {_shown(mine)}, {ranks_of(different)} {_shown(theirs)}. "
        "Every process has to make the same model, layer by layer; the values may differ, and are then rank 0's."
    )


def check_steps(
    communicator: Communicator,
    steps: Sequence[RankStep],
    tensors: Sequence[torch.Tensor],
    module: nn.Module | None,
    doing: str,
) -> None:
    """Check that all processes have begun the same sum, of the gradients of `tensors`, parameters of `module`.

    Raises:
        RuntimeError: they have not; names the first difference. All processes raise it.
    """
    rank = next((rank for rank, step in enumerate(steps) if step[1:] != steps[0][1:]), None)
    if rank is None:
        return
    known = {} if module is None else {id(tensor): name for name, tensor in module.named_parameters()}
    names = [known.get(id(tensor), "?") for tensor in tensors]
    lists = communicator.all_gather_object(
        [(name, *described(t)) for name, t in zip(names, tensors, strict=True)], doing
    )
    raise RuntimeError(
        f"the processes do not sum the same gradients: {_difference(steps, lists, rank)}. Every process has to run "
        "the same models, in the same order, as often."
    )


def _difference(steps: Sequence[RankStep], tensors: Sequence[Sequence[Any]], rank: int) -> str:
    """Return in words what two ranks, 0 and `rank`, do not do alike."""
    first, other = steps[0], steps[rank]
    if first.model != other.model:
        return (
            f"rank 0 is in backward of wrapped model {first.model:.0f}, rank {rank} in that of {other.model:.0f}, in "
            "the order in which they were wrapped"
        )
    if first.digest != other.digest:
        differences = _differences(tensors[0], tensors[rank])
        if not differences:
            return f"ranks 0 and {rank} have seen sparse gradients for different parameters"
        mine, theirs = differences[0]
        return f"where rank 0 has {_shown(mine)}, rank {rank} has {_shown(theirs)}"
    if first.forward != other.forward:
        return (
            f"rank 0 is in backward of its forward {first.forward:.0f}, rank {rank} of its {other.forward:.0f} "
            "(forwards in training mode, with gradients, from 1)"
        )
    if first.training != other.training:
        return f"{_one_of(not first.training, rank)} has run forward in training mode, the other has not"
    if first.synchronised != other.synchronised:
        return f"{_one_of(first.synchronised, rank)} is inside no_sync(), the other is not"
    if first.weight_given != other.weight_given:
        return f"{_one_of(not first.weight_given, rank)} has set the weight of its batch, the other has not"
    if first.is_sum != other.is_sum:
        return f'{_one_of(not first.is_sum, rank)} has loss="sum", the other has not'
    return f"{_one_of(not first.has_hook, rank)} has a communication hook, the other has not"


def _one_of(other: Any, rank: int) -> str:
    """Return the one of ranks 0 and `rank` that is meant, and the one that is not."""
    return f"of ranks 0 and {rank}, rank {rank if other else 0}"


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a tensor is like, as far as it has to be the same in all processes."""
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    return str(tensor.dtype), tuple(tensor.shape), stride


def _differences(mine: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs of entries that differ, None where one has no more."""
    return [(a, b) for a, b in zip_longest(mine, theirs) if a != b]


def _shown(said: Any) -> str:
    return "nothing more" if said is None else " ".join(map(str, said))
