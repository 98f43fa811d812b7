"""The report: one HTML page about recorded runs with curves, tables and a paired comparison.

The page is the template `report.html.j2`; this module computes its values. The page needs neither network nor server.
"""

import base64
import functools
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import stableair
from stableair.errors import InputError
from stableair.experiment import EXECUTION, TYPES
from stableair.files import write_whole
from stableair.results.arguments import Groups, by_argument, in_order, only_numeric_argument
from stableair.results.axes import METRIC_LABELS, end_far_apart, is_logarithmic
from stableair.results.curves import line_looks, mean_curve
from stableair.results.grouping import group
from stableair.results.outputs import GENERATOR, check_output
from stableair.results.plot import MAX_COLOURED_CLASSES
from stableair.results.plugins import MIXED, mixed_components
from stableair.results.points import mean_points
from stableair.results.reading import log_left_out, runs_from
from stableair.results.resources import RESOURCES, format_amount
from stableair.results.run import LAST, Run
from stableair.results.statistics import (
    MIN_SEEDS,
    SIGNIFICANCE,
    PairedDifference,
    compare_groups,
    linear_mean,
    mean_and_std,
    snrs,
)
from stableair.results.styles import LINES
from stableair.validation import as_path, pluralize

LARGEST_ENERGY = "channel/energy_max"
CURVES = "{split}/accuracy", "{split}/loss", "channel/snr_db", "clip/fraction"
DASHES = dict(zip(map(str, LINES), ("solid", "dash", "dashdot", "dot", "longdash", "longdashdot"), strict=True))
MANY_PAIRS = 40  # with more pairs, the page shows the closest pairs, and all pairs on demand
CLOSEST = 20  # rows of a table of closest pairs
MISSING = "–"
ENDINGS = ".html", ".htm"

Figure = dict[str, Any]  # a plotly figure as JSON: "data", "layout", and "narrow", the layout on a narrow screen


class Table(NamedTuple):
    """A table of the page. Numbers, and strings that start with a number, are right-aligned."""

    head: Sequence[str]
    rows: list[list[Any]]


def report(
    runs: Run | str | Path | Iterable[Run | str | Path], out: str | Path = "report.html", *, force: bool = False
) -> Path:
    """Write one self-contained HTML page about recorded runs. `stableair report` calls this function.

    The page shows curves, tables, a paired comparison over the seeds, and the settings and environments of the runs. It
    needs neither network nor server.

    Args:
        runs: Runs, run folders, or folders that contain run folders.
        out: HTML file to write.
        force: Whether to replace a file that was not written by stableair.

    Returns:
        The path of the page.

    Raises:
        InputError: No run can be read (`no-run`), no run has a complete round (`no-rounds`), `out` does not end in
            .html (`unknown-format`), or `out` cannot be written (`cannot-write`).

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2))
    >>> with TemporaryDirectory() as folder:
    ...     sa.report(run, f"{folder}/report.html").name
    'report.html'
    """
    check_page(out, force)
    every_run, left_out = runs_from(runs)
    log_left_out(left_out)
    return write(page(every_run, left_out), out, force)


def page(runs: list[Run], left_out: Sequence[str] = ()) -> str:
    """Return the HTML page about some runs.

    Args:
        runs: The runs. Runs that differ only in the seed form one method.
        left_out: One line for each folder that could not be read; the page lists these lines.

    Raises:
        InputError: No run has a complete round with an accuracy (`no-rounds`).
    """
    split = "test" if any("test/accuracy" in run.rounds[0] for run in runs if run.rounds) else "validation"
    metric = f"{split}/accuracy"
    shown = [run for run in runs if run.rounds and metric in run.rounds[0]]
    if not shown:
        text = "nothing to report: no run has a complete round with an accuracy"
        raise InputError(text, code="no-rounds")
    groups = in_order(group(shown))
    return _template().render(
        title=f"stableair: {pluralize(len(shown), 'run')}, {pluralize(len(groups), 'method')}",
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        version=stableair.__version__,
        generator=GENERATOR,
        accuracy=METRIC_LABELS[metric],
        last=LAST,
        settled=_settled_rounds(groups),
        min_seeds=MIN_SEEDS,
        significance=SIGNIFICANCE,
        results=_results(groups, metric),
        mixed=", ".join(dict.fromkeys(name for runs in groups.values() for name in mixed_components(runs))),
        mixed_mark=MIXED,
        curves=_curves(groups, [(name.format(split=split), "round") for name in CURVES]),
        resources=_resources(groups, metric),
        argument=only_numeric_argument(groups),
        points=_points(shown, only_numeric_argument(groups), metric),
        comparison=_comparison(groups, metric),
        settings=_settings(groups),
        labels=list(_label_figures(shown)),
        environments=_environments(shown),
        left_out=[*left_out, *_without_metric(runs, metric)],
        plotly=_compressed_plotly(),
    )


