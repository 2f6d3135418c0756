"""How do ranks wait for each other?

Guarantees
    - A rank that waits checks now and then whether another one has failed, and raises its failure (failures.py).
    - A wait ends at its limit, with an error that names the missing ranks; before that, a long one is logged.
    - Ctrl-C is delivered in time.

Assumes that all ranks compare what they do equally often, in one order: so a rank that waits says in the store how
often it has, and at what it waits. Where ranks wait for different things, the error names these.
"""

import time
from collections.abc import Callable
from typing import Any

from unisono.distributed import environment, failures
from unisono.distributed.environment import FIRST_NAP_S, NOT_THERE, ranks_of
from unisono.distributed.failures import Failures, have
from unisono.runtime.errors import log_once
from unisono.runtime.interrupts import deliver

_LONGEST_NAP_S = 0.002
_CHECK_EVERY_S = 0.2  # how often a waiting rank checks the store for failures; with many ranks, less often

_THE_SAME = (
    ". Wrap the same models and take the same steps in every process; for loaders of different lengths use "
    "DataParallel.batches(loader)."
)
_WAITING = (
    "rank {rank} has waited {waited_s:g} s for the others at {doing}; {found}. It goes on when they come, or fails "
    "after {limit_s:g} s. Take the same steps in every process: map and evaluate, too, are called in all."
)


class Waits:
    """The waits of one rank.

    Args:
        failures: of the ranks.
        store: the launcher's, in which ranks count those that have come to a barrier.
        timeout_s: how long this rank waits for the others.
    """

    def __init__(self, failures: Failures, store: Any, timeout_s: float) -> None:
        self._failures, self._store, self._timeout_s = failures, failures.store, timeout_s
        self._counts = store
        self._rank, self._world_size = failures.rank, failures.world_size
        self._check_every_s = max(_CHECK_EVERY_S, self._world_size / 500)
        self._num_comparisons = self._num_barriers = 0

    def next_comparison(self) -> int:
        """Return how often the ranks have compared what they do, now included; equal on ranks that do the same."""
        self._num_comparisons += 1
        return self._num_comparisons

    def until(
        self,
        is_done: Callable[[], bool],
        doing: str,
        missing: Callable[[], str] | None = None,
        check: Callable[[], None] | None = None,
        block: Callable[[float], None] | None = None,
        key: str = "",
    ) -> None:
        """Wait; now and then check the store for failures.

        Args:
            missing: says, for messages, which ranks are missing; None: those that do not wait for the same.
            check: a further check, for an `is_done` that asks the store too, which should not be asked too often.
            block: waits for at most so many seconds, less if it is done before; None: sleep instead.
            key: is in the store while this waits for long.
        """
        started = last_check = time.monotonic()
        num_checks = 0
        nap_s, longest_nap_s = FIRST_NAP_S, _LONGEST_NAP_S if check is None else self._check_every_s / 4
        published = said = False
        raised, raised_at = "", started
        while not is_done():
            now = time.monotonic()
            if now - last_check > self._check_every_s:
                last_check = now
                self._failures.raise_if_a_rank_failed(doing)
                before, raised = raised, self._store.get("raised")
                raised_at = raised_at if raised == before else now
                if now - raised_at > failures.PATIENCE_S:
                    self._failures.raise_if_a_rank_is_gone(raised, doing)
                num_checks += 1
                if check is not None and num_checks.bit_count() == 1:  # ever less often: it asks about every rank
                    check()
                if not published:
                    published = True
                    self._store.set(f"at/{self._rank}", f"{self._num_comparisons}\n{doing}")
                    if key:
                        self._store.set(key, doing)
                said_after_s = environment.SAID_AFTER_S if missing else failures.PATIENCE_S
                if not said and now - started > said_after_s:
                    said, times = True, {"waited_s": said_after_s, "limit_s": self._timeout_s}
                    if missing is None:
                        log_once(_WAITING.format(rank=self._rank, doing=doing, found=self._others_at(doing), **times))
                    elif who := missing():
                        log_once(NOT_THERE.format(rank=self._rank, doing=doing, missing=who, **times))
                if now - started > self._timeout_s:
                    found = self._others_at(doing, missing() if missing else "")
                    text = f"rank {self._rank} has waited {self._timeout_s:g} s for the others at {doing}; {found}"
                    raise self._failures.reported(text + _THE_SAME)
            if block is not None:
                block(self._check_every_s)
            else:
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.5, longest_nap_s)
            deliver()
        if published:
            self._store.set(f"at/{self._rank}", "")
            if key:
                self._store.delete(key)

    def barrier(self, name: str) -> None:
        """Wait until every rank has called this as often as this one; errors name the barrier.

        It uses the store only, and so works before the ranks are connected.
        """
        self._num_barriers += 1
        key, store = f"barrier/{self._num_barriers}", self._counts

        def missing() -> list[int]:
            return [rank for rank in range(self._world_size) if not self._store.get(f"{key}/{rank}")]

        def is_complete() -> bool:
            return bool(store.add(f"{key}/number", 0) >= self._world_size)

        def raise_if_one_cannot_come() -> None:
            exited = [rank for rank in missing() if self._store.has_exited(rank)]
            if exited and not is_complete():
                raise self._failures.of_ranks(exited, f"{have(exited)} ended and did not reach {name}")
            for rank in missing():
                num_comparisons, at = self._place_of(rank)
                if num_comparisons > self._num_comparisons:  # it has gone on, and has left this barrier out
                    text = f"rank {self._rank} is at {name}, and rank {rank} at {at}"
                    self._failures.report(text)
                    raise self._failures.failure(f"the processes do different things: {text}{_THE_SAME}")

        first = store.compare_set(f"{key}/first", "", f"{self._rank}\n{name}").decode()
        store.set(f"{key}/{self._rank}", name)
        store.add(f"{key}/number", 1)
        self.until(
            is_complete,
            name,
            lambda: f"{ranks_of(missing())} did not reach it",
            check=raise_if_one_cannot_come,
        )
        self._failures.raise_if_a_rank_failed(name)  # one that has waited for this rank, and has given up
        rank, _, other = first.partition("\n")
        if other != name:
            self._failures.report(f"rank {self._rank} is at {name}, and rank {rank} at {other}")
            raise self._failures.failure(f"rank {rank} is at {other}, and this one, rank {self._rank}, at {name}")

    def _place_of(self, rank: int) -> tuple[int, str]:
        """Return how often a rank had compared what it does when it began to wait, and at what; "" if it does not."""
        num_comparisons, _, doing = self._store.get(f"at/{rank}").partition("\n")
        return int(num_comparisons or 0), doing

    def _others_at(self, doing: str, missing: str = "") -> str:
        """Return where other ranks are while this one waits."""
        others = {rank: self._place_of(rank)[1] for rank in range(self._world_size) if rank != self._rank}
        found = [f"rank {rank} waits at {other}" for rank, other in others.items() if other and other != doing]
        not_waiting = [rank for rank, other in others.items() if not other]
        if missing:
            found.insert(0, missing)
        elif not_waiting:
            found.append(f"{ranks_of(not_waiting)} {'is' if len(not_waiting) == 1 else 'are'} in no collective")
        return "; ".join(found) or "all ranks wait at the same place"
