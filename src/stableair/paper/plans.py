"""The plan of a figure: its set-up with the user's changes, the seeds and the threshold search, all checked."""

from typing import Any, NamedTuple

from stableair import builder
from stableair.errors import InputError
from stableair.experiment import EXECUTION, Experiment
from stableair.paper.catalogue import (
    DRAWINGS,
    FIGURES,
    SEARCH_ROUNDS,
    SEARCHED,
    SMOKE,
    SMOKE_PARTITION,
    SMOKE_TRIALS,
    TRIALS,
    Figure,
)
from stableair.validation import choice, integer


class Plan(NamedTuple):
    """The options that determine the runs and the caption of a figure."""

    figure: Figure
    base: Experiment  # the experiment that all curves start from
    seeds: int
    smoke: bool
    trials: int
    search_rounds: int
    thresholds: dict[str, float]  # thresholds by method, instead of a search
    search_each: bool  # Fig. 4: search C for every curve
    overrides: dict[str, Any]  # the user's settings, without execution settings


def plan(
    name: str,
    settings: dict[str, Any] | None = None,
    *,
    smoke: bool = False,
    rounds: int | None = None,
    seeds: int = 1,
    thresholds: dict[str, float] | None = None,
    search_each: bool = False,
    trials: int | None = None,
    search_rounds: int | None = None,
) -> Plan:
    """Plan a figure and refuse invalid options before anything is computed. The arguments are those of `figure`.

    Raises:
        InputError: The figure is unknown, or it cannot use one of the options.
    """
    figure = FIGURES[choice("figure", name, [*FIGURES, *DRAWINGS])]
    settings, thresholds = (settings or {}) | ({} if rounds is None else {"rounds": rounds}), thresholds or {}
    _check_settings(name, settings)
    _check_thresholds(name, thresholds, search_each)
    base = figure.setup
    if smoke:
        base = base.with_(**SMOKE, partition=SMOKE_PARTITION.get(base.partition, base.partition))
    base = base.with_(**settings)
    builder.device(base.device)  # refuse an unavailable device now, not after the search
    for method, value in thresholds.items():
        with_threshold(method, base, value)
    if trials is None:
        trials = SMOKE_TRIALS if smoke else TRIALS
    if search_rounds is None:
        search_rounds = min(SEARCH_ROUNDS, base.rounds)
    return Plan(
        figure,
        base,
        seeds=integer("seeds", seeds, 1),
        smoke=smoke,
        trials=integer("trials", trials, 1),
        search_rounds=integer("search_rounds", search_rounds, 1),
        thresholds=thresholds,
        search_each=search_each,
        overrides={key: value for key, value in settings.items() if key not in EXECUTION},
    )


def with_threshold(method: str, base: Experiment, value: float) -> Experiment:
    """Return the experiment with the receiver of a method at a threshold."""
    receiver, key, _ = SEARCHED[method]
    return base.with_(receiver=receiver).with_(**{key: value})


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    for key in settings:
        if key in (FIGURES[name].vary, "evaluate") or key.partition(".")[0] == "receiver":
            raise InputError(
                f"{name} sets {key} for each of its curves: leave it out",
                code="figure-sets-this", figure=name, name=key,
            )  # fmt: skip


def _check_thresholds(name: str, thresholds: dict[str, float], search_each: bool) -> None:
    for method in thresholds:
        if choice("method", method, SEARCHED) not in FIGURES[name].searched:
            raise InputError(
                f"{name} searches no threshold of {method}: leave it out",
                code="threshold-not-searched", figure=name, method=method,
            )  # fmt: skip
    if search_each and (name not in ("fig4a", "fig4b") or thresholds):
        raise InputError(
            "search_each=True is for fig4a and fig4b, and requires a search: leave out thresholds",
            code="search-each-unavailable", figure=name,
        )  # fmt: skip
