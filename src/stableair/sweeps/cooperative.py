"""Experiments that any number of processes compute together, on one machine or on all that share a disk.

Nobody is in charge: each process takes the next experiment that is neither finished nor locked, goes on from its last
checkpoint, and waits for what others are at. When a process is gone so is its lock, and another goes on in its place.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from stableair.checks import InputError, count
from stableair.data import hub
from stableair.experiment import Experiment
from stableair.results.folder import LOCK, Busy
from stableair.results.run import Row, Run
from stableair.results.sealed import ROUNDS, unseal
from stableair.runner import run
from stableair.spec import PLUGINS, load_plugin

WAIT = 1.0  # seconds until what others are at is tried again

Outcome = Run | InputError  # how an experiment ended: with its run, or with what kept it from being computed
Begin = Callable[[Experiment], Callable[[Row], Any] | None]  # what sees the rounds of an experiment


class Job(NamedTuple):
    """What a process that is started elsewhere has to be told to take part."""

    settings: list[dict[str, Any]]  # of each experiment
    folder: str
    plugins: list[str]
    data: str  # the data folder

    @classmethod
    def of(cls, experiments: Iterable[Experiment], folder: Path) -> Self:
        return cls([one.to_dict() for one in experiments], str(folder.absolute()), list(PLUGINS), str(hub.folder()))

    def experiments(self) -> list[Experiment]:
        """The experiments, once this process knows all that the one before it knew."""
        os.environ[hub.VARIABLE] = self.data
        for file in self.plugins:
            if file not in PLUGINS:
                load_plugin(file)
        return [Experiment(**settings) for settings in self.settings]

    def __call__(self) -> None:
        """Take part until all of it is done."""
        for _ in taken(self.experiments(), Path(self.folder)):
            pass


def taken(
    experiments: Iterable[Experiment], folder: Path, begin: Begin = lambda experiment: None
) -> Iterator[tuple[Experiment, Outcome]]:
    """Each experiment with its run as soon as it is finished, whoever did it; what is locked comes later."""
    left = list(experiments)
    while left:
        busy = []
        for one in left:
            try:
                finished = run(one, folder / one.name, resume=True, on_round=begin(one))
            except Busy:
                busy.append(one)
            except InputError as error:
                yield one, error
            else:
                yield one, of_a_sweep(finished, one)
        left = busy
        if left:
            time.sleep(WAIT)


def of_a_sweep(finished: Run, experiment: Experiment) -> Run:
    """A run without its model, which is in its folder; an older run may have gone further."""
    return replace(finished, rounds=finished.rounds[: experiment.rounds], final=None)


def all_finished(experiments: list[Experiment], outcomes: dict[str, Outcome]) -> list[Run]:
    """The runs in the order of the plan; it is an error if there is one that could not be computed."""
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, InputError)}
    if failed:
        name, error = next(iter(failed.items()))
        text = f"{len(failed)} of {count(len(experiments), 'experiment')} failed; the first, {name}: {error}"
        raise InputError(text, hint=error.hint)
    return [outcome for one in experiments if isinstance(outcome := outcomes[one.name], Run)]


class Standing(NamedTuple):
    """How far an experiment is."""

    experiment: Experiment
    rounds: int = 0  # that are recorded
    row: Row = {}  # noqa: RUF012  the last of them
    at_work: bool = False  # a process has it, or had it when it was killed

    @property
    def finished(self) -> bool:
        return self.rounds >= self.experiment.rounds or bool(self.row.get("diverged"))


class Board:
    """How far each experiment of a sweep is, read from its folders alone: whoever computes it, wherever."""

    def __init__(self, experiments: list[Experiment], folder: Path):
        self.standings = {folder / one.name: Standing(one) for one in experiments}
        self.seen: dict[Path, tuple[int, int]] = {}  # of each file of rounds: when it was changed, and its size

    def look(self) -> list[Standing]:
        """How far they are by now; of a file that has not changed nothing is read again."""
        for place, before in self.standings.items():
            if before.finished and not before.at_work:
                continue
            now = before._replace(at_work=(place / LOCK).exists())
            with suppress(OSError, ValueError):
                file = os.stat(place / ROUNDS)
                if self.seen.get(place) != (file.st_mtime_ns, file.st_size):
                    self.seen[place] = file.st_mtime_ns, file.st_size
                    row = _last_row(place / ROUNDS)
                    now = now._replace(rounds=row["round"] + 1, row=row)
            self.standings[place] = now
        return list(self.standings.values())


def _last_row(path: Path) -> Row:
    """The last complete line of a file of rounds."""
    with open(path, "rb") as file:
        file.seek(max(0, os.stat(path).st_size - 2**16))
        line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    row, _ = unseal(line + b"\n")
    if not isinstance(row, dict) or not isinstance(row.get("round"), int):
        raise ValueError("no round")
    return row
