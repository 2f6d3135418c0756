"""Draw the pictures of the pages, docs/*.svg: a training step, shares, dimensions, lists, and `unisono watch`.

    python docs/pictures.py

Shapes, rows and sums in them are computed by the library, so a picture shows what it does. Made up are the times of the
step (`unisono` draws those of a real one with `model.profile()`) and the figures of `unisono watch`, whose display is
that of the command. No picture needs a script: they follow the reader's light or dark scheme with CSS, and the one that
moves stands still for those who ask for less motion. Those on a column of text are narrow, to be read on a phone.
"""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

import unisono
from unisono.monitor.display import shown
from unisono.monitor.nvml import Gpu, GpuProcess
from unisono.monitor.sample import Process, Sample

FOLDER = Path(__file__).parent
SANS = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'

# A training step

SECONDS = 9
NUM_ROWS = 8
WIDTH, HEIGHT = 420, 264

# The phases of the step: begin and end in percent of the time, and the lanes that are in it.
PHASES = {
    "split": (3, 12, (0, 1)),
    "forward": (12, 32, (0, 1)),
    "join": (32, 41, (0, 1)),
    "loss": (41, 49, (0,)),
    "backward": (49, 71, (0, 1)),
    "sum": (71, 80, (0, 1)),
    "optimizer": (80, 98, (0,)),
}
BATCH_X, DEVICE_X, OUTPUT_X = 14, 155, 336
ROW_WIDTH, ROW_HEIGHT = 70, 9
DEVICE_WIDTH = 110
DEVICE_Y = (26, 104)
LANE_Y = (194, 226)
LANE_X, LANE_WIDTH = 64, 344

STYLE = f"""
    text {{ font: 12px {SANS}; fill: #1f2328 }}
    .in {{ fill: #fff }} .small, .in {{ font-size: 11px }}
    .middle, .in {{ text-anchor: middle }}
    .box, .busy {{ fill: none; stroke: #8c959f; stroke-width: 1.5 }}
    .d0 {{ fill: #2563c9 }} .d1 {{ fill: #bf560c }} .lane {{ fill: #8c959f; opacity: .18 }}
    .busy {{ stroke-width: 3 }} .b0 {{ stroke: #2563c9 }} .b1 {{ stroke: #bf560c }}
    .move {{ animation: {SECONDS}s infinite }}
    .head {{ stroke: #cf222e; stroke-width: 2; animation: head {SECONDS}s linear infinite }}
    @media (prefers-color-scheme: dark) {{
      text {{ fill: #e6edf3 }} .in {{ fill: #fff }} .d0 {{ fill: #3470d4 }}
    }}
    @media (prefers-reduced-motion: reduce) {{
      .move, .head {{ animation: none }}
      .head, .busy, .gradient {{ opacity: 0 }}
    }}
    @keyframes head {{ from {{ transform: translateX(0) }} to {{ transform: translateX({LANE_WIDTH}px) }} }}
"""


def keyframes(name: str, frames: Mapping[int, str]) -> str:
    return f"    @keyframes {name} {{ " + " ".join(f"{at}% {{ {what} }}" for at, what in frames.items()) + " }\n"


def row_of_batch(row: int, device: int, place: int) -> tuple[str, str]:
    """Return the keyframes and the rectangle of one row: batch, device, output, and back to the device as gradient."""
    start_y = 42 + row * 15
    device_y = DEVICE_Y[device] + 22 + place * (ROW_HEIGHT + 2)
    inside = DEVICE_X + (DEVICE_WIDTH - ROW_WIDTH) // 2
    at_device = f"transform: translate({inside - BATCH_X}px, {device_y - start_y}px)"
    at_output = f"transform: translate({OUTPUT_X - BATCH_X}px, 0)"
    begin = {name: begin for name, (begin, _, _) in PHASES.items()}
    end = {name: end for name, (_, end, _) in PHASES.items()}
    frames = {
        0: "transform: none; opacity: 1",
        begin["split"]: "transform: none",
        end["split"]: at_device,
        begin["join"]: at_device,
        end["join"]: at_output,
        begin["backward"]: f"{at_output}; opacity: 1",
        begin["backward"] + 7: f"{at_device}; opacity: .55",
        end["backward"]: f"{at_device}; opacity: .55",
        end["backward"] + 6: f"{at_device}; opacity: 0",
        end["optimizer"]: "transform: none; opacity: 0",
        100: "transform: none; opacity: 1",
    }
    rectangle = (
        f'  <rect class="move d{device}" style="animation-name: row{row}" x="{BATCH_X}" y="{start_y}" '
        f'width="{ROW_WIDTH}" height="{ROW_HEIGHT}" rx="2"/>\n'
    )
    return keyframes(f"row{row}", frames), rectangle


