"""The defaults that depend on the devices: on GPUs that are fast in bfloat16, `unisono train` uses it, and compiles.

A new run decides once. Its config.json has what was decided, as if it had been given, so `--resume` decides nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unisono.console.errors import OptionError
from unisono.runtime import devices as _devices
from unisono.training.compiling import expect_compiler
from unisono.training.options import Options
from unisono.training.ranks import Ranks

FEW_ROWS = 64  # of a device and step: the host's work for a replica then takes longer than the GPU's


def with_device_defaults(
    options: Options, given: Mapping[str, Any], devices: Sequence[torch.device], ranks: Ranks, *, profile: bool = False
) -> tuple[Options, list[str]]:
    """Return the options of a new run on these devices of this process, and what was decided, in lines for the user.

    bfloat16 is the default where all devices of all processes are fast in it. There the step is also compiled, if it
    has one replica in all, no `profile` is wanted (a step that is compiled as a whole has none) and the compiler works.
    What was `given` stays.
    """
    found = ranks.all_gather([_devices.has_fast_bfloat16(device) for device in devices])
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
    return replace(options, **decided), lines


def advice_on_rows(options: Options, devices_by_rank: Sequence[Sequence[torch.device]]) -> str | None:
    """Return a line of advice if the replicas of a process on several accelerators have few rows a step."""
    devices = [device for of_rank in devices_by_rank for device in of_rank]
    rows = options.batch_size // (len(devices) * options.accumulate)
    if rows >= FEW_ROWS or max(map(len, devices_by_rank)) == 1 or any(map(_devices.computes_on_host, devices)):
        return None
    enough = FEW_ROWS * len(devices) * options.accumulate
    return (
        f"{rows} rows for each of {len(devices)} devices are few: one device is likely to be as fast (--devices 1); "
        f"--batch-size {enough} gives each {FEW_ROWS}"
    )
