"""The paper's figures as data: which curves each shows, on which set-up, and what in it the paper does not give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Picture

from stableair.checks import InputError, choice
from stableair.data import hub
from stableair.experiment import EXECUTION, IDEAL, PRESETS, Experiment
from stableair.paper import theory_plots
from stableair.results import plot
from stableair.results.run import Run
from stableair.runner import run
from stableair.searches import Range, Result, search

ROUNDS = 100  # the paper names no number
TRIALS, SEARCH_ROUNDS = 12, 20  # the budget of a threshold, the same for MAC and GNC
SEARCHED = {  # what is searched of each rule, and where
    "MAC": ("mac(C=0.13)", "receiver.C", Range(0.01, 10, log=True)),
    "GNC": ("gnc(max_norm=100)", "receiver.max_norm", Range(1, 10_000, log=True)),
}
SNR = {0.05: -35, 0.1: -41, 0.2: -47, 0.3: -50}  # the paper's averages in dB, by tau


class Figure(NamedTuple):
    """A figure of curves: the paper's four methods, or MAC with one setting varied."""

    title: str
    preset: str
    metric: str = "test/accuracy"
    vary: str = ""  # a dotted key; without one, the four methods are compared
    values: tuple[float, ...] = ()
    ours: str = ""  # what of it is this project's choice


FIGURES = {
    "fig3a": Figure("Fig. 3(a): CIFAR-10, ResNet-18", "cifar10"),
    "fig3b": Figure("Fig. 3(b): CIFAR-100, ResNet-34", "cifar100"),
    "fig3c": Figure("Fig. 3(c): FEMNIST, CNN", "femnist"),
    "fig3d": Figure("Fig. 3(d): CIFAR-10, ResNet-18", "cifar10", "test/loss"),
    "fig3e": Figure("Fig. 3(e): CIFAR-100, ResNet-34", "cifar100", "test/loss"),
    "fig3f": Figure("Fig. 3(f): FEMNIST, CNN", "femnist", "test/loss"),
    "fig4a": Figure(
        "Fig. 4(a): MAC over the tail index", "cifar10-noniid", vary="noise.alpha", values=(1.1, 1.2, 1.3, 1.4, 1.5),
        ours="the values between 1.1 and 1.5",
    ),
    "fig4b": Figure(
        "Fig. 4(b): MAC over the scale", "cifar10-noniid", vary="noise.tau", values=tuple(SNR),
    ),
    "fig4c": Figure(
        "Fig. 4(c): MAC over the threshold", "cifar10-noniid", vary="receiver.C", values=(0.05, 0.13, 0.3, 1.0),
        ours="the values of C",
    ),
}  # fmt: skip
DRAWINGS = {
    "fig2": "what MAC does to a gradient: centralise, clip, recover",
    "interval": "the appendix's clipping decision interval",
}
SYMBOL = {"noise.alpha": "α", "noise.tau": "τ", "receiver.C": "C"}


class Stand(NamedTuple):
    """A real set's stand-in for a smoke test: the network, the classes and the shape of an image."""

    model: str
    classes: int
    shape: tuple[int, int, int]
    train: int = 80  # training samples: two steps of each of four clients


STANDS = {
    "cifar10": Stand("resnet18()", 10, (3, 32, 32)),
    "cifar100": Stand("resnet34()", 100, (3, 32, 32), train=40),  # twice the network, half the steps
    "femnist": Stand("cnn()", 62, (1, 28, 28)),
}
SMOKE = {"clients": 4, "rounds": 3, "local_epochs": 1}
SMOKE_TEST, SMOKE_TRIALS = 60, 2


class Plan(NamedTuple):
    """How a figure is made: its set-up, its seeds, and how its thresholds are found or that they were given."""

    figure: Figure
    base: Experiment
    seeds: int = 1
    smoke: bool = False
    trials: int = TRIALS
    search_rounds: int = SEARCH_ROUNDS
    given: dict[str, float] = {}  # noqa: RUF012 (thresholds by method, instead of a search)
    search_each: bool = False  # a C of its own for every curve of Fig. 4
    own: dict[str, Any] = {}  # noqa: RUF012 (settings that are not the figure's)


