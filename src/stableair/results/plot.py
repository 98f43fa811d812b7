"""Pictures of recorded runs: metrics over the rounds, and the label distribution over the clients."""

import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from stableair.errors import InputError
from stableair.files import write_whole
from stableair.results.outputs import METADATA, check_output
from stableair.results.run import Run, group, log_left_out, runs_from, with_metric
from stableair.results.statistics import mean_and_std
from stableair.validation import as_path, typed

MAX_COLOURED_CLASSES = 20  # with more classes, colours are too similar
LINES: list[Any] = [  # line styles, so that curves can be distinguished without colours
    "-", "--", "-.", ":", (0, (9, 2)), (0, (5, 1.5, 1, 1.5, 1, 1.5)),
]  # fmt: skip
SHORT_NAME = 40  # characters; longer names put the legend outside the axes
LEGEND_WIDTH = 90  # characters per line of a legend outside the axes
AXIS_LABELS = {
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
    "seconds": "seconds per round",
}


@typed
def plot(
    runs: Run | str | Path | Iterable[Run | str | Path],
    metric: str = "test/accuracy",
    out: str | Path | None = None,
    log: bool = False,
    *,
    force: bool = False,
) -> Figure:
    """Draw a metric of recorded runs. `stableair plot` calls this function.

    Runs that differ only in the seed become one line with a band.

    Args:
        runs: Runs, run folders, or folders that contain run folders.
        metric: Name of a recorded metric.
        out: File to write; its extension sets the format. None: write no file.
        log: Whether the metric has a logarithmic axis.
        force: Whether to replace a file that stableair has not made.

    Raises:
        InputError: No run can be read, no run has the metric, or `out` cannot be written.
    """
    if out is not None:
        check_picture(out, force)
    every_run, left_out = runs_from(runs)
    shown, others = with_metric(every_run, metric)
    log_left_out([*left_out, *(f"{run.folder} has no {metric}" for run in others)])
    figure = curves(group(shown), metric, log=log)
    if out is not None:
        save(figure, out, force)
    return figure


def curves(
    groups: dict[str, list[Run]], metric: str = "test/accuracy", title: str = "", caption: str = "", log: bool = False
) -> Figure:
    """Draw one line per group: the mean over its runs, with a band of one standard deviation.

    A cross marks the last finite round of a run that diverged.

    Args:
        groups: Runs by the name of their group, as from `group`.
        metric: Name of a recorded metric.
        title: Title of the picture.
        caption: Text below the axes.
        log: Whether the metric has a logarithmic axis.
    """
    return panels({"": groups}, metric, title, caption, log)


def panels(
    families: dict[str, dict[str, list[Run]]],
    metric: str = "test/accuracy",
    title: str = "",
    caption: str = "",
    log: bool = False,
    text: Callable[[str, list[Run]], str] = lambda name, runs: name,
) -> Figure:
    """Draw the curves of several families side by side, one panel per family.

    Groups of the same name have the same colour and line style in all panels.

    Args:
        families: Groups of runs by the title of their panel.
        metric: Name of a recorded metric.
        title: Title of the picture.
        caption: Text below the panels.
        log: Whether the metric has a logarithmic axis.
        text: Returns the legend's text for a group, from its name and its runs.
    """
    names = list(dict.fromkeys(name for groups in families.values() for name in groups))
    widths = np.linspace(2.8, 1.4, len(names))  # thin lines over thick ones: coinciding curves stay visible
    styles = {name: (f"C{i % 10}", LINES[i % len(LINES)], widths[i]) for i, name in enumerate(names)}
    figure = Figure(figsize=(6.4 if len(families) == 1 else 0.6 + 4.8 * len(families), 4.2), layout="constrained")
    row = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    for axes, (family, groups) in zip(row, families.items(), strict=True):
        for name, runs in groups.items():
            _line(axes, text(name, runs), runs, metric, *styles[name])
        _round_axis(axes, longest=max(len(run) for runs in groups.values() for run in runs))
        axes.set_title(family or title)
        axes.grid(alpha=0.3)
    row[0].set_ylabel(AXIS_LABELS.get(metric, metric))
    low, high = row[0].dataLim.intervaly
    wide_range = metric.endswith(("/loss", "/norm")) and 0 < low < high / 100  # a linear axis would flatten the others
    if log or wide_range:
        _log_axis(row[0], low, high)
    if len(families) > 1:
        figure.suptitle(title)
    for axes in row:
        _legend(figure, axes, bool(caption))
    if caption:
        _caption(figure, caption)
    return figure


def _line(axes: Axes, text: str, runs: list[Run], metric: str, colour: str, style: Any, width: float) -> None:
    """Draw the mean of a group, its band, and a cross for each run that diverged."""
    mean, std = mean_curve(runs, metric)
    rounds = np.arange(len(mean)) + 1  # pictures count rounds from 1, records from 0
    diverged = [run.diverged for run in runs if run.diverged is not None]
    seeds = {run.settings["seed"] for run in runs}
    text += f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
    text += f", diverged at round {', '.join(str(k + 1) for k in sorted(set(diverged)))}" if diverged else ""
    marker = "o" if len(rounds) == 1 else None
    axes.plot(rounds, mean, color=colour, linestyle=style, label=text, linewidth=width, marker=marker)
    if len(runs) > 1:
        axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
    for k in filter(None, diverged):
        axes.plot(k, mean[k - 1], "x", color=colour, markersize=9, markeredgewidth=2.5)


