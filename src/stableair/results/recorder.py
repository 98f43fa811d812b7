"""Write a run to its folder: experiment.json, environment.json, clients.json, rounds.jsonl and a checkpoint.

Every file is replaced as a whole or extended by whole lines. The line of a round is written before its checkpoint.
Therefore the checkpoint determines the number of complete rounds; later rounds are computed again. All files have
checksums, and the previous checkpoint is kept.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stableair.contracts import Round, State
from stableair.errors import InputError, NonFiniteUpload
from stableair.experiment import Experiment
from stableair.files import remove_leftovers
from stableair.memory import check_memory, map_tensors, non_finite_parts
from stableair.results.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from stableair.results.checksums import (
    BEST,
    CHECKPOINT,
    CLIENTS,
    ENVIRONMENT,
    EXPERIMENT,
    PREVIOUS,
    ROUNDS,
    seal,
)
from stableair.results.lock import LockedFolder, locked
from stableair.results.metrics import Row
from stableair.results.plugins import PLUGINS, component_sources
from stableair.results.resume import NEW_RUN, ResumePoint, repair_checkpoint
from stableair.results.run_files import read_rounds
from stableair.validation import as_path, integer, short_repr, typed

log = logging.getLogger("stableair")


@dataclass(frozen=True)
class RunMetadata:
    """Metadata of a run: its experiment, its environment and its label counts.

    >>> import stableair as sa
    >>> sa.RunMetadata(sa.Experiment(clients=3), {"device": "cpu"}).labels is None
    True
    """

    experiment: Experiment  # the experiment of the run
    environment: dict[str, Any]  # the environment of this process, from `results.environment`
    labels: list[list[int]] | None = None  # (clients, classes), number of samples
    chunk: Callable[[], int | None] = lambda: None  # returns the number of clients that are currently trained together


@typed
def recorded(
    rounds: Iterable[Round],
    folder: LockedFolder | str | Path | None,
    metadata: RunMetadata,
    resume: ResumePoint = NEW_RUN,
    checkpoint_every: int = 1,
) -> Generator[Round, None, None]:
    """Record rounds in a run folder, and yield each round after it is recorded.

    Args:
        rounds: The rounds, from `simulate`, a Flower strategy or any other source.
        folder: Run folder; it is locked until the rounds end, unless the caller has locked it. None records nothing.
        metadata: Experiment, environment and label counts, which are recorded with the rounds.
        resume: The point at which the run continues, from `resume_point`.
        checkpoint_every: Number of rounds between two checkpoints.

    Yields:
        Each Round, with its recorded row as metrics. If the model becomes non-finite, or a memory contains NaN, the
        rounds end, and the last row has the key "diverged". Close the iterator to write all files.

    Raises:
        InputError: The folder holds a run, and `resume` is not its resume point (`run-exists`).
        RunBusyError: Another process has locked the folder.
        ResourceError: The folder was deleted, moved or replaced (`folder-replaced`); nothing more is written.

    >>> from contextlib import closing
    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> sim = sa.build(experiment)
    >>> rounds = sa.simulate(sim, sim.start, rounds=2)
    >>> metadata = sa.RunMetadata(experiment, {"device": "cpu"})
    >>> with TemporaryDirectory() as folder:
    ...     with closing(sa.recorded(rounds, folder, metadata)) as saved:
    ...         for k, state, row in saved:
    ...             print(k, row["channel/senders"])
    ...     print(sa.load(folder)["channel/senders"])
    0 3
    1 3
    [3, 3]
    """
    with ExitStack() as stack:
        if isinstance(folder, str | Path):
            folder = stack.enter_context(locked(as_path("folder", folder)))
        recorder = stack.enter_context(_Recorder(folder, metadata, resume, checkpoint_every))
        completed = resume.rounds
        try:
            for each in rounds:
                if not isinstance(each, Round):
                    raise InputError(f"rounds must yield Round objects: got {short_repr(each)}", code="wrong-type")
                k, state, metrics = each
                state = _with_plain_memory(state)  # before any file is written
                if parts := non_finite_parts(state, infinite_memories=True):
                    yield Round(k, state, recorder.diverged(k, metrics, parts))
                    return
                row = recorder.add({"round": k} | metrics)
                recorder.keep(Checkpoint(k + 1, state))
                completed = k + 1
                yield Round(k, state, row)
                recorder.clock = time.perf_counter()
        except NonFiniteUpload as error:
            if not completed:  # no interference so far: the cause is the data, the model or the lr
                raise
            row = recorder.diverged(error.k, recorder.last_row, {"model"})  # the interference is the cause
            yield Round(error.k, recorder.last.state if recorder.last else state, row)


class _Recorder:
    """Write the rounds of a run to its folder. With the folder None, write no files."""

    def __init__(self, folder: LockedFolder | None, metadata: RunMetadata, resume: ResumePoint, every: int):
        self.folder, self.metadata, self.every = folder, metadata, integer("checkpoint_every", every, 1)
        self.last, self.saved = resume.checkpoint, resume.rounds
        self.is_new = not resume.rounds
        self.last_row: Row = resume.rows[resume.rounds - 1] if resume.rounds else {}
        if folder:
            self._prepare(folder, resume)
        self.writer = ThreadPoolExecutor(1)
        self.writer.submit(int).result()  # start the thread now: Ctrl-C during a later start could start it twice
        self.saving: Future[None] | None = None
        self.clock = time.perf_counter()

    def _prepare(self, folder: LockedFolder, resume: ResumePoint) -> None:
        """Write the files that do not change during the run, and discard the rounds after the last checkpoint."""
        if not resume.rows and not resume.replaces and (read_rounds(folder.path) or read_checkpoint(folder.path)):
            text = f"{folder.path} already holds a run: pass resume=sa.resume_point(...)"
            raise InputError(text, code="run-exists", hint="folder")
        folder.check()
        remove_leftovers(folder.path)
        here = {"first_round": resume.rounds, PLUGINS: component_sources(self.metadata.experiment)}
        self.environments = [*resume.environments, self.metadata.environment | here]
        if self.is_new:  # before the other files: old rounds must not be combined with a new environment
            folder.remove(CHECKPOINT, PREVIOUS, BEST, ROUNDS)
        if resume.checkpoint:
            repair_checkpoint(folder, resume.checkpoint)
        folder.write(EXPERIMENT, seal(self.metadata.experiment.to_record()))
        folder.write(ENVIRONMENT, seal(self.environments))
        if self.metadata.labels is not None:
            folder.write(CLIENTS, seal({"labels": self.metadata.labels}))
        folder.write(ROUNDS, b"".join(map(_line, resume.rows[: resume.rounds])))

    def add(self, row: Row) -> Row:
        """Record the metrics of a round, and return the recorded row.

        Infinity and NaN become None, since JSON cannot represent them. A metric that only the previous round has is
        recorded as None: for example, a round without senders has no receiver metrics.
        """
        row = row | dict.fromkeys(name for name in self.last_row if name not in row)
        row = row | {"seconds": time.perf_counter() - self.clock}
        row = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        self.last_row = row
        if self.folder:
            self.folder.append(ROUNDS, _line(row))
            chunk = self.metadata.chunk()
            if chunk is not None and self.environments[-1].get("chunk") != chunk:
                self.environments[-1]["chunk"] = (
                    chunk  # reduced because of a lack of memory; a resumed run uses the same value
                )
                self.folder.write(ENVIRONMENT, seal(self.environments))
        return row

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep the state after a round, and write it if a checkpoint is due."""
        self.last = checkpoint
        if checkpoint.rounds - self.saved >= self.every:
            self.flush()

    def flush(self) -> None:
        """Write the last checkpoint in a thread during the next round; write the first checkpoint synchronously."""
        self.wait()
        if self.folder and self.last and self.last.rounds > self.saved:
            on_host = Checkpoint(self.last.rounds, map_tensors(_to_host, self.last.state))
            if not self.saved:
                save_checkpoint(self.folder, on_host)
            else:
                self.saving = self.writer.submit(save_checkpoint, self.folder, on_host)
            self.saved = self.last.rounds

    def wait(self) -> None:
        """Wait until the checkpoint is written; raise the error if writing failed."""
        if self.saving:
            try:
                self.saving.result()
            finally:
                if self.saving.done():  # False after Ctrl-C during the wait; then __exit__ waits again
                    self.saving = None

    def diverged(self, k: int, metrics: Iterable[str], parts: set[str]) -> Row:
        """Record that the run diverged in round k, with None for all metrics of this round.

        Args:
            k: The round.
            metrics: Names of the metrics.
            parts: The parts of the state that are not finite.
        """
        for part in sorted(parts - {"model"}):
            log.warning("round %d: the memory of the %s contains NaN; the run stops", k, part)
        self.flush()  # write the last finite state before the last line of the run
        self.wait()
        return self.add({"round": k} | dict.fromkeys(metrics) | {"round": k, "diverged": True})

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last checkpoint; remove the files of a new run that failed before its first round."""
        with self.writer:
            self.flush()
            self.wait()
        if self.folder and self.is_new and not self.last_row and kind and issubclass(kind, Exception):
            self.folder.remove(ROUNDS, CLIENTS, ENVIRONMENT, EXPERIMENT)


def _with_plain_memory(state: State) -> State:
    """Return the state with memories that consist of plain types.

    `torch.load` can read such memories with weights_only=True.

    Raises:
        InputError: A memory contains another type (`bad-memory`).
    """
    memories = {name: check_memory(name, getattr(state, name)) for name in State._fields if name != "model"}
    return state._replace(**memories)


def _line(row: Row) -> bytes:
    return seal(row, indent=None)


def _to_host(t: torch.Tensor) -> torch.Tensor:
    """Copy a tensor from the GPU to page-locked memory, which torch reuses for the next checkpoint."""
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) if t.is_cuda else t
