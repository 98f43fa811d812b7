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
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name}: {shown(value)} is unknown; {nearest(str(value)[:100], allowed)}")
    return value


def shown(value: object) -> str:
    """A value as it stands in an error: in one line, and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def count(number: int, noun: str) -> str:
    """So many of something, in words: `1 round`, `2 rounds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def whole(name: str, value: object, least: int | None = None, most: int = 2**63 - 1) -> int:
    """`value` as an int, at least `least` and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number: got {shown(value)}")
    size = int(value)
    if least is not None and size < least:
        raise InputError(f"{name} must be at least {least}: got {size}")
    if abs(size) > most:
        raise InputError(f"{name} must be at most {most:,}: got a number of {len(str(abs(size)))} digits")
    return size


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf, otherwise: str = "") -> float:
    """`value` as a float in [low, high]; NaN never is. `otherwise` names what else would have been right."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number{f' {otherwise}' if otherwise else ''}: got {shown(value)}")
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


def fraction(name: str, value: object) -> float:
    """`value` as a float in [0, 1)."""
    share = float(value) if isinstance(value, float) else number(name, value)  # NaN is told the same
    if not 0 <= share < 1:
        raise InputError(f"{name} must be at least 0 and below 1: got {share:g}")
    return share


def positive(name: str, value: object, finite: bool = True, otherwise: str = "") -> float:
    """`value` as a float above zero."""
    nan = isinstance(value, float) and math.isnan(value)
    size = math.nan if nan else number(name, value, otherwise=otherwise)
    if not size > 0 or (finite and math.isinf(size)):
        raise InputError(f"{name} must be positive{' and finite' if finite else ''}: got {size:g}")
    return size
