"""Names of recorded metrics."""

from collections.abc import Iterable
from typing import Any

from stableair.errors import InputError
from stableair.results.resources import RESOURCES
from stableair.validation import short_repr, suggest

Row = dict[str, Any]  # the metrics of a round by name
# The metrics that a run may record, without the prefix of the evaluated split.
OF_EVALUATION = (
    "accuracy", "loss", "accuracy_clients", "accuracy_recalibrated", "accuracy_batch", "accuracy_averaged",
    "client_accuracy_mean", "client_accuracy_p10", "client_accuracy_worst",
)  # fmt: skip
OF_ROUND = (
    "train/loss", "gradient/norm", "clip/fraction", "channel/snr_db", "channel/senders", "channel/uses",
    "channel/seconds", "channel/energy_mean", "channel/energy_max", "channel/energy_total_max", "channel/bits",
    "seconds", "memory/peak_mb",
)  # fmt: skip
OPEN = "receiver/", "server/", "channel/snr_db/", "seconds/"  # their names depend on components, blocks and options
NO_METRICS = "round", "diverged"  # keys of a row that are not metrics


def metric_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of the metrics in some rows, each once.

    >>> metric_names([{"round": 0, "test/loss": 2.3}, {"round": 1, "test/loss": None, "diverged": True}])
    ['test/loss']
    """
    return list(dict.fromkeys(name for row in rows for name in row if name not in NO_METRICS))


def check_name(metric: str, split: str) -> None:
    """Refuse the name of a metric that no run records, before the first round.

    Args:
        metric: The name. All names with a prefix of `OPEN` are accepted.
        split: The split that is evaluated: "test" or "validation".

    Raises:
        InputError: No run records the metric (`unknown-metric`).
    """
    known = [*(f"{split}/{name}" for name in OF_EVALUATION), *OF_ROUND]
    if metric in known or metric.startswith(OPEN):
        return
    if metric in RESOURCES:
        amount = RESOURCES[metric].metric
        text = f"monitor {metric!r} is a resource, which only stop accepts; its amount in a round is {amount}"
    else:
        text = f"metric {short_repr(metric)} is unknown; {suggest(metric[:100], [*known, *RESOURCES])}"
        text += ", and names that start with receiver/ or server/"
    raise InputError(text, code="unknown-metric", metric=metric, recorded=known)


def unknown_metric(metric: object, rows: Iterable[Row]) -> InputError:
    """Return the error about a metric that was not recorded; its message suggests the closest recorded name."""
    rows = list(rows)
    recorded = metric_names(rows)
    word = metric[:100] if isinstance(metric, str) else short_repr(metric)
    totals = [name for name, resource in RESOURCES.items() if name != metric and resource.metric in recorded]
    known = [*recorded, *totals]
    hint = suggest(word, known) if recorded else "no round is complete yet"
    text = f"metric {short_repr(metric)} was not recorded; {hint}"
    return InputError(text, code="unknown-metric", metric=metric, recorded=recorded)
