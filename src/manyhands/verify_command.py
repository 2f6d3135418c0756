"""The command `manyhands verify package.module:build`: from the words of the command line to a report.

What goes wrong is one line: in the arguments, in finding and calling `build`, and in running the model. The traceback
of the caller's own code is shown when it is asked for.
"""

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from manyhands.data_parallel import DataParallel
from manyhands.devices import resolve
from manyhands.training.placement import choose_devices
from manyhands.verify import verify

_SAME = 0
_DIFFERS = 1

_RETURNS = "(model, inputs), or a dict with the arguments of manyhands.verify by name"

DESCRIPTION = """\
Run a model of yours on one device and on several, from one state, in training and in eval mode, and compare outputs,
loss, gradients and buffers. Where they differ, say which submodule does first, and why.

package.module:build is a function without arguments, found from the current folder. It returns (model, inputs), or a
dict with the arguments of manyhands.verify by name: model, inputs, target, criterion, out_dims, and so on. Options
given here count more than what is in the dict.
"""

EXAMPLES = """\
examples:
  manyhands verify train:build
  manyhands verify train:build --shares 2,1
  manyhands verify train:build --shares 2,1 --sync-batch-norm
  manyhands verify package.module:build --devices cuda:0,cuda:1 --dim 1

where train.py has, for instance:
  def build():
      return model, torch.randn(30, 1, 28, 28)

exit status:
  0  the same, or what differs is explained: by random numbers, of which replicas have their own, or by an option
     that was given and asks for it (--no-sync-batch-norm, --scalars stack)
  1  something differs
  2  nothing was compared: what was given cannot be used, or the model failed
"""


class TargetError(Exception):
    """Nothing was compared: one line that says why. Its cause is what the caller's own code raised, if it did."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser; only what was given comes out of it."""
    parser.add_argument("target", metavar="package.module:build", help="what to compare")
    parser.add_argument(
        "--devices",
        metavar="WHICH",
        help="auto: every accelerator (one alone counts twice), or two CPU replicas without one; a count: so many "
        "accelerators, or CPU replicas without one; or by name: cpu,cpu, 'cpu*8', cuda:0,cuda:1 (default: auto)",
    )
    parser.add_argument(
        "--shares",
        type=_shares,
        metavar="RULE",
        help="rows of each replica: chunk, even, or one weight a device, such as 2,1 (default: chunk)",
    )
    parser.add_argument("--dim", type=int, metavar="AXIS", help="the axis of the rows (default: 0)")
    parser.add_argument(
        "--scalars", metavar="RULE", help="what becomes of 0-dim outputs: stack, mean or sum (default: stack)"
    )
    parser.add_argument(
        "--sync-batch-norm",
        action=argparse.BooleanOptionalAction,
        help="batch norm with the statistics of the whole batch; with --no, given, of each shard, as wanted",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        metavar="R",
        help="how large a difference may be, relative to the largest value (default: 1e-5 for float32)",
    )
    parser.add_argument("--traceback", action="store_true", help="where the model fails, show where")


def run(given: dict[str, Any]) -> int:
    """Find the model, compare, print the report, and return the exit status.

    Raises:
        TargetError: nothing was compared. OptionError: `--devices` cannot be used.
    """
    target, show_traceback = given.pop("target"), given.pop("traceback", False)
    devices = given.pop("devices", "auto")
    if devices != "auto":
        given["device_ids"] = choose_devices(devices)

    own = [name for name, p in inspect.signature(verify).parameters.items() if p.kind is not p.VAR_KEYWORD]
    options = [name for name, p in inspect.signature(DataParallel).parameters.items() if p.kind is p.KEYWORD_ONLY]
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        arguments = _arguments_from(target, [name for name in (*own, *options) if name != "show"]) | given
        model, places = arguments["model"], resolve(arguments.get("device_ids"))
        if places and isinstance(model, nn.Module) and not isinstance(model, DataParallel):
            model.to(places[0])
        report = verify(**arguments, show=False)
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        if isinstance(error, TargetError):
            raise
        raise TargetError(f"{target} could not be compared: {_said_by(error)}") from error
    finally:
        sys.path[:] = path
    print(report)
    return _SAME if report.same or report.explained else _DIFFERS


def _arguments_from(target: str, known: Collection[str]) -> dict[str, Any]:
    """Import `package.module:build`, call `build()`, and return what it returns as arguments by name.

    Args:
        target: a module, a colon, and a function in it that takes no arguments; dots lead into attributes.
        known: the names that a dict may have.

    Raises:
        TargetError: it is not there, fails, or returns something else.
    """
    build = _find(target)
    try:
        built = build()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target} raised {_said_by(error)}") from error
    if isinstance(built, dict):
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


def _said_by(error: BaseException) -> str:
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
        raise TargetError(f"{target}: importing {module_name} raised {_said_by(error)}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target}: importing {module_name} raised {_said_by(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise TargetError(f"{target}: there is no {name} in {getattr(found, '__name__', path)}")
        found = getattr(found, name)
    if not callable(found):
        raise TargetError(f"{target}: expected a function without arguments, got a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _shares(text: str) -> str | list[float]:
    try:
        return [float(weight) for weight in text.split(",")] if text[:1].isdigit() else text
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected chunk, even, or weights such as 2,1; got {text!r}") from None
