"""Parameters that forward writes into, as in `with torch.no_grad(): self.weight.clamp_(-1, 1)`.

On one device that happens once a step. So it has to happen once here: where each replica has memory of its own and all
write the same values, those of the first replica become the live parameter's. Other values are an error: each replica
has computed them from its own rows. Replicas that share memory would write several times, and read what others write.
So in the first step of a structure each has memory of its own (`ReplicaPool.take`), and in later ones if it has written
then. Where a later step begins to write, that is an error, and the next step has such memory.

torch's version counters say after forward that it has written: a replica in the module's memory shares the counters of
the live parameters, and a copy has counters of its own. No counter sees a write through `.data`, through numpy, or into
an inference tensor, and `self.weight.data = ...` gives a parameter other memory. In the first step of a structure a
fingerprint of the values is taken before forward and after: parameters in which it differs are compared in all later
steps. `verify` compares the parameters after any step.

Under a launcher the ranks compare what they have written with the gradients of the next backward
(distributed/consistency.py): the same everywhere is right.

The exception is `max_norm` of an embedding, which shortens rows that are too long: replicas shorten a row to the same
values, however often. Rows that a copy has shortened are shortened in the live weights, too.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Self, TypeAlias

import torch
from torch import nn

from unisono.runtime import devices as _devices
from unisono.runtime.buckets import is_plain
from unisono.runtime.rng import shortened_rows

_version = attrgetter("_version")
_WRITTEN = (
    "forward has written into {names}, {times}. Make what forward updates a buffer (register_buffer; the first "
    "replica's updates are kept), or update it outside forward, in model.module. To initialise from the first batch, "
    "call the plain module once before you wrap it: with torch.no_grad(): model(inputs)."
)
IN_LANES = "in several replicas at once; on one device it would happen batch by batch, so call the model for each batch"
_LATE = (
    "{times}. Replicas share memory until forward writes in a first step, or until this error: let it write from the "
    "first step on, or put the old values back (load_state_dict) and go on, and what all write alike counts once"
)
_DIFFER = "with other values in each replica: they are computed from its rows, or drawn"
_ROUNDINGS, _FINE = 16, 1e-6

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
        num_here: how many replicas are in the memory of the live ones.

    Attributes:
        num_here: as above.
    """

    def __init__(
        self,
        root: nn.Module,
        live: Sequence[torch.Tensor],
        copies: Sequence[Copy],
        own: Sequence[Copy],
        name_of: NameOf,
        times: str,
        num_here: int = 1,
    ) -> None:
        self._root, self._name_of, self._times = root, name_of, times
        self._live, self._copies, self._own, self.num_here = live, copies, own, num_here
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
        self._addresses = [_address(own) for _, _, own in self._all] if with_values else []

    def is_untouched(self) -> bool:
        """Return whether no counter has changed since `begin`, which has not looked at the values."""
        return self._values is None and [*map(_version, self._tensors)] == self._versions

    def counted(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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

    def changed(self, *, with_memory: bool) -> list[torch.Tensor]:
        """Return the live parameters that have other values than in `begin`, if it has looked at them.

        Args:
            with_memory: add those that have other memory: in a later step the values there may be others. Not those of
                recurrent layers, which `flatten_parameters` moves.
        """
        if self._values is None:
            return []
        before, shorten = self._values, _norms_of_shortening(self._root)
        layers = [module for module in self._root.modules() if isinstance(module, nn.RNNBase)]
        may_move = {id(parameter) for layer in layers for parameter in layer.parameters()}
        now = fingerprints([own for _, _, own in self._all])
        of_each = zip(self._all, before, now, self._addresses, strict=True)
        found = [
            (live, own)
            for (live, _, own), values, values_now, address in of_each
            if values_now != values or (with_memory and _address(own) != address and id(live) not in may_move)
        ]
        return [live for live, own in found if id(live) not in shorten and not self._num_shortened(own)]

    def numbers_of(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Return the numbers of live parameters, which are the same for later replicas."""
        wanted = {*map(id, parameters)}
        return {number for number, live in enumerate(self._live) if id(live) in wanted}

    def merge(self, numbers: Collection[int], *, may_differ: bool) -> list[torch.Tensor]:
        """Give live parameters the first replica's values; return those parameters.

        Args:
            numbers: theirs.
            may_differ: whether it is no error where no counter has seen that replicas have written other values.

        Raises:
            RuntimeError: replicas have written other values, or into one memory.
        """
        here = {id(live): tensor for live, tensor in reversed(self._own)}
        copies: dict[int, list[torch.Tensor]] = {}
        for live, tensor in self._copies:
            copies.setdefault(id(live), []).append(tensor)
        lives = [live for number, live in enumerate(self._live) if number in numbers]
        each = [[here.get(id(p), p)] * bool(self.num_here) + copies.get(id(p), []) for p in lives]
        if self.num_here > 1:
            self.raise_if_any(lives, _LATE.format(times=self._times))
        differing = [lives[number] for number in _differing(each)]
        self.raise_if_any(self.counted()[0] if may_differ and differing else differing, _DIFFER)
        for live, (first, *_) in zip(lives, each, strict=True):
            if not self.num_here:
                live.data.copy_(first)
            elif first.data_ptr() != live.data_ptr():
                live.data = first.data  # as `.data = ...` has done there
        return lives

    def raise_if_any(self, written: Iterable[torch.Tensor], times: str = "") -> None:
        """Raise RuntimeError if live parameters are `written`; `times` as for the whole."""
        if names := dict.fromkeys(map(self._name_of, written)):
            raise RuntimeError(_WRITTEN.format(names=", ".join(names), times=times or self._times))

    def _num_shortened(self, tensor: torch.Tensor) -> int:
        address = _address(tensor)
        return shortened_rows.get(address, 0) - self._shortened.get(address, 0)


class LookAtParameters:
    """Looks at the parameters that one forward writes.

    Args:
        written: finds them.
        note: called with those that it may write into, and has written into; None: nothing.
        with_values: whether to compare the values, too: in the first steps of a structure.
        known: the numbers of those that forwards of the model are known to write, which this look adds to. None:
            forward may not write.
        may_differ: as in `WrittenParameters.merge`.
    """

    def __init__(
        self,
        written: WrittenParameters,
        note: Note | None = None,
        with_values: bool = False,
        known: set[int] | None = None,
        may_differ: bool = False,
    ) -> None:
        self._written, self._note, self._known = written, note, known
        self._with_values, self._may_differ = with_values, may_differ

    def begin(self) -> None:
        """Take what there is: forward begins."""
        self._written.begin(with_values=self._with_values)

    def end(self, _: Sequence[Any] = (), /) -> None:
        """Give the live parameters what forward has written.

        Raises:
            RuntimeError: it has written into a parameter that it may not write into, or what it may not write.
        """
        written, known = self._written, self._known
        if not known and written.is_untouched():
            return
        counted, noted = written.counted()
        found = counted + written.changed(with_memory=known is not None)
        if known is None:
            written.raise_if_any(found)
        elif known or found:
            known |= written.numbers_of(found)  # then each replica has memory of its own in the next step
            noted += written.merge(known, may_differ=self._may_differ)
        if noted and self._note is not None:
            self._note(noted)


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if is_plain(tensor) else 0


@torch.no_grad()
def _differing(each: Sequence[Sequence[torch.Tensor]]) -> set[int]:
    """Return the numbers of the lists in which other tensors differ from the first, by more than rounding."""
    pairs = [(number, first, other) for number, (first, *others) in enumerate(each) for other in others]
    for is_same in (_is_equal, _is_close):  # most are equal, which is sooner told
        if not pairs:
            break
        same = [is_same(first, _devices.moved_to(other.detach(), first.device)) for _, first, other in pairs]
        flags = _numbers([flag.to(same[0].device) for flag in same])
        pairs = [pair for pair, flag in zip(pairs, flags, strict=True) if not flag]
    return {number for number, _, _ in pairs}


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not is_plain(one) or one.shape != other.shape or one.dtype != other.dtype:
        return torch.zeros((), dtype=torch.bool, device=one.device)
    return (one == other).all()


def _is_close(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether the difference is rounding: another kernel may sum in another order. NaN is equal to NaN."""
    is_number = one.is_floating_point() or one.is_complex()
    if not is_number or not is_plain(one) or one.shape != other.shape or one.dtype != other.dtype:
        return torch.zeros((), dtype=torch.bool, device=one.device)
    eps = torch.finfo(one.dtype).eps
    largest = one.abs().nan_to_num(0, 0, 0).amax()
    bound = _ROUNDINGS * eps * largest if eps < _FINE else 0  # in half precision, a mean over rows may be less
    return (((one - other).abs() <= bound) | (one == other) | (one.isnan() & other.isnan())).all()


def _norms_of_shortening(root: nn.Module) -> dict[int, float]:
    """Return by id the weights of embeddings with `max_norm`, each with the norm of its rows."""
    embeddings = [each for each in root.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    return {id(each.weight): each.norm_type for each in embeddings if each.max_norm is not None}


def _take_shorter_rows(live: torch.Tensor, copy: torch.Tensor, norm_type: float) -> None:
    """Write those rows of a copy into the live weights that are shorter there."""
    here, before = _devices.moved_to(copy.detach(), live.device), live.detach()
    is_shorter = here.norm(norm_type, 1, keepdim=True) < before.norm(norm_type, 1, keepdim=True)
    live.data.copy_(torch.where(is_shorter, here, before))  # autograd does not notice: it happened before the lookup


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return what is equal for tensors with equal shapes and bits, and else hardly ever; None for what is not plain.

    It is the sum of the bits, taken as integers: exact, as fast as memory, and blind for an exchange of entries, which
    `verify` sees.
    """
    keys: list[Any] = []
    sums: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        key = None
        if is_plain(tensor) and tensor.device.type != "meta":
            key = tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()
            if key not in sums:
                sums[key] = _sum_of_bits(tensor.detach())
        keys.append(key)
    by_device: dict[torch.device, list[Any]] = {}
    for key, found in sums.items():
        by_device.setdefault(found.device, []).append(key)
    values = {
        key: (key[-2], value)
        for of_device in by_device.values()
        for key, value in zip(of_device, _numbers([*map(sums.__getitem__, of_device)]), strict=True)
    }
    return [*map(values.get, keys)]


def _numbers(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the numbers in scalar tensors of one device, with one transfer where torch can."""
    try:
        numbers: list[Any] = torch.stack([*tensors]).tolist()
    except RuntimeError:  # in torch.func, torch 2.9 cannot
        numbers = [tensor.item() for tensor in tensors]
    return numbers


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    entries = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = entries.resolve_neg().reshape(-1)
    size = next(size for size in (8, 4, 2, 1) if flat.numel() * flat.itemsize % size == 0)  # large ones take less time
    if flat.storage_offset() * flat.itemsize % size:
        flat = flat.clone()
    return flat.view(_INTEGERS[max(size, flat.itemsize)]).sum(dtype=torch.int64)
