"""Resources of the uplink: complex symbols, time on the air, transmitted energy and bits, added up over the rounds.

A run records the resources of each round; the totals are derived from them. The energy is the mean over all clients.
The total energy of a single client is not recorded: `channel/energy_max` is the largest energy of a client in a round.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from stableair.errors import InputError
from stableair.validation import choice

ROUNDING = 1e-9  # relative tolerance of a budget: sums of equal terms in another order differ by less


class Resource(NamedTuple):
    """A resource that every channel uses or may use."""

    metric: str  # its amount in a round, as recorded
    label: str  # of an axis
    unit: str  # after an amount


RESOURCES = {
    "symbols": Resource("channel/uses", "complex symbols", "complex symbols"),
    "airtime": Resource("channel/seconds", "time on the air in s", "s on the air"),
    "energy": Resource("channel/energy_mean", "transmitted energy per client in J", "J per client"),
    "bits": Resource("channel/bits", "transmitted bits", "bits"),
}


def check_resource(name: object) -> str:
    """Return the name of a resource.

    Raises:
        InputError: There is no such resource (`unknown-value`).
    """
    return choice("resource", name, RESOURCES)


def is_recorded(rows: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether all rounds recorded a resource; the round in which a run diverged has no metrics."""
    metric = RESOURCES[name].metric
    return bool(rows) and all(row.get(metric) is not None or bool(row.get("diverged")) for row in rows)


def totals(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """The total of a resource after each round: (rounds,). The round in which a run diverged adds nothing.

    >>> totals([{"channel/uses": 50.0}, {"channel/uses": 70.0}], "symbols")
    [50.0, 120.0]

    Raises:
        InputError: A round did not record the resource (`resource-not-recorded`).
    """
    if rows and not is_recorded(rows, name):
        text = f"{name} was not recorded in every round: an earlier version computed them; compute the run again"
        raise InputError(text, code="resource-not-recorded", resource=name)
    return list(accumulate(row[RESOURCES[name].metric] or 0.0 for row in rows))


def rounds_within(totals: Sequence[float], budget: float) -> int:
    """Number of rounds after which a total has not exceeded a budget.

    >>> rounds_within([50.0, 120.0, 120.0, 190.0], 120)
    3
    """
    return sum(total <= budget * (1 + ROUNDING) for total in totals)


def format_amount(amount: float) -> str:
    """An amount of a resource as text.

    >>> format_amount(1234567.8), format_amount(0.25)
    ('1,234,568', '0.25')
    """
    return f"{amount:,.0f}" if 1000 <= amount < 1e15 else f"{amount:.4g}"
