"""The command `unisono train`: from the words of the command line to a trained model.

What is slow to load (safetensors, matplotlib, scikit-learn) is imported when it is needed, after the options have been
checked and a first line has been printed.
"""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono import __version__, keep_freed_memory
from unisono.console import files
from unisono.console.device_option import choose_devices
from unisono.console.errors import DONE, OptionError, OutputClosedError
from unisono.console.options import flag, folder, number
from unisono.console.progress import Progress, for_stdout
from unisono.console.targets import TargetError, current_folder_first
from unisono.runtime.devices import is_cpu
from unisono.training import checkpoint
from unisono.training.observers import Observer, load
from unisono.training.options import HOW, WHAT, WHERE, Options, with_device_defaults
from unisono.training.ranks import ALONE, Ranks, launch
from unisono.training.run_folder import RunFolder
from unisono.training.tensorboard import TensorBoard

SUMMARY = "train an image classifier on all devices"

DESCRIPTION = """\
Train an image classifier on all devices: all accelerators, or else two replicas on the CPU.

Batch size and learning rate are those of one optimizer step over all devices together.
"""

EXAMPLES = """\
examples:
  unisono train
  unisono train --data fashion-mnist --batch-size 512 --lr 0.2 --devices 2
  unisono train --data path/to/idx/files --model mlp --devices 'cpu*4'
  unisono train --data fashion-mnist --batch-size 256 --devices 1 --precision bf16 --compile
  unisono train --output runs/demo --tensorboard --profile
  unisono train --observer trackers:MyTracker
  unisono train --resume runs/demo --epochs 20
  unisono train --output runs/job --resume      begin, or resume: for a job that is started several times

files in the output folder:
  metrics.jsonl            loss of each step, loss and accuracy of each epoch
  curves.png               the same as a picture
  model.safetensors        the weights
  config.json              the options, and the values chosen
  timeline.png, .json      with --profile: what each replica did and when, and where a step spends its time
  tensorboard/             with --tensorboard: the same as metrics.jsonl
  checkpoint.safetensors   the state that --resume reads
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    groups = {title: parser.add_argument_group(title) for title in (WHAT, WHERE, HOW, "results", "observing")}
    for option in dataclasses.fields(Options):
        about = dict(option.metadata)
        group, text = groups[about.pop("group")], about.pop("help")
        if isinstance(option.default, bool):
            about["action"] = argparse.BooleanOptionalAction
        elif isinstance(option.default, int | float):
            about["type"] = number(type(option.default))
        default = "" if "(default" in text or option.default is None else f" (default: {option.default})"
        group.add_argument(flag(option.name), help=text + default, **about)

    results, observing = groups["results"], groups["observing"]
    results.add_argument(
        "--output", type=folder, metavar="DIR", help="the folder for the results (default: runs/ and the time)"
    )
    results.add_argument("--overwrite", action="store_true", help="replace an earlier run in the folder")
    results.add_argument(
        "--resume",
        type=folder,
        nargs="?",
        const=True,
        metavar="DIR",
        help=(
            "resume the run in this folder, with its options; you may change --devices, --compile and --epochs, "
            "and must repeat --profile, --tensorboard and --observer. Without DIR: resume the run in the folder "
            "of --output, or begin one there"
        ),
    )
    observing.add_argument(
        "--profile",
        action="store_true",
        help="record what each replica does and when; write timeline.png and timeline.json after each epoch",
    )
    observing.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write losses, accuracies, rates and options for TensorBoard, in the subfolder tensorboard",
    )
    observing.add_argument(
        "--observer",
        action="append",
        metavar="package.module:Class",
        help=(
            "report each step and each epoch to your own tracker, a class derived from "
            "unisono.training.observers.Observer, found from the current folder; may be repeated"
        ),
    )


def needed(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages that must be installed."""
    packages = ("matplotlib", "numpy", "psutil", "rich", "safetensors")
    return (*packages, "tensorboard") if "tensorboard" in given else packages


