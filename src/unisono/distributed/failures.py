"""How do ranks learn that one of them has failed, or is gone, and why?

Guarantees
    - The first failure that a rank reports is what all ranks raise, with its number and its reason.
    - A rank raises for another one's failure after that one has ended, so that a launcher blames the right process.
    - After a failure the ranks no longer agree on what comes next: every later collective raises it again.

Assumes that a rank that waits calls `raise_if_a_rank_failed` now and then (waiting.py), and that the launcher's store
is there. Without the store, a rank learns only that its connections are lost.
"""

import functools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from unisono.distributed import environment
from unisono.distributed.environment import ranks_of
from unisono.distributed.failure_store import FailureStore
from unisono.runtime.errors import described
from unisono.runtime.interrupts import deliver

PATIENCE_S = 30.0  # how long a rank may take to come to a collective before that is said, or to go on after an error
_REASON_NAP_S = 0.05
_EXIT_S = 10.0  # how long a rank that has failed may take to say why, and to end
_SLOW_EXIT_S = 60.0  # how long it may take to end if it says that it does
_BLAME_S = 1.0  # a launcher blames the process that ends first: torchrun has times in whole seconds
_MOST_TEXT = 2000  # characters of a failure's reason


class Failures:
    """The failures of some ranks, as one of them sees them.

    Attributes:
        broken: what every later collective raises; None while the ranks agree on what comes next.
        raised: what this rank has published of an exception, after which it has not gone on yet.

    Args:
        store: what the ranks tell each other.
        on_break: called when the ranks no longer agree; does not refer to this object.
    """

    def __init__(self, store: FailureStore, rank: int, world_size: int, on_break: Callable[[], None]) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.broken: str | None = None
        self.raised = ""
        self._on_break = on_break
        self._has_left = False  # whether it has left a collective half-way by an exception that is not known here
        _reporting.add(self)
        _report_uncaught_exceptions()

    # ---- what this rank reports ------------------------------------------------------------------

    def report(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on. The first report of all ranks counts."""
        if self.broken is None:
            self.store.set("failed", f"{self.rank}\n{reason[:_MOST_TEXT]}", first_only=True)

    def publish_exception(self, error: BaseException) -> None:
        """Tell the other ranks of an exception after which this one may go on, or not, although its process lives.

        So it is with an actor, whose framework catches what ends its function. If this rank takes part in no collective
        for a while, those that wait for it raise.
        """
        if self.broken is None:
            self.raised = f"{self.rank}\n{described(error)}"[:_MOST_TEXT]
            self.store.set("raised", self.raised)

    def take_back_exception(self) -> None:
        """Tell the other ranks that this one has gone on."""
        if self.store.get("raised") == self.raised:
            self.store.set("raised", "")
        self.raised = ""

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one has left a collective half-way, because of `error`."""
        self.report(described(error))
        if self.broken is None:
            self._break(
                f"this process left a collective half-way ({described(error)}), so the processes "
                "no longer agree on the next one. Restart them."
            )

    def leave(self, text: str) -> None:
        """Do what `abort` does, for an exception that is not known here: others learn it if it ends the program."""
        self._has_left = self.broken is None
        self.abort(RuntimeError(text))

    def report_end(self, reason: str = "") -> None:
        """Tell the other ranks that this program ends, with that reason, or with an exception after which it ended."""
        if self._has_left and reason and self.store.get("failed").partition("\n")[0] == str(self.rank):
            self.store.set("failed", f"{self.rank}\n{reason[:_MOST_TEXT]}")
        elif self.broken is None and (reason or self.raised):
            self.store.set(f"ending/{self.rank}", "ending")  # first: who reads the failure knows it
            self.report(reason or self.raised.partition("\n")[2])

    # ---- what it raises --------------------------------------------------------------------------

    def raise_if_broken(self) -> None:
        """Raise if the ranks no longer agree on what comes next."""
        if self.broken is not None:
            raise RuntimeError(self.broken)

    def raise_if_a_rank_failed(self, doing: str) -> None:
        """Raise the failure that another rank has reported, if one has."""
        rank, _, reason = self.store.get("failed").partition("\n")
        failed = [*map(int, rank.split())]
        if not failed or self.rank in failed:
            return
        says = f"rank {rank} failed while this one was at {doing}. Rank {rank} says: "
        error = self.of_ranks(failed, f"{says}{reason}" if reason else _ended(failed, doing))
        more = self.store.get("failed").partition("\n")[2]  # a failed rank may have said more when it ended
        raise error if more in ("", reason) else RuntimeError(f"{says}{more}")

    def raise_if_a_rank_is_gone(self, raised: str, doing: str) -> None:
        """Raise the exception that another rank has published some time ago, if it is another's."""
        rank, _, reason = raised.partition("\n")
        if rank and int(rank) != self.rank:
            raise self.failure(
                f"rank {rank} raised an exception and has not continued for {PATIENCE_S:g} s, while this one "
                f"was at {doing}. Rank {rank} says: {reason}"
            )

    def failure(self, text: str) -> RuntimeError:
        """Return the error with which this rank stops taking part."""
        self._break(text)
        return RuntimeError(text)

    def reported(self, text: str) -> RuntimeError:
        """Return the error with which all ranks stop taking part."""
        self.report(text)
        return self.failure(text)

    def of_ranks(self, ranks: Sequence[int], text: str) -> RuntimeError:
        """Return the error of this rank for a failure of others: later than these end, so that they are blamed."""
        error, have_ended, started = self.failure(text), False, time.monotonic()
        limit_s = _SLOW_EXIT_S if any(self.store.get(f"ending/{rank}") for rank in ranks) else _EXIT_S
        while (waited_s := time.monotonic() - started) < limit_s:
            if not have_ended and all(map(self.store.has_exited, ranks)):
                have_ended, limit_s = True, waited_s + _BLAME_S
            time.sleep(_REASON_NAP_S)
            deliver()
        return error

    def of_connection(self, error: RuntimeError, doing: str) -> RuntimeError:
        """Return the error to raise after torch.distributed has failed, most often because a rank has exited."""
        deadline = time.monotonic() + _EXIT_S
        while time.monotonic() < deadline:
            self.raise_if_a_rank_failed(doing)
            others = (rank for rank in range(self.world_size) if rank != self.rank)
            exited = [rank for rank in others if self.store.has_exited(rank)]
            if exited:
                # The others learn which ranks ended first, before this one ends too.
                self.store.set("failed", " ".join(map(str, exited)) + "\n", first_only=True)
                return self.of_ranks(exited, _ended(exited, doing))
            time.sleep(_REASON_NAP_S)
            deliver()
        return self.failure(f"{doing} failed, and no other rank reports why: {brief(error)}")

    def _break(self, text: str) -> None:
        self.broken = text
        environment.failed.set()
        self._on_break()


_reporting: "weakref.WeakSet[Failures]" = weakref.WeakSet()


@functools.cache  # once in a process
def _report_uncaught_exceptions() -> None:
    """From now on, report an exception that ends this program."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        for failures in list(_reporting):
            failures.report_end(described(error))
        before(kind, error, traceback)

    sys.excepthook = report


def have(ranks: Sequence[int]) -> str:
    """Return 'rank 3 has', or 'ranks 0, 3 have'."""
    return f"{ranks_of(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _ended(ranks: Sequence[int], doing: str) -> str:
    return f"{have(ranks)} ended while this one was at {doing}"


def brief(error: BaseException) -> str:
    """Return the first line of an error."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
