"""Checks that all ranks have the same model and take the same steps, and errors that name the first difference.

Ranks that wait for each other have to do the same things in the same order. With a reduction, each rank sends a few
numbers that describe it (`RankStep`): in its first bucket (`SlotWork`), or in an all-gather before that. If they
differ, the ranks all-gather the descriptions behind the numbers, and every rank raises an error that names the first
difference and the ranks.
"""

import struct
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from unisono.distributed.environment import ranks_of
from unisono.distributed.process_group import AllReduceWork, Communicator, GatheredElsewhereError, digest_of

SLOT_BYTES = 64  # of a rank, at the end of the first bucket
WrittenValue: TypeAlias = tuple[str, Any]  # a parameter's name, and a fingerprint of its values

_WRITTEN = (
    "after forward, ranks 0 and {rank} have different values in parameter {name!r}: each rank wrote values "
    "of its own rows into it. Make what forward updates a buffer (register_buffer; all ranks get the first "
    "rank's), or update it outside forward, in model.module, from numbers that all ranks have. To initialise "
    "from the first batch, call the plain module once before you wrap it, with torch.no_grad(): "
    "model(inputs); then all ranks get rank 0's values."
)
_SHORTENED = (
    "after forward, ranks 0 and {rank} have different values in parameter {name!r}: with max_norm each rank "
    "renormalised the entries that it looked up. Leave max_norm out, and renormalise after the optimizer's "
    "step: with torch.no_grad(): weight.renorm_({norm_type}, 0, {max_norm})."
)
_WORDS = 4  # of 16 bits: a weight has so many, and the digest of all else


class RankStep(NamedTuple):
    """One rank's description of a reduction that it starts; all but the weight must be equal on all ranks."""

    weight: float  # of the rank's gradients
    model: float  # the number of the model, in the order of wrapping, from 1
    forward: float  # the number of the forward among the model's forwards in training mode with gradients, from 1
    training: float  # whether that forward was in training mode
    digest: float  # of the tensors whose gradients are reduced, and of their buckets
    written: float  # digest of what forwards have written into parameters; 0 if they have not
    buffers: float  # digest of the forms of the buffers that one rank broadcasts; 0 if none does
    in_no_sync: float  # whether that forward was inside of no_sync()
    weight_given: float  # whether the caller has set the weight
    is_sum: float  # whether the loss is a sum over rows
    has_hook: float  # whether a communication hook is registered


class SlotWork:
    """The ranks' steps, as they come with the sum of the first bucket.

    At the end of the bucket each rank has a slot, where the others have zeros. In it are the bits of the rank's weight
    and a digest of the rest of its step, in words that are exact in float32. The first bucket of every reduction has as
    many bytes, so that ranks that reduce different models can still sum it, and see by the digests that they do.

    Args:
        step: of this rank.
    """

    def __init__(self, communicator: Communicator, step: RankStep, doing: str) -> None:
        self.number = communicator.next_comparison()
        self._communicator, self._step, self._doing = communicator, step, doing
        # The digest has 48 bits, the weight 64.
        bits = struct.pack("<dQ", step.weight, digest_of(repr(step[1:])))
        self._own = [float(word) for word in struct.unpack(f"<{2 * _WORDS}H", bits)]
        self._work: AllReduceWork | None = None

    def write(self, flat: torch.Tensor) -> None:
        """Write this rank's slot; those of the others are zeros."""
        slot = SLOT_BYTES // flat.itemsize
        start = len(flat) - (self._communicator.world_size - self._communicator.rank) * slot
        flat[start : start + len(self._own)] = torch.tensor(self._own, dtype=flat.dtype)

    def sent(self, work: AllReduceWork) -> None:
        """Note that the first bucket is on its way."""
        self._work = work

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._work is not None and self._work.is_completed()

    def wait(self) -> Sequence[Sequence[float]]:
        """Wait until the first bucket is summed; return each rank's step, in rank order.

        Raises:
            RuntimeError: some rank has all-gathered its step, and yet it is equal to this one.
        """
        assert self._work is not None
        try:
            flat = self._work.wait()
        except GatheredElsewhereError:
            steps = self._all_gather()
            if all([step[1:] == steps[0][1:] for step in steps]):
                raise RuntimeError(f"the processes are at {self._doing}, but differ") from None
            return steps
        slot, size = SLOT_BYTES // flat.itemsize, self._communicator.world_size
        table = flat[-slot * size :].tolist()
        words = [table[i : i + len(self._own)] for i in range(0, len(table), slot)]
        if any([each[_WORDS:] != self._own[_WORDS:] for each in words]):
            return self._all_gather()
        weights = [struct.unpack("<d", struct.pack(f"<{_WORDS}H", *map(int, each[:_WORDS])))[0] for each in words]
        return [(weight, *self._step[1:]) for weight in weights]

    def _all_gather(self) -> Sequence[Sequence[float]]:
        return self._communicator.all_gather(self._step, self._doing).wait()


