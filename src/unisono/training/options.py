"""The options of a training: their defaults, some of which depend on the devices, and their checks.

config.json has all of them, with what was decided for the devices: a run that is resumed decides nothing.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.console.errors import OptionError
from unisono.console.options import flag
from unisono.runtime.devices import are_cpu, computes_on_host, has_fast_bfloat16
from unisono.training.compiling import expect_compiler
from unisono.training.ranks import Ranks

SCHEDULES = ("constant", "cosine")
PRECISIONS = ("fp32", "tf32", "bf16", "bf16-weights")
ENGINES = ("threads", "processes")
DEVICE_ORDERS = ("PCI_BUS_ID", "FASTEST_FIRST")
_MAX_WHOLE = 2**31 - 1

FEW_ROWS = 64  # of a device and step: the host's work for a replica then takes longer than the GPU's

# A run can be resumed on other devices and for more epochs; any other change makes it another run.
MAY_CHANGE_ON_RESUME = ("devices", "engine", "compile", "device_order", "epochs", "mirror")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `unisono train` is asked to do; one field for each option of the command line.

    The defaults are one recipe: SGD with momentum, and a learning rate that rises over the first epoch and then falls
    along a cosine. Learning rate and batch size are those of one optimizer step over all devices, so that a run gives
    the same numbers on any number of devices.

    Raises:
        OptionError: a value is out of its range; the message names the option as it is typed.
    """

    data: str = "digits"
    mirror: str | None = None
    model: str = "resnet18"
    init: str = "default"
    devices: str = "auto"
    engine: str = "threads"
    batch_size: int = 128
    epochs: int = 8
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup_epochs: float = 1.0
    schedule: str = "cosine"
    accumulate: int = 1
    sync_batch_norm: bool = True
    precision: str = "fp32"
    compile: bool = False
    seed: int = 0
    device_order: str = "PCI_BUS_ID"

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "accumulate"):
            self._expect(name, 1 <= getattr(self, name) <= _MAX_WHOLE, f"a whole number from 1 up to {_MAX_WHOLE}")
        self._expect("lr", math.isfinite(self.lr) and self.lr > 0, "a number above 0")
        self._expect("momentum", 0 <= self.momentum < 1, "a number from 0 up to, but not including, 1")
        self._expect("weight_decay", math.isfinite(self.weight_decay) and self.weight_decay >= 0, "0 or more")
        self._expect("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 4294967295")
        self._expect("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._expect("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        self._expect("engine", self.engine in ENGINES, f"one of {', '.join(ENGINES)}")
        self._expect("device_order", self.device_order in DEVICE_ORDERS, f"one of {', '.join(DEVICE_ORDERS)}")
        self._expect(
            "warmup_epochs",
            0 <= self.warmup_epochs <= self.epochs,
            f"0 (none) or more, and no more than --epochs {self.epochs}",
        )
        self._expect(
            "accumulate",
            self.accumulate <= self.batch_size,
            f"at most --batch-size {self.batch_size}, so that no part of a batch is empty",
        )
        if self.compile and self.engine == "processes":
            raise OptionError(
                "--compile with --engine processes: what is compiled cannot be sent to processes; take --no-compile"
            )

    def __str__(self) -> str:
        """Return in words what is trained, and how it is computed."""
        computed = "" if self.precision == "fp32" else f", in {self.precision}"
        return f"{self.model} on {self.data}{computed}{', compiled' if self.compile else ''}"

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise OptionError(f"{flag(name)} {getattr(self, name)}: expected {expected}")

    def check_devices(self, devices_by_rank: Sequence[Sequence[torch.device]], *, synchronised: bool) -> None:
        """Check that the options go together on these devices.

        Args:
            devices_by_rank: the devices of each process.
            synchronised: whether the model has batch norm that takes its statistics from the rows of all replicas.

        Raises:
            OptionError: they do not; says what to leave out.
        """
        devices = [device for of_rank in devices_by_rank for device in of_rank]
        names = ", ".join(map(str, devices))
        if self.engine == "processes" and synchronised and not are_cpu(devices):
            raise OptionError(
                f"--engine processes on accelerators, and --devices {self.devices} is {names}, cannot synchronise "
                "batch norm: leave out --engine, or take --no-sync-batch-norm"
            )
        if self.compile and synchronised and len(devices) > 1:
            one_device = " or --devices 1" if len(devices_by_rank) == 1 else ""
            raise OptionError(
                f"--compile with batch norm synchronised over {len(devices)} replicas ({names}) would be compiled in "
                "pieces between the batch norms, and be slower than without: take "
                f"--no-sync-batch-norm{one_device}, or take --no-compile"
            )

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> "Options":
        """Return the options that were given, and the defaults of the others."""
        order_of_environment = os.environ.get("CUDA_DEVICE_ORDER")
        if order_of_environment in DEVICE_ORDERS:
            given = {"device_order": order_of_environment, **given}
        return cls(**_with_absolute_folder(given))

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], given: Mapping[str, Any]) -> "Options":
        """Return the options of a run that is resumed: the saved ones, with the changes that the command line may make.

        Raises:
            OptionError: an option was given that would make it another run, or `saved` is not what was saved.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if different := names ^ saved.keys():
            raise OptionError(
                f"config.json of the run to resume is of another version of unisono: {min(different)} is not in both; "
                "start another run"
            )
        begun = cls(**saved)
        given = _with_absolute_folder(given)
        for name, value in given.items():
            if name not in MAY_CHANGE_ON_RESUME and value != getattr(begun, name):
                may_change = ", ".join(map(flag, MAY_CHANGE_ON_RESUME))
                raise OptionError(
                    f"{_typed(name, value)}: the run to resume has {_typed(name, getattr(begun, name))}; leave it "
                    f"out, or start another run (what may change on resuming: {may_change})"
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
    if "compile" not in given and len(fast) == 1 and options.engine == "threads" and not profile:
        try:
            expect_compiler(devices[0])
            decided["compile"] = True
        except OptionError as error:
            lines.append(f"not compiled: {error}")
    if decided:
        typed = " ".join({"precision": "--precision bf16", "compile": "--compile"}[name] for name in decided)
        lines.insert(0, f"on {devices[0]} the default is {typed}; exact float32: --precision fp32 --no-compile")
    return dataclasses.replace(options, **decided), lines


def advice_on_rows(options: Options, devices_by_rank: Sequence[Sequence[torch.device]]) -> str | None:
    """Return a line of advice if the replicas of a process on several accelerators have few rows a step."""
    devices = [device for of_rank in devices_by_rank for device in of_rank]
    rows = options.batch_size // (len(devices) * options.accumulate)
    if rows >= FEW_ROWS or max(map(len, devices_by_rank)) == 1 or any(map(computes_on_host, devices)):
        return None
    enough = FEW_ROWS * len(devices) * options.accumulate
    return (
        f"{rows} rows for each of {len(devices)} devices are few: one device is likely to be as fast (--devices 1); "
        f"--batch-size {enough} gives each {FEW_ROWS}"
    )


def _typed(name: str, value: object) -> str:
    """Return an option with its value as it is typed: `--lr 0.1`, `--no-sync-batch-norm`."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {value}"


def _with_absolute_folder(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make a data folder's path absolute, so that the run can be resumed from elsewhere."""
    given = dict(given)
    names_a_folder = "data" in given and given["data"] not in ("digits", "fashion-mnist")
    if names_a_folder and (folder := Path(given["data"]).expanduser()).is_dir():
        given["data"] = str(folder.absolute())
    return given
