"""The paper's figures as data: which curves each shows, on which set-up, and what in it the paper does not give."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Picture

from stableair import builder
from stableair.checks import InputError, Note, choice, count, place, typed, whole
from stableair.data import hub
from stableair.data.table import IMAGE_SETS
from stableair.experiment import EXECUTION, PRESETS, Experiment, components_of_record
from stableair.paper import archive, theory_plots
from stableair.paper.methods import LABELS, METHODS, experiments
from stableair.results import plot
from stableair.results.run import Row, Run, group, linear_mean, runs_of, snrs
from stableair.searches import Range, Result, search
from stableair.sweeps.plans import over_seeds
from stableair.sweeps.processes import sweep

ROUNDS = 100  # the paper names no number
TRIALS, SEARCH_ROUNDS = 12, 20  # the budget of a threshold, the same for MAC and GNC
SEARCHED = {  # what is searched of each rule, and where
    "MAC": (METHODS["mac"].receiver.format(0.13), METHODS["mac"].key, Range(0.01, 10, log=True)),
    "GNC": (METHODS["gnc"].receiver.format(100), METHODS["gnc"].key, Range(1, 100_000, log=True)),
}
SAME_RUNS = {"fig3d": "fig3a", "fig3e": "fig3b", "fig3f": "fig3c"}  # the loss of the runs whose accuracy another shows
AUTO, SCALED = "mac(C=auto)", "C = 1.3 τ"
CHOICES: dict[str, dict[str, Any]] = {  # what the paper leaves open, each read the other way: docs/reproduction.md
    "what is sent: the difference of the weights": {"payload": "delta"},
    "fading of unit power, not of unit mean": {"fading": "rayleigh(power=1)"},
    "group norm, not batch norm": {"model": "resnet18(norm=group)"},
    "clients of unequal size": {"partition": "dirichlet_by_class(beta=0.3)"},
    "interference added before the division by N": {"channel.noise_on": "sum"},
    "He's initialisation, not torch's": {"model": "resnet18(init=he)"},
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
        ours="any α but 1.1 and 1.5",
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


SMOKE = {"clients": 4, "rounds": 3, "local_epochs": 1}
SMOKE_TRAIN = {"cifar100": 40}  # training samples: twice the network, half the steps
SMOKE_TRAIN_OTHERS = 80  # two steps of each of four clients
SMOKE_TEST, SMOKE_TRIALS = 60, 2

Progress = Callable[[str, int], Callable[[Row], Any]]  # (title, rounds) -> what is shown each round
Log = Callable[[str], Any]  # takes a line of text
Given = Run | str | Path | Iterable[Run | str | Path]  # runs, or folders of runs


class Plan(NamedTuple):
    """How a figure is made: its set-up, its seeds, and how its thresholds are found or that they were given."""

    figure: Figure
    base: Experiment
    seeds: int
    smoke: bool
    trials: int
    search_rounds: int
    given: dict[str, float]  # thresholds by method, instead of a search
    search_each: bool  # a C of its own for every curve of Fig. 4
    own: dict[str, Any]  # settings that are not the figure's


@typed
def figure(
    name: str,
    out: str | Path | None = None,
    *,
    smoke: bool = False,
    rounds: int | None = None,
    seeds: int = 1,
    settings: dict[str, Any] | None = None,
    thresholds: dict[str, float] | None = None,
    search_each: bool = False,
    trials: int | None = None,
    search_rounds: int | None = None,
    published: bool = False,
    own: Given = (),
    metric: str = "",
) -> Picture:
    """Make a figure of the paper: compute the runs that are missing in `out`, draw, and write NAME.png and NAME.pdf.

    name: fig2, fig3a to fig3f, fig4a to fig4c, or interval. out: by default the folder runs, with smoke runs/smoke
    and with published runs/published.
    smoke: the same figure, very small. seeds: two or more give a band. settings: of an experiment, such as
    {"clients": 10, "noise.tau": 0.2}. The thresholds of MAC and GNC are searched, with so many `trials` of
    `search_rounds` each, unless `thresholds` gives them: {"MAC": 0.13, "GNC": 100}. With search_each=True every curve
    of fig4a or fig4b has a threshold of its own. published=True computes nothing: it draws the runs that come with the
    package, and lays runs of one's own over them: own="runs/mine"; metric is another one of rounds.jsonl than the
    figure's, such as "test/accuracy_clients". `stableair figure` is this.
    """
    folder = place("out", default_folder(smoke=smoke, published=published) if out is None else out)
    given = {
        "rounds": rounds, "seeds": seeds != 1, "settings": settings, "thresholds": thresholds,
        "search_each": search_each, "trials": trials, "search_rounds": search_rounds,
    }  # fmt: skip
    given_runs = not (isinstance(own, list | tuple) and not own)
    if name in DRAWINGS:
        refuse(f"{name} is drawn without runs", given | {"published": published, "own": given_runs, "metric": metric})
        picture = drawing(name)
    elif published:
        refuse("published runs are drawn as they are", given | {"smoke": smoke})
        picture = draw_published(name, own, metric)
    else:
        refuse("these are for published runs, with published=True", {"own": given_runs, "metric": metric})
        own = (settings or {}) | ({} if rounds is None else {"rounds": rounds})
        made = plan(name, own, smoke=smoke, seeds=seeds, given=thresholds, search_each=search_each, trials=trials,
                    search_rounds=search_rounds)  # fmt: skip
        picture = draw(made, *compute(made, folder, lambda title, rounds: lambda row: None, lambda line: None))
    for ending in ("png", "pdf"):
        plot.save(picture, folder / f"{stem(name, metric)}.{ending}")
    return picture


def stem(name: str, metric: str) -> str:
    """The name of a figure's files: with a metric that is not its own, that as well."""
    return f"{name}-{metric.replace('/', '-')}" if metric else name


