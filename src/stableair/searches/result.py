"""The result of a search: its trials, the best experiment and a plot."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stableair.experiment import Experiment
from stableair.markup import html_table
from stableair.searches.spaces import Range, Space
from stableair.validation import pluralize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Trial(NamedTuple):
    """One candidate of a search: its settings, its score and its number of rounds over all seeds."""

    values: dict[str, Any]  # value of each searched setting
    score: float  # validation accuracy, mean over the seeds of `Run.settled`
    rounds: int  # computed rounds, summed over the seeds
    stopped: bool = False  # whether the trial was stopped before its last round because of a low score
    failed: str = ""  # the error that stopped the trial; empty: no error

    @property
    def complete(self) -> bool:
        """Whether the trial was neither stopped early nor failed."""
        return not self.stopped and not self.failed

    def __str__(self) -> str:
        values = "  ".join(f"{key}={value}" for key, value in self.values.items())
        if self.failed:
            return f"{values}  failed: {self.failed}"
        early = f", stopped after {pluralize(self.rounds, 'round')}" if self.stopped else ""
        return f"{values}  validation accuracy {self.score:.4f}{early}"


class Result(NamedTuple):
    """The trials of a search, the best experiment and a plot.

    Notebooks display the trials as a table.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> base = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=1)
    >>> with TemporaryDirectory() as folder:
    ...     result = sa.search(base, {"local_epochs": "1,2"}, folder)
    >>> sorted(trial.values["local_epochs"] for trial in result.trials)
    [1, 2]
    >>> result.best.local_epochs == result.winner.values["local_epochs"]
    True
    """

    base: Experiment  # the experiment, with the test split for the evaluation
    spaces: dict[str, Space]  # the space of each searched setting
    trials: list[Trial]  # in the order of computation
    folder: Path | None = None  # folder of the runs and of search.json

    @property
    def winner(self) -> Trial:
        """The complete trial with the highest score."""
        return max((trial for trial in self.trials if trial.complete), key=lambda trial: trial.score)

    @property
    def at_boundary(self) -> list[str]:
        """The searched settings whose best value is near an end of its range: better values may lie outside."""
        return [
            key for key, one in self.spaces.items()
            if isinstance(one, Range) and not one.at(0.05) < self.winner.values[key] < one.at(0.95)
        ]  # fmt: skip

    @property
    def best(self) -> Experiment:
        """The experiment with the best values; a run of it is evaluated on the test split."""
        return self.base.with_(**self.winner.values)

    def __repr__(self) -> str:
        if not any(trial.complete for trial in self.trials):
            return f"Result({pluralize(len(self.trials), 'trial')})"
        values = ", ".join(f"{key}={value}" for key, value in self.winner.values.items())
        best = f"best: {values} with validation accuracy {self.winner.score:.4f}"
        return f"Result({pluralize(len(self.trials), 'trial')}; {best})"

    def _repr_html_(self) -> str:
        rows = [
            [*trial.values.values(), trial.rounds, "" if trial.failed else f"{trial.score:.4f}", _remark(trial)]
            for trial in self.trials
        ]
        return html_table(rows, [*self.spaces, "rounds", "validation accuracy", ""], repr(self))

    def plot(self, out: str | Path | None = None, *, force: bool = False) -> "Figure":
        """Draw the score of every trial over each searched setting.

        Args:
            out: File to write; its extension sets the format. None: write no file.
            force: Whether to replace a file that was not written by stableair.

        Returns:
            The matplotlib figure.

        Raises:
            InputError: The file cannot be written.
        """
        from stableair.results.plot import check_picture, save

        if out is not None:
            check_picture(out, force)
        figure = draw(self)
        if out is not None:
            save(figure, out, force)
        return figure


def _remark(trial: Trial) -> str:
    """Why a trial is incomplete; empty for a complete trial."""
    return f"failed: {trial.failed}" if trial.failed else "stopped early" if trial.stopped else ""


def draw(result: Result) -> "Figure":
    """Draw the score of every trial over each searched setting.

    Trials that were stopped early have hollow markers.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.4, 4.2 * len(result.spaces)), 4.2), layout="constrained")
    panels = figure.subplots(1, len(result.spaces), squeeze=False, sharey=True)[0]
    for axes, (key, space) in zip(panels, result.spaces.items(), strict=True):
        for stopped, style in ((False, {}), (True, {"markerfacecolor": "none"})):
            trials = [trial for trial in result.trials if trial.stopped == stopped]
            label = "stopped early" if stopped else "all rounds"
            if trials:
                x = [trial.values[key] for trial in trials]
                axes.plot(x, [trial.score for trial in trials], "o", color="tab:blue", label=label, **style)
        best = result.winner
        axes.plot(best.values[key], best.score, "*", color="tab:red", markersize=14, label=f"best: {best.values[key]}")
        log = isinstance(space, Range) and space.log
        if log:
            axes.set_xscale("log")
        if all(isinstance(trial.values[key], int) for trial in result.trials):
            _set_whole_ticks(axes, log)
        axes.set_xlabel(key)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("validation accuracy")
    figure.suptitle(f"{result.base.data}, {result.base.rounds} rounds", fontsize="medium")
    return figure


def _set_whole_ticks(axes: "Axes", log: bool) -> None:
    """Put the ticks of the x axis at whole numbers only."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if log else MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
