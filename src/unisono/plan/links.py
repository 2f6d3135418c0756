"""Links, machines, and quantities with units as on a command line: `10us`, `25MiB`, `25Gbit/s`.

A link is two figures, as in Hockney's model ("The communication challenge for MPP", Parallel Computing 20, 1994): a
message of b bytes takes alpha + b / beta, with the latency alpha in seconds and the bandwidth beta in bytes per second.
"""

import argparse
import math
import re
from dataclasses import dataclass

_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*(\D.*?)\s*", re.IGNORECASE)

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
BYTES_PER_SECOND = {"MB/s": 1e6, "GB/s": 1e9, "GiB/s": 2.0**30, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}


@dataclass(frozen=True)
class Link:
    """A link, on which a message takes `latency_s + bytes / bandwidth_bytes_per_s`."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __str__(self) -> str:
        return f"{1e6 * self.latency_s:.3g} us, {self.bandwidth_bytes_per_s / 1e9:.4g} GB/s"


@dataclass(frozen=True)
class Cluster:
    """Equal machines with equal devices; machines are filled one after the other."""

    inside: Link  # from a device to another one of its machine; every device has its own
    between: Link  # from a machine to another one; the devices of a machine share it
    devices_per_machine: int

    def num_machines(self, num_devices: int) -> int:
        """Return how many machines so many devices fill."""
        return math.ceil(num_devices / self.devices_per_machine)

    def devices_inside(self, num_devices: int) -> int:
        """Return how many of so many devices are in the first machine."""
        return min(num_devices, self.devices_per_machine)

    def slowest_bytes_per_s(self, num_devices: int) -> float:
        """Return the bandwidth of the slowest link that so many devices use."""
        used = [self.inside] if self.devices_inside(num_devices) > 1 else []
        used += [self.between] if self.num_machines(num_devices) > 1 else []
        return min((link.bandwidth_bytes_per_s for link in used), default=math.inf)


# The links that have names on the command line. Latencies are the constants with which NCCL predicts its own rings
# (src/graph/tuning.cc at commit 01afd20: hwLat, Ring, Simple). Bandwidths are the nominal ones, in one direction, from
# which protocols take 5 to 20 %. The standards and whitepapers were not looked up again: check them before you rely on
# them.
LINKS = {
    "pcie3": Link(5.7e-6, 15.754e9),  # 16 lanes (PCI-SIG, PCI Express Base Specification 3.0)
    "nvlink1": Link(3.4e-6, 80e9),  # four links together (NVIDIA, whitepaper WP-08019-001 of the P100)
    "nvlink2": Link(3.4e-6, 150e9),  # six links together (NVIDIA, whitepaper WP-08608-001 of the V100)
    "25gbe": Link(9.6e-6, 3.125e9),  # IEEE 802.3by
    "50gbe": Link(9.6e-6, 6.25e9),  # IEEE 802.3cd
    "100gbit": Link(9.6e-6, 12.5e9),  # InfiniBand EDR, four lanes
}


def parse_quantity(text: str, units: dict[str, float], *, zero: bool = False) -> float:
    """Return the value of a number with one of these units; an argparse type, given the units, and if it may be 0.

    >>> parse_quantity("25MiB", BYTES), parse_quantity("25 Gbit/s", BYTES_PER_SECOND)
    (26214400.0, 3125000000.0)
    """
    found = _NUMBER.fullmatch(text)
    value = float(found[1]) * units[found[2]] if found and found[2] in units else math.nan
    if not (0 < value < math.inf or (zero and value == 0)):
        expected = f"expected a number {'from 0 up' if zero else 'above 0'} with one of the units {', '.join(units)}"
        raise argparse.ArgumentTypeError(f"{expected}; got {text!r}")
    return value


def parse_link(text: str) -> Link:
    """Return the link of this name, or the one that `LATENCY,BANDWIDTH` describes; an argparse type.

    >>> parse_link("1us,25Gbit/s")
    Link(latency_s=1e-06, bandwidth_bytes_per_s=3125000000.0)
    """
    if text in LINKS:
        return LINKS[text]
    latency, comma, bandwidth = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(
            f"expected a latency and a bandwidth, such as 10us,25Gbit/s, or one of {', '.join(LINKS)}; got {text!r}"
        )
    return Link(parse_quantity(latency, SECONDS, zero=True), parse_quantity(bandwidth, BYTES_PER_SECOND))
