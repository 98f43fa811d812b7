"""Search with an Optuna study, whose trials are runs in the folder of the search."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from torch import nn

from stableair.builder import CHANNEL_SETTINGS, build, check_channels
from stableair.contracts import Dataset
from stableair.errors import CorruptRunError, InputError, NonFiniteUpload, StableairError
from stableair.experiment import Experiment
from stableair.files import write_whole
from stableair.literals import PluginChange
from stableair.results.callbacks import Callback
from stableair.results.checksums import EXPERIMENT, read_plain
from stableair.results.lock import check_writable
from stableair.results.metrics import Row
from stableair.results.options import RunControl, RunOptions, observing
from stableair.results.plugins import lock_and_record_kept, may_reuse
from stableair.results.reading import read_run
from stableair.results.run import Run
from stableair.runner import advise_on_interrupt, out_of_memory_as_error
from stableair.searches.result import Result, Trial
from stableair.searches.spaces import OneOf, Space, parse_spaces
from stableair.spec import passed_objects
from stableair.streams import generator
from stableair.sweeps.plans import over_seeds, with_objects
from stableair.sweeps.workers import run_unlocked
from stableair.validation import as_path, integer, typed

log = logging.getLogger("stableair")

RESULT = "search.json"
METRIC = "validation/accuracy"
MAX_CHECKS = 16  # trials at the ends of the spaces that are built before the first trial runs
MAX_CHANNELS = 256  # trials at the ends of the spaces whose channel is checked before the first trial runs


class _Call(NamedTuple):
    """Values that the trials of a search share."""

    folder: Path
    plugin_changed: PluginChange
    options: RunOptions
    observer: Callback


@typed
def search(
    base: Experiment,
    spaces: Mapping[str, Space | str | Sequence[Any]],
    folder: str | Path | None = None,
    *,
    trials: int = 12,
    seeds: int = 1,
    plugin_changed: PluginChange = "refuse",
    callbacks: Sequence[Callback] = (),
    data: Dataset | str | None = None,
    model: nn.Module | Callable[..., Any] | str | None = None,
    receiver: Any = None,
    server: Any = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Search settings of an experiment on a validation split. `stableair search` calls this function.

    The search never evaluates on the test data. The first half of the trials is spread evenly over the spaces; Optuna
    samples the second half near good values. Once three trials have finished, a trial is stopped if its score after a
    third of its rounds, or later, is in the worst quarter. The same search with the same folder continues after its
    last complete round; a finished search is not computed again.

    Args:
        base: The experiment. A trial runs for `base.rounds` rounds.
        spaces: The space of each searched setting, such as `{"receiver.C": "0.01:10:log", "local_epochs": [1, 2, 5]}`.
        folder: Folder of the runs and of search.json. Default: a subfolder of runs with the name of the experiment.
        trials: Number of trials, each with one combination of values.
        seeds: Number of seeds per trial: base.seed, base.seed + 1, ...
        plugin_changed: As for `run`.
        callbacks: Observers of the runs of all trials. For a trial that was stopped early, `end` gets the rounds
            that were computed.
        data: A data set for all trials in place of the one in `base`, as for `run`.
        model: A network for all trials.
        receiver: A receiver for all trials.
        server: A server for all trials.
        **options: As for `run`, see `RunOptions`.

    Returns:
        All trials, and the experiment with the best values.

    Raises:
        InputError: A space is invalid, its setting cannot be searched (`not-searchable`), the folder holds another
            search, or every trial failed (`every-trial-failed`).

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> base = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> with TemporaryDirectory() as folder:
    ...     result = sa.search(base, {"receiver.C": "0.1:10:log"}, folder, trials=3)
    >>> len(result.trials), result.best.evaluate
    (3, 'test')
    >>> 0.1 <= result.best.call("receiver").arguments["C"] <= 10
    True
    """
    integer("trials", trials, 1)
    integer("seeds", seeds, 1)
    (base,), objects = with_objects([base], data=data, model=model, receiver=receiver, server=server)
    folder = as_path("folder", f"runs/search-{base.name}" if folder is None else folder)
    base = base.with_(evaluate="validation")
    control = RunControl.create(options, base.evaluate, folder)
    parsed = parse_spaces(base, spaces)
    header = {"experiment": base.id(), "rounds": base.rounds, "trials": trials, "seeds": seeds}
    header |= {key: str(one) for key, one in parsed.items()} | control.record()
    if choices := _choices(list(parsed.values())):
        trials = min(trials, len(choices))  # further trials would repeat some
    with (
        passed_objects(objects),
        advise_on_interrupt(folder),
        observing(callbacks, options, folder, trials * seeds) as observer,
    ):
        _prepare_folder(folder, header, base, parsed)
        study = _study(base, parsed, trials)
        call = _Call(folder, plugin_changed, options, observer)
        finished = [_run_trial(study, base, parsed, seeds, call) for _ in range(trials)]
    if all(trial.failed for trial in finished):
        raise InputError(f"every trial failed; the first: {finished[0].failed}", code="every-trial-failed")
    result = Result(base.with_(evaluate="test"), parsed, finished, folder)
    _write(folder, header, result)
    for key in result.at_boundary:
        log.warning("the best %s is at an end of the range %s; better values may lie outside", key, parsed[key])
    return result


