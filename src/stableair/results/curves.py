"""Curves: a metric of recorded runs against the rounds or the total of a resource."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stableair.errors import InputError
from stableair.literals import Band
from stableair.results.arguments import Groups, arguments, is_number, only_numeric_argument
from stableair.results.axes import label_metric, label_resource, label_rounds, mark_divergence, set_log_metric
from stableair.results.legends import add_legend
from stableair.results.resources import ROUNDING
from stableair.results.run import Run
from stableair.results.statistics import mean_and_band
from stableair.results.styles import LINES, categorical_colour, new_figure, sequential_colours

BANDS: dict[Band, str] = {
    "std": "one standard deviation",
    "sem": "one standard error",
    "ci95": "95 % confidence interval",
}
log = logging.getLogger("stableair")

MAX_POINTS = 1000  # largest number of points of a curve along a resource
MIN_ORDERED = 3  # from this number of values on, the order of the colours shows the order of the values

Text = Callable[[str, list[Run]], str]  # (name of a group, its runs) -> text in the legend
Look = dict[str, Any]  # colour and line style


def described(name: str, runs: list[Run]) -> str:
    """Return the legend's text for a group: its name, the number of seeds, and the rounds in which runs diverged."""
    seeds = {run.settings["seed"] for run in runs}
    diverged = sorted({run.diverged + 1 for run in runs if run.diverged is not None})
    name += f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
    return name + (f", diverged at round {', '.join(map(str, diverged))}" if diverged else "")


def curves(groups: Groups, metric: str = "test/accuracy", title: str = "", log: bool = False) -> Figure:
    """Draw one line per group: the mean over its runs, with a band of one standard deviation.

    A cross marks the last finite round of a run that diverged.

    Args:
        groups: The runs of each group by its name, as from `group`.
        metric: Name of a recorded metric.
        title: Title of the figure.
        log: Whether the metric has a logarithmic axis.

    Returns:
        The matplotlib figure.
    """
    return panels({"": groups}, metric, title, log)


def panels(
    families: dict[str, Groups],
    metric: str = "test/accuracy",
    title: str = "",
    log: bool = False,
    text: Text = described,
    band: Band = "std",
    note: bool = True,
) -> Figure:
    """Draw the curves of several families of groups side by side, one panel per family.

    Groups of the same name have the same colour and line style in all panels.

    Args:
        families: Groups of runs by the title of their panel.
        metric: Name of a recorded metric.
        title: Title of the figure.
        log: Whether the metric has a logarithmic axis.
        text: Function (name of a group, its runs) -> text in the legend.
        band: Kind of the band around the mean of a group.
        note: Whether the legend explains the band.

    Returns:
        The matplotlib figure.
    """
    figure = new_figure(len(families))
    row = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    all_groups = [item for groups in families.values() for item in groups.items()]
    looks = line_looks(dict(reversed(all_groups)) if len(families) > 1 else dict(all_groups))
    for axes, (family, groups) in zip(row, families.items(), strict=True):
        draw_curves(axes, groups, metric, text, band, looks)
        axes.set_title(family or title)
    if len(families) > 1:
        figure.suptitle(title)
    finish(row, metric, log, f"band: {BANDS[band]}" if note else None)
    return figure


def draw_curves(
    axes: Axes, groups: Groups, metric: str, text: Text, band: Band, looks: dict[str, Look], x: str = "round"
) -> None:
    """Draw the mean and the band of each group, and a cross for each run that diverged.

    A curve without points is left out with a warning.

    Args:
        axes: The axes to draw into.
        groups: The runs of each group by its name.
        metric: Name of a recorded metric.
        text: Function (name of a group, its runs) -> text in the legend.
        band: Kind of the band.
        looks: Colour and line style of each group.
        x: "round", or the name of a resource.
    """
    ends = []
    for name, runs in groups.items():
        curve = mean_curve(runs, metric, band, x)
        if not len(curve.x):
            log.warning("left out: %s: its seeds have no total of %s in common", name, x)
            continue
        colour, marker = looks[name]["color"], "o" if len(curve.x) == 1 else None
        axes.plot(curve.x, curve.mean, label=text(name, runs), marker=marker, **looks[name])
        if len(runs) > 1:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
        for point in curve.crosses:
            mark_divergence(axes, *point, colour)
        ends.append(float(curve.x[-1]))
    if x != "round":
        label_resource(axes, x, ends)
        return
    label_rounds(axes)
    axes.set_xlim(left=1 - min(0.9, 0.05 * max(ends)), right=1.9 if max(ends) == 1 else None)  # there is no round 0


def finish(row: Iterable[Axes], metric: str, log: bool, note: str | None) -> None:
    """Label and scale the axis of the metric, and add the grid and the legends.

    Args:
        row: The panels, which share the axis of the metric.
        metric: Name of the metric.
        log: Whether its axis is logarithmic. The axis is also logarithmic for losses and norms with a wide range, since
            a linear axis would flatten most of the lines.
        note: Explanation of the bands or bars, for the legend.
    """
    first, *_ = row = list(row)
    label_metric(first, metric)
    low, high = first.dataLim.intervaly
    if log or (metric.endswith(("/loss", "/norm")) and 0 < low < high / 100):
        set_log_metric(first, low, high)
    for axes in row:
        axes.grid(alpha=0.3)
        add_legend(axes, note if axes.collections else None)


