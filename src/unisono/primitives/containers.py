"""A container like another one, with other items: past the methods of its class.

A class of the user's may refuse to be written into or copied, or take other arguments than its items.
"""

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from unisono.primitives.visitor import dict_of, filled_slots

KINDS: tuple[Any, ...] = (functools.partial, OrderedDict, defaultdict, dict, list, deque, tuple, set, frozenset)


def kind_of(value: Any) -> Any:
    """Return the class of Python's that holds the items of a container, for each in `KINDS`."""
    return next(kind for kind in KINDS if isinstance(value, kind))


def container_like(
    value: Any, items: Iterable[Any], new: Callable[[Any], Any], begun: Callable[[Any], object] = lambda _: None
) -> Any:
    """Return a container of the class of `value`, with `items` and its attributes.

    Args:
        items: of a dict keys with values; of a partial the function and the positional arguments.
        new: from an attribute's value to that of the copy; a partial's keyword arguments and a `default_factory`, too.
        begun: is given the container while it is empty, as it may be in `items`; not a tuple, frozenset or partial.
    """
    kind = kind_of(value)
    if kind is functools.partial:
        keywords = {name: new(item) for name, item in value.keywords.items()}
        made = kind.__new__(type(value), *items, **keywords)
    elif kind in (tuple, frozenset):
        # A class in C, as of torch.return_types, has its own.
        make = type(value).__new__ if hasattr(value, "n_sequence_fields") else kind.__new__
        made = make(type(value), [*items])
    else:
        made = kind.__new__(type(value))
        if kind is deque:
            kind.__init__(made, (), value.maxlen)
        elif kind is defaultdict:
            kind.__init__(made, new(value.default_factory))
        begun(made)
        put = getattr(kind, {set: "add", list: "append", deque: "append"}.get(kind, "__setitem__"))
        for item in items:
            put(made, *item) if issubclass(kind, dict) else put(made, item)
    if (attributes := dict_of(type(value))) is not None:
        own = attributes.__get__(value)
        if own is value:  # the idiom self.__dict__ = self
            attributes.__set__(made, made)
        else:
            attributes.__get__(made).update({name: new(held) for name, held in dict.items(own)})
    for _, slot, held in filled_slots(value):
        slot.__set__(made, new(held))
    return made
