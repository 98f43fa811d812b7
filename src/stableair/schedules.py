"""Schedules of a learning rate: the share s_k of the learning rate in step k, for the clients and for the server."""

import math
from collections.abc import Callable
from functools import partial
from numbers import Real

from stableair.errors import InputError
from stableair.spec import Registry
from stableair.validation import integer, number, short_repr

lr_decay = Registry("lr_decay", "lr_decays")

Schedule = Callable[[int], float]  # zero-based k -> the share of the learning rate in step k


def full_rate(k: int) -> float:
    """Return the share 1 for every step."""
    return 1.0


def share_in_round(schedule: Schedule, k: int) -> float:
    """Return the share of the learning rate in round k.

    Args:
        schedule: Schedule of the learning rate.
        k: Zero-based index of the round.

    Returns:
        The share, positive and finite.

    Raises:
        InputError: The schedule returns another value (`invalid-share`).
    """
    share = schedule(k)
    if not isinstance(share, Real) or not 0 < share < math.inf:
        text = f"the lr_decay must return a positive number for every round: got {short_repr(share)} in round {k}"
        raise InputError(text, code="invalid-share", setting="lr_decay", value=share, round=k)
    return float(share)


@lr_decay("constant")
def constant() -> Schedule:
    """Constant learning rate: s_k = 1.

    Returns:
        The schedule, k -> s_k.

    >>> constant()(99)
    1.0
    """
    return full_rate


@lr_decay("inverse")
def inverse(over: int = 100, floor: float = 0.01) -> Schedule:
    """Learning rate that falls like 1 / k: s_k = max(floor, 1 / (1 + k / over)).

    Args:
        over: Number of steps after which the share is 1/2; after 2 * over steps it is 1/3.
        floor: Smallest share, in (0, 1].

    Returns:
        The schedule, k -> s_k.

    >>> share = inverse(over=10, floor=0.1)
    >>> share(0), share(10), share(1000)
    (1.0, 0.5, 0.1)
    """
    over, floor = _checked(over, floor)
    return partial(_inverse_share, over=over, floor=floor)


@lr_decay("cosine")
def cosine(over: int = 100, floor: float = 0.01) -> Schedule:
    """Cosine annealing: half a cosine wave from 1 to `floor` in `over` steps, then constant.

        s_k = floor + (1 - floor) (1 + cos(pi min(k / over, 1))) / 2    (Loshchilov and Hutter, 2017)

    Args:
        over: Number of steps after which the share is `floor`.
        floor: Smallest share, in (0, 1].

    Returns:
        The schedule, k -> s_k.

    >>> share = cosine(over=10, floor=0.25)
    >>> share(0), share(5), share(10), share(1000)
    (1.0, 0.625, 0.25, 0.25)
    """
    over, floor = _checked(over, floor)
    return partial(_cosine_share, over=over, floor=floor)


def _inverse_share(k: int, over: int, floor: float) -> float:
    return max(floor, 1 / (1 + k / over))


def _cosine_share(k: int, over: int, floor: float) -> float:
    return floor + (1 - floor) * (1 + math.cos(math.pi * min(k / over, 1))) / 2


def _checked(over: int, floor: float) -> tuple[int, float]:
    """Check the arguments of a schedule, and return them."""
    over, least = integer("over", over, 1), number("floor", floor, high=1.0)
    if not least > 0:
        text = f"floor must be above 0, so that the learning rate stays positive: got {least:g}"
        raise InputError(text, code="out-of-range", name="floor", value=least, low=0, high=1)
    return over, least
