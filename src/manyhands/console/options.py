"""What the parsers of several commands need: the types of their arguments, and the packages that they ask for."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from manyhands.console.errors import OptionError
from manyhands.primitives.split_sizes import RULES, check_shares

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


def flag(name: str) -> str:
    """Return an option's name as it is typed: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def expect_installed(packages: Sequence[str], extra: str) -> None:
    """Check that packages of an extra of manyhands are installed.

    Raises:
        OptionError: some are not.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise OptionError(f"{', '.join(missing)} not installed: pip install 'manyhands[{extra}]'")
