"""The command `unisono`: it finds the subcommand, runs it, and reports an error in one line.

Each subcommand is a module with SUMMARY, DESCRIPTION, EXAMPLES, `add_options(parser)` and `run(given)`, which returns
the exit status. `given` has only what was on the command line. If packages must be installed, `needed(given)` names
them.
"""

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, NoReturn

from unisono import __version__
from unisono.bench import command as bench
from unisono.console import start
from unisono.console.errors import DONE, FAILED, MISUSED, CommandError, Interrupted, OptionError, escaped
from unisono.console.options import expect_installed
from unisono.monitor import devices_command as devices
from unisono.monitor import watch_command as watch
from unisono.plan import command as plan
from unisono.scripts import command as run
from unisono.training import command as train
from unisono.training.ranks import ALONE, Ranks
from unisono.verification import command as verify

_STOPPED = 128  # plus the number of the signal, as shells have it

_COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "verify": verify,
    "devices": devices,
    "watch": watch,
    "bench": bench,
    "plan": plan,
    "train": train,
}

_DESCRIPTION = """\
Train PyTorch models on all devices of this machine, with the gradients of one.

In your own script it is one line:

    model = unisono.DataParallel(model)
"""

_EXAMPLES = """\
examples:
  unisono run train.py          run your script with unisono in place of torch.nn.DataParallel
  unisono verify train:build    compare your model on one device and on several
  unisono devices               list this machine's devices, and which are free
  unisono watch                 show load, memory and processes, live
  unisono bench train:build     find the fastest number of replicas for your model here
  unisono plan train:build      predict how far your model will scale, on more devices
  unisono train                 train ResNet-18 on handwritten digits, on all devices
  unisono train --help          list all options of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: those of the process), and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    ranks, program = ALONE, " ".join(["unisono", *(name for name in argv[:1] if name in _COMMANDS)])

    def fail(reason: object, status: int) -> int:
        ranks.fail(reason)
        if ranks.is_first:
            print(f"{program}: error: {escaped(str(reason))}", file=sys.stderr, flush=True)
        ranks.wait_for_first()
        return status

    try:
        start.has_started()
        if argv[:1] == ["train"]:  # the only command that runs in several processes
            ranks = Ranks.join()
        command, given = ranks.together(lambda: _parse(argv))
        if command is None:
            return MISUSED
        if command is not run:  # whose output is that of a script
            _escape_what_cannot_be_encoded()
        status: int = command.run(given, ranks) if command is train else command.run(given)
        return status
    except KeyboardInterrupt:
        return fail("stopped at once", _STOPPED + signal.SIGINT)
    except Interrupted as stopped:
        ranks.wait_for_first()
        return _STOPPED + stopped.received
    except CommandError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            _discard_output()
        return fail(" ".join(str(error).splitlines()), error.exit_status)  # a word of the command line may have two
    except BrokenPipeError:  # the reader of our output has ended, as in `unisono devices | head -1`
        _discard_output()
        return DONE if argv[0] == "devices" else FAILED  # which has done all when it prints
    except OSError as error:  # such as a full disk
        if error.filename is None and _output_fails():
            _discard_output()
            return fail(f"cannot write to standard output ({error.strerror})", FAILED)
        return fail(error, FAILED)
    except RuntimeError as error:
        if ranks.are_lost:
            return fail(error, FAILED)
        raise


def _output_fails() -> bool:
    """Return whether standard output takes nothing: an error of a write to it names no file."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """Let Python's own flush at exit succeed although nothing reads standard output any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Open the standard streams that the shell has closed (`>&-`) to the null device.

    Python has None for these; and the system would give their numbers to the next files that are opened.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))  # noqa: SIM115


def _escape_what_cannot_be_encoded() -> None:
    """Let standard output show `\\U0001f680` for what its encoding lacks, as standard error does: no error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of `unisono`, and those of its commands by name."""
    parser = _Parser(prog="unisono", **_texts(_DESCRIPTION, _EXAMPLES))
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    subparsers = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        texts = _texts(module.DESCRIPTION, module.EXAMPLES)
        module.add_options(subparsers.add_parser(name, help=module.SUMMARY, **texts))
    return parser, dict(subparsers.choices)


def _parse(argv: Sequence[str]) -> tuple[ModuleType | None, dict[str, Any]]:
    """Return the subcommand and its arguments; without a subcommand, print the help and return None.

    Raises:
        OptionError: the arguments cannot be understood, or a package is not installed.
    """
    parser, of_commands = parsers()
    if argv and not argv[0].startswith("-") and argv[0] not in of_commands:
        meant = get_close_matches(argv[0], of_commands, 1)
        remedy = f"did you mean {meant[0]}?" if meant else f"the commands are {', '.join(of_commands)}"
        parser.error(f"there is no command {argv[0]}; {remedy}")
    arguments, unknown = parser.parse_known_args(argv)
    given = vars(arguments)
    name = given.pop("command")
    if unknown:
        _refuse(unknown[0], of_commands[name] if name else parser)
    if name is None:
        parser.print_help()
        return None, given
    command = _COMMANDS[name]
    expect_installed(command.needed(given) if hasattr(command, "needed") else ())
    return command, given


def _refuse(unknown: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Raise the error for an argument that a parser does not know; it names the nearest option."""
    if not unknown.startswith("-"):
        parser.error(f"unexpected argument {unknown}")
    name = unknown.partition("=")[0]
    meant = get_close_matches(name, parser._option_string_actions, 1)
    parser.error(f"there is no option {name}" + (f"; did you mean {meant[0]}?" if meant else ""))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and for which `-1ms` is a value, as `-1` is, and no option."""

    def __init__(self, **texts: Any) -> None:
        super().__init__(**texts)
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help, or the version. argparse's own passes over a write that fails."""
        try:
            print(message, end="", file=file, flush=True)
        except BrokenPipeError:  # nothing reads on, as in `unisono --help | head -1`
            _discard_output()

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} ({self.prog} --help lists the options)")


def _texts(description: str, examples: str) -> dict[str, Any]:
    """Return what all parsers have in common: texts as they are, and only options that were given, in full."""
    return {
        "description": description,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "argument_default": argparse.SUPPRESS,
        "allow_abbrev": False,
    }
