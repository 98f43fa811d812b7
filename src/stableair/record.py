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
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import stableair
from stableair.checks import InputError, whole
from stableair.experiment import HOW, Experiment, build
from stableair.simulate import Simulation, simulate
from stableair.vector import State

EXPERIMENT, ENVIRONMENT, ROUNDS, CHECKPOINT = "experiment.json", "environment.json", "rounds.jsonl", "checkpoint.pt"


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

    @property
    def state(self) -> State:
        """The model after the last complete round."""
        last = self.last or (self.folder and _read_checkpoint(self.folder))
        if not last:
            raise InputError(f"{self.folder}: no round is complete yet")
        return State(last.w, last.stats)

    def to_pandas(self) -> Any:
        """The rounds as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame([{k: v for k, v in row.items() if k != "diverged"} for row in self.rounds])


def load(folder: str | Path) -> Run:
    """Read a run folder; `load(folder).to_pandas()` for a DataFrame."""
    folder = Path(folder)
    if not (folder / EXPERIMENT).is_file():
        raise InputError(f"{folder} holds no run: there is no {EXPERIMENT} in it")
    return Run(_read_json(folder / EXPERIMENT, dict), _read_rounds(folder), folder)


def run(
    experiment: Experiment,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int = 1,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Run an experiment, in memory or recorded in a folder; `on_round` sees each round's numbers as they come.

    With `resume` it goes on from the last complete round in the folder, and a finished run is not computed again.
    """
    whole("checkpoint_every", checkpoint_every, 1)
    folder = None if folder is None else Path(folder)
    rows, last = _standing(folder, experiment, resume) if folder else ([], None)
    done = last.rounds if last else 0
    if folder and (done >= experiment.rounds or (rows and rows[-1].get("diverged"))):
        return load(folder)

    sim = build(experiment)
    start = _restore(sim, last, folder)
    rows = rows[:done]
    if folder:
        _begin(folder, experiment, rows, start.w.device)
    saved = done
    try:
        clock = time.perf_counter()
        for k, state, metrics in simulate(sim, start, experiment.rounds, start=done):
            row = {"round": k} | metrics | {"seconds": time.perf_counter() - clock}
            if diverged := not state.w.isfinite().all():
                row["diverged"] = True
            rows.append({key: _strict(value) for key, value in row.items()})
            if folder:
                _append(folder / ROUNDS, rows[-1])
            if on_round:
                on_round(rows[-1])
            if diverged:
                break
            last = Checkpoint(k + 1, *state, _state_of(sim.receive), _state_of(sim.update))
            if folder and (k + 1 - saved >= checkpoint_every or k + 1 == experiment.rounds):
                _save(folder, last)
                saved = k + 1
            clock = time.perf_counter()
    finally:  # also on Ctrl-C: no complete round is lost, however rare the checkpoints
        if folder and last and last.rounds > saved:
            _save(folder, last)
    return Run(experiment.to_dict(), rows, folder, last)


def _standing(folder: Path, experiment: Experiment, resume: bool) -> tuple[list[dict], Checkpoint | None]:
    """What the folder holds of this experiment: its rounds and its checkpoint. Anything else in it is refused."""
    _check_writable(folder)
    if not (folder / EXPERIMENT).exists():
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
        if Experiment(**settings).id() == experiment.id():
            return []
    except InputError as error:
        raise InputError(f"{folder / EXPERIMENT} is not an experiment this version knows: {error}") from None
    new = experiment.to_dict()
    return [key for key in new if key not in HOW and settings.get(key) != new[key]]


def _restore(sim: Simulation, last: Checkpoint | None, folder: Path | None) -> State:
    if last is None:
        return sim.start
    if last.w.shape != sim.start.w.shape or last.stats.shape != sim.start.stats.shape:
        raise InputError(f"{folder / CHECKPOINT} is corrupted: {len(last.w)} entries for a model of {len(sim.start.w)}")
    place = sim.start.w.device
    for part, state in ((sim.receive, last.receiver), (sim.update, last.server)):
        if state:
            part.load_state_dict(_moved(state, place))
    return State(last.w.to(place), last.stats.to(place))


def _state_of(part: Any) -> dict:
    """A copy of a stage's memory, if it has one: the next round may already change it when it is written."""
    return copy.deepcopy(part.state_dict()) if hasattr(part, "state_dict") else {}


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, dict):
        return {key: _moved(value, device) for key, value in state.items()}
    return state.to(device) if isinstance(state, torch.Tensor) else state


def _strict(value: Any) -> Any:
    """JSON knows no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _begin(folder: Path, experiment: Experiment, rows: list[dict], device: torch.device) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    past = _read_json(folder / ENVIRONMENT, list) if rows and (folder / ENVIRONMENT).exists() else []
    _replace(folder / ENVIRONMENT, (json.dumps([*past, _environment(device, len(rows))], indent=2) + "\n").encode())
    if not rows:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    _replace(folder / ROUNDS, "".join(map(_line, rows)).encode())
    _replace(folder / EXPERIMENT, experiment.to_json().encode())


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
    }


def _check_writable(folder: Path) -> None:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"cannot write to {folder}: {there} is not a folder that can be written; choose another --out")


def _save(folder: Path, checkpoint: Checkpoint) -> None:
    file = io.BytesIO()
    torch.save(checkpoint._asdict(), file)
    _replace(folder / CHECKPOINT, file.getbuffer())


def _replace(path: Path, content: bytes | memoryview) -> None:
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
