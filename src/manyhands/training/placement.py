"""Where to train: what `--devices` says, as a list with one device for each replica."""

import re

import torch

from manyhands import devices
from manyhands.training.errors import OptionError

_DIGITS = 4  # of a count or an index
_FORMS = "auto, a count, or devices such as cpu,cpu or 'cpu*8' or cuda:0,cuda:1"


def choose_devices(text: str, engine: str = "threads") -> list[torch.device]:
    """Return the devices that `--devices` names, one for each replica that the engine runs.

    auto       every accelerator; two CPU replicas where there is none
    3          the first three accelerators; three CPU replicas where there is none
    cpu,cpu    these devices
    'cpu*8'    this device, eight times

    Raises:
        OptionError: it has none of these forms, or names what is not there, or what the engine does not know.
    """
    chosen = _named(text)
    if engine == "processes" and any(device.type != "cpu" for device in chosen):
        there = ", ".join(map(str, chosen))
        raise OptionError(
            f"--engine processes runs replicas on the CPU only, and --devices {text} is {there}: take --devices "
            "'cpu*2', or leave out --engine"
        )
    return chosen


def _named(text: str) -> list[torch.device]:
    present = devices.accelerators()
    if text == "auto":
        return present or [torch.device("cpu")] * 2
    if any(len(number) > _DIGITS for number in re.findall(r"\d+", text)):
        raise OptionError(f"--devices {text}: nobody has that many; expected {_FORMS}")
    if text.isdecimal():
        return _first(int(text), present)
    named = [device for part in text.split(",") for device in _repeated(part.strip(), text)]
    if len({device.type for device in named}) > 1:
        raise OptionError(f"--devices {text}: replicas must all be on one kind of device")
    return named


def _first(count: int, present: list[torch.device]) -> list[torch.device]:
    if count < 1:
        raise OptionError(f"--devices {count}: expected {_FORMS}")
    if not present:
        return [torch.device("cpu")] * count
    if count > len(present):
        there = ", ".join(map(str, present))
        raise OptionError(
            f"--devices {count}: there {'is' if len(present) == 1 else 'are'} only {len(present)} ({there}); "
            f"'{present[0]}*{count}' puts {count} replicas on one"
        )
    return present[:count]


def _repeated(part: str, text: str) -> list[torch.device]:
    name, star, times = part.partition("*")
    if not name or (star and not (times.isdecimal() and int(times) > 0)):
        raise OptionError(f"--devices {text}: expected {_FORMS}")
    try:
        torch.device(name)
    except (RuntimeError, ImportError):  # torch would list every kind of device there ever was
        raise OptionError(f"--devices {text}: {name} is no device; expected {_FORMS}") from None
    try:
        device = devices.resolve_one(name, "--devices")
    except ValueError as error:
        raise OptionError(str(error)) from error
    return [device] * (int(times) if star else 1)
