"""Warnings that are given once a model, about the user's line."""

from unisono.runtime import draws_off
from unisono.runtime.errors import warn


class ModelWarnings:
    """What one model has been warned of.

    While `verify` compares (draws are off then), nothing is said: its report says it.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()

    def give(self, message: str, kind: str = "") -> None:
        """Give a warning, unless one of its kind was given before.

        Args:
            kind: "": the message itself is the kind.
        """
        kind = kind or message
        if kind not in self._given and not draws_off.are_off():
            self._given.add(kind)
            warn(message)

    def leave_out(self, kind: str) -> None:
        """Give no warning of this kind: something else has said it."""
        self._given.add(kind)

    def has_given(self, kind: str) -> bool:
        """Return whether a warning of this kind was given, or is left out."""
        return kind in self._given

    def forget(self) -> None:
        """Let every warning be given again (for tests)."""
        self._given.clear()


of_process = ModelWarnings()  # of the verbs, which are called without a model
