"""What is looked for in the first steps of each structure of a model, and said once for a model.

    batch norm in training       each replica normalises its own rows, if no option says whether that is meant
    draws from a shared          Python's random numbers, numpy's, and those of generators that the model keeps are
    generator                    drawn in the order in which replicas happen to run
    writes into what is shared   a list of the file, a dict of the module, what hooks keep (shared.py)
    values of one thread         in a `threading.local`, which other replicas' threads do not have (thread_locals.py)

A structure is that of a model's modules and of its inputs: a steady step looks for nothing.
`verify` reports them by itself.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.leftovers.generators import OWN, GeneratorStates, generators_among
from unisono.leftovers.report import Kind, Leftovers
from unisono.leftovers.shared import Search, SharedWrites
from unisono.leftovers.thread_locals import ThreadLocals
from unisono.runtime.model_warnings import ModelWarnings
from unisono.runtime.torch_private import torchscript

_PER_SHARD = (
    "{layer}: each replica normalises its own rows (samples) in training, as in torch.nn.DataParallel, so "
    "the numbers are not those of one device. For one device's numbers pass sync_batch_norm=True; to keep "
    "this, sync_batch_norm=False."
)

NOT_SYNCHRONISED = (
    "{layer} normalises the rows of one replica only, in spite of sync_batch_norm=True: unisono cannot replace "
    "batch norms of scripted or traced modules, nor calls of torch.batch_norm. Script the parts without batch norm, or "
    "call torch.nn.functional.batch_norm; or pass sync_batch_norm=False: each replica then normalises its own rows."
)
_SCRIPTED = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


class Look(Protocol):
    """Looks at one forward: it begins before the replicas run, and ends when all have run."""

    def begin(self) -> None:
        """Take what there is before the forward."""

    def end(self, outputs: Sequence[Any] = (), /) -> None:
        """Compare; what is found is said, kept for later, or raised.

        Args:
            outputs: of the replicas.
        """


class AtEnd:
    """A look that calls a function when a forward has run."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def begin(self) -> None:
        pass

    def end(self, _: Sequence[Any] = (), /) -> None:
        self._function()


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
        self,
        structure: Hashable,
        search: Search,
        inputs: Iterable[Any],
        devices: Sequence[torch.device],
        *,
        beside_others: bool = False,
        in_threads: bool = True,
    ) -> list[Look]:
        """Return what looks at one of the first steps of a structure, in several replicas.

        Args:
            structure: None: its steps are not counted.
            search: has found what its forward leads to.
            inputs: the leaves of the inputs.
            devices: the replicas'.
            beside_others: whether the caller's code runs at the same time.
            in_threads: whether replicas run in other threads than the caller's.
        """
        is_first = structure is None or self.is_first(structure)
        add, add_hooks = (partial(self.leftovers.add, kind) for kind in (Kind.SHARED, Kind.HOOKS))
        writes = SharedWrites(add, add_hooks, search, devices, is_first=is_first)
        looks: list[Look] = [_Draws(self.leftovers, search, inputs, only_these=beside_others), writes]
        if in_threads:
            looks.append(AtEnd(partial(self._look_at_thread_locals, ThreadLocals(search))))
        return looks if structure is None else [*looks, self.counted(structure)]

    def is_first(self, structure: Hashable) -> bool:
        """Return whether no step of a structure has run."""
        return not self._num_past[structure]

    def counted(self, structure: Hashable) -> Look:
        """Return what counts a first step when it has run."""
        if len(self._num_past) >= _MOST_STRUCTURES:
            self._num_past.clear()
        return AtEnd(partial(self._num_past.update, [structure]))

    def _look_at_thread_locals(self, thread_locals: ThreadLocals) -> None:
        """Have the calling thread compare what it has in each `threading.local` with what other threads have."""
        if thread_locals.places:
            self.leftovers.of_caller, self.leftovers.has_more = thread_locals.only_here, True

    def batch_norm(self, root: nn.Module, *, in_one_process: bool = False) -> Look:
        """Return what warns of a batch norm that has normalised the rows of one replica only.

        Args:
            root: a replica: forward may have switched its modes.
            in_one_process: whether there are several replicas in this process. Else other processes have the others,
                which a `torch.nn.SyncBatchNorm` reaches by itself.
        """
        return AtEnd(partial(self._look_at_batch_norms, root, in_one_process))

    def _look_at_batch_norms(self, root: nn.Module, in_one_process: bool) -> None:
        for path, module in root.named_modules():
            if not isinstance(module, _BatchNorm) or not takes_statistics(module):
                continue
            if in_one_process or not isinstance(module, nn.SyncBatchNorm):
                kind = type(module).__name__
                self.warnings.give(_PER_SHARD.format(layer=f"layer {path!r} ({kind})" if path else kind), _BATCH_NORM)
                return

    def say_of_functional_batch_norm(self) -> None:
        """Warn of a batch norm that was found in a replica's graph; the look at its layers may have done so already."""
        self.warnings.give(_PER_SHARD.format(layer="torch.nn.functional.batch_norm"), _BATCH_NORM)


def refuse_scripted_batch_norm(root: nn.Module) -> None:
    """Refuse a forward in which a scripted batch norm normalises the rows of one replica only.

    Without gradients no graph shows it; with gradients the graph shows calls of the function, too.

    Args:
        root: a replica.
    """
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            training = torchscript.batch_norms_in_script(module)
            layers = [each for each in module.modules() if getattr(each, "original_name", "") in _SCRIPTED]
            if True in training or (None in training and any(map(takes_statistics, layers))):
                where = f" in {path!r}" if path else ""
                raise RuntimeError(NOT_SYNCHRONISED.format(layer=f"A scripted batch norm{where}"))


class _Draws:
    """Finds draws from a generator that replicas share.

    Args:
        search: has found what forward leads to.
        inputs: the leaves of the inputs.
        only_these: whether the caller's code may run at the same time, and draw from Python's generator or numpy's.
    """

    def __init__(self, leftovers: Leftovers, search: Search, inputs: Iterable[Any], *, only_these: bool) -> None:
        self._leftovers, self._only_these = leftovers, only_these
        self._generators = generators_among([*(place.value for place in search.places), *inputs])

    def begin(self) -> None:
        self._states = GeneratorStates(self._generators)

    def end(self, _: Sequence[Any] = (), /) -> None:
        if moved := [each for each in self._states.moved() if each == OWN or not self._only_these]:
            self._leftovers.add(Kind.DRAWS, [moved[0][0].upper() + moved[0][1:], *moved[1:]])


_BATCH_NORM = "batch norm"


def takes_statistics(module: Any) -> bool:
    """Return whether a batch norm, scripted or not, normalises with the statistics of its input."""
    return bool(module.training or (module.running_mean is None and module.running_var is None))


_FIRST = 2  # steps of a structure: what the first one may leave for later ones, such as a cache, the second one leaves
_MOST_STRUCTURES = 64
