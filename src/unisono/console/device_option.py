"""The option `--devices`: which devices its text names, and devices in words."""

import re
from collections.abc import Sequence

import torch

from unisono.console.errors import OptionError
from unisono.console.files import as_typed
from unisono.distributed import environment
from unisono.runtime import devices

_MAX_REPLICAS, _LONGEST = 1024, 1000
_FORMS = "auto, a count, or devices such as 0,1 or cuda:0,cuda:1 or cpu,cpu or 'cpu*8'"
# For the help of the option.
AUTO = "all accelerators, or two CPU replicas if there is none"
NAMED = (
    "a count, such as 2: the first two accelerators, or two CPU replicas; or a list: 0,1, cuda:0,cuda:1, cpu,cpu, "
    "'cpu*8'; 0, with a comma, is accelerator 0 only"
)


def choose_devices(text: str, *, among_several: bool = False) -> list[torch.device]:
    """Return the devices that `--devices` names, one for each replica.

    auto       every accelerator; two CPU replicas where there is none
    3          the first three accelerators; three CPU replicas where there is none
    0,1        accelerators 0 and 1, as in device_ids=[0, 1]; 0, with a comma, is accelerator 0 alone
    cpu,cpu    these devices
    'cpu*8'    this device, eight times

    Several processes of one machine each have their own devices: auto is the accelerator of this process, or one CPU
    replica; 3 are three accelerators, those that follow the ones of the processes with a lower local rank.
    """
    text, present = text.strip(), devices.accelerators()
    if text == "auto" and not among_several:
        return present or [torch.device("cpu")] * 2
    if text == "auto":
        try:
            return [environment.local_device()]
        except ValueError as error:
            raise OptionError(error) from error
    if len(text) > _LONGEST or any(int(number) > _MAX_REPLICAS for number in re.findall(r"\d+", text)):
        raise OptionError(f"--devices {as_typed(text[:80])}: no machine has so many devices; expected {_FORMS}")
    if text.isdecimal():
        return _take(int(text), present, (environment.local_rank() or 0) if among_several else 0)
    named = [device for part in text.removesuffix(",").split(",") for device in _repeated(part.strip(), text)]
    if not devices.are_one_kind(named):
        raise OptionError(
            f"{_typed(text)}: expected one kind of device for all replicas, such as cuda:0,cuda:1 or cpu,cpu"
        )
    return named


def _take(count: int, present: list[torch.device], local_rank: int) -> list[torch.device]:
    """Return `count` of the accelerators present, after those of the processes with a lower local rank."""
    if count < 1:
        raise OptionError(
            f"--devices {count}: a number is a count, 1 or more; write --devices 0, (with a comma) for accelerator 0, "
            "--devices cpu for one CPU replica"
        )
    if not present:
        return [torch.device("cpu")] * count
    first = local_rank * count
    if first + count > len(present):
        there = ", ".join(map(str, present))
        needed = f" for each of {local_rank + 1} processes" if local_rank else ""
        one_device = as_typed(f"{present[0]}*{count}")
        remedy = (
            f"start at most {len(present) // count} here"
            if local_rank and count <= len(present)
            else f"write --devices {len(present)}, or {one_device} for {count} replicas on one device"
        )
        raise OptionError(f"--devices {count}{needed}: this machine has only {len(present)} ({there}); {remedy}")
    return present[first : first + count]


def _typed(text: str) -> str:
    return f"--devices {as_typed(text)}"


def _repeated(part: str, text: str) -> list[torch.device]:
    name, star, times = part.partition("*")
    if not name or (star and not (times.isdecimal() and int(times) > 0)):
        raise OptionError(f"{_typed(text)}: expected {_FORMS}")
    try:
        if not name.isdecimal():
            torch.device(name)
    except (RuntimeError, ImportError):  # torch's message lists every kind of device that it knows
        raise OptionError(f"{_typed(text)}: {name} is not a device; expected {_FORMS}") from None
    try:
        device = devices.resolve_one(int(name) if name.isdecimal() else name, _typed(text))
    except ValueError as error:
        remedy = "" if devices.accelerators() else "; for two replicas on the CPU write --devices 'cpu*2'"
        raise OptionError(f"{error}{remedy}") from error
    return [device] * (int(times) if star else 1)


def describe(*devices_by_rank: Sequence[torch.device]) -> str:
    """Return the devices of all processes in words, as in "2 replicas (cpu, cpu)".

    >>> cpu = torch.device("cpu")
    >>> describe([cpu] * 8)
    '8 replicas (8 x cpu)'
    >>> describe([cpu] * 2, [cpu] * 2)
    '2 processes, 4 replicas (4 x cpu)'
    """
    devices = [device for of_rank in devices_by_rank for device in of_rank]
    processes = f"{len(devices_by_rank)} processes, " if len(devices_by_rank) > 1 else ""
    if len(devices) == 1:
        return str(devices[0])
    counts = {device: devices.count(device) for device in devices}
    names = [str(device) if count == 1 else f"{count} x {device}" for device, count in counts.items()]
    return f"{processes}{len(devices)} replicas ({', '.join(names)})"
