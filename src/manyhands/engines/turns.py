"""Turns: the replicas of a compiled module run one after the other while there may be something to compile.

torch.compile looks for what it has compiled, finds nothing that fits, and compiles. Replicas that look at the same
moment all find nothing, and all compile the same thing: in turn, because torch compiles one thing at a time, and
into n of the few versions that it keeps of a function (8 in torch 2.13), after which it compiles no more. So in a pass
over inputs of a kind that is new, replicas take turns: the first one compiles and the others find it. All later
passes run at once.

Guarantees that nobody waits for ever: after `_PATIENCE_S` a replica goes ahead without its turn, so replicas that wait
for each other inside their forward are late, and that is all. Assumes nothing: a pass that compiles although its kind
is not new (an attribute has changed, say) costs time, not numbers.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator

from manyhands import torch_private
from manyhands.engines.base import BeginPass, Surroundings

_MOST_KINDS = 32  # torch keeps 8 versions of a function: for training and eval, with and without gradients
_PATIENCE_S = 60.0


class Turns:
    """Which kinds of inputs the replicas of one wrapper have met."""

    def __init__(self) -> None:
        self._met: set[Hashable] = set()

    def if_new(self, kinds: Iterable[Hashable]) -> list[BeginPass]:
        """Return what surrounds the replicas of a pass over inputs of these kinds: turns, or nothing.

        Args:
            kinds: one a replica; equal for inputs that the same compiled code fits.
        """
        torch_private.keep_compiled_code_in_order()
        torch_private.keep_metrics_of_compiling_by_thread()
        new = set(kinds) - self._met
        if not new or len(self._met) >= _MOST_KINDS:
            return []
        self._met |= new
        return [_take_turns]


@contextlib.contextmanager
def _take_turns() -> Iterator[Surroundings]:
    lock = threading.Lock()

    @contextlib.contextmanager
    def turn(index: int) -> Iterator[None]:
        mine = lock.acquire(timeout=_PATIENCE_S)
        try:
            yield
        finally:
            if mine:
                lock.release()

    yield turn
