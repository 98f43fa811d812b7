"""Styles of figures: sizes, fonts and colours."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib import colormaps, rc_context, rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from stableair.literals import PlotStyle

LINES: list[Any] = [  # line styles, to distinguish curves without colours
    "-", "--", "-.", ":", (0, (9, 2)), (0, (5, 1.5, 1, 1.5, 1, 1.5)),
]  # fmt: skip
DARK, LIGHT = "#1e2129", "#e2e4e9"  # background and text of the dark style
TRUETYPE: Any = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}  # submission systems of journals refuse Type 3 fonts, matplotlib's default
COMMON: Any = TRUETYPE | {
    "legend.fontsize": "small",
    "legend.title_fontsize": "small",
    "lines.linewidth": 1.8,
    "errorbar.capsize": 3,
}
STYLES: dict[PlotStyle, Any] = {
    "screen": COMMON,
    "paper": COMMON | {  # a column of an IEEE journal
        "figure.figsize": (3.5, 2.4), "font.size": 8, "font.family": "STIXGeneral", "mathtext.fontset": "stix",
        "axes.linewidth": 0.6, "patch.linewidth": 0.5, "lines.linewidth": 1.1, "lines.markersize": 3.5,
        "grid.linewidth": 0.4, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5,
        "ytick.major.size": 2.5, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.handlelength": 2.6,
        "axes.titlesize": 8, "legend.fontsize": 7, "errorbar.capsize": 2,
        "legend.borderpad": 0.3, "legend.labelspacing": 0.3,
    },
    "dark": COMMON | {
        "figure.facecolor": DARK, "axes.facecolor": DARK, "legend.facecolor": DARK, "grid.color": "#8a8f9c",
        "legend.edgecolor": "#5a5f6b", "axes.prop_cycle": cycler(color=colormaps["Set2"](range(8))),
        **dict.fromkeys(
            ["text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"], LIGHT
        ),
    },
}  # fmt: skip


@contextmanager
def drawing_style(style: PlotStyle = "screen", size: Sequence[float] | None = None) -> Iterator[None]:
    """Apply a style to the figures that are created within the `with` block.

    Args:
        style: Name of the style.
        size: Width and height in inches. None: the size of the style.
    """
    with rc_context(STYLES[style] | ({} if size is None else {"figure.figsize": tuple(size)})):
        yield


def new_figure(panels: int = 1) -> Figure:
    """Return an empty figure for a number of panels side by side.

    Its size is matplotlib's `figure.figsize`. The default size becomes wider with the number of panels.
    """
    width, height = rcParams["figure.figsize"]
    return Figure(
        figsize=(width if has_chosen_size() else width * (0.75 * panels + 0.25), height), layout="constrained"
    )


def has_chosen_size() -> bool:
    """Return whether the size of new figures differs from matplotlib's default."""
    return list(rcParams["figure.figsize"]) != list(rcParamsDefault["figure.figsize"])


def may_grow(figure: Figure) -> bool:
    """Return whether a figure may become higher for its texts: its size is that of a style, not chosen by the user."""
    sizes = [style.get("figure.figsize", rcParamsDefault["figure.figsize"]) for style in STYLES.values()]
    return len(figure.axes) == 1 and tuple(rcParams["figure.figsize"]) in map(tuple, sizes)


def root_figure(axes: Axes) -> Figure:
    """Return the figure that contains some axes; for axes in a subfigure, the outermost figure."""
    figure = axes.figure.figure
    assert isinstance(figure, Figure), "the figure of a figure or subfigure is the outermost one"
    return figure


def categorical_colour(i: int) -> str:
    """Return the colour of the i-th line, for lines without an order."""
    colours = rcParams["axes.prop_cycle"].by_key()["color"]
    return to_hex(colours[i % len(colours)])


def sequential_colours(n: int) -> list[str]:
    """Return colours for n ordered lines with a contrast of at least 2.6 to 1 on a light or dark background."""
    low, high = (0.4, 1.0) if to_rgb(rcParams["text.color"])[0] > 0.5 else (0.0, 0.65)
    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(low, high, n))]
