"""Options that observe or stop runs. They are not part of an experiment and do not change its id."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict, get_type_hints

from stableair.contracts import Round
from stableair.errors import InputError
from stableair.experiment import TYPES
from stableair.results.best import keep_best
from stableair.results.callbacks import Callback, CallbackList, is_main_process
from stableair.results.checksums import BEST, ENVIRONMENT, read_environments, seal
from stableair.results.lock import LockedFolder
from stableair.results.metrics import Row
from stableair.results.progress import ProgressBar, is_interactive
from stableair.results.resume import ResumePoint
from stableair.results.stopping import StoppingRule, stop_early, stopping_rule
from stableair.results.trackers import TRACKERS, tracker
from stableair.validation import choice, short_repr, suggest

DEFAULTS = {"stop": "", "patience": 0, "monitor": ""}
BEST_METRIC = "best_metric"  # key of an environment


class RunOptions(TypedDict, total=False):
    """Options that `run`, `sweep`, `search` and `compare` share.

    They never change the results of a round. For each option, None means its default.

    Args:
        stop: Condition that stops a run, such as "test/accuracy > 0.9", or "energy >= 1e6" for the total of a resource.
            With the same options, a stopped run is finished and is not computed again; without them, it continues.
        patience: Stop a run when `monitor` has not improved for this many rounds.
        monitor: The metric of `patience` and `keep_best`; by default the accuracy. Lower is better for a loss.
        keep_best: Keep the state after the best round in `checkpoint.best.pt`. `load(folder).best` reads this file.
        profile: Record the seconds of each step of a round (`seconds/training`, ...) and the peak memory.
        track: One or more trackers that log the rounds: "tensorboard", "wandb", "mlflow".
        progress: Whether to show a progress bar. Default: only on an interactive terminal and in a notebook.

    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=9)
    >>> len(sa.run(experiment, stop="test/accuracy >= 0", patience=5))
    1
    """

    stop: str | None
    patience: int | None
    monitor: str | None
    keep_best: bool | None
    profile: bool | None
    track: str | Sequence[str] | None
    progress: bool | None


def _value(options: RunOptions, name: str, default: Any) -> Any:
    """Return the value of an option, or the default if the value is None."""
    value = options.get(name)
    return default if value is None else value


def _unknown_option(name: str, value: Any, allowed: Iterable[str]) -> InputError:
    """Return the error about an option that does not exist; a setting belongs to the experiment."""
    if name.partition(".")[0] in TYPES:
        change = f"{name}={short_repr(value)}" if "." not in name else f'**{{"{name}": {short_repr(value)}}}'
        fix = f"set it in the experiment or in the plan: experiment.with_({change})"
        text = f"{name} is a setting, not an option; {fix}"
    else:
        text = f"option {name!r} is unknown; {suggest(name, allowed)}"
    return InputError(text, code="unknown-option", name=name)


class RunControl(NamedTuple):
    """The checked options of one run that stop it, keep its best round or measure it."""

    rule: StoppingRule  # when the run stops
    keep_best: bool  # whether to keep the state after the best round
    profile: bool  # whether to record the seconds of each step
    monitor: str = ""  # the metric that the caller requested; "" for the default

    @classmethod
    def create(cls, options: RunOptions, split: str, folder: Path | None) -> Self:
        """Check the options of a run.

        Args:
            options: The options.
            split: The data of the evaluation: "test" or "validation".
            folder: The run folder; None for a run in memory.

        Raises:
            InputError: An option is unknown (`unknown-option`) or invalid, or requires a folder (`needs-folder`).
        """
        names = get_type_hints(RunOptions)
        for name in options:
            if name not in names:
                raise _unknown_option(name, options[name], names)  # type: ignore[literal-required]
        for name in ("keep_best", "profile"):
            if not isinstance(options.get(name), bool | None):
                text = f"{name} must be True or False: got {short_repr(options.get(name))}"
                raise InputError(text, code="wrong-type", name=name)
        if (shown := options.get("progress")) not in (None, True, False):
            text = f"progress must be True, False or None: got {short_repr(shown)}"
            raise InputError(text, code="wrong-type", name="progress")
        for name in ("keep_best", "track"):
            if options.get(name) and folder is None:
                raise InputError(
                    f"{name} requires a run folder for its files: set folder", code="needs-folder", name=name
                )
        tracker_names(options)
        stop, patience, monitor = (_value(options, name, default) for name, default in DEFAULTS.items())
        rule = stopping_rule(stop, patience, monitor, split)
        return cls(rule, bool(options.get("keep_best")), bool(options.get("profile")), monitor)

    @property
    def may_stop(self) -> bool:
        """Whether a run may stop before its last round."""
        return bool(self.rule.stop or self.rule.patience)

    def stops(self, rows: Sequence[Row]) -> bool:
        """Return whether the stopping rule ends a run with these rounds."""
        return self.may_stop and self.rule.is_met(rows)

    def record(self) -> dict[str, Any]:
        """Return the entry of `environment.json` that marks a stopped run as finished."""
        return {"stopping": self.rule._asdict()} if self.may_stop else {}

    def record_stopped(self, folder: LockedFolder, rows: Sequence[Row]) -> None:
        """Record the stopping rule of a run that was started without it, if its rounds already meet the rule."""
        environments = read_environments(folder.path)
        if self.stops(rows) and environments and environments[-1].get("stopping") != self.rule._asdict():
            folder.write(ENVIRONMENT, seal([*environments[:-1], environments[-1] | self.record()]))

    def best_metric(self, folder: LockedFolder | None, previous: ResumePoint) -> str:
        """Return the metric by which the best round is chosen; "" if the best round is not kept.

        The best round is kept if this call or an earlier one has requested it. Without `monitor`, a resumed run keeps
        the metric of the earlier call.
        """
        if not (self.keep_best or (folder and (folder.path / BEST).exists())):
            return ""
        recorded: str = previous.environment.get(BEST_METRIC, self.rule.monitor)
        return self.monitor or recorded

    def record_best(self, folder: LockedFolder | None, previous: ResumePoint) -> dict[str, str]:
        """Return the entry of `environment.json` with the metric by which the best round is chosen."""
        metric = self.best_metric(folder, previous)
        return {BEST_METRIC: metric} if metric else {}

    def observed(
        self,
        rounds: Iterator[Round],
        folder: LockedFolder | None,
        previous: ResumePoint,
        on_main: Callable[[Callable[[], Any]], Any],
    ) -> Iterator[Round]:
        """Return the rounds up to the last one; keep the best one on the way if there is a `best_metric`.

        Args:
            rounds: The recorded rounds.
            folder: The run folder; None on processes that do not write.
            previous: The resume point of the run.
            on_main: As for `stop_early`.
        """
        metric = self.best_metric(folder, previous)
        rounds = keep_best(rounds, folder, metric, previous) if metric else rounds
        done = previous.rows[: previous.rounds]
        return stop_early(rounds, self.rule, done, on_main) if self.may_stop else rounds


def tracker_names(options: RunOptions) -> list[str]:
    """Return the names of the trackers, each once.

    Raises:
        InputError: The option is neither a string nor a list, or a tracker is unknown (`unknown-value`).
    """
    names = options.get("track") or ()
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Sequence):
        text = f"track must be the name of a tracker, or a list of names: got {short_repr(names)}"
        raise InputError(text, code="wrong-type", name="track", value=names)
    return [choice("tracker", name, TRACKERS) for name in dict.fromkeys(names)]


@contextmanager
def observing(
    callbacks: Sequence[Callback], options: RunOptions, folder: Path | None, experiments: int = 1
) -> Iterator[CallbackList]:
    """Combine callbacks, trackers and the progress bar into one callback; close them afterwards.

    Args:
        callbacks: The caller's callbacks.
        options: The options that select trackers and progress bar.
        folder: Folder for the files of the trackers; None for no trackers.
        experiments: Number of experiments.

    Yields:
        The combined callback; with torchrun, it is empty on all ranks except 0.
    """
    custom = CallbackList(callbacks).callbacks
    trackers = [tracker(name, folder) for name in tracker_names(options)] if folder else []
    shown = options.get("progress")
    if shown is None:
        shown = is_interactive() and not any(callback.shows_progress for callback in custom)
    if not is_main_process():
        yield CallbackList()
        return
    with ExitStack() as stack:
        observers = [*custom, *(stack.enter_context(closing(each)) for each in trackers)]
        if shown:
            observers.append(stack.enter_context(ProgressBar(experiments)))
        yield CallbackList(observers)


def without_display(options: RunOptions) -> RunOptions:
    """Return the options of a single run in a sweep or search, without trackers and progress bar.

    The sweep or search itself shows the progress bar and calls the trackers for all runs.
    """
    single: RunOptions = {**options, "progress": False}
    single.pop("track", None)
    return single
