"""The processes of one training, seen from one of them: who does what, and what all of them have to agree on.

All of them take the same steps, each with its part of the rows. The first one, rank 0, alone writes files and speaks.
A program that was started by itself is the first of one, and everything here comes to nothing.

Guarantees
    - What one process decides or finds wrong before training, all of them know: either all go on, or all end with the
      error of the first that had one.
    - Nobody ends before the first has said why, as far as it still can: a launcher ends all processes as soon as it
      sees that one has failed.

Assumes that all processes call these methods in the same order.
"""

import contextlib
import datetime
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from manyhands.console.errors import OptionError, TrainingError
from manyhands.distributed.process_group import Cluster, Gathering, distributed, join_processes
from manyhands.training.data import DataError

_SPEECH_S = 300.0  # how long the first may take to save and say why it stops

T = TypeVar("T")


class Ranks:
    """The processes that train together, of which this is one.

    Args:
        cluster: the processes; None if this one is alone.

    Attributes:
        rank, world_size: this process's place among them, and how many they are.
    """

    def __init__(self, cluster: Cluster | None = None) -> None:
        self._cluster = cluster
        self.rank = cluster.rank if cluster else 0
        self.world_size = cluster.world_size if cluster else 1
        self._asked: Gathering | None = None

    @classmethod
    def meet(cls) -> "Ranks":
        """Return the processes that a launcher has started, or that have a default process group.

        Raises:
            OptionError: what the launcher says in the environment cannot be.
        """
        try:
            return cls(join_processes())
        except (RuntimeError, ValueError) as error:
            raise OptionError(error) from error

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    @property
    def are_lost(self) -> bool:
        """Whether some process has failed or gone, so that the others cannot go on together."""
        return self._cluster is not None and self._cluster.broken

    # ---- deciding --------------------------------------------------------------------------------

    def together(self, do: Callable[[], T]) -> T:
        """Return what `do` returns in this process, once it has returned in all.

        Raises:
            TrainingError, DataError: that of the first process in which `do` has raised one; in all of them.
        """
        if self._cluster is None:
            return do()
        outcome: T | None = None
        error: Exception | None = None
        try:
            outcome = do()
        except (TrainingError, DataError) as raised:
            error = raised
        errors = self._cluster.exchange(error, "seeing whether all can start")
        for rank, found in enumerate(errors):
            if found is not None:
                raise found if rank == 0 else type(found)(f"rank {rank}: {found}")
        return outcome  # type: ignore[return-value]

    def from_first(self, decide: Callable[[], T]) -> T:
        """Return what `decide` returns in the first process; it is called nowhere else.

        Raises:
            TrainingError, DataError: it has raised one.
        """
        decided = self.together(lambda: decide() if self.is_first else None)
        if self._cluster is not None:
            decided = self._cluster.value_of_first(decided, "hearing what the first process has decided")
        return decided  # type: ignore[return-value]

    def expect_alike(self, what: str, facts: Mapping[str, Any]) -> None:
        """Check that all processes have the same facts.

        Raises:
            OptionError: some have not; names the first difference.
        """
        if self._cluster is None:
            return
        first, *others = self._cluster.exchange(dict(facts), f"comparing {what}")
        for rank, other in enumerate(others, start=1):
            for name in {**first, **other}:
                mine, theirs = first.get(name, "nothing"), other.get(name, "nothing")
                if mine != theirs:
                    raise OptionError(
                        f"{what} of the processes differ: for {name}, rank 0 has {mine}, rank {rank} has {theirs}; "
                        "start all of them alike"
                    )

    def everybodys(self, value: T) -> list[T]:
        """Return what each process gives, in rank order."""
        return [value] if self._cluster is None else self._cluster.exchange(value, "exchanging values")

    # ---- training --------------------------------------------------------------------------------

    def part_of(self, rows: Tensor) -> Tensor:
        """Return this process's part of a batch: in order, of equal size but for one row, possibly none."""
        return rows.tensor_split(self.world_size)[self.rank]

    def sum(self, *values: float) -> list[float]:
        """Return the sums of some numbers over the processes. Whole numbers are exact."""
        if self._cluster is None:
            return list(values)
        everybodys = self._cluster.gather(values, "adding up the processes' results")()
        return [sum(column) for column in zip(*everybodys, strict=True)]

    def greatest_so_far(self, value: int) -> int:
        """Return the greatest number that a process gave at its last call but this; alone, the number itself.

        So nobody waits for anybody: this call's numbers travel until the next.
        """
        if self._cluster is None:
            return value
        before, self._asked = self._asked, self._cluster.gather([value], "asking whether to stop")
        return 0 if before is None else int(max(number for (number,) in before()))

    # ---- ending ----------------------------------------------------------------------------------

    def fail(self, reason: object) -> None:
        """Tell whoever waits for this process that it will not come."""
        if self._cluster is not None:
            self._cluster.fail(str(reason))

    def part(self) -> None:
        """Return when the first process has saved and said what it had to; before that nobody should end.

        Who has lost the others does not wait: it may be the first that has gone.
        """
        if self._cluster is None or (self.are_lost and not self.is_first):
            return
        with contextlib.suppress(RuntimeError):  # the store has gone with the process that kept it
            store = distributed.PrefixStore("manyhands train", distributed.group.WORLD.get_group_store())
            if self.is_first:
                store.set("said", "")
            else:
                store.wait(["said"], datetime.timedelta(seconds=_SPEECH_S))


ALONE = Ranks()


def launch() -> str | None:
    """Return the name of the launch that this process is part of; None if there is no launcher that starts anew.

    It is the same in all its processes, and in those that take their places after a failure: torchrun's `--rdzv-id`,
    or the one that `--standalone` makes up. Where nobody has named it, it is the launcher's process on this machine.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":
        return name
    import psutil  # here: what is missing is said in one line, later than this file is loaded

    parent = psutil.Process(os.getppid())
    return f"process {parent.pid} of {socket.gethostname()}, started at {parent.create_time():.2f}"


def is_first_of_its_host() -> bool:
    """Return whether this process is the first of those that a launcher has started on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
