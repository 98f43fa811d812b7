"""What was recorded of a run: read from its folder, and from nothing else. Nothing here needs torch."""

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stableair.checks import InputError, nearest, place, shown, whole
from stableair.experiment import (
    ARGUMENTS,
    EXECUTION,
    HOMES,
    IDEAL,
    TYPES,
    Experiment,
    components_of_record,
    settings_of_record,
)
from stableair.results.sealed import (
    CLIENTS,
    ENVIRONMENT,
    EXPERIMENT,
    ROUNDS,
    read_environments,
    read_plain,
    read_sealed,
    unseal,
)

if TYPE_CHECKING:
    from stableair.vector import State

LAST = 10  # rounds to average over: the accuracy of a method that suffers jumps from round to round

PLAIN = {"channel": "flat()", "power": "none()"}  # what an ideal run has beside IDEAL
VAGUE = "none", "auto", "tensor", "layer"  # values that do not tell their setting

Row = dict[str, Any]  # what was recorded of a round, by the name of the metric


@dataclass(frozen=True)
class Run:
    """What was recorded of a run: run["test/accuracy"] is a metric's value after each round."""

    record: dict[str, Any]  # of the experiment, as in experiment.json
    rounds: list[Row]
    folder: Path | None = None
    final: "State | None" = None  # the model after the last complete round, where it is in memory

    def __getitem__(self, metric: str) -> list[Any]:
        if self.rounds and (not isinstance(metric, str) or not any(metric in row for row in self.rounds)):
            there = dict.fromkeys(name for row in self.rounds for name in row)
            raise InputError(f"metric {shown(metric)} was not recorded; there are {', '.join(there)}")
        return [row.get(metric) for row in self.rounds]  # None in rounds of a version that did not record it

    def __len__(self) -> int:
        return len(self.rounds)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The experiment's settings by name, as they were given."""
        return settings_of_record(self.record)

    @property
    def experiment(self) -> Experiment:
        return Experiment.from_record(self.record)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The seed, and then all that makes the experiment what it is, every argument included."""
        plain = {k: v for k, v in self.settings.items() if k not in (*EXECUTION, *HOMES, "seed")}
        return self.settings["seed"], repr(sorted(plain.items())), repr(components_of_record(self.record))

    @property
    def diverged(self) -> int | None:
        """The round after which the model was no longer finite, where there was one."""
        return self.rounds[-1]["round"] if self.rounds and self.rounds[-1].get("diverged") else None

    def settled(self, metric: str) -> float:
        """The mean of a metric over the last rounds, at most half of them; 0 for a run that diverged."""
        last = [v for v in self[metric][-min(LAST, max(1, len(self) // 2)) :] if v is not None]
        return 0.0 if self.diverged is not None or not last else sum(last) / len(last)

    def fluctuation(self, metric: str) -> float | None:
        """The standard deviation of a metric over the last rounds; None for a run that diverged or has one round."""
        last = [v for v in self[metric][-LAST:] if v is not None]
        return None if self.diverged is not None or len(last) < 2 else statistics.stdev(last)

    @property
    def state(self) -> "State":
        """The model after the last complete round."""
        if self.final is not None:
            return self.final
        from stableair.results.checkpoint import read_checkpoint

        last = self.folder and read_checkpoint(self.folder)
        if not last:
            raise InputError(f"{self.folder}: no round is complete yet")
        return last.state

    @property
    def labels(self) -> list[list[int]] | None:
        """How many samples of each class each client holds, where the folder tells."""
        if self.folder is None or not (self.folder / CLIENTS).exists():
            return None
        content, sealed = read_sealed(self.folder / CLIENTS, dict)
        counts = content.get("labels")
        if (not sealed and set(content) != {"labels"}) or not isinstance(counts, list):
            raise InputError(f"{self.folder / CLIENTS} is corrupted: it does not hold the labels of the clients")
        widths = {len(row) if isinstance(row, list) else 0 for row in counts}
        if len(widths) != 1 or not all(widths):
            raise InputError(f"{self.folder / CLIENTS} is corrupted: it does not hold the labels of the clients")
        return [[whole(f"{self.folder / CLIENTS} is corrupted: a count", n, 0) for n in row] for row in counts]

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Where and how its rounds were computed."""
        return read_environments(self.folder) if self.folder and (self.folder / ENVIRONMENT).exists() else []

    def to_pandas(self) -> Any:
        """The rounds as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise InputError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame([{k: v for k, v in row.items() if k != "diverged"} for row in self.rounds])


def load(folder: str | Path) -> Run:
    """Read a run folder; `load(folder).to_pandas()` for a DataFrame."""
    folder = place("folder", folder)
    if not (folder / EXPERIMENT).exists():
        raise InputError(f"{folder} holds no run: there is no {EXPERIMENT} in it")
    found = Run(read_record(folder), read_rounds(folder), folder)
    _ = found.labels, found.environments  # damage is found here, and not when it is drawn
    return found


def read_record(folder: Path) -> dict[str, Any]:
    """The experiment of a folder, as its record; whatever is wrong with it is one line."""
    record, sealed = read_sealed(folder / EXPERIMENT, dict)
    try:
        if ARGUMENTS in record and not sealed:
            raise InputError("its checksum is gone")
        settings_of_record(record)
    except InputError as error:
        raise InputError(f"{folder / EXPERIMENT} is corrupted: {error}") from None
    return record


def read_rounds(folder: Path) -> list[Row]:
    """The complete lines of rounds.jsonl, each checked; a last line cut short is no round."""
    path = folder / ROUNDS
    if not path.exists():
        return []
    rows: list[Row] = []
    seals = set()
    *lines, rest = read_plain(path).split(b"\n")
    for number, line in enumerate([*lines, *([rest] if _is_sealed(rest[:-1]) else [])]):
        try:
            if number == len(lines):
                raise ValueError("its end is damaged")  # else it was cut short with its process, and is no round
            row, sealed = unseal(line + b"\n")
            seals.add(sealed)
            if not isinstance(row, dict) or row.get("round") != number:
                raise ValueError(f"round {row.get('round') if isinstance(row, dict) else row} where {number} belongs")
            if odd := [key for key, v in row.items() if not _is_number(v)]:
                raise ValueError(f"{odd[0]} is no number")
            if rows and (lost := rows[-1].keys() - row.keys()):  # a newer version may have gone on with more
                raise ValueError(f"it lacks {min(lost)}, which the round before has")
            if len(seals) > 1:
                raise ValueError("its checksum is gone")
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is corrupted in line {number + 1}: {error}") from None
        rows.append(row)
    return rows


def _is_number(value: object) -> bool:
    """Whether it is a number that a float holds, or none; JSON knows larger ones."""
    return value is None or (isinstance(value, int | float) and not abs(value) > sys.float_info.max)


def _is_sealed(line: bytes) -> bool:
    try:
        return unseal(line + b"\n")[1]
    except (ValueError, RecursionError):
        return False


def find(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The runs in these folders and below them, each once; and what is wrong with those that cannot be read."""
    places: dict[Path, Path] = {}
    found: dict[tuple[Any, ...], Run] = {}
    left_out = []
    for folder in folders:
        try:
            places |= {path.resolve(): path for path in _run_folders(place("folder", folder))}
        except (InputError, OSError) as error:
            left_out.append(str(error))
    for path in places.values():
        try:
            run = load(path)
            key = run.identity
        except Exception as error:  # whatever is wrong with it, the others are shown
            left_out.append(str(error) if isinstance(error, InputError) else f"{path}: {type(error).__name__}: {error}")
            continue
        if (twin := found.get(key)) and len(twin) >= len(run):
            run, twin = twin, run  # of two copies of a run the longer one counts
        if twin:
            left_out.append(f"{twin.folder}: the same run as {run.folder}")
        found[key] = run
    if not found:
        first = left_out[0] if left_out else "no folder was given"
        raise InputError(first if len(left_out) < 2 else f"none of {len(left_out)} can be read; the first: {first}")
    return list(found.values()), left_out


