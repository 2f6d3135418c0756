"""`package.module:build` on a command line: a model of the caller's own, found from the current folder.

Every error is one line, because the caller can fix it: no such module, a function that raises, a value of another form.
"""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from manyhands.console.errors import CommandError
from manyhands.data_parallel import DataParallel
from manyhands.verification.verify import verify

_RETURNS = "(model, inputs), or a dict with the arguments of manyhands.verify by name"


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


def build_arguments(target: str) -> dict[str, Any]:
    """Import `package.module:build`, call `build()`, and return what it returns as arguments by name.

    Args:
        target: a module, a colon, and a function in it that takes no arguments; dots lead into attributes.

    Raises:
        TargetError: the function does not exist, fails, or returns something else.
    """
    build = _find(target)
    try:
        built = build()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target} raised {one_line(error)}") from error
    if isinstance(built, dict):
        known = _known_arguments()
        unknown = [name for name in built if name not in known]
        if unknown:
            raise TargetError(f"{target} returned a dict with {unknown[0]!r} in it; known are {', '.join(known)}")
        missing = [name for name in ("model", "inputs") if name not in built]
        if missing:
            raise TargetError(f"{target} returned a dict without {missing[0]!r}: expected {_RETURNS}")
        return dict(built)
    if type(built) is tuple and len(built) == 2:
        return dict(zip(("model", "inputs"), built, strict=True))
    returned = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a value of type {type(built).__name__}"
    raise TargetError(f"{target} returned {returned}: expected {_RETURNS}")


def one_line(error: BaseException) -> str:
    """Return one line for an exception: its type, what it says, and where it was raised."""
    text = (str(error).strip().splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _find(target: str) -> Callable[[], Any]:
    module_name, colon, path = target.partition(":")
    if not colon or not path or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise TargetError(f"{target}: expected package.module:build, a function that returns {_RETURNS}")
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
    if not callable(found):
        raise TargetError(f"{target}: expected a function without arguments, got a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _known_arguments() -> list[str]:
    """Return the names that a dict may have: those of `verify`, and the options of `DataParallel` behind its `**`."""
    own = [name for name, p in inspect.signature(verify).parameters.items() if p.kind is not p.VAR_KEYWORD]
    options = [name for name, p in inspect.signature(DataParallel).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return [name for name in (*own, *options) if name != "show"]