def check_page(path: str | Path, force: bool = False) -> Path:
    """Check that a page can be written to a path, and return the path.

    Raises:
        InputError: The file may not be written, as for `check_output`, or its extension is not .html
            (`unknown-format`).
    """
    path = check_output(as_path("the page", path), force)
    if path.suffix.lower() not in ENDINGS:
        text = f"cannot write {path}: a report is an HTML page, so its extension must be {' or '.join(ENDINGS)}"
        raise InputError(text, code="unknown-format", path=path, allowed=list(ENDINGS))
    return path


def write(text: str, path: str | Path, force: bool = False) -> Path:
    """Write a page to a file, and return its path. Missing folders are created.

    Args:
        text: The page as HTML.
        path: The file.
        force: Whether to replace a file that was not written by stableair.

    Raises:
        InputError: The file cannot be written.
    """
    path = check_page(path, force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", code="cannot-write", path=path) from None


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["is_number"] = lambda value: str(value).startswith(tuple("0123456789+-±–"))
    return environment.get_template("report.html.j2")


@functools.cache
def _compressed_plotly() -> str:
    """Return plotly.js, compressed with gzip and encoded in base64."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _without_metric(runs: list[Run], metric: str) -> list[str]:
    """Return one line for each run without a complete round, and one line about all runs without the metric."""
    lines = [f"{run.folder}: no complete round" for run in runs if not run.rounds]
    if others := [run for run in runs if run.rounds and metric not in run.rounds[0]]:
        lines.append(
            f"{pluralize(len(others), 'run')} without {metric}, such as {others[0].folder} (trials of a search?)"
        )
    return lines


# ---------------------------------------------------------------------------------------------------------- tables


def _results(groups: Groups, metric: str) -> Table:
    """Return the table of results, with one row per method, sorted by the mean of the last rounds."""
    head = [
        "", "seeds", "rounds", "final", "best", f"mean of the last {_settled_rounds(groups)}", "fluctuation",
        "diverged", "SNR, dB", "linear SNR, dB",
    ]  # fmt: skip
    names = sorted(groups, key=lambda name: -_mean_settled(groups[name], metric))
    return Table(head, [_result_row(name, groups[name], metric) for name in names])


def _settled_rounds(groups: Groups) -> str:
    """Return the number of last rounds over which `Run.settled` averages, such as "10 rounds" or "4 to 10 rounds"."""
    numbers = {run.settled_rounds for runs in groups.values() for run in runs}
    fewest = f"{min(numbers)} to " if len(numbers) > 1 else ""
    return fewest + pluralize(max(numbers), "round")


def _result_row(name: str, runs: list[Run], metric: str) -> list[Any]:
    lengths = sorted({min(map(len, runs)), max(map(len, runs))})
    final = [run[metric][-1] for run in runs]
    best = [max((value for value in run[metric] if value is not None), default=None) for run in runs]
    settled = [None if run.diverged is not None else run.settled(metric) for run in runs]
    fluctuation = [run.fluctuation(metric) for run in runs]
    diverged = sorted(run.diverged for run in runs if run.diverged is not None)
    decibels = snrs(runs)
    return [
        f"{name} {MIXED}" if mixed_components(runs) else name,
        len({run.settings["seed"] for run in runs}),
        " to ".join(map(str, lengths)),
        *map(_mean_pm_std, (final, best, settled, fluctuation)),
        f"at round {', '.join(str(k + 1) for k in diverged)}" if diverged else "no",
        f"{mean_and_std(decibels)[0]:.1f}" if decibels else MISSING,
        f"{linear_mean(decibels):.1f}" if decibels else MISSING,
    ]


def _resources(groups: Groups, metric: str) -> dict[str, Any] | None:
    """Return the totals of each method and the accuracy against them; None without recorded and used resources."""
    every = [run for runs in groups.values() for run in runs]
    used = [name for name in RESOURCES if any(run.has(name) and run[name][-1] for run in every)]
    if not used:
        return None
    recorded = {name: runs for name, runs in groups.items() if any(run.has(each) for run in runs for each in used)}
    rows = [
        [name, *(_mean_total(runs, each) for each in used), _largest_energy(runs)] for name, runs in recorded.items()
    ]
    head = ["", *(METRIC_LABELS[name] for name in used), "largest energy of a client in a round in J"]
    return {"table": Table(head, rows), "curves": _curves(recorded, [(metric, name) for name in used])}


def _mean_total(runs: list[Run], resource: str) -> str:
    used = [run[resource][-1] for run in runs if run.has(resource)]
    return format_amount(float(mean_and_std(used)[0])) if used else MISSING


def _largest_energy(runs: list[Run]) -> str:
    energies = [
        energy for run in runs if run.has(LARGEST_ENERGY) for energy in run[LARGEST_ENERGY] if energy is not None
    ]
    return format_amount(max(energies)) if energies else MISSING


def _mean_pm_std(values: Sequence[float | None]) -> str:
    """Format mean ± standard deviation of the values that are not None.

    >>> _mean_pm_std([0.5, 0.7]), _mean_pm_std([0.5, None, None]), _mean_pm_std([None])
    ('0.6000 ± 0.1414', '0.5000 (1 of 3)', '–')
    """
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    mean, std = mean_and_std(known)
    text = f"{mean:.4f} ± {std:.4f}" if len(known) > 1 else f"{mean:.4f}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _mean_settled(runs: list[Run], metric: str) -> float:
    return float(mean_and_std([run.settled(metric) for run in runs])[0])


def _comparison(groups: Groups, metric: str) -> dict[str, Any]:
    """Return the tables of the paired comparison.

    With many pairs, the result also has two tables of the closest pairs, and all pairs with names replaced by indices.
    """
    head = "first", "second", "seeds", "difference", "standard error", "95 % interval", "p"
    pairs = compare_groups(groups, metric)
    rows = list(map(_pair_row, pairs))
    if len(pairs) <= MANY_PAIRS:
        return {"pairs": Table(head, rows), "closest": None}
    closest = sorted(pairs, key=lambda pair: pair.difference)
    best = max({pair.better for pair in pairs}, key=lambda name: _mean_settled(groups[name], metric))
    index = {name: i for i, name in enumerate(groups)}
    return {
        "pairs": Table(head, rows),
        "closest": Table(head, [_pair_row(pair) for pair in closest[:CLOSEST]]),
        "closest_to_best": Table(head, [_pair_row(pair) for pair in closest if pair.better == best][:CLOSEST]),
        "indexed": {"names": list(groups), "rows": [[index[row[0]], index[row[1]], *row[2:]] for row in rows]},
    }


def _pair_row(pair: PairedDifference) -> list[Any]:
    """Return the row of a pair: names, number of seeds, difference in percentage points, and its uncertainty."""
    names, points = (pair.better, pair.worse), f"{100 * pair.difference:+.2f}"
    if pair.error is None or pair.interval is None:
        return [*names, pair.seeds, points, "one seed", "", ""]
    low, high = (100 * end for end in pair.interval)
    p = MISSING if pair.p is None else f"{pair.p:.2g} {pair.mark}".rstrip()
    return [*names, pair.seeds, points, f"± {100 * pair.error:.2f}", f"{low:+z.2f} to {high:+z.2f}", p]


def _settings(groups: Groups) -> dict[str, Table]:
    """Return a table of the settings that differ between the groups, and a table of the common settings."""
    by_group = {name: runs[0].settings for name, runs in groups.items()}
    first = next(iter(by_group.values()))
    keys = [key for key in TYPES if key not in (*EXECUTION, "seed")]
    differing = [key for key in keys if len({str(settings.get(key)) for settings in by_group.values()}) > 1]
    rows = [[name, *(settings.get(key) for key in differing)] for name, settings in by_group.items()]
    common = [[key, first.get(key)] for key in keys if key not in differing]
    return {"differing": Table(["", *differing], rows), "common": Table(["setting", "value"], common)}


def _environments(runs: list[Run]) -> Table:
    """Return a table of the environments (device, engine, versions, data files) with their numbers of runs."""
    keys = "device", "engine", "precision", "stableair", "torch"
    computed: dict[tuple[str, ...], set[int]] = {}  # the indices of the runs in each environment
    for i, run in enumerate(runs):
        for environment in run.environments:
            files = (environment.get("data") or {}).items()
            data = ", ".join(f"{file} {str(digest)[:12]}" for file, digest in files)
            row = (*(str(environment.get(key, "")) for key in keys), data)
            computed.setdefault(row, set()).add(i)
    return Table([*keys, "data files and SHA-256", "runs"], [[*row, len(indices)] for row, indices in computed.items()])


# --------------------------------------------------------------------------------------------------------- figures


def _curves(groups: Groups, panels: Sequence[tuple[str, str]]) -> Figure:
    """Draw one panel per pair (metric, horizontal axis), with a common legend that hides and shows curves."""
    from plotly.subplots import make_subplots

    rows = -(-len(panels) // 2)
    titles = [METRIC_LABELS.get(metric, metric) for metric, _ in panels]
    cells: list[list[dict[str, Any] | None]] = [[{}, {} if 2 * i + 1 < len(panels) else None] for i in range(rows)]
    figure = make_subplots(rows, 2, specs=cells, subplot_titles=titles, horizontal_spacing=0.08, vertical_spacing=0.13)
    stacked = make_subplots(len(panels), 1, subplot_titles=titles, vertical_spacing=0.3 / len(panels))
    looks = _plotly_looks(groups)
    for i, (metric, x) in enumerate(panels):
        panel = {"row": i // 2 + 1, "col": i % 2 + 1}
        values, ends = [], []
        for name, runs in groups.items():
            if recorded := [run for run in runs if metric in run.rounds[0] and (x == "round" or run.has(x))]:
                horizontal, mean = _line(figure, panel, name, recorded, metric, x, looks[name])
                values += mean
                ends += horizontal[-1:]
        positive = [value for value in values if value > 0]
        if metric.endswith("/loss") and positive and max(positive) > 100 * min(positive):
            figure.update_yaxes(type="log", **panel)  # on a linear axis the other curves would be flat
        figure.update_xaxes(**_horizontal_axis(x, ends), **panel)
    listed: set[str] = set()
    for trace in figure.data:  # the first line of a group represents it in the legend
        trace.showlegend = trace.name in groups and trace.name not in listed
        listed |= {trace.name} if trace.showlegend else set()
    figure.update_layout(
        template="plotly_white", height=360 * rows + 24 * len(groups), showlegend=True,
        margin={"l": 50, "r": 10, "t": 60, "b": 50}, legend={"orientation": "h", "y": -0.12, "yanchor": "top"},
    )  # fmt: skip
    height = 300 * len(panels)
    return _as_json(
        figure,
        # The panels have the same axes in both layouts, at other positions.
        **{f"{axis}.domain": stacked.layout[axis].domain for axis in stacked.layout if axis[1:5] == "axis"},
        annotations=stacked.layout.annotations,
        height=height + 24 * len(groups),
        **{"legend.y": -50 / height},
    )


def _horizontal_axis(x: str, ends: list[float]) -> dict[str, Any]:
    """Return the title and the scale of a horizontal axis; its lines end at `ends`."""
    if x == "round":
        return {"title": "communication round", "dtick": 1 if max(ends, default=0) < 10 else None}
    return {"title": METRIC_LABELS[x], "type": "log" if ends and end_far_apart(ends) else "linear"}


def _points(runs: list[Run], argument: str | None, metric: str) -> Figure | None:
    """Draw the settled accuracy against an argument; return None if `argument` is None."""
    if argument is None:
        return None
    from plotly import graph_objects as go

    lines, references = by_argument(runs, argument)
    members = {label: [run for group in line.values() for run in group] for label, line in lines.items()}
    looks = _plotly_looks(members | references, argument)
    numbers = sorted({value for line in lines.values() for value in line})
    figure = go.Figure()
    for label, line in lines.items():
        mean, std = map(_six_digits, mean_points(line, metric))
        bars = {"array": std, "visible": max(map(len, line.values())) > 1}
        figure.add_scatter(x=list(line), y=mean, error_y=bars, name=label, mode="lines+markers", line=looks[label])
    for label, reference in references.items():
        (height,), (deviation,) = map(_six_digits, mean_points({None: reference}, metric))
        figure.add_scatter(
            x=[numbers[0], numbers[-1]], y=[height, height], name=f"{label}, ± {deviation:.4f}", mode="lines",
            line=looks[label] | {"dash": "dash"},
        )  # fmt: skip
    axis = {"title": argument} | ({"type": "log", "tickvals": numbers} if is_logarithmic(numbers) else {})
    figure.update_layout(
        template="plotly_white", height=400, showlegend=True, margin={"l": 60, "r": 10, "t": 20, "b": 50},
        xaxis=axis, yaxis={"title": METRIC_LABELS[metric]},
    )  # fmt: skip
    return _as_json(figure)


def _plotly_looks(groups: Groups, x: str = "round") -> dict[str, dict[str, str]]:
    looks = line_looks(groups, x)
    return {name: {"color": look["color"], "dash": DASHES[str(look["linestyle"])]} for name, look in looks.items()}


def _line(
    figure: Any, panel: dict[str, int], name: str, runs: list[Run], metric: str, x: str, style: dict[str, str]
) -> tuple[list[float], list[float]]:
    """Draw the mean of a group, its band and its crosses; return the points of the mean."""
    curve = mean_curve(runs, metric, x=x)
    if not len(curve.x):
        return [], []
    recorded = ~np.isnan(curve.mean)
    horizontal, mean = _six_digits(curve.x[recorded]), _six_digits(curve.mean[recorded])
    if len(runs) > 1:
        floor = curve.mean / 10 if metric.endswith("/loss") else -np.inf  # a logarithmic axis has no values below 0
        low = _six_digits(np.maximum(curve.low, floor)[recorded])
        high = _six_digits(curve.high[recorded])
        figure.add_scatter(
            x=horizontal + horizontal[::-1], y=high + low[::-1], fill="toself", fillcolor=style["color"], opacity=0.2,
            mode="lines", line={"width": 0}, hoverinfo="skip", legendgroup=name, **panel,
        )  # fmt: skip
    mode = "lines+markers" if len(mean) == 1 else "lines"
    figure.add_scatter(x=horizontal, y=mean, name=name, legendgroup=name, mode=mode, line=style | {"width": 2}, **panel)
    if crosses := [point for point in curve.crosses if not np.isnan(point[1])]:
        positions, heights = zip(*crosses, strict=True)
        figure.add_scatter(
            x=positions, y=heights, mode="markers", legendgroup=name,
            marker={"symbol": "x", "size": 10, "color": style["color"]}, **panel,
        )  # fmt: skip
    return horizontal, mean


def _six_digits(values: np.ndarray) -> list[float]:
    """Round to six significant digits, which makes the page smaller and changes no visible detail."""
    return [float(f"{value:.6g}") for value in values]


def _label_figures(runs: list[Run]) -> Iterator[Figure]:
    """Draw the label distribution of each data set and partition, for the first run that recorded it."""
    drawn = set()
    for run in runs:
        key = tuple(run.settings[name] for name in ("data", "partition", "clients", "evaluate"))
        if key not in drawn and run.labels is not None:
            drawn.add(key)
            yield _label_figure(np.array(run.labels), f"{key[0]}, {key[1]}, seed {run.settings['seed']}")


def _label_figure(counts: np.ndarray, title: str) -> Figure:
    """Draw a label distribution, `counts` (clients, classes): stacked bars for few classes, a heat map for many."""
    from plotly import graph_objects as go

    clients, classes = counts.shape
    if classes <= MAX_COLOURED_CLASSES:
        x = list(range(clients))
        bars = [go.Bar(x=x, y=counts[:, c].tolist(), name=f"class {c}") for c in range(classes)]
        figure = go.Figure(bars, layout={"barmode": "stack", "bargap": 0.05, "yaxis_title": "samples"})
    else:
        heatmap = go.Heatmap(z=counts.T.tolist(), colorscale="Viridis", colorbar_title="samples")
        figure = go.Figure(heatmap, layout={"yaxis_title": "class"})
    figure.update_layout(
        xaxis_title="client", template="plotly_white", height=360, margin={"l": 60, "r": 10, "t": 40, "b": 50},
        title={"text": title, "font_size": 14},
    )  # fmt: skip
    return _as_json(figure)


def _as_json(figure: Any, **narrow: Any) -> Figure:
    """Return a figure as JSON.

    Args:
        figure: The plotly figure.
        narrow: Changes of the layout for a narrow screen, where the legend is always below the panels.
    """
    from plotly import graph_objects as go

    content: Figure = json.loads(figure.to_json())
    legend = {"legend.orientation": "h", "legend.y": -0.2, "legend.yanchor": "top"}
    changed = go.Figure(figure.data, figure.layout).update_layout(legend | narrow)
    return content | {"narrow": json.loads(changed.to_json())["layout"]}
