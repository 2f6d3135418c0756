"""`package.module:name` on a command line: the caller's own code, found from the current folder.

Every error is one line, because the caller can fix it: no such module, no such name in it, code that raises.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from unisono.console.errors import CommandError
from unisono.runtime.contexts import contextmanager

_OWN_FILES = os.path.dirname(os.path.dirname(__file__)) + os.sep


class TargetError(CommandError):
    """The target cannot be used: one line that says why. Its `__cause__` is the error of the caller's code, if any."""


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Look for modules in the current folder before all others, as `python script.py` does for the script's."""
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = path


def find(target: str, expected: str) -> Any:
    """Import what a target names: a module, a colon, and a name in it; dots lead into attributes.

    If it is of another form than is expected, does not exist, or cannot be imported, it is a TargetError.
    """
    module_name, colon, path = target.partition(":")
    names = path.split(".")
    if not (colon and all(map(str.isidentifier, [*module_name.split("."), *names]))) or module_name.endswith(".py"):
        raise TargetError(f"{target}: expected {expected}{_for_file(module_name, path)}")
    with explained(f"{target}: importing {module_name}"):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise TargetError(
                f"{target}: cannot find module {error.name}, neither in {sys.path[0]} nor installed"
            ) from error
    for name in names:
        with explained(f"{target}: looking up {name}"):
            try:
                found = getattr(found, name)
            except AttributeError as error:
                raise TargetError(f"{target}: there is no {name} in {_described(found)}") from error
    return found


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn whatever the caller's code raises while `doing` it into a TargetError; but let Ctrl-C through."""
    try:
        yield
    except (TargetError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TargetError(f"{doing} raised {one_line(error)}") from error


def _for_file(name: str, path: str) -> str:
    """Return what to write in the place of a file's name."""
    if not name.endswith(".py"):
        return ""
    return f"; for {name} write {module_of(name)}:{path or 'build'}"


def module_of(file: str) -> str:
    """Return the name of a file's module.

    >>> module_of("./package/train.py")
    'package.train'
    """
    return re.sub(r"[/\\]+", ".", file.removesuffix(".py").removeprefix("./"))


def _described(found: Any) -> str:
    """Return the name of a module or class; of a module also its file, which may not be the one that was meant."""
    file = getattr(found, "__file__", None)
    return f"{getattr(found, '__name__', found)}{f' ({file})' if file else ''}"


def one_line(error: BaseException) -> str:
    """Return one line for an exception: its type, what it says, and where it was raised, if not by unisono itself."""
    text = next(iter(str(error).strip().splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    is_shown = frames and not frames[-1].filename.startswith(_OWN_FILES)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if is_shown else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"