def plan(name: str, settings: dict[str, Any], *, smoke: bool = False, **how: Any) -> Plan:
    """The paper's set-up of a figure, with settings of one's own on top."""
    figure = FIGURES[choice("figure", name, [*FIGURES, *DRAWINGS])]
    base = Experiment(**PRESETS[figure.preset]).with_(rounds=ROUNDS)
    if smoke:
        base = base.with_(**SMOKE, **_small(base.data))
    for key in settings:
        if key in (figure.vary, "evaluate") or key.partition(".")[0] == "receiver":
            raise InputError(f"{name} sets {key} for each of its curves: leave it out")
    _fitting(name, how.get("given", {}), how.get("search_each", False))
    base = base.with_(**settings)
    budget = {"search_rounds": min(SEARCH_ROUNDS, base.rounds)}
    if smoke:
        budget = {"trials": SMOKE_TRIALS, "search_rounds": 1}
    own = {key: value for key, value in settings.items() if key not in EXECUTION}
    return Plan(figure, base, smoke=smoke, own=own, **budget | how)


def _fitting(name: str, given: dict[str, float], search_each: bool) -> None:
    """Refuse options that a figure has no use for."""
    searched = [] if name == "fig4c" else ["MAC"] if name.startswith("fig4") else ["MAC", "GNC"]
    if useless := [method for method in given if method not in searched]:
        raise InputError(f"{name} searches no threshold of {useless[0]}: leave out its option")
    if search_each and (name not in ("fig4a", "fig4b") or given):
        raise InputError("--search-each is for fig4a and fig4b, and without --C")


def _small(data: str) -> dict[str, str]:
    """Few samples of the real set where the data folder has it, else synthetic ones of the same shape."""
    stand = STANDS[data]
    if hub.file(data).exists():
        return {"data": f"{data}(train={stand.train}, test={SMOKE_TEST})", "model": stand.model}
    made = f"synthetic(samples={stand.train}, classes={stand.classes}, shape={stand.shape}, writers=20)"
    return {"data": made, "model": stand.model}


Watch = Callable[[str, int], Callable]
Say = Callable[[str], None]


def compute(how: Plan, folder: Path, watch: Watch, say: Say) -> tuple[dict[str, list[Run]], list[str]]:
    """The runs of every curve by its label, and what has to be said about their thresholds.

    What the folder has already is not computed again.
    """
    notes: list[str] = []

    def threshold(method: str, base: Experiment) -> Experiment:
        spec, key, space = SEARCHED[method]
        base = base.with_(receiver=spec)
        if method in how.given:
            notes.append(f"{key.partition('.')[2]} = {how.given[method]:g} was given, not searched")
            return base.with_(**{key: how.given[method]})
        found = _searched(how, method, base, folder, watch, say)
        best = found.winner.values[key]
        where = ", at the end of its range" * bool(found.at_boundary)
        notes.append(
            f"{key.partition('.')[2]} = {best:g} is the best of {len(found.trials)} between {space.low:g} and "
            f"{space.high:g} after {_count(how.search_rounds, 'round')} on a validation split, seed {base.seed}{where}"
        )
        return base.with_(**{key: best})

    base, figure = how.base, how.figure
    if not figure.vary:
        methods = {
            "Ideal": base.with_(**IDEAL),
            "MAC": threshold("MAC", base),
            "GNC": threshold("GNC", base),
            "Noisy": base.with_(receiver="none()"),
        }
    elif figure.vary == "receiver.C":
        methods = {_label(figure.vary, v): base.with_(receiver=f"mac(C={v})") for v in figure.values}
    else:
        common = None if how.search_each else threshold("MAC", base)
        methods = {}
        for value in figure.values:
            label = _label(figure.vary, value)
            if common:
                methods[label] = common.with_(**{figure.vary: value})
            else:
                mine = threshold("MAC", base.with_(**{figure.vary: value}))
                methods[f"{label}, C = {mine.receiver.partition('=')[2].rstrip(')')}"] = mine
    runs = {label: _runs(label, experiment, how.seeds, folder, watch) for label, experiment in methods.items()}
    return runs, notes


