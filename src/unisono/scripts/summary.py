"""The closing line of `unisono run`: devices, rows a second, and the share of time of each phase."""

from unisono.console.device_option import describe
from unisono.scripts.activity import Report

_NO_WRAPPER = (
    "the script made no torch.nn.DataParallel that is unisono's in this process, and called none of the functions "
    "beside it: it ran as with python alone"
)
_PLAIN = "no accelerator, where the plain module runs (--devices 'cpu*2' makes two replicas)"


def line(report: Report, world_size: int = 1, advice: str = "") -> str:
    """Return one line of plain ASCII for people: that of rank 0; with advice, if the script has made no wrapper."""
    if not report.devices and not report.functions:
        return _NO_WRAPPER + advice
    parts = [f"rank 0 of {world_size}"] if world_size > 1 else []
    several = any(len(devices) > 1 for devices in report.devices)
    if report.devices:
        number = _counted(len(report.devices), "wrapper")
        wheres = [describe(devices) if devices else _PLAIN for devices in report.devices]
        parts.append(f"{number} on {' and '.join(dict.fromkeys(wheres))}")
    if report.functions:
        parts.append("calls of " + ", ".join(f"{name} {count:,}" for name, count in report.functions.items()))
    if report.forwards:
        rate = f", {report.rows / report.seconds:,.0f} rows/s" if report.seconds else ""
        parts.append(f"{_counted(report.rows, 'row')} in {_counted(report.forwards, 'forward')}{rate}")
        parts.append(_phases(report, several))
    elif report.devices:
        parts.append("no forward")
    return "; ".join(filter(None, parts))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _phases(report: Report, several: bool) -> str:
    """Return the share of each phase in the time since the first forward; of one device backward is not known."""
    rest_s = max(0.0, report.seconds - report.forward_s - report.backward_s)
    rest = "the rest of the script" if several else "backward and the rest of the script"
    seconds = {"forward": report.forward_s, "backward": report.backward_s, rest: rest_s}
    shares = {name: f"{of_phase / sum(seconds.values()):.0%}" for name, of_phase in seconds.items()}
    return ", ".join(f"{name} {share}" for name, share in shares.items() if share != "0%")
