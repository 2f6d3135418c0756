"""What is looked for in the first step of each structure of a model, and said once for a model.

    batch norm in training       each replica normalises its own rows, if no option says whether that is meant
    draws from a shared          Python's random numbers, numpy's, and those of generators that the model keeps are
    generator                    drawn in the order in which replicas happen to run

A structure is that of a model's modules and of its inputs (`structure_of` in replica.py): a steady step looks for
nothing.
`verify` reports both by itself, and switches draws off: then nothing is said here.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.engines.shared_generators import GeneratorStates, generators_among, generators_of
from unisono.runtime import draws_off
from unisono.runtime.errors import warn

_PER_SHARD = (
    "{layer}: each replica normalises its own rows in training, so the numbers are not those of one device. With "
    "sync_batch_norm=True batch norm sees the rows of all replicas, and they are; sync_batch_norm=False says that each "
    "replica's own rows are meant."
)
_DRAWN = (
    "{generators} was drawn from while the replicas of {name} ran. They share it, in the order in which they happen to "
    "run, so runs with equal seeds may differ. Draw with torch's functions, for which each replica has a stream of its "
    "own; or draw outside of the model, and pass the result to it as an input."
)
_DRAWN_IN_PARTS = (
    "{generators} was drawn from while {name} ran in parts (parts={parts}): each part draws, and draws other numbers "
    "where it is computed once more in backward. Draw with torch's functions, whose numbers are then the same; or draw "
    "outside of the model, and pass the result to it as an input."
)


class FirstSteps:
    """The structures of one model whose first step is past, and what has been said of the model."""

    def __init__(self) -> None:
        self._past: set[Hashable] = set()
        self._said: set[str] = set()

    def begins(self, structure: Hashable) -> bool:
        """Return whether a step that begins now is the first of its structure that counts."""
        return structure not in self._past and not draws_off.are_off()

    def has_run(self, structure: Hashable) -> None:
        """Take note that a first step's forward has run. One that fails is none: replicas may not have drawn yet."""
        if len(self._past) >= _MOST_STRUCTURES:
            self._past.clear()
        self._past.add(structure)

    def look_at_batch_norm(self, root: nn.Module, *, in_one_process: bool = False) -> None:
        """Warn of a batch norm that would normalise the rows of one replica only.

        Args:
            in_one_process: whether there are several replicas in this process. Else other processes have the others,
                which a `torch.nn.SyncBatchNorm` reaches by itself.
        """
        for path, module in root.named_modules():
            if not isinstance(module, _BatchNorm) or not takes_statistics(module):
                continue
            if in_one_process or not isinstance(module, nn.SyncBatchNorm):
                kind = type(module).__name__
                layer = f"layer {path!r} ({kind})" if path else kind
                self._say("batch norm", _PER_SHARD.format(layer=layer))
                return

    def say_of_functional_batch_norm(self) -> None:
        """Warn of a batch norm that was found in a replica's graph; `look_at_batch_norm` may have done so already."""
        if not draws_off.are_off():
            self._say("batch norm", _PER_SHARD.format(layer="torch.nn.functional.batch_norm"))

    def watch_generators(self, root: nn.Module, inputs: Iterable[Any], parts: int = 1) -> Callable[[], None]:
        """Return what warns, once the replicas have run, if a generator that they share has moved.

        Args:
            inputs: the leaves of the inputs.
            parts: in how many of them each replica runs its rows.
        """
        states = GeneratorStates([*generators_of(root), *generators_among(inputs)])

        def look() -> None:
            if moved := states.moved():
                message = _DRAWN if parts == 1 else _DRAWN_IN_PARTS
                text = message.format(generators=" and ".join(moved), name=type(root).__name__, parts=parts)
                self._say("draws", text[0].upper() + text[1:])

        return look

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(message)


def takes_statistics(module: _BatchNorm) -> bool:
    """Return whether a batch norm normalises with the statistics of its input."""
    return bool(module.training or (module.running_mean is None and module.running_var is None))


_MOST_STRUCTURES = 64