def default_folder(smoke: bool = False, published: bool = False) -> str:
    """Where a figure goes that nobody says a place for."""
    return "runs/smoke" if smoke else "runs/published" if published else "runs"


def refuse(why: str, options: dict[str, Any]) -> None:
    """Refuse the options that were given a value."""
    if useless := [option for option, value in options.items() if value]:
        raise InputError(f"{why}: leave out {', '.join(useless)}")


def plan(
    name: str,
    settings: dict[str, Any],
    *,
    smoke: bool = False,
    seeds: int = 1,
    given: dict[str, float] | None = None,
    search_each: bool = False,
    trials: int | None = None,
    search_rounds: int | None = None,
) -> Plan:
    """The paper's set-up of a figure, with settings of one's own on top."""
    figure = FIGURES[choice("figure", name, [*FIGURES, *DRAWINGS])]
    base = Experiment(**PRESETS[figure.preset]).with_(rounds=ROUNDS)
    if smoke:
        base = base.with_(**SMOKE, **_small(base.data))
    for key in settings:
        if key in (figure.vary, "evaluate") or key.partition(".")[0] == "receiver":
            raise InputError(f"{name} sets {key} for each of its curves: leave it out")
    given = given or {}
    _check_thresholds(name, given, search_each)
    base = base.with_(**settings)
    builder.device(base.device)  # what no run could take is refused before the first
    for method, value in given.items():
        _at_threshold(method, base, value)
    if trials is None:
        trials = SMOKE_TRIALS if smoke else TRIALS
    if search_rounds is None:
        search_rounds = 1 if smoke else min(SEARCH_ROUNDS, base.rounds)
    return Plan(
        figure,
        base,
        seeds=whole("seeds", seeds, 1),
        smoke=smoke,
        trials=whole("trials", trials, 1),
        search_rounds=whole("search_rounds", search_rounds, 1),
        given=given,
        search_each=search_each,
        own={key: value for key, value in settings.items() if key not in EXECUTION},
    )


def _check_thresholds(name: str, given: dict[str, float], search_each: bool) -> None:
    """Refuse thresholds that a figure has no use for."""
    searched = [] if name == "fig4c" else ["MAC"] if name.startswith("fig4") else ["MAC", "GNC"]
    for method in given:
        if choice("method", method, SEARCHED) not in searched:
            raise InputError(f"{name} searches no threshold of {method}: leave it out")
    if search_each and (name not in ("fig4a", "fig4b") or given):
        raise InputError("search_each=True is for fig4a and fig4b, and for thresholds that are not given")


def _at_threshold(method: str, base: Experiment, value: float) -> Experiment:
    spec, key, _ = SEARCHED[method]
    return base.with_(receiver=spec).with_(**{key: value})


