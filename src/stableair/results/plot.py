"""Curves from run folders, and from nothing else."""

import math
import textwrap
import warnings
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

from stableair.checks import InputError, Note, place, typed
from stableair.files import write_whole
from stableair.results.run import Run, group, runs_of, with_metric

FEW = 20  # classes that can be told apart by colour
LINES: list[Any] = [  # ways to draw a line: curves are told apart without colours, too
    "-", "--", "-.", ":", (0, (9, 2)), (0, (5, 1.5, 1, 1.5, 1, 1.5)),
]  # fmt: skip
SHORT, WIDEST = 40, 90  # letters of a name that may stand within the axes, and of a line below them
AXES = {
    "test/accuracy": "test accuracy",
    "test/loss": "test loss",
    "test/accuracy_clients": "test accuracy, the clients' norm statistics",
    "test/accuracy_recalibrated": "test accuracy, norm statistics recalibrated",
    "test/accuracy_batch": "test accuracy, norm statistics of the test batch",
    "test/accuracy_averaged": "test accuracy of the averaged model",
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
) -> Figure:
    """Draw a metric of runs, or of run folders and folders that hold some, and write the picture where `out` says.

    Runs that differ in the seed alone become one line with a band. `stableair plot` is this.
    """
    if out is not None:
        check_picture(out)
    found, left_out = runs_of(runs)
    for line in left_out:
        warnings.warn(f"left out: {line}", Note, stacklevel=3)
    figure = curves(group(with_metric(found, metric)[0]), metric, log=log)
    if out is not None:
        save(figure, out)
    return figure


