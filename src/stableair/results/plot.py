"""Curves from run folders, and from nothing else."""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stableair.checks import InputError, nearest
from stableair.experiment import EXECUTION, IDEAL, TYPES
from stableair.results.folder import EXPERIMENT, Run, load
from stableair.searches import Result

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


def find(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The runs in these folders and below them, each once; and what is wrong with those that cannot be read."""
    runs = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder")
        here = sorted(path.parent for path in folder.rglob(EXPERIMENT))
        if not here:
            raise InputError(f"{folder} holds no run: there is no {EXPERIMENT} in it or below it")
        runs |= {path.resolve(): path for path in here}
    found: dict[tuple, Run] = {}
    left_out = []
    for path in runs.values():
        try:
            run = load(path)
        except InputError as error:
            left_out.append(str(error))
            continue
        key = tuple((k, v) for k, v in run.settings.items() if k not in EXECUTION)
        if (twin := found.get(key)) and len(twin) >= len(run):
            run, twin = twin, run  # of two copies of a run the longer one counts
        if twin:
            left_out.append(f"{twin.folder}: the same run as {run.folder}")
        found[key] = run
    if not found:
        raise InputError(f"none of the {len(left_out)} runs can be read; the first: {left_out[0]}")
    return list(found.values()), left_out


def recorded(runs: list[Run], metric: str) -> tuple[list[Run], list[Run]]:
    """The runs that recorded the metric, and those that did not; it is an error if none did."""
    with_it = [run for run in runs if run.rounds and metric in run.rounds[0]]
    if not with_it:
        known = sorted({name for run in runs for row in run.rounds[:1] for name in row})
        hint = nearest(metric, known) if known else "no round is complete yet"
        raise InputError(f"metric {metric!r} was not recorded; {hint}")
    return with_it, [run for run in runs if run not in with_it]


def label(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ in the seed alone, together, under a label that says what sets them apart from the others."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        settings = {k: v for k, v in run.settings.items() if k not in (*EXECUTION, "seed")}
        groups.setdefault(tuple(sorted(settings.items())), []).append(run)
    settings = [members[0].settings for members in groups.values()]
    names = [""] * len(settings)
    for kind in (True, False):  # ideal runs differ from the others in three settings; "ideal" says it shorter
        alike = [i for i, s in enumerate(settings) if _ideal(s) == kind]
        apart = [k for k in TYPES if k not in (*EXECUTION, "seed") and len({settings[i].get(k) for i in alike}) > 1]
        for i in alike:
            own = _name(settings[i], apart)
            names[i] = ", ".join(filter(None, ["ideal" * kind, own])) or settings[i]["receiver"]
    return dict(zip(names, groups.values(), strict=True))


def _ideal(settings: dict[str, Any]) -> bool:
    return all(settings[key] == value for key, value in IDEAL.items())


def _name(settings: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(str(v) if isinstance(v := settings[key], str) else f"{key}={v}" for key in keys)


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
    key = {"fontsize": "small", "title": "band: one standard deviation" if axes.collections else None}
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


def trials(found: Result) -> Figure:
    """The score of every trial of a search over each of its parameters; those stopped early are hollow."""
    figure = Figure(figsize=(max(6.4, 4.2 * len(found.spaces)), 4.2), layout="constrained")
    panels = figure.subplots(1, len(found.spaces), squeeze=False, sharey=True)[0]
    for axes, (key, space) in zip(panels, found.spaces.items(), strict=True):
        for stopped, style in ((False, {}), (True, {"markerfacecolor": "none"})):
            some = [trial for trial in found.trials if trial.stopped == stopped]
            text = "stopped early" if stopped else "all rounds"
            if some:
                x = [trial.values[key] for trial in some]
                axes.plot(x, [t.score for t in some], "o", color="tab:blue", label=text, **style)
        best = found.winner
        axes.plot(best.values[key], best.score, "*", color="tab:red", markersize=14, label=f"best: {best.values[key]}")
        if getattr(space, "log", False):
            axes.set_xscale("log")
        axes.set_xlabel(key)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("validation accuracy")
    figure.suptitle(f"{found.base.data}, {found.base.rounds} rounds", fontsize="medium")
    return figure


def labels(counts: np.ndarray, title: str = "") -> Figure:
    """How many samples of each class each client holds: stacked bars for few classes, a map for many."""
    counts = np.asarray(counts)
    clients, classes = counts.shape
    figure = Figure(figsize=(max(6.4, min(12, 0.13 * clients + 2)), 4.2), layout="constrained")
    axes = figure.subplots()
    if classes <= FEW:
        colours = colormaps["tab10" if classes <= 10 else "tab20"].colors
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


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format of the path's ending."""
    path = Path(path)
    if not path.suffix:
        raise InputError(f"cannot write {path}: its ending must give the format, such as .png, .pdf or .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}") from None
    return path
