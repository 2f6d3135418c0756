"""Values that the program has set in a `threading.local` of its thread, and that other replicas' threads do not have.

Code that reads one with a default (`getattr(settings, "scale", 1.0)`, a class with `__init__` or attributes) gets the
default in every other replica, in silence. So the first steps of a structure compare what the calling thread has with
what a new thread has, in each `threading.local` that the code of the model names. What that code assigns itself, such
as a buffer for each thread, may differ; so may what both have of containers and objects.
"""

import contextlib
import dis
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from unisono.leftovers.shared import Search, codes_of, functions_in
from unisono.primitives.change_tracking import GONE
from unisono.primitives.object_state import is_equal
from unisono.primitives.visitor import INERT, Place, is_a


class ThreadLocals:
    """The `threading.local`s that a forward leads to.

    Args:
        search: has found what it leads to.
    """

    def __init__(self, search: Search) -> None:
        self.places = [place for place in search.places if is_a(place.value, threading.local)]
        functions = [each.value for each in search.places if is_a(each.value, types.FunctionType)]
        self._read: set[str] = set()
        self._assigned: set[str] = set()
        if self.places:
            self._read.update(_names_in(functions))
            self._assigned.update(_names_in(functions, assigned=True))
            classes = dict.fromkeys(cls for place in self.places for cls in type(place.value).__mro__)
            methods = [method for cls in classes for method in functions_in(cls)]
            while called := [each for each in methods if each.__name__ in self._read]:
                self._read.update(_names_in(called))
                methods = [each for each in methods if each not in called]

    def only_here(self) -> Iterator[str]:
        """Yield the name of each value that the calling thread has, and a new thread has not."""
        for place in self.places:
            here, there = _in_this_thread(place.value), _in_a_new_thread(place.value)
            for name in here.keys() & (self._read - self._assigned):
                other = there.get(name, _of_class(place.value, name))
                is_plain = type(other) in INERT or is_a(other, torch.Tensor) or other is GONE
                if is_plain and not is_equal(here[name], other):
                    yield _named(place, name)


def _named(place: Place, name: str) -> str:
    """Return what a message calls a value: "settings.scale (global of train.py)"."""
    path, bracket, where = str(place).partition(" (")
    return f"{path}.{name}{bracket}{where}"


def _names_in(functions: Sequence[types.FunctionType], *, assigned: bool = False) -> Iterator[str]:
    """Yield the names of attributes in the code of functions; of those that it assigns, also by `setattr`."""
    for function in functions:
        for code in codes_of(function.__code__):
            texts = [const for const in code.co_consts if type(const) is str]
            if not assigned:
                yield from (*code.co_names, *texts)
                continue
            yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
            yield from texts if "setattr" in code.co_names else ()


def _in_this_thread(local: threading.local) -> dict[str, Any]:
    return dict(threading.local.__getattribute__(local, "__dict__"))


def _in_a_new_thread(local: threading.local) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def look() -> None:
        with contextlib.suppress(Exception):  # its class may do anything when a new thread asks for it
            found.update(_in_this_thread(local))

    thread = threading.Thread(target=look, name="unisono-thread-local")
    thread.start()
    thread.join()
    return found


def _of_class(value: object, name: str) -> Any:
    return next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), GONE)
