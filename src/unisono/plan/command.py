"""The command `unisono plan`: from the words of the command line to a table, a picture, and a conclusion."""

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono import keep_freed_memory
from unisono.bench.results import upper_quartile
from unisono.bench.tasks import Task
from unisono.console import options
from unisono.console.errors import DONE, OptionError
from unisono.console.files import expect_writable, write
from unisono.console.options import TARGET, folder, number
from unisono.console.targets import TargetError, current_folder_first, one_line
from unisono.plan.allreduce import ALGORITHMS
from unisono.plan.links import BYTES, LINKS, SECONDS, Cluster, parse_link, parse_quantity
from unisono.plan.plans import ScalingPlan, document
from unisono.plan.prediction import BEST, MOST_BUCKETS, MOST_DEVICES, StepCost
from unisono.primitives.measured_shares import lower_quartile
from unisono.runtime.devices import accelerators, is_cpu

_BACKWARD_FRACTION = 2 / 3
_DEFAULTS = {"bucket": "25MiB", "inside": "pcie3", "between": "25gbe"}
_DEVICES = 8
_DEVICES_PER_MACHINE = 8
_SECONDS = 5.0  # of measuring a step

_time = functools.partial(parse_quantity, units=SECONDS)
_size = functools.partial(parse_quantity, units=BYTES)

SUMMARY = "predict how far a training step will scale: an upper bound"

DESCRIPTION = """\
How far will it scale? Predict an upper bound of the efficiency on 2, 4 and 8 devices, or more, from one training step
and the links between devices: ring, tree and two-level all-reduce by the alpha-beta model, overlapped with backward
bucket by bucket. Each device has the same number of rows (samples), so the whole batch grows (weak scaling); --strong
divides one batch.

The step is measured here on one device for your model (package.module:build, as for `unisono bench`; its batch is
for one device), or given by --compute and --gradients.
"""

EXAMPLES = """\
examples:
  unisono plan train:build                       your model, measured here
  unisono plan train:build --devices 64 --between 100gbit
  unisono plan --compute 292ms --gradients 102MB --inside nvlink2
  unisono plan --compute 292ms --gradients 102MB --between 50us,10Gbit/s --devices-per-machine 4

quantities have a unit: 180ms or 10us; 102MB or 25MiB; 16GB/s or 25Gbit/s (a byte has 8 bits)

links:
{links}
  or LATENCY,BANDWIDTH, such as 10us,25Gbit/s

files in the output folder:
  plan.md     the table and the conclusion
  plan.png    the picture, if matplotlib is installed
""".format(links="\n".join(f"  {name:<9} {link}" for name, link in LINKS.items()))


def add_options(parser: argparse.ArgumentParser) -> None:
    inside, between, bucket = (f"(default: {_DEFAULTS[name]})" for name in ("inside", "between", "bucket"))
    machine = f"how many devices a machine has (default: {_DEVICES_PER_MACHINE}; 1 for a step measured on a CPU)"
    best = f"the algorithm that sums gradients (default: {BEST}, the fastest of the others for each number of devices)"
    parser.add_argument("target", nargs="?", metavar=TARGET, help="your model, measured here")
    add = parser.add_argument_group("the step, if it is not measured here").add_argument
    add(
        "--compute",
        type=_time,
        metavar="TIME",
        help="time of a whole step on one device; backward is taken as two thirds of it",
    )
    add("--gradients", type=_size, metavar="SIZE", help="size of the gradients of all parameters together")
    add = parser.add_argument_group("where").add_argument
    add(
        "--devices",
        type=number(int, 2, MOST_DEVICES),
        metavar="N",
        help=f"the largest number of devices (default: {_DEVICES}; {MOST_DEVICES} at most)",
    )
    add("--inside", type=parse_link, metavar="LINK", help=f"link between devices of one machine {inside}")
    add(
        "--between",
        type=parse_link,
        metavar="LINK",
        help=f"link between machines; the devices of a machine share it {between}",
    )
    add("--devices-per-machine", type=number(int, 1), metavar="N", help=machine)
    add = parser.add_argument_group("how").add_argument
    add("--bucket", type=_size, metavar="SIZE", help=f"size of a bucket: gradients that are reduced together {bucket}")
    add("--all-reduce", choices=(BEST, *ALGORITHMS), help=best)
    add("--strong", action="store_true", help="strong scaling: the devices share one device's batch")
    add = parser.add_argument_group("results").add_argument
    add("--output", type=folder, metavar="DIR", help="the folder for the results (default: runs/plan)")


