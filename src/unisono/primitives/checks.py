"""Arguments that are modules, dicts or one of a few values; names of arguments that are not known."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from unisono.runtime.errors import shown

_NEAR = 0.8  # how like a name of the advice, which has many, must be: `find_unused_parameter`


def check_flag(value: object, argument: str) -> bool:
    """Return a flag; raise TypeError for anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}={shown(value)}: expected True or False")
    return value


def check_module(value: object, argument: str) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(value, nn.Module):
        remedy = (
            f"; make one: {value.__name__}(...)" if isinstance(value, type) and issubclass(value, nn.Module) else ""
        )
        raise TypeError(f"{argument}: expected a torch.nn.Module, got {shown(value)}{remedy}")


def check_kwargs(kwargs: object, argument: str) -> dict[str, Any]:
    """Return keyword inputs, {} for None; raise TypeError if they are no dict of names."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise TypeError(f"{argument}: expected a dict from names to inputs, got {shown(kwargs)}")
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected a dict from names to inputs, got the key {shown(name)}")
    return kwargs


def check_word(words: Sequence[str], value: object, argument: str) -> None:
    """Raise TypeError or ValueError for what is not one of `words`."""
    if not isinstance(value, str) or value not in words:
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{argument}={shown(value)}: expected one of {list(words)}")


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
        if name not in known:
            raise TypeError(f"{function} has no argument {name!r}; {_remedy(name, known, advice)}")


def _remedy(name: str, known: Collection[str], advice: Mapping[str, str]) -> str:
    meant = advice.get(name) or next(iter(get_close_matches(name, known, 1)), "")
    if meant in known:
        return f"did you mean {meant}?"
    if meant and not meant.isidentifier():  # a name alone is that of an argument that another function has
        return meant
    near = next(iter(get_close_matches(name, [key for key in advice if key != name], 1, _NEAR)), "")
    if near and not advice[near].isidentifier():
        return f"did you mean {near}? {advice[near]}"
    return f"it has {', '.join(known)}"
