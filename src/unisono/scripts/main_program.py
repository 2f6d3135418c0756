"""Run a script or a module as `python script.py` and `python -m module` do: the same names, paths, ends.

What the program sees: `__name__ == "__main__"`, its own `sys.argv`, its folder first on `sys.path`, and itself as
`sys.modules["__main__"]`, which is where pickle and processes that are spawned look for what it defines. All of this is
left as it is at the end, because threads and exit handlers of the program may go on: runpy would take it away.

How it ends: `sys.exit` goes on to Python; the traceback of another exception begins in the program.
"""

import builtins
import importlib.machinery
import importlib.util
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import Any

from unisono.console.errors import DONE, FAILED, CommandError

_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Program:
    """A program that was found, and has not been run."""

    code: CodeType
    attributes: dict[str, Any]  # those of `__main__`
    argument: str  # `sys.argv[0]`
    folder: str  # what is first on `sys.path`


class ProgramError(CommandError):
    """There is no such script or module; nothing was run."""


def find_script(name: str) -> Program:
    """Return the script in a file; that on standard input for "-"; for a folder its `__main__.py`."""
    if name == "-":
        source = sys.stdin.buffer.read() if sys.stdin is not None else b""
        return Program(compile(source, "<stdin>", "exec"), {}, name, "")
    path = os.path.abspath(os.path.join(name, "__main__.py") if os.path.isdir(name) else name)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise ProgramError(f"cannot read {path} ({error.strerror}): expected a script, or -m module") from error
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    attributes = {"__file__": path, "__loader__": loader, "__cached__": None}
    return Program(compile(source, path, "exec"), attributes, name, os.path.dirname(os.path.realpath(path)))


def find_module(name: str) -> Program:
    """Return the module with this name, for a package its `__main__`; packages around it are imported."""
    _put_first(os.getcwd())
    try:
        _, spec, code = runpy._get_module_details(name, ProgramError)  # type: ignore[attr-defined]  # pdb's way
    except ProgramError as error:
        raise ProgramError(f"-m {name}: {error}; expected a module in {os.getcwd()} or installed") from error
    attributes = vars(importlib.util.module_from_spec(spec)) | {"__name__": "__main__"}
    return Program(code, attributes, spec.origin or name, os.getcwd())


def run_program(
    find: Callable[[], Program], arguments: Sequence[str], on_error: Callable[[BaseException], object]
) -> int:
    """Find a program and run it as `__main__`, with these arguments; return its exit status.

    An exception is shown as Python does at the end, by the program's own hook if it has set one, after `on_error` has
    been called with it; SystemExit is left to Python. If there is no such program, it is a ProgramError.
    """
    try:
        program = find()
        main = ModuleType("__main__")
        main.__dict__.update({"__builtins__": builtins, **program.attributes})
        sys.modules["__main__"] = main
        sys.argv[:] = [program.argument, *arguments]
        _put_first(program.folder)
        exec(program.code, main.__dict__)
        return DONE
    except (ProgramError, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  whatever the program raises, Python would show it
        on_error(error)
        frames = _of_program(error.__traceback__)
        sys.excepthook(type(error), BaseException.with_traceback(error, frames), frames)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def _put_first(folder: str) -> None:
    """Put the program's folder where Python has put ours; with -P it has put none."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _of_program(frames: TracebackType | None) -> TracebackType | None:
    """Leave out the frames that lead to the program: this file's, and those of Python's own import."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen ") and file != importlib.util.__file__:
            break
        frames = frames.tb_next
    return frames
