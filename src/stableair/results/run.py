"""Recorded runs, read from their folders. Importing this module does not import torch."""

import logging
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stableair.errors import CorruptRunError, InputError, StableairError
from stableair.experiment import (
    ARGUMENTS,
    COMPONENT_SETTINGS,
    EXECUTION,
    IDEAL,
    TYPES,
    Experiment,
    components_of_record,
    settings_of_record,
)
from stableair.markup import html_table, sparkline
from stableair.results.checksums import (
    CLIENTS,
    ENVIRONMENT,
    EXPERIMENT,
    ROUNDS,
    read_environments,
    read_plain,
    read_sealed,
    unseal,
)
from stableair.results.metrics import Row, unknown_metric
from stableair.results.stopping import StoppingRule
from stableair.spec import Given, given, without_digests
from stableair.validation import as_path, integer, pluralize, short_repr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor, nn

    from stableair.contracts import State
    from stableair.results.checkpoint import Checkpoint

log = logging.getLogger("stableair")

LAST = 10  # rounds that `Run.settled` averages over: under interference the accuracy fluctuates from round to round

PLAIN = {"channel": "flat()", "power": "none()"}  # further settings of an ideal run on the plain channel
AMBIGUOUS = "none", "auto", "tensor", "layer"  # values shared by several settings: labels add the setting's name


