"""A run is a folder: experiment.json, environment.json, clients.json, rounds.jsonl and a checkpoint.

Every file is replaced whole or appended by whole lines, and the line of a round is written before its checkpoint. So
whenever a process ends, the checkpoint says how many rounds are complete, and lines beyond it are computed again. It
all carries checksums, and the checkpoint before the last is kept. `recorded` is the way in; `_Recorder` writes.
"""

import copy
import functools
import itertools
import math
import os
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

import stableair
from stableair.checks import InputError, Note, place, shown, typed, whole
from stableair.contracts import Overflow, Round, Rule
from stableair.experiment import EXECUTION, Experiment, settings_of_record
from stableair.files import naming, remove_leftovers, write_whole
from stableair.results.checkpoint import (
    REMEMBERED,
    Checkpoint,
    is_sealed,
    parse_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from stableair.results.run import Row, read_record, read_rounds
from stableair.results.sealed import (
    CHECKPOINT,
    CLIENTS,
    ENVIRONMENT,
    EXPERIMENT,
    PREVIOUS,
    ROUNDS,
    read_environments,
    seal,
)
from stableair.spec import PLUGINS
from stableair.vector import State

LOCK, DAMAGED = ".lock", "checkpoint.damaged.{}.pt"
ATTEMPTS = 100  # to lock a folder that others remove meanwhile


class Busy(InputError):
    """Another process has the lock of a folder."""


class ResumePoint(NamedTuple):
    """What a folder holds of a run: the rows of its complete rounds, and its checkpoint."""

    rows: list[Row]
    checkpoint: Checkpoint | None

    @property
    def rounds(self) -> int:
        """How many rounds are complete."""
        return self.checkpoint.rounds if self.checkpoint else 0

    @property
    def diverged(self) -> bool:
        return bool(self.rows and self.rows[-1].get("diverged"))


@dataclass(frozen=True)
class Circumstances:
    """What a folder keeps beside the rounds: of what they are the rounds, and how and on what they are computed."""

    experiment: Experiment
    environment: dict[str, Any]  # of this process: see `environment`
    labels: list[list[int]] | None = None  # samples of each class at each client
    rules: dict[str, Rule] = field(default_factory=dict)  # as a Simulation has them: what they remember is kept
    chunk: Callable[[], int | None] = lambda: None  # how many clients are computed at a time by now


# ------------------------------------------------------------------------------------------------------------- reading


@typed
def resume_point(folder: str | Path, experiment: Experiment, resume: bool) -> ResumePoint:
    """Where a run of this experiment in this folder begins. Another run in it, or damage, is refused."""
    folder = place("folder", folder)
    check_writable(folder)
    if not (folder / EXPERIMENT).exists():
        if any((folder / name).exists() for name in (ROUNDS, CHECKPOINT, PREVIOUS)):
            raise InputError(f"{folder} holds a run without its {EXPERIMENT}; restore it", hint="folder")
        return ResumePoint([], None)
    if different := _differences(read_record(folder), experiment, folder):
        raise InputError(f"{folder} holds another experiment, with another {', '.join(different)}", hint="folder")
    rows, last = read_rounds(folder), read_checkpoint(folder)
    if not resume and (rows or last):
        raise InputError(f"{folder} already holds this run", hint="resume", advice="resume=True goes on with it")
    if last and len(rows) < last.rounds:
        raise InputError(f"{folder / ROUNDS} is corrupted: {len(rows)} rounds, but {CHECKPOINT} is after {last.rounds}")
    return ResumePoint(rows, last)


def _differences(record: dict[str, Any], experiment: Experiment, folder: Path) -> list[str]:
    try:
        if Experiment.from_record(record).id() == experiment.id():
            return []
    except InputError as error:
        raise InputError(f"{folder / EXPERIMENT} is not an experiment this version knows: {error}") from None
    new, old = experiment.to_dict(), settings_of_record(record)
    return [key for key in new if key not in EXECUTION and old.get(key) != new[key]] or ["argument of a component"]


def restored(start: State, rules: dict[str, Rule], last: Checkpoint | None, folder: Path | None) -> State:
    """The state to go on from; the rules remember what they did then."""
    if last is None:
        return start
    where = f"{folder / CHECKPOINT if folder else CHECKPOINT} is corrupted"
    if last.w.shape != start.w.shape or last.stats.shape != start.stats.shape:
        raise InputError(f"{where}: {len(last.w)} entries for a model of {len(start.w)}")
    place = start.w.device
    for name, rule in rules.items():
        try:
            rule.load_state_dict(_each_tensor(getattr(last, name), lambda t: t.to(place)))
        except (InputError, KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise InputError(
                f"{where}, or of a version in which the {name} kept something else: {type(error).__name__}: {error}"
            ) from None
    return State(last.w.to(place), last.stats.to(place))


# ------------------------------------------------------------------------------------------------------------- writing


@typed
def recorded(
    rounds: Iterable[Round],
    folder: str | Path | None,
    about: Circumstances,
    begin: ResumePoint = ResumePoint([], None),  # noqa: B008 (an immutable value)
    checkpoint_every: int = 1,
) -> Generator[Round, None, None]:
    """The rounds as they come, each recorded in the folder before it is handed on; its metrics are then its row.

    Whoever makes the rounds is recorded and resumed alike. Without a folder nothing is written. A model that is no
    longer finite ends the rounds: the last one says "diverged". Close the iterator: then all of it is on the disk.
    """
    with _Recorder(None if folder is None else place("folder", folder), about, begin, checkpoint_every) as recorder:
        done = begin.rounds
        try:
            for each in rounds:
                if not isinstance(each, Round):
                    raise InputError(f"what is recorded must be Rounds: got {shown(each)}")
                k, state, metrics = each
                if not state.w.isfinite().all():
                    yield Round(k, state, recorder.diverged(k, metrics))
                    return
                row = recorder.add({"round": k} | metrics)
                memory = {name: copy.deepcopy(rule.state_dict()) for name, rule in about.rules.items()}
                recorder.keep(Checkpoint(k + 1, *state, *(memory.get(name, {}) for name in REMEMBERED)))
                done = k + 1
                yield Round(k, state, row)
                recorder.clock = time.perf_counter()
        except Overflow as overflow:
            if not done:  # nothing has come over the air yet: it is the data, the model or the lr
                raise
            row = recorder.diverged(overflow.k, recorder.last_row)  # it is the model that the channel has driven away
            yield Round(overflow.k, recorder.last.state if recorder.last else state, row)


class _Recorder:
    """Writes a run as it goes, in memory or into its folder."""

    def __init__(self, folder: Path | None, about: Circumstances, begin: ResumePoint, every: int):
        self.folder, self.about, self.every = folder, about, whole("checkpoint_every", every, 1)
        self.last, self.saved = begin.checkpoint, begin.rounds
        self.fresh = not begin.rounds
        self.last_row: Row = begin.rows[begin.rounds - 1] if begin.rounds else {}
        if folder:
            self._begin(folder, begin)
        self.aside = ThreadPoolExecutor(1)
        self.aside.submit(int).result()  # its thread starts here: Ctrl-C while it starts would make it a second one
        self.saving: Future[None] | None = None
        self.clock = time.perf_counter()

    def _begin(self, folder: Path, begin: ResumePoint) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        if not begin.rows and (read_rounds(folder) or read_checkpoint(folder)):
            raise InputError(f"{folder} already holds a run; hand in its resume_point", hint="folder")
        past = read_environments(folder) if begin.rounds else []
        self.environments = [*past, self.about.environment | {"first_round": begin.rounds}]
        if begin.checkpoint:
            _set_right(folder, begin.checkpoint)
        write_whole(folder / EXPERIMENT, seal(self.about.experiment.to_record()))
        self._write_environments(folder)
        if self.about.labels is not None:
            write_whole(folder / CLIENTS, seal({"labels": self.about.labels}))
        if self.fresh:
            for name in (CHECKPOINT, PREVIOUS):
                (folder / name).unlink(missing_ok=True)
        write_whole(folder / ROUNDS, b"".join(map(_line, begin.rows[: begin.rounds])))

    def _write_environments(self, folder: Path) -> None:
        write_whole(folder / ENVIRONMENT, seal(self.environments))

    def add(self, row: Row) -> Row:
        """Record a round; JSON knows no infinity and no NaN."""
        row = row | {"seconds": time.perf_counter() - self.clock}
        row = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        self.last_row = row
        if self.folder:
            _append(self.folder / ROUNDS, row)
            chunk = self.about.chunk()
            if chunk is not None and self.environments[-1].get("chunk") != chunk:
                self.environments[-1]["chunk"] = chunk  # where memory made it fewer: a resumed run goes on so
                self._write_environments(self.folder)
        return row

    def keep(self, checkpoint: Checkpoint) -> None:
        """Remember the state after a round, and write it when it is time to: the round is then complete."""
        self.last = checkpoint
        if checkpoint.rounds - self.saved >= self.every:
            self.flush()

    def flush(self) -> None:
        """Write the checkpoint aside, while the next round is computed; the first one here and now, with a check."""
        self.wait()
        if self.folder and self.last and self.last.rounds > self.saved:
            here = Checkpoint(*(_each_tensor(part, _on_host) for part in self.last))
            if not self.saved:
                save_checkpoint(self.folder, here, check=True)
            else:
                self.saving = self.aside.submit(save_checkpoint, self.folder, here, check=False)
            self.saved = self.last.rounds

    def wait(self) -> None:
        """Until the checkpoint that is being written is there; if it could not be, this says so."""
        if self.saving:
            try:
                self.saving.result()
            finally:
                if self.saving.done():  # not so where Ctrl-C ended the waiting: it is then waited for again
                    self.saving = None

    def diverged(self, k: int, metrics: Iterable[str]) -> Row:
        """Record that there is no model after round k: nothing measured of it would mean anything."""
        self.flush()  # the last good state first: this line ends the run
        self.wait()
        return self.add({"round": k} | dict.fromkeys(metrics) | {"round": k, "diverged": True})

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """No complete round is lost, however rare the checkpoints; a run that fails before its first leaves nothing."""
        with self.aside:
            self.flush()
            self.wait()
        if self.folder and self.fresh and not self.last_row and kind and issubclass(kind, Exception):
            for name in (ROUNDS, CLIENTS, ENVIRONMENT, EXPERIMENT):
                (self.folder / name).unlink(missing_ok=True)


def _set_right(folder: Path, good: Checkpoint) -> None:
    """Before a run goes on: what is damaged is put aside and kept, and what has no checksum yet gets one."""
    path = folder / CHECKPOINT
    if path.exists():
        try:
            if parse_checkpoint(path).rounds == good.rounds and is_sealed(path):
                return
        except InputError:
            free = (folder / DAMAGED.format(i) for i in itertools.count(1) if not (folder / DAMAGED.format(i)).exists())
            os.replace(path, next(free))
    save_checkpoint(folder, good, check=False, keep=False)


def _line(row: Row) -> bytes:
    return seal(row, indent=None)


def _append(path: Path, row: Row) -> None:
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))
        with open(descriptor, "ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())


def _each_tensor(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same dicts and lists with every tensor changed."""
    if isinstance(state, dict):
        return {key: _each_tensor(value, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        changed = [_each_tensor(value, change) for value in state]
        return changed if isinstance(state, list) else tuple(changed)
    return change(state) if isinstance(state, torch.Tensor) else state


def _on_host(t: torch.Tensor) -> torch.Tensor:
    """From a GPU into page-locked memory, which torch keeps for the next checkpoint."""
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) if t.is_cuda else t


@functools.cache
def commit() -> str:
    """The commit of the source, with a + if it was changed since; empty where this is no copy of the repository."""
    source = Path(stableair.__file__)
    git = ["git", "--no-optional-locks", "-C", str(source.parent)]  # in nobody's way who works in it
    asked = (["ls-files", "--error-unmatch", source.name], ["describe", "--always", "--exclude=*", "--dirty=+"])
    try:
        answers = [subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout for words in asked]
    except (OSError, subprocess.CalledProcessError):  # no git, or a package that was installed
        return ""
    return answers[-1].strip()


def environment(device: torch.device) -> dict[str, Any]:
    """Where rounds are computed: what somebody needs to compute them again."""
    import numpy
    import scipy

    return {
        "first_round": 0,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "stableair": stableair.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "plugins": dict(PLUGINS),  # and the SHA-256 of each
    }


# ------------------------------------------------------------------------------------------------------------- locking


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be written, before anything is computed."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        text = f"cannot write to {folder}: {there} is not a folder that can be written"
        raise InputError(text, hint="folder")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder and keep every other process out of it; a folder in which nothing was written is gone after."""
    check_writable(folder)
    for attempt in itertools.count():
        try:
            made = _made(folder)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            if (
                isinstance(error, FileNotFoundError) and attempt < ATTEMPTS
            ):  # whoever made the folder has just removed it
                continue
            # what the rights did not tell, such as a folder of the system's
            raise InputError(f"cannot write to {folder}: {error.strerror}", hint="folder") from None
        try:
            _lock(descriptor, folder)
            if _is_there(descriptor):  # else whoever had it before has just removed it: once more
                try:
                    yield
                    return
                finally:
                    (folder / LOCK).unlink(missing_ok=True)
                    with suppress(OSError):  # not empty: somebody else is at work in it, or beside it
                        for path in made:
                            path.rmdir()
        finally:
            os.close(descriptor)


def has_locks(folder: Path) -> bool:
    """Whether processes can keep each other out of what lies in this folder, which must be there."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=LOCK) as file, warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        try:
            _lock(file.fileno(), folder)
        except Note:
            return False
    return fcntl is not None


def _is_there(descriptor: int) -> bool:
    """Whether an open file has a name still."""
    try:
        return os.fstat(descriptor).st_nlink > 0
    except OSError:  # a network disk's way to say so
        return False


def _made(folder: Path) -> list[Path]:
    """Make a folder with its parents; those that were not there, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _lock(descriptor: int, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"another process is at work in {folder}; wait for it"
        raise Busy(text, hint="folder") from None
    except OSError:
        note = f"{folder} is on a disk without locks: see to it that one process alone writes there"
        warnings.warn(note, Note, stacklevel=4)
