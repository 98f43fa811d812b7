"""Legends, which are within the axes if they cover no line, and else below the axes."""

import math
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from stableair.results.styles import has_chosen_size, may_grow, root_figure
from stableair.results.wrapping import LINE, fit, font_size, text_width

MAX_ENTRIES = 6  # a legend with more entries is below the axes
MAX_NAME = 40  # characters; with a longer name the legend is below the axes
MARGIN = 3  # frame and distance to the edge of the figure, on both sides together, in font sizes
MAX_SHARE = 0.5  # of the height of a picture of fixed size; in a higher legend, long names are shortened


def add_legend(axes: Axes, title: str | None = None) -> None:
    """Add a legend within the axes, or below them if it would be too large or would cover a line.

    Args:
        axes: The axes with the lines. If their figure has other axes, the legend is always within.
        title: Title of the legend.
    """
    figure = root_figure(axes)
    handles, names = axes.get_legend_handles_labels()
    if not any(names):
        return
    style: dict[str, Any] = {
        "title": title,
        "handlelength": rcParams["legend.handlelength"] if has_chosen_size() else 3.5,
    }
    if len(figure.axes) > 1 or (len(names) <= MAX_ENTRIES and max(map(len, names)) <= MAX_NAME):
        box = axes.get_window_extent()
        width, height = (72 * length / figure.dpi for length in (box.width, box.height))
        within = axes.legend(handles, _fitted(names, width, height * MAX_SHARE, style), **style)
        if len(figure.axes) > 1 or not _covers_a_line(figure, within, axes):
            return
        within.remove()
    _add_below(figure, handles, names, style)


def _fitted(names: list[str], width: float, height: float, style: dict[str, Any]) -> list[str]:
    """Return the names with line breaks or shortened, for a legend of one column; width and height are in points."""
    size = rcParams["legend.fontsize"]
    return fit(names, width - font_size(size) * (MARGIN + _handle(style)), height, size)


def _handle(style: dict[str, Any]) -> float:
    """Return the width of a handle and of the space around it, in font sizes."""
    return float(style["handlelength"] + rcParams["legend.handletextpad"])


def _add_below(figure: Figure, handles: list[Any], names: list[str], style: dict[str, Any]) -> None:
    """Add a legend in columns below the axes, and make the figure higher for it unless the user has chosen its size."""
    width, height = (72 * length for length in figure.get_size_inches())
    texts = _fitted(names, width, math.inf if may_grow(figure) else height * MAX_SHARE, style)
    em = font_size(rcParams["legend.fontsize"])
    column = max(text_width(text, em) for text in texts) + em * _handle(style)
    gap, margin = em * rcParams["legend.columnspacing"], em * MARGIN
    columns = max(1, min(len(names), int((width - margin + gap) / (column + gap))))
    figure.legend(handles, texts, **style, loc="outside lower center", ncols=columns)
    if may_grow(figure):
        lines = math.ceil(sum(len(text.splitlines()) for text in texts) / columns)
        figure.set_figheight((height + rcParams["font.size"] * LINE * lines) / 72)


def _covers_a_line(figure: Figure, legend: Legend, axes: Axes) -> bool:
    """Return whether a legend within the axes covers a line or an error bar, even at its best position."""
    figure.draw_without_rendering()  # computes the position
    box = legend.get_window_extent()
    bars = [bars for bars in axes.collections if isinstance(bars, LineCollection)]
    drawn = [(line.get_path(), line.get_transform()) for line in axes.lines]
    drawn += [(path, each.get_transform()) for each in bars for path in each.get_paths()]
    return any(transform.transform_path(path).intersects_bbox(box, filled=False) for path, transform in drawn)
