"""Curves from run folders, and from nothing else."""

import math
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stableair.checks import InputError, Note, place, typed
from stableair.files import write_whole
from stableair.results.run import Run, group, runs_of, with_metric

FEW = 20  # classes that can be told apart by colour
AXES = {
    "test/accuracy": "test accuracy",
    "test/loss": "test loss",
    "test/accuracy_clients": "test accuracy, the clients' norm statistics",
    "test/accuracy_recalibrated": "test accuracy, norm statistics recalibrated",
    "test/accuracy_batch": "test accuracy, norm statistics of the test batch",
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
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    widths = np.linspace(2.8, 1.4, len(groups))  # where two lines coincide, both are seen
    longest = 1
    for i, ((name, runs), width) in enumerate(zip(groups.items(), widths, strict=True)):
        mean, spread = mean_and_spread(runs, metric)
        rounds = np.arange(len(mean))
        longest = max(longest, len(rounds))
        style = ("-", "--", ":", "-.")[i // 10 % 4]  # after ten colours they come again
        ended = [run.diverged for run in runs if run.diverged is not None]
        seeds = {run.settings["seed"] for run in runs}
        text = name + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")
        text += f", diverged at round {', '.join(map(str, sorted(set(ended))))}" if ended else ""
        marker = "o" if len(rounds) == 1 else None
        (line,) = axes.plot(rounds, mean, style, label=text, linewidth=width, marker=marker)
        if len(runs) > 1:
            axes.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.2, linewidth=0)
        for k in ended:
            if k:
                axes.plot(k - 1, mean[k - 1], "x", color=line.get_color(), markersize=9, markeredgewidth=2.5)
    axes.set_xlabel("communication round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if longest == 1:
        axes.set_xlim(-0.9, 0.9)
    axes.set_ylabel(AXES.get(metric, metric))
    low, high = axes.dataLim.intervaly
    blown_up = metric.endswith(("/loss", "/norm")) and 0 < low < high / 100  # must not flatten the others
    if log or blown_up:
        axes.set_yscale("log")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    key: dict[str, Any] = {"fontsize": "small", "title": "band: one standard deviation" if axes.collections else None}
    if len(groups) <= 6:
        axes.legend(**key, title_fontsize="small")
    else:
        figure.legend(**key, title_fontsize="small", loc="outside lower center")
        figure.set_figheight(4.2 + 0.2 * len(groups))
        figure.set_figwidth(max(6.4, 1 + 0.075 * max(map(len, groups))))  # room for the longest name
    if caption:
        lines = textwrap.wrap(caption, 112)
        figure.set_figheight(figure.get_figheight() + 0.13 * len(lines))
        figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7, color="0.3")
    return figure


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
