"""Whether the batches of a map go to all lanes, or the caller's thread computes them on the first one.

Batches may be too short to be worth handing over: threads wait for each other while they run Python, and a worker has
to be sent its batch. How long a batch takes does not show it, so both take turns at the beginning:

    all lanes, the caller, all lanes, the caller, ...    _ROUNDS turns each

The lanes compute some batches ahead. As many batches, the first of a turn and of each map, are not counted: the lanes
change. A turn ends when _COUNTED times as many have been, in one map or several, so that it does not matter how many
were ready when they were first asked for. Other programs make batches slower, never faster, so the fastest turns are
compared. A first turn of the caller that is clearly slower ends after a few batches.

What is chosen is kept for the wrapper's batches of this kind: the same method, and inputs of about the same size.
Numbers do not depend on it: a lane has as many intra-op threads either way, and a batch its own random stream.

This file knows no clock. Several threads may use a choice; Ctrl-C waits for it (`BatchMap`).
"""

import statistics
import threading
from typing import Any
from weakref import WeakKeyDictionary

from unisono.primitives import pytree
from unisono.runtime.errors import log_once

_ROUNDS = 3
_COUNTED = 4  # times as many batches as the lanes compute ahead
_WORTH = 1.05  # what the caller's thread has to gain to be chosen
_CLEAR = 1.5  # it is not tried further if each of a few batches is slower by this factor
_FEW = 3
_PATIENCE = 1000  # batches after which a map measures again; doubled each time
_TOO_SHORT = (
    "map and evaluate of {name}: these batches are too short to be worth passing to {threads}, so the first "
    "device computes them in the caller's thread"
)


class LaneChoice:
    """The choice for one kind of batches.

    Args:
        name: of the module, for the log.
        num_lanes: how many there are.
        num_ahead: how many batches the lanes compute ahead.
    """

    def __init__(self, name: str, num_lanes: int, num_ahead: int) -> None:
        self._name, self._num_lanes, self._num_ahead = name, num_lanes, num_ahead
        self._patience = _PATIENCE
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self.uses_all = True  # whether the next batch may go to any lane
        self.is_made = False  # whether that stays as it is
        self._num_since = 0  # batches since it was made
        self._turn: list[float] = []  # seconds of each batch
        self._counted: list[float] = []  # the same, without those that are skipped
        self._to_skip = self._num_ahead
        self._of_all: list[float] = []  # mean seconds of a batch, one a turn
        self._of_one: list[float] = []

    def begin_map(self) -> None:
        """Take note that a map begins. Only then a choice may be made anew."""
        with self._lock:
            self._to_skip = self._num_ahead  # the lanes have nothing to do yet
            if self._num_since >= self._patience:
                self._patience *= 2
                self._begin()

    def record(self, seconds: float, num_batches: int, *, used_all: bool) -> None:
        """Take note of some batches.

        Args:
            seconds: from when the first of their outputs was asked for until that of the next batch was.
            num_batches: of one row; 1 of the lanes.
            used_all: whether all lanes could compute them.
        """
        with self._lock:
            self._num_since += num_batches * self.is_made
            if self.is_made or used_all is not self.uses_all:  # the latter: they were pulled before this turn
                return
            skipped = min(self._to_skip, num_batches)
            self._to_skip -= skipped
            self._turn += [seconds / num_batches] * num_batches
            self._counted += [seconds / num_batches] * (num_batches - skipped)
            is_first = not used_all and not self._of_one
            if is_first and len(self._turn) >= _FEW and min(self._turn) > _CLEAR * min(self._of_all):
                self._make(uses_all=True)
            elif len(self._counted) >= _COUNTED * self._num_ahead:
                turns = self._of_all if used_all else self._of_one
                turns.append(statistics.fmean(self._counted))
                self._turn.clear()
                self._counted.clear()
                self._to_skip = self._num_ahead
                self.uses_all = not used_all
                if len(self._of_one) == _ROUNDS:
                    self._make(uses_all=min(self._of_all) < _WORTH * min(self._of_one))

    def _make(self, *, uses_all: bool) -> None:
        self.uses_all, self.is_made = uses_all, True
        if not uses_all:
            threads = f"{self._num_lanes} devices" if self._num_lanes > 1 else "another thread"
            log_once(_TOO_SHORT.format(name=self._name, threads=threads))


def choice_for(wrapper: Any, method: str | None, inputs: object, num_lanes: int, num_ahead: int) -> LaneChoice:
    """Return the wrapper's choice for batches like `inputs`; the other arguments are as in `LaneChoice`."""
    by_kind = _of_wrappers.setdefault(wrapper, {})
    kind = method, num_lanes, sum([tensor.numel() for _, tensor in pytree.tensors(inputs)]).bit_length()
    return by_kind.setdefault(kind, LaneChoice(type(wrapper.module).__name__, num_lanes, num_ahead))


# A copy of a wrapper has none yet.
_of_wrappers: WeakKeyDictionary[Any, dict[tuple[str | None, int, int], LaneChoice]] = WeakKeyDictionary()
