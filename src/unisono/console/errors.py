"""The errors that a command reports in one line, and its exit statuses.

    CommandError           one line: what was given, what was expected, what to do
    ├── OptionError        an option's value, or two options that do not go together
    ├── FolderError        the output folder, or the files in it
    ├── DivergedError      the training loss is no longer a number
    ├── OutputClosedError  what read the output has ended, as `head` does
    ├── TargetError        code of the caller's that an argument names (targets.py)
    └── DataError          the data to train on (training/)

`Interrupted` is no error: a signal asked the training to stop, and it did.
"""

import signal

DONE = 0
FAILED = 1
MISUSED = 2  # nothing was done


def escaped(text: str) -> str:
    """Return a text with escapes in the place of what a terminal would take for a command.

    >>> print(escaped("process 7\x1b[2J on caf\u00e9"))
    process 7\\x1b[2J on café
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


class CommandError(Exception):
    """The command cannot start, or cannot go on; the message is one line with the remedy."""

    exit_status = MISUSED


class OptionError(CommandError):
    """An option has a value that cannot be used."""


class FolderError(CommandError):
    """The output folder cannot be written, holds a run already, or lacks what resuming needs."""


class DivergedError(CommandError):
    """The loss became infinite or not a number."""

    exit_status = FAILED


class OutputClosedError(CommandError):
    """Nothing reads standard output any more; its `__cause__` is the BrokenPipeError."""

    exit_status = FAILED


class Interrupted(Exception):  # noqa: N818  not an error
    """A signal asked the training to stop, and it stops between two steps."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received)
        self.received = received