def line_looks(groups: Groups, x: str = "round") -> dict[str, Look]:
    """Return the colour and the line style of each group.

    If the groups differ in one number only, they have sequential colours in the order of this number. Up to six such
    groups also have different dashes.

    Args:
        groups: The runs of each group by its name.
        x: The argument on the horizontal axis. Differences in this argument are ignored.
    """
    name = only_numeric_argument(groups, x)
    values = {group: arguments(runs[0]).get(name) for group, runs in groups.items()} if name else {}
    ordered = sorted((value, group) for group, value in values.items() if is_number(value))
    if len(ordered) < MIN_ORDERED or len({value for value, _ in ordered}) < len(ordered):
        ordered = []
    dashes = LINES if len(ordered) <= len(LINES) else ["-"] * len(ordered)  # dashes also show in grey
    looks = {
        group: {"color": colour, "linestyle": dash}
        for (_, group), colour, dash in zip(ordered, sequential_colours(len(ordered)), dashes, strict=False)
    }
    colours = [rcParams["text.color"], *map(categorical_colour, (3, 1, 6))] if ordered else []
    others = [group for group in groups if group not in looks]
    for i, group in enumerate(others):
        colour = colours[i] if i < len(colours) else categorical_colour(i)
        dash = LINES[1:][(i + len(ordered) - 1) % len(LINES[1:])] if ordered else LINES[i % len(LINES)]
        looks[group] = {"color": colour, "linestyle": dash}
    return looks


class Curve(NamedTuple):
    """The mean of a metric over several runs, with a band, against the rounds or the total of a resource."""

    x: np.ndarray  # (points,)
    mean: np.ndarray  # (points,), NaN where no run has a value
    half_width: np.ndarray  # (points,), half the width of the band
    crosses: list[tuple[float, float]]  # the last finite point of each run that diverged

    @property
    def low(self) -> np.ndarray:
        """The lower edge of the band."""
        return self.mean - self.half_width

    @property
    def high(self) -> np.ndarray:
        """The upper edge of the band."""
        return self.mean + self.half_width


def mean_curve(runs: list[Run], metric: str, band: Band = "std", x: str = "round") -> Curve:
    """Return the mean of a metric over several runs, with its band.

    Against a resource the curve consists of steps: at each total, a run has the metric of its last round within this
    total. The curve ends at the smallest final total of a run; runs that diverged do not shorten it. If a run ends
    before another one completes its first round, the curve has no points.

    Args:
        runs: Runs that differ in the seed only.
        metric: Name of the metric.
        band: Kind of the band.
        x: "round", or the name of a resource.

    Returns:
        The points of the curve.

    Raises:
        InputError: No run has a complete round (`no-rounds`), or a run did not record the resource
            (`resource-not-recorded`).
    """
    rows = [np.array([math.nan if value is None else value for value in run[metric]], dtype=float) for run in runs]
    longest = max(map(len, rows))
    if not longest:
        raise InputError(f"{runs[0].folder}: no round is complete yet", code="no-rounds", folder=runs[0].folder)
    if x != "round":
        return _along_resource(runs, rows, x, band)
    mean, half_width = mean_and_band([np.append(row, np.full(longest - len(row), np.nan)) for row in rows], band)
    diverged = [run.diverged for run in runs if run.diverged]
    crosses = [(float(k), float(mean[k - 1])) for k in diverged]
    return Curve(np.arange(longest) + 1, mean, half_width, crosses)  # plots start at round 1, records at round 0


def _along_resource(runs: list[Run], rows: list[np.ndarray], x: str, band: Band) -> Curve:
    """Return the curve of a metric against the total of a resource; `rows` are the values of the metric in each run."""
    used = [np.array(run[x])[: run.diverged] for run in runs]
    if not any(map(len, used)):  # all runs diverged in their first round
        return Curve(np.zeros(1), np.full(1, np.nan), np.zeros(1), [])
    start = max(t[0] for t in used if len(t))
    end = min((t[-1] for t, run in zip(used, runs, strict=True) if run.diverged is None), default=math.inf)
    if start > end * (1 + ROUNDING):
        nothing = np.zeros(0)
        return Curve(nothing, nothing, nothing, [])
    grid = _grid([t for t in used if len(t)], start, end)
    mean, half_width = mean_and_band([_held(row, t, grid) for row, t in zip(rows, used, strict=True)], band)
    ends = [t[-1] for t, run in zip(used, runs, strict=True) if run.diverged]
    crosses = [(float(end), float(mean[max(0, np.searchsorted(grid, end, "right") - 1)])) for end in ends]
    return Curve(np.repeat(grid, 2)[1:], np.repeat(mean, 2)[:-1], np.repeat(half_width, 2)[:-1], crosses)  # steps


def _grid(used: list[np.ndarray], start: float, end: float) -> np.ndarray:
    """Return the totals of all runs in ascending order, from `start` up to `end`: (points,)."""
    totals = np.unique(np.concatenate(used))
    grid = totals[(totals >= start) & (totals <= max(start, end))]
    return grid[np.unique(np.linspace(0, len(grid) - 1, MAX_POINTS).round().astype(int))]


def _held(values: np.ndarray, used: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the value of a run at each total of the grid, NaN before its first and after its last round: (points,)."""
    if not len(used):
        return np.full(len(grid), np.nan)
    within = grid * (1 + ROUNDING)
    last = np.searchsorted(used, within, "right") - 1
    return np.where((last >= 0) & (grid <= used[-1] * (1 + ROUNDING)), values[last], np.nan)
