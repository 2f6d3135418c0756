"""What the parsers of several commands need: the types of their arguments, and the packages that they ask for."""

import argparse
import ast
import errno
import importlib.util
import math
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from unisono.console.errors import OptionError
from unisono.primitives.dims import check_dims, check_scalars
from unisono.primitives.split_sizes import RULES, check_shares

TARGET = "package.module:build"
_CONTROLS = ("Cc", "Zl", "Zp")  # in Unicode: control characters, and the two that end lines
_LONGEST_FILE = "x" * 100  # longer than any path in a folder that a command writes
_ON_THE_INDEX = {"sklearn": "scikit-learn"}  # packages that are installed by another name than they are imported
OF_WRAPPERS = ("shares", "in_dims", "out_dims", "scalars", "sync_batch_norm")


def add_options_of_wrappers(parser: argparse.ArgumentParser) -> None:
    """Add the options that are arguments of `DataParallel`, for commands whose wrappers take them as they are."""
    parser.add_argument(
        "--shares",
        type=shares,
        metavar="RULE",
        help=(
            "how many rows (samples of the batch) each replica gets: chunk, as torch does; even; measured, which "
            "tries a few splits in the first steps and keeps the fastest; or one weight for each device, such as "
            "2,1 (default: chunk)"
        ),
    )
    parser.add_argument(
        "--in-dims",
        type=dims,
        metavar="DIMS",
        help=(
            "the batch dimension of each input, in Python's notation, such as (0, None) or {'mask': None}; None "
            "gives every replica the whole input (default: dim of the wrapper, usually 0)"
        ),
    )
    parser.add_argument(
        "--out-dims",
        type=dims,
        metavar="DIMS",
        help=(
            "the same for outputs, in the shape of the output, such as (0, (1, 1)) for an LSTM with batch_first=True"
        ),
    )
    parser.add_argument(
        "--scalars",
        type=scalars,
        metavar="RULE",
        help=(
            "how scalars such as a loss are combined: stack, mean, sum, mean:name, or these in the shape of the "
            "output, such as {'loss': 'mean:tokens', 'tokens': 'sum'} (default: stack)"
        ),
    )
    parser.add_argument(
        "--sync-batch-norm",
        action=argparse.BooleanOptionalAction,
        help=(
            "batch norm over the rows of all replicas; --no-sync-batch-norm: over each replica's own rows, as in "
            "torch (default: each replica's own, with a warning)"
        ),
    )


def expect_weights(given: Mapping[str, Any], num_devices: int) -> None:
    """Raise an OptionError if `--shares` has weights, and not one for each device."""
    weights = given.get("shares")
    if isinstance(weights, list) and len(weights) != num_devices:
        typed = ",".join(f"{weight:g}" for weight in weights)
        raise OptionError(
            f"--shares {typed}: {len(weights)} weight{'s' * (len(weights) != 1)} for {num_devices} devices; "
            "give one for each device"
        )


def folder(name: str) -> Path:
    """Return the path of a folder that can have the files of a command; an argparse type."""
    if not name:  # a path would take it for "."
        raise argparse.ArgumentTypeError("expected the name of a folder, got ''")
    if any(unicodedata.category(letter) in _CONTROLS for letter in name):
        raise argparse.ArgumentTypeError(f"expected a name without line breaks and control characters, got {name!r}")
    path = Path(name)
    try:
        os.lstat(path.absolute() / _LONGEST_FILE)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(
                f"expected a shorter name than this one of {len(name)} letters, {name[:20]}... ({error.strerror})"
            ) from None
    return path


def number(kind: type[int] | type[float], least: float = -math.inf, most: float = math.inf) -> Callable[[str], Any]:
    """Return the argparse type of finite numbers from `least` to `most`; of all of them, where another checks more."""
    expected = "expected a whole number" if kind is int else "expected a number"
    if least > -math.inf:
        expected += f" from {least:g} {'up' if most == math.inf else f'to {most:g}'}"

    def parsed(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{expected}; got {text!r}")
        return value

    return parsed


def shares(text: str) -> str | list[float]:
    """Return the rule for the rows of each replica; an argparse type."""
    if text in RULES:
        return text
    try:
        weights = [float(weight) for weight in text.split(",")]
        check_shares(weights, None)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(RULES)}, or weights such as 2,1, of which at least one is above 0; got {text!r}"
        ) from None
    return weights


def dims(text: str) -> Any:
    """Return what a text says of the axes of the rows, in Python's notation; an argparse type.

    >>> dims("{'mask': None}")
    {'mask': None}
    """
    return _checked(lambda: check_dims(_literal(text), "DIMS"), text, "1, (0, None) or {'mask': None}")


def scalars(text: str) -> Any:
    """Return the rule for 0-dim outputs, a word or such words in a tuple or dict; an argparse type."""
    is_nested = text[:1] in ("(", "[", "{")
    example = "mean, mean:tokens or {'loss': 'mean:tokens', 'tokens': 'sum'}"
    return _checked(lambda: check_scalars(_literal(text) if is_nested else text, "RULE"), text, example)


def _checked(value_of: Callable[[], Any], text: str, example: str) -> Any:
    try:
        return value_of()
    except SyntaxError:
        raise argparse.ArgumentTypeError(f"expected Python's notation, such as {example}; got {text!r}") from None
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _literal(text: str) -> Any:
    """Return what a text means in Python's notation; a SyntaxError if it means nothing."""
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise SyntaxError from error


def flag(name: str) -> str:
    """Return an option's name as it is typed: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def expect_installed(packages: Iterable[str]) -> None:
    """Raise an OptionError if some of these packages, named as they are imported, are not installed."""
    if missing := [name for name in packages if not is_installed(name)]:
        raise OptionError(not_installed(*missing))


def not_installed(*packages: str) -> str:
    """Return in words that packages are not installed, and the line that installs them.

    >>> not_installed("rich", "sklearn")
    'rich, scikit-learn not installed: pip install rich scikit-learn'
    """
    names = [_ON_THE_INDEX.get(name, name) for name in packages]
    return f"{', '.join(names)} not installed: pip install {' '.join(names)}"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, without code, has no origin


def why_no_picture() -> str:
    """Return why no picture can be drawn, with the remedy; "" if one can."""
    return "" if is_installed("matplotlib") else f"no picture: {not_installed('matplotlib')}"