_SAYS = {  # of the one of two ranks for which it is true
    "training": "ran forward in training mode, the other did not",
    "in_no_sync": "is inside no_sync(), the other is not",
    "weight_given": "set the weight of its batch, the other did not",
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
        f"{_shown(of_other)}. Make the same model in every process, layer by layer; values may differ, rank "
        "0's are used."
    )


def check_same_step(
    communicator: Communicator,
    steps: Sequence[RankStep],
    tensors: Sequence[torch.Tensor],
    module: nn.Module | None,
    written: Sequence[WrittenValue],
    doing: str,
) -> None:
    """Check that all ranks have started the same reduction, of the gradients of `tensors`, parameters of `module`.

    Args:
        written: what forwards have written into parameters on this rank since the last reduction.

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
    lists = communicator.all_gather_object((parameters, buffers, written), doing)
    first, other = steps[0], steps[rank]
    if first.written != other.written and first._replace(written=0)[1:] == other._replace(written=0)[1:]:
        raise RuntimeError(_of_written(module, lists[0][-1], lists[rank][-1], rank))
    raise RuntimeError(
        f"the processes do not sum the same gradients: {_difference(steps, lists, rank)}. Run the same models "
        "in every process, in the same order, equally often."
    )


def _of_written(
    module: nn.Module | None, first: Sequence[WrittenValue], other: Sequence[WrittenValue], rank: int
) -> str:
    """Return what ranks 0 and `rank` have written into a parameter, in words, and what to do."""
    (name, _), *_ = [one or another for one, another in _differences(first, other)]
    path, _, _ = name.rpartition(".")
    layer = None if module is None else module.get_submodule(path)
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        return _SHORTENED.format(rank=rank, name=name, norm_type=layer.norm_type, max_norm=layer.max_norm)
    return _WRITTEN.format(rank=rank, name=name)


def _difference(steps: Sequence[RankStep], tensors: Sequence[tuple[Sequence[Any], ...]], rank: int) -> str:
    """Return, in words, the first difference between ranks 0 and `rank`; `tensors` are their parameters and buffers."""
    first, other = steps[0], steps[rank]
    (parameters, buffers, _), (other_parameters, other_buffers, _) = tensors[0], tensors[rank]
    if first.model != other.model:
        return (
            f"rank 0 is in backward of wrapped model {first.model:.0f}, rank {rank} in backward of wrapped model "
            f"{other.model:.0f}, counted in the order of wrapping"
        )
    if first.digest != other.digest:
        differences = _differences(parameters, other_parameters)
        if not differences:
            return f"ranks 0 and {rank} have sparse gradients for different parameters"
        of_first, of_other = differences[0]
        return f"where rank 0 has {_shown(of_first)}, rank {rank} has {_shown(of_other)}"
    if first.forward != other.forward:
        return (
            f"rank 0 is in backward of its forward {first.forward:.0f}, rank {rank} of its "
            f"{other.forward:.0f} (counting forwards in training mode with gradients, from 1)"
        )
    if first.buffers and other.buffers and first.buffers != other.buffers:
        of_first, of_other = _differences(buffers, other_buffers)[0]
        return (
            f"after a forward, rank 0 has {_shown(of_first)}, rank {rank} has {_shown(of_other)}. Buffers "
            "must have the same shape on all ranks: a tensor whose shape depends on the rows must not be a "
            "buffer"
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