def needed(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages that must be installed."""
    return ("psutil",) if "target" in given else ()


def run(given: dict[str, Any]) -> int:
    """Predict, print and save; return the exit status."""
    output: Path = given.get("output", Path("runs/plan"))
    most, num_machine = given.get("devices", _DEVICES), given.get("devices_per_machine", _DEVICES_PER_MACHINE)
    expect_writable(output)
    bucket_bytes = given.get("bucket", _size(_DEFAULTS["bucket"]))
    inside, between = (given.get(name, parse_link(_DEFAULTS[name])) for name in ("inside", "between"))

    target, disturbance, origin = given.get("target"), "", "as given"
    if target is None or "devices_per_machine" in given:  # else the measured device tells how many are in a machine
        _check_between(given, most, num_machine)
    title = f"How far will {target or 'it'} scale? An upper bound"
    if target is None:
        step = _described_step(given, bucket_bytes)
    else:
        for name in ("compute", "gradients"):
            if name in given:
                raise OptionError(f"give either {target}, which is measured, or --{name}: leave one out")
        print(f"measuring {target} on one device, for some seconds", flush=True)
        step, device, origin, disturbance = _measured_step(target, bucket_bytes)
        if is_cpu(device) and "devices_per_machine" not in given:
            num_machine = 1
    num_buckets = step.gradient_bytes / bucket_bytes
    if num_buckets > MOST_BUCKETS:
        raise OptionError(
            f"--bucket {bucket_bytes:g}B makes {num_buckets:,.0f} buckets of {step.gradient_bytes / 1e6:g} MB: "
            f"expected {MOST_BUCKETS:,} at most"
        )
    _check_between(given, most, num_machine)
    cluster = Cluster(inside, between, num_machine)
    plan = ScalingPlan(
        step, cluster, given.get("all_reduce", BEST), given.get("strong", False), most, origin, disturbance
    )

    files = {}
    where_it_is = options.why_no_picture()
    if not where_it_is:
        from unisono.plan.chart import png

        files["plan.png"] = png(plan, title)
        where_it_is = f"see {output / 'plan.png'}"
    files["plan.md"] = document(plan, title, picture="plan.png" in files).encode("utf-8")
    write(output, files)
    print(f"{title}\n\n{plan.assumptions()}\n\n{plan.to_table()}\n\n{plan.conclusion()}\n")
    print(f"{where_it_is}; the table is in {output / 'plan.md'}")
    return DONE


def _check_between(given: Mapping[str, Any], most: int, num_machine: int) -> None:
    """Raise OptionError if a link between machines is given, and all devices are in one."""
    if "between" in given and num_machine >= most:
        more = min(8 * num_machine, MOST_DEVICES)
        remedy = f"add --devices {more}" if more > num_machine else "leave --between out"
        raise OptionError(f"{remedy}: --between is not used, because all {most} devices are in one machine")


def _described_step(given: dict[str, Any], bucket_bytes: float) -> StepCost:
    missing = [name for name in ("compute", "gradients") if name not in given]
    if missing:
        raise OptionError(
            f"--{missing[0]} is missing: give your model (package.module:build), or --compute and --gradients"
        )
    compute_s: float = given["compute"]
    return StepCost(compute_s, _BACKWARD_FRACTION * compute_s, given["gradients"], bucket_bytes)


def _measured_step(target: str, bucket_bytes: float) -> tuple[StepCost, torch.device, str, str]:
    """Take training steps for some seconds; return the cost of one, the device, how good the measurement is, and what
    disturbed it.

    The device is the first accelerator, or the CPU with all cores; times are lower quartiles.
    """
    from unisono.bench.measure import measure_here  # here: whether psutil is installed has been checked

    task = Task.of_target(target)
    device = next(iter(accelerators()), torch.device("cpu"))
    keep_freed_memory()
    try:
        for module in (task.model, task.criterion):
            if isinstance(module, nn.Module):
                module.to(device)
        step = task.shard(0, 1, device).stepper()
        with current_folder_first():  # it may import more while it runs
            steps, disturbance = measure_here(step, _SECONDS)
    except Exception as error:
        raise TargetError(f"cannot measure {target}: {one_line(error)}") from error
    gradient_bytes = sum(p.grad.nbytes for p in task.model.parameters() if p.grad is not None)
    if not gradient_bytes:
        raise TargetError(f"{target}: backward gave no parameter a gradient, so there is nothing to reduce")
    whole_s, backward_s = (lower_quartile([getattr(s, part) for s in steps]) for part in ("whole_s", "backward_s"))
    slower_s = upper_quartile([step.whole_s for step in steps])
    origin = (
        f"measured with {task.rows} rows on {device}, in {len(steps)} steps, whose quartiles are {1000 * whole_s:.3g} "
        f"and {1000 * slower_s:.3g} ms"
    )
    return StepCost(whole_s, backward_s, float(gradient_bytes), bucket_bytes), device, origin, disturbance
