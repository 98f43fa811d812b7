"""Publish finished runs: the files in the package, the pictures, and the tables of the pages.

`python bench/reproduce.py publish` calls this. In a page the text between <!-- published: NAME --> and <!-- end --> is
generated; everything else is written by hand. The same runs give the same bytes.
"""

import json
import math
import os
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import reproduce
from verdicts import (
    ACCURACY,
    MISSING,
    NONE,
    SEARCHED_C,
    TOLERANCE,
    Curves,
    accuracy_gain,
    claims,
    pairs,
    verdict,
)

from stableair.experiment import COMPONENT_SETTINGS, EXECUTION, PRESETS, Experiment, registry
from stableair.paper import catalogue, figures, published_runs
from stableair.results import plot
from stableair.results.checksums import EXPERIMENT
from stableair.results.reading import read_run
from stableair.results.run import LAST, Run
from stableair.results.statistics import linear_mean, snrs
from stableair.searches import RESULT

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "README.md", ROOT / "docs/reproduction.md"
IMAGES = ROOT / "docs/images/published"
COMMITS = "commits.json"  # in the folder of the runs: commits of runs whose environment.json has none, or another one
MARKED = re.compile(r"(?<=<!-- published: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
JPEG = "re-encoded as JPEG of quality 93 (mean pixel error 2.4 of 255), labels exact"
DATA = {  # descriptions of the copies; none is the original data set
    "cifar10": f"a copy of CIFAR-10, 50,000 + 10,000 images {JPEG}",
    "cifar100": f"a copy of CIFAR-100, 50,000 + 10,000 images {JPEG}",
    "femnist": "a subset of FEMNIST, 60,757 images of 396 of its 3,597 writers, 29 % of them letters",
}
GAP = "gap"  # attempts to close the gap at tau = 0.3
NAMES = [*(name for name in catalogue.FIGURES if name not in catalogue.SAME_RUNS), "choices", GAP]
SEARCHES = {GAP: reproduce.SEARCH_AT_LARGEST_TAU.name}  # searches that belong to a figure, as a pattern
FIRST = 10  # rounds: later the SNR falls, with the gradient


def publish(folder: Path) -> Iterator[Path]:
    """Write the files of every figure that has finished runs, its pictures, and the tables of the pages."""
    finished, commits = finished_runs(folder), recorded_commits(folder)
    for name in NAMES:
        curves = published_curves(name)
        labels = {title: published_runs.curve_name(name, run.record, curves) for title, run in finished.items()}
        runs = {title: finished[title] for title, label in labels.items() if label and _belongs(title, name)}
        fewest = 2 if name in catalogue.FIGURES else 1  # a figure with one curve compares nothing
        if len({labels[title] for title in runs}) >= fewest:
            data = DATA[PRESETS[preset_of(name)]["data"]]
            yield from published_runs.write(name, curves, runs, searches(folder, name), data, commits)
    yield from draw_pictures()
    for page in PAGES:
        page.write_text(rewritten(page))
        yield page


def draw_pictures() -> Iterator[Path]:
    """Draw every published figure for the light and for the dark mode of the pages."""
    metrics = {
        name: "" for name in catalogue.FIGURES if published_runs.is_published(catalogue.SAME_RUNS.get(name, name))
    }
    if "fig3a" in metrics:  # with the statistics that a plain implementation uses
        metrics["fig3a-clients"] = f"{ACCURACY}_clients"
    for title, metric in metrics.items():
        for style, ending in (("screen", ".png"), ("dark", "-dark.png")):
            picture = figures.draw_published(title.partition("-")[0], metric=metric, style=style)
            yield plot.save(picture, IMAGES / f"{title}{ending}", force=True)


def finished_runs(folder: Path) -> dict[str, Run]:
    """Return the finished runs by their path in the folder, without the trials of searches.

    A run in a folder such as version-0.2 is left out when the folder has a finished run of the same name.
    """
    paths = sorted(path.parent for path in folder.rglob(EXPERIMENT) if not (path.parents[1] / RESULT).exists())
    runs = {path.relative_to(folder).as_posix(): read_run(path) for path in paths}
    finished = {title: run for title, run in runs.items() if published_runs.finished(run)}
    return {title: run for title, run in finished.items() if "/" not in title or Path(title).name not in finished}


def _belongs(title: str, name: str) -> bool:
    """Whether a run may be part of a figure: an attempt to close the gap, such as 120 rounds, is part of none."""
    return name == GAP or not title.startswith("gap-")


def recorded_commits(folder: Path) -> dict[str, str]:
    """Return the commits listed in commits.json, by run."""
    path = folder / COMMITS
    listed = json.loads(path.read_text()) if path.exists() else {}
    return {title: commit for commit, titles in listed.items() for title in titles}


def published_curves(name: str) -> dict[str, Experiment]:
    """The experiments of the curves of a figure, of the modelling choices, or of the attempts to close the gap."""
    return reproduce.gap_curves(reproduce.FOLDER) if name == GAP else catalogue.published_curves(name)


def preset_of(name: str) -> str:
    """Return the preset of a figure; the modelling choices and the gap have that of Fig. 4."""
    return catalogue.FIGURES[name].preset if name in catalogue.FIGURES else "cifar10-noniid"


def searches(folder: Path, name: str) -> dict[str, Any]:
    """Return the finished searches of the thresholds of a figure."""
    pattern = SEARCHES.get(name, f"{preset_of(name)}-search-*")
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob(f"{pattern}/{RESULT}")}
    return {title: results[title] for title in sorted(results) if "best" in results[title]}


