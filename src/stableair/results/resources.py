"""Totals of the resources of the uplink: complex symbols, airtime, transmitted energy and bits.

A run records the resources of each round; the totals are their sums. `energy` is the mean over all clients.
`energy_max` is the total of the client that has transmitted most; a run records this total itself.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from stableair.errors import InputError
from stableair.validation import choice

ROUNDING = 1e-9  # relative tolerance of a budget: sums in a different order differ by less than this


class Resource(NamedTuple):
    """A resource of the uplink."""

    metric: str  # the recorded metric: the amount in a round; of energy_max, the total after the round
    label: str  # label of an axis
    unit: str  # unit to print after an amount
    add: Callable[[float, float], float] = operator.add  # (total, recorded amount of the next round) -> total


RESOURCES = {
    "symbols": Resource("channel/uses", "complex symbols", "complex symbols"),
    "airtime": Resource("channel/seconds", "airtime in s", "s of airtime"),
    "energy": Resource("channel/energy_mean", "transmitted energy per client in J", "J per client"),
    "energy_max": Resource(
        "channel/energy_total_max", "largest transmitted energy of a client in J", "J at most per client", max
    ),
    "bits": Resource("channel/bits", "transmitted bits", "bits"),
}


def check_resource(name: object) -> str:
    """Check that a resource exists, and return its name.

    Raises:
        InputError: The resource is unknown (`unknown-value`).
    """
    return choice("resource", name, RESOURCES)


def is_recorded(rows: Sequence[dict[str, Any]], name: str) -> bool:
    """Return whether all rounds have recorded a resource, except the round in which the run diverged."""
    metric = RESOURCES[name].metric
    return bool(rows) and all(row.get(metric) is not None or bool(row.get("diverged")) for row in rows)


def totals(rows: Sequence[dict[str, Any]], name: str, before: float = 0.0) -> list[float]:
    """Return the total of a resource after each round: (rounds,).

    The round in which a run diverged has no resources and adds 0.

    Args:
        rows: The rounds.
        name: The resource.
        before: The total before these rounds.

    >>> totals([{"channel/uses": 50.0}, {"channel/uses": 70.0}], "symbols")
    [50.0, 120.0]

    Raises:
        InputError: A round has not recorded the resource (`resource-not-recorded`).
    """
    if rows and not is_recorded(rows, name):
        text = f"an earlier version did not record {name} in every round; compute the run again"
        raise InputError(text, code="resource-not-recorded", resource=name)
    metric, add = RESOURCES[name].metric, RESOURCES[name].add
    return list(accumulate((row.get(metric) or 0.0 for row in rows), add, initial=before))[1:]


def rounds_within(totals: Sequence[float], budget: float) -> int:
    """Return the number of rounds whose total is within a budget.

    >>> rounds_within([50.0, 120.0, 120.0, 190.0], 120)
    3
    """
    return sum(total <= budget * (1 + ROUNDING) for total in totals)


def format_amount(amount: float) -> str:
    """Format an amount of a resource.

    >>> format_amount(1234567.8), format_amount(0.25)
    ('1,234,568', '0.25')
    """
    return f"{amount:,.0f}" if 1000 <= amount < 1e15 else f"{amount:.4g}"
