"""Random number generators that replicas share: Python's, numpy's, and those that the model keeps.

Replicas draw from such a generator in the order in which they happen to run, so equal seeds give other numbers in each
run. A generator that has moved while replicas ran is all that can be seen of it.
"""

import pickle
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from unisono.leftovers.shared import Search
from unisono.runtime.rng import random_state_of

OWN = "a generator of its own"


def generators_of(model: nn.Module) -> list[Any]:
    """Return the random number generators that a model may draw from, beside those that a script seeds.

    They are searched where attributes of modules and the code of their classes lead.
    """
    paths = dict(model.named_modules())
    return generators_among(place.value for place in Search([*paths.values()], [*paths]).places)


def generators_among(values: Iterable[Any]) -> list[Any]:
    """Return the random number generators among some values, each once, without those that a script seeds."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = (numpy.random.Generator, numpy.random.RandomState) if hasattr(numpy, "random") else ()
    of_process = _of_process()
    found = {id(each): each for each in values if issubclass(type(each), (torch.Generator, random.Random, *of_numpy))}
    return [each for each in found.values() if each not in of_process]


def _of_process() -> list[Any]:
    """Return Python's generator and numpy's."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = [numpy.random.rand.__self__] if hasattr(numpy, "random") else []
    return [random.random.__self__, *of_numpy]  # type: ignore[attr-defined]


class GeneratorStates:
    """The states of Python's generator and numpy's, when this is created, and of `own`, which are not restored."""

    def __init__(self, own: Sequence[Any]) -> None:
        self._generators = own
        self._own = [*map(_state, own)]
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = pickle.dumps(numpy.random.get_state()) if hasattr(numpy, "random") else None  # to be compared

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(pickle.loads(self._numpy))

    def moved(self) -> list[str]:
        """Return which generators have been drawn from or seeded since, in words."""
        now = GeneratorStates(self._generators)
        is_as_before = {
            "Python's generator (random)": self._python == now._python,
            "numpy's generator": self._numpy == now._numpy,
            OWN: self._own == now._own,
        }
        return [generator for generator, as_before in is_as_before.items() if not as_before]


def _state(generator: Any) -> Any:
    """Return the state of a generator, to be compared; None if its class does not give it."""
    if isinstance(generator, torch.Generator):
        return random_state_of(generator)
    try:
        if isinstance(generator, random.Random):
            return generator.getstate()
        # numpy's: their states have arrays.
        return pickle.dumps(generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state)
    except Exception:  # noqa: BLE001 - the code of a user's class
        return None
