"""Point plots: a metric of recorded runs against an argument."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from stableair.literals import Band
from stableair.results.arguments import Lines, is_number
from stableair.results.axes import label_argument
from stableair.results.curves import Text, line_looks
from stableair.results.resources import RESOURCES
from stableair.results.run import Run
from stableair.results.statistics import mean_and_band


def draw_points(axes: Axes, lines: Lines, x: str, metric: str, text: Text, band: Band) -> None:
    """Draw a point with an error bar for each value of an argument, and a horizontal line for each reference.

    Args:
        axes: The axes.
        lines: The runs by the value of the argument.
        x: Name of the argument.
        metric: Name of the metric.
        text: Function (name of a line, its runs) -> text in the legend.
        band: Kind of the error bars, and of the bands around the references.
    """
    members = {label: [run for runs in line.values() for run in runs] for label, line in lines.lines.items()}
    looks = line_looks(members | lines.references, x)
    values = list(dict.fromkeys(value for line in lines.lines.values() for value in line))
    numeric = is_number(values[0])
    for label, line, shift in zip(lines.lines, lines.lines.values(), _shifts(len(lines.lines)), strict=True):
        mean, half_width = mean_points(line, metric, band)
        bars = half_width if max(map(len, line.values())) > 1 else None
        look = looks[label] if numeric else looks[label] | {"linestyle": "none"}
        positions = list(line) if numeric else [values.index(value) + shift for value in line]
        axes.plot(positions, mean, "o", label=text(label, members[label]), **look)
        axes.errorbar(positions, mean, bars, fmt="none", ecolor=look["color"])
    for label, runs in lines.references.items():
        mean, half_width = (each.item() for each in mean_points({None: runs}, metric, band))
        colour = looks[label]["color"]
        axes.axhline(mean, label=text(label, runs), **looks[label] | {"linestyle": "--"})
        if len(runs) > 1:
            axes.axhspan(mean - half_width, mean + half_width, color=colour, alpha=0.12, linewidth=0)
    label_argument(axes, x, sorted(values) if numeric else values)


def _shifts(lines: int) -> list[float]:
    """Return the distance of the points of each line to their position on an axis of strings, so that all are visible.

    >>> _shifts(1), _shifts(2), _shifts(3)
    ([0.0], [-0.05, 0.05], [-0.1, 0.0, 0.1])
    """
    step = min(0.1, 0.6 / lines)
    return [step * (i - (lines - 1) / 2) for i in range(lines)]


def mean_points(line: dict[Any, list[Run]], metric: str, band: Band = "std") -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over the runs of each value, and half the width of its band: (values,) each."""
    points = [mean_and_band([settled(run, metric) for run in runs], band) for runs in line.values()]
    return np.array([mean for mean, _ in points]), np.array([half_width for _, half_width in points])


def settled(run: Run, metric: str) -> float:
    """Return the mean of a metric over the last ten rounds, at most half of the run; for a resource, its total.

    For a run that diverged, the result is 0 for an accuracy and NaN for any other metric.
    """
    if metric in RESOURCES:
        return float(run[metric][-1])
    value = run.mean_of_last(metric, run.settled_rounds)
    missing = 0.0 if run.diverged is not None and "accuracy" in metric else math.nan
    return missing if value is None else value
