"""Runs at equal resources: cut runs at a common budget of a resource."""

import logging
from typing import NamedTuple

from stableair.errors import InputError
from stableair.results.resources import RESOURCES, ROUNDING, check_resource, format_amount
from stableair.results.run import Run
from stableair.validation import pluralize, positive

log = logging.getLogger("stableair")


class Budget(NamedTuple):
    """A budget of a resource, the same for every run."""

    resource: str  # "symbols", "airtime", "energy", "energy_max" or "bits"
    amount: float  # in the unit of the resource

    def __str__(self) -> str:
        return f"{format_amount(self.amount)} {RESOURCES[self.resource].unit}"


def stop_condition(resource: str, amount: float) -> str:
    """Return the condition that stops a run once it has used a budget.

    >>> stop_condition("energy", 20)
    'energy >= 20.0'
    """
    return f"{check_resource(resource)} >= {positive('budget', amount)!r}"


def at_equal(runs: list[Run], resource: str, amount: float | None = None) -> tuple[list[Run], Budget]:
    """Cut runs after their last round within a common budget.

    Unfinished runs are left out, unless `amount` is set and they have used that budget.

    Args:
        runs: Runs with at least one round.
        resource: "symbols", "airtime", "energy", "energy_max" or "bits".
        amount: The budget. None: the smallest total among the runs that did not diverge.

    Returns:
        The runs up to the budget, and the budget.

    Raises:
        InputError: A run did not record the resource (`resource-not-recorded`) or did not use it (`resource-not-used`);
            without an `amount`, all runs diverged (`all-diverged`);
            the budget is smaller than a run's first round (`budget-too-small`), or a finished run used less
            (`budget-too-large`).
    """
    check_resource(resource)
    if amount is not None:
        positive("budget", amount)
    if old := [run for run in runs if not run.has(resource)]:
        text = f"{old[0]}: an earlier version did not record {resource} in every round; compute the run again"
        raise InputError(text, code="resource-not-recorded", resource=resource)
    used = [run for run in runs if run.finished or (amount is not None and run[resource][-1] >= amount)]
    if unfinished := len(runs) - len(used):
        log.warning("%s left out: unfinished", pluralize(unfinished, "run"))
    if not used:
        raise InputError("nothing to compare: no run is finished", code="no-rounds")
    if unused := [run for run in used if run.diverged is None and not run[resource][-1]]:
        others = [name for name in RESOURCES if all(run.has(name) and run[name][-1] for run in used)]
        text = f"{unused[0]} used no {resource}; resources that all runs used: {', '.join(others) or 'none'}"
        raise InputError(text, code="resource-not-used", resource=resource, allowed=others)
    if complete := [run for run in used if run.diverged is None]:
        least = min(complete, key=lambda run: run[resource][-1])
        total = Budget(resource, least[resource][-1])
        amount = total.amount if amount is None else amount
        if total.amount * (1 + ROUNDING) < amount:
            text = f"the budget is {Budget(resource, amount)}, but {least} used only {total}"
            text += "; choose a smaller budget or more rounds"
            raise InputError(text, code="budget-too-large", resource=resource, budget=amount)
    if amount is None:
        raise InputError("all runs diverged, so that none defines the budget: set a budget", code="all-diverged")
    budget = Budget(resource, float(amount))
    return [run.within(resource, budget.amount) for run in used], budget
