"""What is looked for in the first steps of each structure of a model, and said once for a model.

    batch norm in training       each replica normalises its own rows, if no option says whether that is meant
    draws from a shared          Python's random numbers, numpy's, and those of generators that the model keeps are
    generator                    drawn in the order in which replicas happen to run

A structure is that of a model's modules and of its inputs (`structure_of` in replica.py): a steady step looks for
nothing.
`verify` reports both by itself.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.engines.shared_generators import GeneratorStates, generators_among
from unisono.primitives.leftovers import Leftovers
from unisono.primitives.shared_state import Reached, SharedWrites
from unisono.runtime.model_warnings import ModelWarnings

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


class Look(Protocol):
    """Looks at one forward: it begins before the replicas run, and ends when all have run."""

    def begin(self) -> None:
        """Take what there is before the forward."""

    def end(self) -> None:
        """Compare; what is found is said, kept for later, or raised."""


class FirstSteps:
    """The first steps of each structure of one model, what was found in them, and what was said of the model.

    Attributes:
        warnings: what the model has been warned of.
        leftovers: what forwards have left behind in replicas.
    """

    def __init__(self) -> None:
        self.warnings = ModelWarnings()
        self.leftovers = Leftovers(self.warnings)
        self._num_past: Counter[Hashable] = Counter()

    def are_past(self, structure: Hashable) -> bool:
        """Return whether the first steps of a structure have run. Those that fail do not count."""
        return self._num_past[structure] >= _FIRST

    def looks(
        self, structure: Hashable, model: str, reached: Reached, inputs: Iterable[Any], rows: Iterable[int], axis: int
    ) -> list[Look]:
        """Return what looks at one of the first steps of a structure, in several replicas.

        Args:
            model: its name in messages.
            reached: what its forward leads to.
            inputs: the leaves of the inputs.
            rows: how many rows replicas have; `axis`: on which axis.
        """
        writes = self.writes(reached, rows, axis, is_first=not self._num_past[structure])
        generators = generators_among([*(place.value for place in reached.places), *inputs])
        return [_Draws(self.warnings, model, generators), writes, self.counted(structure)]

    def writes(self, reached: Reached, rows: Iterable[int], axis: int = 0, *, is_first: bool = True) -> SharedWrites:
        """Return what looks at what forward writes into that replicas share; see there."""
        return SharedWrites(partial(self.leftovers.add, (), ()), reached, rows, axis, is_first=is_first)

    def counted(self, structure: Hashable) -> Look:
        """Return what counts a first step when it has run."""
        if len(self._num_past) >= _MOST_STRUCTURES:
            self._num_past.clear()
        return _Counted(self._num_past, structure)

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
                self.warnings.give(_PER_SHARD.format(layer=layer), "batch norm")
                return

    def say_of_functional_batch_norm(self) -> None:
        """Warn of a batch norm that was found in a replica's graph; `look_at_batch_norm` may have done so already."""
        self.warnings.give(_PER_SHARD.format(layer="torch.nn.functional.batch_norm"), "batch norm")


class _Counted:
    """Counts a step of a structure."""

    def __init__(self, num_past: Counter[Hashable], structure: Hashable) -> None:
        self._num_past, self._structure = num_past, structure

    def begin(self) -> None:
        pass

    def end(self) -> None:
        self._num_past[self._structure] += 1


class _Draws:
    """Warns of draws from a generator that replicas share: Python's, numpy's, or one of these."""

    def __init__(self, warnings: ModelWarnings, model: str, generators: Sequence[Any]) -> None:
        self._warnings, self._model, self._generators = warnings, model, generators

    def begin(self) -> None:
        self._states = GeneratorStates(self._generators)

    def end(self) -> None:
        if moved := self._states.moved():
            text = _DRAWN.format(generators=" and ".join(moved), name=self._model)
            self._warnings.give(text[0].upper() + text[1:], "draws")


def takes_statistics(module: _BatchNorm) -> bool:
    """Return whether a batch norm normalises with the statistics of its input."""
    return bool(module.training or (module.running_mean is None and module.running_var is None))


_FIRST = 2  # steps of a structure: what the first one may leave for later ones, such as a cache, the second one leaves
_MOST_STRUCTURES = 64