def _small(data: str) -> dict[str, str]:
    """Few samples of the real set where the data folder has it, else synthetic ones of the same shape."""
    known, train = IMAGE_SETS[data], SMOKE_TRAIN.get(data, SMOKE_TRAIN_OTHERS)
    if hub.file(data).exists():
        return {"data": f"{data}(train={train}, test={SMOKE_TEST})", "model": known.model}
    made = f"synthetic(samples={train}, classes={known.classes}, shape={known.shape}, writers=20)"
    return {"data": made, "model": known.model}


def compute(plan: Plan, folder: Path, progress: Progress, log: Log) -> tuple[dict[str, list[Run]], list[str]]:
    """The runs of every curve by its label, and what has to be said about their thresholds.

    What the folder has already is not computed again.
    """
    notes: list[str] = []

    def tuned(method: str, base: Experiment) -> Experiment:
        spec, key, _ = SEARCHED[method]
        if method in plan.given:
            notes.append(f"{key.partition('.')[2]} = {plan.given[method]:g} was given, not searched")
            return _at_threshold(method, base, plan.given[method])
        found = _searched(plan, method, base.with_(receiver=spec), folder, progress, log)
        notes.append(describe_search(found))
        return _at_threshold(method, base, found.winner.values[key])

    wanted = curves(plan, tuned)
    return _runs({label: over_seeds(one, plan.seeds) for label, one in wanted.items()}, folder, progress), notes


def curves(plan: Plan, tuned: Callable[[str, Experiment], Experiment]) -> dict[str, Experiment]:
    """The experiment of every curve by its label; `tuned(method, base)` is the base with that method's threshold."""
    base, figure = plan.base, plan.figure
    if not figure.vary:
        four = experiments(base, lambda name: tuned(LABELS[name], base))
        return {_capital(LABELS[name]): experiment for name, experiment in four.items()}
    if figure.vary == "receiver.C":
        return {_label(figure.vary, v): base.with_(receiver=f"mac(C={v})") for v in figure.values}
    if not plan.search_each:
        common = tuned("MAC", base)
        return {_label(figure.vary, v): common.with_(**{figure.vary: v}) for v in figure.values}
    found = {}
    for value in figure.values:
        mine = tuned("MAC", base.with_(**{figure.vary: value}))
        found[f"{_label(figure.vary, value)}, C = {mine.receiver.partition('=')[2].rstrip(')')}"] = mine
    return found


def describe_search(found: Result) -> str:
    """The threshold that a search found, and how."""
    ((key, space),) = found.spaces.items()
    low, high = space.ends()
    name, best = key.partition(".")[2], found.winner.values[key]
    where = ", at the end of its range" if found.at_boundary else ""
    early = sum(trial.stopped for trial in found.trials)
    tried = f"{len(found.trials)} ({early} of them stopped early)" if early else f"{len(found.trials)}"
    return (
        f"{name} = {best:g} is the best of {tried} between {low:g} and "
        f"{high:g} after {count(found.base.rounds, 'round')} on a validation split, seed {found.base.seed}{where}"
    )


def _searched(plan: Plan, method: str, base: Experiment, folder: Path, progress: Progress, log: Log) -> Result:
    _, key, space = SEARCHED[method]
    base = base.with_(rounds=plan.search_rounds)
    log(f"{method}: {plan.trials} values of {key} between {space.low:g} and {space.high:g}, "
        f"{count(base.rounds, 'round')} each on a validation split")  # fmt: skip
    place = folder / f"search-{base.with_(evaluate='validation').name}-{plan.trials}x{base.rounds}"
    return search(base, {key: space}, place, trials=plan.trials, progress=progress, log=lambda line: log("  " + line))


def _runs(curves: dict[str, list[Experiment]], folder: Path, progress: Progress) -> dict[str, list[Run]]:
    """The runs of every curve: a sweep, so that another process that makes the same figure shares the work."""
    titles = {
        one.name: label if len(seeds) == 1 else f"{label}, seed {one.seed}"
        for label, seeds in curves.items() for one in seeds
    }  # fmt: skip
    experiments = [one for seeds in curves.values() for one in seeds]
    done = sweep(experiments, folder, begin=lambda one: progress(titles[one.name], one.rounds))
    found = {run.experiment.name: run for run in done}
    return {label: [found[one.name] for one in seeds] for label, seeds in curves.items()}


