"""Labels, scales and ticks of the axes of plots."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from matplotlib import rcParams

from stableair.results.resources import RESOURCES
from stableair.results.styles import may_grow, root_figure
from stableair.results.wrapping import LINE, fit, font_size, text_width, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRIC_LABELS = {
    "test/accuracy": "test accuracy",
    "test/loss": "test loss",
    "test/accuracy_clients": "test accuracy, the clients' norm statistics",
    "test/accuracy_recalibrated": "test accuracy, norm statistics recalibrated",
    "test/accuracy_batch": "test accuracy, norm statistics of the test batch",
    "test/accuracy_averaged": "test accuracy of the averaged model",
    "test/client_accuracy_mean": "test accuracy, mean over the clients",
    "test/client_accuracy_p10": "test accuracy, 10th percentile of the clients",
    "test/client_accuracy_worst": "test accuracy, worst client",
    "validation/accuracy": "validation accuracy",
    "validation/loss": "validation loss",
    "train/loss": "training loss",
    "channel/snr_db": "SNR in dB",
    "gradient/norm": "norm of the clean gradient",
    "clip/fraction": "share of entries the receiver changed",
    "seconds": "seconds of computing per round",
} | {name: resource.label for name, resource in RESOURCES.items()}
ARGUMENT_LABELS = {
    "receiver.C": "clipping threshold $C$",
    "receiver.max_norm": "largest norm",
    "noise.tau": r"interference scale $\tau$",
    "noise.alpha": r"tail index $\alpha$",
    "clients": "number of clients",
    "local_epochs": "local epochs",
    "batch_size": "batch size",
    "lr": "learning rate",
}
MAX_VALUE_TICKS = 8  # a logarithmic axis has a tick at every value, up to this number of values
MAX_TICK_LINES = 3  # lines of a horizontal tick label
MAX_ROTATED = 0.4  # width of a rotated tick label, as a share of the axes; wider labels are replaced by numbers
MAX_SHARE = 0.5  # of the height of axes of fixed size; a higher list of numbered texts is shortened
LOG_ENDS = 5  # an axis is logarithmic if the longest line ends at more than this multiple of the shortest
LOG_RANGE = 10  # an axis may be logarithmic if the largest value is at least this multiple of the smallest


def label_metric(axes: "Axes", metric: str) -> None:
    """Label the vertical axis with a metric."""
    axes.set_ylabel(METRIC_LABELS.get(metric, metric))


def label_rounds(axes: "Axes") -> None:
    """Set up a horizontal axis for the communication rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("communication round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def mark_divergence(axes: "Axes", x: float, y: float, colour: Any) -> None:
    """Draw a cross at the last finite round of a run that diverged."""
    axes.plot(x, y, "x", color=colour, markersize=9, markeredgewidth=2.5)


def label_resource(axes: "Axes", name: str, ends: Sequence[float]) -> None:
    """Set up a horizontal axis for the total of a resource.

    The axis is logarithmic if the lines end far apart.

    Args:
        axes: The axes.
        name: Name of the resource, such as "energy".
        ends: The total at the end of each line.
    """
    axes.set_xlabel(METRIC_LABELS[name])
    if end_far_apart(ends):
        axes.set_xscale("log")


def end_far_apart(ends: Sequence[float]) -> bool:
    """Return whether the shortest line would be hard to see on a linear axis.

    Args:
        ends: The total at the end of each line.

    >>> end_far_apart([100, 600]), end_far_apart([100, 500]), end_far_apart([0, 500])
    (True, False, False)
    """
    return 0 < LOG_ENDS * min(ends, default=0) < max(ends, default=0)


def label_argument(axes: "Axes", name: str, values: Sequence[float] | Sequence[str]) -> None:
    """Set up a horizontal axis for an argument: numbers on a linear or logarithmic scale, or strings at 0, 1, 2, ....

    Args:
        axes: The axes.
        name: Name of the argument, such as "receiver.C".
        values: The values on the axis; numbers in ascending order.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    axes.set_xlabel(ARGUMENT_LABELS.get(name, name))
    numbers = [value for value in values if not isinstance(value, str)]
    if not numbers:
        axes.set_xlim(-0.5, len(values) - 0.5)
        _label_strings(axes, list(map(str, values)))
    elif is_logarithmic(numbers):
        axes.set_xscale("log")
        if len(numbers) <= MAX_VALUE_TICKS:
            axes.xaxis.set_major_locator(FixedLocator(numbers))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
    elif all(isinstance(value, int) for value in numbers):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _label_strings(axes: "Axes", texts: list[str]) -> None:
    """Label the positions 0, 1, 2, ... with texts.

    The labels are horizontal, with line breaks, if they fit; else rotated. Long texts are replaced by numbers, which
    the label of the axis explains.
    """
    figure, size = root_figure(axes), rcParams["xtick.labelsize"]
    width = 72 * axes.get_window_extent().width / figure.dpi  # in points
    ticks, between = range(len(texts)), width / len(texts) - font_size(size)
    wrapped = [wrap(text, between, size, indent="", break_words=False) for text in texts]
    if all(text_width(text, size) <= between and text.count("\n") < MAX_TICK_LINES for text in wrapped):
        axes.set_xticks(ticks, wrapped)
    elif max(text_width(text, size) for text in texts) <= MAX_ROTATED * width:
        axes.set_xticks(ticks, texts, rotation=25, ha="right")
    else:
        size, grows = font_size(rcParams["axes.labelsize"]), may_grow(figure)
        height = math.inf if grows else 72 * axes.get_window_extent().height / figure.dpi * MAX_SHARE
        numbered = fit([f"{i}: {text}" for i, text in enumerate(texts, start=1)], width, height, size)
        axes.set_xticks(ticks, [str(i + 1) for i in ticks])
        axes.set_xlabel("\n".join([axes.get_xlabel(), *numbered]), multialignment="left")
        if grows:
            lines = sum(len(text.splitlines()) for text in numbered)
            figure.set_figheight(figure.get_figheight() + size / 72 * LINE * lines)


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether ascending values are spaced by equal factors rather than by equal differences.

    >>> is_logarithmic([0.01, 0.1, 1, 10]), is_logarithmic([10, 20, 50, 100, 200])
    (True, True)
    >>> is_logarithmic([0.05, 0.1, 0.2, 0.3]), is_logarithmic(range(1, 100)), is_logarithmic([0, 1, 100])
    (False, False, False)
    """
    low, high = values[0], values[-1]
    if low <= 0 or high < LOG_RANGE * low:
        return False
    steps = [b - a for a, b in pairwise(values)]
    ratios = [math.log(b / a) for a, b in pairwise(values)]
    return pstdev(ratios) / fmean(ratios) <= pstdev(steps) / fmean(steps)


def set_log_metric(axes: "Axes", low: float, high: float) -> None:
    """Make the vertical axis logarithmic for values from `low` to `high`."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    if 0 < low < high < 1000 * low:  # a small range: ticks at 0.5, 1 and 2 instead of powers of ten
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else range(1, 10)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
