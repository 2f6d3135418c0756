"""What is looked for in the first step of each structure of a model, and said once for a model.

    batch norm in training       each replica normalises its own rows, if no option says whether that is meant
    draws from a shared          Python's random numbers, numpy's, and those of generators that the model keeps are
    generator                    drawn in the order in which replicas happen to run

A structure is that of a model's modules and of its inputs (`structure_of` in replica.py): a steady step looks for
nothing.
`verify` reports both by itself.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.engines.shared_generators import GeneratorStates, generators_among, generators_of
from unisono.primitives.leftovers import Leftovers
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


class FirstSteps:
    """The structures of one model whose first step is past, and what was found in them.

    Attributes:
        warnings: what the model has been warned of.
        leftovers: what forwards have left behind in replicas.
    """

    def __init__(self) -> None:
        self.warnings = ModelWarnings()
        self.leftovers = Leftovers(self.warnings)
        self._past: set[Hashable] = set()

    def begins(self, structure: Hashable) -> bool:
        """Return whether a step that begins now is the first of its structure that counts."""
        return structure not in self._past

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
                self.warnings.give(_PER_SHARD.format(layer=layer), "batch norm")
                return

    def say_of_functional_batch_norm(self) -> None:
        """Warn of a batch norm that was found in a replica's graph; `look_at_batch_norm` may have done so already."""
        self.warnings.give(_PER_SHARD.format(layer="torch.nn.functional.batch_norm"), "batch norm")

    def watch_generators(self, root: nn.Module, inputs: Iterable[Any]) -> Callable[[], None]:
        """Return what warns, once the replicas have run, if a generator that they share has moved.

        Args:
            inputs: the leaves of the inputs.
        """
        states = GeneratorStates([*generators_of(root), *generators_among(inputs)])

        def look() -> None:
            if moved := states.moved():
                text = _DRAWN.format(generators=" and ".join(moved), name=type(root).__name__)
                self.warnings.give(text[0].upper() + text[1:], "draws")

        return look


def takes_statistics(module: _BatchNorm) -> bool:
    """Return whether a batch norm normalises with the statistics of its input."""
    return bool(module.training or (module.running_mean is None and module.running_var is None))


_MOST_STRUCTURES = 64
