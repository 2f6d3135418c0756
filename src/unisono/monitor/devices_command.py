"""The command `unisono devices`: what this machine has, as text or JSON."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from unisono.console.errors import DONE, FAILED
from unisono.monitor.inventory import take_inventory
from unisono.monitor.nvml import GpuReader
from unisono.monitor.report import lines_of

SUMMARY = "list this machine's accelerators, links, cores and limits, and which are free"

DESCRIPTION = """\
List this machine's devices as torch sees them: each accelerator with its memory, cores, place in PCI order and
whether it is free; how CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER number them; the speed of copies between
accelerators, measured where both are free; the shares that balance unequal ones; cores, threads, cgroup limits,
memory and NUMA nodes of the CPU.

Load, processes and hidden GPUs come from the driver, and need nvidia-ml-py (pip install nvidia-ml-py).
"""

EXAMPLES = """\
examples:
  unisono devices
  CUDA_VISIBLE_DEVICES=5,6,7 unisono devices      how they are numbered: 0, 1 and 2
  unisono devices --no-bandwidth                  without measuring copies, which takes seconds with many accelerators
  unisono devices --json | jq -r '.accelerators[] | select(.is_free) | .device'

"free": busy at most a tenth of the time, and at most a tenth of the memory in use

exit status:
  0  everything was read
  1  torch lists an accelerator that it cannot use
  2  a wrong argument
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object; sizes in bytes, times in seconds, shares between 0 and 1",
    )
    parser.add_argument("--no-bandwidth", action="store_true", help="do not measure copies between accelerators")


def run(given: dict[str, Any]) -> int:
    """Look, and print; return the exit status."""
    inventory = take_inventory(GpuReader(), bandwidth=not given.get("no_bandwidth", False))
    as_json = given.get("json", False)
    print(json.dumps(asdict(inventory), indent=2) if as_json else "\n".join(lines_of(inventory)), flush=True)
    return FAILED if inventory.has_problems else DONE
