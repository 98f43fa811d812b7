"""Comparison of receivers over channels on the same seeds: all share data, batches, fading and noise."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from torch import nn

from stableair.contracts import Dataset
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.literals import PluginChange
from stableair.markup import html_table, sparkline
from stableair.results.budgets import Budget, at_equal, stop_condition
from stableair.results.callbacks import Callback
from stableair.results.grouping import describe_seeds, group
from stableair.results.options import RunOptions
from stableair.results.plugins import MIXED, mixed_components
from stableair.results.reading import log_left_out, on_one_split, runs_from
from stableair.results.resources import RESOURCES, check_resource, format_amount
from stableair.results.run import LAST, Run
from stableair.results.statistics import (
    CHANNEL,
    MIN_SEEDS,
    PAIRED_BY,
    SIGNIFICANCE,
    PairedDifference,
    compare_groups,
    mean_and_std,
)
from stableair.results.table import write_table
from stableair.spec import passed_objects
from stableair.sweeps.plans import Plan, expand_plan, read_plan, replace_objects
from stableair.sweeps.processes import sweep
from stableair.validation import as_path, pluralize, suggest

log = logging.getLogger("stableair")

ALL_CHANNELS = "all channels"


class Line(NamedTuple):
    """The runs of one receiver over one channel: a row of the table."""

    receiver: str  # the receiver, or the settings that distinguish the lines
    runs: list[Run]  # one per seed
    accuracies: list[float]  # `Run.settled` of each run: the mean over the last rounds, 0 for a diverged run

    @property
    def accuracy(self) -> float:
        """Mean accuracy over the runs."""
        return float(mean_and_std(self.accuracies)[0])

    @property
    def rounds(self) -> float:
        """Mean number of rounds of a run."""
        return float(mean_and_std([len(run) for run in self.runs])[0])

    def total(self, resource: str) -> float | None:
        """Mean total of a resource over the runs; None if a run did not record it in every round."""
        if not all(run.has(resource) for run in self.runs):
            return None
        return float(mean_and_std([run[resource][-1] for run in self.runs])[0])

    @property
    def seconds(self) -> float:
        """Mean computing time of a run."""
        return float(mean_and_std([sum(run["seconds"]) for run in self.runs])[0])

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(run.diverged is not None for run in self.runs)

    @property
    def mixed_components(self) -> list[str]:
        """The components whose results come from several versions, or from an earlier version."""
        return mixed_components(self.runs)


class Comparison(NamedTuple):
    """The result of a comparison; print() shows one table per channel.

    >>> import stableair as sa
    >>> base = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> comparison = sa.compare([sa.run(base), sa.run(base.with_(receiver="none()"))])
    >>> list(comparison.lines)
    ['sas(alpha=1.5, tau=0.1)']
    >>> comparison.pair("sas(alpha=1.5, tau=0.1)", "mac(C=1)", "none()").seeds
    1
    """

    lines: dict[str, list[Line]]  # the rows of each channel's table, highest accuracy first
    pairs: dict[str, list[PairedDifference]]  # all pairs of rows that share a seed, largest difference first
    budget: Budget | None = None  # the resource of which all rows have the same amount; None: equal rounds

    def pair(self, channel: str, one: str, other: str) -> PairedDifference | None:
        """Return the difference between two receivers over a channel.

        Args:
            channel: Name of the channel, a key of `lines`.
            one: Name of a receiver; `none` and `none()` are the same name.
            other: Name of another receiver.

        Returns:
            The paired difference; None if the receivers share no seed.
        """
        channel = by_spelling(self.lines).get(channel, channel)
        names = by_spelling(line.receiver for line in self.lines[channel])
        pair_names = {names.get(one, one), names.get(other, other)}
        return next((pair for pair in self.pairs[channel] if {pair.better, pair.worse} == pair_names), None)

    def to_pandas(self) -> Any:
        """Return the comparison as a pandas DataFrame, one row per channel and receiver.

        Accuracies are between 0 and 1. `behind` is the mean paired difference to the best receiver of the channel,
        `low` and `high` are the ends of its 95 % confidence interval, `p` is its p-value with Holm's correction.
        `symbols`, `airtime` (s), `energy` (J, mean over the clients), `energy_max` (J, largest of a client) and `bits`
        are mean totals of a run, `seconds` is its mean computing time.
        """
        import pandas

        records = [self._record(channel, line) for channel, lines in self.lines.items() for line in lines]
        return pandas.DataFrame(records).astype(dict.fromkeys(("std", "behind", "low", "high", "p", *RESOURCES), float))

    def _record(self, channel: str, line: Line) -> dict[str, Any]:
        pair = self.pair(channel, self.lines[channel][0].receiver, line.receiver)
        behind, low, high = _behind(line, pair) if pair else (None, None, None)
        std = float(mean_and_std(line.accuracies)[1]) if len(line.accuracies) > 1 else None
        return {
            "channel": channel, "receiver": line.receiver, "accuracy": line.accuracy, "std": std, "behind": behind,
            "low": low, "high": high, "p": pair.p if pair else None, "seeds": len(line.runs),
            "diverged": line.diverged, "earlier_version": bool(line.mixed_components), "rounds": line.rounds,
            **{name: line.total(name) for name in RESOURCES}, "seconds": line.seconds,
        }  # fmt: skip

    def to_latex(self, labels: Mapping[str, str] | None = None) -> str:
        """Return a table for the LaTeX package booktabs: a row per receiver, a column per channel.

        A cell is the mean accuracy in per cent and its standard deviation over the seeds; the best cells are bold. A
        dagger marks receivers with results of an earlier version of a plug-in. The first line is a comment with the
        seeds and the rounds over which the accuracy is averaged.

        Args:
            labels: Texts for receivers and channels, such as `{"mac(C=1)": "MAC, $C = 1$"}`, with formulas in $. `none`
                and `none()` are the same name.

        Returns:
            The table as text.

        Raises:
            InputError: A label has the name of no receiver or channel (`unknown-label`), or two labels are equal
                (`duplicate-label`).
        """
        import pandas

        names = list(dict.fromkeys(line.receiver for lines in self.lines.values() for line in lines))
        text = self._labelled(names, labels or {})
        text |= {name: rf"{text[name]} $\dagger$" for name in names if self._has_earlier_version(name)}
        cells = {
            text[channel]: {text[line.receiver]: _latex_cell(line) for line in lines}
            for channel, lines in self.lines.items()
        }
        best = [
            [
                name in [line.receiver for line in lines if line.accuracy == lines[0].accuracy]
                for lines in self.lines.values()
            ]
            for name in names
        ]
        frame = pandas.DataFrame(cells, [text[name] for name in names])
        style = frame.rename_axis(columns=r"accuracy (\%)").style.format(na_rep="--")
        for axis in (0, 1):
            style = style.format_index(escape="latex-math", axis=axis)
        table = style.apply(lambda _: np.where(best, "textbf:--rwrap;", ""), axis=None).to_latex(hrules=True)
        return f"% {self._averages()}; the best of each column is bold\n{table}"

    def _averages(self) -> str:
        """The data, the averages and the seeds of the accuracies, in one line."""
        runs = [run for lines in self.lines.values() for line in lines for run in line.runs]
        counts = [len(line.runs) for lines in self.lines.values() for line in lines]
        fewest = "" if min(counts) == max(counts) else f"{min(counts)} to "
        return (
            f"accuracy on the {runs[0].settings['evaluate']} data: mean over the last {LAST} rounds of a run (over its "
            f"second half if it has fewer than {2 * LAST} rounds), then mean +- standard deviation over the seeds; "
            f"{fewest}{pluralize(max(counts), 'seed')} per receiver: {describe_seeds(runs)}"
            + (f"; each run up to its last round within {self.budget}" if self.budget else "")
        )

    def _has_earlier_version(self, receiver: str) -> bool:
        """Whether a receiver has results of an earlier version of a plug-in in some channel."""
        return any(
            line.mixed_components for lines in self.lines.values() for line in lines if line.receiver == receiver
        )

    def _labelled(self, names: list[str], labels: Mapping[str, str]) -> dict[str, str]:
        """The texts of receivers and channels."""
        known = [*names, *self.lines]
        spellings = by_spelling(known)
        labels = {spellings.get(name, name): text for name, text in labels.items()}
        for name in labels:
            if name not in known:
                text = f"label {name!r} is not a receiver or a channel; {suggest(name, known)}"
                raise InputError(text, code="unknown-label", name=name, allowed=known)
        texts = {name: labels.get(name, name) for name in known}
        if repeated := [text for text, n in Counter(texts.values()).items() if n > 1]:
            raise InputError(f"label {repeated[0]!r} is given twice", code="duplicate-label", name=repeated[0])
        return texts

    def save(self, path: str | Path, *, labels: Mapping[str, str] | None = None, force: bool = False) -> Path:
        """Write the comparison as a table.

        Args:
            path: File to write: .tex as `to_latex`, .csv and .parquet as `to_pandas`.
            labels: Texts for receivers and channels in a .tex file, as for `to_latex`.
            force: Whether to replace a file that stableair has not made.

        Returns:
            The path.

        Raises:
            InputError: The format is unknown (`unknown-format`), or the file cannot be written (`cannot-write`).
            MissingExtraError: pyarrow is not installed, and the file is .parquet.
        """
        frame = self.to_pandas().set_index("channel")
        return write_table(frame, path, force, tex=self.to_latex(labels))

    def __str__(self) -> str:
        tables = [f"{channel}\n{_aligned([HEAD, *self._rows(channel)])}" for channel in self.lines]
        return "\n\n".join([*tables, "\n".join(self._notes())])

    def __repr__(self) -> str:
        results = [f"{each[0].receiver} {100 * each[0].accuracy:.2f} %" for each in self.lines.values()]
        best = ", ".join(dict.fromkeys(results))
        return f"Comparison({pluralize(len(self.lines), 'channel')}; best accuracy: {best})"

    def _repr_html_(self) -> str:
        tables = []
        for channel, lines in self.lines.items():
            metric = f"{lines[0].runs[0].settings['evaluate']}/accuracy"
            drawings = [sparkline([row.get(metric) for row in line.runs[0].rounds]) for line in lines]
            cells = [[*row, drawing] for row, drawing in zip(self._rows(channel), drawings, strict=True)]
            head, *rows = _without_empty_columns([[*HEAD, "first seed"], *cells])
            tables.append(html_table(rows, head, channel))
        return "".join([*tables, *(f"<p>{escape(note)}</p>" for note in self._notes())])

    def _rows(self, channel: str) -> list[list[str]]:
        best = self.lines[channel][0]
        pairs = [self.pair(channel, best.receiver, line.receiver) for line in self.lines[channel]]
        resources = {"symbols"} | ({"energy", self.budget.resource} if self.budget else set())
        return [
            _row(line, pair, self._has_unequal_rounds, resources)
            for line, pair in zip(self.lines[channel], pairs, strict=True)
        ]

    @property
    def _has_unequal_rounds(self) -> bool:
        """Whether the runs may differ in their number of rounds: with a budget, or if some stopped early."""
        runs = [run for lines in self.lines.values() for line in lines for run in line.runs]
        return self.budget is not None or len({len(run) for run in runs if run.diverged is None}) > 1

    def _notes(self) -> list[str]:
        lines = [line for of_channel in self.lines.values() for line in of_channel]
        pairs = [pair for of_channel in self.pairs.values() for pair in of_channel]
        split, most = lines[0].runs[0].settings["evaluate"], max(map(len, self.pairs.values()))
        notes = [
            f"accuracy: per cent on the {split} data, mean over the last {LAST} rounds of a run (over its second half "
            f"if it has fewer than {2 * LAST}), ± standard deviation over the seeds",
            "behind: mean paired difference to the best line in percentage points, and its 95 % confidence interval",
        ]
        if self._has_unequal_rounds and not self.budget:
            notes.append("behind, interval and p: over the rounds that both runs of a pair have")
        if self.budget:
            notes.insert(0, f"Budget: {self.budget}. Each run is compared up to its last round within it")
        if any(pair.p is not None for pair in pairs):
            family = "of the table" if self.budget else "of a channel"
            correction = f"Holm's correction over the {pluralize(most, 'pair')} {family}"
            notes.append(f"p: paired t-test with {correction}; * below {SIGNIFICANCE}")
        if any(pair.seeds < MIN_SEEDS for pair in pairs):
            notes.append(f"no p-value: it needs at least {MIN_SEEDS} seeds")
        if any(pair.p is None and pair.seeds >= MIN_SEEDS for pair in pairs):
            notes.append("no p-value for a difference that is the same for every seed")
        if any(line.diverged for line in lines):
            notes.append("the accuracy of a run that diverged is 0")
        if mixed := dict.fromkeys(name for line in lines for name in line.mixed_components):
            notes.append(f"{MIXED}: includes results of an earlier version of the {', '.join(mixed)}")
        return notes


def by_spelling(names: Iterable[str]) -> dict[str, str]:
    """Return names by their spellings with and without empty parentheses.

    >>> by_spelling(["none()", "mac(C=1)"])
    {'none': 'none()', 'none()': 'none()', 'mac(C=1)': 'mac(C=1)'}
    """
    return {spelling: name for name in names for spelling in (name.replace("()", ""), name)}


HEAD = ["", "accuracy", "behind", "95 % interval", "p", "seeds", "rounds", *RESOURCES, "seconds"]


def _row(line: Line, behind: PairedDifference | None, with_rounds: bool, resources: Collection[str]) -> list[str]:
    """The cells of a line; `behind` is its difference to the best line, None for the best line itself."""
    std = f" ± {100 * mean_and_std(line.accuracies)[1]:.2f}" if len(line.accuracies) > 1 else ""
    diverged = f", {line.diverged} diverged" if line.diverged else ""
    cells = ["", "", ""]
    if behind:
        p = "" if behind.p is None else f"{behind.p:.2g} {behind.mark or ' '}"
        difference, *ends = (None if value is None else f"{100 * value:z.2f}" for value in _behind(line, behind))
        cells = [difference or "", " to ".join(filter(None, ends)), p]
    totals = [line.total(name) if name in resources else None for name in RESOURCES]
    used = [
        f"{line.rounds:.4g}" if with_rounds else "",
        *("" if each is None else format_amount(each) for each in totals),
    ]
    accuracy = f"{100 * line.accuracy:.2f}{std}{diverged}"
    name = f"{line.receiver} {MIXED}" if line.mixed_components else line.receiver
    return [name, accuracy, *cells, str(len(line.runs)), *used, f"{line.seconds:.1f}"]


def _behind(line: Line, pair: PairedDifference) -> tuple[float, float | None, float | None]:
    """The difference of the best line to this line, and the ends of its 95 % interval."""
    sign = 1 if pair.worse == line.receiver else -1
    low, high = sorted(sign * end + 0.0 for end in pair.interval) if pair.interval else (None, None)
    return sign * pair.difference + 0.0, low, high  # + 0.0 turns -0.0 into 0.0


def _latex_cell(line: Line) -> str:
    std = f" $\\pm$ {100 * mean_and_std(line.accuracies)[1]:.2f}" if len(line.accuracies) > 1 else ""
    return f"{100 * line.accuracy:.2f}{std}"


def _without_empty_columns(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows without the columns in which only the head has a text."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


def _aligned(rows: list[list[str]]) -> str:
    """A table as plain text: first column left-aligned, others right-aligned; columns without values are dropped."""
    lines = _without_empty_columns(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in lines
    )


def compare(
    plan: Plan | str | Path | Iterable[Experiment] | Iterable[Run | str | Path],
    folder: str | Path = "runs/compare",
    *,
    seeds: int | None = None,
    equal: str | None = None,
    budget: float | None = None,
    parallel: int = 1,
    plugin_changed: PluginChange = "refuse",
    callbacks: Sequence[Callback] = (),
    data: Dataset | str | None = None,
    model: nn.Module | Callable[..., Any] | str | None = None,
    receiver: Any = None,
    server: Any = None,
    **options: Unpack[RunOptions],
) -> Comparison:
    """Compare receivers over channels with paired seeds. `stableair compare` calls this function.

    Runs with the same seed share data, batches, fading and noise, so the receivers are compared seed by seed. Each
    channel becomes a table; every other varied setting becomes a row. With `equal`, all channels share one table.

    Args:
        plan: As for `sweep`, such as `{"receiver": ["mac(C=1)", "none()"], "noise.tau": [0.1, 0.5], "rounds": 30}`.
            A value may be a Python object, such as `{"receiver": ["mac(C=1)", my_receiver]}`. Alternatively finished
            runs, or folders of runs; then nothing is computed.
        folder: Folder of the runs; finished runs in it are not computed again.
        seeds: Number of seeds of each experiment of a plan; default: the number in the plan, or else five.
        equal: Resource of which every run gets the same budget: "symbols", "airtime", "energy", "energy_max" or "bits".
            Each run is cut after its last round within the budget. None: the runs have equal numbers of rounds.
        budget: The budget. None: the smallest total of the compared runs. With a budget and without `stop`, the runs of
            a plan stop when they have used the budget.
        parallel: Number of processes on this machine.
        plugin_changed: What to do with recorded rounds of a plug-in that has changed since: "refuse" raises an error,
            "keep" uses them and records both versions, "recompute" restarts such runs.
        callbacks: Observers of the runs of a plan.
        data: A data set for all experiments of a plan, as for `sweep`.
        model: A network for all experiments.
        receiver: A receiver for all experiments.
        server: A server for all experiments.
        **options: `stop`, `patience`, `monitor`, `keep_best`, `profile`, `track`, `progress`: see `RunOptions`.

    Returns:
        The accuracies, paired differences, 95 % confidence intervals and p-values.

    Raises:
        InputError: The plan is invalid, its experiments cannot be paired (`not-paired`), or an option is given for
            recorded runs (`unused-options`). The budget is given without `equal` (`budget-without-equal`), is too small
            or too large, or a run did not record or use the resource.
        StableairError: An experiment failed.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> small = {"data": "synthetic(samples=60)", "clients": 3, "rounds": 2}
    >>> plan = {**small, "receiver": ["mac(C=1)", "none()"]}
    >>> with TemporaryDirectory() as folder:
    ...     comparison = sa.compare(plan, folder, seeds=2)
    >>> sorted(line.receiver for line in comparison.lines["sas(alpha=1.5, tau=0.1)"])
    ['mac(C=1)', 'none()']
    """
    if budget is not None and not equal:
        raise InputError(f"a budget needs a resource: add equal={' or '.join(RESOURCES)}", code="budget-without-equal")
    objects = {"data": data, "model": model, "receiver": receiver, "server": server}
    if _is_recorded(plan):
        _refuse_unused({"seeds": seeds, **objects, **options})
        return comparison(plan, equal, budget)  # type: ignore[arg-type]
    specs, in_plan = replace_objects(plan)  # type: ignore[arg-type]
    experiments = comparison_plan(specs, seeds, equal)
    if equal and budget is not None and not options.get("stop"):
        options["stop"] = stop_condition(equal, budget)
    with passed_objects(in_plan):
        runs = sweep(
            experiments, folder, parallel=parallel, plugin_changed=plugin_changed, callbacks=callbacks, **objects,
            **options,
        )  # fmt: skip
    return comparison(runs, equal, budget)


def _refuse_unused(options: Mapping[str, Any]) -> None:
    """Refuse options of runs that would have no effect: recorded runs are compared as they are."""
    if unused := [name for name, value in options.items() if value and name != "progress"]:
        text = f"recorded runs are compared as they are: leave out {', '.join(unused)}"
        raise InputError(text, code="unused-options", options=unused)


def _is_recorded(plan: object) -> bool:
    """Whether the argument consists of runs or folders of runs, not of a plan."""
    if isinstance(plan, str | Path):
        return as_path("plan", plan).is_dir()
    return isinstance(plan, Run) or (
        isinstance(plan, list | tuple) and bool(plan) and all(isinstance(one, Run | str | Path) for one in plan)
    )


def comparison_plan(
    plan: Plan | str | Path | Iterable[Experiment], seeds: int | None = None, equal: str | None = None
) -> list[Experiment]:
    """Return the experiments of a comparison.

    Args:
        plan: As for `compare`, without recorded runs.
        seeds: Number of seeds; default: the number in the plan, or else five.
        equal: As for `compare`.

    Raises:
        InputError: The plan is invalid, its experiments cannot be paired (`not-paired`), or there is no such resource.
    """
    if equal:
        check_resource(equal)
    plan = read_plan(plan) if isinstance(plan, str | Path) else plan
    if isinstance(plan, Mapping):
        default = 1 if isinstance(plan.get("seed"), list | tuple) else MIN_SEEDS
        plan = {"seeds": default} | dict(plan) | ({} if seeds is None else {"seeds": seeds})
    experiments = expand_plan(plan)
    _by_channel([Run(experiment.to_record(), []) for experiment in experiments], one_table=bool(equal))
    return experiments


def comparison(
    runs: Run | str | Path | Iterable[Run | str | Path], equal: str | None = None, budget: float | None = None
) -> Comparison:
    """Compare recorded runs.

    Runs with fewer rounds than the longest are left out, unless they diverged or stopped early. With `equal`, runs that
    are unfinished are left out. Runs on validation data are left out if there are runs on the test data.

    Args:
        runs: Runs, run folders, or folders that contain run folders.
        equal: Resource of which every run gets the same budget, as for `compare`.
        budget: The budget, as for `compare`.

    Raises:
        InputError: No run has a complete round, the runs cannot be paired, or they cannot have the same budget.
    """
    readable, left_out = runs_from(runs)
    log_left_out(left_out)
    split, started = on_one_split([run for run in readable if run.rounds])
    if not started:
        raise InputError("nothing to compare: no run has a complete round", code="no-rounds")
    complete, common = at_equal(started, equal, budget) if equal else (_of_equal_length(started), None)
    metric = f"{split}/accuracy"
    lines, pairs = {}, {}
    for channel, groups in sorted(_by_channel(complete, one_table=bool(equal)).items()):
        unsorted = [Line(name, each, [run.settled(metric) for run in each]) for name, each in groups.items()]
        lines[channel] = sorted(unsorted, key=lambda line: (-line.accuracy, line.receiver))
        pairs[channel] = compare_groups(groups, metric, equal_rounds=not equal)
    return Comparison(lines, pairs, common)


def _of_equal_length(runs: list[Run]) -> list[Run]:
    """Return the runs with the largest number of rounds, and shorter runs that diverged or stopped early."""
    rounds = max((len(run) for run in runs if run.diverged is None), default=0)
    kept = [run for run in runs if len(run) == rounds or run.diverged is not None or run.stopped]
    if shorter := [len(run) for run in runs if len(run) < rounds and run.diverged is None and not run.stopped]:
        lengths = " and ".join(pluralize(n, "round") for n in sorted(set(shorter)))
        log.warning("%s left out: %s, while the longest run has %d", pluralize(len(shorter), "run"), lengths, rounds)
    return kept


def _by_channel(runs: list[Run], one_table: bool = False) -> dict[str, dict[str, list[Run]]]:
    """Group the runs by channel and receiver.

    Args:
        runs: The runs.
        one_table: Whether one table holds a line for each combination of receiver and channel.

    Raises:
        InputError: The runs cannot be paired (code "not-paired").
    """
    for key in PAIRED_BY:
        if len(values := sorted({str(run.settings[key]) for run in runs})) > 1:
            reason = f"{key} is {' and '.join(values)}; all runs must have the same {key}"
            raise _not_paired(reason, name=key)
    channels: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        channels.setdefault(tuple(run.settings[key] for key in CHANNEL), []).append(run)
    varied = [i for i in range(len(CHANNEL)) if len({channel[i] for channel in channels}) > 1]
    named_by = varied or [CHANNEL.index("noise")]
    groups = {", ".join(channel[i] for i in named_by): group(of_channel) for channel, of_channel in channels.items()}
    if one_table:
        groups = {ALL_CHANNELS: group(runs)}
    for channel, receivers in groups.items():
        if len(receivers) < 2:
            reason = f"{channel} has only one receiver, {next(iter(receivers))}; add a second one"
            raise _not_paired(reason, channel=channel)
        seeds = [{run.settings["seed"] for run in of_receiver} for of_receiver in receivers.values()]
        if not any(one & other for one, other in combinations(seeds, 2)):
            raise _not_paired(f"no two receivers share a seed over {channel}", channel=channel)
    return groups


def _not_paired(reason: str, **fields: str) -> InputError:
    return InputError(f"these runs cannot be paired: {reason}", code="not-paired", **fields)
