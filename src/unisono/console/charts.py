"""The look that all charts share. It needs matplotlib."""

import io
import logging
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#3d3d3d"
BLUE = "#2a6f97"
RED = "#d1495b"
ORANGE = "#e08e45"
GREY = "#b8b8b8"
_GRID = "#e6e6e6"
_CAPTION_LETTERS = 15.5  # to an inch

# On its first use matplotlib lists the machine's fonts, and logs that it does. That is no news to users.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def new(width: float, height: float, title: str, caption: str = "") -> Figure:
    """Return an empty figure of so many inches, with a title above and small letters below."""
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=INK, parse_math=False)  # "$" is a "$"
    figure.supxlabel(textwrap.fill(caption, round(_CAPTION_LETTERS * width)), fontsize=8, color=INK, parse_math=False)
    return figure


def style(axes: Axes, title: str, xlabel: str = "", ylabel: str = "", *, grid: str = "y") -> None:
    """Give axes a title, labels, a grid behind the data (`grid`: "y" or "both"), and no frame."""
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis=grid, color=_GRID)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def png(figure: Figure) -> bytes:
    """Return the picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
