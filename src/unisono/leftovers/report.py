"""What forward leaves behind, and the plain module would keep: one warning of each kind for a model.

What all replicas leave alike is kept on the live module (attributes.py); the rest is said.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from torch import nn

from unisono.runtime.model_warnings import ModelWarnings
from unisono.runtime.thread_pool import replica_path

_MOST_NAMED = 6
_LOST = (
    "forward of {model} assigns {names}: that is lost when forward ends, as each replica, part or batch of a map has "
    "its own. (What all replicas set to the same plain value, and not to their number of rows, stays.) Return the "
    "value from forward, and keep the gathered one. If the first forward creates layers, parameters or hooks, call the "
    "plain module once before you wrap it."
)
_KEPT = (
    "a hook stores {names}, and each replica calls it with its own rows, or with a part of them: a value "
    "stored by name is one replica's, and a list is in the order in which replicas finish. Return the value "
    "from forward of {model}; or use the hook on the plain module, model.module."
)
_SHARED = (
    "forward of {model} writes into {names}, which all replicas share: a value stored by name is one replica's, a list "
    "is in the order in which replicas happen to run, and a count counts replicas. Return the value from forward, and "
    "keep the gathered one."
)
_DRAWN = (
    "{names} was drawn from while the replicas of {model} ran, or parts of a batch. They share this generator, in the "
    "order in which they happen to run, and a part that backward computes a second time draws other numbers. So runs "
    "with equal seeds may differ. Use torch's functions without generator=, for which each replica has its own stream; "
    "or draw outside the model, and pass the result as an input."
)
_IN_ONE_THREAD = (
    "forward of {model} may read {names}, which the calling thread has set in a threading.local: other replicas are in "
    "other threads, with another value there, or none. Pass the value as an input, make it an attribute of the module, "
    "or use a contextvars.ContextVar: replicas see the caller's."
)


class Kind(StrEnum):
    """Kinds of what is left behind; a model is warned of each once."""

    ASSIGNED = "assigned"  # the paths of what forward assigns in replicas
    HOOKS = "hooks"  # the names of hooks that keep what they see
    SHARED = "shared"  # the names of what replicas share and write into
    DRAWS = "draws"  # the names of generators that replicas share and draw from
    THREADS = "threads"  # the names of values that only the calling thread has


class Leftovers:
    """What the forwards of one model leave behind.

    Attributes:
        found: by kind, the names of what was found.
        has_more: whether something was found that was not said.
        of_caller: looks at what the calling thread has, and yields what is of kind `THREADS`; None: nothing to look at.

    Args:
        warnings: of the model.
    """

    def __init__(self, warnings: ModelWarnings) -> None:
        self.found: dict[Kind, dict[str, None]] = {kind: {} for kind in Kind}
        self.has_more = False
        self.of_caller: Callable[[], Iterable[str]] | None = None
        self._warnings = warnings

    @property
    def looks(self) -> bool:
        """Whether forwards are still looked at."""
        return not all(map(self._warnings.has_given, Kind))

    def add(self, kind: Kind, names: Iterable[str]) -> None:
        """Take note of what was found."""
        names = dict.fromkeys(names)
        self.found[kind].update(names)
        self.has_more = self.has_more or bool(names)

    def say(self, model: nn.Module) -> None:
        """Warn of what was found, if that was not said before."""
        if not self.has_more or any(replica_path()):  # the latter: not in the caller's thread
            return
        self.has_more, of_caller, self.of_caller = False, self.of_caller, None
        if of_caller is not None:
            self.found[Kind.THREADS].update(dict.fromkeys(of_caller()))
        for kind, names in self.found.items():
            if names and not self._warnings.has_given(kind):
                text = _MESSAGES[kind].format(model=type(model).__name__, names=listed([*names]))
                self._warnings.give(text, kind)


_MESSAGES = {
    Kind.ASSIGNED: _LOST,
    Kind.HOOKS: _KEPT,
    Kind.SHARED: _SHARED,
    Kind.DRAWS: _DRAWN,
    Kind.THREADS: _IN_ONE_THREAD,
}


def listed(names: Sequence[str]) -> str:
    """Return names as a message has them.

    >>> listed(["a.steps", "b.steps"])
    'a.steps and b.steps'
    """
    if len(names) > _MOST_NAMED:
        return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
