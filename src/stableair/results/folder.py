"""A run is a folder: experiment.json, environment.json, rounds.jsonl and a checkpoint.

Every file is replaced whole or appended by whole lines, and the lines of a round are written before its checkpoint.
So whenever a process ends, the checkpoint says how many rounds are complete, and lines beyond it are computed again.
"""

import copy
import io
import json
import math
import os
import pickle
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

import stableair
from stableair.algorithm import Simulation, simulate
from stableair.builder import build
from stableair.checks import InputError, whole
from stableair.contracts import Overflow, Rule
from stableair.experiment import EXECUTION, Experiment, settings_of_record
from stableair.spec import PLUGINS
from stableair.vector import State

EXPERIMENT, ENVIRONMENT, CLIENTS = "experiment.json", "environment.json", "clients.json"
ROUNDS, CHECKPOINT = "rounds.jsonl", "checkpoint.pt"
LAST = 10  # rounds to average over: the accuracy of a method that suffers jumps from round to round


class Checkpoint(NamedTuple):
    """All that the next round needs."""

    rounds: int  # complete so far
    w: torch.Tensor
    stats: torch.Tensor
    receiver: dict
    server: dict


@dataclass(frozen=True)
class Run:
    """What was recorded of a run: run["test/accuracy"] is a metric's value after each round."""

    settings: dict[str, Any]
    rounds: list[dict[str, Any]]
    folder: Path | None = None
    last: Checkpoint | None = None

    def __getitem__(self, metric: str) -> list[float | None]:
        try:
            return [row[metric] for row in self.rounds]
        except KeyError:
            raise InputError(f"metric {metric!r} was not recorded; there are {', '.join(self.rounds[0])}") from None

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def experiment(self) -> Experiment:
        return Experiment(**self.settings)

    @property
    def diverged(self) -> int | None:
        """The round after which the model was no longer finite, where there was one."""
        return self.rounds[-1]["round"] if self.rounds and self.rounds[-1].get("diverged") else None

    def settled(self, metric: str) -> float:
        """The mean of a metric over the last rounds, at most half of them; 0 for a run that diverged."""
        last = self[metric][-min(LAST, max(1, len(self) // 2)) :]
        return 0.0 if self.diverged is not None else sum(last) / len(last)

    def fluctuation(self, metric: str) -> float | None:
        """The standard deviation of a metric over the last rounds; None for a run that diverged or has one round."""
        last = self[metric][-LAST:]
        return None if self.diverged is not None or len(last) < 2 else statistics.stdev(last)

    @property
    def state(self) -> State:
        """The model after the last complete round."""
        last = self.last or (self.folder and _read_checkpoint(self.folder))
        if not last:
            raise InputError(f"{self.folder}: no round is complete yet")
        return State(last.w, last.stats)

    @property
    def labels(self) -> list[list[int]] | None:
        """How many samples of each class each client holds, where the folder tells."""
        try:
            counts = _read_json(self.folder / CLIENTS, dict)["labels"] if self.folder else None
            return [[int(n) for n in row] for row in counts] if counts else None
        except (InputError, KeyError, TypeError, ValueError):
            return None

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Where and how its rounds were computed, as far as the folder tells."""
        try:
            return [e for e in _past(self.folder) if isinstance(e, dict)]
        except InputError:
            return []

    def to_pandas(self) -> Any:
        """The rounds as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise InputError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame([{k: v for k, v in row.items() if k != "diverged"} for row in self.rounds])


def load(folder: str | Path) -> Run:
    """Read a run folder; `load(folder).to_pandas()` for a DataFrame."""
    folder = Path(folder)
    if not (folder / EXPERIMENT).is_file():
        raise InputError(f"{folder} holds no run: there is no {EXPERIMENT} in it")
    try:
        settings = settings_of_record(_read_json(folder / EXPERIMENT, dict))
    except InputError as error:
        raise InputError(f"{folder / EXPERIMENT} is corrupted: {error}") from None
    return Run(settings, _read_rounds(folder), folder)


def run(
    experiment: Experiment,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int = 1,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    say: Callable[[dict[str, Any]], None] = lambda how: None,
) -> Run:
    """Run an experiment, in memory or recorded in a folder; `on_round` sees each round's numbers as they come.

    `say` is told once how it is computed: the engine, its precision, the clients at a time, and why so.
    With `resume` it goes on from the last complete round in the folder, and a finished run is not computed again.
    """
    if not isinstance(experiment, Experiment):
        raise InputError(f"run needs an Experiment: got {experiment!r}")
    whole("checkpoint_every", checkpoint_every, 1)
    folder = None if folder is None else Path(folder)
    with ExitStack() as stack:
        if folder and folder.is_dir():
            stack.enter_context(_alone(folder))
        rows, last = standing(folder, experiment, resume) if folder else ([], None)
        done = last.rounds if last else 0
        if folder and (done >= experiment.rounds or (rows and rows[-1].get("diverged"))):
            return load(folder)
        past = _past(folder) if done else []
        sim, how = _engine(build(experiment), experiment, past)
        if past and past[-1].get("data", sim.files) != sim.files:
            raise InputError(f"{folder} was begun with other data files: {past[-1]['data']}, now {sim.files}")
        say(how)
        start = _restore(sim, last, folder)
        if folder and not folder.is_dir():
            folder.mkdir(parents=True)
            stack.enter_context(_alone(folder))
        log = stack.enter_context(_Log(folder, rows[:done], last, checkpoint_every, on_round))
        log.begin(experiment, sim, how)
        try:
            for k, state, metrics in simulate(sim, start, experiment.rounds, start=done):
                if not state.w.isfinite().all():
                    log.diverged(k, metrics)
                    break
                log.add({"round": k} | metrics)
                log.chunk(sim.train.chunk)
                log.keep(Checkpoint(k + 1, *state, _state_of(sim.receive), _state_of(sim.update)))
        except Overflow as overflow:
            if overflow.k == 0:  # nothing has come over the air yet: it is the data, the model or the lr
                raise
            log.diverged(overflow.k, log.rows[-1])  # later it is the model that the channel has driven away
        except torch.cuda.OutOfMemoryError:
            raise InputError(
                f"the device is out of memory; chunk={max(1, how['chunk'] // 2)} needs less, or take device=cpu"
            ) from None
    return Run(experiment.to_dict(), log.rows, folder, log.last)


class _Log:
    """Writes a run as it goes, in memory or into its folder."""

    def __init__(
        self, folder: Path | None, rows: list[dict], last: Checkpoint | None, every: int,
        on_round: Callable[[dict[str, Any]], None] | None,
    ):  # fmt: skip
        self.folder, self.rows, self.last, self.every = folder, rows, last, every
        self.on_round = on_round or (lambda row: None)
        self.fresh = not rows
        self.saved = last.rounds if last else 0
        self.aside = ThreadPoolExecutor(1)
        self.aside.submit(int).result()  # its thread starts here: Ctrl-C while it starts would make it a second one
        self.saving: Future | None = None

    def begin(self, experiment: Experiment, sim: Simulation, how: dict[str, Any]) -> None:
        if self.folder:
            past = _past(self.folder) if self.rows else []
            self.environments = [*past, _environment(sim.start.w.device, len(self.rows)) | {"data": sim.files} | how]
            self._write_environments()
            if sim.labels is not None:
                write_whole(self.folder / CLIENTS, (json.dumps({"labels": sim.labels.tolist()}) + "\n").encode())
            if self.fresh:
                (self.folder / CHECKPOINT).unlink(missing_ok=True)
            write_whole(self.folder / ROUNDS, "".join(map(_line, self.rows)).encode())
            write_whole(self.folder / EXPERIMENT, (json.dumps(experiment.to_record(), indent=2) + "\n").encode())
        self.clock = time.perf_counter()

    def _write_environments(self) -> None:
        write_whole(self.folder / ENVIRONMENT, (json.dumps(self.environments, indent=2) + "\n").encode())

    def chunk(self, clients: int) -> None:
        """Record how many clients are computed at a time, where memory made it fewer: a resumed run goes on so."""
        if self.folder and self.environments[-1]["chunk"] != clients:
            self.environments[-1]["chunk"] = clients
            self._write_environments()

    def add(self, row: dict[str, Any]) -> None:
        """Record a round; JSON knows no infinity and no NaN."""
        row = row | {"seconds": time.perf_counter() - self.clock}
        row = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        self.rows.append(row)
        if self.folder:
            _append(self.folder / ROUNDS, row)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Remember the state after a round, write it when it is time to, and tell of the round: it is then complete."""
        self.last = checkpoint
        if checkpoint.rounds - self.saved >= self.every:
            self.flush()
        self.on_round(self.rows[-1])
        self.clock = time.perf_counter()

    def flush(self) -> None:
        """Write the checkpoint aside, while the next round is computed; the first one here and now, with a check."""
        self.wait()
        if self.folder and self.last and self.last.rounds > self.saved:
            here = Checkpoint(*(_each_tensor(part, _on_host) for part in self.last))
            if not self.saved:
                _save(self.folder, here, check=True)
            else:
                self.saving = self.aside.submit(_save, self.folder, here, check=False)
            self.saved = self.last.rounds

    def wait(self) -> None:
        """Until the checkpoint that is being written is there; if it could not be, this says so."""
        if self.saving:
            try:
                self.saving.result()
            finally:
                if self.saving.done():  # not so where Ctrl-C ended the waiting: it is then waited for again
                    self.saving = None

    def diverged(self, k: int, metrics: Iterable[str]) -> None:
        """Record that there is no model after round k: nothing measured of it would mean anything."""
        self.flush()  # the last good state first: this line ends the run
        self.wait()
        self.add({"round": k} | dict.fromkeys(metrics) | {"round": k, "diverged": True})
        self.on_round(self.rows[-1])

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """No complete round is lost, however rare the checkpoints; a run that fails before its first leaves nothing."""
        with self.aside:
            self.flush()
            self.wait()
        if self.folder and self.fresh and not self.rows and kind and issubclass(kind, Exception):
            for name in (EXPERIMENT, ENVIRONMENT, CLIENTS, ROUNDS):
                (self.folder / name).unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()


def _past(folder: Path | None) -> list[dict[str, Any]]:
    """Where and how the rounds so far were computed."""
    return _read_json(folder / ENVIRONMENT, list) if folder else []


def _engine(sim: Simulation, experiment: Experiment, past: list[dict]) -> tuple[Simulation, dict[str, Any]]:
    """The simulation as the engine of choice computes it; a run that has begun goes on as it began."""
    e = experiment
    plain = {"engine": "reference", "precision": "fp32", "chunk": sim.train.chunk}
    if e.engine == "reference":
        if e.precision not in ("auto", "fp32"):
            raise InputError(f"engine=reference computes in fp32: leave out precision={e.precision}")
        return sim, plain | {"why": "as asked for"}
    try:
        from stableair.engine import Choice, accelerate, choose
    except ModuleNotFoundError as error:  # the engine is a leaf: without it all works, slowly
        if error.name != "stableair.engine":
            raise
        if e.engine == "fast":
            raise InputError("engine fast is not there: this installation has no stableair.engine") from None
        return sim, plain | {"why": "there is no other"}
    before = past[-1] if past else {}
    same_kind = (before.get("device") == "cpu") == (sim.start.w.device.type == "cpu")
    if same_kind and plain.keys() <= before.keys() and _allows(e, before["engine"], before["precision"]):
        chunk = min(e.chunk or before["chunk"], sim.n)
        how = Choice(before["engine"], before["precision"], chunk, why="as the rounds before")
    else:
        how = choose(sim, e.engine, e.precision, e.chunk, e.rounds)
    return accelerate(sim, how), how._asdict()


def _allows(e: Experiment, engine: str, precision: str) -> bool:
    """Whether a run that was computed so may go on so, with what is asked for now."""
    return (e.engine == "auto" or engine != "reference") and e.precision in ("auto", precision)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder (where the system has such locks)."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(f"another process is at work in {folder}; wait for it or choose another folder") from None
    finally:
        os.close(descriptor)


def standing(folder: Path, experiment: Experiment, resume: bool) -> tuple[list[dict], Checkpoint | None]:
    """What the folder holds of this experiment: its rounds and its checkpoint. Another run in it is refused."""
    _check_writable(folder)
    if not (folder / EXPERIMENT).exists():
        if any((folder / name).exists() for name in (ROUNDS, CHECKPOINT)):
            raise InputError(f"{folder} holds a run without its {EXPERIMENT}; restore it or choose another folder")
        return [], None
    if different := _differences(_read_json(folder / EXPERIMENT, dict), experiment, folder):
        raise InputError(f"{folder} holds another experiment, with another {', '.join(different)}; choose another one")
    if not resume:
        raise InputError(f"{folder} already holds this run; add --resume (resume=True) or choose another folder")
    rows, last = _read_rounds(folder), _read_checkpoint(folder)
    if last and len(rows) < last.rounds:
        raise InputError(f"{folder / ROUNDS} is corrupted: {len(rows)} rounds, but {CHECKPOINT} is after {last.rounds}")
    return rows, last


def _differences(settings: dict[str, Any], experiment: Experiment, folder: Path) -> list[str]:
    try:
        if Experiment.from_record(settings).id() == experiment.id():
            return []
    except InputError as error:
        raise InputError(f"{folder / EXPERIMENT} is not an experiment this version knows: {error}") from None
    new, old = experiment.to_dict(), settings_of_record(settings)
    return [key for key in new if key not in EXECUTION and old.get(key) != new[key]]


def _restore(sim: Simulation, last: Checkpoint | None, folder: Path | None) -> State:
    if last is None:
        return sim.start
    if last.w.shape != sim.start.w.shape or last.stats.shape != sim.start.stats.shape:
        raise InputError(f"{folder / CHECKPOINT} is corrupted: {len(last.w)} entries for a model of {len(sim.start.w)}")
    place = sim.start.w.device
    for part, state in ((sim.receive, last.receiver), (sim.update, last.server)):
        if state:
            part.load_state_dict(_each_tensor(state, lambda t: t.to(place)))
    return State(last.w.to(place), last.stats.to(place))


def _state_of(part: Rule) -> dict:
    """A copy of a stage's memory, if it has one: the next round may already change it when it is written."""
    return copy.deepcopy(part.state_dict())


def _each_tensor(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same dicts and lists with every tensor changed."""
    if isinstance(state, dict):
        return {key: _each_tensor(value, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_each_tensor(value, change) for value in state)
    return change(state) if isinstance(state, torch.Tensor) else state


def _on_host(t: torch.Tensor) -> torch.Tensor:
    """From a GPU into page-locked memory, which torch keeps for the next checkpoint."""
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) if t.is_cuda else t


def _environment(device: torch.device, first_round: int) -> dict[str, Any]:
    """Where these rounds are computed: what somebody needs to compute them again."""
    import numpy
    import scipy

    return {
        "first_round": first_round,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "stableair": stableair.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "plugins": dict(PLUGINS),  # and the SHA-256 of each
    }


def _check_writable(folder: Path) -> None:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"cannot write to {folder}: {there} is not a folder that can be written; choose another --out")


def _save(folder: Path, checkpoint: Checkpoint, check: bool) -> None:
    file = io.BytesIO()
    torch.save(checkpoint._asdict(), file)
    if check:  # once a run: what cannot be read back must not be found out when it is needed
        try:
            torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
        except pickle.UnpicklingError:
            raise InputError(
                "the state_dict of the receiver or the server rule cannot be saved: "
                "it may hold tensors, numbers, text, lists and dicts alone"
            ) from None
    write_whole(folder / CHECKPOINT, file.getbuffer())


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole: whoever reads it, whenever, sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _append(path: Path, row: dict[str, Any]) -> None:
    with open(path, "ab") as file:
        file.write(_line(row).encode())
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is corrupted: {error}") from None
    if not isinstance(content, kind):
        raise InputError(f"{path} is corrupted: it holds a {type(content).__name__}, not a {kind.__name__}")
    return content


def _read_rounds(folder: Path) -> list[dict]:
    path = folder / ROUNDS
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
        if not line.endswith(b"\n"):
            break  # a line cut short by the end of its process: that round is not complete
        try:
            row = json.loads(line)
            if row["round"] != number:
                raise ValueError(f"round {row['round']} where round {number} belongs")
            if odd := [key for key, v in row.items() if not isinstance(v, int | float | None)]:
                raise ValueError(f"{odd[0]} is no number")
            if rows and (row.keys() ^ rows[0].keys()) - {"diverged"}:
                raise ValueError("it has other metrics than the first round")
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is corrupted in line {number + 1}: {error}") from None
        rows.append(row)
    return rows


def _read_checkpoint(folder: Path) -> Checkpoint | None:
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, ValueError, TypeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} is corrupted ({type(error).__name__}); restore it or choose another folder") from None
