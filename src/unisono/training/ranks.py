"""The processes of one training, seen from one of them: what each does, and what all must agree on.

All ranks take the same steps, each with its shard of the rows. Only rank 0 writes files and prints. A program that was
started by itself is rank 0 of a world of one, and nothing here communicates.

Guarantees
    - All ranks start training, or all end with the error of the lowest rank that had one.
    - No rank ends before rank 0 has printed why, as far as rank 0 still can: a launcher ends all processes as soon as
      it sees that one has failed.

Assumes that all ranks call these methods in the same order.
"""

import contextlib
import datetime
import os
import socket
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from unisono.console.errors import CommandError, OptionError
from unisono.distributed.launchers import slurm_step
from unisono.distributed.process_group import AllGatherWork, Communicator, communicator_for, distributed

_LAST_WORDS_S = 300.0  # how long rank 0 may take to save, and to print why it stops

T = TypeVar("T")


class Ranks:
    """The processes that train together, of which this is one; without a communicator it is alone."""

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator = communicator
        self.rank = communicator.rank if communicator else 0
        self.world_size = communicator.world_size if communicator else 1
        self._last_max: AllGatherWork | None = None
        self.is_first = self.rank == 0  # which writes and prints

    @classmethod
    def join(cls) -> "Ranks":
        """Return the processes that a launcher has started, or that have a default process group."""
        try:
            return cls(communicator_for())
        except (RuntimeError, ValueError) as error:
            raise OptionError(error) from error

    @property
    def are_lost(self) -> bool:
        """Whether a process has failed or ended, so that the others cannot go on."""
        return self._communicator is not None and self._communicator.failures.broken is not None

    # ---- deciding --------------------------------------------------------------------------------

    def together(self, do: Callable[[], T]) -> T:
        """Call `do` in every process; return its result when it has succeeded in all of them.

        Raises:
            CommandError: in every process, that of the lowest rank in which `do` has raised one.
        """
        if self._communicator is None:
            return do()
        outcome: T | None = None
        error: Exception | None = None
        try:
            outcome = do()
        except CommandError as raised:
            error = raised
        for rank, found in enumerate(self.all_gather(error)):
            if found is not None:
                raise found if rank == 0 else type(found)(f"rank {rank}: {found}")
        return outcome  # type: ignore[return-value]

    def from_first(self, decide: Callable[[], T]) -> T:
        """Call `decide` in the first process only; return its result, or raise its CommandError, in all of them."""
        return self.all_gather(self.together(lambda: decide() if self.is_first else None))[0]  # type: ignore[return-value]

    def expect_equal(self, what: str, value: str) -> None:
        """Check that all processes have the same."""
        values = self.all_gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise OptionError(
                    f"{what} of the processes differ: rank 0 has {values[0]}, rank {rank} has {other}; "
                    "start all of them with the same arguments and data"
                )

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, in rank order."""
        if self._communicator is None:
            return [value]
        return self._communicator.all_gather_object(value, "exchanging values before the training")

    # ---- training --------------------------------------------------------------------------------

    def shard_of(self, rows: Tensor) -> Tensor:
        """Return this process's shard of a batch: contiguous; sizes differ by one row at most, and may be 0."""
        return rows.tensor_split(self.world_size)[self.rank]

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each number over the processes. Whole numbers are exact."""
        if self._communicator is None:
            return list(values)
        gathered = self._communicator.all_gather(values, "adding up the processes' results").wait()
        return [sum(column) for column in zip(*gathered, strict=True)]

    def delayed_max(self, value: int) -> int:
        """Return the maximum over the processes of what they gave in the previous call; alone, the value itself.

        No process waits for another one: a call's numbers are on their way until the next call.
        """
        if self._communicator is None:
            return value
        previous, self._last_max = self._last_max, self._communicator.all_gather([value], "asking whether to stop")
        return 0 if previous is None else int(max(number for (number,) in previous.wait()))

    # ---- ending ----------------------------------------------------------------------------------

    def fail(self, reason: object) -> None:
        """Tell the other processes that this one has failed, so that none waits for it."""
        if self._communicator is not None:
            self._communicator.failures.report(str(reason))

    def wait_for_first(self) -> None:
        """Return when the first process has saved and printed everything; no process should end before.

        After a failure this does not wait: the process that has ended may be the first one.
        """
        if self._communicator is None or (self.are_lost and not self.is_first):
            return
        with contextlib.suppress(RuntimeError):  # the store ended with the process that kept it
            store = distributed.PrefixStore("unisono train", distributed.group.WORLD.get_group_store())
            if self.is_first:
                store.set("done", "")
            else:
                store.wait(["done"], datetime.timedelta(seconds=_LAST_WORDS_S))


ALONE = Ranks()


def launch() -> str | None:
    """Return the name of the launch that this process is part of; None without a launcher that restarts processes.

    Processes that replace others after a failure have the same: torchrun's `--rdzv-id`, or the one that `--standalone`
    generates; Slurm's job and step, which a job that is requeued keeps. A launch without a name is named after the
    launcher's process on this machine.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return slurm_step()
    if name != "none":
        return name
    import psutil  # here: whether it is installed is checked after this file has been loaded

    parent = psutil.Process(os.getppid())
    return f"process {parent.pid} of {socket.gethostname()}, started at {parent.create_time():.2f}"