def run(given: dict[str, Any], ranks: Ranks = ALONE) -> int:
    """Check what was given on the command line, say that it starts, and train; return the exit status."""
    typed = (f"{flag(name)} {value}" for name, value in given.items() if name != "devices")
    ranks.expect_equal("the options", " ".join(typed) or "none")
    given = dict(given)
    # What observes a run changes no number of it, and is no option of it.
    observed_by, with_tensorboard = given.pop("observer", []), given.pop("tensorboard", False)
    profile = given.pop("profile", False)
    options, run_folder, resume = ranks.from_first(lambda: _plan_run(**given))
    options = dataclasses.replace(options, devices=given.get("devices", options.devices))
    # As nvidia-smi numbers them. It is read when CUDA is initialised, later than this.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

    devices = ranks.together(lambda: choose_devices(options.devices, among_several=ranks.world_size > 1))
    decided = list[str]()
    if not resume:
        options, decided = with_device_defaults(options, given, devices, ranks, profile=profile)
    if options.devices == "auto" and len(devices) > 1 and not is_cpu(devices[0]):
        rows = f"{options.batch_size / len(devices):.3g}"
        decided.append(
            f"--devices auto takes all {len(devices)} accelerators, with {rows} rows of a step's {options.batch_size} "
            "for each: --devices 1 takes one, and a larger --batch-size keeps all of them busier"
        )
    if with_tensorboard:
        decided.append(f"to see it: tensorboard --logdir {files.as_typed(run_folder.tensorboard)}")
    shown = for_stdout() if ranks.is_first else Progress()
    # Observers may import more while the run goes on.
    imports = current_folder_first() if observed_by else contextlib.nullcontext()
    try:
        with contextlib.closing(shown), imports:
            observers = ranks.together(lambda: _observers(observed_by, with_tensorboard) if ranks.is_first else {})
            for line in (f"unisono {__version__}: {options}; results in {run_folder}", *decided):
                shown.say(line)
            from unisono.training.loop import train

            keep_freed_memory()
            ended = train(options, run_folder, shown, ranks, observers, resume=resume, profile=profile)
            for line in ended.summary():
                shown.say(line)
    except OSError as error:
        left = f"nothing was saved yet in {run_folder}"
        if run_folder.checkpoint.exists():
            left = f"to resume from the last checkpoint: unisono train --resume {run_folder}"
        if isinstance(error, BrokenPipeError):
            raise OutputClosedError(
                f"the training has stopped, because its output is no longer read: {left}. To see a part of "
                "the output, write it to a file, and read that"
            ) from error
        what = f"cannot write {error.filename} ({error.strerror})" if error.filename else str(error)
        raise OSError(f"{what}; {left}") from error
    return DONE


def _observers(targets: Sequence[str], with_tensorboard: bool) -> dict[str, Observer]:
    """Return the observers by the words that ask for them."""
    observers: dict[str, Observer] = {"--tensorboard": TensorBoard()} if with_tensorboard else {}
    for target in targets:
        try:
            observers[f"--observer {target}"] = load(target)
        except TargetError as error:
            raise TargetError(f"--observer {error}") from error
    return observers


def _plan_run(
    output: Path | None = None, resume: Path | bool = False, overwrite: bool = False, **given: Any
) -> tuple[Options, RunFolder, bool]:
    """Return the options, the folder, and whether to resume the run in that folder.

    A launcher such as torchrun starts the same command line again when a process has failed. So a run of the same
    launch is resumed, whatever the command line says. Other launchers, such as Ray, name no launch: `resume=True`
    resumes the run in `output` if it has begun.
    """
    begun: RunFolder | None
    if isinstance(resume, Path):
        if output is not None or overwrite:
            raise OptionError(f"--resume {resume} writes to the same folder: leave out --output and --overwrite")
        begun = RunFolder.reopen(resume)
    elif resume:
        if output is None or overwrite:
            raise OptionError(
                "--resume without DIR needs the folder of the run: give --output "
                f"DIR{', and leave out --overwrite' if overwrite else ''}"
            )
        begun = RunFolder(output) if RunFolder(output).has_begun else None
    else:
        begun = _folder_of_launch(output)
    if begun is not None:
        return Options.from_saved(checkpoint.read(begun).config["options"], given), begun, True
    return Options(**given), RunFolder.for_new_run(output, overwrite=overwrite), False


def _folder_of_launch(output: Path | None) -> RunFolder | None:
    """Return the folder of the run that this launch began before it restarted its processes: `output` or in `runs/`."""
    if (this_launch := launch()) is None:
        return None
    folders = map(RunFolder, Path("runs").glob("*") if output is None else [output])
    return next((folder for folder in folders if checkpoint.launch_of(folder) == this_launch), None)