def curves(
    groups: dict[str, list[Run]], metric: str = "test/accuracy", title: str = "", caption: str = "", log: bool = False
) -> Figure:
    """One line per group over the communication rounds: the mean over its seeds, in a band of one standard deviation.

    A run that diverged is drawn up to where it did, and a cross marks the place.
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
    """Curves as above, a panel for each family of them; a group of the same name looks the same in all of them.

    `text(name, runs)` is what the legend says of a group.
    """
    names = list(dict.fromkeys(name for groups in families.values() for name in groups))
    widths = np.linspace(2.8, 1.4, len(names))  # where two lines coincide, both are seen
    looks = {name: (f"C{i % 10}", LINES[i % len(LINES)], widths[i]) for i, name in enumerate(names)}
    figure = Figure(figsize=(6.4 if len(families) == 1 else 0.6 + 4.8 * len(families), 4.2), layout="constrained")
    row = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    for axes, (family, groups) in zip(row, families.items(), strict=True):
        for name, runs in groups.items():
            _line(axes, text(name, runs), runs, metric, *looks[name])
        longest = max(len(run) for runs in groups.values() for run in runs)
        axes.set_xlabel("communication round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(left=1 - min(0.9, 0.05 * longest), right=1.9 if longest == 1 else None)  # there is no round 0
        axes.set_title(family or title)
        axes.grid(alpha=0.3)
    row[0].set_ylabel(AXES.get(metric, metric))
    low, high = row[0].dataLim.intervaly
    blown_up = metric.endswith(("/loss", "/norm")) and 0 < low < high / 100  # must not flatten the others
    if log or blown_up:
        _log_axis(row[0], low, high)
    if len(families) > 1:
        figure.suptitle(title)
    for axes in row:
        _key(figure, axes, bool(caption))
    if caption:
        lines = textwrap.wrap(caption, int(112 * figure.get_figwidth() / 6.4))
        figure.set_figheight(figure.get_figheight() + 0.13 * len(lines))
        figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7, color="0.3")
    return figure


def _line(axes: Axes, text: str, runs: list[Run], metric: str, colour: str, style: Any, width: float) -> None:
    """The mean of a group, its band, and a cross where a run of it diverged."""
    mean, spread = mean_and_spread(runs, metric)
    rounds = np.arange(len(mean)) + 1  # people count from 1, records from 0
    ended = [run.diverged for run in runs if run.diverged is not None]
    seeds = {run.settings["seed"] for run in runs}
    text += f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
    text += f", diverged at round {', '.join(str(k + 1) for k in sorted(set(ended)))}" if ended else ""
    marker = "o" if len(rounds) == 1 else None
    axes.plot(rounds, mean, color=colour, linestyle=style, label=text, linewidth=width, marker=marker)
    if len(runs) > 1:
        axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    for k in filter(None, ended):
        axes.plot(k, mean[k - 1], "x", color=colour, markersize=9, markeredgewidth=2.5)


def _log_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    if 0 < low < high < 1000 * low:  # then 0.5, 1 and 2, and not powers of ten
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else range(1, 10)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _covers_a_line(figure: Figure, legend: Legend, axes: Axes) -> bool:
    """Whether the legend lies on a line, wherever it is put."""
    figure.draw_without_rendering()  # which puts it there
    box = legend.get_window_extent()
    return any(box.count_contains(axes.transData.transform(line.get_xydata())) for line in axes.lines)


def _key(figure: Figure, axes: Axes, caption: bool) -> None:
    """The legend: within the axes for a few lines of short names that leave it room, else beside or below them."""
    handles, names = axes.get_legend_handles_labels()
    texts = [textwrap.fill(name, WIDEST, subsequent_indent="   ") for name in names]
    lines = [line for text in texts for line in text.splitlines()]
    title = "band: one standard deviation" if axes.collections else None
    key: dict[str, Any] = {"fontsize": "small", "title": title, "title_fontsize": "small", "handlelength": 3.5}
    room = 1 + 0.075 * max(map(len, lines))  # for the longest
    short = caption or max(map(len, names)) <= SHORT
    if (len(names) <= 6 and short) or len(figure.axes) > 1:
        within = axes.legend(**key)
        if len(figure.axes) > 1 or not _covers_a_line(figure, within, axes):
            return
        within.remove()
    if caption:  # which stands below
        figure.legend(handles, texts, **key, loc="outside right upper")
        figure.set_figwidth(figure.get_figwidth() + room)
    else:
        figure.legend(handles, texts, **key, loc="outside lower center")
        figure.set_figheight(4.2 + 0.2 * len(lines))
        figure.set_figwidth(max(6.4, room))


def labels(counts: np.ndarray, title: str = "") -> Figure:
    """How many samples of each class each client holds: stacked bars for few classes, a map for many."""
    counts = np.asarray(counts)
    clients, classes = counts.shape
    figure = Figure(figsize=(max(6.4, min(12, 0.13 * clients + 2)), 4.2), layout="constrained")
    axes = figure.subplots()
    if classes <= FEW:
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


def mean_and_spread(runs: list[Run], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean of a metric over the runs after each round, and its standard deviation; NaN where none recorded it."""
    table = _table(runs, metric)
    counted = np.maximum((~np.isnan(table)).sum(0), 1)
    mean = np.where(np.isnan(table).all(0), np.nan, np.nansum(table, 0) / counted)
    return mean, np.sqrt(np.nansum((table - mean) ** 2, 0) / np.maximum(counted - 1, 1))


def _table(runs: list[Run], metric: str) -> np.ndarray:
    """(seeds, rounds) of a metric, NaN where it was not recorded."""
    rows = [[math.nan if v is None else v for v in run[metric]] for run in runs]
    longest = max(map(len, rows))
    if not longest:
        raise InputError(f"{runs[0].folder}: no round is complete yet")
    return np.array([row + [math.nan] * (longest - len(row)) for row in rows], dtype=float)


def check_picture(path: str | Path) -> Path:
    """A path whose ending is the format of a picture."""
    path = place("the picture", path)
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise InputError(f"cannot write {path}: its ending must give the format, such as .png, .pdf or .svg")
    return path


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format of the path's ending."""
    path = check_picture(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: figure.savefig(file, dpi=150, format=path.suffix[1:]))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    return path
