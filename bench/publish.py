"""From finished runs to what everybody sees: the published files of the package, the pictures, the tables of the pages.

`python bench/reproduce.py publish` is this. In a page whatever stands between <!-- published: NAME --> and <!-- end -->
is written anew, and the rest stays as it is. The same runs give the same bytes.
"""

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stableair.experiment import PRESETS
from stableair.paper import archive, figures
from stableair.results import plot
from stableair.results.run import LAST, Run, find, linear_mean, snrs
from stableair.searches import RESULT

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "README.md", ROOT / "docs/reproduction.md"
IMAGES = ROOT / "docs/images/published"
MARKED = re.compile(r"(?<=<!-- published: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
JPEG = "re-encoded as JPEG of quality 93 (mean pixel error 2.4 of 255), labels exact"
DATA = {  # which data these are: none is the set itself
    "cifar10": f"a copy of CIFAR-10, 50,000 + 10,000 images {JPEG}",
    "cifar100": f"a copy of CIFAR-100, 50,000 + 10,000 images {JPEG}",
    "femnist": "a subset of FEMNIST, 60,757 images of 396 of its 3,597 writers, 29 % of them letters",
}
NAMES = [*(name for name in figures.FIGURES if name not in figures.SAME_RUNS), "choices"]
ACCURACY, MISSING, NONE = "test/accuracy", "not run yet", "–"
FIRST = 10  # rounds: later the SNR falls, with the gradient
FEW = 3.0  # points of accuracy, and dB: what "about the same" means here

Curves = dict[str, list[Run]]  # by label; of several seeds


def publish(folder: Path) -> Iterator[Path]:
    """Write the files of every figure that has finished runs, its picture, and the tables of the pages."""
    runs, unreadable = find([folder])
    for line in unreadable:
        print(f"left out: {line}")
    finished = {str(run.folder.relative_to(folder)): run for run in runs if archive.finished(run)}
    for name in NAMES:
        curves = figures.published_curves(name)
        labels = {title: archive.curve_of(name, run.record, curves) for title, run in sorted(finished.items())}
        mine = {title: finished[title] for title, label in labels.items() if label}
        fewest = 2 if name in figures.FIGURES else 1  # a figure of one curve compares nothing
        if len({labels[title] for title in mine}) >= fewest:
            preset = figures.FIGURES[name].preset if name in figures.FIGURES else "cifar10-noniid"
            yield from archive.write(name, curves, mine, searches(folder, preset), DATA[PRESETS[preset]["data"]])
    for name in figures.FIGURES:
        if archive.is_published(figures.SAME_RUNS.get(name, name)):
            yield plot.save(figures.draw_published(name), IMAGES / f"{name}.png")
        if name == "fig3a" and archive.is_published(name):  # as a plain implementation would judge it
            clients = figures.draw_published(name, metric=f"{ACCURACY}_clients")
            yield plot.save(clients, IMAGES / "fig3a-clients.png")
    for page in PAGES:
        page.write_text(rewritten(page))
        yield page


def searches(folder: Path, preset: str) -> dict[str, Any]:
    """The finished searches of a set-up's thresholds."""
    found = {place.parent.name: json.loads(place.read_text()) for place in folder.glob(f"{preset}-search-*/{RESULT}")}
    return {name: found[name] for name in sorted(found) if "best" in found[name]}


def rewritten(page: Path) -> str:
    """A page with what stands in its marked places made anew from the published files."""
    images = os.path.relpath(IMAGES, page.parent)
    return MARKED.sub(lambda mark: f"{mark[1]}{mark[2]}{section(mark[1], images)}\n", page.read_text())


def section(name: str, images: str) -> str:
    """What stands in a marked place."""
    curves = {other: _curves(other) for other in NAMES}
    if name == "front":
        return _front(curves["fig3a"], images)
    if name == "snr":
        return _snr_table(curves["fig4b"])
    if name == "choices":
        return _choices_table(curves["choices"])
    if name == "summary":
        return _summary(curves)
    if not curves[name]:
        return f"{MISSING.capitalize()}."
    shown = [name, *(other for other, source in figures.SAME_RUNS.items() if source == name)]
    pictures = [f"![{figures.FIGURES[one].title}, from the published runs]({images}/{one}.png)\n" for one in shown]
    return "\n".join([*pictures, _results(curves[name]), "", _claims_table(name, curves[name]), "", _source(name)])


def _curves(name: str) -> Curves:
    return archive.read(name, figures.published_curves(name)).curves if archive.is_published(name) else {}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _over_seeds(values: Iterable[float | None]) -> str:
    """Mean ± standard deviation."""
    there = [v for v in values if v is not None]
    if not there:
        return NONE
    return f"{statistics.fmean(there):.3f}" + (f" ± {statistics.stdev(there):.3f}" if len(there) > 1 else "")


def _final(run: Run) -> float | None:
    return None if run.diverged is not None else run[ACCURACY][-1]


def _settled(run: Run, metric: str = ACCURACY) -> float | None:
    return None if run.diverged is not None or metric not in run.rounds[0] else run.settled(metric)


def _fluctuation(run: Run, metric: str = ACCURACY) -> float | None:
    return run.fluctuation(metric) if metric in run.rounds[0] else None


def _results(curves: Curves) -> str:
    """What every curve came to; with the clients' norm statistics too, where the model has any."""
    metrics = [ACCURACY, f"{ACCURACY}_clients"] if _has(curves, f"{ACCURACY}_clients") else [ACCURACY]

    def row(label: str, runs: list[Run]) -> list[str]:
        ended = ", ".join(f"{run.diverged + 1}" for run in runs if run.diverged is not None)
        final = [_over_seeds(map(_final, runs))] if any(run.diverged is None for run in runs) else []
        db = snrs(runs, FIRST)
        return [
            label, f"`{runs[0].settings['receiver']}`", f"{len(runs)} x {max(map(len, runs))}",
            ", ".join(final + ([f"diverged at round {ended}"] if ended else [])),
            *(_over_seeds(of(run, metric) for run in runs) for metric in metrics for of in (_settled, _fluctuation)),
            f"{statistics.median(db):.1f}" if db else NONE,
        ]  # fmt: skip

    head = ["curve", "receiver", "runs", "final", "settled", "moves", "settled, clients'", "moves, clients'"]
    return _table([*head[: 4 + 2 * len(metrics)], "SNR"], (row(*item) for item in curves.items()))


def _has(curves: Curves, metric: str) -> bool:
    """Whether any of the runs has it."""
    return any(metric in run.rounds[0] for runs in curves.values() for run in runs)


def _differences(one: list[Run], other: list[Run], metric: str = ACCURACY) -> list[float]:
    """By how many points the first lies above the second over the last rounds, seed by seed."""
    first, second = ({run.settings["seed"]: run for run in runs} for runs in (one, other))
    return [
        100 * (first[seed].settled(metric) - second[seed].settled(metric))
        for seed in sorted(first.keys() & second.keys())
    ]


def _diverged(curves: Curves, *labels: str) -> str:
    """Which of them have runs that diverged; such a run counts as one of accuracy 0."""
    return "; ".join(
        f"{label} diverged at round {run.diverged + 1}, seed {run.settings['seed']}"
        for label in labels
        for run in curves[label]
        if run.diverged is not None
    )


def _points(found: list[float]) -> str:
    """Their mean, and its standard error over the seeds."""
    if len(found) == 1:
        return f"{found[0]:+.1f} points, one seed"
    error = statistics.stdev(found) / math.sqrt(len(found))
    return f"{statistics.fmean(found):+.1f} ± {error:.1f} points, {len(found)} seeds"


def _in_one(runs: list[Run]) -> str:
    """What a verdict adds where there is but one seed."""
    return " in one seed" if len(runs) == 1 else ""


def _above(found: list[float]) -> str:
    """Whether a method is above another, seed by seed: they are too few for a test of significance."""
    above, n = sum(difference > 0 for difference in found), len(found)
    if 0 < above < n:
        return f"holds in {above} of {n} seeds"
    if above:
        return "holds " + {1: "in one seed", 2: "in both seeds"}.get(n, f"in all {n} seeds")
    return "**does not hold** " + {1: "in one seed", 2: "in either seed"}.get(n, f"in any of {n} seeds")


def _kept(found: list[float]) -> str:
    """Whether a curve is about as good as another, or better."""
    return (
        f"holds within {FEW:g} points"
        if statistics.fmean(found) >= -FEW
        else f"**does not hold** within {FEW:g} points"
    )


def _claims(name: str, curves: Curves) -> Iterator[tuple[str, str, str]]:
    """What the paper says of a figure, what was seen, and the verdict."""

    def compared(claim: str, one: str, other: str, verdict: Any) -> tuple[str, str, str]:
        if one not in curves or other not in curves:
            return claim, f"{' and '.join(label for label in (one, other) if label not in curves)} {MISSING}", NONE
        found, ended = _differences(curves[one], curves[other]), _diverged(curves, one, other)
        return claim, ended or f"{one} against {other}: {_points(found)}", verdict(found)

    def losses(claim: str, lower: str, higher: str) -> tuple[str, str, str]:
        if lower not in curves or higher not in curves:
            return claim, MISSING, NONE
        if ended := _diverged(curves, higher):
            return claim, ended, "holds" + _in_one(curves[higher])
        low, high = (statistics.fmean(run.settled("test/loss") for run in curves[one]) for one in (lower, higher))
        verdict = _above(_differences(curves[higher], curves[lower], "test/loss"))
        return claim, f"{lower} {low:.3f}, {higher} {high:.3f}", verdict

    if name.startswith("fig3"):
        yield compared("MAC markedly improves the accuracy", "MAC", "Noisy", _above)
        yield compared("GNC cannot keep up with MAC", "MAC", "GNC", _above)
        yield compared("the ideal channel is the upper bound", "Ideal", "MAC", _above)
        yield losses("heavy-tailed noise raises the test loss", "Ideal", "Noisy")
        yield losses("(ours) it is lowest with the ideal channel", "Ideal", "MAC")
        wild, calm = ([run.fluctuation(ACCURACY) for run in curves.get(label, [])] for label in ("Noisy", "MAC"))
        claim, ended = "MAC takes most of the fluctuation away", [run.diverged for run in curves.get("Noisy", [])]
        if not wild or not calm:
            yield claim, MISSING, NONE
        elif any(k is not None for k in ended):
            yield claim, _diverged(curves, "Noisy"), "holds" + _in_one(curves["Noisy"])
        else:
            times = statistics.fmean(filter(None, wild)) / statistics.fmean(filter(None, calm))
            yield (
                claim,
                f"Noisy fluctuates {times:.1f} times as much",
                ("holds" if times > 2 else "**does not hold**") + _in_one(curves["Noisy"]),
            )
        yield compared("(ours) no search is needed", "MAC, C = auto", "MAC", _kept)
    if name == "fig4a":
        yield compared("from α = 1.5 to 1.1 MAC keeps its accuracy", "α = 1.1", "α = 1.5", _kept)
        yield compared("(ours) so does the one that tunes itself", "α = 1.1, C = auto", "α = 1.5, C = auto", _kept)
    if name == "fig4b":
        ends = {  # how C was chosen, and the curves at both ends
            "one C": ("τ = 0.3", "τ = 0.05"),
            "C = 1.3 τ": ("τ = 0.3, C = 0.39", "τ = 0.05, C = 0.065"),
            "C = auto": ("τ = 0.3, C = auto", "τ = 0.05, C = auto"),
        }
        for how, (one, other) in ends.items():
            yield compared(f"performance is sustained at -50 dB, {how}", one, other, _kept)
    if name == "fig4c" and not curves:
        yield "thresholds converge alike", MISSING, NONE
    elif name == "fig4c":
        reached = [statistics.fmean(run.settled(ACCURACY) for run in runs) for runs in curves.values()]
        spread = 100 * (max(reached) - min(reached))
        yield "thresholds converge alike", f"the best lies {spread:.1f} points above the worst", _kept([-spread])


def _claims_table(name: str, curves: Curves) -> str:
    return _table(("the paper says", "we saw", "verdict"), _claims(name, curves))


def _source(name: str) -> str:
    """The data, the thresholds and the machine."""
    found = archive.read(name, figures.published_curves(name))
    base = figures.plan(name, {}).base
    notes = [figures.describe_search(archive.search_of(one, base)) for one in found.searches.values()]
    thresholds = f"Thresholds: {'; '.join(notes)}. " if notes else ""
    return f"Data: {found.data}. {thresholds}C{archive.computed(found)[1:]}."


def _snr_table(curves: Curves) -> str:
    """The measured SNR of Fig. 4(b), in three averages and at its highest, beside the paper's."""

    def three(db: list[float]) -> list[str]:
        return [f"{value:.1f}" for value in (statistics.fmean(db), statistics.median(db), linear_mean(db))]

    def row(tau: float, paper: int) -> list[str]:
        runs = curves.get(f"τ = {tau:g}")
        if not runs:
            return [f"{tau:g}", str(paper), *[NONE] * 7, MISSING]
        off = statistics.median(snrs(runs, FIRST)) - paper
        verdict = f"{'holds' if abs(off) <= FEW else '**does not hold**'}: {off:+.1f} dB"
        highest = f"{statistics.fmean(map(_highest_snr, runs)):.1f}"
        return [f"{tau:g}", str(paper), *three(snrs(runs, FIRST)), *three(snrs(runs)), highest, verdict]

    head = (
        "τ", "the paper", f"{FIRST} rounds: mean", "median", "linear", "all: mean", "median", "linear", "highest",
        f"median of {FIRST} within {FEW:g} dB",
    )  # fmt: skip
    return _table(head, (row(*item) for item in figures.SNR.items()))


def _highest_snr(run: Run) -> float:
    """Of the longest gradient of all rounds over interference of the median norm: in dB."""
    signal = [20 * math.log10(norm) for norm in run["gradient/norm"]]
    interference = [ours - snr for ours, snr in zip(signal, run["channel/snr_db"], strict=True)]
    return max(signal) - statistics.median(interference)


def _choices_table(curves: Curves) -> str:
    """Every open choice read the other way, beside the run as settled at the same round."""
    settled = curves.get("as settled", [])
    head = "read the other way", "setting", "rounds", "test accuracy", "as settled", f"SNR in dB, median of {FIRST}"

    def row(label: str, settings: dict[str, Any]) -> list[str]:
        setting = f"`{' '.join(f'{key}={value}' for key, value in settings.items())}`"
        if label not in curves:
            return [label, setting, MISSING, NONE, NONE, NONE]
        (run,) = curves[label]
        final = f"diverged at round {run.diverged + 1}" if run.diverged is not None else f"{run[ACCURACY][-1]:.3f}"
        beside = f"{settled[0][ACCURACY][len(run) - 1]:.3f}" if settled else MISSING
        return [label, setting, f"{len(run)}", final, beside, f"{statistics.median(snrs([run], FIRST)):.1f}"]

    rows = [row(*item) for item in figures.CHOICES.items()]
    for kind in ("clients", "batch"):  # they act on the evaluation alone: one run has all three
        values = (
            [f"{settled[0][key][19]:.3f}" for key in (f"{ACCURACY}_{kind}", ACCURACY)] if settled else [MISSING, NONE]
        )
        rows.append([f"norm statistics: the {kind}{'' if kind == 'batch' else chr(39)}", f"`norm_stats={kind}`", "20",
                     *values, NONE])  # fmt: skip
    return _table(head, rows)


def _summary(curves: dict[str, Curves]) -> str:
    """A line for each claim of each figure, and one alone for a figure without runs."""
    rows = []
    for name in (name for name in NAMES if name in figures.FIGURES):
        claims = list(_claims(name, curves[name]))
        if not curves[name]:
            said = claims[0][0] + (", and so on" if len(claims) > 1 else "")
            claims = [(said, MISSING, NONE)]
        rows += [(figures.FIGURES[name].title.partition(":")[0].removeprefix("Fig. "), *claim) for claim in claims]
    return _table(("Fig.", "the paper says", "we saw", "verdict"), rows)


def _front(curves: Curves, images: str) -> str:
    """The front page: the picture and a small table."""
    if not curves:
        return f"{MISSING.capitalize()}."
    rounds = max(len(run) for runs in curves.values() for run in runs)
    alt = f"Test accuracy on CIFAR-10 over {rounds} rounds; the curves are in the table below"
    table = _table(
        ("method", "receiver", "seeds", f"test accuracy after {rounds} rounds", f"mean of the last {LAST}"),
        ([label, f"`{runs[0].settings['receiver']}`", f"{len(runs)}", _over_seeds(map(_final, runs)),
          _over_seeds(map(_settled, runs))] for label, runs in curves.items()),
    )  # fmt: skip
    missing = [label for label in figures.published_curves("fig3a") if label not in curves]
    still = f"\n\nStill to be computed: {', '.join(missing)}." if missing else ""
    return f"![{alt}]({images}/fig3a.png)\n\n{table}{still}"