def _check_extremes(base: Experiment, spaces: dict[str, Space], built: bool) -> None:
    """Refuse a search with an invalid trial, such as more participants than clients, before the first trial runs.

    Args:
        base: The experiment.
        spaces: The space of each searched setting.
        built: Whether to also build each trial: data, partition, model and device.

    Raises:
        InputError: A combination of the ends of the spaces is invalid.
    """
    of_channel = {key: one for key, one in spaces.items() if key.partition(".")[0] in CHANNEL_SETTINGS}
    _check_trials(base, of_channel, MAX_CHANNELS, lambda candidate: check_channels([candidate]))
    _check_trials(base, spaces, MAX_CHECKS, build if built else lambda candidate: None)


def _check_trials(base: Experiment, spaces: dict[str, Space], most: int, check: Callable[[Experiment], object]) -> None:
    """Call `check` with at most `most` trials at the ends of the spaces; the error names the trial."""
    for values in _extremes([one.ends() for one in spaces.values()], most):
        settings = dict(zip(spaces, values, strict=True))
        try:
            with out_of_memory_as_error():
                check(base.with_(**settings))
        except StableairError as error:
            trial = " ".join(f"{key}={value}" for key, value in settings.items()) or "of the given experiment"
            raise error.with_message(f"the trial {trial} is invalid: {error}") from error


def _extremes(ends: list[tuple[Any, ...]], most: int = MAX_CHECKS) -> list[tuple[Any, ...]]:
    """Return all combinations of at most `most`, else combinations that contain each end at least once."""
    if math.prod(map(len, ends)) <= most:
        return list(product(*ends))
    return [tuple(values[i % len(values)] for values in ends) for i in range(max(map(len, ends)))]


def _prepare_folder(folder: Path, header: dict[str, Any], base: Experiment, spaces: dict[str, Space]) -> None:
    """Create the folder of a search if all its trials are valid, or check that it holds the same search."""
    is_new = not (folder / RESULT).exists()
    if is_new:
        check_writable(folder)
    _check_extremes(base, spaces, built=is_new)
    if not is_new:
        _check_same_search(folder, header)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RESULT, (json.dumps({"search": header}, indent=2) + "\n").encode())


def _check_same_search(folder: Path, header: dict[str, Any]) -> None:
    path = folder / RESULT
    try:
        recorded = dict(json.loads(read_plain(path))["search"])
    except StableairError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{path} is corrupted ({type(error).__name__}); delete it"
        raise CorruptRunError(text, hint="folder", code="corrupt-search", path=path) from None
    if different := [key for key in header | recorded if header.get(key) != recorded.get(key)]:
        text = f"{folder} holds another search, with another {', '.join(different)}"
        raise InputError(text, hint="folder", code="another-search", different=different)


