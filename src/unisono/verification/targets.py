"""`package.module:build` on a command line: a function that builds a model of the caller's own, and what it returns."""

from typing import Any

from unisono.console.targets import TargetError, explained, find
from unisono.primitives.checks import check_names
from unisono.verification.verify import OF_OTHERS, VERIFY_ARGUMENTS

_RETURNS = "(model, inputs), or a dict with the arguments of unisono.verify by name"


def build_arguments(target: str) -> dict[str, Any]:
    """Import `package.module:build`, call `build()`, and return what it returns as arguments by name."""
    build = find(target, f"package.module:build, a function that returns {_RETURNS}")
    if not callable(build):
        raise TargetError(
            f"{target}: expected a function without arguments, got an object of type {type(build).__name__}"
        )
    with explained(target):
        built = build()
    if isinstance(built, dict):
        known = [name for name in VERIFY_ARGUMENTS if name != "show"]
        try:
            check_names(built, known, "unisono.verify", OF_OTHERS)
        except TypeError as error:
            raise TargetError(f"the dict that {target} returned: {error}") from error
        missing = [name for name in ("model", "inputs") if name not in built]
        if missing:
            raise TargetError(f"{target} returned a dict without {missing[0]!r}: expected {_RETURNS}")
        return dict(built)
    if type(built) is tuple and len(built) == 2:
        return dict(zip(("model", "inputs"), built, strict=True))
    returned = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a value of type {type(built).__name__}"
    raise TargetError(f"{target} returned {returned}: expected {_RETURNS}")
