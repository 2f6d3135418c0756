"""`package.module:build` on a command line: a function that builds a model of the caller's own, and what it returns."""

import inspect
from typing import Any

from unisono.console.targets import TargetError, explained, find
from unisono.data_parallel import DataParallel
from unisono.verification.verify import verify

_RETURNS = "(model, inputs), or a dict with the arguments of unisono.verify by name"


def build_arguments(target: str) -> dict[str, Any]:
    """Import `package.module:build`, call `build()`, and return what it returns as arguments by name."""
    build = find(target, f"package.module:build, a function that returns {_RETURNS}")
    if not callable(build):
        raise TargetError(f"{target}: expected a function without arguments, got a {type(build).__name__}")
    with explained(target):
        built = build()
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


def _known_arguments() -> list[str]:
    """Return the names that a dict may have: those of `verify`, and the options of `DataParallel` behind its `**`."""
    own = [name for name, p in inspect.signature(verify).parameters.items() if p.kind is not p.VAR_KEYWORD]
    options = [name for name, p in inspect.signature(DataParallel).parameters.items() if p.kind is p.KEYWORD_ONLY]
    return [name for name in (*own, *options) if name != "show"]
