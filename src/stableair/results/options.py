"""Options that observe or stop runs. They are not part of an experiment, so no id depends on them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict, get_type_hints

from stableair.contracts import Round
from stableair.errors import InputError
from stableair.results.best import keep_best
from stableair.results.callbacks import Callback, CallbackList, is_main_process
from stableair.results.checksums import BEST, ENVIRONMENT, read_environments, seal
from stableair.results.lock import LockedFolder
from stableair.results.metrics import Row
from stableair.results.progress import ProgressBar, is_interactive
from stableair.results.resume import ResumePoint
from stableair.results.stopping import StoppingRule, stopping_rule
from stableair.results.trackers import TRACKERS, tracker
from stableair.validation import choice, short_repr, suggest

DEFAULTS = {"stop": "", "patience": 0, "monitor": ""}
BEST_METRIC = "best_metric"  # key of an environment


class RunOptions(TypedDict, total=False):
    """Options that `run`, `sweep`, `search` and `compare` share.

    They never change the results of a round. None stands for the default of an option.

    Args:
        stop: Condition that stops a run, such as "test/accuracy > 0.9", or "energy >= 1e6" for the total of a resource.
            A stopped run is finished: it is not computed again with the same options, and continues without them.
        patience: Stop a run when `monitor` has not improved for this many rounds.
        monitor: The metric of `patience` and `keep_best`; by default the accuracy. Lower is better for a loss.
        keep_best: Keep the state after the best round in `checkpoint.best.pt`; `load(folder).best` reads it.
        profile: Record the seconds of each step of a round (`seconds/training`, ...) and the peak memory.
        track: Trackers that log the rounds: "tensorboard", "wandb", "mlflow". One name or several.
        progress: Whether to show a progress bar. Default: on an interactive terminal and in a notebook.

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
    """The value of an option; None stands for its default."""
    value = options.get(name)
    return default if value is None else value


class RunControl(NamedTuple):
    """The options of one run that act on its rounds, checked."""

    rule: StoppingRule
    keep_best: bool
    profile: bool
    monitor: str = ""  # the metric that the caller names; "" for the default

    @classmethod
    def create(cls, options: RunOptions, split: str, folder: Path | None) -> Self:
        """Check the options of a run.

        Args:
            options: The options.
            split: The data of the evaluation: "test" or "validation".
            folder: The run folder; None for a run in memory.

        Raises:
            InputError: An option is unknown or invalid, or needs a folder.
        """
        names = get_type_hints(RunOptions)
        for name in options:
            if name not in names:
                raise InputError(
                    f"option {name!r} is unknown; {suggest(name, names)}", code="unknown-option", name=name
                )
        for name in ("keep_best", "profile"):
            if not isinstance(options.get(name), bool | None):
                text = f"{name} must be True or False: got {short_repr(options.get(name))}"
                raise InputError(text, code="wrong-type", name=name)
        if (shown := options.get("progress")) not in (None, True, False):
            text = f"progress must be True, False or None: got {short_repr(shown)}"
            raise InputError(text, code="wrong-type", name="progress")
        for name in ("keep_best", "track"):
            if options.get(name) and folder is None:
                raise InputError(f"{name} needs a folder for its files", code="needs-folder", name=name)
        tracker_names(options)
        stop, patience, monitor = (_value(options, name, default) for name, default in DEFAULTS.items())
        rule = stopping_rule(stop, patience, monitor, split)
        return cls(rule, bool(options.get("keep_best")), bool(options.get("profile")), monitor)

    @property
    def may_stop(self) -> bool:
        """Whether a run may stop before its last round."""
        return bool(self.rule.stop or self.rule.patience)

    def stops(self, rows: Sequence[Row]) -> bool:
        """Whether a run with these rounds is finished by its stopping rule."""
        return self.may_stop and self.rule.is_met(rows)

    def record(self) -> dict[str, Any]:
        """The entry of `environment.json` that marks a stopped run as finished."""
        return {"stopping": self.rule._asdict()} if self.may_stop else {}

    def record_stopped(self, folder: LockedFolder, rows: Sequence[Row]) -> None:
        """Record the stopping rule of a run that was started without it and whose rounds already satisfy it."""
        environments = read_environments(folder.path)
        if self.stops(rows) and environments and environments[-1].get("stopping") != self.rule._asdict():
            folder.write(ENVIRONMENT, seal([*environments[:-1], environments[-1] | self.record()]))

    def best_metric(self, folder: LockedFolder | None, previous: ResumePoint) -> str:
        """The metric whose best round is kept; "" if no best round is kept.

        A best round is kept if this call or the start of the run requested it. Without a `monitor`, a resumed run keeps
        the metric of its earlier rounds.
        """
        if not (self.keep_best or (folder and (folder.path / BEST).exists())):
            return ""
        recorded: str = previous.environment.get(BEST_METRIC, self.rule.monitor)
        return self.monitor or recorded

    def record_best(self, folder: LockedFolder | None, previous: ResumePoint) -> dict[str, str]:
        """The entry of `environment.json` with the metric whose best round is kept."""
        metric = self.best_metric(folder, previous)
        return {BEST_METRIC: metric} if metric else {}

    def observed(self, rounds: Iterator[Round], folder: LockedFolder | None, previous: ResumePoint) -> Iterator[Round]:
        """The recorded rounds; the best one is kept if there is a `best_metric`."""
        metric = self.best_metric(folder, previous)
        return keep_best(rounds, folder, metric, previous) if metric else rounds


def tracker_names(options: RunOptions) -> list[str]:
    """The names of the trackers, each once."""
    names = options.get("track") or ()
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Sequence):
        text = f"track must be one or several names: got {short_repr(names)}"
        raise InputError(text, code="wrong-type", name="track", value=names)
    return [choice("tracker", name, TRACKERS) for name in dict.fromkeys(names)]


@contextmanager
def observing(
    callbacks: Sequence[Callback], options: RunOptions, folder: Path | None, experiments: int = 1
) -> Iterator[CallbackList]:
    """The callbacks of a call, its trackers and its progress bar, as one callback.

    Args:
        callbacks: The caller's callbacks.
        options: The options of the call.
        folder: Where trackers write their files.
        experiments: Number of experiments of the call.
    """
    given = CallbackList(callbacks).callbacks
    trackers = [tracker(name, folder) for name in tracker_names(options)] if folder else []
    shown = options.get("progress")
    if shown is None:
        shown = is_interactive() and not any(one.shows_progress for one in given)
    if not is_main_process():
        yield CallbackList()
        return
    with ExitStack() as stack:
        observers = [*given, *(stack.enter_context(closing(each)) for each in trackers)]
        if shown:
            observers.append(stack.enter_context(ProgressBar(experiments)))
        yield CallbackList(observers)


def without_display(options: RunOptions) -> RunOptions:
    """The options of a single run of a sweep or a search, without trackers and progress bar.

    The sweep or search has them for all its runs.
    """
    single: RunOptions = {**options, "progress": False}
    single.pop("track", None)
    return single