def _round_axis(axes: Axes, longest: int) -> None:
    """Set up the horizontal axis for runs of at most `longest` rounds."""
    axes.set_xlabel("communication round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlim(left=1 - min(0.9, 0.05 * longest), right=1.9 if longest == 1 else None)  # there is no round 0


def _log_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    if 0 < low < high < 1000 * low:  # a small range: ticks at 0.5, 1 and 2 instead of powers of ten
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else range(1, 10)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _caption(figure: Figure, caption: str) -> None:
    """Write a caption below the axes and increase the figure's height to fit it."""
    lines = textwrap.wrap(caption, int(112 * figure.get_figwidth() / 6.4))
    figure.set_figheight(figure.get_figheight() + 0.13 * len(lines))
    figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7, color="0.3")


def _covers_a_line(figure: Figure, legend: Legend, axes: Axes) -> bool:
    """Whether the legend, at the best position within the axes, lies on a line."""
    figure.draw_without_rendering()  # computes the position
    box = legend.get_window_extent()
    return any(box.count_contains(axes.transData.transform(line.get_xydata())) for line in axes.lines)


def _legend(figure: Figure, axes: Axes, caption: bool) -> None:
    """Add the legend: within the axes if its names are few and short and it covers no line, else beside or below."""
    handles, names = axes.get_legend_handles_labels()
    texts = [textwrap.fill(name, LEGEND_WIDTH, subsequent_indent="   ") for name in names]
    lines = [line for text in texts for line in text.splitlines()]
    title = "band: one standard deviation" if axes.collections else None
    style: dict[str, Any] = {"fontsize": "small", "title": title, "title_fontsize": "small", "handlelength": 3.5}
    width = 1 + 0.075 * max(map(len, lines))  # inches
    short = caption or max(map(len, names)) <= SHORT_NAME
    if (len(names) <= 6 and short) or len(figure.axes) > 1:
        within = axes.legend(**style)
        if len(figure.axes) > 1 or not _covers_a_line(figure, within, axes):
            return
        within.remove()
    if caption:  # the caption is below the axes
        figure.legend(handles, texts, **style, loc="outside right upper")
        figure.set_figwidth(figure.get_figwidth() + width)
    else:
        figure.legend(handles, texts, **style, loc="outside lower center")
        figure.set_figheight(4.2 + 0.2 * len(lines))
        figure.set_figwidth(max(6.4, width))


def labels(counts: np.ndarray, title: str = "") -> Figure:
    """Draw the label distribution: stacked bars for few classes, a heat map for many.

    Args:
        counts: (clients, classes) number of samples.
        title: Title of the picture.
    """
    counts = np.asarray(counts)
    clients, classes = counts.shape
    figure = Figure(figsize=(max(6.4, min(12, 0.13 * clients + 2)), 4.2), layout="constrained")
    axes = figure.subplots()
    if classes <= MAX_COLOURED_CLASSES:
        colours = colormaps["tab10" if classes <= 10 else "tab20"](range(classes))
        base = np.zeros(clients)
        for c in range(classes):
            axes.bar(np.arange(clients), counts[:, c], 1.0, bottom=base, color=colours[c], label=str(c), linewidth=0)
            base += counts[:, c]
        axes.set(ylabel="samples", xlim=(-0.5, clients - 0.5))
        figure.legend(title="class", fontsize="small", loc="outside right center", reverse=True)
    else:
        image = axes.imshow(counts.T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
        axes.set(ylabel="class")
        figure.colorbar(image, label="samples")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="client", title=title)
    return figure


def mean_curve(runs: list[Run], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a metric over runs, after each round.

    Returns:
        Mean (rounds,) and standard deviation (rounds,); the mean is NaN where no run recorded the metric.

    Raises:
        InputError: No run has a complete round.
    """
    rows = [[math.nan if value is None else value for value in run[metric]] for run in runs]
    longest = max(map(len, rows))
    if not longest:
        raise InputError(f"{runs[0].folder}: no round is complete yet", code="no-rounds", folder=runs[0].folder)
    return mean_and_std([row + [math.nan] * (longest - len(row)) for row in rows])


def check_picture(path: str | Path, force: bool = False) -> Path:
    """Return a path at which a picture can be written, in the format of its extension.

    Raises:
        InputError: Matplotlib cannot write this format; the path is a folder, a file of a run, or without `force` a
            file that stableair has not made.
    """
    path = as_path("the picture", path)
    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        text = f"cannot write {path}: its extension must be a picture format, such as .png, .pdf or .svg"
        raise InputError(text, code="unknown-format", path=path)
    return check_output(path, force)


def save(figure: Figure, path: str | Path, force: bool = False) -> Path:
    """Write a figure in the format of the path's extension; missing folders are created.

    Raises:
        InputError: The format is unknown or the file cannot be written.
    """
    path = check_picture(path, force)
    ending = path.suffix[1:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            path, lambda file: figure.savefig(file, dpi=150, format=ending, metadata=METADATA.get(ending.lower()))
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write {path}: {reason}", code="cannot-write", path=path) from None
    return path
