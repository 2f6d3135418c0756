"""What an engine does when a replica fails: the options of `Threads` and `Processes` that say so, and their owner.

An engine reads them in each step, so they may be changed between steps: `model.engine.timeout = 60`.
"""

from dataclasses import dataclass, field
from typing import Any

from unisono.engines.base import Engine
from unisono.primitives.checks import check_flag, check_word

# Waits for a socket are counted in milliseconds, in 32 bits. Python does not check it: a longer one may end at once.
_MAX_TIMEOUT_S = 2_000_000
_ON_WORKER_LOSS = ("raise", "retry")


@dataclass
class FailurePolicy:
    """What becomes of a step in which a replica fails. Each value is checked when it is assigned.

    Attributes:
        on_worker_loss: "retry": the step is run again after a worker's death; "raise": it is not.
        rescue: whether the step is run again in smaller parts where a replica ran out of memory.
        timeout: for how many seconds the caller, or a replica, waits for others without progress; None: for ever.
        retries: whether a step is run again after a worker's death.
        recovers: whether any step is run again.
        row_limits: how many rows fit in each replica's memory, by its number, as far as rescues have shown.
    """

    on_worker_loss: str = "raise"
    rescue: bool = False
    timeout: float | None = None
    row_limits: dict[int, int] = field(default_factory=dict)
    retries: bool = field(default=False, init=False)
    recovers: bool = field(default=False, init=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "on_worker_loss":
            value = check_word(_ON_WORKER_LOSS, value, name)
        elif name == "rescue":
            value = check_flag(value, name)
        elif name == "timeout":
            value = _check_timeout(value)
        values = vars(self)
        values[name] = value
        values["retries"] = values.get("on_worker_loss") == "retry"
        values["recovers"] = values["retries"] or values.get("rescue", False)


class FailureOptions(Engine):
    """The part of an engine that has a `FailurePolicy`: its options, readable and assignable.

    An engine's `__reduce__` gives the policy as its state.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__} has no option {name!r} that can be assigned: got {value!r}")
        super().__setattr__(name, value)

    @property
    def rescue(self) -> bool:
        """Whether a step is run again, in parts, where a replica ran out of memory."""
        return self._policy.rescue

    @rescue.setter
    def rescue(self, value: bool) -> None:
        self._policy.rescue = value

    @property
    def timeout(self) -> float | None:
        """After how many seconds without progress a wait for a replica ends in `ReplicaTimeout`; None: never."""
        return self._policy.timeout

    @timeout.setter
    def timeout(self, value: float | None) -> None:
        self._policy.timeout = value

    def __setstate__(self, policy: dict[str, Any]) -> None:
        vars(self._policy).update(policy)

    @property
    def row_limits(self) -> dict[int, int]:
        return self._policy.row_limits


def _check_timeout(value: object) -> float | None:
    expected = f"expected a number of seconds above 0, {_MAX_TIMEOUT_S} at most (23 days), or None to wait for ever"
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"timeout={value!r}: {expected}")
    if not 0 < value <= _MAX_TIMEOUT_S:
        raise ValueError(f"timeout={value!r}: {expected}")
    return float(value)
