"""The command `manyhands`.

What is slow to load (torch, and all that the extra `[train]` brings) is imported by the subcommand that needs it,
after the arguments have been checked and a first line has been printed.
"""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from manyhands import __version__, keep_freed_memory
from manyhands.bench import command as bench_command
from manyhands.console.errors import DivergedError, Interrupted, OptionError, TrainingError
from manyhands.plan import command as plan_command
from manyhands.training.options import DEVICE_ORDERS, ENGINES, PRECISIONS, SCHEDULES, Options, flag
from manyhands.training.ranks import ALONE, Ranks, launch
from manyhands.training.run_folder import RunFolder
from manyhands.verification import command as verify_command
from manyhands.verification.targets import TargetError

_DONE = 0
_FAILED = 1
_MISUSED = 2
_STOPPED = 128  # plus the number of the signal, as shells have it

_COMMANDS = ("train", "verify", "bench", "plan")
_NEEDED_TO_TRAIN = ("matplotlib", "numpy", "psutil", "rich", "safetensors")
_NEEDED_TO_BENCH = ("matplotlib", "psutil", "rich")
_NEEDED_TO_PLAN = ("matplotlib",)

_DESCRIPTION = """\
Put a PyTorch training on every device of the machine, with the numbers of one.

In your own script it is one line:

    model = manyhands.DataParallel(model)
"""

_EXAMPLES = """\
examples:
  manyhands train                 train ResNet-18 on handwritten digits, on every device
  manyhands train --help          say what else it can do
  manyhands verify train:build    compare a model of yours on one device and on several
  manyhands bench train:build     say which engine and how many replicas are fastest for it here
  manyhands plan train:build      say how far it will scale, up to 1,024 devices
"""

_TRAIN_DESCRIPTION = """\
Train an image classifier on every device: every accelerator, or two replicas on the CPU where there is none.

Batch size and learning rate are those of one optimizer step over all devices together.
"""

_TRAIN_EXAMPLES = """\
examples:
  manyhands train
  manyhands train --data fashion-mnist --batch-size 256 --devices 1
  manyhands train --data fashion-mnist --batch-size 512 --lr 0.2 --devices 2
  manyhands train --data path/to/idx/files --model mlp --devices 'cpu*4' --epochs 3
  manyhands train --devices 'cpu*4' --engine processes
  manyhands train --devices cuda:0,cuda:1 --precision bf16 --accumulate 2
  manyhands train --data fashion-mnist --batch-size 256 --devices 1 --precision bf16 --compile
  manyhands train --resume runs/demo --epochs 20

files in the output folder:
  metrics.jsonl       loss of each step, loss and accuracy of each epoch
  curves.png          the same as a picture
  model.safetensors   the weights
  checkpoint.pt       what --resume needs (checkpoint.previous.pt: the one before)
  config.json         the options
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: those of the process), and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    _open_what_is_closed()
    ranks, command = ALONE, " ".join(["manyhands", *(name for name in argv[:1] if name in _COMMANDS)])

    def fail(reason: object, status: int) -> int:
        ranks.fail(reason)
        if ranks.is_first:
            print(f"{command}: error: {reason}", file=sys.stderr, flush=True)
        ranks.part()
        return status

    try:
        if argv[:1] == ["train"]:  # the only one that knows several processes
            ranks = Ranks.meet()
        given = ranks.together(lambda: _parsed(argv))
        if given is None:
            return _MISUSED
        run = given.pop("run")
        status: int = run(given, ranks) if run is _train else run(given)
        return status
    except KeyboardInterrupt:
        return fail("stopped at once; what had been saved stays", _STOPPED + signal.SIGINT)
    except Interrupted as stopped:
        ranks.part()
        return _STOPPED + stopped.received
    except DivergedError as error:
        return fail(error, _FAILED)
    except (TrainingError, TargetError) as error:
        return fail(error, _MISUSED)
    except BrokenPipeError:  # who read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for python's own flush at exit
        return _FAILED
    except OSError as error:  # such as a full disk
        return fail(error, _FAILED)
    except RuntimeError as error:
        if ranks.are_lost:
            return fail(error, _FAILED)
        raise


def _open_what_is_closed() -> None:
    """Open the standard streams that were closed (`>&-`) to nothing, so that nothing else comes to have their numbers.

    Python has None for these, and the system would give the next file that is opened the number of the first of them.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lasts


