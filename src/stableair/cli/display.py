"""What a command shows of its runs: a live line or plain lines while they go, and sentences about them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stableair.checks import count

if TYPE_CHECKING:
    from stableair.results.run import Run

Row = dict[str, Any]  # the numbers of a round
OnRound = Callable[[Row], None]
StartRun = Callable[[str, int], OnRound]  # (title, rounds) -> what shows each round of that run


def speaks(rank: str = "RANK") -> bool:
    """Whether this process talks to the user: of torchrun's the first, by its LOCAL_RANK the first of each machine."""
    return "WORLD_SIZE" not in os.environ or os.environ.get(rank, "0") == "0"


@contextmanager
def progress(every_round: bool = True) -> Iterator[StartRun]:
    """A live line of the run at work on a terminal; where the output is piped, a plain line per round, or none."""
    if sys.stdout and sys.stdout.isatty():
        with _live_line(stays=every_round) as start_run:
            yield start_run
    else:
        yield _plain_lines if every_round else _no_lines


def _plain_lines(title: str, rounds: int) -> OnRound:
    return lambda row: print_line(f"{title}  {row['round'] + 1}/{rounds}  {describe_round(row)}")


def _no_lines(title: str, rounds: int) -> OnRound:
    return lambda row: None


@contextmanager
def _live_line(stays: bool) -> Iterator[StartRun]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}")
    with Progress(*columns, TimeRemainingColumn(), transient=not stays) as bar:

        def start_run(title: str, rounds: int) -> OnRound:
            for finished in bar.task_ids:
                bar.remove_task(finished)
            task = bar.add_task(title, total=rounds, numbers="")
            return lambda row: bar.update(task, completed=row["round"] + 1, numbers=describe_round(row))

        yield start_run


def print_line(line: str) -> None:
    """A line that is seen at once, piped or not."""
    print(line, flush=True)


def show_engine(choice: dict[str, Any]) -> None:
    """How the rounds are computed, and why so."""
    at_a_time = "" if choice["engine"] == "reference" else f", {count(choice['chunk'], 'client')} at a time"
    at_a_time += f", {choice['ranks']} ranks" if choice["ranks"] > 1 else ""
    print_line(f"engine {choice['engine']}, {choice['precision']}{at_a_time}: {choice['why']}")


def describe_round(row: Row) -> str:
    if row.get("diverged"):
        return "diverged"
    metric = next(name for name in row if name.endswith("/accuracy"))
    split = metric.partition("/")[0]
    snr = "none" if row["channel/snr_db"] is None else f"{row['channel/snr_db']:.1f} dB"
    loss = "none" if row["train/loss"] is None else f"{row['train/loss']:.4g}"
    return f"{split} accuracy {row[metric]:.4f}  train loss {loss}  SNR {snr}"


def describe_run(run: "Run", split: str) -> str:
    """How a run ended, in one line."""
    if run.diverged is not None:
        kept = "; the last good checkpoint is kept" if run.diverged else ""
        return f"{run.folder}: diverged at round {run.diverged + 1}{kept}"
    accuracy = [value for value in run[f"{split}/accuracy"] if value is not None]
    return f"{run.folder}: {count(len(run), 'round')}, {split} accuracy {accuracy[-1]:.4f} (best {max(accuracy):.4f})"
