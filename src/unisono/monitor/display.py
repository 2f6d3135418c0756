"""A sample as tables, by rich: on a terminal with colours, elsewhere as plain text. In ASCII."""

from collections.abc import Collection, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unisono.monitor.report import gib
from unisono.monitor.sample import Sample, Wrapper
from unisono.monitor.stragglers import ReplicaFigures

_NONE = "-"
_MOST_COMMAND = 60


def shown(sample: Sample) -> Group:
    """Return the display of a sample: GPUs, cores, and the wrappers that train; those that have stopped come last."""
    parts: list[RenderableType] = []
    if sample.gpus:
        header = ["GPU", "load", "memory", "temp", "power", "name"]
        rows = [
            [
                str(gpu.number),
                _percent(gpu.load),
                _of(gpu.used_bytes, gpu.memory_bytes, 2**30, "GiB"),
                _NONE if gpu.temperature_c is None else f"{gpu.temperature_c} C",
                _of(gpu.power_w, gpu.power_limit_w, 1, "W"),
                gpu.name or _NONE,
            ]
            for gpu in sample.gpus
        ]
        slow = [gpu for gpu in sample.gpus if gpu.slowdown]
        parts += [_heading("GPUs"), _table(header, rows, {gpu.number for gpu in slow})]
        parts += [_note(f"GPU {gpu.number} runs at a low clock: {gpu.slowdown}") for gpu in slow]
        parts.append(Text())
    loads = sample.core_loads
    memory = f"memory {gib(sample.memory_used_bytes)} of {gib(sample.memory_bytes)}"
    parts.append(_heading(f"CPU: {sum(loads):.1f} of {len(loads)} cores busy, {memory}"))
    if loads:
        parts.append(_note(f"each core, in tenths: {''.join(str(min(int(10 * load), 9)) for load in loads)}"))
    for wrapper in sample.wrappers:
        if not wrapper.has_stopped:
            parts += [Text(), *_training(wrapper)]
    stopped = [f"process {w.pid}, {w.module} ({w.age_s:.0f} s)" for w in sample.wrappers if w.has_stopped]
    if stopped:
        parts += [Text(), _heading(f"no steps now, and for how long: {'; '.join(stopped)}")]
    if not sample.wrappers:
        whose = "this user" if sample.pid is None else f"process {sample.pid}"
        parts += [Text(), _heading(f"no wrapper of {whose} has taken a step yet")]
    if sample.notes:
        parts += [Text(), *map(_heading, sample.notes)]
    return Group(*parts)


def _training(wrapper: Wrapper) -> Iterator[RenderableType]:
    step = f"{wrapper.steps:,} steps, {_time(wrapper.step_s)} each"
    yield _heading(f"process {wrapper.pid}: {wrapper.module}, {wrapper.engine}; {step}")
    slowest = wrapper.straggler.replica if wrapper.straggler is not None else None
    header = ["replica", "device", "rows", "share", "forward", "backward", "wait", ""]
    rows = [[*_cells(replica), "<- slowest" if replica.number == slowest else ""] for replica in wrapper.replicas]
    yield _table(header, rows, {i for i, replica in enumerate(wrapper.replicas) if replica.number == slowest})
    if wrapper.straggler is not None:
        cause = wrapper.straggler.cause or "these figures do not tell why"
        yield _note(f"the others wait for replica {slowest}: {cause}")
    if wrapper.command:
        cut = len(wrapper.command) > _MOST_COMMAND
        yield _note(f"{wrapper.command[: _MOST_COMMAND - 3]}..." if cut else wrapper.command)


def _cells(replica: ReplicaFigures) -> list[str]:
    device = replica.device if replica.gpu is None else f"{replica.device} (GPU {replica.gpu})"
    times = (replica.forward_s, replica.backward_s, replica.wait_s)
    return [str(replica.number), device, str(replica.rows or _NONE), _percent(replica.share), *map(_time, times)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: Collection[int]) -> Table:
    """Return a table of figures, whose cells wrap where it is too wide; the `marked` rows are red."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for name in header:
        table.add_column(name, justify="right", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style="red" if number in marked else "")
    return table


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _note(text: str) -> Padding:
    return Padding.indent(Text(text), 2)


def _percent(part: float | None) -> str:
    return _NONE if part is None else f"{part:.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"


def _of(used: float | None, total: float | None, unit: float, name: str) -> str:
    if used is None:
        return _NONE
    return f"{used / unit:.0f} {name}" if total is None else f"{used / unit:.0f}/{total / unit:.0f} {name}"