def while_in(shown: str, hidden: str, *spans: tuple[int, int]) -> dict[int, str]:
    """Return the frames of something that is shown in these spans of the time only, in percent."""
    frames = {0: hidden, 100: hidden}
    for begin, end in spans:
        frames |= {begin: hidden, begin + 1: shown, end - 1: shown, end: hidden}
    return dict(sorted(frames.items()))


# What the picture of a step says on Chinese pages; docs/terms.md has the words.
CHINESE = {
    "batch: 8 rows": "batch 8 个样本",
    "output: 8 rows": "输出 8 个样本",
    "replica": "副本",
    "device": "设备",
    "gradients": "梯度",
    "split": "分发",
    "forward": "前向",
    "join": "收集",
    "loss": "损失",
    "backward": "反向",
    "sum": "累加",
    "optimizer": "优化器",
}
CHINESE_TITLE = "两个设备上的一步训练：batch 切分，两个副本计算，输出收集；反向传播时两者都计算梯度，梯度累加"  # noqa: RUF001


def step(words: Mapping[str, str] | None = None, title: str = "") -> str:
    """Draw a batch that goes through two devices, and below it the step's timeline; `words` are of another language."""
    style, body, words = STYLE, "", words or {}
    for x, said in ((BATCH_X, "batch: 8 rows"), (OUTPUT_X, "output: 8 rows")):
        said = words.get(said, said)
        body += f'  <text x="{x + ROW_WIDTH / 2}" y="30" class="small middle">{said}</text>\n'
    for device, y in enumerate(DEVICE_Y):
        frame = f'x="{DEVICE_X}" y="{y}" width="{DEVICE_WIDTH}" height="72" rx="6"'
        body += f'  <rect class="box" {frame}/>\n'
        body += (
            f'  <text x="{DEVICE_X + 8}" y="{y + 16}" class="small">{words.get("replica", "replica")} {device}</text>\n'
        )
        body += f'  <rect class="move busy b{device}" style="animation-name: busy" {frame}/>\n'
    computing = [PHASES[name][:2] for name in ("forward", "backward")]
    style += keyframes("busy", while_in("opacity: 1", "opacity: 0", *computing))
    places = [(device, i) for device, size in enumerate(rows_of_devices(NUM_ROWS, "chunk")) for i in range(size)]
    for row, (device, place) in enumerate(places):
        frames, rectangle = row_of_batch(row, device, place)
        style, body = style + frames, body + rectangle
    begin, end, _ = PHASES["sum"]
    down = f"transform: translateY({DEVICE_Y[0] - DEVICE_Y[1]}px)"
    moving = {0: "opacity: 0", begin: "opacity: 0", begin + 1: "opacity: 1", end - 1: f"{down}; opacity: 1"}
    style += keyframes("gradient", moving | dict.fromkeys((end, 100), f"{down}; opacity: 0"))
    x, y = DEVICE_X + 15, DEVICE_Y[1] + 30
    body += '  <g class="move gradient" style="animation-name: gradient">'
    body += f'<rect class="d1" x="{x}" y="{y}" width="80" height="24" rx="4"/>'
    body += f'<text class="in" x="{x + 40}" y="{y + 16}">{words.get("gradients", "gradients")}</text></g>\n'
    for lane, y in enumerate(LANE_Y):
        body += f'  <text x="6" y="{y + 17}" class="small">{words.get("device", "device")} {lane}</text>\n'
        body += f'  <rect class="lane" x="{LANE_X}" y="{y}" width="{LANE_WIDTH}" height="26" rx="3"/>\n'
    for name, (begin, end, lanes) in PHASES.items():
        left, width = LANE_X + LANE_WIDTH * begin / 100, LANE_WIDTH * (end - begin) / 100
        for lane in lanes:
            place = f'x="{left + 0.5:g}" y="{LANE_Y[lane]}" width="{width - 1:g}"'
            body += f'  <rect class="d{lane}" {place} height="26" rx="3"/>\n'
            body += (
                f'  <text class="in" x="{left + width / 2:g}" y="{LANE_Y[lane] + 17}">{words.get(name, name)}</text>\n'
            )
    body += f'  <line class="head" x1="{LANE_X}" x2="{LANE_X}" y1="188" y2="258"/>\n'
    said = (
        "A training step on two devices: the batch is split, both replicas compute, the outputs are joined; in "
        "backward both compute gradients, which are summed"
    )
    return drawing(WIDTH, HEIGHT, title or said, body, style, scale=1.25)


