"""One HTML page from run folders: curves, tables and a paired comparison. It needs no network and no server."""

import base64
import functools
import gzip
import html
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations, cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

import stableair
from stableair.checks import InputError, count, place
from stableair.experiment import EXECUTION, TYPES
from stableair.files import write_whole
from stableair.results.plot import AXES, FEW, mean_and_spread
from stableair.results.run import LAST, Run, group, linear_mean, runs_of, snrs

CURVES = "{split}/accuracy", "{split}/loss", "channel/snr_db", "clip/fraction"
DASHES = "solid", "dash", "dashdot", "dot", "longdash", "longdashdot"  # as plot.LINES
COLOURS = [to_hex(colour) for colour in colormaps["tab10"](range(10))]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .6rem 0; } th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; }
th { text-align: left; } td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } .note { color: #555; }
"""


# The page carries plotly packed, a third of its size; the figures are drawn when it is unpacked. Tables that few look
# at are written when they are opened.
SCRIPT = """
const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
const code = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(code).text().then(text => {
  const script = document.createElement("script");
  script.text = text;
  document.head.append(script);
  for (const figure of document.querySelectorAll("script.figure")) {
    const {data, layout} = JSON.parse(figure.textContent);
    Plotly.newPlot(figure.previousElementSibling, data, layout, {displaylogo: false, responsive: true});
  }
});
for (const rest of document.querySelectorAll("details.rest")) {
  rest.addEventListener("toggle", () => {
    const {names, rows} = JSON.parse(rest.querySelector("script").textContent);
    const table = rest.querySelector("table");
    if (table.rows.length > 1) return;
    for (const [one, other, ...figures] of rows) {
      const row = table.insertRow();
      for (const text of [names[one], names[other], ...figures]) row.insertCell().textContent = text;
      for (const cell of [...row.cells].slice(2)) cell.className = "n";
    }
  });
}
"""
SHOWN = 20  # pairs of the best, and of the nearest, where there are too many to look at

ALIKE = "data", "partition", "clients", "model", "evaluate"  # what two settings must share to be paired
CHANNEL = "power", "channel", "fading", "noise"  # what the pairs of one channel have in common
FEWEST = 5  # seeds: a t test on fewer rests on its assumptions alone
LEVEL = 0.05


class Paired(NamedTuple):
    """How much better one group is than another on the seeds that both have."""

    better: str
    worse: str
    seeds: int
    difference: float
    error: float | None  # standard error; None for a single seed
    interval: tuple[float, float] | None  # 95 per cent, Student's t
    p: float | None = None  # of a paired t test, by Holm over the pairs of a channel; None for fewer than five seeds

    @property
    def mark(self) -> str:
        """A star where the difference is told from chance."""
        return "*" if self.p is not None and self.p < LEVEL else ""


def page(runs: list[Run], left_out: Sequence[str] = ()) -> str:
    """The page. Runs that differ in the seed alone are one line; `left_out` are the folders that were not read."""
    split = "test" if any("test/accuracy" in run.rounds[0] for run in runs if run.rounds) else "validation"
    accuracy = f"{split}/accuracy"
    shown = [run for run in runs if run.rounds and accuracy in run.rounds[0]]
    if not shown:
        raise InputError("none of these runs has a complete round with an accuracy; there is nothing to report")
    rest = [run for run in runs if not run.rounds or accuracy not in run.rounds[0]]
    others = [f"{run.folder}: no complete round" for run in rest if not run.rounds]
    if searched := [run for run in rest if run.rounds]:
        others.append(f"{len(searched)} runs with no {accuracy}, such as {searched[0].folder} (trials of a search?)")
    groups = group(shown)
    names = list(groups)
    title = f"stableair: {count(len(shown), 'run')}, {count(len(groups), 'setting')}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p class=note>Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by stableair {stableair.__version__}.</p>",
        "<h2>Results</h2>", _results(groups, accuracy),
        "<h2>Curves</h2>",
        "<p class=note>A click on a name hides or shows it. A line is the mean over the seeds, its band one standard "
        "deviation. A run that diverged ends where it did, with a cross.</p>",
        _curves(groups, [metric.format(split=split) for metric in CURVES]),
        "<h2>Paired comparison</h2>", _comparison(groups, accuracy),
        "<h2>Settings that differ</h2>", _settings(names, [group[0].settings for group in groups.values()]),
        "<h2>Who holds which labels</h2>", _labels(shown),
        "<h2>Where it was computed</h2>", _places(shown),
    ]  # fmt: skip
    if dropped := [*left_out, *others]:
        parts += ["<h2>Left out</h2>", "<ul>", *(f"<li>{_text(line)}</li>" for line in dropped), "</ul>"]
    return _document(title, parts)


def _document(title: str, parts: Iterable[str]) -> str:
    head = f"<meta charset=utf-8><title>{_text(title)}</title><style>{STYLE}</style><link rel=icon href='data:,'>"
    scripts = f"<script type=text/plain id=plotly>{_packed_plotly()}</script><script>{SCRIPT}</script>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}{scripts}</body></html>\n"


@functools.cache
def _packed_plotly() -> str:
    return base64.b64encode(gzip.compress(_plotly().offline.get_plotlyjs().encode(), mtime=0)).decode()


def _data(content: str, name: str = "") -> str:
    """JSON in a page, where nothing of it ends the script it stands in."""
    safe = content.replace("</", "<\\/")
    return f'<script type="application/json" class="{name}">{safe}</script>'


def _plotly() -> Any:
    try:
        import plotly.graph_objects
        import plotly.offline
    except ImportError:
        raise InputError("a report needs plotly: pip install 'stableair[report]'") from None
    return plotly


def _text(value: Any) -> str:
    return html.escape(str(value))


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table; cells that start with a digit, a sign or a dash are figures and stand to the right."""

    def cell(value: Any) -> str:
        figure = str(value)[:1] in "0123456789+-–"
        return f"<td class=n>{_text(value)}</td>" if figure else f"<td>{_text(value)}</td>"

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{''.join(f'<th>{_text(h)}</th>' for h in head)}</tr>{body}</table></div>"


def _spread(values: Sequence[float | None], digits: int = 4) -> str:
    """Mean ± standard deviation over the seeds."""
    there = [v for v in values if v is not None]
    if not there:
        return "–"
    mean = f"{statistics.fmean(there):.{digits}f}"
    spread = "" if len(there) == 1 else f" ± {statistics.stdev(there):.{digits}f}"
    return mean + spread + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def _results(groups: dict[str, list[Run]], accuracy: str) -> str:
    def row(name: str, runs: list[Run]) -> list[Any]:
        finals = [run[accuracy][-1] for run in runs]
        best = [max((v for v in run[accuracy] if v is not None), default=None) for run in runs]
        ended = sorted(run.diverged for run in runs if run.diverged is not None)
        settled = [None if run.diverged is not None else run.settled(accuracy) for run in runs]
        return [
            name,
            len({run.settings["seed"] for run in runs}),
            " to ".join(map(str, sorted({min(map(len, runs)), max(map(len, runs))}))),
            *map(_spread, (finals, best, settled, [run.fluctuation(accuracy) for run in runs])),
            f"at round {', '.join(str(k + 1) for k in ended)}" if ended else "no",
            *((f"{statistics.fmean(db):.1f}", f"{linear_mean(db):.1f}") if (db := snrs(runs)) else ("–", "–")),
        ]

    head = [
        "", "seeds", "rounds", f"final {AXES[accuracy]}", "best", "settled", "fluctuation", "diverged",
        "SNR in dB, mean", "of the linear mean",
    ]  # fmt: skip
    note = (
        "Mean ± standard deviation over the seeds that did not diverge. Settled: the mean over a run's last "
        f"{LAST} rounds, or over half of them where there are fewer than {2 * LAST}. Fluctuation: the standard "
        f"deviation over its last {LAST} rounds, which for a run that still learns holds its trend as well. The rows "
        "are in the order of the settled accuracy, in which a run that diverged counts as 0."
    )
    ranked = sorted(groups, key=lambda name: -_mean_settled(groups[name], accuracy))
    return _table(head, (row(name, groups[name]) for name in ranked)) + f"<p class=note>{note}</p>"


def compare(groups: dict[str, list[Run]], accuracy: str) -> list[Paired]:
    """Every two groups that learn the same from the same data: how far the first lies above the second.

    Seed by seed, by the accuracy over the last of the rounds that both have.
    """
    pairs: list[Paired] = []
    families: dict[frozenset[Any], list[int]] = {}  # the pairs of a channel, or of one channel with another
    for one, other in combinations(groups, 2):
        if any(groups[one][0].settings[key] != groups[other][0].settings[key] for key in ALIKE):
            continue
        seeds = [{run.settings["seed"]: run for run in groups[name]} for name in (one, other)]
        differences = []
        for seed in sorted(seeds[0].keys() & seeds[1].keys()):
            mine, theirs = (_cut(each[seed], min(len(each[seed]) for each in seeds)) for each in seeds)
            differences.append(mine.settled(accuracy) - theirs.settled(accuracy))
        if sum(differences) < 0:
            one, other, differences = other, one, [-d for d in differences]
        if differences:
            channels = (tuple(groups[name][0].settings[key] for key in CHANNEL) for name in (one, other))
            families.setdefault(frozenset(channels), []).append(len(pairs))
            pairs.append(Paired(one, other, *_uncertain(differences)))
    for family in families.values():
        for i, p in zip(family, _holm([pairs[i] for i in family]), strict=True):
            pairs[i] = pairs[i]._replace(p=p)
    return sorted(pairs, key=lambda pair: -pair.difference)


def _holm(pairs: list[Paired]) -> list[float | None]:
    """p of each pair by a two-sided paired t test, corrected by Holm over those that have seeds enough."""
    from scipy.stats import t

    tested = [i for i, pair in enumerate(pairs) if pair.seeds >= FEWEST]
    differences, errors = (np.array([getattr(pairs[i], key) for i in tested]) for key in ("difference", "error"))
    certain = np.where(differences == 0, 0.0, np.inf)  # seeds that all differ by the same
    ratios = np.divide(differences, errors, out=certain, where=errors > 0)
    raw = 2 * t.sf(ratios, np.array([pairs[i].seeds - 1 for i in tested]))
    found: list[float | None] = [None] * len(pairs)
    largest = 0.0
    for rank, j in enumerate(np.argsort(raw, kind="stable")):
        largest = max(largest, min(1.0, float(raw[j]) * (len(tested) - rank)))
        found[tested[j]] = largest
    return found


def _cut(run: Run, rounds: int) -> Run:
    """The first rounds of a run; one that diverged stays so."""
    return run if run.diverged is not None else replace(run, rounds=run.rounds[:rounds])


def _uncertain(differences: list[float]) -> tuple[int, float, float | None, tuple[float, float] | None]:
    """How many, their mean, its standard error and its interval."""
    from scipy.stats import t

    n, mean = len(differences), statistics.fmean(differences)
    if n == 1:
        return n, mean, None, None
    error = statistics.stdev(differences) / math.sqrt(n)
    half = float(t.ppf(0.975, n - 1)) * error
    return n, mean, error, (mean - half, mean + half)


def _comparison(groups: dict[str, list[Run]], accuracy: str) -> str:
    pairs = compare(groups, accuracy)
    if not pairs:
        return "<p>No two settings share a seed: nothing to compare.</p>"

    def row(pair: Paired) -> list[Any]:
        points = f"{100 * pair.difference:+.2f}"
        if pair.error is None or pair.interval is None:
            return [pair.better, pair.worse, 1, points, "one seed", "", ""]
        low, high = (100 * end for end in pair.interval)
        spread = f"± {100 * pair.error:.2f}", f"{low:+.2f} to {high:+.2f}"
        tested = "–" if pair.p is None else f"{pair.p:.2g} {pair.mark}"
        return [pair.better, pair.worse, pair.seeds, points, *spread, tested]

    note = (
        f"How many points the {AXES[accuracy]} of the first lies above the second's, seed by seed: the mean over the "
        f"last {LAST} of the rounds that both have, or over half of them where there are fewer than {2 * LAST}. Paired "
        "are settings with the same data, clients and model; the same seed gives them the same batches, and the same "
        "fading and noise where these settings agree. A run that diverged counts as 0. An interval that holds 0 "
        "decides nothing, and of many intervals some miss by chance. p is that of a paired t test, by Holm over the "
        f"pairs of a channel, with a star below {LEVEL}; fewer than {FEWEST} seeds get none, since a t test on so few "
        "rests on its assumptions alone."
    )
    head = "first", "second", "seeds", "difference", "standard error", "95 % interval", "p"
    if len(pairs) <= 2 * SHOWN:
        return f"<p class=note>{note}</p>" + _table(head, map(row, pairs))
    nearest = sorted(pairs, key=lambda pair: pair.difference)
    best = max({pair.better for pair in pairs}, key=lambda name: _mean_settled(groups[name], accuracy))
    names = list(groups)
    rows = [[names.index(pair.better), names.index(pair.worse), *row(pair)[2:]] for pair in pairs]
    every = json.dumps({"names": names, "rows": rows}, separators=(",", ":"))
    return (
        f"<p class=note>{note}</p><p>The best, and what comes nearest to it:</p>"
        + _table(head, map(row, [pair for pair in nearest if pair.better == best][:SHOWN]))
        + "<p>The nearest of all:</p>"
        + _table(head, map(row, nearest[:SHOWN]))
        + f"<details class=rest><summary>All {len(pairs):,} pairs</summary>{_table(head, [])}{_data(every)}</details>"
    )


def _mean_settled(runs: list[Run], accuracy: str) -> float:
    return statistics.fmean(run.settled(accuracy) for run in runs)


def _settings(names: list[str], settings: list[dict[str, Any]]) -> str:
    what = [key for key in TYPES if key not in (*EXECUTION, "seed")]
    differ = [key for key in what if len({str(s.get(key)) for s in settings}) > 1]
    common = {key: settings[0].get(key) for key in what if key not in differ}
    rows = ([name, *(s.get(key) for key in differ)] for name, s in zip(names, settings, strict=True))
    table = _table(["", *differ], rows)
    alike = _table(["common to all", ""], common.items())
    return (table if differ else "<p>None.</p>") + f"<details><summary>The others</summary>{alike}</details>"


def _places(runs: list[Run]) -> str:
    rows: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        for e in run.environments:
            data = ", ".join(f"{file} {str(digest)[:12]}" for file, digest in (e.get("data") or {}).items())
            key = (*(str(e.get(k, "")) for k in ("device", "engine", "precision", "stableair", "torch")), data)
            rows.setdefault(key, []).append(run)
    table = ([*key, len({id(run) for run in mine})] for key, mine in rows.items())
    return _table(("device", "engine", "precision", "stableair", "torch", "data files and SHA-256", "runs"), table)


def _curves(groups: dict[str, list[Run]], metrics: Sequence[str]) -> str:
    """A panel for each metric, with one legend for all: a click on a name acts on every panel."""
    _plotly()
    from plotly.subplots import make_subplots

    rows = -(-len(metrics) // 2)
    titles = [AXES.get(metric, metric) for metric in metrics]
    figure = make_subplots(rows, 2, subplot_titles=titles, horizontal_spacing=0.08, vertical_spacing=0.13)
    for i, metric in enumerate(metrics):
        place = {"row": i // 2 + 1, "col": i % 2 + 1}
        values = []
        for (name, runs), colour, dash in zip(groups.items(), cycle(COLOURS), cycle(DASHES), strict=False):
            if recorded := [run for run in runs if metric in run.rounds[0]]:
                values += _line(figure, place, name, recorded, metric, {"color": colour, "dash": dash})
        positive = [v for v in values if v > 0]
        if metric.endswith("/loss") and positive and max(positive) > 100 * min(positive):
            figure.update_yaxes(type="log", **place)  # a run that blew up must not flatten the others
        longest = max(len(run) for runs in groups.values() for run in runs)
        figure.update_xaxes(title="communication round", dtick=1 if longest < 10 else None, **place)
    named: set[str] = set()
    for trace in figure.data:  # the first line of a group stands for it in the legend
        trace.showlegend = trace.name in groups and trace.name not in named
        named |= {trace.name} if trace.showlegend else set()
    figure.update_layout(
        template="plotly_white", height=360 * rows + 24 * len(groups), showlegend=True,
        margin={"l": 50, "r": 10, "t": 60, "b": 50}, legend={"orientation": "h", "y": -0.12, "yanchor": "top"},
    )  # fmt: skip
    return _plot(figure, "curves")


def _line(figure: Any, place: dict, name: str, runs: list[Run], metric: str, look: dict[str, str]) -> list[float]:
    """Draw a group's mean, its band and its crosses; returns the values of the line."""
    mean, spread = mean_and_spread(runs, metric)
    there = np.flatnonzero(~np.isnan(mean))
    x, y = (there + 1).tolist(), _short(mean[there])  # people count rounds from 1
    if len(runs) > 1:
        floor = mean[there] / 10 if metric.endswith("/loss") else -np.inf  # a band below 0 has no place on a log axis
        low, high = _short(np.maximum(mean[there] - spread[there], floor)), _short(mean[there] + spread[there])
        figure.add_scatter(
            x=x + x[::-1], y=high + low[::-1], fill="toself", fillcolor=look["color"], opacity=0.2, mode="lines",
            line={"width": 0}, hoverinfo="skip", legendgroup=name, **place,
        )  # fmt: skip
    mode = "lines+markers" if len(x) == 1 else "lines"
    figure.add_scatter(x=x, y=y, name=name, legendgroup=name, mode=mode, line=look | {"width": 2}, **place)
    if ended := [run.diverged for run in runs if run.diverged and run.diverged in x]:
        figure.add_scatter(
            x=ended, y=[mean[k - 1] for k in ended], mode="markers", legendgroup=name,
            marker={"symbol": "x", "size": 10, "color": look["color"]}, **place,
        )  # fmt: skip
    return y


def _short(values: np.ndarray) -> list[float]:
    """Six digits each, more than a picture shows."""
    return [float(f"{value:.6g}") for value in values]


def _plot(figure: Any, name: str) -> str:
    identity = "plot-" + "".join(c if c.isalnum() else "-" for c in name)
    return f"<div><div id={identity}></div>{_data(figure.to_json(), 'figure')}</div>"


def _labels(runs: list[Run]) -> str:
    """One picture for each way the data were divided, of its first seed."""
    go, seen, out = _plotly().graph_objects, set(), []
    for run in runs:
        key = tuple(run.settings[k] for k in ("data", "partition", "clients", "evaluate"))
        if key in seen or run.labels is None:
            continue
        seen.add(key)
        counts = np.array(run.labels)
        clients = list(range(len(counts)))
        if counts.shape[1] <= FEW:
            bars = [go.Bar(x=clients, y=counts[:, c].tolist(), name=f"class {c}") for c in range(counts.shape[1])]
            figure = go.Figure(bars, layout={"barmode": "stack", "bargap": 0.05, "yaxis_title": "samples"})
        else:
            map_ = go.Heatmap(z=counts.T.tolist(), colorscale="Viridis", colorbar_title="samples")
            figure = go.Figure(map_, layout={"yaxis_title": "class"})
        figure.update_layout(
            xaxis_title="client", template="plotly_white", height=360, margin={"l": 60, "r": 10, "t": 40, "b": 50},
            title={"text": f"{key[0]}, {key[1]}, seed {run.settings['seed']}", "font_size": 14},
        )  # fmt: skip
        out.append(_plot(figure, f"labels {len(seen)}"))
    return "".join(out) or "<p>Not recorded.</p>"


def report(runs: Run | str | Path | Iterable[Run | str | Path], out: str | Path = "report.html") -> Path:
    """One self-contained page of runs, or of run folders and folders that hold some; `stableair report` is this."""
    check_page(out)
    return write(page(*runs_of(runs)), out)


def check_page(path: str | Path) -> Path:
    """A path at which a page can stand."""
    path = place("the page", path)
    if not path.name or path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder", hint="folder")
    return path


def write(text: str, path: str | Path) -> Path:
    """Write a page."""
    path = check_page(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