def rewritten(page: Path) -> str:
    """Return the text of a page with its marked sections regenerated from the published files."""
    images = os.path.relpath(IMAGES, page.parent)
    return MARKED.sub(lambda mark: f"{mark[1]}{mark[2]}{section(mark[1], images)}\n", page.read_text())


def section(name: str, images: str) -> str:
    """Return the generated text of a marked section."""
    special = {
        "front": lambda: _front_picture(_curves("fig3a"), images),
        "front_table": lambda: _front_table(_curves("fig3a")),
        "snr": lambda: _snr_table(_curves("fig4b")),
        "choices": lambda: _choices_table(_curves("choices")),
        "gap": lambda: _gap_table(_curves(GAP)),
        "runs": _runs_table,
        "summary": _summary,
    }
    if name in special:
        return special[name]()
    curves = _curves(name)
    if not curves:
        return f"{MISSING.capitalize()}."
    panels = [name, *(other for other, source in catalogue.SAME_RUNS.items() if source == name)]
    pictures = [f"![{catalogue.FIGURES[one].title}, from the published runs]({images}/{one}.png)\n" for one in panels]
    return "\n".join([*pictures, _results(name, curves), "", _claims_table(name), "", _source(name)])


def _curves(name: str) -> Curves:
    return published_runs.read(name, published_curves(name)).curves if published_runs.is_published(name) else {}


def _described(name: str) -> dict[str, dict[str, Any]]:
    """Return the published description of each run of a figure: curve, experiment and environment."""
    path = published_runs.FOLDER / f"{name}.json"
    return json.loads(path.read_text())["runs"] if path.exists() else {}


def _names(name: str) -> dict[str, str]:
    """Return the names of curves with runs of an earlier version, such as those in version-0.2, by label."""
    return {
        about["curve"]: f"{about['curve']} ({title.partition('/')[0].replace('-', ' ')})"
        for title, about in _described(name).items()
        if "/" in title
    }


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean_and_deviation(values: Iterable[float | None]) -> str:
    """Return the mean ± standard deviation over the seeds."""
    present = [value for value in values if value is not None]
    if not present:
        return NONE
    return f"{statistics.fmean(present):.3f}" + (f" ± {statistics.stdev(present):.3f}" if len(present) > 1 else "")


def _seeds(runs: list[Run]) -> list[int]:
    return sorted({run.settings["seed"] for run in runs})


def _final(run: Run) -> float | None:
    return None if run.diverged is not None else run[ACCURACY][-1]


def _settled(run: Run, metric: str = ACCURACY) -> float | None:
    return None if run.diverged is not None or metric not in run.rounds[0] else run.settled(metric)


def _fluctuation(run: Run, metric: str = ACCURACY) -> float | None:
    return run.fluctuation(metric) if metric in run.rounds[0] else None


def _results(name: str, curves: Curves) -> str:
    """Return the results of every curve; also with the clients' norm statistics if the model has batch norm."""
    clients = f"{ACCURACY}_clients"
    has_norm = any(clients in run.rounds[0] for runs in curves.values() for run in runs)
    metrics = [ACCURACY, clients] if has_norm else [ACCURACY]
    names = _names(name)

    def row(label: str, runs: list[Run]) -> list[str]:
        ended = ", ".join(f"{run.diverged + 1}" for run in runs if run.diverged is not None)
        final = [_mean_and_deviation(map(_final, runs))] if any(run.diverged is None for run in runs) else []
        db = snrs(runs, FIRST)
        return [
            names.get(label, label), f"`{runs[0].settings['receiver']}`", ", ".join(map(str, _seeds(runs))),
            f"{max(map(len, runs))}", ", ".join(final + ([f"diverged at round {ended}"] if ended else [])),
            *(_mean_and_deviation(of(run, metric) for run in runs)
              for metric in metrics for of in (_settled, _fluctuation)),
            f"{statistics.median(db):.1f}" if db else NONE,
        ]  # fmt: skip

    head = ["curve", "receiver", "seeds", "rounds", "final", "settled", "fluctuation"]
    more = ["settled, clients'", "fluctuation, clients'"] if has_norm else []
    return _table([*head, *more, "SNR"], (row(*item) for item in curves.items()))


