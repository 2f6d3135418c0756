"""`package.module:name` on a command line: the caller's own code, found from the current folder.

Every error is one line, because the caller can fix it: no such module, no such name in it, code that raises.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from manyhands.console.errors import CommandError


class TargetError(CommandError):
    """The target cannot be used: one line that says why. Its `__cause__` is the error of the caller's code, if any."""


@contextlib.contextmanager
def current_folder_first() -> Iterator[None]:
    """Look for modules in the current folder before all others, as `python script.py` does for the script's."""
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = path


def find(target: str, expected: str) -> Any:
    """Import what a target names.

    Args:
        target: a module, a colon, and a name in it; dots lead into attributes.
        expected: the form of such a target, for the error message.

    Raises:
        TargetError: it is of another form, does not exist, or its module cannot be imported.
    """
    module_name, colon, path = target.partition(":")
    if not colon or not path or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise TargetError(f"{target}: expected {expected}")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise TargetError(f"{target}: there is no module {error.name} in {sys.path[0]} or installed") from error
        raise TargetError(f"{target}: importing {module_name} raised {one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target}: importing {module_name} raised {one_line(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise TargetError(f"{target}: there is no {name} in {getattr(found, '__name__', path)}")
        found = getattr(found, name)
    return found


def one_line(error: BaseException) -> str:
    """Return one line for an exception: its type, what it says, and where it was raised."""
    text = (str(error).strip().splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"
