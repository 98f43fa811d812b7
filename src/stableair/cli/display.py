"""Output of the commands that compute runs: engine, progress and results."""

import sys
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stableair.cli.advice import with_flag
from stableair.errors import StableairError
from stableair.results.callbacks import Callback
from stableair.validation import pluralize

if TYPE_CHECKING:
    from rich.progress import Progress

    from stableair.experiment import Experiment
    from stableair.results.metrics import Row
    from stableair.results.run import Run

RECENT = 10  # rounds over which the time per round is averaged


class EngineDisplay(Callback):
    """Print the engine of a run at its start, unless the previous run had the same engine."""

    line = ""
    shows_progress = True

    def start(self, experiment: "Experiment", engine: dict[str, Any]) -> None:
        line = describe_engine(engine)
        if line != self.line:
            print_line(line)
        self.line = line
        if (seconds := engine.get("projected_seconds")) is not None:
            rounds = pluralize(engine["projected_rounds"], "round")
            print_line(f"about {duration(seconds)} for {rounds}, estimated from the first local steps")


class ProgressDisplay(EngineDisplay):
    """Print the progress of runs: a live line on a terminal, elsewhere a line per round or only the results.

    Args:
        every_round: Whether to print a line per round where the output is not a terminal.
        total: Number of experiments, to number the results.
    """

    def __init__(self, every_round: bool = False, total: int | None = None):
        self.every_round, self.total = every_round, total
        self.finished = 0
        self.seconds: deque[float] = deque(maxlen=RECENT)  # durations of the last rounds
        self.live: Progress | None = None

    def __enter__(self) -> Self:
        if sys.stdout and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            title, text = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
            self.live = Progress(title, BarColumn(), MofNCompleteColumn(), text, transient=not self.every_round)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def start(self, experiment: "Experiment", engine: dict[str, Any]) -> None:
        super().start(experiment, engine)
        self.seconds.clear()
        if self.live:
            for task in self.live.task_ids:
                self.live.remove_task(task)
            self.live.add_task(self.title(experiment), total=experiment.rounds, text="")

    def round(self, experiment: "Experiment", row: "Row") -> None:
        if (seconds := row.get("seconds")) is not None:
            self.seconds.append(seconds)
        done = row["round"] + 1
        pace = "" if row.get("diverged") else self._pace(experiment.rounds - done)
        text = describe_round(row, has_noise=experiment.noise.partition("(")[0] != "none") + pace
        if self.live:
            self.live.update(self.live.task_ids[-1], completed=done, text=text)
        elif self.every_round:
            print_line(f"{self.title(experiment)}  {done}/{experiment.rounds}  {text}")

    def end(self, experiment: "Experiment", outcome: "Run | StableairError") -> None:
        self.finished += 1
        number = "" if self.total is None else f"{self.finished}/{self.total}  "
        print_line(number + self.result(experiment, outcome))

    def title(self, experiment: "Experiment") -> str:
        """Return the name of a run in the lines of its rounds."""
        return experiment.name

    def result(self, experiment: "Experiment", outcome: "Run | StableairError") -> str:
        """Return the outcome of a run, in one line."""
        if isinstance(outcome, StableairError):
            return f"{experiment.name}: {with_flag(outcome)}"
        return describe_run(outcome, experiment)

    def _pace(self, rounds_left: int) -> str:
        """Return the time per round and the remaining time."""
        if not self.seconds:
            return ""
        mean = sum(self.seconds) / len(self.seconds)
        left = f", {duration(mean * rounds_left)} left" if rounds_left else ""
        return f"  {duration(mean)} per round{left}"


def print_line(line: str) -> None:
    """Print a line and flush the output, so that the reader of a pipe sees it immediately."""
    print(line, flush=True)


def describe_engine(engine: dict[str, Any]) -> str:
    """Return the engine of a run in one line, with the reason for this choice."""
    details = [engine["engine"], engine["precision"]]
    if engine["engine"] != "reference":
        details.append(f"{pluralize(engine['chunk'], 'client')} at a time")
    if engine["ranks"] > 1:
        details.append(f"{engine['ranks']} ranks")
    return f"engine {', '.join(details)}: {engine['why']}"


def describe_round(row: "Row", *, has_noise: bool = True) -> str:
    """Return the main metrics of a round; `has_noise` says whether the experiment has interference."""
    if row.get("diverged"):
        return "diverged"
    metric = next(name for name in row if name.endswith("/accuracy"))
    split = metric.partition("/")[0]
    if row["channel/snr_db"] is None:
        snr = "no SNR" if has_noise else "no noise"
    else:
        snr = f"SNR of this round {row['channel/snr_db']:.1f} dB"
    loss = "none" if row["train/loss"] is None else f"{row['train/loss']:.4g}"
    return f"{split} accuracy {row[metric]:.4f}  train loss {loss}  {snr}"


def describe_run(run: "Run", experiment: "Experiment") -> str:
    """Return the outcome of a run, in one line."""
    if run.diverged is not None:
        kept = "; the last finite checkpoint is kept" if run.diverged else ""
        return f"{run.folder}: diverged at round {run.diverged + 1}{kept}"
    split = experiment.evaluate
    accuracy = [value for value in run[f"{split}/accuracy"] if value is not None]
    rounds = describe_length(run, experiment)
    return f"{run.folder}: {rounds}, {split} accuracy {accuracy[-1]:.4f} (best {max(accuracy):.4f})"


def describe_length(run: "Run", experiment: "Experiment") -> str:
    """Return the number of rounds of a run; a search may stop a run early."""
    if run.diverged is not None or len(run) >= experiment.rounds:
        return pluralize(len(run), "round")
    return f"stopped after {len(run)} of {experiment.rounds} rounds"


def duration(seconds: float) -> str:
    """Return a time span in words.

    >>> [duration(seconds) for seconds in (0.123, 42, 90, 12_000, 200_000)]
    ['0.12 s', '42 s', '1 min 30 s', '3 h 20 min', '2 d 8 h']
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    units = [("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)]
    first = next(i for i, (_, size) in enumerate(units) if seconds >= size)
    (unit, size), (next_unit, next_size) = units[first], units[min(first + 1, 3)]
    parts = round(seconds / next_size)  # in the smaller unit
    per_unit = size // next_size
    if per_unit == 1:
        return f"{parts} {unit}"
    whole, rest = divmod(parts, per_unit)
    return f"{whole} {unit} {rest} {next_unit}" if rest else f"{whole} {unit}"
