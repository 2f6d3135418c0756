"""What messages, warnings and notes have in common: values as they name them, the user's line, notes of an exception.

unisono raises the types that torch raises in the same place (`ValueError`, `TypeError`, `RuntimeError`), so that
programs written for `torch.nn.DataParallel` catch what they caught before. An exception from a user's module stays
the object it was; a note (PEP 678) says which replica raised it.

An exception's class is the user's, and any method of it may raise, `__getattribute__` and `add_note` too. So exceptions
are asked past their methods: by `issubclass(type(error), ...)`, and by the descriptors of `BaseException`.
"""

import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

log = logging.getLogger("unisono")
_LONGEST_SHOWN = 200  # characters of a value in a message
_THREAD_LOCAL = (
    "the calling thread has set {name!r} in a threading.local, which is empty in the threads of the other replicas. "
    "Pass the value as an input, make it an attribute of the module, or use a contextvars.ContextVar: replicas see the "
    "caller's."
)
_NOT_THE_USERS = ("unisono", "torch", "pytest_unisono")  # packages between the user's line and a warning


def shown(value: object) -> str:
    """Return a value as a message names it: as it is written, if that is one short line, else by its type.

    >>> shown("cpu"), shown(torch.Tensor), shown(torch.zeros(2, 3))
    ("'cpu'", 'the class Tensor', 'a Tensor of shape (2, 3)')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(shape := getattr(value, "shape", None), tuple):  # a tensor's, an array's
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN and text.isprintable() else f"an object of type {type(value).__name__}"


class ReplicaNames(list[str]):
    """The replicas of one call as messages name them: "replica 1 on cpu, rows 8 to 15 of 16".

    Attributes:
        numbers: of the replicas, as the names have them.
        devices: of the replicas.
    """

    numbers: Sequence[int]
    devices: Sequence[torch.device]


_logged: set[str] = set()
_logged_lock = threading.Lock()


def log_once(message: str) -> None:
    """Log `message` as a warning, the first time only in this process."""
    if _first_time(message):
        log.warning(message)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning about the user's line: that of the innermost frame that is not unisono's or torch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and not is_users(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def users_line() -> str:
    """Return the place, file:line, that a warning would be about."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_users(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_users(frame: types.FrameType) -> bool:
    """Return whether a frame runs code that is neither unisono's nor torch's."""
    return package_of(frame) not in _NOT_THE_USERS


def package_of(frame: types.FrameType) -> str:
    """Return the top package of the code that a frame runs."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def forget_logged() -> None:
    """Let every message be given again (for tests)."""
    with _logged_lock:
        _logged.clear()


def _first_time(message: str) -> bool:
    with _logged_lock:
        first = message not in _logged
        _logged.add(message)
    return first


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Return the notes of an exception; none where its class has something else in their place."""
    notes = _attributes_of(error).get("__notes__")
    return tuple([note for note in notes if isinstance(note, str)]) if isinstance(notes, list | tuple) else ()


def add_note(error: BaseException, note: str, *, first: bool = False) -> None:
    """Add a note to an exception, once, after the others or before them; one that has something else in `__notes__`
    stays as it is.
    """
    if note in notes_of(error) or any("__notes__" in vars(base) for base in type(error).__mro__):
        return  # a module may raise one object several times
    notes = _attributes_of(error).setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.insert(0 if first else len(notes), note)


def text_of(error: BaseException) -> str:
    """Return what an exception says; where its class fails to, what Python's tracebacks have there."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - as Python's tracebacks do
        return "<exception str() failed>"


def described(error: BaseException) -> str:
    """Return an exception's type and what it says, as in "ValueError: no such row"."""
    return f"{type(error).__name__}: {text_of(error)}"


def is_of_replica(error: BaseException) -> bool:
    """Return whether a replica has raised an error."""
    return any(note.startswith("raised in ") for note in notes_of(error))


def note_failure_after(error: BaseException | None, other: BaseException, doing: str) -> None:
    """Add to an error, if there is one, that what was done because of it has failed too; else raise the other one.

    After an error that ends a device's context, such as a failed assertion, every call of that device fails.
    """
    if error is None:
        raise other
    add_note(error, f"{doing} failed, too: {described(other)}")


def annotate(errors: list[tuple[str, BaseException]]) -> BaseException:
    """Return the first of several replicas' errors, with notes that name its replica and the other errors.

    Args:
        errors: (where, exception) in replica order, at least one; `where` reads like "replica 1 on cpu, rows 8 to 15".
    """
    where, first = errors[0]
    add_note(first, f"raised in {where}")
    for elsewhere, other in errors[1:]:
        if other is not first:
            add_note(first, f"{elsewhere} raised too: {described(other)}")
    return note_thread_local(first)


def note_thread_local(error: BaseException) -> BaseException:
    """Return an error, with a note if it asks a threading.local for what only the calling thread has there."""
    if issubclass(type(error), AttributeError):
        holder, name = _holder_of(error), _name_of(error)
        is_local = issubclass(type(holder), threading.local)
        if is_local and name in threading.local.__getattribute__(holder, "__dict__"):
            add_note(error, _THREAD_LOCAL.format(name=name))
    return error


_attributes_of: Any = vars(BaseException)["__dict__"].__get__
cause_of: Callable[[BaseException], BaseException | None] = vars(BaseException)["__cause__"].__get__
context_of: Callable[[BaseException], BaseException | None] = vars(BaseException)["__context__"].__get__
traceback_of: Callable[[BaseException], types.TracebackType | None] = vars(BaseException)["__traceback__"].__get__
_holder_of, _name_of = (vars(AttributeError)[name].__get__ for name in ("obj", "name"))