# Still pictures

STILL = f"""
    text {{ font: 13px {SANS}; fill: #1f2328 }}
    .mono {{ font-family: {MONO}; font-size: 12px }}
    .small, .dim {{ fill: #57606a }} .small {{ font-size: 12px }}
    .title, .split {{ font-weight: 600 }}
    .middle, .in {{ text-anchor: middle }} .end {{ text-anchor: end }}
    .box, .arrow {{ fill: none; stroke: #8c959f; stroke-width: 1.5 }}
    .d0 {{ fill: #2563c9 }} .d1 {{ fill: #bf560c }} .all {{ fill: #6a737d }} .in {{ fill: #fff }}
    @media (prefers-color-scheme: dark) {{
      text {{ fill: #e6edf3 }} .in {{ fill: #fff }} .small, .dim {{ fill: #9da7b3 }}
      .d0 {{ fill: #3470d4 }}
    }}
"""
WIDE = 360  # so that the letters keep their size on a phone
CELL, GAP = 9, 1  # of a tensor: one number
TWO = ["cpu", "cpu"]


def drawing(width: int, height: int, title: str, body: str, style: str = STILL, scale: float = 1) -> str:
    """Return a picture; a page that is wide enough shows it in this scale."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width * scale:g}" '
        f'height="{height * scale:g}" role="img">\n'
        f"  <title>{escape(title)}</title>\n  <style>{style}  </style>\n{body}</svg>\n"
    )


def text(x: float, y: float, said: str, kind: str = "") -> str:
    return f'  <text x="{x:g}" y="{y:g}" class="{kind}">{escape(said)}</text>\n'


def shape(x: float, y: float, sizes: Sequence[int], split: int | None, kind: str = "middle", name: str = "") -> str:
    """Write a tensor's shape, the size along the dimension that is split in bold."""
    said = [f'<tspan class="split">{size}</tspan>' if i == split else f"{size}" for i, size in enumerate(sizes)]
    comma = "," if len(said) == 1 else ""
    return f'  <text x="{x:g}" y="{y:g}" class="mono {kind}">{name}({", ".join(said)}{comma})</text>\n'


def tensor(x: float, y: float, columns: int, owners: Sequence[str]) -> str:
    """Draw a tensor around x, from y down: a line of cells for each row, in the colour of the row's replica."""
    step, left = CELL + GAP, x - (columns * (CELL + GAP) - GAP) / 2
    line = f"h{CELL}v{CELL}h-{CELL}zm{step} 0" * columns
    return "".join(
        f'  <path class="{owner}" d="M{left:g} {y + row * step:g}{line}"/>\n' for row, owner in enumerate(owners)
    )


