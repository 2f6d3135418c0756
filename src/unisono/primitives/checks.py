"""Arguments that are modules, or one of a few values."""

from collections.abc import Sequence

from torch import nn


def check_flag(value: object, argument: str) -> bool:
    """Return a flag; raise TypeError for anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}={value!r}: expected True or False")
    return value


def check_module(value: object, argument: str) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{argument}: expected a torch.nn.Module, got {value!r}")


def check_word(words: Sequence[str], value: object, argument: str) -> None:
    """Raise TypeError or ValueError for what is not one of `words`."""
    if not isinstance(value, str) or value not in words:
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{argument}={value!r}: expected one of {list(words)}")
