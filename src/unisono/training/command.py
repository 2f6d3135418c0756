"""The command `unisono train`: from the words of the command line to a trained model.

What is slow to load (safetensors, matplotlib, scikit-learn) is imported when it is needed, after the options have been
checked and a first line has been printed.
"""

import argparse
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unisono import __version__, keep_freed_memory
from unisono.console import files, progress
from unisono.console.device_option import choose_devices, describe
from unisono.console.errors import DONE, OptionError, OutputClosedError
from unisono.console.options import flag, folder
from unisono.console.targets import TargetError, current_folder_first
from unisono.training import data, models
from unisono.training.display import Display
from unisono.training.observers import Observer, load
from unisono.training.options import DEVICE_ORDERS, ENGINES, PRECISIONS, SCHEDULES, Options, with_device_defaults
from unisono.training.ranks import ALONE, Ranks, launch
from unisono.training.run_folder import RunFolder

_TENSORBOARD = "--tensorboard"

SUMMARY = "train an image classifier on every device"

DESCRIPTION = """\
Train an image classifier on every device: every accelerator, or two replicas on the CPU where there is none.

Batch size and learning rate are those of one optimizer step over all devices together.
"""

EXAMPLES = """\
examples:
  unisono train
  unisono train --data fashion-mnist --batch-size 256 --devices 1
  unisono train --data fashion-mnist --batch-size 512 --lr 0.2 --devices 2
  unisono train --data path/to/idx/files --model mlp --devices 'cpu*4' --epochs 3
  unisono train --devices 'cpu*4' --engine processes
  unisono train --devices cuda:0,cuda:1 --precision bf16 --accumulate 2
  unisono train --data fashion-mnist --batch-size 256 --devices 1 --precision bf16 --compile
  unisono train --devices 'cpu*2' --model mlp --profile
  unisono train --output runs/demo --tensorboard
  unisono train --observer trackers:MyTracker
  unisono train --resume runs/demo --epochs 20

files in the output folder:
  metrics.jsonl       loss of each step, loss and accuracy of each epoch
  curves.png          the same as a picture
  model.safetensors   the weights
  timeline.png        with --profile: what each replica did when, and where a step goes
  timeline.json       the same for chrome://tracing and https://ui.perfetto.dev
  tensorboard/        the same as metrics.jsonl, with --tensorboard
  config.json, checkpoint.safetensors, checkpoint.previous.safetensors   what --resume needs
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser; only what was given comes out of it."""
    default = Options()  # the defaults are there

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
        "bfloat16; bf16-weights: also the weights that the model computes with, rounded from float32 ones (default: "
        f"{default.precision}; bf16 on GPUs of compute capability 8.0 and newer)",
    )
    how.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the model with torch.compile, on one device the whole step; that takes up to some minutes at the "
        "first step of each size, of which there are two at most, and at the first test, and needs a compiler: a C++ "
        "compiler on the CPU, Triton and a C compiler on GPUs (default: not compiled, but on one GPU of "
        "compute capability 8.0 or newer, if the compiler works)",
    )
    how.add_argument("--seed", type=int, metavar="N", help=f"for weights and order (default: {default.seed})")

    results = parser.add_argument_group("results")
    results.add_argument(
        "--output", type=folder, metavar="DIR", help="the folder for them (default: runs/ and the time)"
    )
    results.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    results.add_argument(
        "--resume",
        type=folder,
        metavar="DIR",
        help="go on with the run in this folder, however it ended, with its options; --devices, --engine, --compile "
        "and --epochs may be given anew; --profile, --tensorboard and --observer have to be, if they are wanted",
    )

    observing = parser.add_argument_group("observing")
    observing.add_argument(
        "--profile",
        action="store_true",
        help="record what each replica does when, and write timeline.png and timeline.json after each epoch",
    )
    observing.add_argument(
        "--tensorboard",
        action="store_true",
        help="write losses, accuracies, rates and options for TensorBoard too, in the folder tensorboard of the output",
    )
    observing.add_argument(
        "--observer",
        action="append",
        metavar="package.module:Class",
        help="tell a tracker of your own of each step and each epoch: a class derived from "
        "unisono.training.observers.Observer, found from the current folder; may be repeated",
    )