def height_of(num_rows: int) -> int:
    return num_rows * (CELL + GAP) - GAP


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Draw an arrow to the right."""
    head = f"M{x2 - 6:g} {y2 - 4:g}L{x2:g} {y2:g}L{x2 - 6:g} {y2 + 4:g}"
    middle = (x1 + x2) / 2
    curve = f"C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    return f'  <path class="arrow" d="M{x1:g} {y1:g}{curve}{head}"/>\n'


def box(x: float, y: float, width: float, height: float, title: str) -> str:
    """Draw a frame with a title above it."""
    frame = f'  <rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>\n'
    return text(x + width / 2, y - 6, title, "middle") + frame


def line_across(y: float) -> str:
    return f'  <path class="arrow" d="M12 {y:g}H{WIDE - 12}"/>\n'


# Shares


def rows_of_devices(num_rows: int, shares: Sequence[float] | str) -> list[int]:
    """Return how many rows of a batch each of two devices gets."""
    model = unisono.DataParallel(nn.Identity(), TWO, shares=shares)
    shards, _ = model.scatter((torch.zeros(num_rows, 1),), {}, TWO)
    sizes = [len(rows) for (rows,) in shards]
    return sizes + [0] * (len(TWO) - len(sizes))


def shares() -> str:
    """Draw one batch, split without shares and with them, and how smaller batches are split."""
    num_rows, columns = 9, 4
    splits: tuple[tuple[str, str, str | list[int]], ...] = (
        ("without shares", "title", "chunk"),
        ("shares=[2, 1]", "mono title", [2, 1]),
    )
    body = ""
    for left, (title, kind, value) in zip((0, WIDE // 2), splits, strict=True):
        sizes = rows_of_devices(num_rows, value)
        owners = [f"d{device}" for device, size in enumerate(sizes) for _ in range(size)]
        body += text(left + 90, 18, title, f"middle {kind}")
        body += text(left + 36, 46, f"{num_rows} rows", "middle") + tensor(left + 36, 56, columns, owners)
        y = 52
        for device, size in enumerate(sizes):
            high = height_of(size) + 14
            body += box(left + 98, y, 72, high, f"device {device}: {size}")
            body += tensor(left + 134, y + 7, columns, [f"d{device}"] * size)
            begin = 56 + (CELL + GAP) * sum(sizes[:device]) + height_of(size) / 2
            body += arrow(left + 60, begin, left + 94, y + high / 2)
            y += high + 28
    y = 226
    body += line_across(y - 20)
    for i, size in enumerate((6, 4, 1)):
        body += text(12, y + 20 * i, f"{size} row{'s' * (size > 1)}")
        for left, (_, _, value) in zip((0, WIDE // 2), splits, strict=True):
            body += text(left + 134, y + 20 * i, " + ".join(map(str, rows_of_devices(size, value))), "middle")
    said = "A batch of 9 rows on two devices: 5 and 4 rows without shares, 6 and 3 with shares=[2, 1]"
    return drawing(WIDE, y + 52, said, body)


# Dimensions


class Tagger(nn.Module):
    """A model with a mask for all rows, a state like that of an LSTM, and a loss over tokens."""

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        words = words * mask
        tokens = (words > 0).sum()
        state = words.new_zeros(1, len(words), 4)
        return {"scores": words, "state": state, "tokens": tokens, "loss": words.sum() / tokens}


COLUMNS_X = (62, 180, 298)  # the middles of three columns


class Column(NamedTuple):
    """What a column shows of a value: the value, and the replica to which each of its rows belongs."""

    value: torch.Tensor
    owners: Sequence[str]


def columns_of(whole: torch.Tensor, parts: Sequence[torch.Tensor], split: int | None) -> tuple[Column, list[Column]]:
    """Return the columns of a value and of its parts; what is not split has one row, which belongs to all."""
    if split is None:
        return Column(whole, ["all"]), [Column(part, ["all"]) for part in parts]
    of_parts = [Column(part, [f"d{i}"] * part.shape[split]) for i, part in enumerate(parts)]
    return Column(whole, [owner for part in of_parts for owner in part.owners]), of_parts


def name_and_rule(y: float, name: str, rule: str) -> str:
    """Write a name on the left, and on the right the argument that is about it."""
    return text(12, y, name, "mono title") + text(
        WIDE - 12, y, rule or "no argument", "mono end" if rule else "small end"
    )


def band(y: float, said: tuple[str, str], columns: Sequence[Column], split: int | None, arrow_x: float) -> str:
    """Draw a tensor in three columns, from y down, below its name and its rule."""
    body = name_and_rule(y + 12, *said)
    highest = max(height_of(len(column.owners)) for column in columns)
    for x, (value, owners) in zip(COLUMNS_X, columns, strict=True):
        body += tensor(x, y + 22, value.shape[-1], owners)
        body += shape(x, y + highest + 37, value.shape, split)
    return body + arrow(arrow_x - 20, y + 22 + highest / 2, arrow_x + 20, y + 22 + highest / 2)


def number_band(y: float, said: tuple[str, str], columns: Sequence[Column], below: str) -> str:
    """Draw 0-dim outputs of two replicas, and what they become: their numbers, and how the last one is computed."""
    body = name_and_rule(y + 12, *said)
    for x, owner, (value, _) in zip(COLUMNS_X, ("d0", "d1", "all"), columns, strict=True):
        body += f'  <rect class="{owner}" x="{x - 24}" y="{y + 20:g}" width="48" height="22" rx="4"/>\n'
        body += text(x, y + 36, f"{value.item():.3g}" if value.is_floating_point() else f"{value.item()}", "in")
    return body + arrow(219, y + 31, 259, y + 31) + text(WIDE - 12, y + 58, below, "mono end")


def heading(y: float, title: str, columns: Sequence[str]) -> str:
    """Write the title of a part, a line, and the names of the three columns."""
    names = "".join(text(x, y + 26, name, "middle small") for x, name in zip(COLUMNS_X, columns, strict=True))
    return text(12, y, title, "title") + line_across(y + 8) + names


def dims() -> str:
    """Draw what becomes of each input and output of a model for which rules are given."""
    net, scalars = Tagger(), {"tokens": "sum", "loss": "mean:tokens"}
    model = unisono.DataParallel(net, TWO, in_dims={"mask": None}, out_dims={"state": 1}, scalars=scalars)
    words = torch.zeros(5, 7)
    words[:3, :4], words[3:, :2] = 2.0, 4.0  # 12 tokens and 4: their mean is not that of the two means
    inputs = {"words": words, "mask": torch.ones(7)}
    _, shards = model.scatter((), inputs, TWO)
    outputs = [net(**shard) for shard in shards]
    joined = model.gather(outputs, "cpu")

    body, y = heading(18, "Inputs are split", ["you pass", "replica 0", "replica 1"]), 56
    for name, split, rule in (("words", 0, ""), ("mask", None, 'in_dims={"mask": None}')):
        whole, parts = columns_of(inputs[name], [shard[name] for shard in shards], split)
        body += band(y, (name, rule), [whole, *parts], split, 121)
        y += height_of(len(whole.owners)) + 54
    y += 18
    body, y = body + heading(y, "Outputs are joined", ["replica 0", "replica 1", "you get"]), y + 38
    for name, split, rule in (("scores", 0, ""), ("state", 1, 'out_dims={"state": 1}')):
        whole, parts = columns_of(joined[name], [output[name] for output in outputs], split)
        body += band(y, (name, rule), [*parts, whole], split, 239)
        y += height_of(len(whole.owners)) + 54
    tokens = [output["tokens"].item() for output in outputs]
    weighted = [f"{n} * {output['loss']:.3g}" for n, output in zip(tokens, outputs, strict=True)]
    sums = {"tokens": " + ".join(map(str, tokens)), "loss": f"({' + '.join(weighted)}) / {sum(tokens)}"}
    for name, how in scalars.items():
        columns = [Column(each[name], []) for each in (*outputs, joined)]
        rule = f'scalars={{"{name}": "{how}"}}'
        body += number_band(y, (name, rule), columns, sums[name])
        y += 74
    said = (
        "Two replicas get 3 and 2 of the 5 rows of words, and the whole mask. Their scores are joined along dimension "
        "0, their state along dimension 1, their tokens are added, and their losses become the mean over all tokens"
    )
    return drawing(WIDE, y, said, body)


# Lists


class Entry(NamedTuple):
    """A tensor in a list."""

    name: str
    value: torch.Tensor
    owners: Sequence[str]  # the replica of each of its rows; one of the whole tensor if it is an entry of a SampleList


def drawn_list(x: float, y: float, title: str, found: Sequence[Entry]) -> tuple[str, float]:
    """Draw the tensors of a list in a frame, below each other; return it and the y of its lower edge."""
    body, top = "", y
    y += 9
    for name, value, owners in found:
        if value.dim() == 3:  # a picture of channels, height and width
            high, wide = value.shape[1:]
            body += (
                f'  <rect class="{owners[0]}" x="{x + 25 - wide / 2:g}" y="{y:g}" width="{wide}" height="{high}"/>\n'
            )
        else:
            high = height_of(len(owners))
            body += tensor(x + 25, y, value[0].numel(), owners)
        split = None if value.dim() == 3 else 0
        body += shape(x + 53, y + high / 2 + 4, value.shape, split, "", f"{name} " if name else "")
        y += high + 9
    return box(x, top, 146, y - top, title) + body, y


def lists() -> str:
    """Draw a list of tensors, each of which is split, and a SampleList, each entry of which is a row."""
    names, targets = ("boxes", "labels"), [torch.zeros(4, 4), torch.zeros(4)]
    pictures = [torch.zeros(3, *size) for size in ((20, 30), (26, 20), (16, 32), (28, 24))]
    body, y = "", 18.0

    shards = unisono.scatter(targets, TWO)
    owners = [f"d{i}" for i, shard in enumerate(shards) for _ in shard[0]]
    whole = [Entry(name, value, owners) for name, value in zip(names, targets, strict=True)]
    parts = [
        [Entry(name, value, [f"d{i}"] * len(value)) for name, value in zip(names, shard, strict=True)]
        for i, shard in enumerate(shards)
    ]
    drawn, y = both(y, "A list: each tensor in it is split", "[boxes, labels]", whole, parts)
    body += drawn

    entries = unisono.scatter(unisono.SampleList(pictures), TWO)
    parts = [[Entry("", value, [f"d{i}"]) for value in shard] for i, shard in enumerate(entries)]
    whole = [entry for part in parts for entry in part]  # each is on one replica, as it is
    drawn, y = both(y + 30, "A SampleList: each entry is a row", "SampleList(pictures)", whole, parts)
    said = "Of a list of two tensors each replica gets two, with half the rows; of a SampleList of four, two entries"
    return drawing(WIDE, round(y) + 8, said, body + drawn)


def both(y: float, title: str, name: str, whole: list[Entry], parts: list[list[Entry]]) -> tuple[str, float]:
    """Draw a list on the left and what each replica gets of it on the right; return it and where it ends."""
    body = text(12, y, title, "title") + line_across(y + 8)
    left, low = drawn_list(12, y + 36, name, whole)
    middle, y = (y + 36 + low) / 2, y + 36
    for i, part in enumerate(parts):
        drawn, end = drawn_list(202, y, f"replica {i}", part)
        body += drawn + arrow(162, middle, 198, (y + end) / 2)
        y = end + 28
    return body + left, max(low, y - 28)


# `unisono watch`

GIB = 2**30
CHARACTER, LINE = 7.2, 17  # of the terminal, in pixels
COLUMNS = 63


def sample() -> Sample:
    """Return made-up figures: two GPUs, of which the second waits for the first."""
    gpus = [
        Gpu(i, "Tesla T4", None, 15 * GIB, used * GIB, load, temperature, power, 70.0, (GpuProcess(2114, used * GIB),))
        for i, used, load, temperature, power in ((0, 11, 0.97, 71, 68.0), (1, 6, 0.46, 58, 41.0))
    ]
    processes = (
        Process(2114, "ann", 1.9, int(5.1 * GIB), "python fit.py"),
        Process(873, "ben", 0.6, int(0.8 * GIB), "python etl.py"),
    )
    return Sample(0.0, tuple(gpus), None, (0.98, 0.91, 0.55, 0.02), int(7.4 * GIB), 29 * GIB, processes)


def watch() -> str:
    """Draw what `unisono watch` shows on a terminal."""
    console = Console(width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="standard")
    lines = console.render_lines(shown(sample()), pad=False)
    body, width, height = "", round(COLUMNS * CHARACTER) + 16, 44 + LINE * len(lines)
    body += f'  <rect class="box" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="6"/>\n'
    body += text(width / 2, 19, "unisono watch", "middle small") + f'  <path class="arrow" d="M1 28H{width - 1}"/>\n'
    for number, segments in enumerate(lines):
        column = 0
        for segment in segments:
            for word in re.finditer(r"\S+(?: \S+)*", segment.text):  # wider gaps are between columns
                style = segment.style
                kind = " title" if style and style.bold else " dim" if style and style.dim else ""
                x = 8 + (column + word.start()) * CHARACTER
                body += (
                    f'  <text class="mono{kind}" x="{x:.1f}" y="{46 + LINE * number}" '
                    f'textLength="{len(word[0]) * CHARACTER:.1f}">{escape(word[0])}</text>\n'
                )
            column += len(segment.text)
    said = "unisono watch: two GPUs, the load of the cores, and the processes that use them"
    return drawing(width, height, said, body)


FILES = {
    "step": step,
    "step.zh-CN": lambda: step(CHINESE, CHINESE_TITLE),
    "shares": shares,
    "dims": dims,
    "lists": lists,
    "watch": watch,
}


if __name__ == "__main__":
    for name, draw in FILES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
