"""The options of a training: their defaults, some of which depend on the devices, their help, and their checks.

The checkpoint has all of them, with what was decided for the devices: a run that is resumed decides nothing.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.console.device_option import AUTO, NAMED
from unisono.console.errors import OptionError
from unisono.console.options import flag
from unisono.runtime.devices import computes_on_host
from unisono.runtime.precision import has_fast_bfloat16
from unisono.training.computation import expect_compiler
from unisono.training.data import known
from unisono.training.models import MODELS
from unisono.training.ranks import Ranks

# A run can be resumed on other devices and for more epochs; any other change makes it another run.
MAY_CHANGE_ON_RESUME = ("devices", "compile", "epochs")

_LARGEST_RATE = torch.finfo(torch.float32).max  # torch's optimizers take no larger one

WHAT, WHERE, HOW = "what to train", "where", "how"  # the groups of the help


def _option(default: Any, group: str, text: str, **about: Any) -> Any:
    """Return a field with its default, its help, and what else argparse is told about it."""
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **about})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `unisono train` is asked to do; one field for each option of the command line.

    The recipe is SGD with momentum and weight decay (computation.py), and a learning rate that rises over the first
    epoch and then falls along a cosine (schedule.py). Learning rate and batch size are those of one optimizer step over
    all devices, so that a run gives the same numbers on any number of devices.

    Raises:
        OptionError: a value is out of its range; the message names the option as it is typed.
    """

    data: str = _option(
        "digits",
        WHAT,
        "digits (in scikit-learn), fashion-mnist (downloaded once), or a folder of IDX files",
        metavar="NAME|DIR",
        type=known,
    )
    model: str = _option("resnet18", WHAT, "the model to train", choices=MODELS)
    devices: str = _option(
        "auto",
        WHERE,
        f"auto: {AUTO}; {NAMED}",
        metavar="WHICH",
    )
    batch_size: int = _option(128, HOW, "pictures in one step, over all devices", metavar="ROWS")
    epochs: int = _option(8, HOW, "passes over the training pictures", metavar="N")
    lr: float = _option(0.05, HOW, "learning rate after the first epoch, for the whole batch", metavar="RATE")
    sync_batch_norm: bool = _option(
        True,
        HOW,
        "batch norm over the pictures of all devices, so that the loss does not depend on their number; "
        "--no-sync-batch-norm: over each device's own, as in torch.nn.DataParallel (default: over all)",
    )
    precision: str = _option(
        "fp32",
        HOW,
        "fp32: exact float32; tf32: float32, but GPUs may round products to TF32; bf16: torch.autocast to "
        "bfloat16 (default: fp32; bf16 on GPUs of compute capability 8.0 and newer)",
        choices=("fp32", "tf32", "bf16"),
    )
    compile: bool = _option(
        False,
        HOW,
        "compile the model with torch.compile (on one device the whole step). This takes up to some minutes "
        "at the first step of each of at most two sizes and at the first test, and needs a compiler: a C++ "
        "compiler on the CPU, Triton and a C compiler on GPUs (default: only on one GPU of compute "
        "capability 8.0 or newer, if the compiler works)",
    )
    seed: int = _option(0, HOW, "random seed for weights and order", metavar="N")

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("batch_size", self.batch_size >= 1, "a whole number, 1 or more"),
            ("epochs", self.epochs >= 1, "a whole number, 1 or more"),
            ("lr", 0 < self.lr <= _LARGEST_RATE, f"a number above 0, of at most {_LARGEST_RATE:.1e}"),
            ("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 4294967295"),
        ):
            if not holds:
                raise OptionError(f"{_typed(name, getattr(self, name))}: expected {expected}")

    def __str__(self) -> str:
        """Return in words what is trained, and how it is computed."""
        computed = "" if self.precision == "fp32" else f", in {self.precision}"
        return f"{self.model} on {self.data}{computed}{', compiled' if self.compile else ''}"

    def check_devices(self, devices_by_rank: Sequence[Sequence[torch.device]], *, synchronised: bool) -> None:
        """Check that the options go together on the devices of each process, with `synchronised` batch norm or not."""
        devices = [device for of_rank in devices_by_rank for device in of_rank]
        if self.compile and synchronised and len(devices) > 1:
            names = ", ".join(map(str, devices))
            one_device = " or --devices 1" if len(devices_by_rank) == 1 else ""
            raise OptionError(
                f"--compile with batch norm synchronised over {len(devices)} replicas ({names}) compiles in "
                f"pieces, and is slower than no compilation: pass --no-sync-batch-norm{one_device}, or "
                "--no-compile"
            )
        for of_rank in devices_by_rank if synchronised else ():
            if shared := next((one for one in of_rank if of_rank.count(one) > 1 and not computes_on_host(one)), None):
                raise OptionError(
                    f"--devices {self.devices}: {of_rank.count(shared)} replicas on {shared}, but batch norm "
                    "over all devices needs an accelerator for each replica: name each once, or pass "
                    "--no-sync-batch-norm"
                )

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], given: Mapping[str, Any]) -> "Options":
        """Return the options of a run that is resumed: the saved ones, with the changes that the command line may make.

        Raises:
            OptionError: an option was given that would make it another run, or another version saved other options.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if different := names ^ saved.keys():
            raise OptionError(
                f"another version of unisono wrote the run to resume ({min(different)} is not in both): start a new run"
            )
        begun = cls(**saved)
        for name, value in given.items():
            if name not in MAY_CHANGE_ON_RESUME and value != getattr(begun, name):
                may_change = ", ".join(map(flag, MAY_CHANGE_ON_RESUME))
                raise OptionError(
                    f"{_typed(name, value)}: the run to resume has {_typed(name, getattr(begun, name))}; "
                    f"leave this option out, or start a new run (options that may change: {may_change})"
                )
        return dataclasses.replace(begun, **given)


def with_device_defaults(
    options: Options, given: Mapping[str, Any], devices: Sequence[torch.device], ranks: Ranks, *, profile: bool = False
) -> tuple[Options, list[str]]:
    """Return the options of a new run on these devices of this process, and what was decided, in lines for the user.

    bfloat16 is the default where all devices of all processes are fast in it. There the step is also compiled, if it
    has one replica in all, no `profile` is wanted (a step that is compiled as a whole has none) and the compiler works.
    What was `given` stays.
    """
    found = ranks.all_gather([has_fast_bfloat16(device) for device in devices])
    fast = [of_device for of_rank in found for of_device in of_rank]
    if not all(fast):
        return options, []
    decided, lines = dict[str, Any](), []
    if "precision" not in given:
        decided["precision"] = "bf16"
    if "compile" not in given and len(fast) == 1 and not profile:
        try:
            expect_compiler(devices[0])
            decided["compile"] = True
        except OptionError as error:
            lines.append(f"not compiled: {error}")
    if decided:
        typed = " ".join(_typed(name, value) for name, value in decided.items())
        lines.insert(0, f"on {devices[0]} the default is {typed}; exact float32: --precision fp32 --no-compile")
    return dataclasses.replace(options, **decided), lines


def _typed(name: str, value: object) -> str:
    """Return an option with its value as it is typed: `--lr 0.1`, `--no-sync-batch-norm`."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {value}"