def _capital(label: str) -> str:
    return label[0].upper() + label[1:]


def _label(key: str, value: float) -> str:
    return f"{SYMBOL[key]} = {value:g}"


def draw(plan: Plan, runs: dict[str, list[Run]], notes: list[str], data: str = "") -> Picture:
    """The picture of a figure, with a caption that tells its set-up and what of it is not the paper's."""
    title = [plan.figure.title, *(["own settings"] if plan.own else []), *(["smoke test"] if plan.smoke else [])]
    log = plan.figure.metric.endswith("/loss")  # a noisy run's may be a hundred times the others'
    text = _with_snr if plan.figure.vary == "noise.tau" else lambda label, runs: label
    families = {"": runs} if plan.search_each else _families(plan.figure, runs)
    return plot.panels(families, plan.figure.metric, ", ".join(title), caption(plan, runs, notes, data), log, text)


def _families(figure: Figure, runs: dict[str, list[Run]]) -> dict[str, dict[str, list[Run]]]:
    """The curves of Fig. 4(a) and (b) by how their C was chosen: there is a panel for each way."""
    found: dict[str, dict[str, list[Run]]] = {}
    for label, each in runs.items():
        point, _, C = label.partition(", C = ") if figure.vary.startswith("noise.") else (label, "", "")
        found.setdefault({"": "one C", "auto": "C = auto"}.get(C, SCALED), {})[point] = each
    if SCALED in found:  # at tau = 0.1 it is the one C
        found[SCALED] = {point: found[SCALED].get(point, each) for point, each in found["one C"].items()}
    return found if len(found) > 1 else {"": runs}


def _with_snr(label: str, runs: list[Run]) -> str:
    """A label of Fig. 4(b) with the measured SNR, and the paper's at that tau."""
    found, tau = snrs(runs), components_of_record(runs[0].record)["noise"][0][1].get("tau")
    measured = f"mean {fmean(found):.1f} dB, linear {linear_mean(found):.1f} dB" if found else "none"
    return f"{label}, SNR: {measured}" + (f" (paper: up to {SNR[tau]} dB)" if tau in SNR else "")


def caption(plan: Plan, runs: dict[str, list[Run]], notes: list[str], data: str = "") -> str:
    """What the picture shows; `data` says which copy of the data it was, where it was not the set itself."""
    base, vary = plan.base, plan.figure.vary
    if plan.smoke:
        kind = "synthetic data of the same shape" if base.data.startswith("synthetic") else base.data
        first = f"Smoke test on {kind}: the figure's form, not its result."
    else:
        first = f"Data: {data or base.data + _samples(runs)}."
    normed = any("accuracy_clients" in key for each in runs.values() for one in each for key in one.rounds[0])
    setup = [
        f"{base.clients} clients by {base.partition}",
        base.model if base.model != "auto" else "the set's own model",
        f"{count(base.local_epochs, 'local epoch')} of batch {base.batch_size} at lr {base.lr:g}",
        base.fading,
        f"{base.noise}{f' with {SYMBOL[vary]} varied' if vary.startswith('noise.') else ''}",
        *([f"norm statistics: {plan.figure.metric.partition('accuracy_')[2] or base.norm_stats}"] if normed else []),
        _seeds(plan, runs),
    ]
    ours = [count(base.rounds, "round"), *notes, *([plan.figure.ours] if plan.figure.ours else [])]
    changed = f" Own settings: {', '.join(f'{k}={v}' for k, v in plan.own.items())}." if plan.own else ""
    ended = any(one.diverged is not None for each in runs.values() for one in each)
    cross = " ×: the last round before a run diverged." if ended else ""
    return f"{first}{changed} {', '.join(setup)}. Not from the paper: {'; '.join(ours)}.{cross}"


def _seeds(plan: Plan, runs: dict[str, list[Run]]) -> str:
    """Which seeds there are, and whether every curve has them all."""
    first, n = plan.base.seed, plan.seeds
    if n == 1:
        return f"seed {first}"
    fewer = any(len(each) < n for each in runs.values())
    return f"seeds {first} to {first + n - 1}" + (f" where the legend says {n} seeds, else fewer" if fewer else "")


def _samples(runs: dict[str, list[Run]]) -> str:
    """How many training samples there were; a folder may hold a part of a set."""
    counts = [sum(map(sum, one.labels)) for each in runs.values() for one in each if one.labels]
    return f", {counts[0]:,} training samples" if counts else ""


