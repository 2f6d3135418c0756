"""The look that all charts share."""

import logging

from matplotlib.axes import Axes

INK = "#3d3d3d"
BLUE = "#2a6f97"
RED = "#d1495b"
ORANGE = "#e08e45"
GREY = "#b8b8b8"
_GRID = "#e6e6e6"

# On its first use matplotlib lists the machine's fonts, and logs that it does. That is no news to users.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def style(axes: Axes, title: str, xlabel: str = "", *, grid: str = "y") -> None:
    """Give axes a title, a label, a grid behind the data (`grid`: "y" or "both"), and no frame."""
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(xlabel, color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis=grid, color=_GRID)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
