"""Worker processes that share a list of experiments, on one machine or on several machines with a common disk.

There is no coordinator. Each process runs the next experiment that is neither finished nor locked, from its last
checkpoint, and polls the locked experiments. When a process exits, its lock is released and another process continues.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from stableair.data import hub
from stableair.errors import RunBusyError, StableairError
from stableair.experiment import Experiment
from stableair.literals import PluginChange
from stableair.results.callbacks import Callback
from stableair.results.checksums import ROUNDS, unseal
from stableair.results.grouping import Sweep
from stableair.results.lock import LOCK
from stableair.results.metrics import Row
from stableair.results.options import RunOptions, observing, without_display
from stableair.results.reading import read_run
from stableair.results.run import Run
from stableair.runner import run
from stableair.spec import PLUGINS, load_plugin
from stableair.validation import pluralize

POLLING_INTERVAL = 1.0  # seconds between two attempts to run the experiments that other processes have locked

Outcome = Run | StableairError  # the run of an experiment, or the error that stopped it


class Job(NamedTuple):
    """The input of a worker process; can be written as JSON."""

    settings: list[dict[str, Any]]  # one entry per experiment
    folder: str
    plugins: list[str]
    data: str  # the data folder
    plugin_changed: PluginChange = "refuse"
    options: RunOptions = {}  # noqa: RUF012

    @classmethod
    def create(
        cls,
        experiments: Iterable[Experiment],
        folder: Path,
        plugin_changed: PluginChange = "refuse",
        options: RunOptions | None = None,
    ) -> Self:
        """Return the job for some experiments, with the plug-ins and the data folder of this process."""
        settings = [one.to_dict() for one in experiments]
        hidden: RunOptions = {**(options or {}), "progress": False}  # the output of a worker is not shown
        return cls(settings, str(folder.absolute()), list(PLUGINS), str(hub.folder()), plugin_changed, hidden)

    def experiments(self) -> list[Experiment]:
        """Set the data folder, load the plug-ins, and return the experiments."""
        os.environ[hub.VARIABLE] = self.data
        for file in self.plugins:
            if file not in PLUGINS:
                load_plugin(file)
        return [Experiment(**settings) for settings in self.settings]

    def __call__(self) -> None:
        """Run the experiments until all are finished."""
        folder = Path(self.folder)
        with observing((), self.options, folder) as trackers:
            for _ in run_unlocked(self.experiments(), folder, [trackers], self.plugin_changed, self.options):
                pass


def run_unlocked(
    experiments: Iterable[Experiment],
    folder: Path,
    callbacks: Sequence[Callback] = (),
    plugin_changed: PluginChange = "refuse",
    options: RunOptions | None = None,
) -> Iterator[tuple[Experiment, Outcome]]:
    """Run the experiments that no other process has locked, and poll the locked experiments until all are finished.

    The caller displays the trackers and the progress bar of the options: see `observing`.

    Yields:
        Each experiment with its outcome, in the order of completion. Any process may have computed it.
    """
    remaining, single = list(experiments), without_display(options or {})
    while remaining:
        locked = []
        for one in remaining:
            try:
                run_folder = folder / one.name
                finished = run(
                    one, run_folder, resume=True, plugin_changed=plugin_changed, callbacks=callbacks, **single
                )
            except RunBusyError:
                locked.append(one)
            except StableairError as error:
                yield one, error
            else:
                yield one, trim(finished, one)
        remaining = locked
        if remaining:
            time.sleep(POLLING_INTERVAL)


def trim(finished: Run, experiment: Experiment) -> Run:
    """Return the run as a run of the experiment's number of rounds, without further rounds and without its model."""
    record = finished.record | {"rounds": experiment.rounds}
    return replace(finished, record=record, rounds=finished.rounds[: experiment.rounds], final=None)


def collect_runs(experiments: list[Experiment], outcomes: dict[str, Outcome]) -> Sweep:
    """Return the runs in the order of the experiments.

    Raises:
        StableairError: An experiment failed; the class is the class of the first error.
    """
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, StableairError)}
    if failed:
        name, error = next(iter(failed.items()))
        text = f"{len(failed)} of {pluralize(len(experiments), 'experiment')} failed; the first, {name}: {error}"
        raise error.with_message(text)
    return Sweep(outcome for one in experiments if isinstance(outcome := outcomes[one.name], Run))


class ExperimentProgress(NamedTuple):
    """Progress of an experiment in a sweep."""

    experiment: Experiment
    rounds: int = 0  # recorded rounds
    row: Row = {}  # noqa: RUF012  the last recorded round
    running: bool = False  # whether its folder is locked, or was locked by a killed process
    stopped: bool = False  # whether its stopping rule has ended it

    @property
    def finished(self) -> bool:
        """Whether no further round will be computed."""
        return self.rounds >= self.experiment.rounds or bool(self.row.get("diverged")) or self.stopped


class SweepProgress:
    """Progress of each experiment of a sweep, read from the run folders, since any process may compute them."""

    def __init__(self, experiments: list[Experiment], folder: Path):
        self.progress = {folder / one.name: ExperimentProgress(one) for one in experiments}
        self.versions: dict[Path, tuple[int, int]] = {}  # modification time and size of rounds.jsonl when it was read

    def refresh(self) -> list[ExperimentProgress]:
        """Read the progress of all experiments; unchanged files are not read again."""
        for folder, before in self.progress.items():
            if before.finished and not before.running:
                continue
            now = before._replace(running=(folder / LOCK).exists())
            with suppress(OSError, ValueError):
                file = os.stat(folder / ROUNDS)
                if self.versions.get(folder) != (file.st_mtime_ns, file.st_size):
                    self.versions[folder] = file.st_mtime_ns, file.st_size
                    row = _last_row(folder / ROUNDS)
                    now = now._replace(rounds=row["round"] + 1, row=row)
            if now.rounds and not now.running and not now.finished:
                with suppress(StableairError):  # a process may be writing the file
                    now = now._replace(stopped=read_run(folder).stopped)
            self.progress[folder] = now
        return list(self.progress.values())


def _last_row(path: Path) -> Row:
    """Return the last complete line of rounds.jsonl."""
    with open(path, "rb") as file:
        file.seek(max(0, os.stat(path).st_size - 2**16))
        line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
    row, _ = unseal(line + b"\n")
    if not isinstance(row, dict) or not isinstance(row.get("round"), int):
        raise ValueError("the line is not a round")
    return row
