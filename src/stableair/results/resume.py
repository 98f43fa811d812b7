"""Resume a run: read its recorded rounds and the checkpoint from which it continues."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stableair.contracts import State
from stableair.errors import CorruptRunError, InputError, StableairError
from stableair.experiment import EXECUTION, Experiment, components_of_record, settings_of_record
from stableair.literals import PluginChange
from stableair.memory import same_structure, to_device
from stableair.results.checkpoint import Checkpoint, parse_checkpoint, read_checkpoint, save_checkpoint
from stableair.results.checksums import CHECKPOINT, EXPERIMENT, PREVIOUS, ROUNDS, read_environments
from stableair.results.lock import LockedFolder, check_writable
from stableair.results.metrics import Row
from stableair.results.plugins import may_reuse
from stableair.results.run_files import read_record, read_rounds
from stableair.spec import OBJECT, format_value, without_digests
from stableair.validation import as_path, typed
from stableair.vector import ModelState

MOST_SHOWN = 3  # different settings whose values an error shows
DAMAGED = "checkpoint.damaged.{}.pt"  # new name of a damaged checkpoint


class ResumePoint(NamedTuple):
    """The recorded part of a run: its rows, its last checkpoint, and the environments that computed them.

    For a new run, the ResumePoint is empty.
    """

    rows: list[Row]  # the recorded rounds
    checkpoint: Checkpoint | None  # the last checkpoint
    environments: Sequence[dict[str, Any]] = ()  # device, engine and versions of each start of the run, in order
    replaces: bool = False  # whether to replace a recorded run, because a plug-in has changed

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return self.checkpoint.rounds if self.checkpoint else 0

    @property
    def environment(self) -> dict[str, Any]:
        """The environment that computed the last rounds; empty for a new run."""
        return self.environments[-1] if self.environments else {}

    @property
    def diverged(self) -> bool:
        """Whether the recorded run has diverged."""
        return bool(self.rows and self.rows[-1].get("diverged"))


NEW_RUN = ResumePoint([], None)


@typed
def resume_point(
    folder: str | Path, experiment: Experiment, resume: bool, plugin_changed: PluginChange = "refuse"
) -> ResumePoint:
    """Find the round at which the run in a folder continues.

    Args:
        folder: Run folder. It need not exist.
        experiment: The experiment to run. It must match the one recorded in the folder.
        resume: Whether an existing run may be continued.
        plugin_changed: What to do if a plug-in of the experiment has changed since the last round: "refuse" raises an
            error, "keep" uses the recorded rounds, "recompute" discards them.

    Returns:
        The completed rounds and the last checkpoint; empty for a new folder.

    Raises:
        InputError: The folder contains a run of another experiment (`other-experiment`), a run although `resume` is
            false (`run-exists`), or results of a plug-in that has changed (`plugin-changed`).
        CorruptRunError: A file is damaged and cannot be restored from the previous checkpoint.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> with TemporaryDirectory() as folder:
    ...     run = sa.run(experiment, folder)
    ...     point = sa.resume_point(folder, experiment, resume=True)
    >>> point.rounds, point.diverged
    (2, False)
    """
    folder = as_path("folder", folder)
    check_writable(folder)
    if not (folder / EXPERIMENT).exists():
        if any((folder / name).exists() for name in (ROUNDS, CHECKPOINT, PREVIOUS)):
            raise CorruptRunError(
                f"{folder} contains a run, but its {EXPERIMENT} is missing; restore this file", hint="folder"
            )
        return NEW_RUN
    record = read_record(folder)
    if different := _differences(record, experiment, folder):
        _refuse_other_objects(record, different, folder)
        old, new = settings_of_record(record), experiment.to_dict()
        shown = [_change(key, old.get(key), new[key]) if key in new else key for key in different[:MOST_SHOWN]]
        more = [f"also different: {', '.join(different[MOST_SHOWN:])}"] if different[MOST_SHOWN:] else []
        text = f"{folder} contains another experiment: {'; '.join(shown + more)}"
        advice = "pass the same settings, or choose another folder"
        raise InputError(text, code="other-experiment", hint="settings", advice=advice, settings=different)
    rows, last = read_rounds(folder), read_checkpoint(folder)
    if not resume and (rows or last):
        text = f"{folder} already holds this run"
        raise InputError(text, code="run-exists", hint="resume", advice="resume=True continues it")
    if last and len(rows) < last.rounds:
        counts = f"it has {len(rows)} rounds, but {CHECKPOINT} has {last.rounds}"
        raise CorruptRunError(f"{folder / ROUNDS} is corrupted: {counts}")
    diverged = bool(rows) and bool(rows[-1].get("diverged"))  # in the first round: there is no checkpoint
    environments = read_environments(folder) if last or diverged else []
    if not may_reuse(folder, experiment, environments, plugin_changed):
        return ResumePoint([], None, replaces=True)
    return ResumePoint(rows, last, environments)


def _change(key: str, old: Any, new: Any) -> str:
    """Return the recorded and the new value of a setting, for the error about another experiment."""
    before, now = (without_digests(value) if isinstance(value, str) else format_value(value) for value in (old, new))
    return f"{key}: {before} in the folder, {now} now"


def _differences(record: dict[str, Any], experiment: Experiment, folder: Path) -> list[str]:
    """Return the names of the settings in which a recorded experiment differs from `experiment`; [] if none."""
    try:
        if Experiment.from_record(record).id() == experiment.id():
            return []
    except StableairError as error:
        raise error.with_message(f"this version cannot read {folder / EXPERIMENT}: {error}") from None
    new, old = experiment.to_dict(), settings_of_record(record)
    return [key for key in new if key not in EXECUTION and old.get(key) != new[key]] or ["argument of a component"]


def _refuse_other_objects(record: dict[str, Any], different: list[str], folder: Path) -> None:
    """Raise an error if a Python object of the recorded run is missing or has changed (`object-changed`)."""
    for setting, components in components_of_record(record).items():
        names = [arguments["name"] for name, arguments in components if name == OBJECT]
        if names and setting in different:
            text = (
                f"{folder} was computed with the {setting} {names[0]}, a Python object that has changed or is missing"
            )
            advice = f"pass the same object: sa.run(..., {setting}=...), or choose another folder"
            raise InputError(text, code="object-changed", advice=advice, name=setting)


def check_same_data(resume: ResumePoint, files: dict[str, str], folder: Path | None) -> None:
    """Refuse to continue a run with other data files.

    Args:
        resume: The recorded part of the run.
        files: The data files of the experiment and their SHA-256.
        folder: The run folder, for the error message.

    Raises:
        InputError: The data files have changed since the run was started (`data-changed`).
    """
    before = resume.environment.get("data", files)
    if before != files:
        text = f"{folder} was started with different data files: {before}; now: {files}"
        raise InputError(text, code="data-changed", hint="folder", before=before, now=files)


def restored_state(start: State, checkpoint: Checkpoint | None, folder: Path | None) -> State:
    """Return the state from which a run continues, on the device of `start`.

    Args:
        start: The state before the first round. The checkpoint must have the same structure.
        checkpoint: The last checkpoint; None for a new run.
        folder: The run folder, for the error message.

    Raises:
        CorruptRunError: The structure of the checkpoint differs from that of `start`.
    """
    if checkpoint is None:
        return start
    where = folder / CHECKPOINT if folder else CHECKPOINT
    saved, device = checkpoint.state, start.model.w.device
    for name in ModelState._fields:
        expected, recorded = getattr(start.model, name), getattr(saved.model, name)
        if expected.shape != recorded.shape:
            sizes = f"it has {len(recorded)} entries, but the model has {len(expected)}"
            raise CorruptRunError(f"{where} is corrupted: {sizes}")
    average = tuple(start.model) if saved.average != () else ()
    for name, like in (("receiver", start.receiver), ("server", start.server), ("average", average)):
        if not same_structure(getattr(saved, name), like):
            text = f"{where} is corrupted, or was written by a version whose {name} stores a different memory"
            raise CorruptRunError(text, setting=name)
    model = ModelState(*(t.to(device) for t in saved.model))
    return State(model, *(to_device(memory, device) for memory in saved[1:]))


def repair_checkpoint(folder: LockedFolder, good: Checkpoint) -> None:
    """Replace a damaged checkpoint by the good one, before a run continues; the damaged file is renamed."""
    path = folder.path / CHECKPOINT
    if path.exists():
        try:
            if parse_checkpoint(path).rounds == good.rounds:
                return
        except StableairError:
            names = (DAMAGED.format(i) for i in itertools.count(1))
            folder.rename(CHECKPOINT, next(name for name in names if not (folder.path / name).exists()))
    save_checkpoint(folder, good, keep=False)
