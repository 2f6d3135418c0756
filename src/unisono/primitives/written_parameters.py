"""Parameters that forward writes into, as in `with torch.no_grad(): self.weight.mul_(0.9)`: an error.

On one device that happens once a step. Replicas in the module's memory would do it once each, and the writes of
replicas in memory of their own would be lost. torch's version counters say after forward that it has happened: a
replica in the module's memory shares the counters of the live parameters, and a copy has counters of its own. No
counter sees a write through `.data`, or into an inference tensor: `verify` compares the parameters after a step. Other
memory with other values, as after `self.weight.data = ...`, is looked for in the first step of a structure.

The exception is `max_norm` of an embedding, which shortens rows that are too long: replicas shorten a row to the same
values, however often. Rows that a copy has shortened are shortened in the live weights, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Self, TypeAlias

import torch
from torch import nn

from unisono.runtime.buckets import is_plain
from unisono.runtime.rng import shortened_rows

_version = attrgetter("_version")
_WRITTEN = (
    "forward has written into {names}, {times}. What a replica in memory of its own writes is lost. Make what forward "
    "updates a buffer (register_buffer), of which the first replica's updates stay, or update it outside of forward, "
    "in model.module. For an initialisation from the first batch, call the plain module once before it is wrapped: "
    "with torch.no_grad(): model(inputs)."
)
IN_LANES = "in several replicas at once, where one device would have done so in one batch after the other"

NameOf: TypeAlias = Callable[[torch.Tensor], str]
Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # a live parameter, and a replica's in memory of its own


def in_each(num_replicas: int) -> str:
    """Return in words how often replicas write, or one replica that may run in parts."""
    each = f"{num_replicas} replicas" if num_replicas > 1 else "several parts of a batch"
    return f"once in each of {each}, where one device would have done so once"


class MovedParameters:
    """Finds parameters of replicas that have other memory and values after a forward.

    Other memory alone is right: layers of RNNs put their weights into one piece (`flatten_parameters`).

    Args:
        pairs: live parameters, each with a replica's own.
        name_of, times: as in `WrittenParameters`.
    """

    def __init__(self, pairs: Iterable[Copy], name_of: NameOf, times: str) -> None:
        self._pairs = [pair for pair in pairs if all(map(is_plain, pair))]
        self._name_of, self._times = name_of, times

    def begin(self) -> None:
        """Take the addresses as they are: forward begins."""
        self._addresses = [own.data_ptr() for _, own in self._pairs]

    def end(self) -> None:
        """Raise RuntimeError if forward has assigned the `.data` of a parameter since."""
        pairs = zip(self._pairs, self._addresses, strict=True)
        moved = [(live, own) for (live, own), address in pairs if own.data_ptr() != address]
        names = dict.fromkeys([self._name_of(live) for live, own in moved if not _are_same(live, own)])
        if names:
            raise RuntimeError(_WRITTEN.format(names=", ".join(names), times=self._times))


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.detach(), other.detach().to(one.device))


class WrittenParameters:
    """Finds parameters that the replicas of one forward write into.

    Args:
        root: the live module.
        live: its parameters.
        copies: those of replicas that are in memory of their own.
        name_of: what messages call a parameter.
        times: how often forward writes, in words: `in_each` or `IN_LANES`.
    """

    def __init__(
        self, root: nn.Module, live: Iterable[torch.Tensor], copies: Iterable[Copy], name_of: NameOf, times: str
    ) -> None:
        self._root, self._name_of, self._times = root, name_of, times
        pairs = [(None, tensor) for tensor in live] + [*copies]
        self._watched = [(of, tensor) for of, tensor in pairs if not tensor.is_inference()]
        self._tensors = [tensor for _, tensor in self._watched]

    @classmethod
    def of_replicas(cls, replicas: Sequence[Any], root: nn.Module, name_of: NameOf) -> Self:
        """Return what finds them in any replicas of `root`; parameters that have its parameters' names are copies."""
        live = dict(root.named_parameters())
        found = [pair for each in replicas if isinstance(each, nn.Module) for pair in each.named_parameters()]
        copies = [(live[name], p) for name, p in found if name in live and p is not live[name]]
        return cls(root, live.values(), copies, name_of, in_each(len(replicas)))

    def begin(self) -> None:
        """Take the counters as they are: forward begins."""
        self._versions = [*map(_version, self._tensors)]
        self._shortened = dict(shortened_rows)

    def end(self) -> None:
        """Raise RuntimeError if forward has written into a parameter since."""
        if [*map(_version, self._tensors)] != self._versions:
            names = [*dict.fromkeys(map(self._name_of, self._written()))]
            if names:
                raise RuntimeError(_WRITTEN.format(names=", ".join(names), times=self._times))

    def _written(self) -> Iterator[torch.Tensor]:
        """Yield live parameters that were written into, here or in a copy; apply what copies have shortened."""
        shorten = {
            id(module.weight): module.norm_type
            for module in self._root.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        }
        for (live, tensor), before in zip(self._watched, self._versions, strict=True):
            num_writes = tensor._version - before
            of = tensor if live is None else live
            if not num_writes or (live is None and num_writes == self._num_shortened(tensor)):
                continue
            if id(of) not in shorten:
                yield of
            elif live is not None:
                _take_shorter_rows(live, tensor, shorten[id(of)])

    def _num_shortened(self, tensor: torch.Tensor) -> int:
        address = tensor.data_ptr() if is_plain(tensor) else 0
        return shortened_rows.get(address, 0) - self._shortened.get(address, 0)


def _take_shorter_rows(live: torch.Tensor, copy: torch.Tensor, norm_type: float) -> None:
    """Write those rows of a copy into the live weights that are shorter there."""
    here, before = copy.detach().to(live.device), live.detach()
    is_shorter = here.norm(norm_type, 1, keepdim=True) < before.norm(norm_type, 1, keepdim=True)
    live.data.copy_(torch.where(is_shorter, here, before))  # autograd does not notice: it happened before the lookup
