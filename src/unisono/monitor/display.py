"""A sample as tables, by rich: on a terminal with colours, elsewhere as plain text. In ASCII."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unisono.monitor.nvml import Gpu
from unisono.monitor.report import gib
from unisono.monitor.sample import Process, Sample

_NONE = "-"
_MOST_PROCESSES = 20


def shown(sample: Sample) -> Group:
    """Return the display of a sample: GPUs, cores, and the processes that use them."""
    return Group(*_gpus(sample), *_cores(sample), *_processes(sample))


def _gpus(sample: Sample) -> Iterator[RenderableType]:
    if sample.gpus_unread:
        yield _heading(f"GPUs are not shown: {sample.gpus_unread}")
    if sample.gpus:
        header = ["GPU", "load", "memory", "temp", "power", "name"]
        yield _table(header, map(_gpu, sample.gpus))
        yield Text()


def _gpu(gpu: Gpu) -> list[str]:
    load = _NONE if gpu.load is None else f"{gpu.load:.0%}"
    memory = _of(gpu.used_bytes, gpu.memory_bytes, 2**30, "GiB")
    temperature = _NONE if gpu.temperature_c is None else f"{gpu.temperature_c} C"
    return [str(gpu.number), load, memory, temperature, _of(gpu.power_w, gpu.power_limit_w, 1, "W"), gpu.name or _NONE]


def _cores(sample: Sample) -> Iterator[RenderableType]:
    loads, memory = sample.core_loads, f"memory {gib(sample.memory_used_bytes)} of {gib(sample.memory_bytes)}"
    yield _heading(f"CPU: {sum(loads):.1f} of {len(loads)} cores busy, {memory}")
    yield _note(f"each core, in tenths: {''.join(str(min(int(10 * load), 9)) for load in loads)}")


def _processes(sample: Sample) -> Iterator[RenderableType]:
    if sample.processes:
        header = ["process", "user", "cores", "memory", *["GPU", "GPU memory"] * bool(sample.gpus), "command"]
        yield Text()
        yield _table(header, [_process(each, sample.gpus) for each in sample.processes[:_MOST_PROCESSES]])
    if len(sample.processes) > _MOST_PROCESSES:
        yield _note(f"and {len(sample.processes) - _MOST_PROCESSES} more")


def _process(process: Process, gpus: Sequence[Gpu]) -> list[str]:
    cores = _NONE if process.cores is None else f"{process.cores:.1f}"
    used = {gpu.number: each.memory_bytes for gpu in gpus for each in gpu.processes if each.pid == process.pid}
    on_gpus = [",".join(map(str, used)) or _NONE, _gib(sum(filter(None, used.values())) or None)] if gpus else []
    memory = _gib(process.memory_bytes)
    return [str(process.pid), process.user or _NONE, cores, memory, *on_gpus, process.command or _NONE]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of figures, then a text, which is cut at the right edge."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for name in header:
        table.add_column(name, justify="left" if name == header[-1] else "right", overflow="fold")
    for row in rows:
        text = Text(row[-1], no_wrap=True, overflow="crop")  # no str, in which rich would look for markup
        table.add_row(*map(Text, row[:-1]), text)
    return table


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _note(text: str) -> Padding:
    return Padding.indent(Text(text), 2)


def _gib(num_bytes: int | None) -> str:
    return _NONE if num_bytes is None else gib(num_bytes)


def _of(used: float | None, total: float | None, unit: float, name: str) -> str:
    if used is None:
        return _NONE
    return f"{used / unit:.0f} {name}" if total is None else f"{used / unit:.0f}/{total / unit:.0f} {name}"