def _study(base: Experiment, spaces: dict[str, Space], trials: int) -> Any:
    """Create the Optuna study: half of the trials are spread evenly, the others sampled near good values."""
    optuna, even = _optuna(), trials - trials // 2
    sampler = optuna.samplers.TPESampler(seed=base.seed, n_startup_trials=even)
    pruner = optuna.pruners.PercentilePruner(75.0, n_startup_trials=3, n_warmup_steps=base.rounds // 3)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    for point in _spread(list(spaces.values()), even):
        study.enqueue_trial(dict(zip(spaces, point, strict=True)))
    return study


def _run_trial(
    study: Any,
    base: Experiment,
    spaces: dict[str, Space],
    seeds: int,
    call: _Call,
) -> Trial:
    """Run the next trial of the study with each seed and report its score to the study."""
    optuna, trial = _optuna(), study.ask()
    values = {key: one.suggest(trial, key) for key, one in spaces.items()}
    reporter = _TrialReporter(trial, base.rounds * seeds, call.folder, call.plugin_changed)
    try:
        for candidate in over_seeds(base.with_(**values), seeds):
            reporter.start_seed(candidate)
            _run_candidate(candidate, call, reporter)
    except optuna.TrialPruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        call.observer.end(candidate, reporter.runs[-1])
        return Trial(values, reporter.score, reporter.rounds, stopped=True)
    except NonFiniteUpload as error:  # such as a learning rate that overflows; other values may work
        study.tell(trial, 0.0)
        return Trial(values, 0.0, reporter.rounds, failed=str(error))
    study.tell(trial, reporter.score)
    return Trial(values, reporter.score, reporter.rounds)


def _run_candidate(experiment: Experiment, call: _Call, reporter: "_TrialReporter") -> None:
    """Run one seed of a trial. If another process with the same search runs it, wait for its result."""
    if rows := reporter.read_recorded():
        lock_and_record_kept(call.folder / experiment.name, experiment)
        reporter.report(rows)  # the score so far may stop the trial
    if reporter.is_complete(experiment):  # the checkpoint is not needed
        call.observer.end(experiment, reporter.runs[-1])
        return
    callbacks = [call.observer, reporter]
    for _, outcome in run_unlocked([experiment], call.folder, callbacks, call.plugin_changed, call.options):
        if isinstance(outcome, StableairError):
            raise outcome
        reporter.report(outcome.rounds)


class _TrialReporter(Callback):
    """Observer that reports the score of a trial to Optuna after each round, and stops trials with a low score.

    Raises optuna.TrialPruned to stop the trial.
    """

    def __init__(self, trial: Any, rounds: int, folder: Path, plugin_changed: PluginChange):
        self.trial, self.total, self.folder, self.plugin_changed = trial, rounds, folder, plugin_changed
        self.runs: list[Run] = []  # one per seed, with the rounds reported so far
        self.rounds = 0  # reported rounds of all seeds

    def start_seed(self, experiment: Experiment) -> None:
        """Add the run of the next seed."""
        self.runs.append(Run(experiment.to_record(), [], self.folder / experiment.name))

    def start(self, experiment: Experiment, engine: dict[str, Any]) -> None:
        self.report(self.read_recorded())  # another process may have added rounds before this process got the lock

    def round(self, experiment: Experiment, row: Row) -> None:
        self.report([row])

    def read_recorded(self) -> list[Row]:
        """Read the recorded rounds of the current seed; none if a plug-in has changed, so that they are recomputed."""
        run = self.runs[-1]
        if run.folder and (run.folder / EXPERIMENT).exists():
            recorded = read_run(run.folder)
            if may_reuse(run.folder, run.experiment, recorded.environments, self.plugin_changed):
                return recorded.rounds[: run.settings["rounds"]]
        return []

    def is_complete(self, experiment: Experiment) -> bool:
        """Return whether all rounds of the current seed were reported, or it diverged."""
        run = self.runs[-1]
        return len(run) >= experiment.rounds or run.diverged is not None

    def report(self, rows: list[Row]) -> None:
        """Report rounds of the current seed; skip rounds that were reported before."""
        for row in rows:
            if row["round"] >= len(self.runs[-1]):
                self._report_round(row)

    def _report_round(self, row: Row) -> None:
        run = self.runs[-1]
        self.runs[-1] = replace(run, rounds=[*run.rounds, row])
        self.trial.report(self.score, self.rounds)
        self.rounds += 1
        if self.rounds < self.total and self.trial.should_prune():
            raise _optuna().TrialPruned

    @property
    def score(self) -> float:
        """Mean over the seeds of the accuracy over the last rounds."""
        scores = [one.settled(METRIC) for one in self.runs if one.rounds]
        return sum(scores) / len(scores) if scores else math.nan


def _choices(spaces: list[Space]) -> list[tuple[Any, ...]]:
    """Return all combinations of values if every space is a list of values, else an empty list."""
    values = [one.values for one in spaces if isinstance(one, OneOf)]
    return list(product(*values)) if len(values) == len(spaces) else []


def _spread(spaces: list[Space], n: int) -> list[tuple[Any, ...]]:
    """Return the first trials: all combinations of listed values in random order, or n points over the ranges."""
    if choices := _choices(spaces):
        return [choices[i] for i in generator(0, "search").permutation(len(choices)).tolist()]
    from scipy.stats import qmc  # takes a second to import

    sequence = qmc.Halton(len(spaces), scramble=False)
    sequence.fast_forward(1)  # its first point is a corner
    shares = sequence.random(n)
    return [tuple(one.at(share) for one, share in zip(spaces, point, strict=True)) for point in shares]


def _write(folder: Path, header: dict[str, Any], result: Result) -> None:
    rows = [trial._asdict() for trial in result.trials]
    content = {"search": header, "trials": rows, "best": result.winner._asdict()}
    write_whole(folder / RESULT, (json.dumps(content, indent=2) + "\n").encode())


def _optuna() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
