"""The result of a comparison: its rows, the tables as text, HTML, LaTeX and DataFrame."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stableair.errors import InputError
from stableair.markup import html_table, sparkline
from stableair.results.budgets import Budget
from stableair.results.grouping import describe_seeds
from stableair.results.plugins import MIXED, mixed_components
from stableair.results.resources import RESOURCES, format_amount
from stableair.results.run import LAST, Run
from stableair.results.statistics import MIN_SEEDS, SIGNIFICANCE, PairedDifference, mean_and_std
from stableair.results.table import write_table
from stableair.validation import pluralize, suggest

HEAD = ["", "accuracy", "behind", "95 % interval", "p", "seeds", "rounds", *RESOURCES, "seconds"]


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

        A cell is the mean accuracy in per cent and its standard deviation over the seeds; the best cells are bold. With
        enough seeds for a test, an asterisk marks the cells that are significantly worse than the best of their column.
        A dagger marks receivers with results of an earlier version of a plug-in. The first line is a comment with the
        seeds, the rounds over which the accuracy is averaged, and the test.

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
            text[channel]: {
                text[line.receiver]: _latex_cell(line) + self._mark_worse(channel, line.receiver) for line in lines
            }
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
        test = f"; * significantly worse than the best (p below {SIGNIFICANCE}, {self._test})" if self._test else ""
        return f"% {self._averages()}; the best of each column is bold{test}\n{table}"

    def _mark_worse(self, channel: str, receiver: str) -> str:
        """Return an asterisk for a receiver that is significantly worse than the best one of its channel."""
        pair = self.pair(channel, self.lines[channel][0].receiver, receiver)
        return f"$^{{{pair.mark}}}$" if pair and pair.mark and pair.worse == receiver else ""

    @property
    def _test(self) -> str:
        """Description of the test; "" if no pair has a p-value."""
        pairs = [pair for of_channel in self.pairs.values() for pair in of_channel]
        if all(pair.p is None for pair in pairs):
            return ""
        family = "of the table" if self.budget else "of a channel"
        most = pluralize(max(map(len, self.pairs.values())), "pair")
        return f"paired t-test with Holm's correction over the {most} {family}"

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
        split = lines[0].runs[0].settings["evaluate"]
        notes = [
            f"accuracy: per cent on the {split} data, mean over the last {LAST} rounds of a run (over its second half "
            f"if it has fewer than {2 * LAST}), ± standard deviation over the seeds",
            "behind: mean paired difference to the best line in percentage points, and its 95 % confidence interval",
        ]
        if self._has_unequal_rounds and not self.budget:
            notes.append("behind, interval and p: over the rounds that both runs of a pair have")
        if self.budget:
            notes.insert(0, f"Budget: {self.budget}. Each run is compared up to its last round within it")
        if self._test:
            notes.append(f"p: {self._test}; * below {SIGNIFICANCE}")
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
