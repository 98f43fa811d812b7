"""Receivers compared over channels on the same seeds: the same data, batches, fading and noise for all of them."""

import statistics
import warnings
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from stableair.checks import InputError, Note, count
from stableair.experiment import Experiment
from stableair.results import report
from stableair.results.report import ALIKE, CHANNEL, FEWEST, LEVEL, Paired
from stableair.results.run import LAST, Run, group, runs_of
from stableair.sweeps.plans import Plan, planned, read_plan
from stableair.sweeps.processes import sweep

USES = "channel/uses"


class Line(NamedTuple):
    """How one receiver did over one channel; accuracies are means over the last rounds, 0 for a run that diverged."""

    receiver: str  # or whatever else sets it apart
    runs: list[Run]
    accuracies: list[float]  # of each run

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def uses(self) -> float | None:
        """The channel uses of a run, where they were recorded; a round in which it diverged counts none."""
        there = all(USES in run.rounds[0] for run in self.runs)
        return statistics.fmean(sum(used or 0 for used in run[USES]) for run in self.runs) if there else None

    @property
    def seconds(self) -> float:
        """How long a run took."""
        return statistics.fmean(sum(run["seconds"]) for run in self.runs)

    @property
    def diverged(self) -> int:
        return sum(run.diverged is not None for run in self.runs)


class Comparison(NamedTuple):
    """What came out, by channel: the lines, the best first, and every pair of them. print() shows it."""

    lines: dict[str, list[Line]]
    pairs: dict[str, list[Paired]]

    def pair(self, channel: str, one: str, other: str) -> Paired | None:
        """The pair of two receivers over a channel, if they share a seed."""
        return next((pair for pair in self.pairs[channel] if {pair.better, pair.worse} == {one, other}), None)

    def __str__(self) -> str:
        parts = [f"{channel}\n{_aligned([HEAD, *self._rows(channel)])}" for channel in self.lines]
        return "\n\n".join([*parts, "\n".join(self._notes())])

    def _rows(self, channel: str) -> list[list[str]]:
        best = self.lines[channel][0]
        return [_row(line, self.pair(channel, best.receiver, line.receiver)) for line in self.lines[channel]]

    def _notes(self) -> list[str]:
        lines = [line for of_channel in self.lines.values() for line in of_channel]
        pairs = [pair for of_channel in self.pairs.values() for pair in of_channel]
        split, most = lines[0].runs[0].settings["evaluate"], max(map(len, self.pairs.values()))
        notes = [
            f"accuracy: per cent on the {split} data, mean over a run's last {LAST} rounds (half of them where there "
            f"are fewer than {2 * LAST}), ± the standard deviation over the seeds",
            "behind: points below the best, seed by seed, and their 95 % interval (paired t)",
        ]
        if any(pair.p is not None for pair in pairs):
            notes.append(f"p: of a paired t test, by Holm over the {count(most, 'pair')} of a channel; * below {LEVEL}")
        if any(pair.p is None for pair in pairs):
            notes.append(f"fewer than {FEWEST} seeds get no mark: a t test on so few rests on its assumptions alone")
        if any(line.diverged for line in lines):
            notes.append("a run that diverged counts as 0")
        return notes


HEAD = ["", "accuracy", "behind", "95 % interval", "p", "seeds", "channel uses", "seconds"]


def _row(line: Line, behind: Paired | None) -> list[str]:
    spread = f" ± {100 * statistics.stdev(line.accuracies):.2f}" if len(line.accuracies) > 1 else ""
    ended = f", {line.diverged} diverged" if line.diverged else ""
    cells = ["", "", ""]
    if behind:
        sign = 1 if behind.worse == line.receiver else -1
        ends = sorted(100 * sign * end + 0.0 for end in behind.interval or ())  # and no -0.00
        tested = "" if behind.p is None else f"{behind.p:.2g} {behind.mark or ' '}"
        cells = [f"{100 * sign * behind.difference + 0.0:.2f}", " to ".join(f"{end:.2f}" for end in ends), tested]
    uses = "" if line.uses is None else f"{line.uses:,.0f}"
    accuracy = f"{100 * line.accuracy:.2f}{spread}{ended}"
    return [line.receiver, accuracy, *cells, str(len(line.runs)), uses, f"{line.seconds:.1f}"]


