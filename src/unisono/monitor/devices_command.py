"""The command `unisono devices`: what this machine has, as text or JSON."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from unisono.console.errors import DONE, FAILED
from unisono.monitor.inventory import take_inventory
from unisono.monitor.nvml import GpuReader
from unisono.monitor.report import lines_of

SUMMARY = "say what this machine has, and what of it is free: accelerators, links, cores, limits"

DESCRIPTION = """\
Say what this machine has and what torch makes of it: each accelerator with its memory, cores, place in PCI order and
whether it is free now; what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER do to the numbers; copies between accelerators,
measured where both are free; the shares that balance unequal ones; cores, threads, cgroup limits, memory and NUMA nodes
of the CPU.

Load, processes and hidden GPUs are the driver's figures, and need nvidia-ml-py (pip install nvidia-ml-py).
"""

EXAMPLES = """\
examples:
  unisono devices
  CUDA_VISIBLE_DEVICES=5,6,7 unisono devices      what these become: 0, 1 and 2
  unisono devices --no-bandwidth                  without the copies, which take some seconds with many accelerators
  unisono devices --json | jq -r '.accelerators[] | select(.is_free) | .device'

"free" means: at most a tenth of the time busy, and at most a tenth of the memory taken.

exit status:
  0  everything could be read
  1  an accelerator is there but cannot be used
  2  the arguments cannot be used
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object, in bytes, seconds and parts of 1")
    parser.add_argument("--no-bandwidth", action="store_true", help="measure no copies between accelerators")


def run(given: dict[str, Any]) -> int:
    """Look, and print; return the exit status."""
    inventory = take_inventory(GpuReader(), bandwidth=not given.get("no_bandwidth", False))
    as_json = given.get("json", False)
    print(json.dumps(asdict(inventory), indent=2) if as_json else "\n".join(lines_of(inventory)), flush=True)
    return FAILED if inventory.has_problems else DONE
