"""Threads that others wait for, and that do not move: the error of `timeout=`, and what the log says without it.

They may wait for a lock that a waiting thread holds. Such a wait has no end, and nothing raises there. So the log says
where the threads are, once for one wait. Stuck are threads that have run no instruction for a while, and whose
innermost frame is of the user's code. Where the system tells whether a thread sleeps (Linux), one that computes is not
called stuck. One that sleeps need not wait for a lock: what is said holds for both.
"""

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch

from unisono.runtime.errors import ReplicaNames, is_users, log_once, package_of

SAID_AFTER_S = 3.0  # without progress
_LONGER = 4  # times that, where the system does not tell
_HELD = (
    "no progress for {seconds:.0f} s, while the calling thread waits: {places}. A lock that the calling thread holds, "
    "an RLock too, is not held by the threads of the other replicas. If one waits for it, this is a deadlock: release "
    "the lock around that call of the model, or give timeout=."
)


class ReplicaTimeout(RuntimeError):  # noqa: N818 - named as what happened
    """A replica has made no progress for the `timeout` of its `DataParallel`, and others waited for it.

        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"], timeout=60)
        >>> try:
        ...     output = model(torch.zeros(30, 5))
        ... except unisono.ReplicaTimeout as stuck:
        ...     print("stuck", stuck.replica, stuck.stack)

    Parameters, gradients, optimizer, buffers and the random state are as they were before the step. A thread cannot be
    ended: the stuck replica's is left alone, and ends with its task.

    Attributes:
        replica (int): its number, from 0: the place of its device in `device_ids`.
        device (torch.device | None): its device.
        timeout (float): the seconds that were waited.
        stack (str): where it was stuck: its Python stack, as traceback writes it; "" if it could not be read.
    """

    def __init__(
        self,
        message: str,
        *,
        replica: int = -1,
        device: torch.device | None = None,
        timeout: float = 0.0,
        stack: str = "",
    ) -> None:
        super().__init__(message)
        self.replica, self.device, self.timeout, self.stack = replica, device, timeout, stack


def threads_timed_out(
    idents: Mapping[int, int], timeout_s: float, names: ReplicaNames | None, lost: str = "This step is lost"
) -> ReplicaTimeout:
    """Return the error for replicas that are stuck in threads of this process.

    Args:
        idents: the thread of each stuck replica, by index; at least one.
        names: of all replicas.
        lost: what is lost, in words.
    """
    stacks = {i: stack for i, ident in idents.items() if (stack := _stack_of(ident))}
    texts = [f"{names[i] if names else f'replica {i}'} is here:\n{stack}" for i, stack in stacks.items()]
    first = min(idents)
    return ReplicaTimeout(
        f"{names[first] if names else f'replica {first}'}: no progress for {timeout_s:g} s "
        f"(timeout={timeout_s:g}). {lost}; the module is unchanged. The replica's thread cannot be stopped, "
        "and ends when its task ends. " + "\n".join(texts),
        replica=names.numbers[first] if names else first,
        device=names.devices[first] if names else None,
        timeout=timeout_s,
        stack=stacks.get(first, ""),
    )


def _stack_of(ident: int) -> str:
    """Return the Python stack of a thread; "" if there is no such thread."""
    frame = sys._current_frames().get(ident)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def places_of_threads(idents: Mapping[int, int]) -> dict[int, str]:
    """Return the line of the user's that each thread is running, by index; unisono's or torch's where it has none."""
    frames = sys._current_frames()
    try:
        return {index: _place_of(frames[ident]) for index, ident in idents.items() if ident in frames}
    finally:
        frames.clear()  # this one is among them: a cycle, which would hold what the caller waits for


def _place_of(inner: FrameType) -> str:
    frame: FrameType | None = inner
    while frame is not None and not (is_users(frame) and package_of(frame) != "threading"):
        frame = frame.f_back
    code, line = (frame or inner).f_code, (frame or inner).f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f'File "{code.co_filename}", line {line}, in {code.co_name}: {text}'


class StuckThreads:
    """Finds that none of the threads moves that another thread waits for. It is called several times a second."""

    def __init__(self) -> None:
        self._states: list[object] = []
        self._since = 0.0
        self._is_found = False

    def are_found(self, idents: Sequence[int], waited_s: float) -> bool:
        """Return, once, whether none has moved for a while.

        Args:
            waited_s: since there was progress.
        """
        if self._is_found or waited_s < SAID_AFTER_S / 3 or not idents:
            return False
        states, now = _states(idents), time.monotonic()
        if states != self._states:
            self._states, self._since = states, now
        enough_s = SAID_AFTER_S * 2 / 3 * (1 if _SYSTEM_TELLS else _LONGER)
        self._is_found = now - self._since > enough_s
        return self._is_found

    def say(self, idents: Mapping[int, int], names: Mapping[int, str] | Sequence[str], waited_s: float) -> None:
        """Log where replicas are, by index, if none of their threads moves while the calling thread waits for them."""
        if self.are_found([*idents.values()], waited_s):
            places = places_of_threads(idents)
            texts = [f"{names[i]} is at {places.get(i, 'a place unknown')}" for i in idents]
            log_once(_HELD.format(seconds=waited_s, places="; ".join(texts)))


def _states(idents: Sequence[int]) -> list[object]:
    """Return what is equal for two looks if no thread has moved between them."""
    native_ids = {thread.ident: thread.native_id for thread in threading.enumerate()}
    frames = sys._current_frames()
    try:
        return [_state(frames.get(ident), native_ids.get(ident)) for ident in idents]
    finally:
        frames.clear()  # as in `places_of_threads`


def _state(frame: FrameType | None, native_id: int | None) -> object:
    asleep = sleep_state(native_id) or not _SYSTEM_TELLS
    may_wait = frame is not None and asleep and is_users(frame)
    return (id(frame), frame.f_lasti, asleep) if frame is not None and may_wait else object()


def sleep_state(native_id: int | None) -> object:
    """Return what stays the same as long as a thread sleeps, how often it has waited; None: it runs, or is not known.

    Its processor time would not do: a loop that sleeps for 10 ms each time takes hardly any.
    """
    try:
        lines = Path(f"/proc/self/task/{native_id}/status").read_text().splitlines()
    except OSError:
        return None
    facts = dict([line.split(":\t", 1) for line in lines if ":\t" in line])
    return facts.get("voluntary_ctxt_switches", "") if facts.get("State", "R")[0] in "SD" else None


_SYSTEM_TELLS = Path("/proc/self/task").is_dir()