def _verdicts(name: str) -> list[tuple[str, str, str]]:
    curves = _curves(name)
    if name == "fig4b" and (searched := _curves(GAP).get("searched C")):
        curves = curves | {SEARCHED_C: searched}
    return [tuple(one) for one in claims(name, curves, _names(name))]


def _claims_table(name: str) -> str:
    return _table(("claim of the paper", "our result", "verdict"), _verdicts(name))


def _summary() -> str:
    """One row for each claim of each figure; one row for a figure without runs."""
    rows = []
    for name in (name for name in NAMES if name in catalogue.FIGURES):
        judged = _verdicts(name)
        if not _curves(name):
            judged = [(judged[0][0] + (", and the other claims" if len(judged) > 1 else ""), MISSING, NONE)]
        rows += [(catalogue.FIGURES[name].title.partition(":")[0].removeprefix("Fig. "), *one) for one in judged]
    return _table(("Fig.", "claim of the paper", "our result", "verdict"), rows)


def _source(name: str) -> str:
    """Return the data, the thresholds and the machine."""
    published = published_runs.read(name, published_curves(name))
    base = catalogue.FIGURES[name].setup
    notes = [figures.describe_search(published_runs.search_result(one, base)) for one in published.searches.values()]
    computed = f"C{published_runs.provenance(published)[1:]}"
    lines = [f"Data: {published.data}", *(f"Threshold: {note}" for note in notes), computed]
    return "\n".join(f"- {line}." for line in lines)


def _snr_table(curves: Curves) -> str:
    """Return the measured SNR of Fig. 4(b), three averages and the highest value, beside the paper's."""

    def averages(db: list[float]) -> list[str]:
        return [f"{value:.1f}" for value in (statistics.fmean(db), statistics.median(db), linear_mean(db))]

    def row(tau: float, paper: int) -> list[str]:
        runs = curves.get(f"τ = {tau:g}")
        if not runs:
            return [f"{tau:g}", str(paper), *[NONE] * 7, MISSING]
        offsets = {run.settings["seed"]: statistics.median(snrs([run], FIRST)) - paper for run in runs}
        near = verdict({seed: abs(offset) <= TOLERANCE for seed, offset in offsets.items()})
        off = f"{near}: {statistics.fmean(offsets.values()):+.1f} dB"
        highest = f"{statistics.fmean(map(_highest_snr, runs)):.1f}"
        return [f"{tau:g}", str(paper), *averages(snrs(runs, FIRST)), *averages(snrs(runs)), highest, off]

    head = (
        "τ", "the paper", f"{FIRST} rounds: mean", "median", "linear", "all: mean", "median", "linear", "highest",
        f"median of {FIRST} within {TOLERANCE:g} dB of the paper",
    )  # fmt: skip
    return _table(head, (row(*item) for item in catalogue.SNR.items()))


def _highest_snr(run: Run) -> float:
    """Return the SNR in dB of the longest gradient of a run under interference of the median norm."""
    signal = [20 * math.log10(norm) for norm in run["gradient/norm"]]
    interference = [ours - snr for ours, snr in zip(signal, run["channel/snr_db"], strict=True)]
    return max(signal) - statistics.median(interference)


def _choices_table(curves: Curves) -> str:
    """Return every alternative modelling choice beside the baseline at the same round."""
    baseline = curves.get("baseline", [])
    head = "alternative", "setting", "seed", "rounds", "test accuracy", "baseline", f"SNR, median of {FIRST}"

    def row(label: str, settings: dict[str, Any]) -> list[str]:
        setting = f"`{' '.join(f'{key}={value}' for key, value in settings.items())}`"
        if label not in curves:
            return [label, setting, NONE, MISSING, NONE, NONE, NONE]
        (run,) = curves[label]
        final = f"diverged at round {run.diverged + 1}" if run.diverged is not None else f"{run[ACCURACY][-1]:.3f}"
        same_round = f"{baseline[0][ACCURACY][len(run) - 1]:.3f}" if baseline else MISSING
        snr = f"{statistics.median(snrs([run], FIRST)):.1f}"
        return [label, setting, f"{run.settings['seed']}", f"{len(run)}", final, same_round, snr]

    rows = [row(*item) for item in catalogue.CHOICES.items()]
    for kind in ("clients", "batch"):  # evaluated in every round of the baseline run
        accuracies = [f"{baseline[0][key][19]:.3f}" for key in (f"{ACCURACY}_{kind}", ACCURACY)] if baseline else []
        label = f"norm statistics of the {'test batch' if kind == 'batch' else kind}"
        rows.append([label, f"`norm_stats={kind}`", "0", "20", *(accuracies or [MISSING, NONE]), NONE])
    return _table(head, rows)