def needed(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the packages that must be installed, by the extra that has them."""
    packages = {"train": ("matplotlib", "numpy", "psutil", "rich", "safetensors")}
    return packages | ({"tensorboard": ("tensorboard",)} if "tensorboard" in given else {})


def run(given: dict[str, Any], ranks: Ranks = ALONE) -> int:
    """Check the options, say that it starts, and train; return the exit status.

    Args:
        given: what was given on the command line.
        ranks: the processes that train together; each of them calls this.

    Raises:
        CommandError: it cannot start or go on. Interrupted: a signal asked it to stop.
    """
    ranks.expect_equal("the options", {flag(name): value for name, value in given.items() if name != "devices"})
    given = dict(given)
    # What observes a run changes no number of it, and is no option of it.
    observed_by, with_tensorboard = given.pop("observer", []), given.pop("tensorboard", False)
    profile = given.pop("profile", False)
    options, run_folder, resume = ranks.from_first(lambda: _plan_run(given))
    options = replace(options, devices=given.get("devices", options.devices))
    os.environ["CUDA_DEVICE_ORDER"] = options.device_order  # read when CUDA is initialised, later than this
    devices = ranks.together(lambda: _expect_usable(options, ranks))
    decided: list[str] = []
    if not resume:
        options, decided = with_device_defaults(options, given, devices, ranks, profile=profile)
    try:
        with current_folder_first() if observed_by else contextlib.nullcontext():  # they may import more while it runs
            observers = ranks.together(lambda: _observers(observed_by, with_tensorboard) if ranks.is_first else {})
            _train(options, decided, run_folder, resume, ranks, observers, profile=profile)
    except BrokenPipeError as error:
        raise OutputClosedError(
            "nothing reads the output any more, so the training has stopped: "
            + (
                f"unisono train --resume {run_folder} goes on"
                if run_folder.has_checkpoint()
                else f"nothing had been saved yet in {run_folder}"
            )
            + ". To see a part of the output, send it to a file, and read that"
        ) from error
    return DONE


def _train(
    options: Options,
    decided: Sequence[str],
    run_folder: RunFolder,
    resume: bool,
    ranks: Ranks,
    observers: Mapping[str, Observer],
    *,
    profile: bool,
) -> None:
    if ranks.is_first:
        print(f"unisono {__version__}: {options}; results in {run_folder}", flush=True)
        for line in decided:
            print(line, flush=True)
        if _TENSORBOARD in observers:
            print(f"to see it: tensorboard --logdir {files.as_typed(run_folder.tensorboard)}", flush=True)

    from unisono.training.loop import train

    keep_freed_memory()
    display = Display(progress.for_stdout() if ranks.is_first else None)
    try:
        outcome = train(options, run_folder, display, resume=resume, ranks=ranks, observers=observers, profile=profile)
    finally:
        display.close()
    if ranks.is_first:
        print(
            f"test accuracy {outcome.test_accuracy:.4f}, {outcome.seconds_per_epoch:.1f} seconds of training an epoch, "
            f"on {describe(*outcome.devices_by_rank)}"
        )
        if outcome.profile is not None:
            print(*outcome.profile.in_words(), sep="\n")
        if outcome.profile is not None and outcome.profile.steps():
            print(f"see {run_folder.timeline}; chrome://tracing and https://ui.perfetto.dev open {run_folder.trace}")
        print(f"see {run_folder.curves}; the weights are {run_folder.model}", flush=True)


def _expect_usable(options: Options, ranks: Ranks) -> list[torch.device]:
    """Check what the options name, before anything is printed or loaded; return the devices of this process.

    Raises:
        CommandError: there is no such model, data set or device.
    """
    models.expect_known(options.model, options.init)
    data.expect_known(options.data)
    return choose_devices(options.devices, among_several=ranks.world_size > 1)


def _observers(targets: Sequence[str], with_tensorboard: bool) -> dict[str, Observer]:
    """Return the observers by the words that ask for them.

    Raises:
        TargetError: one cannot be had.
    """
    asked_for = {f"--observer {target}": target for target in targets}
    if with_tensorboard:
        asked_for = {_TENSORBOARD: "unisono.training.tensorboard:TensorBoard", **asked_for}
    observers = {}
    for words, target in asked_for.items():
        try:
            observers[words] = load(target)
        except TargetError as error:
            raise TargetError(f"{words.split()[0]} {error}") from error
    return observers


def _plan_run(given: dict[str, Any]) -> tuple[Options, RunFolder, bool]:
    """Return the options, the folder, and whether to resume the run in that folder.

    A launcher such as torchrun starts the same command line again when a process has failed. So a run of the same
    launch is resumed, whatever the command line says.
    """
    given = dict(given)
    output, resume = given.pop("output", None), given.pop("resume", None)
    overwrite = given.pop("overwrite", False)
    if resume is not None and (output is not None or overwrite):
        raise OptionError(f"--resume {resume} goes on in the same folder: leave out --output and --overwrite")
    begun = RunFolder.of_launch(launch(), output) if resume is None else RunFolder.reopen(resume)
    if begun is not None:
        return Options.from_saved(begun.saved_config()["options"], given), begun, True
    return Options.from_given(given), RunFolder.for_new_run(output, overwrite=overwrite), False