def _parsed(argv: Sequence[str]) -> dict[str, Any] | None:
    """Return what was given, with the parser and the function of the subcommand; None, and help, without one.

    Raises:
        OptionError: it cannot be understood.
    """
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    given = vars(arguments)
    if given.pop("command") is None:
        if unknown:
            parser.error(f"there is no option {unknown[0]}")
        parser.print_help()
        return None
    subparser = given.pop("parser")
    if unknown:
        subparser.error(f"there is no option {unknown[0]}")
    return given


def _train(given: dict[str, Any], ranks: Ranks) -> int:
    """`manyhands train`: check, say that it starts, load what is slow, and go."""
    ranks.expect_alike("the options", {flag(name): value for name, value in given.items() if name != "devices"})
    ranks.together(lambda: _expect_installed(_NEEDED_TO_TRAIN))
    options, folder, resume = ranks.from_first(lambda: _planned(given))
    options = replace(options, devices=given.get("devices", options.devices))
    os.environ["CUDA_DEVICE_ORDER"] = options.device_order  # read when CUDA is initialised, later than this
    if ranks.is_first:
        print(f"manyhands {__version__}: {options}; results in {folder}", flush=True)

    from manyhands.training import display
    from manyhands.training.data import DataError
    from manyhands.training.loop import train
    from manyhands.training.run import describe

    keep_freed_memory()
    shown = display.for_stdout() if ranks.is_first else display.Silent()
    try:
        outcome = train(options, folder, shown, resume=resume, ranks=ranks)
    except DataError as error:
        raise OptionError(error) from error
    finally:
        shown.close()
    if ranks.is_first:
        print(
            f"test accuracy {outcome.test_accuracy:.4f}, {outcome.seconds_per_epoch:.1f} seconds of training an epoch, "
            f"on {describe(*outcome.places)}"
        )
        print(f"see {folder.curves}; the weights are {folder.model}")
    return _DONE


def _planned(given: dict[str, Any]) -> tuple[Options, RunFolder, bool]:
    """Return what to do, in which folder, and whether it goes on with the run that is there.

    A launcher such as torchrun starts the same command line anew when a process has failed. So a run of the same launch
    is gone on with, whatever the command line says; if it has no checkpoint yet, it is begun again in the same folder.
    """
    given = dict(given)
    output, resume = given.pop("output", None), given.pop("resume", None)
    overwrite = given.pop("overwrite", False)
    if resume is not None and (output is not None or overwrite):
        raise OptionError(f"--resume {resume} goes on in the same folder: leave out --output and --overwrite")
    begun = RunFolder.of_launch(launch(), output) if resume is None else RunFolder.reopen(resume)
    if begun is not None and begun.can_be_resumed():
        return Options.from_saved(begun.saved_options(), given), begun, True
    options = Options.from_given(given)
    return options, begun or RunFolder.for_new_run(output, overwrite=overwrite), False


def _bench(given: dict[str, Any]) -> int:
    """`manyhands bench`."""
    _expect_installed(_NEEDED_TO_BENCH)
    return bench_command.run(given)


def _plan(given: dict[str, Any]) -> int:
    """`manyhands plan`."""
    return plan_command.run(given, lambda: _expect_installed(_NEEDED_TO_PLAN))