def published_curves(name: str) -> dict[str, Experiment]:
    """The experiments whose runs are published for a figure, by label: the paper's, then those shown beside them.

    `choices` stands for the paper's open choices, each read the other way.
    """
    if name == "choices":
        base = Experiment(**PRESETS["cifar10-noniid"])
        return {"as settled": base} | {label: base.with_(**settings) for label, settings in CHOICES.items()}
    made = plan(name, {})
    found = curves(made, lambda method, base: base.with_(receiver=SEARCHED[method][0]))
    vary, beside = made.figure.vary, {}
    if not vary:
        beside = {"MAC, C = auto": made.base.with_(receiver=AUTO)}
    if vary == "noise.tau":  # C in proportion, which at tau = 0.1 is what it was
        scaled = {tau: found[_label(vary, tau)].with_(**{"receiver.C": round(1.3 * tau, 4)}) for tau in SNR}
        beside |= {f"{_label(vary, tau)}, C = {1.3 * tau:g}": one for tau, one in scaled.items() if tau != 0.1}
    if vary.startswith("noise."):
        beside |= {f"{label}, C = auto": one.with_(receiver=AUTO) for label, one in found.items()}
    return found | beside


def published_runs(name: str) -> archive.Archive:
    """What is published of a figure."""
    there = [name for name in FIGURES if archive.is_published(SAME_RUNS.get(name, name))]
    if choice("figure", name, FIGURES) not in there:
        raise InputError(f"nothing is published of {name} yet; there are runs of {', '.join(there) or 'no figure'}")
    source = SAME_RUNS.get(name, name)
    return archive.read(source, published_curves(source))


def own_runs(name: str, given: Given) -> tuple[dict[str, list[Run]], list[str]]:
    """Runs of one's own that may be laid over a figure, by label; and why others may not.

    They have the figure's set-up, with any receiver and any value of what the figure varies, or are one of its curves.
    """
    found, left_out = runs_of(given)
    source, base, fitting = SAME_RUNS.get(name, name), plan(name, {}).base, []
    for one in found:
        unlike = archive.differences(one.record, base) - {"rounds", FIGURES[name].vary}
        unlike = {key for key in unlike if key.partition(".")[0] != "receiver"}
        if unlike and not archive.curve_of(source, one.record, published_curves(source)):
            left_out.append(f"{one.folder}: not the set-up of {name}, it differs in {', '.join(sorted(unlike))}")
        elif not one.rounds:
            left_out.append(f"{one.folder}: no complete round")
        else:
            fitting.append(one)
    return {f"yours: {label}": runs for label, runs in group(fitting).items()}, left_out


def draw_published(name: str, own: Given = (), metric: str = "") -> Picture:
    """A figure from its published runs, with runs of one's own laid over them; whatever is left out is said.

    With a metric that is not the figure's own, that one.
    """
    found = published_runs(name)
    mine, left_out = own_runs(name, own) if own else ({}, [])
    for line in (*found.left_out, *left_out):
        warnings.warn(f"left out: {line}", Note, stacklevel=2)
    if not found.curves:
        raise InputError(f"no published run of {name} can be drawn; the first: {found.left_out[0]}")
    every = [one for each in found.curves.values() for one in each]
    seeds = {one.settings["seed"] for one in every}
    made = plan(name, {"rounds": max(map(len, every))}, seeds=len(seeds))
    if metric:
        choice("metric", metric, [key for key in every[0].rounds[0] if all(key in one.rounds[0] for one in every)])
        made = made._replace(figure=made.figure._replace(metric=metric))
    notes = [describe_search(archive.search_of(one, made.base)) for one in found.searches.values()]
    if FIGURES[name].vary.startswith("noise."):
        notes.append("the one C, 0.13, was given, not searched")
    read = archive.data_files(one.environments for each in mine.values() for one in each)
    if read - archive.data_files(found.environments.values()):
        notes.append("yours read another copy of the data")
    return draw(made, found.curves | mine, [*notes, archive.computed(found)], found.data)


def drawing(name: str) -> Picture:
    """A figure that needs no runs."""
    make = {"fig2": theory_plots.steps, "interval": theory_plots.decision}
    return make[choice("figure", name, DRAWINGS)]()
