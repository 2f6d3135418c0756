"""What CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make of the GPUs' numbers, or HIP_VISIBLE_DEVICES with ROCm."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ROCM_VARIABLE = "HIP_VISIBLE_DEVICES"  # ROCm reads CUDA's too, if this one is not set
_FASTEST_FIRST = "FASTEST_FIRST"  # CUDA's default
PCI_ORDER = "PCI_BUS_ID"


@dataclass(frozen=True)
class Visibility:
    """What a process sees, by its environment."""

    variable: str | None  # the one that is set; None if none is
    text: str  # its value
    visible: tuple[str, ...]  # the entries that count: the first is device 0, the next device 1, and so on
    ignored: tuple[str, ...]  # the first entry that cannot be used, and those behind it
    ignored_because: str  # what is wrong with the first of them, if there is one
    order: str  # by which CUDA numbers GPUs
    order_is_set: bool  # whether CUDA_DEVICE_ORDER is set

    def lines(self, num_seen: int) -> list[str]:
        """Return it in words.

        Args:
            num_seen: how many accelerators torch sees.
        """
        if self.variable is None:
            return ["CUDA_VISIBLE_DEVICES is not set: this process sees every GPU"]
        given = f"{self.variable}={self.text}"
        bad = f"{self.ignored[0] or 'an empty entry'} {self.ignored_because}" if self.ignored else ""
        if not self.visible:
            return [f"{given} hides every GPU" + (f": {bad}" if bad else "")]
        numbers = ", ".join(f"cuda:{number}" for number, _ in enumerate(self.visible))
        verb = ("is" if len(self.visible) == 1 else "are") if num_seen else "would be"
        lines = [f"{given}: {', '.join(self.visible)} {verb} {numbers} in this process"]
        lines += [f"{given}: {bad}, and nothing from there on is seen"] if bad else []
        lines += [f"torch sees {num_seen} of them"] if len(self.visible) != num_seen else []
        return lines


def visibility(environment: Mapping[str, str], num_gpus: int | None = None, *, is_rocm: bool = False) -> Visibility:
    """Return what the variables make of the GPUs' numbers.

    CUDA reads the entries in order, up to the first one that names no GPU. If one is named twice, it sees none.

    >>> seen = visibility({"CUDA_VISIBLE_DEVICES": "5,6,7"})
    >>> list(enumerate(seen.visible))
    [(0, '5'), (1, '6'), (2, '7')]
    >>> visibility({"CUDA_VISIBLE_DEVICES": "0,-1,1"}).visible
    ('0',)

    Args:
        num_gpus: how many the machine has; None if that is not known.
        is_rocm: whether torch is built for ROCm.
    """
    order = environment.get("CUDA_DEVICE_ORDER") or _FASTEST_FIRST
    order_is_set = bool(environment.get("CUDA_DEVICE_ORDER"))
    variables = (_ROCM_VARIABLE, CUDA_VARIABLE) if is_rocm else (CUDA_VARIABLE,)
    variable = next((name for name in variables if name in environment), None)
    if variable is None:
        return Visibility(None, "", (), (), "", order, order_is_set)
    text = environment[variable]
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    visible = list(takewhile(lambda entry: _names_gpu(entry, num_gpus), entries))
    ignored = entries[len(visible) :]
    because = "names no GPU" + ("" if num_gpus is None else f" (this machine has {num_gpus})")
    if twice := [entry for entry in visible if visible.count(entry) > 1]:
        visible, ignored, because = [], twice[:1], "is named twice"
    return Visibility(variable, text, tuple(visible), tuple(ignored), because, order, order_is_set)


def _names_gpu(entry: str, num_gpus: int | None) -> bool:
    if entry.isascii() and entry.isdecimal():
        return num_gpus is None or int(entry) < num_gpus
    return re.match(r"GPU-|MIG-", entry) is not None