def _expect_installed(packages: Sequence[str]) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise OptionError(f"{', '.join(missing)} not installed: pip install 'manyhands[train]'")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} ({self.prog} --help lists the options)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="manyhands",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"manyhands {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train an image classifier on every device",
        description=_TRAIN_DESCRIPTION,
        epilog=_TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # the defaults are in Options; here is only what was given
        allow_abbrev=False,
    )
    train.set_defaults(parser=train, run=_train)
    _add_train_options(train)
    for name, module, run, summary in (
        ("verify", verify_command, verify_command.run, "compare a model of yours on one device and on several"),
        ("bench", bench_command, _bench, "measure training steps on this machine, ours beside others'"),
        ("plan", plan_command, _plan, "say how far a training step will scale, up to 1,024 devices"),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        command.set_defaults(parser=command, run=run)
        module.add_options(command)
    return parser


def _folder(name: str) -> Path:
    if not name:  # which a path would take for "."
        raise argparse.ArgumentTypeError("expected the name of a folder, got ''")
    return Path(name)


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    default = Options()

    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--data",
        metavar="NAME|DIR",
        help="digits (in scikit-learn), fashion-mnist (downloaded once), or a folder of IDX files (default: "
        f"{default.data})",
    )
    what.add_argument("--mirror", metavar="URL", help="download fashion-mnist from here")
    what.add_argument("--model", metavar="NAME", help=f"resnet18 or mlp (default: {default.model})")
    what.add_argument(
        "--init",
        metavar="NAME",
        help="default: weights as torch draws them; seeds: from N(0, 0.01)",
    )

    where = parser.add_argument_group("where")
    where.add_argument(
        "--devices",
        metavar="WHICH",
        help="auto: every accelerator, or two CPU replicas without one; a count: so many accelerators, or CPU replicas "
        f"without one; or by name: cpu,cpu, 'cpu*8', cuda:0,cuda:1 (default: {default.devices})",
    )
    where.add_argument(
        "--engine",
        choices=ENGINES,
        help=f"what runs the replicas: threads of this process, or a process for each (default: {default.engine})",
    )
    where.add_argument(
        "--device-order",
        choices=DEVICE_ORDERS,
        help="how CUDA numbers its devices; PCI_BUS_ID as nvidia-smi does (default: CUDA_DEVICE_ORDER of the "
        f"environment, or {default.device_order})",
    )

    how = parser.add_argument_group("how")
    how.add_argument(
        "--batch-size",
        type=int,
        metavar="ROWS",
        help=f"rows of one step, over all devices (default: {default.batch_size})",
    )
    how.add_argument(
        "--epochs", type=int, metavar="N", help=f"times through the training pictures (default: {default.epochs})"
    )
    how.add_argument(
        "--lr",
        type=float,
        metavar="RATE",
        help=f"learning rate after warm-up, for the whole batch (default: {default.lr})",
    )
    how.add_argument("--momentum", type=float, metavar="M", help=f"of SGD (default: {default.momentum})")
    how.add_argument(
        "--weight-decay", type=float, metavar="W", help=f"L2, on all parameters (default: {default.weight_decay})"
    )
    how.add_argument(
        "--warmup-epochs",
        type=float,
        metavar="N",
        help=f"epochs over which the rate rises from 0; 0 for none (default: {default.warmup_epochs:g})",
    )
    how.add_argument("--schedule", choices=SCHEDULES, help=f"the rate after warm-up (default: {default.schedule})")
    how.add_argument(
        "--accumulate",
        type=int,
        metavar="K",
        help=f"take each batch in K parts, for less memory; batch norm sees the parts (default: {default.accumulate})",
    )
    how.add_argument(
        "--sync-batch-norm",
        action=argparse.BooleanOptionalAction,
        help="batch norm over the rows of all devices, so that their number changes no loss; or over those of each "
        "device by itself, which is torch's rule for DataParallel (default: over all)",
    )
    how.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="fp32: float32, exact; tf32: float32 whose products GPUs may round to TF32; bf16: torch.autocast to "
        f"bfloat16 (default: {default.precision})",
    )
    how.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the model with torch.compile; that takes up to some minutes at the first step, and needs a "
        "compiler: a C++ compiler on the CPU, Triton and a C compiler on GPUs (default: not compiled)",
    )
    how.add_argument("--seed", type=int, metavar="N", help=f"for weights and order (default: {default.seed})")

    results = parser.add_argument_group("results")
    results.add_argument(
        "--output", type=_folder, metavar="DIR", help="the folder for them (default: runs/ and the time)"
    )
    results.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    results.add_argument(
        "--resume",
        type=_folder,
        metavar="DIR",
        help="go on with the run in this folder, with its options; --devices, --engine, --compile and "
        "--epochs may be given anew",
    )
