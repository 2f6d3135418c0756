"""What the parsers of several commands need: the types of their arguments, and the packages that they ask for."""

import argparse
import ast
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.console.errors import OptionError
from unisono.primitives.split_sizes import RULES, check_shares

TARGET = "package.module:build"


def folder(name: str) -> Path:
    """Return the path of a folder; an argparse type."""
    if not name:  # a path would take it for "."
        raise argparse.ArgumentTypeError("expected the name of a folder, got ''")
    return Path(name)


def shares(text: str) -> str | list[float]:
    """Return the rule for the rows of each replica; an argparse type."""
    if text in RULES:
        return text
    try:
        weights = [float(weight) for weight in text.split(",")]
        check_shares(weights, None)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(RULES)}, or weights such as 2,1, 0 or more and not all of them 0; got {text!r}"
        ) from None
    return weights


def literal(text: str) -> Any:
    """Return what a text in Python's notation means, of numbers, strings, None, tuples, lists, dicts: an argparse type.

    >>> literal("{'mask': None}")
    {'mask': None}
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"expected a value in Python's notation, such as 1, (0, None) or {{'mask': None}}; got {text!r}"
        ) from None


def scalars(text: str) -> Any:
    """Return the rule for 0-dim outputs, a word or such words in a tuple or dict; an argparse type."""
    return literal(text) if text[:1] in ("(", "[", "{") else text


def flag(name: str) -> str:
    """Return an option's name as it is typed: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def expect_installed(packages: Mapping[str, Sequence[str]]) -> None:
    """Check that packages are installed.

    Args:
        packages: by the extra of unisono that has them.

    Raises:
        OptionError: some are not.
    """
    missing = {extra: [name for name in names if not is_installed(name)] for extra, names in packages.items()}
    extras = ",".join(extra for extra, names in missing.items() if names)
    if extras:
        names = [name for names in missing.values() for name in names]
        raise OptionError(f"{not_installed(*names)}: {remedy(extras)}")


def not_installed(*packages: str) -> str:
    """Return in words that packages are not installed."""
    return f"{', '.join(packages)} not installed"


def remedy(extra: str) -> str:
    """Return how to install what an extra of unisono brings; from its sources, too."""
    return f"pip install 'unisono[{extra}]' (in a checkout: pip install '.[{extra}]')"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, without code, has no origin


def why_no_picture() -> str:
    """Return why no picture can be drawn, with the remedy; "" if one can."""
    return "" if is_installed("matplotlib") else f"no picture: {not_installed('matplotlib')}: {remedy('bench')}"
