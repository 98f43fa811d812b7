"""Legends: within the axes if they cover no line, else below them."""

import math
import textwrap
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from stableair.results.styles import has_chosen_size, root_figure

MAX_WITHIN = 6  # lines; a longer legend is below the axes
SHORT_NAME = 40  # characters; longer names put the legend below the axes
LEGEND_WIDTH = 90  # characters per line of a legend below the axes
CHARACTER, HANDLE, LINE = 0.0075, 0.07, 0.02  # width of a character and of a line's sample, height of a line: inches/pt


def add_legend(axes: Axes, title: str | None = None) -> None:
    """Add a legend: within the axes if its names are few and short and it covers no line, else below.

    Args:
        axes: The axes with the lines. If its figure has other axes, the legend is always within.
        title: Title of the legend.
    """
    figure = root_figure(axes)
    handles, names = axes.get_legend_handles_labels()
    if not any(names):
        return
    style: dict[str, Any] = {"title": title, "handlelength": None if has_chosen_size() else 3.5}
    if len(figure.axes) > 1 or (len(names) <= MAX_WITHIN and max(map(len, names)) <= SHORT_NAME):
        within = axes.legend(**style)
        if len(figure.axes) > 1 or not _covers_a_line(figure, within, axes):
            return
        within.remove()
    _add_below(figure, handles, names, style)


def _add_below(figure: Figure, handles: list[Any], names: list[str], style: dict[str, Any]) -> None:
    """Add a legend below the axes, in columns; a figure of matplotlib's default size grows."""
    texts = [textwrap.fill(name, LEGEND_WIDTH, subsequent_indent="   ") for name in names]
    lines = [line for text in texts for line in text.splitlines()]
    points = rcParams["font.size"]
    width = points * (HANDLE + CHARACTER * max(map(len, lines)))  # of a column
    columns = max(1, min(len(names), int(figure.get_figwidth() / width)))
    figure.legend(handles, texts, **style, loc="outside lower center", ncols=columns)
    if not has_chosen_size():
        figure.set_figheight(figure.get_figheight() + points * LINE * math.ceil(len(lines) / columns))
        figure.set_figwidth(max(figure.get_figwidth(), width))


def _covers_a_line(figure: Figure, legend: Legend, axes: Axes) -> bool:
    """Whether the legend, at the best position within the axes, lies on a line."""
    figure.draw_without_rendering()  # computes the position
    box = legend.get_window_extent()
    return any(box.count_contains(axes.transData.transform(line.get_xydata())) for line in axes.lines)
