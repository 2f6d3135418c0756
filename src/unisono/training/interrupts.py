"""Ctrl-C, SIGTERM and SIGHUP while training: the step in flight is finished, and the loop is told to stop.

Half a step cannot be saved: some of its numbers would be old, some new. A step takes a few seconds at most, so the
loop finishes it, saves, and returns. Ctrl-C after that stops at once, and the last checkpoint stays. Another SIGTERM or
SIGHUP changes nothing: a scheduler sends it to every process of a job, and a launcher that gets one passes it on.

Not every process may get the signal, and each gets it at another moment; all stop after the same step.
"""

import os
import signal
from types import FrameType

from unisono.console.errors import Interrupted
from unisono.training.ranks import ALONE, Ranks

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_STDERR = 2
_NOTICE = b"\nfinishing the step in flight, then stopping (Ctrl-C%s: at once, without saving)\n"


class StopRequest:
    """While entered, records the first signal that asks the program to stop, instead of letting it act.

    `received` is that signal, or None. From then on Ctrl-C acts as usual, and the others do nothing. `ranks` stop
    together.
    """

    received: signal.Signals | None = None

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks

    def __enter__(self) -> "StopRequest":
        self._before = {
            number: signal.signal(number, self._receive)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN  # an ignored signal, as under nohup, stays ignored
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived; with several processes, in all of them at the same check."""
        if received := self._ranks.delayed_max(self.received or 0):
            raise Interrupted(signal.Signals(received))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        if self._ranks.is_first:  # os.write, because the signal may have arrived in the middle of a print
            os.write(_STDERR, _NOTICE % (b" again" if number == signal.SIGINT else b""))
