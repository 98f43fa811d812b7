"""Curves from run folders, and from nothing else."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stableair.checks import InputError
from stableair.record import EXPERIMENT, HOW, Run, load

IDEAL = {"fading": "unit()", "noise": "none()", "receiver": "none()"}
AXES = {
    "test/accuracy": "test accuracy",
    "test/loss": "test loss",
    "validation/accuracy": "validation accuracy",
    "train/loss": "training loss",
    "channel/snr_db": "SNR in dB",
    "gradient/norm": "norm of the clean gradient",
    "clip/fraction": "share of clipped entries",
    "seconds": "seconds per round",
}


def find(folders: Iterable[str | Path]) -> list[Run]:
    """The runs in these folders and below them."""
    runs = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder")
        here = sorted(path.parent for path in folder.rglob(EXPERIMENT))
        if not here:
            raise InputError(f"{folder} holds no run: there is no {EXPERIMENT} in it or below it")
        runs += map(load, here)
    return runs


def label(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ in the seed alone, together, under a label that says what sets them apart from the others."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        settings = {k: v for k, v in run.settings.items() if k not in (*HOW, "seed")}
        groups.setdefault(tuple(sorted(settings.items())), []).append(run)
    settings = [members[0].settings for members in groups.values()]
    compared = [s for s in settings if not _ideal(s)] or settings
    apart = [k for k in compared[0] if k not in (*HOW, "seed") and len({s.get(k) for s in compared}) > 1]
    names = ["ideal" if _ideal(s) and s not in compared else _name(s, apart or ["receiver"]) for s in settings]
    return dict(zip(names, groups.values(), strict=True))


def _ideal(settings: dict[str, Any]) -> bool:
    return all(settings[key] == value for key, value in IDEAL.items())


def _name(settings: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(str(v) if isinstance(v := settings[key], str) else f"{key}={v}" for key in keys)


def curves(groups: dict[str, list[Run]], metric: str = "test/accuracy", title: str = "") -> Figure:
    """One line per group over the communication rounds: the mean over its seeds, in a band of one standard deviation.

    A run that diverged is drawn up to where it did, and a cross marks the place.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, runs in groups.items():
        table = _table(runs, metric)
        counted = np.maximum((~np.isnan(table)).sum(0), 1)
        mean = np.where(np.isnan(table).all(0), np.nan, np.nansum(table, 0) / counted)
        spread = np.sqrt(np.nansum((table - mean) ** 2, 0) / np.maximum(counted - 1, 1))
        rounds = np.arange(1, table.shape[1] + 1)
        ended = [run.diverged for run in runs if run.diverged is not None]
        text = name + (f" ({len(runs)} seeds)" if len(runs) > 1 else "")
        text += f", diverged at round {', '.join(map(str, ended))}" if ended else ""
        (line,) = axes.plot(rounds, mean, label=text, linewidth=1.8)
        if len(runs) > 1:
            axes.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.2, linewidth=0)
        for k in ended:
            if k:
                axes.plot(k, mean[k - 1], "x", color=line.get_color(), markersize=9, markeredgewidth=2.5)
    axes.set_xlabel("communication round")
    axes.set_ylabel(AXES.get(metric, metric))
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}") from None
    return path
