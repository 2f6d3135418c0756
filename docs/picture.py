"""Draw docs/step.svg, the picture of the README: a batch goes through two devices; below it the timeline of the step.

    python docs/picture.py

The times are made up: `unisono` draws those of a real step with `model.profile()`. The picture moves with CSS, so it
needs no script, follows the reader's light or dark scheme, and stands still for those who ask for less motion.
"""

from pathlib import Path

PATH = Path(__file__).parent / "step.svg"
SECONDS = 9
NUM_ROWS = 8
WIDTH, HEIGHT = 760, 300

# The phases of the step: name, begin and end in percent of the time, and the lanes that are in it.
PHASES = [
    ("split", 8, 18, (0, 1)),
    ("forward", 18, 38, (0, 1)),
    ("join", 38, 47, (0, 1)),
    ("loss", 47, 53, (0,)),
    ("backward", 53, 78, (0, 1)),
    ("sum", 78, 88, (0, 1)),
    ("optimizer", 88, 97, (0,)),
]
BATCH_X, DEVICE_X, OUTPUT_X = 34, 330, 626
ROW_WIDTH, ROW_HEIGHT = 100, 9
DEVICE_Y = (26, 104)
LANE_Y = (216, 250)
LANE_X, LANE_WIDTH = 84, 650

STYLE = f"""
    text {{ font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }}
    .in {{ fill: #fff; text-anchor: middle }}
    .small, .in {{ font-size: 11px }}
    .middle {{ text-anchor: middle }}
    .box {{ fill: none; stroke: #8c959f; stroke-width: 1.5 }}
    .d0 {{ fill: #2563c9 }} .d1 {{ fill: #c2570c }} .lane {{ fill: #8c959f; opacity: .18 }}
    .move {{ animation: {SECONDS}s infinite }}
    .head {{ stroke: #cf222e; stroke-width: 2; animation: head {SECONDS}s linear infinite }}
    @media (prefers-color-scheme: dark) {{
      text {{ fill: #e6edf3 }} .in {{ fill: #fff }} .d0 {{ fill: #3f7fe0 }} .d1 {{ fill: #d4701f }}
    }}
    @media (prefers-reduced-motion: reduce) {{
      .move, .head {{ animation: none }}
      .head, .busy, .gradient {{ opacity: 0 }}
    }}
    @keyframes head {{ from {{ transform: translateX(0) }} to {{ transform: translateX({LANE_WIDTH}px) }} }}
"""


def keyframes(name: str, frames: dict[float, str]) -> str:
    return f"    @keyframes {name} {{ " + " ".join(f"{at}% {{ {what} }}" for at, what in frames.items()) + " }\n"


def row_of_batch(row: int) -> tuple[str, str]:
    """Return the keyframes and the rectangle of one row: batch, device, output, and back to the device as gradient."""
    device, place = divmod(row, NUM_ROWS // 2)
    start_y = 42 + row * 15
    device_y = DEVICE_Y[device] + 22 + place * (ROW_HEIGHT + 2)
    at_device = f"transform: translate({DEVICE_X - BATCH_X + 20}px, {device_y - start_y}px)"
    at_output = f"transform: translate({OUTPUT_X - BATCH_X}px, 0)"
    frames = {
        0: "transform: none; opacity: 1",
        8: "transform: none",
        18: at_device,
        38: at_device,
        47: at_output,
        53: f"{at_output}; opacity: 1",
        60: f"{at_device}; opacity: .55",
        78: f"{at_device}; opacity: .55",
        84: f"{at_device}; opacity: 0",
        97: "transform: none; opacity: 0",
        100: "transform: none; opacity: 1",
    }
    rectangle = (
        f'  <rect class="move d{device}" style="animation-name: row{row}" x="{BATCH_X}" y="{start_y}" '
        f'width="{ROW_WIDTH}" height="{ROW_HEIGHT}" rx="2"/>\n'
    )
    return keyframes(f"row{row}", frames), rectangle


def picture() -> str:
    """Return the SVG."""
    style, body = STYLE, ""
    for x, said in ((BATCH_X, "batch: 8 rows"), (OUTPUT_X, "output: 8 rows")):
        body += f'  <text x="{x + ROW_WIDTH / 2}" y="26" class="middle">{said}</text>\n'
    for device, y in enumerate(DEVICE_Y):
        body += f'  <rect class="box" x="{DEVICE_X}" y="{y}" width="140" height="72" rx="6"/>\n'
        body += f'  <text x="{DEVICE_X + 10}" y="{y + 16}" class="small">replica {device} on device {device}</text>\n'
        body += (
            f'  <rect class="move busy" style="animation-name: busy; fill: none; stroke-width: 3" stroke="'
            f'{("#2563c9", "#c2570c")[device]}" x="{DEVICE_X}" y="{y}" width="140" height="72" rx="6"/>\n'
        )
    shown, hidden = "opacity: 1", "opacity: 0"
    style += keyframes(
        "busy",
        {
            0: hidden,
            17: hidden,
            18: shown,
            37: shown,
            38: hidden,
            59: hidden,
            60: shown,
            77: shown,
            78: hidden,
            100: hidden,
        },
    )
    for row in range(NUM_ROWS):
        frames, rectangle = row_of_batch(row)
        style, body = style + frames, body + rectangle
    down = f"transform: translateY({DEVICE_Y[0] - DEVICE_Y[1]}px)"
    style += keyframes(
        "gradient",
        {
            0: hidden,
            77: hidden,
            78: shown,
            87: f"{down}; opacity: 1",
            88: f"{down}; opacity: 0",
            100: f"{down}; opacity: 0",
        },
    )
    x, y = DEVICE_X + 20, DEVICE_Y[1] + 30
    body += '  <g class="move gradient" style="animation-name: gradient">'
    body += f'<rect class="d1" x="{x}" y="{y}" width="100" height="24" rx="4"/>'
    body += f'<text class="in" x="{x + 50}" y="{y + 16}">gradients</text></g>\n'
    for lane, y in enumerate(LANE_Y):
        body += f'  <text x="14" y="{y + 18}">device {lane}</text>\n'
        body += f'  <rect class="lane" x="{LANE_X}" y="{y}" width="{LANE_WIDTH}" height="26" rx="3"/>\n'
    for name, begin, end, lanes in PHASES:
        x, width = LANE_X + LANE_WIDTH * begin / 100, LANE_WIDTH * (end - begin) / 100
        for lane in lanes:
            body += (
                f'  <rect class="d{lane}" x="{x + 1:g}" y="{LANE_Y[lane]}" width="{width - 2:g}" height="26" rx="3"/>\n'
            )
            body += f'  <text class="in" x="{x + width / 2:g}" y="{LANE_Y[lane] + 17}">{name}</text>\n'
    body += f'  <line class="head" x1="{LANE_X}" x2="{LANE_X}" y1="208" y2="284"/>\n'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        "  <title>A training step on two devices: the batch is split, both replicas compute, the outputs are joined; "
        "in backward both compute again, and their gradients are summed</title>\n"
        f"  <style>{style}  </style>\n{body}</svg>\n"
    )


if __name__ == "__main__":
    PATH.write_text(picture(), encoding="utf-8")