@dataclass(frozen=True)
class Run:
    """A recorded run: run["test/accuracy"] is the list of a metric's values, one per round.

    `len(run)` is the number of complete rounds. A notebook shows a run as a table with its accuracy curve.

    Raises:
        InputError: The metric was not recorded (`unknown-metric`).

    >>> import stableair as sa
    >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2))
    >>> run["channel/senders"], len(run), run.settings["receiver"]
    ([3, 3], 2, 'mac(C=1)')
    """

    record: dict[str, Any]  # the content of experiment.json
    rounds: list[Row]  # the metrics of each round by name
    folder: Path | None = None  # the run folder; None for a run in memory
    final: "State | None" = None  # the state after the last completed round, if it is in memory
    objects: Mapping[str, Given] = field(default_factory=dict, repr=False, compare=False)  # of `sa.run`, by digest

    def __getitem__(self, metric: str) -> list[Any]:
        if self.rounds and (not isinstance(metric, str) or not any(metric in row for row in self.rounds)):
            raise unknown_metric(metric, self.rounds)
        return [row.get(metric) for row in self.rounds]  # None in rounds of a version that did not record the metric

    def __len__(self) -> int:
        return len(self.rounds)

    def __repr__(self) -> str:
        return f"Run({', '.join(str(value) for _, value in self._summary())})"

    def _repr_html_(self) -> str:
        metric = f"{self.settings['evaluate']}/accuracy"
        line = sparkline([row.get(metric) for row in self.rounds])
        return html_table([*self._summary(), *([(metric, line)] if line else [])], caption="Run")

    def _summary(self) -> list[tuple[str, str]]:
        """The main settings and results as names and texts."""
        settings, metric = self.settings, f"{self.settings['evaluate']}/accuracy"
        rows = [(name, without_digests(settings[name])) for name in ("data", "noise", "receiver")]
        rows += [("seed", f"seed {settings['seed']}"), ("rounds", pluralize(len(self), "round"))]
        accuracy = [row[metric] for row in self.rounds if row.get(metric) is not None]
        if self.diverged is not None:
            rows.append(("result", f"diverged at round {self.diverged + 1}"))
        elif accuracy:
            text = f"{accuracy[-1]:.4f} (best {max(accuracy):.4f})"
            rows.append(("result", f"{settings['evaluate']} accuracy {text}"))
        return [*rows, *([("folder", str(self.folder))] if self.folder else [])]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the experiment by name, as recorded."""
        return settings_of_record(self.record)

    @property
    def experiment(self) -> Experiment:
        """The experiment of the run.

        Raises:
            InputError: The run uses a component that is not registered, such as that of a plug-in.
        """
        return Experiment.from_record(self.record)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The seed and everything else that affects the results: equal for copies of the same run."""
        plain = {k: v for k, v in self.settings.items() if k not in (*EXECUTION, *COMPONENT_SETTINGS, "seed")}
        return self.settings["seed"], repr(sorted(plain.items())), repr(components_of_record(self.record))

    @property
    def diverged(self) -> int | None:
        """The zero-based round in which the model became non-finite; None if the run did not diverge."""
        return self.rounds[-1]["round"] if self.rounds and self.rounds[-1].get("diverged") else None

    def settled(self, metric: str) -> float:
        """Return the mean of a metric over the last ten rounds.

        For a run with fewer than 20 rounds, it is the mean over the second half. Under interference the accuracy
        fluctuates from round to round, so that the last value alone is a poor measure.

        Args:
            metric: Name of a recorded metric.

        Returns:
            The mean; 0 for a run that diverged or has no value in these rounds.

        >>> import stableair as sa
        >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=4))
        >>> run.settled("test/accuracy") == sum(run["test/accuracy"][-2:]) / 2
        True
        """
        return self.mean_of_last(metric, self.settled_rounds) or 0.0

    @property
    def settled_rounds(self) -> int:
        """Number of last rounds over which `settled` averages."""
        return min(LAST, max(1, len(self) // 2))

    def mean_of_last(self, metric: str, rounds: int) -> float | None:
        """Return the mean of a metric over the last rounds.

        Args:
            metric: Name of a recorded metric.
            rounds: Number of rounds.

        Returns:
            The mean over the recorded values; None if there is none, or if the run diverged.
        """
        last = [v for v in self[metric][-integer("rounds", rounds, least=1) :] if v is not None]
        return None if self.diverged is not None or not last else sum(last) / len(last)

    def fluctuation(self, metric: str) -> float | None:
        """Return the standard deviation of a metric over the last ten rounds.

        Args:
            metric: Name of a recorded metric.

        Returns:
            The sample standard deviation; None for fewer than two recorded values, or if the run diverged.
        """
        last = [v for v in self[metric][-LAST:] if v is not None]
        return None if self.diverged is not None or len(last) < 2 else statistics.stdev(last)

    @property
    def state(self) -> "State":
        """The state after the last complete round: the model and all memories.

        Raises:
            InputError: No round is complete (`no-rounds`).
            CorruptRunError: The checkpoint is damaged.
        """
        if self.final is not None:
            return self.final
        from stableair.results.checkpoint import read_checkpoint

        last = self.folder and read_checkpoint(self.folder)
        if not last:
            raise InputError(f"{self.folder}: no round is complete yet", code="no-rounds", folder=self.folder)
        return last.state

    def module(self, model: Any = None, data: Any = None) -> "nn.Module":
        """Return the trained network, in evaluation mode on the CPU.

        The data set is read for the shape of its samples.

        Args:
            model: For a run that was read from a folder: the Python object that was given to `sa.run`, or another model
                of the same structure.
            data: Likewise the data set.

        Returns:
            The network with the parameters and buffers after the last complete round.

        Raises:
            InputError: No round is complete (`no-rounds`), a Python object is needed (`object-needed`), or the model
                has another number of entries (`wrong-model`).

        >>> import stableair as sa
        >>> experiment = sa.Experiment(data="synthetic(samples=60)", model="mlp(width=4)", clients=3, rounds=1)
        >>> sum(p.numel() for p in sa.run(experiment).module().parameters())
        310
        """
        from stableair import vector
        from stableair.builder import network
        from stableair.objects import as_settings

        settings, objects = as_settings(model=model, data=data)
        with given({**self.objects, **objects}):
            module = network(self.experiment.with_(**settings))
        vector.load(module, self.state.model)
        return module.eval()

    def state_dict(self, model: Any = None, data: Any = None) -> "dict[str, Tensor]":
        """Return the parameters and buffers of the trained network by name.

        Args:
            model: As for `module`.
            data: As for `module`.
        """
        return self.module(model, data).state_dict()

    @property
    def best(self) -> "Checkpoint":
        """The checkpoint after the best round of a run with `keep_best`: `state` and `rounds`.

        Raises:
            InputError: The run has no best checkpoint (`no-best`).
            CorruptRunError: The file is damaged.
        """
        from stableair.results.checkpoint import read_best

        return read_best(self.folder)

    @property
    def stopped(self) -> bool:
        """Whether the recorded run was stopped early by `stop` or `patience`."""
        last = self.environments[-1] if self.environments else {}
        is_shorter = len(self) < self.settings["rounds"]
        return is_shorter and "stopping" in last and StoppingRule(**last["stopping"]).is_met(self.rounds)

    @property
    def labels(self) -> list[list[int]] | None:
        """Number of samples per client and class, (clients, classes); None if the folder has no such record.

        Raises:
            CorruptRunError: The file is damaged.
        """
        if self.folder is None or not (self.folder / CLIENTS).exists():
            return None
        path = self.folder / CLIENTS
        content, has_checksum = read_sealed(path, dict)
        counts: Any = content.get("labels")
        if (not has_checksum and set(content) != {"labels"}) or not _is_count_table(counts):
            raise _corrupt(path, "it must hold the number of samples per client and class")
        return counts

    @property
    def environments(self) -> list[dict[str, Any]]:
        """The environments that computed the rounds: device, engine, versions, checksums of the data.

        A run has several environments if it was resumed. The list is empty for a run in memory.
        """
        return read_environments(self.folder) if self.folder and (self.folder / ENVIRONMENT).exists() else []

    def to_pandas(self) -> Any:
        """Return the rounds as a pandas DataFrame, with a row per round and a column per metric."""
        import pandas

        return pandas.DataFrame([{k: v for k, v in row.items() if k != "diverged"} for row in self.rounds])

    def plot(self, metric: str = "test/accuracy", *, ax: "Axes | None" = None, label: str | None = None) -> "Axes":
        """Draw a metric against the rounds; `sa.plot` draws several runs.

        A cross marks the last finite round of a run that diverged. Several runs may be drawn into the same axes; add a
        legend with `ax.legend()`.

        Args:
            metric: Name of a recorded metric.
            ax: Axes to draw into; None: the axes of a new pyplot figure.
            label: Name of the line in a legend.

        Returns:
            The matplotlib axes.

        Raises:
            InputError: The metric was not recorded (`unknown-metric`), or no round is complete (`no-rounds`).

        >>> import stableair as sa
        >>> from matplotlib.figure import Figure
        >>> run = sa.run(sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2))
        >>> axes = run.plot("train/loss", ax=Figure().subplots(), label="MAC")
        >>> axes.lines[0].get_xdata().tolist()  # pictures start at round 1
        [1, 2]
        """
        from matplotlib.axes import Axes

        from stableair.results.axes import label_metric, label_rounds, mark_divergence

        values = self[metric]
        if not values:
            raise InputError(f"{self.folder}: no round is complete yet", code="no-rounds", folder=self.folder)
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots(layout="constrained")[1]
        if not isinstance(ax, Axes):
            raise InputError(
                f"ax must be matplotlib axes: got {short_repr(ax)}", code="wrong-type", name="ax", value=ax
            )
        rounds = [row["round"] + 1 for row in self.rounds]  # pictures count rounds from 1
        heights = [math.nan if value is None else value for value in values]
        name, marker = None if label is None else str(label), "o" if len(values) == 1 else None
        (line,) = ax.plot(rounds, heights, label=name, marker=marker)
        if self.diverged:
            mark_divergence(ax, self.diverged, heights[self.diverged - 1], line.get_color())
        label_rounds(ax)
        label_metric(ax, metric)
        ax.grid(alpha=0.3)
        return ax


class Sweep(list[Run]):
    """A list of runs, such as the runs of a sweep in the order of its plan.

    A notebook shows it as a table with one row per setting.

    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> sa.Sweep([sa.run(experiment), sa.run(experiment.with_(seed=1))])
    Sweep(2 runs, 1 setting)
    """

    def __repr__(self) -> str:
        diverged = sum(run.diverged is not None for run in self)
        ended = f", {diverged} diverged" if diverged else ""
        return f"Sweep({pluralize(len(self), 'run')}, {pluralize(len(group(self)), 'setting')}{ended})"

    def _repr_html_(self) -> str:
        rows = []
        for name, runs in group(self).items():
            metric = f"{runs[0].settings['evaluate']}/accuracy"
            settled = [run.settled(metric) for run in runs if run.rounds]
            mean = f"{statistics.fmean(settled):.4f}" if settled else ""
            line = sparkline([row.get(metric) for row in runs[0].rounds])
            rows.append((name, len(runs), len(runs[0]), mean, line))
        head = ("", "seeds", "rounds", f"accuracy, last {LAST} rounds", "first seed")
        return html_table(rows, head, repr(self))


def load(folder: str | Path) -> Run | Sweep:
    """Read a run folder, or all runs below a folder.

    Args:
        folder: A run folder, or a folder that contains run folders at any depth.

    Returns:
        The run of a run folder; for any other folder a list of the runs below it. A run that was copied is in the list
        once. A run that cannot be read is left out with a warning.

    Raises:
        InputError: There is no run in the folder or below it (`no-run`), or no such folder (`no-folder`).
        CorruptRunError: A file of the run in a run folder is damaged.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> with TemporaryDirectory() as folder:
    ...     run = sa.run(experiment, f"{folder}/mac")
    ...     print(len(sa.load(f"{folder}/mac")), sa.load(folder))
    2 Sweep(1 run, 1 setting)
    """
    folder = as_path("folder", folder)
    if (folder / EXPERIMENT).exists():
        return read_run(folder)
    runs, left_out = find([folder])
    log_left_out(left_out)
    return Sweep(runs)


def read_run(folder: str | Path) -> Run:
    """Read the run in a run folder.

    Raises:
        InputError: The folder holds no run.
        CorruptRunError: A file of the run is damaged.
    """
    folder = as_path("folder", folder)
    if not (folder / EXPERIMENT).exists():
        raise InputError(f"{folder} holds no run: there is no {EXPERIMENT} in it", code="no-run", folder=folder)
    run = Run(read_record(folder), read_rounds(folder), folder)
    _ = run.labels, run.environments  # read these files too, so that damage is reported here
    return run


def read_record(folder: Path) -> dict[str, Any]:
    """Read the experiment of a run folder as its record.

    Raises:
        CorruptRunError: The file is damaged or its record is invalid.
    """
    record, has_checksum = read_sealed(folder / EXPERIMENT, dict)
    if ARGUMENTS in record and not has_checksum:
        raise _corrupt(folder / EXPERIMENT, "its checksum is missing")
    try:
        settings_of_record(record)
    except StableairError as error:
        raise _corrupt(folder / EXPERIMENT, str(error)) from None
    return record


def read_rounds(folder: Path) -> list[Row]:
    """Read the complete lines of rounds.jsonl and check each; an incomplete last line is ignored.

    Raises:
        CorruptRunError: A line is damaged.
    """
    path = folder / ROUNDS
    if not path.exists():
        return []
    rows: list[Row] = []
    with_checksum = set()
    *lines, rest = read_plain(path).split(b"\n")
    for number, line in enumerate([*lines, *([rest] if _has_checksum(rest[:-1]) else [])]):
        try:
            if number == len(lines):  # the line is complete except for a damaged line break
                raise ValueError("its end is damaged")
            row, has_checksum = unseal(line + b"\n")
            with_checksum.add(has_checksum)
            _check_row(row, number, rows[-1] if rows else {})
            if len(with_checksum) > 1:
                raise ValueError("its checksum is missing")
        except (ValueError, RecursionError) as error:
            raise _corrupt(path, str(error), line=number + 1) from None
        rows.append(row)
    return rows


def _check_row(row: Any, number: int, previous: Row) -> None:
    """Raise ValueError unless this is the row of round `number` with all metrics of the previous row."""
    if not isinstance(row, dict) or row.get("round") != number:
        got = row.get("round") if isinstance(row, dict) else row
        raise ValueError(f"expected round {number}: got {got}")
    if invalid := [key for key, value in row.items() if not _is_number(value)]:
        raise ValueError(f"{invalid[0]} is not a number")
    if missing := previous.keys() - row.keys():  # a newer version may add metrics
        raise ValueError(f"missing metric {min(missing)}, which the previous round has")


def _corrupt(path: Path, reason: str, line: int | None = None) -> CorruptRunError:
    position = "" if line is None else f" in line {line}"
    return CorruptRunError(f"{path} is corrupted{position}: {reason}", path=path, line=line)


def _is_count_table(value: object) -> bool:
    """Whether a value is a list of lists of equal length, at least 1, of integers of at least 0."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    counts = [n for row in value for n in row]
    return len({len(row) for row in value}) == 1 and bool(counts) and all(type(n) is int and n >= 0 for n in counts)


def _is_number(value: object) -> bool:
    """Whether a value is None or a number within the range of a float; JSON allows larger integers."""
    return value is None or (isinstance(value, int | float) and not abs(value) > sys.float_info.max)


def _has_checksum(line: bytes) -> bool:
    try:
        return unseal(line + b"\n")[1]
    except (ValueError, RecursionError):
        return False


def find(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in some folders and below them.

    Returns:
        Each run once, the longest of several copies; and a line for each folder that was left out, with the reason.

    Raises:
        InputError: No run can be read.
    """
    run_folders: dict[Path, Path] = {}
    runs: dict[tuple[Any, ...], Run] = {}
    left_out = []
    for folder in folders:
        try:
            run_folders |= {path.resolve(): path for path in _run_folders(as_path("folder", folder))}
        except (InputError, OSError) as error:
            left_out.append(str(error))
    for path in run_folders.values():
        try:
            run = read_run(path)
            key = run.identity
        except Exception as error:  # an unreadable run does not prevent reading the others
            known = isinstance(error, StableairError)
            left_out.append(str(error) if known else f"{path}: {type(error).__name__}: {error}")
            continue
        if (twin := runs.get(key)) and len(twin) >= len(run):
            run, twin = twin, run
        if twin:
            left_out.append(f"{twin.folder}: the same run as {run.folder}")
        runs[key] = run
    if not runs:
        first = left_out[0] if left_out else "no folder was given"
        text = first if len(left_out) < 2 else f"none of {len(left_out)} folders can be read; the first: {first}"
        raise InputError(text, code="no-run", left_out=left_out)
    return list(runs.values()), left_out


def _run_folders(folder: Path) -> list[Path]:
    """The run folders in a folder and below it, itself included."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder", code="no-folder", folder=folder)
    run_folders = sorted(path.parent for path in folder.rglob(EXPERIMENT))
    if not run_folders:
        text = f"{folder} holds no run: there is no {EXPERIMENT} in it or below it"
        raise InputError(text, code="no-run", folder=folder)
    return run_folders


def runs_from(sources: "Run | str | Path | Iterable[Run | str | Path]") -> tuple[list[Run], list[str]]:
    """Collect runs from Run objects and from folders.

    Args:
        sources: Runs, run folders, or folders that contain run folders.

    Returns:
        The runs, and a line for each folder that was left out, as from `find`.
    """
    if isinstance(sources, Run | str | Path) or not isinstance(sources, Iterable):
        sources = [sources]
    items = list(sources)
    for source in items:
        if not isinstance(source, Run | str | Path):
            raise InputError(
                f"expected runs or folders of runs: got {short_repr(source)}", code="wrong-type", value=source
            )
    folders = [source for source in items if not isinstance(source, Run)]
    read, left_out = find(folders) if folders else ([], [])
    return [*(source for source in items if isinstance(source, Run)), *read], left_out


def log_left_out(lines: Iterable[str]) -> None:
    """Log a warning for each run that was left out."""
    for line in lines:
        log.warning("left out: %s", line)


def snrs(runs: Iterable[Run], rounds: int | None = None) -> list[float]:
    """The SNR in dB of each round of some runs, or of their first `rounds`.

    Rounds without interference are omitted.
    """
    return [db for run in runs for row in run.rounds[:rounds] if (db := row.get("channel/snr_db")) is not None]


def linear_mean(decibels: list[float]) -> float:
    """Mean of the linear ratios, in dB: 10 log10 of the mean of 10^(x / 10).

    Rounds with a high SNR dominate it; impulses dominate the mean in dB.

    >>> round(linear_mean([-40, -60]), 1)
    -43.0
    """
    return 10 * math.log10(statistics.fmean(10 ** (db / 10) for db in decibels))


def with_metric(runs: list[Run], metric: str) -> tuple[list[Run], list[Run]]:
    """Split runs by whether they recorded a metric: (runs with it, runs without it).

    Raises:
        InputError: No run recorded the metric.
    """
    recorded = [run for run in runs if run.rounds and metric in run.rounds[-1]]  # the first round may lack it
    if not recorded:
        raise unknown_metric(metric, (row for run in runs for row in run.rounds[-1:]))
    return recorded, [run for run in runs if run not in recorded]


def group(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in the seed.

    Returns:
        The runs of each group by its label, which names the settings that differ between the groups.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.identity[1:], []).append(run)
    settings = [members[0].settings for members in groups.values()]
    ideal, noisy = ([s for s in settings if _is_ideal(s) == which] for which in (True, False))
    label_settings = {True: _ideal_label_settings(ideal, noisy), False: _differing(noisy)}
    seen: Counter[str] = Counter()
    names = []
    for one in settings:
        name = _label(one, label_settings[_is_ideal(one)])
        seen[name] += 1  # groups with equal labels differ in an argument that the label omits
        names.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return dict(zip(names, groups.values(), strict=True))


def _label(settings: dict[str, Any], keys: list[str]) -> str:
    """The label of a group: the values of some settings.

    An ideal run is called "ideal", or has the name of its channel if the channel is not flat.
    """
    words = []
    if _is_ideal(settings):
        channel, power = (None if _same(settings[key], value) else settings[key] for key, value in PLAIN.items())
        words = [channel or "ideal", *([power] if power else [])]
    several = len(words) + len(keys) > 1
    for key in keys:
        unambiguous = isinstance(value := settings[key], str) and not (several and _bare(value) in AMBIGUOUS)
        words.append(value if unambiguous else f"{key}={value}")
    return without_digests(", ".join(words) or settings["receiver"])


def _is_ideal(settings: dict[str, Any]) -> bool:
    """Whether a run has no fading, no interference and a receiver that changes nothing."""
    return all(_same(settings[key], value) for key, value in IDEAL.items())


def _differing(runs: list[dict[str, Any]]) -> list[str]:
    """Names of the settings that differ between runs, except execution settings and the seed."""
    return [key for key in TYPES if key not in (*EXECUTION, "seed") and len(_values(runs, key)) > 1]


def _ideal_label_settings(ideal: list[dict[str, Any]], noisy: list[dict[str, Any]]) -> list[str]:
    """Settings to show in labels of ideal runs: they differ between ideal runs, or from every noisy run."""
    among, between = _differing(ideal), _differing(ideal + noisy) if ideal and noisy else []
    disjoint = [key for key in between if not _values(ideal, key) & _values(noisy, key)]
    return [key for key in TYPES if key in (*among, *disjoint) and key not in IDEAL | PLAIN]


def _values(runs: list[dict[str, Any]], key: str) -> set[Any]:
    return {_bare(settings.get(key)) for settings in runs}


def _same(one: Any, other: Any) -> bool:
    return _bare(one) == _bare(other)


def _bare(value: Any) -> Any:
    """A spec without empty parentheses: none() becomes none."""
    return value.removesuffix("()") if isinstance(value, str) else value
