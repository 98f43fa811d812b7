"""Figures of the paper: compute the missing runs or read the published runs, draw the figure, and write the files."""

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture

from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.files import write_whole
from stableair.literals import PlotStyle, PluginChange
from stableair.paper import published_runs
from stableair.paper.catalogue import DRAWINGS, FIGURES, SAME_RUNS, SEARCHED, curves, published_curves
from stableair.paper.drawing import Content, Curves, caption, draw, draw_without_runs
from stableair.paper.plans import Plan, plan, with_threshold
from stableair.paper.published_runs import PublishedRuns
from stableair.results import plot
from stableair.results.callbacks import Callback
from stableair.results.grouping import group
from stableair.results.outputs import GENERATOR, check_output
from stableair.results.reading import log_left_out, runs_from
from stableair.results.run import Run
from stableair.searches import Result, search
from stableair.sweeps.plans import over_seeds
from stableair.sweeps.processes import sweep
from stableair.validation import as_path, choice, pluralize, typed

RunSource = Run | str | Path | Iterable[Run | str | Path]  # runs, run folders, or folders of run folders


@typed
def figure(
    name: str, out: str | Path | None = None, *, smoke: bool = False, rounds: int | None = None, seeds: int = 1,
    settings: dict[str, Any] | None = None, thresholds: dict[str, float] | None = None, search_each: bool = False,
    trials: int | None = None, search_rounds: int | None = None, published: bool = False, overlay: RunSource = (),
    metric: str = "", style: PlotStyle = "screen", force: bool = False, plugin_changed: PluginChange = "refuse",
    callbacks: Sequence[Callback] = (),
) -> Picture:  # fmt: skip
    """Make a figure of the paper. `stableair figure` calls this function.

    It writes the picture as NAME.png and NAME.pdf and its caption as NAME.txt. Runs that are already in `out` are not
    computed again. With `smoke=True` or `published=True` it needs no GPU and no data.

    Args:
        name: "fig2", "fig3a" to "fig3f", "fig4a" to "fig4c", or "interval".
        out: Folder of the pictures and runs. Default: runs; runs/smoke with `smoke`; runs/published with `published`.
        smoke: Make a small version on the embedded digits, which takes about half a minute.
        rounds: Number of communication rounds. None: the number of the figure.
        seeds: Number of seeds; two or more give a band.
        settings: Settings of the experiments to change, such as `{"clients": 10, "noise.tau": 0.2}`.
        thresholds: Thresholds to use instead of a search: `{"MAC": 0.13, "GNC": 100}`.
        search_each: Search C for every curve of fig4a or fig4b, instead of once.
        trials: Number of trials of each threshold search. None: 12, or 6 with `smoke`.
        search_rounds: Rounds of each trial. None: 20, or `rounds` if it is smaller.
        published: Draw the runs that come with the package; compute nothing.
        overlay: With `published`: runs, or folders of runs, to draw over the published runs. Runs with another set-up
            are left out, with a warning.
        metric: With `published`: metric to draw instead of the figure's, such as "test/accuracy_clients".
        style: Style of the picture, as for `sa.plot`.
        force: Whether to replace files that were not written by stableair.
        plugin_changed: As for `run`.
        callbacks: Observers of the runs.

    Returns:
        The matplotlib figure.

    Raises:
        InputError: The figure is unknown (`unknown-value`), it cannot use one of the options (`unused-options`), or no
            run of `overlay` has its set-up (`no-fitting-run`).

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> with TemporaryDirectory() as folder:
    ...     figure = sa.figure("fig3a", folder, published=True)
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
    ('communication round', 'test accuracy')
    """
    folder = as_path("out", default_folder(smoke, published) if out is None else out)
    run_options: dict[str, Any] = {
        "rounds": rounds, "seeds": seeds, "settings": settings, "thresholds": thresholds, "search_each": search_each,
        "trials": trials, "search_rounds": search_rounds,
    }  # fmt: skip
    has_overlay = not (isinstance(overlay, list | tuple) and not overlay)
    published_options = {"overlay": has_overlay, "metric": metric}
    _check_options(name, run_options, published_options, smoke=smoke, published=published)
    *pictures, caption_file = [
        check_output(as_path("the figure", path), force) for path in output_files(name, folder, metric)
    ]
    if name in DRAWINGS:
        picture, text = draw_without_runs(name, style), DRAWINGS[name]
    else:
        if published:
            content = published_content(name, overlay, metric)
        else:
            planned = plan(name, smoke=smoke, **run_options)
            content = Content(planned, *compute(planned, folder, callbacks, plugin_changed))
        picture, text = draw(content.plan, content.runs, style), caption(*content)
    for path in pictures:
        plot.save(picture, path, force, plot.DPI[style])
    write_whole(caption_file, f"{text}\n\nDrawn by {GENERATOR}.\n".encode())
    return picture


