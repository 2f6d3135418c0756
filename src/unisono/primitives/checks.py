"""Arguments that are modules, or one of a few values; names of arguments that are not known."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

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


def check_names(given: Iterable[str], known: Collection[str], function: str, advice: Mapping[str, str]) -> None:
    """Raise TypeError if one of the given keyword arguments is none of `known`.

    >>> check_names(["share"], ["shares", "dim"], "DataParallel", {})
    Traceback (most recent call last):
    ...
    TypeError: DataParallel has no argument 'share'; did you mean shares?

    Args:
        function: whose arguments they are.
        advice: what to say of a name that other libraries have; the name of an argument of ours if that is meant.
    """
    for name in given:
        if name in known:
            continue
        meant = advice.get(name) or next(iter(get_close_matches(name, known, 1)), "")
        if meant.isidentifier() and meant not in known:  # what another function has
            meant = ""
        if meant in known:
            meant = f"did you mean {meant}?"
        raise TypeError(f"{function} has no argument {name!r}; {meant or 'it has ' + ', '.join(known)}")