def _aligned(rows: list[list[str]]) -> str:
    """A table in plain text: the first column to the left, the others to the right; empty ones are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in lines
    )


def compare(
    plan: Plan | str | Path | Iterable[Experiment],
    folder: str | Path = "runs/compare",
    *,
    seeds: int | None = None,
    parallel: int = 1,
) -> Comparison:
    """Run receivers over channels with paired seeds and compare them; `stableair compare` is this.

    plan: as that of a sweep, such as {"receiver": ["mac(C=1)", "none()"], "noise.tau": [0.1, 0.5], "rounds": 30}. The
    settings of the channel (power, channel, fading, noise) make the tables, all others that vary the lines in them.
    seeds: five unless the plan or this says otherwise. What the folder has already is not computed again.
    """
    return comparison(sweep(compared(plan, seeds), folder, parallel=parallel))


def compared(plan: Plan | str | Path | Iterable[Experiment], seeds: int | None = None) -> list[Experiment]:
    """The experiments of a comparison; those that do not pair are refused."""
    plan = read_plan(plan) if isinstance(plan, str | Path) else plan
    if isinstance(plan, Mapping):
        usual = 1 if isinstance(plan.get("seed"), list | tuple) else FEWEST
        plan = {"seeds": usual} | dict(plan) | ({} if seeds is None else {"seeds": seeds})
    experiments = planned(plan)
    _by_channel([Run(one.to_record(), []) for one in experiments])
    return experiments


def comparison(runs: Run | str | Path | Iterable[Run | str | Path]) -> Comparison:
    """The comparison of runs that are there, or of folders of them; those that have not come as far are left out."""
    found = [run for run in runs_of(runs)[0] if run.rounds]
    if not found:
        raise InputError("none of these runs has a complete round; there is nothing to compare")
    rounds = max((len(run) for run in found if run.diverged is None), default=0)
    if behind := [len(run) for run in found if run.diverged is None and len(run) < rounds]:
        far = " and ".join(count(n, "round") for n in sorted(set(behind)))
        warnings.warn(f"{count(len(behind), 'run')} left out: {far}, where others have {rounds}", Note, stacklevel=2)
        found = [run for run in found if run.diverged is not None or len(run) == rounds]
    lines, pairs = {}, {}
    for channel, receivers in sorted(_by_channel(found).items()):
        accuracy = f"{found[0].settings['evaluate']}/accuracy"
        each = [Line(name, mine, [run.settled(accuracy) for run in mine]) for name, mine in receivers.items()]
        lines[channel] = sorted(each, key=lambda line: (-line.accuracy, line.receiver))
        pairs[channel] = report.compare(receivers, accuracy)
    return Comparison(lines, pairs)


def _by_channel(runs: list[Run]) -> dict[str, dict[str, list[Run]]]:
    """The runs of each receiver over each channel; runs that do not pair are refused."""
    refused = "these runs do not pair:"
    for key in ALIKE:
        if len(values := sorted({str(run.settings[key]) for run in runs})) > 1:
            raise InputError(f"{refused} {key} is {' and '.join(values)}; compare what learns the same from the same")
    channels: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        channels.setdefault(tuple(run.settings[key] for key in CHANNEL), []).append(run)
    vary = [i for i in range(len(CHANNEL)) if len({channel[i] for channel in channels}) > 1] or [CHANNEL.index("noise")]
    found = {", ".join(channel[i] for i in vary): group(mine) for channel, mine in channels.items()}
    for channel, receivers in found.items():
        if len(receivers) < 2:
            raise InputError(f"{refused} over {channel} there is {next(iter(receivers))} alone; give two receivers")
        seeds = [{run.settings["seed"] for run in mine} for mine in receivers.values()]
        if not any(one & other for one, other in combinations(seeds, 2)):
            raise InputError(f"{refused} over {channel} no two receivers share a seed")
    return found