def _gap_table(curves: Curves) -> str:
    """Return the attempts to close the gap between tau = 0.3 and tau = 0.05, with the accuracy gained by each."""
    target, start = (curves.get(label, []) for label in ("target: tau = 0.05", "start: tau = 0.3"))
    labels = list(dict.fromkeys([*published_curves(GAP), "searched C"]))

    def row(label: str) -> list[str]:
        runs = curves.get(label, [])
        if not runs:
            return [label, NONE, NONE, NONE, MISSING, NONE, NONE]
        experiment = runs[0].experiment
        gains, gaps = ({seed: accuracy_gain(*pair) for seed, pair in pairs(one, start).items()}
                       for one in (runs, target))  # fmt: skip
        shares = [100 * gains[seed] / gaps[seed] for seed in gains if gaps.get(seed)]
        gained = f"{statistics.fmean(gains.values()):+.1f}" if runs != start and gains else NONE
        share = f"{statistics.fmean(shares):.0f} %" if runs != start and shares else NONE
        settings = f"`{experiment.receiver} server={experiment.server} average={experiment.average:g}`"
        seeds = ", ".join(map(str, _seeds(runs)))
        settled = _mean_and_deviation(map(_settled, runs))
        return [label, settings, seeds, f"{experiment.rounds}", settled, gained, share]

    head = ("run", "receiver and settings", "seeds", "rounds", "settled", "points gained", "share of the gap")
    return _table(head, map(row, labels))


def command(experiment: Experiment, preset: str) -> str:
    """Return the command that computes a run.

    >>> command(Experiment(**PRESETS["cifar10"]).with_(seed=1, rounds=60, receiver="mac(C=0.316)"), "cifar10")
    'stableair run cifar10 rounds=60 seed=1 receiver=mac receiver.C=0.316'
    """
    base, settings = Experiment(**PRESETS[preset]).to_dict(), experiment.to_dict()
    kept = [key for key in settings if key == "rounds" or key not in EXECUTION]
    changed = [key for key in kept if settings[key] != base[key]]
    words = [word for key in changed for word in _words(key, settings[key])]
    return shlex.join(["stableair", "run", preset, *words])


def _words(key: str, value: Any) -> list[str]:
    """Return a setting as on the command line: `receiver=mac receiver.C=1`; a chain of receivers stays one spec."""
    calls = registry(key).parse(value) if key in COMPONENT_SETTINGS and value != "auto" else ()
    if len(calls) != 1:
        return [f"{key}={value}"]
    return [f"{key}={calls[0].name}", *(f"{key}.{name}={each}" for name, each in calls[0].arguments.items())]


def _runs_table() -> str:
    """Return every published run once, with its settled accuracy, its commit and the command that computes it."""
    rows: dict[str, list[str]] = {}
    for name in NAMES:
        read = {id(run): run for runs in _curves(name).values() for run in runs}.values()
        for title, about in _described(name).items():
            run = next((run for run in read if run.record == about["experiment"]), None)
            if run is None or title in rows:
                continue
            reached = (
                f"{run.settled(ACCURACY):.4f}" if run.diverged is None else f"diverged at round {run.diverged + 1}"
            )
            commits = ", ".join(dict.fromkeys(entry.get("commit") or NONE for entry in about["environment"]))
            rows[title] = [title, reached, commits, f"`{command(run.experiment, preset_of(name))}`"]
    return _table(("run", "settled", "commit", "command"), (rows[title] for title in sorted(rows)))


def _front_picture(curves: Curves, images: str) -> str:
    """Return the picture of the front page."""
    if not curves:
        return f"{MISSING.capitalize()}."
    seen = "MAC is close to the ideal channel; GNC and no clipping are far below"
    alt = f"Test accuracy on CIFAR-10 over {_rounds(curves)} rounds: {seen}"
    return f"![{alt}]({images}/fig3a.png)"


def _front_table(curves: Curves) -> str:
    """Return the results of the front page as a small table."""
    names = _names("fig3a")
    table = _table(
        ("method", "receiver", "seeds", f"test accuracy after {_rounds(curves)} rounds", f"mean of the last {LAST}"),
        ([names.get(label, label), f"`{runs[0].settings['receiver']}`", f"{len(runs)}",
          _mean_and_deviation(map(_final, runs)), _mean_and_deviation(map(_settled, runs))]
         for label, runs in curves.items()),
    )  # fmt: skip
    missing = [label for label in catalogue.published_curves("fig3a") if label not in curves]
    still = f"\n\nStill to be computed: {', '.join(missing)}." if missing else ""
    return f"{table}{still}"


def _rounds(curves: Curves) -> int:
    return max((len(run) for runs in curves.values() for run in runs), default=0)