def _searched(how: Plan, method: str, base: Experiment, folder: Path, watch: Watch, say: Say) -> Result:
    _, key, space = SEARCHED[method]
    base = base.with_(rounds=how.search_rounds)
    say(f"{method}: {how.trials} values of {key} between {space.low:g} and {space.high:g}, "
        f"{_count(base.rounds, 'round')} each on a validation split")  # fmt: skip
    place = folder / f"search-{base.with_(evaluate='validation').name}-{how.trials}x{base.rounds}"
    return search(base, {key: space}, place, trials=how.trials, progress=watch, log=lambda line: say("  " + line))


def _runs(label: str, experiment: Experiment, seeds: int, folder: Path, watch: Watch) -> list[Run]:
    done = []
    for seed in range(experiment.seed, experiment.seed + seeds):
        one = experiment.with_(seed=seed)
        title = label if seeds == 1 else f"{label}, seed {seed}"
        result = run(one, folder / one.name, resume=True, on_round=watch(title, one.rounds))
        done.append(replace(result, rounds=result.rounds[: one.rounds]))  # an older run may have gone further
    return done


def _label(key: str, value: float) -> str:
    return f"{SYMBOL[key]} = {value:g}"


def draw(how: Plan, runs: dict[str, list[Run]], notes: list[str]) -> Picture:
    """The picture of a figure, with a caption that tells its set-up and what of it is not the paper's."""
    if how.figure.vary == "noise.tau":
        runs = {_with_snr(label, value, runs[label]): runs[label] for label, value in
                zip(runs, how.figure.values, strict=True)}  # fmt: skip
    title = f"{how.figure.title}{', own settings' * bool(how.own)}{', smoke test' * how.smoke}"
    return plot.curves(runs, how.figure.metric, title, caption=caption(how, runs, notes))


def _with_snr(label: str, tau: float, runs: list[Run]) -> str:
    measured = [v for one in runs for v in one["channel/snr_db"] if v is not None]
    average = f"{sum(measured) / len(measured):.1f}" if measured else "no"
    return f"{label}, SNR {average} dB (paper: {SNR[tau]} dB)"


def caption(how: Plan, runs: dict[str, list[Run]], notes: list[str]) -> str:
    base, vary = how.base, how.figure.vary
    if how.smoke:
        kind = "synthetic data of the same shape" if base.data.startswith("synthetic") else base.data
        first = f"Smoke test on {kind}: the figure's form, not its result."
    else:
        first = f"Data: {base.data}{_samples(runs)}."
    normed = any("accuracy_clients" in key for each in runs.values() for one in each for key in one.rounds[0])
    setup = [
        f"{base.clients} clients by {base.partition}",
        base.model if base.model != "auto" else "the set's own model",
        f"{_count(base.local_epochs, 'local epoch')} of batch {base.batch_size} at lr {base.lr:g}",
        base.fading,
        f"{base.noise}{f' with {SYMBOL[vary]} varied' if vary.startswith('noise.') else ''}",
        *([f"norm statistics: {base.norm_stats}"] if normed else []),
        f"seeds {base.seed} to {base.seed + how.seeds - 1}" if how.seeds > 1 else f"seed {base.seed}",
    ]
    ours = filter(None, [_count(base.rounds, "round"), *notes, how.figure.ours])
    changed = f" Own settings: {', '.join(f'{k}={v}' for k, v in how.own.items())}." if how.own else ""
    return f"{first}{changed} {', '.join(setup)}. Not from the paper: {'; '.join(ours)}."


def _samples(runs: dict[str, list[Run]]) -> str:
    """How many training samples there were; a folder may hold a part of a set."""
    counts = [sum(map(sum, one.labels)) for each in runs.values() for one in each if one.labels]
    return f", {counts[0]:,} training samples" if counts else ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n > 1)}"


def drawing(name: str) -> Picture:
    """A figure that needs no runs."""
    return {"fig2": theory_plots.steps, "interval": theory_plots.decision}[choice("figure", name, DRAWINGS)]()
