"""`unisono run --verify`: the first steps of each module that a script wraps, compared with one device.

A comparison runs just before a call, with copies of the model and of the inputs. It has a loss of its own, so the
script needs none. A module's first call is compared, in the mode in which it is; so are its first call in the other
mode, and its first one with gradients. What forward prints meanwhile goes to standard error.
"""

import ast
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import nn

from unisono.console.errors import DONE, FAILED, MISUSED
from unisono.console.files import as_typed
from unisono.data_parallel import DataParallel
from unisono.runtime.errors import users_line
from unisono.runtime.thread_pool import inside_replica
from unisono.runtime.torch_private import compiler
from unisono.verification.first_call import FirstCall
from unisono.verification.report import Report

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_Kind: TypeAlias = tuple[bool, bool]  # of a call: is the model in training mode, and are gradients on

_NO_CALL = (
    "nothing was compared: no call of a torch.nn.DataParallel or unisono.DataParallel in this process had rows "
    "(samples) for two replicas"
)
_TRIES = 3  # of calls of one kind, until one has rows for two replicas


def _uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:  # the wrapper may be compiled, at any time
        return cast("_R", compiler.uncompiled(function)(*args, **kwargs))

    return run


class FirstStepComparison:
    """Compares first steps, and prints each report on standard error.

    Args:
        given: the options of the command line; one that causes a difference explains it.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._reports: list[Report | None] = []  # None: it could not be compared
        # How many more calls of each kind are to be tried. By module, because scripts may wrap one in every step.
        self._tries: weakref.WeakKeyDictionary[nn.Module, dict[_Kind, int]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # held while a comparison runs, whose own calls are not compared
        self._thread = 0  # which holds it
        self._missed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # called by another thread meanwhile

    def around(
        self, forward: Callable[..., Any], model: DataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward of a wrapper, after the comparison if it is due."""
        inputs, kwargs = self.before(model.module, inputs, kwargs, lambda: model)
        return forward(model, *inputs, **kwargs)

    @_uncompiled
    def before(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        wrapped: Callable[[], DataParallel],
        options: Mapping[str, str] = {},
    ) -> _Inputs:
        """Compare a call if it is a first one; return the inputs for the call.

        Args:
            wrapped: returns the module's wrapper, or makes one that does the same as the call.
            options: of the command, by the argument of `DataParallel` that each sets for this call.
        """
        kind = (module.training, torch.is_grad_enabled())
        tries = self._tries.setdefault(module, {})
        if not tries.get(kind, _TRIES) or tries.get((module.training, True)) == 0 or inside_replica():
            return inputs, kwargs
        if not self._lock.acquire(blocking=False):  # to wait may be for ever: forward may have started this thread
            if self._thread != threading.get_ident():
                self._missed.add(module)
            return inputs, kwargs
        try:
            self._thread = threading.get_ident()
            with contextlib.redirect_stdout(sys.stderr):
                is_compared = self._compare(wrapped, inputs, kwargs, options)
            tries[kind] = 0 if is_compared else tries.get(kind, _TRIES) - 1
        finally:
            self._lock.release()
        return inputs, kwargs

    def _compare(
        self,
        wrapped: Callable[[], DataParallel],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, str],
    ) -> bool:
        """Return whether the call could show anything: not if only one replica had rows."""
        place = users_line()
        try:
            call = FirstCall(wrapped(), inputs, kwargs)
            report = call.verify(self._given)
        except BaseException as error:
            self._reports.append(None)
            if not isinstance(error, Exception):  # Ctrl-C, say
                raise
            # It is of the script's model, and the call itself will raise it, too.
            _say(f"{place}: not compared with one device: {type(error).__name__}: {error}".splitlines()[0])
            return True
        if report.num_replicas == 1:
            return False
        self._reports.append(report)
        _say(f"{place}: first step in {call.mode}, compared with one device")
        print(report, file=sys.stderr, flush=True)
        fixes = [fix for finding in report.findings if not finding.explained for fix in finding.fix]
        if written := [*filter(None, (_option(fix, options) for fix in dict.fromkeys(fixes)))]:
            _say(f"without a change of the script: unisono run {' '.join(written)} ...")
        return True

    def has_tried(self) -> bool:
        """Return whether there was anything to compare."""
        return bool(self._reports)

    def conclusion(self) -> str:
        """Return what was found, for the closing line."""
        if not self._reports:
            return _NO_CALL
        counts = {
            "the same": sum(report is not None and report.same for report in self._reports),
            "as expected": sum(report is not None and report.explained for report in self._reports),
            "differs": sum(map(_fails, self._reports)),
            "not compared": sum(map(_is_missing, self._reports)),
            "called only during comparisons in other threads": self._num_missed(),
        }
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"first steps compared with one device: {found}"

    def _num_missed(self) -> int:
        return sum(0 not in self._tries[module].values() for module in self._missed)

    def exit_status(self) -> int:
        """Return the exit status, as of `unisono verify`: 1 if something differs, 2 if something was not compared."""
        if any(map(_fails, self._reports)):
            return FAILED
        is_missing = not self._reports or self._num_missed() or any(map(_is_missing, self._reports))
        return MISUSED if is_missing else DONE


def _fails(report: Report | None) -> bool:
    return report is not None and report.differs


def _is_missing(report: Report | None) -> bool:
    return report is None or not (report.same or report.differs or (report.explained and not report.not_judged))


def _option(fix: str, options: Mapping[str, str]) -> str:
    """Return an argument of `DataParallel` as an option of the command; "" if there is none."""
    name, _, value = fix.partition("=")
    if name not in options:
        return ""
    if value == "True":
        return options[name]
    with contextlib.suppress(ValueError, SyntaxError):  # a value that cannot be written on a command line
        literal = ast.literal_eval(value)
        return f"{options[name]} {as_typed(literal if isinstance(literal, str) else value)}"
    return ""


def _say(text: str) -> None:
    print(f"unisono run: {text}", file=sys.stderr, flush=True)
