"""A sample as text: tables where the terminal is wide enough, else one figure a line. In ASCII; colours are styles."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.monitor.report import gib, wrapped
from unisono.monitor.sample import Sample, Wrapper

_NONE = "-"
_MOST_COMMAND = 60


@dataclass
class Block:
    """A part of the display: a heading, a table, notes.

    Attributes:
        rows: of cells, as many as in `header`.
        marked: the rows that are shown in red.
        notes: lines below.
    """

    heading: str
    header: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def blocks_of(sample: Sample) -> list[Block]:
    """Return the parts of the display."""
    blocks = []
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
        slow = {i for i, gpu in enumerate(sample.gpus) if gpu.slowdown}
        notes = [f"GPU {gpu.number} runs at a low clock: {gpu.slowdown}" for gpu in sample.gpus if gpu.slowdown]
        blocks.append(Block("GPUs", header, rows, slow, notes))
    loads = sample.core_loads
    memory = f"memory {gib(sample.memory_used_bytes)} of {gib(sample.memory_bytes)}"
    busy = "".join(str(min(int(10 * load), 9)) for load in loads)
    blocks.append(
        Block(
            f"CPU: {sum(loads):.1f} of {len(loads)} cores busy, {memory}",
            notes=[f"each core, in tenths: {busy}"] if loads else [],
        )
    )
    blocks += [_wrapper(wrapper) for wrapper in sample.wrappers]
    if not sample.wrappers:
        blocks.append(Block("no wrapper of this user has taken a step yet"))
    if sample.problems:
        blocks.append(Block("not read:", notes=list(sample.problems)))
    return blocks


def _wrapper(wrapper: Wrapper) -> Block:
    heading = f"process {wrapper.pid}: {wrapper.module}, {wrapper.engine}"
    step = f"{wrapper.steps:,} steps, {_time(wrapper.step_s)} each"
    if wrapper.has_stopped:
        step = f"{wrapper.steps:,} steps, none for {wrapper.age_s:.0f} s"
    block = Block(f"{heading}; {step}", ["replica", "device", "rows", "share", "forward", "backward", "wait", ""])
    for i, replica in enumerate(wrapper.replicas):
        device = replica.device if replica.gpu is None else f"{replica.device} (GPU {replica.gpu})"
        is_slowest = wrapper.straggler is not None and wrapper.straggler.replica == replica.number
        block.rows.append(
            [
                str(replica.number),
                device,
                str(replica.rows or _NONE),
                _percent(replica.share),
                _time(replica.forward_s),
                _time(replica.backward_s),
                _time(replica.wait_s),
                "<- slowest" if is_slowest else "",
            ]
        )
        if is_slowest:
            block.marked.add(i)
    if wrapper.straggler is not None:
        cause = wrapper.straggler.cause or "these figures do not tell why"
        block.notes.append(f"the others wait for replica {wrapper.straggler.replica}: {cause}")
    if wrapper.command:
        cut = len(wrapper.command) > _MOST_COMMAND
        block.notes.append(f"{wrapper.command[: _MOST_COMMAND - 3]}..." if cut else wrapper.command)
    return block


def styled_lines(sample: Sample, width: int | None) -> list[tuple[str, str]]:
    """Return the lines of the display, each with its style ("" for none).

    Args:
        width: columns of the terminal; None: any.
    """
    lines: list[tuple[str, str]] = []
    for block in blocks_of(sample):
        lines.append((block.heading, "bold"))
        lines += _table(block, width)
        lines += [(f"  {note}", "") for note in block.notes]
        lines.append(("", ""))
    return [(part, style) for line, style in lines[:-1] for part in wrapped([line], width).split("\n")]


def fitted(lines: list[tuple[str, str]], height: int) -> list[tuple[str, str]]:
    """Return the lines of a display that fit on a terminal of so many; the last one says how many are left out."""
    if len(lines) <= height:
        return lines
    kept = max(height - 1, 0)
    return [*lines[:kept], (f"... {len(lines) - kept} more", "bold")]


def _table(block: Block, width: int | None) -> list[tuple[str, str]]:
    """Return a table with a column for each figure; where that is too wide, a paragraph for each row."""
    if not block.rows:
        return []
    cells = [list(block.header), *block.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(block.header))]
    styles = ["dim", *("red" if i in block.marked else "" for i, _ in enumerate(block.rows))]
    if width is None or sum(widths) + 2 * len(widths) <= width:
        return [
            ("  " + "  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)).rstrip(), style)
            for row, style in zip(cells, styles, strict=True)
        ]
    return [
        (
            "  "
            + ", ".join(f"{name} {cell}".strip() for name, cell in zip(block.header, row, strict=True) if cell != ""),
            style,
        )
        for row, style in zip(block.rows, styles[1:], strict=True)
    ]


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
