"""Legends, which are within the axes if they cover no line, and else below the axes."""

import math
import textwrap
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from stableair.results.styles import has_chosen_size, root_figure

MAX_ENTRIES = 6  # a legend with more entries is below the axes
MAX_NAME = 40  # characters; with a longer name the legend is below the axes
LEGEND_WIDTH = 90  # characters per line of a legend below the axes
# Width of a character and of a legend handle, and height of a text line: inches per point of the font size.
CHARACTER, HANDLE, LINE = 0.0075, 0.07, 0.02


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
    style: dict[str, Any] = {"title": title, "handlelength": None if has_chosen_size() else 3.5}
    if len(figure.axes) > 1 or (len(names) <= MAX_ENTRIES and max(map(len, names)) <= MAX_NAME):
        within = axes.legend(**style)
        if len(figure.axes) > 1 or not _covers_a_line(figure, within, axes):
            return
        within.remove()
    _add_below(figure, handles, names, style)


def _add_below(figure: Figure, handles: list[Any], names: list[str], style: dict[str, Any]) -> None:
    """Add a legend in columns below the axes, and enlarge a figure of matplotlib's default size for it."""
    texts = [textwrap.fill(name, LEGEND_WIDTH, subsequent_indent="   ") for name in names]
    lines = [line for text in texts for line in text.splitlines()]
    points = rcParams["font.size"]
    width = points * (HANDLE + CHARACTER * max(map(len, lines)))  # of a column, in inches
    columns = max(1, min(len(names), int(figure.get_figwidth() / width)))
    figure.legend(handles, texts, **style, loc="outside lower center", ncols=columns)
    if not has_chosen_size():
        figure.set_figheight(figure.get_figheight() + points * LINE * math.ceil(len(lines) / columns))
        figure.set_figwidth(max(figure.get_figwidth(), width))


def _covers_a_line(figure: Figure, legend: Legend, axes: Axes) -> bool:
    """Return whether a legend within the axes covers a line, even at its best position."""
    figure.draw_without_rendering()  # computes the position
    box = legend.get_window_extent()
    return any(box.count_contains(axes.transData.transform(line.get_xydata())) for line in axes.lines)
