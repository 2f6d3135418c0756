"""What can go wrong in a training, told to the person who typed the command.

    TrainingError          one line: what was given, what was expected, what to do
    ├── OptionError        an option's value, or two options that do not go together
    ├── FolderError        the output folder, or what lies in it
    └── DivergedError      the loss is no number any more

`Interrupted` is no error: somebody asked the training to stop, and it did.
"""

import signal


class TrainingError(Exception):
    """The training cannot start, or cannot go on; the message is one line with the remedy."""


class OptionError(TrainingError):
    """An option has a value that cannot be used."""


class FolderError(TrainingError):
    """The output folder cannot be written, holds a run already, or lacks what resuming needs."""


class DivergedError(TrainingError):
    """The loss became infinite or not a number."""


class Interrupted(Exception):  # noqa: N818  not an error
    """A signal asked the training to stop, and it stops between two steps."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received)
        self.received = received
