"""Names of recorded metrics."""

from collections.abc import Iterable
from typing import Any

from stableair.errors import InputError
from stableair.results.resources import RESOURCES
from stableair.validation import short_repr, suggest

Row = dict[str, Any]  # the metrics of a round by name
NO_METRICS = "round", "diverged"  # keys of a row that are not metrics


def metric_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of the metrics in some rows, each once.

    >>> metric_names([{"round": 0, "test/loss": 2.3}, {"round": 1, "test/loss": None, "diverged": True}])
    ['test/loss']
    """
    return list(dict.fromkeys(name for row in rows for name in row if name not in NO_METRICS))


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