def _check_options(
    name: str, run_options: dict[str, Any], published_options: dict[str, Any], *, smoke: bool, published: bool
) -> None:
    """Refuse options that a figure cannot use: for computed runs, for published runs, or for any runs."""
    if name in DRAWINGS:
        _refuse(f"{name} is drawn without runs", run_options | published_options | {"published": published})
    elif published:
        _refuse("published runs cannot be changed", run_options | {"smoke": smoke})
    else:
        _refuse("these options need published=True", published_options)


def default_folder(smoke: bool, published: bool) -> str:
    """Return the folder of a figure if `out` is None."""
    return "runs/smoke" if smoke else "runs/published" if published else "runs"


def _refuse(reason: str, options: dict[str, Any]) -> None:
    """Raise an error if one of these options of `figure` does not have its default value."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(figure).parameters.items()}
    if unused := [option for option, value in options.items() if value not in (defaults[option], False, [], {})]:
        raise InputError(f"{reason}: leave out {', '.join(unused)}", code="unused-options", options=unused)


def output_files(name: str, folder: Path, metric: str = "") -> list[Path]:
    """Return the files that `figure` writes: two pictures and the caption."""
    stem = f"{name}-{metric.replace('/', '-')}" if metric else name
    return [folder / f"{stem}.{ending}" for ending in ("png", "pdf", "txt")]


def compute(
    plan: Plan, folder: Path, callbacks: Sequence[Callback] = (), plugin_changed: PluginChange = "refuse"
) -> tuple[Curves, list[str]]:
    """Search the thresholds, and compute the runs that the folder does not contain.

    Args:
        plan: The plan of the figure.
        folder: Folder of the runs and searches.
        callbacks: Observers of the runs.
        plugin_changed: As for `run`.

    Returns:
        The runs of every curve by label, and how the thresholds were chosen, for the caption.
    """
    notes: list[str] = []

    def tune(method: str, base: Experiment) -> Experiment:
        receiver, key, _ = SEARCHED[method]
        if method in plan.thresholds:
            notes.append(f"{key.partition('.')[2]} = {plan.thresholds[method]:g} was set, not searched")
            return with_threshold(method, base, plan.thresholds[method])
        result = _search_threshold(plan, method, base.with_(receiver=receiver), folder, callbacks, plugin_changed)
        notes.append(describe_search(result))
        return with_threshold(method, base, result.winner.values[key])

    experiments = curves(plan.figure, plan.base, tune, plan.search_each)
    seeds = {label: over_seeds(one, plan.seeds) for label, one in experiments.items()}
    return _run_curves(seeds, folder, callbacks, plugin_changed), notes


def _search_threshold(
    plan: Plan, method: str, base: Experiment, folder: Path, callbacks: Sequence[Callback], plugin_changed: PluginChange
) -> Result:
    _, key, space = SEARCHED[method]
    base = base.with_(rounds=plan.search_rounds)
    path = folder / f"search-{base.with_(evaluate='validation').name}-{plan.trials}x{base.rounds}"
    return search(base, {key: space}, path, trials=plan.trials, plugin_changed=plugin_changed, callbacks=callbacks)


def _run_curves(
    experiments: dict[str, list[Experiment]], folder: Path, callbacks: Sequence[Callback], plugin_changed: PluginChange
) -> Curves:
    """Compute the runs of every curve as a sweep, so that several processes can share the work of a figure."""
    every = [one for seeds in experiments.values() for one in seeds]
    runs = {
        run.experiment.name: run for run in sweep(every, folder, plugin_changed=plugin_changed, callbacks=callbacks)
    }
    return {label: [runs[one.name] for one in seeds] for label, seeds in experiments.items()}


def describe_search(result: Result) -> str:
    """Return the threshold that a search chose, its range and its budget, as one sentence."""
    ((key, space),) = result.spaces.items()
    low, high = space.ends()
    name, best = key.partition(".")[2], result.winner.values[key]
    boundary = ", at the end of its range" if result.at_boundary else ""
    stopped = sum(trial.stopped for trial in result.trials)
    tried = f"{len(result.trials)} ({stopped} of them stopped early)" if stopped else f"{len(result.trials)}"
    return (
        f"{name} = {best:g} is the best of {tried} between {low:g} and {high:g} after "
        f"{pluralize(result.base.rounds, 'round')} on a validation split, seed {result.base.seed}{boundary}"
    )


def draw_published(name: str, overlay: RunSource = (), metric: str = "", style: PlotStyle = "screen") -> Picture:
    """Draw a figure from its published runs; the arguments are those of `published_content`."""
    content = published_content(name, overlay, metric)
    return draw(content.plan, content.runs, style)


def published_content(name: str, overlay: RunSource = (), metric: str = "") -> Content:
    """Return the content of a figure from its published runs.

    Args:
        name: The figure.
        overlay: Runs, or folders of runs, to draw over the published runs. Runs with another set-up are left out, with
            a warning.
        metric: Metric to draw instead of the figure's.

    Raises:
        InputError: No published run can be drawn (`no-drawable-run`), no run of `overlay` has the set-up of the figure
            (`no-fitting-run`), or the runs have not recorded the metric.
    """
    published = read_published(name)
    has_overlay = not (isinstance(overlay, list | tuple) and not overlay)
    yours, left_out = overlay_runs(name, overlay) if has_overlay else ({}, [])
    log_left_out(published.left_out)
    if not published.curves:
        raise InputError(f"no published run of {name} can be drawn; the first reason: {published.left_out[0]}",
                         code="no-drawable-run", figure=name)  # fmt: skip
    runs = [run for each in published.curves.values() for run in each]
    rounds = max(map(len, runs))
    if has_overlay and not yours:
        raise InputError(f"no run of the overlay can be drawn over {name}: {'; '.join(left_out)}",
                         code="no-fitting-run", advice=f"start from: {fitting_command(name, rounds)}",
                         figure=name)  # fmt: skip
    log_left_out(left_out)
    planned = plan(name, rounds=rounds, seeds=len({run.settings["seed"] for run in runs}))
    if metric:
        choice("metric", metric, [key for key in runs[0].rounds[0] if all(key in run.rounds[0] for run in runs)])
        planned = planned._replace(figure=planned.figure._replace(metric=metric))
    notes = _published_notes(planned, published, yours)
    every = curves(planned.figure, planned.base, lambda _, one: one)
    missing = [label for label in every if label not in published.curves]
    return Content(planned, published.curves | yours, notes, published.data, missing)


def read_published(name: str) -> PublishedRuns:
    """Read the published runs of a figure.

    Raises:
        InputError: The figure is unknown, or it has no published runs.
        CorruptRunError: The files of the published runs are damaged.
    """
    available = [one for one in FIGURES if published_runs.is_published(SAME_RUNS.get(one, one))]
    if choice("figure", name, FIGURES) not in available:
        raise InputError(
            f"{name} has no published runs; these figures have: {', '.join(available) or 'none'}",
            code="not-published", figure=name, available=available,
        )  # fmt: skip
    source = SAME_RUNS.get(name, name)
    return published_runs.read(source, published_curves(source))


def overlay_runs(name: str, source: RunSource) -> tuple[Curves, list[str]]:
    """Return the user's runs that may be drawn over a figure.

    A run must have the set-up of the figure or of one of its published curves, except for the receiver and the setting
    that the figure varies.

    Returns:
        The runs by label, and a line for each reason for which runs are left out.
    """
    runs, left_out = runs_from(source)
    figure, published = FIGURES[name], SAME_RUNS.get(name, name)
    different: set[str] = set()
    matching, others, empty = [], [], []
    for run in runs:
        differing = published_runs.differences(run.record, figure.setup) - {"rounds", figure.vary}
        differing = {key for key in differing if key.partition(".")[0] != "receiver"}
        if differing and not published_runs.curve_name(published, run.record, published_curves(published)):
            others.append(run)
            different |= {key for key in differing if key.partition(".")[0] not in differing - {key}}
        elif not run.rounds:
            empty.append(run)
        else:
            matching.append(run)
    if others:
        differ = f"{'it differs' if len(others) == 1 else 'they differ'} in {', '.join(sorted(different))}"
        left_out.append(f"{_described(others)}: not the set-up of {name}, {differ}")
    if empty:
        left_out.append(f"{_described(empty)}: no complete round")
    return {f"yours: {label}": each for label, each in group(matching).items()}, left_out


def _described(runs: list[Run]) -> str:
    """Return the folder of one run, or the number of runs and their first folder."""
    first = str(runs[0].folder or runs[0])
    return first if len(runs) == 1 else f"{pluralize(len(runs), 'run')}, such as {first}"


def fitting_command(name: str, rounds: int) -> str:
    """Return the start of a command whose runs fit a figure; the user sets the receiver.

    >>> fitting_command("fig4b", 60)
    'stableair run cifar10-noniid rounds=60 receiver=... noise.tau=...'
    """
    figure = FIGURES[name]
    varied = [f"{figure.vary}=..."] if figure.vary and not figure.vary.startswith("receiver") else []
    return " ".join(["stableair run", figure.preset, f"rounds={rounds}", "receiver=...", *varied])


def _published_notes(plan: Plan, published: PublishedRuns, yours: Curves) -> list[str]:
    """Return the caption's notes on published runs: thresholds, earlier versions, different data, provenance."""
    notes = [describe_search(published_runs.search_result(one, plan.base)) for one in published.searches.values()]
    if plan.figure.vary.startswith("noise."):
        notes.append("the one C, 0.13, was set, not searched")
    earlier = sorted({title.partition("/")[0] for title in published.environments if "/" in title})
    notes.extend(f"C = auto as in {folder.replace('-', ' ')}" for folder in earlier)
    checksums = published_runs.data_checksums(run.environments for each in yours.values() for run in each)
    if checksums - published_runs.data_checksums(published.environments.values()):
        notes.append("your runs used a different copy of the data")
    return [*notes, published_runs.provenance(published)]
