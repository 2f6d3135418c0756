"""Parameters that forward writes into, as in `with torch.no_grad(): self.weight.mul_(0.9)`: an error.

On one device that happens once a step. Replicas in the module's memory would do it once each, and the writes of
replicas in memory of their own would be lost. torch's version counters say after forward that it has happened: a
replica in the module's memory shares the counters of the live parameters, and a copy has counters of its own. No
counter sees a write through `.data`, through numpy, or into an inference tensor, and `self.weight.data = ...` gives a
parameter other memory. In the first step of a structure a fingerprint of the values is taken before forward and after;
`verify` compares the parameters after any step.

Under a launcher one replica a rank writes as the module does, for the rows of its rank. The ranks compare what they
have written with the gradients of the next backward (distributed/consistency.py): the same everywhere is right.

The exception is `max_norm` of an embedding, which shortens rows that are too long: replicas shorten a row to the same
values, however often. Rows that a copy has shortened are shortened in the live weights, too.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Self, TypeAlias

import torch
from torch import nn

from unisono.runtime import devices as _devices
from unisono.runtime.buckets import is_plain
from unisono.runtime.rng import shortened_rows

_version = attrgetter("_version")
_WRITTEN = (
    "forward has written into {names}, {times}. A value written into a replica's own memory is lost. Make "
    "what forward updates a buffer (register_buffer; the first replica's updates are kept), or update it "
    "outside forward, in model.module. To initialise from the first batch, call the plain module once before "
    "you wrap it: with torch.no_grad(): model(inputs)."
)
IN_LANES = "in several replicas at once; on one device it would happen batch by batch"
IN_OTHER_MEMORY = "outside the module's memory, as `.data = ...` does"

NameOf: TypeAlias = Callable[[torch.Tensor], str]
Note: TypeAlias = Callable[[Sequence[torch.Tensor]], object]
Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # a live parameter, and a replica's in memory of its own


def in_each(num_replicas: int) -> str:
    """Return in words how often replicas write, or one replica that may run in parts."""
    each = f"{num_replicas} replicas" if num_replicas > 1 else "several parts of a batch"
    return f"once in each of {each}; on one device it would happen once"


class WrittenParameters:
    """Finds parameters that the replicas of one forward write into.

    Args:
        root: the live module.
        live: its parameters.
        copies: those of replicas that are in memory of their own.
        own: those of replicas that are in the memory of the live ones, where they are objects of their own.
        name_of: what messages call one of the live parameters.
        times: how often forward writes, in words: `in_each` or `IN_LANES`.
    """

    def __init__(
        self,
        root: nn.Module,
        live: Sequence[torch.Tensor],
        copies: Sequence[Copy],
        own: Sequence[Copy],
        name_of: NameOf,
        times: str,
    ) -> None:
        self._root, self._name_of, self._times = root, name_of, times
        of_live: list[tuple[torch.Tensor | None, torch.Tensor]] = [(None, tensor) for tensor in live]
        self._watched = [(of, tensor) for of, tensor in [*of_live, *copies] if not tensor.is_inference()]
        self._tensors = [tensor for _, tensor in self._watched]
        # For each parameter of a replica: the live one, and what has its values when forward begins.
        self._all = [(tensor, tensor, tensor) for tensor in live] + [(of, tensor, tensor) for of, tensor in own]
        self._all += [(of, of, tensor) for of, tensor in copies]  # which may still be in flight then

    @classmethod
    def of_replicas(cls, replicas: Sequence[Any], root: nn.Module, name_of: NameOf) -> Self:
        """Return what finds them in any replicas of `root`; parameters that have its parameters' names are copies."""
        live = dict(root.named_parameters())
        found = [pair for each in replicas if isinstance(each, nn.Module) for pair in each.named_parameters()]
        copies = [(live[name], p) for name, p in found if name in live and p is not live[name]]
        return cls(root, [*live.values()], copies, (), name_of, in_each(len(replicas)))

    def begin(self, *, with_values: bool) -> None:
        """Take the counters as they are, and the values: forward begins."""
        self._versions = [*map(_version, self._tensors)]
        self._shortened = dict(shortened_rows)
        self._values = fingerprints([tensor for _, tensor, _ in self._all]) if with_values else None

    def in_several(self) -> list[torch.Tensor]:
        """Return the embeddings' weights that forward has shortened since `begin`.

        Raises:
            RuntimeError: it has written into a parameter.
        """
        counted, shortened = self._counted()
        _raise_if_any(counted + self._changed(), self._name_of, self._times)
        return shortened

    def in_one(self) -> list[torch.Tensor]:
        """Return the parameters that the only replica has written into since `begin`, as the module would have.

        Raises:
            RuntimeError: it has written into other memory than the module's, which the module does not get.
        """
        counted, shortened = self._counted()
        changed = self._changed()
        addresses = {id(live): live.data_ptr() for live in changed}
        lost = [live for live, _, own in self._all if id(live) in addresses and own.data_ptr() != addresses[id(live)]]
        _raise_if_any(lost, self._name_of, IN_OTHER_MEMORY)
        return [*{id(tensor): tensor for tensor in counted + shortened + changed}.values()]

    def is_untouched(self) -> bool:
        """Return whether no counter has changed since `begin`, which has not looked at the values."""
        return self._values is None and [*map(_version, self._tensors)] == self._versions

    def _counted(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the live parameters of which a version counter has changed, and those that were shortened instead.

        What copies have shortened is then so in the live ones.
        """
        shorten = _norms_of_shortening(self._root)
        found: list[torch.Tensor] = []
        shortened: list[torch.Tensor] = []
        for (live, tensor), before in zip(self._watched, self._versions, strict=True):
            num_writes = tensor._version - before
            of = tensor if live is None else live
            if not num_writes:
                continue
            is_shortened = id(of) in shorten or (live is None and num_writes == self._num_shortened(tensor))
            (shortened if is_shortened else found).append(of)
            if live is not None and is_shortened:
                _take_shorter_rows(live, tensor, shorten[id(of)])
        return found, shortened

    def _changed(self) -> list[torch.Tensor]:
        """Return the live parameters that have other values than in `begin`, if it has looked at them."""
        if self._values is None:
            return []
        before, shorten = self._values, _norms_of_shortening(self._root)
        now = fingerprints([tensor for _, _, tensor in self._all])
        found = [each for each, one, other in zip(self._all, before, now, strict=True) if one != other]
        return [live for live, _, own in found if id(live) not in shorten and not self._num_shortened(own)]

    def _num_shortened(self, tensor: torch.Tensor) -> int:
        address = tensor.data_ptr() if is_plain(tensor) else 0
        return shortened_rows.get(address, 0) - self._shortened.get(address, 0)


class LookAtParameters:
    """Looks at the parameters that one forward writes.

    Args:
        written: finds them.
        note: called with those that it may write into, and has written into; None: nothing.
        with_values: whether to compare the values, too: in the first steps of a structure.
        writes_as_module: whether the only replica may write, as the module does.
    """

    def __init__(
        self,
        written: WrittenParameters,
        note: Note | None = None,
        with_values: bool = False,
        writes_as_module: bool = False,
    ) -> None:
        self._written, self._note = written, note
        self._with_values, self._writes_as_module = with_values, writes_as_module

    def begin(self) -> None:
        """Take what there is: forward begins."""
        self._written.begin(with_values=self._with_values)

    def end(self) -> None:
        """Raise RuntimeError if forward has written into a parameter that it may not write into."""
        if self._written.is_untouched():
            return
        changed = self._written.in_one() if self._writes_as_module else self._written.in_several()
        if changed and self._note is not None:
            self._note(changed)


def _raise_if_any(written: Iterable[torch.Tensor], name_of: NameOf, times: str) -> None:
    if names := dict.fromkeys(map(name_of, written)):
        raise RuntimeError(_WRITTEN.format(names=", ".join(names), times=times))


def _norms_of_shortening(root: nn.Module) -> dict[int, float]:
    """Return by id the weights of embeddings with `max_norm`, each with the norm of its rows."""
    embeddings = [each for each in root.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    return {id(each.weight): each.norm_type for each in embeddings if each.max_norm is not None}


def _take_shorter_rows(live: torch.Tensor, copy: torch.Tensor, norm_type: float) -> None:
    """Write those rows of a copy into the live weights that are shorter there."""
    here, before = _devices.copy_to(copy.detach(), live.device), live.detach()
    is_shorter = here.norm(norm_type, 1, keepdim=True) < before.norm(norm_type, 1, keepdim=True)
    live.data.copy_(torch.where(is_shorter, here, before))  # autograd does not notice: it happened before the lookup


_AT_ONCE = 1 << 18  # entries
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number; neighbours' products have little in common
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return what is equal for tensors with equal shapes and bits, and else hardly ever; None for what is not plain.

    Needs little memory, and is exact: integers are summed, in any order.
    """
    keys: list[Any] = []
    by_memory: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        key = None
        if is_plain(tensor) and tensor.device.type != "meta":
            key = tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()
            if key not in by_memory:
                by_memory[key] = _fingerprint(tensor.detach())
        keys.append(key)
    by_device: dict[torch.device, list[Any]] = {}
    for key, found in by_memory.items():
        by_device.setdefault(found.device, []).append(key)
    values = {
        key: (key[-2], value)
        for of_device in by_device.values()
        for key, value in zip(of_device, _numbers([*map(by_memory.__getitem__, of_device)]), strict=True)
    }
    return [*map(values.get, keys)]


def _numbers(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the numbers in scalar tensors of one device, with one transfer where torch can."""
    try:
        numbers: list[Any] = torch.stack([*tensors]).tolist()
    except RuntimeError:  # in torch.func, torch 2.9 cannot
        numbers = [tensor.item() for tensor in tensors]
    return numbers


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    entries = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = entries.resolve_neg().reshape(-1)
    flat = flat.view(_INTEGERS[flat.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if not flat.numel():
        return total
    factors = torch.arange(1, 2 * min(_AT_ONCE, flat.numel()), 2, dtype=torch.int64, device=flat.device) * _ODD
    for piece in torch.split(flat, _AT_ONCE):
        total = total * _ODD + (piece.to(torch.int64) * factors[: piece.numel()]).sum()
    return total