def _run_folders(folder: Path) -> list[Path]:
    """The folders of runs at a place and below it."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    here = sorted(path.parent for path in folder.rglob(EXPERIMENT))
    if not here:
        raise InputError(f"{folder} holds no run: there is no {EXPERIMENT} in it or below it")
    return here


def runs_of(given: "Run | str | Path | Iterable[Run | str | Path]") -> tuple[list[Run], list[str]]:
    """Runs, and those of run folders and folders that hold some; and what is wrong with those that cannot be read."""
    each = [given] if isinstance(given, Run | str | Path) else list(given) if isinstance(given, Iterable) else [given]
    for one in each:
        if not isinstance(one, Run | str | Path):
            raise InputError(f"give runs, or folders of runs: got {shown(one)}")
    folders = [one for one in each if not isinstance(one, Run)]
    found, left_out = find(folders) if folders else ([], [])
    return [*(one for one in each if isinstance(one, Run)), *found], left_out


def snrs(runs: Iterable[Run], rounds: int | None = None) -> list[float]:
    """The SNR in dB of every round of some runs, or of their first rounds; without interference there is none."""
    return [db for run in runs for row in run.rounds[:rounds] if (db := row.get("channel/snr_db")) is not None]


def linear_mean(decibels: list[float]) -> float:
    """The mean of the ratios themselves, in dB: a few good rounds make it, where a few impulses make the mean in dB.

    >>> round(linear_mean([-40, -60]), 1)
    -43.0
    """
    return 10 * math.log10(statistics.fmean(10 ** (db / 10) for db in decibels))


def with_metric(runs: list[Run], metric: str) -> tuple[list[Run], list[Run]]:
    """The runs that recorded the metric, and those that did not; it is an error if none did."""
    with_it = [run for run in runs if run.rounds and metric in run.rounds[0]]
    if not with_it:
        known = sorted({name for run in runs for row in run.rounds[:1] for name in row})
        hint = nearest(metric, known) if known else "no round is complete yet"
        raise InputError(f"metric {metric!r} was not recorded; {hint}")
    return with_it, [run for run in runs if run not in with_it]


def group(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ in the seed alone, together, under a label that says what sets them apart from the others."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.identity[1:], []).append(run)
    settings = [members[0].settings for members in groups.values()]
    free, loud = ([s for s in settings if _is_free(s) == which] for which in (True, False))
    apart = {True: _apart_from(free, loud), False: _differing(loud)}
    seen: Counter[str] = Counter()
    names = []
    for one in settings:
        name = _label(one, apart[_is_free(one)])
        seen[name] += 1  # twice: alike in every setting, and not in an argument whose default has changed
        names.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return dict(zip(names, groups.values(), strict=True))


def _label(settings: dict[str, Any], apart: list[str]) -> str:
    """The values of these settings; a run that is free of interference has a word for it, and no other for its air."""
    words = []
    if _is_free(settings):
        channel, power = (None if _same(settings[key], value) else settings[key] for key, value in PLAIN.items())
        words = [channel or "ideal", *([power] if power else [])]
    several = len(words) + len(apart) > 1
    for key in apart:
        tells = isinstance(value := settings[key], str) and not (several and _bare(value) in VAGUE)
        words.append(value if tells else f"{key}={value}")
    return ", ".join(words) or settings["receiver"]


def _is_free(settings: dict[str, Any]) -> bool:
    """Whether there is neither fading nor interference, nor a receiver to deal with them."""
    return all(_same(settings[key], value) for key, value in IDEAL.items())


def _differing(some: list[dict[str, Any]]) -> list[str]:
    """What tells these settings from each other."""
    return [key for key in TYPES if key not in (*EXECUTION, "seed") and len(_values(some, key)) > 1]


def _apart_from(free: list[dict[str, Any]], loud: list[dict[str, Any]]) -> list[str]:
    """What tells runs free of interference from each other, and from all others where they have nothing in common."""
    among, beside = _differing(free), _differing(free + loud) if free and loud else []
    alone = [key for key in beside if not _values(free, key) & _values(loud, key)]
    return [key for key in TYPES if key in (*among, *alone) and key not in IDEAL | PLAIN]


def _values(some: list[dict[str, Any]], key: str) -> set[Any]:
    return {_bare(settings.get(key)) for settings in some}


def _same(one: Any, other: Any) -> bool:
    return _bare(one) == _bare(other)


def _bare(value: Any) -> Any:
    """A spec without arguments as it is without parentheses, too: none() is none."""
    return value.removesuffix("()") if isinstance(value, str) else value
