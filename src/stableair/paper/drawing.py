"""Draw a figure of the paper from its runs; the caption describes the set-up and marks this project's choices."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from matplotlib.figure import Figure as Picture

from stableair.experiment import Experiment, components_of_record
from stableair.literals import PlotStyle
from stableair.paper import theory_plots
from stableair.paper.catalogue import DRAWINGS, SCALED, SNR, SYMBOLS, Figure
from stableair.paper.plans import Plan
from stableair.results import curves
from stableair.results.curves import described
from stableair.results.run import Run
from stableair.results.statistics import linear_mean, snrs
from stableair.results.styles import drawing_style
from stableair.validation import choice, pluralize

Curves = dict[str, list[Run]]  # the runs of every curve, by label


class Content(NamedTuple):
    """The content of a figure and of its caption."""

    plan: Plan
    runs: Curves
    notes: list[str]  # further choices, such as the results of the searches
    data: str = ""  # description of the data; empty: the data set and its size
    missing: Sequence[str] = ()  # curves of the figure without runs


def draw(plan: Plan, runs: Curves, style: PlotStyle = "screen") -> Picture:
    """Draw the curves of a figure.

    Args:
        plan: The plan of the figure.
        runs: The runs of every curve, by label.
        style: Style of the picture; "paper" leaves the title, the seeds and the meaning of the band to the caption.
    """
    terse = style == "paper"
    number = plan.figure.title.partition(":")[0]  # a smoke test has neither the data nor the model of the title
    title = [f"{number}: smoke test on {_data_name(plan.base)}" if plan.smoke else plan.figure.title]
    title += ["changed settings"] if plan.overrides else []
    log = plan.figure.metric.endswith("/loss")  # the noisy curve may be a hundred times above the other curves
    panels = {"": runs} if plan.search_each else _panels(plan.figure, runs)
    with_snr = _label_with_snr if len(panels) == 1 else _label_with_mean_snr
    name = with_snr if plan.figure.vary == "noise.tau" and not terse else lambda label, runs: label

    def text(label: str, of_label: list[Run]) -> str:
        return name(label, of_label) if terse else described(name(label, of_label), of_label)

    with drawing_style(style):
        return curves.panels(panels, plan.figure.metric, "" if terse else ", ".join(title), log, text, note=not terse)


def draw_without_runs(name: str, style: PlotStyle = "screen") -> Picture:
    """Draw a figure that needs no runs."""
    drawings = {"fig2": theory_plots.steps, "interval": theory_plots.decision}
    with drawing_style(style):
        return drawings[choice("figure", name, DRAWINGS)]()


def _panels(figure: Figure, runs: Curves) -> dict[str, Curves]:
    """Divide the curves of Fig. 4(a) and (b) into panels by the choice of C; other figures have one panel.

    If a panel would show only one curve, a single panel shows all curves.
    """
    panels: dict[str, Curves] = {}
    for label, each in runs.items():
        value, _, C = label.partition(", C = ") if figure.vary.startswith("noise.") else (label, "", "")
        panels.setdefault({"": "one C", "auto": "C = auto"}.get(C, SCALED), {})[value] = each
    common = {value: each for value, each in panels.get("one C", {}).items() if value == "τ = 0.1"}
    if SCALED in panels:  # at tau = 0.1 the scaled C is the common C
        panels[SCALED] = dict(sorted((panels[SCALED] | common).items()))
    return panels if len(panels) > 1 and all(len(each) > 1 for each in panels.values()) else {"": runs}


def _label_with_snr(label: str, runs: list[Run]) -> str:
    """Return a label of Fig. 4(b) with the measured SNR and the paper's SNR at that tau."""
    decibels, paper = snrs(runs), _paper_snr(runs)
    measured = f"mean {fmean(decibels):.1f} dB, linear {linear_mean(decibels):.1f} dB" if decibels else "none"
    return f"{label}, SNR: {measured}" + (f" (paper: up to {paper} dB)" if paper is not None else "")


def _label_with_mean_snr(label: str, runs: list[Run]) -> str:
    """Return a label of Fig. 4(b) for narrow panels, with the mean SNR only."""
    decibels, paper = snrs(runs), _paper_snr(runs)
    measured = f"{fmean(decibels):.1f} dB" if decibels else "none"
    return f"{label}, SNR {measured}" + (f" (paper: {paper})" if paper is not None else "")


def _paper_snr(runs: list[Run]) -> int | None:
    """Return the paper's SNR in dB at the scale of these runs."""
    return SNR.get(components_of_record(runs[0].record)["noise"][0][1].get("tau", math.nan))


def caption(plan: Plan, runs: Curves, notes: list[str], data: str = "", missing: Sequence[str] = ()) -> str:
    """Return the caption of a figure.

    Args:
        plan: The plan of the figure.
        runs: The runs of every curve, by label.
        notes: Further choices, such as the results of the searches.
        data: Description of the data; by default the data set and its size.
        missing: The figure's curves without runs.
    """
    base = plan.base
    if plan.smoke:
        first = f"Smoke test on {_data_name(base)}: the figure's form, not its result."
    else:
        first = f"Data: {data or _data_name(base) + _sample_count(runs)}."
    changed = (
        f" Changed settings: {', '.join(f'{k}={v}' for k, v in plan.overrides.items())}." if plan.overrides else ""
    )
    ours = [pluralize(base.rounds, "round"), *notes, *([plan.figure.ours] if plan.figure.ours else [])]
    diverged = any(one.diverged is not None for each in runs.values() for one in each)
    cross = " ×: the last round before a run diverged." if diverged else ""
    without = f" Without runs: {', '.join(missing)}." if missing else ""
    return f"{first}{changed} {', '.join(_setup(plan, runs))}. Not from the paper: {'; '.join(ours)}.{without}{cross}"


def _data_name(experiment: Experiment) -> str:
    """Return the data set as a word of a sentence."""
    return experiment.data.removesuffix("()")


def _setup(plan: Plan, runs: Curves) -> list[str]:
    """Return the settings that all curves share."""
    base, vary = plan.base, plan.figure.vary
    has_norm_stats = any("accuracy_clients" in key for each in runs.values() for one in each for key in one.rounds[0])
    norm_stats = plan.figure.metric.partition("accuracy_")[2] or base.norm_stats
    return [
        f"{base.clients} clients by {base.partition}",
        base.model if base.model != "auto" else "the data set's default model",
        f"{pluralize(base.local_epochs, 'local epoch')} of batch {base.batch_size} at lr {base.lr:g}",
        base.fading,
        f"{base.noise}{f' with {SYMBOLS[vary]} varied' if vary.startswith('noise.') else ''}",
        *([f"norm statistics: {norm_stats}"] if has_norm_stats else []),
        _seeds(plan, runs),
    ]


def _seeds(plan: Plan, runs: Curves) -> str:
    """Return the seeds, and whether some curves have fewer seeds."""
    first, n = plan.base.seed, plan.seeds
    if n == 1:
        return f"seed {first}"
    every = f"seeds {first} and {first + 1}" if n == 2 else f"seeds {first} to {first + n - 1}"
    fewer = [{run.settings["seed"] for run in each} for each in runs.values() if len(each) < n]
    if not fewer:
        return every
    others = f"seed {first}" if all(seeds == {first} for seeds in fewer) else "fewer seeds"
    return f"{every} for the curves marked {n} seeds, {others} for the others"


def _sample_count(runs: Curves) -> str:
    """Return the number of training samples, since the data folder may hold only a part of a data set."""
    counts = [sum(map(sum, one.labels)) for each in runs.values() for one in each if one.labels]
    return f", {counts[0]:,} training samples" if counts else ""
