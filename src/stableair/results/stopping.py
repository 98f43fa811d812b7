"""Early stopping. The decision depends only on the recorded rounds; therefore resumed runs stop at the same round."""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stableair.errors import InputError
from stableair.results.metrics import Row, check_name, unknown_metric
from stableair.results.resources import RESOURCES, totals
from stableair.validation import integer, short_repr

if TYPE_CHECKING:
    from stableair.contracts import Round

_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_CONDITION = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


class Progress(NamedTuple):
    """What a stopping rule knows of a run after some rounds."""

    rounds: int = 0  # number of rounds
    met: bool = False  # whether the run stops after these rounds, or should have stopped earlier
    total: float = 0.0  # total of the resource in `stop`
    best: float | None = None  # best value of `monitor`
    stale: int = -1  # number of rounds since the best one; the first round is the best so far, even without a value


class StoppingRule(NamedTuple):
    """The rule that stops a run before its last round.

    Args:
        stop: A condition on a metric, such as "test/accuracy > 0.9", or on the total of a resource, such as
            "energy >= 1e6". "": no condition.
        patience: Number of rounds without a new best value of `monitor` after which the run stops. 0: no limit.
        monitor: A metric, such as "test/accuracy". Lower is better for a loss, higher for every other metric.
    """

    stop: str = ""
    patience: int = 0
    monitor: str = ""

    def is_met(self, rows: Sequence[Row]) -> bool:
        """Return whether a run stops after these rounds, or should have stopped earlier.

        Raises:
            InputError: A metric (`unknown-metric`) or a resource (`resource-not-recorded`) was not recorded.
        """
        return self.advance(Progress(), rows).met

    def advance(self, progress: Progress, rows: Sequence[Row]) -> Progress:
        """Return the progress after all rounds of a run; only the new rounds are read.

        Args:
            progress: The progress after the first rounds.
            rows: All rounds, from the first one.

        Raises:
            InputError: As for `is_met`.
        """
        new = rows[progress.rounds :]
        if not new:
            return progress
        met, total, best, stale = progress.met, progress.total, progress.best, progress.stale
        if self.stop:
            metric, comparison, target = parse_condition(self.stop)
            values: Sequence[float | None]
            if metric in RESOURCES:
                values = sums = totals(new, metric, before=total)
                total = sums[-1]
            else:
                check_recorded(metric, rows)
                values = [row.get(metric) for row in new]
            met = met or any(value is not None and _COMPARISONS[comparison](value, target) for value in values)
        if self.patience and not met:
            check_recorded(self.monitor, rows)
            for value in (row.get(self.monitor) for row in new):
                best, stale = (value, 0) if is_better(self.monitor, value, best) else (best, stale + 1)
                met = met or stale >= self.patience
        return Progress(len(rows), met, total, best, stale)


def stop_early(
    rounds: "Iterable[Round]", rule: StoppingRule, done: Sequence[Row], on_main: Callable[[Callable[[], Any]], Any]
) -> "Iterator[Round]":
    """Yield the rounds up to the first one that meets the rule.

    Args:
        rounds: The recorded rounds.
        rule: The rule.
        done: The rounds of the run before them.
        on_main: Calls a function on the main process, which has evaluated, and returns the result on every process.
    """
    rows, progress = list(done), rule.advance(Progress(), done)
    for each in rounds:
        yield each
        rows.append(each.metrics)
        progress = on_main(partial(rule.advance, progress, rows))
        if progress.met:
            return


def stopping_rule(stop: str, patience: int, monitor: str, split: str) -> StoppingRule:
    """Check the options of early stopping, and return the rule.

    Args:
        stop: As for `StoppingRule`.
        patience: As for `StoppingRule`.
        monitor: As for `StoppingRule`. "": the accuracy on the evaluated split.
        split: The split that is evaluated: "test" or "validation".

    Raises:
        InputError: An option is invalid, or a metric belongs to the split that is not evaluated (`unknown-metric`),
            or no run records a metric (`unknown-metric`).
    """
    integer("patience", patience, 0)
    if not isinstance(stop, str) or not isinstance(monitor, str):
        text = f"stop and monitor must be strings: got {short_repr(stop)} and {short_repr(monitor)}"
        raise InputError(text, code="wrong-type", name="stop", value=stop)
    monitor = monitor or f"{split}/accuracy"
    metrics = [monitor, *([parse_condition(stop)[0]] if stop else [])]
    other = "validation" if split == "test" else "test"
    if wrong := [metric for metric in metrics if metric.startswith(f"{other}/")]:
        text = f"metric {wrong[0]} is not recorded: the run evaluates the {split} split; see the setting evaluate"
        raise InputError(text, code="unknown-metric", metric=wrong[0])
    for metric in metrics:
        if metric == monitor or metric not in RESOURCES:
            check_name(metric, split)
    return StoppingRule(stop, patience, monitor)


def parse_condition(text: str) -> tuple[str, str, float]:
    """Return the metric, the comparison and the number of a condition.

    >>> parse_condition("test/accuracy > 0.9")
    ('test/accuracy', '>', 0.9)

    Raises:
        InputError: The text is not a valid condition (`invalid-condition`).
    """
    parts = _CONDITION.fullmatch(text)
    if not parts:
        message = f"stop must be METRIC OP NUMBER with OP one of {', '.join(_COMPARISONS)}, such as test/accuracy>0.9"
        raise InputError(f"{message}: got {short_repr(text)}", code="invalid-condition", value=text)
    return parts[1], parts[2], float(parts[3])


def is_better(metric: str, value: float | None, best: float | None) -> bool:
    """Return whether a value of a metric is better than the best value so far; None is worse than every number.

    >>> is_better("test/accuracy", 0.9, 0.8), is_better("test/loss", 0.9, 0.8), is_better("test/loss", 0.9, None)
    (True, False, True)
    """
    if value is None or best is None:
        return value is not None
    return value < best if metric.rpartition("/")[2].startswith("loss") else value > best


def check_recorded(metric: str, rows: Sequence[Row]) -> None:
    """Refuse a metric that no round has recorded.

    Raises:
        InputError: No round has recorded the metric (`unknown-metric`).
    """
    if rows and metric not in rows[-1] and not any(metric in row for row in rows):
        raise unknown_metric(metric, rows)
