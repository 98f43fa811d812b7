"""Errors are part of the interface: each names the value, what is allowed and the nearest match."""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real


class InputError(ValueError):
    """Something the user gave is wrong; the message is one line and says what would be right.

    `hint` is a word for what would help, such as "resume" or "folder": a command line knows its option for it.
    """

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


class Note(UserWarning):
    """Something the user should know that stops nothing."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The sentence that helps after an unknown word: the near match, and all that is allowed."""
    allowed = list(allowed)
    lowered = {a.lower(): a for a in allowed}
    close = get_close_matches(word.lower(), lowered, n=1)
    hint = f"did you mean {lowered[close[0]]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(allowed)}"


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """`value`, which must be one of the `allowed` words."""
    allowed = list(allowed)
    if value not in allowed:
        raise InputError(f"{name}: {value!r} is unknown; {nearest(str(value), allowed)}")
    return value


def whole(name: str, value: object, least: int | None = None, most: int = 2**63 - 1) -> int:
    """`value` as an int, at least `least` and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number: got {value!r}")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}: got {value}")
    if value > most or value < -most:
        raise InputError(f"{name} must be at most {most:,}: got a number of {len(str(abs(int(value))))} digits")
    return int(value)


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf, otherwise: str = "") -> float:
    """`value` as a float in [low, high]; NaN never is. `otherwise` names what else would have been right."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number{' ' * bool(otherwise)}{otherwise}: got {value!r}")
    try:
        value = float(value)
    except OverflowError:
        raise InputError(f"{name} must be a number of at most 308 digits") from None
    if not low <= value <= high:
        allowed = f"in [{low:g}, {high:g}]"
        if high == math.inf or low == -math.inf:
            allowed = f"at least {low:g}" if high == math.inf else f"at most {high:g}"
        raise InputError(f"{name} must be {allowed}: got {value:g}")
    return value


def positive(name: str, value: object, finite: bool = True, otherwise: str = "") -> float:
    """`value` as a float above zero."""
    value = number(name, value, otherwise=otherwise) if value == value else math.nan
    if not value > 0 or (finite and math.isinf(value)):
        raise InputError(f"{name} must be positive{' and finite' if finite else ''}: got {value:g}")
    return value
