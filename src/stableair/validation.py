"""Checks of arguments.

Each error has the argument, its value and the allowed values, in words and as fields of the exception: `name`, `value`,
and `allowed` for a choice or `low` and `high` for a range.
"""

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from stableair.errors import InputError

FLOAT32_MAX = 3.4028234663852886e38
# How to create a value of a type; the advice of errors about a value of another type.
ADVICE = {"Dataset": "create a Dataset with sa.Dataset.from_arrays(x, y), from_torch or from_csv"}

P = ParamSpec("P")
T = TypeVar("T")


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Return a sentence for an error about an unknown word: the closest match, and all allowed words."""
    allowed = list(allowed)
    return f"{closest_match(word, allowed)}allowed: {', '.join(allowed)}"


def closest_match(word: str, allowed: Iterable[str]) -> str:
    """Return the question for the closest allowed word; "" if no word is close.

    >>> closest_match("mack", ["mac", "gnc"])
    "did you mean 'mac'? "
    """
    lowered = {a.lower(): a for a in allowed}
    close = get_close_matches(word.lower(), lowered, n=1)
    return f"did you mean {lowered[close[0]]!r}? " if close else ""


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return `value`, which must be one of the `allowed` words.

    Raises:
        InputError: It is another value (`unknown-value`; fields name, value, allowed).
    """
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        word = value[:100] if isinstance(value, str) else short_repr(value)
        text = f"{name} {short_repr(value)} is unknown; {suggest(word, allowed)}"
        raise InputError(text, code="unknown-value", name=name, value=value, allowed=allowed)
    return value


def short_repr(value: object) -> str:
    """Return a value as text for an error message: one line of at most about 100 characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integers of more than 4,300 digits
        digits = f" of {count_digits(value):,} digits" if isinstance(value, int) else ""
        return f"{type(value).__name__}{digits}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def count_digits(number: int) -> int:
    """Return the number of decimal digits of an integer, also beyond Python's limit of 4,300 digits.

    >>> count_digits(-120), count_digits(10**5000)
    (3, 5001)
    """
    digits = int((abs(number).bit_length() - 1) * math.log10(2)) + 1 if number else 1
    return digits + (abs(number) >= 10**digits)


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun: `1 round`, `2 rounds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def integer(name: str, value: object, least: int | None = None, most: int = 2**63 - 1) -> int:
    """Return `value` as an int, at least `least` and at most `most` in absolute value.

    Raises:
        InputError: It is not a whole number (`wrong-type`) or it is out of range (`out-of-range`).
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong_type(name, value, "a whole number")
    size = int(value)
    if abs(size) > most:
        text = f"{name} must be at most {most:,}: got a number of {count_digits(size)} digits"
        raise InputError(text, code="out-of-range", name=name, value=size, low=-most, high=most)
    if least is not None and size < least:
        raise _out_of_range(name, size, f"at least {least}", low=least)
    return size


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf, otherwise: str = "") -> float:
    """Return `value` as a float in [low, high]; NaN is refused.

    Args:
        name: Name of the argument, for the error.
        value: The value to check.
        low: Smallest allowed value.
        high: Largest allowed value.
        otherwise: Further allowed values, for the error: "or auto".

    Raises:
        InputError: It is not a number (`wrong-type`) or outside the range (`out-of-range`).
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(name, value, f"a number {otherwise}".rstrip())
    try:
        value = float(value)
    except OverflowError:
        text = f"{name} must be a number of at most 308 digits"
        raise InputError(text, code="out-of-range", name=name, value=value) from None
    if not low <= value <= high:
        allowed = f"in [{low:g}, {high:g}]"
        if high == math.inf or low == -math.inf:
            allowed = f"at least {low:g}" if high == math.inf else f"at most {high:g}"
        elif high == sys.float_info.max:
            allowed = f"at least {low:g} and finite"
        raise _out_of_range(name, value, allowed, low=low, high=high)
    return value


def boolean(name: str, value: object) -> bool:
    """Return `value`, which must be True or False; the error writes them as a spec does.

    Raises:
        InputError: It has another type (`wrong-type`).
    """
    if not isinstance(value, bool):
        raise _wrong_type(name, value, "true or false")
    return value


def fraction(name: str, value: object) -> float:
    """Return `value` as a float in [0, 1)."""
    share = float(value) if isinstance(value, float) else number(name, value)  # NaN gets the same message
    if not 0 <= share < 1:
        raise _out_of_range(name, share, "at least 0 and below 1", low=0.0, high=1.0)
    return share


def positive(name: str, value: object, finite: bool = True, otherwise: str = "") -> float:
    """Return `value` as a float above zero."""
    nan = isinstance(value, float) and math.isnan(value)
    size = math.nan if nan else number(name, value, otherwise=otherwise)
    if not size > 0 or (finite and math.isinf(size)):
        raise _out_of_range(name, size, f"positive{' and finite' if finite else ''}", low=0.0)
    return size


def float32(name: str, value: float) -> float:
    """Return `value`, which float32 must be able to represent: torch refuses to convert larger finite numbers.

    Raises:
        InputError: It is finite and too large (`out-of-range`).
    """
    if math.isfinite(value) and abs(value) > FLOAT32_MAX:
        raise _out_of_range(name, value, f"at most {FLOAT32_MAX:g}, the largest float32", high=FLOAT32_MAX)
    return value


def texts(name: str, values: Iterable[object]) -> list[str]:
    """Return values as a list of texts.

    Raises:
        InputError: A value is not a text (`wrong-type`).
    """
    for value in (values := list(values)):
        if not isinstance(value, str):
            raise _wrong_type(name, value, "texts")
    return [str(value) for value in values]


def as_path(name: str, value: object) -> Path:
    """Return `value` as a path; refuse an empty text, which Python would interpret as the current folder."""
    try:
        if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
            raise _wrong_type(name, value, "the path of a file or a folder")
        path = Path(value)
        if len(os.fsencode(path)) > 4095 or any(len(os.fsencode(part)) > 255 for part in path.parts):
            limits = "a path has at most 4,095 bytes, and each name in it at most 255"
            text = f"{name}: {limits}: got {short_repr(str(value))}"
            raise InputError(text, code="path-too-long", name=name, value=value)
    except UnicodeEncodeError:
        text = f"{name}: a file cannot have the name {short_repr(value)}"
        raise InputError(text, code="wrong-type", name=name, value=value) from None
    return path


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to check its arguments against its annotations (`wrong-type`) before it runs.

    >>> typed(lambda x: x)(1)
    1
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        kinds = _kinds(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            many = signature.parameters[name].kind == inspect.Parameter.VAR_POSITIONAL
            for one in value if many else [value]:
                if name in kinds and not _is_a(one, kinds[name]):
                    raise _wrong_type(name, one, type_name(kinds[name]))
        return function(*args, **kwargs)

    return checked


def check_simple_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check arguments whose annotation consists of int, float, bool, str, None and Literal; accept all others.

    Raises:
        InputError: An argument has another type (`wrong-type`).
    """
    try:
        kinds = get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except Exception:  # an annotation may be any text or object
        return
    for name, value in arguments.items():
        if name in kinds and _is_simple(kinds[name]) and not _is_a(value, kinds[name]):
            raise _wrong_type(name, value, type_name(kinds[name]))


def _is_simple(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_simple, get_args(kind)))
    return kind in (int, float, bool, str, NoneType) or get_origin(kind) is Literal


def _wrong_type(name: str, value: object, wanted: str) -> InputError:
    text = f"{name} must be {wanted}: got {short_repr(value)}"
    advice = next((ADVICE[kind] for kind in wanted.split(" | ") if kind in ADVICE), "")
    return InputError(text, code="wrong-type", advice=advice, name=name, value=value)


def _out_of_range(name: str, value: float, wanted: str, **limits: Any) -> InputError:
    got = value if isinstance(value, int) else f"{value:g}"
    return InputError(f"{name} must be {wanted}: got {got}", code="out-of-range", name=name, value=value, **limits)


@functools.cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function)


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type. Generic parameters are ignored; an int is a float, a bool is not."""
    origin = get_origin(kind) or kind
    if origin is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if origin in (int, float):
        return isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, tuple | list)
    return not isinstance(origin, type) or isinstance(value, origin)


def type_name(kind: Any) -> str:
    """Return a type in words: `float | auto`."""
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(type_name, get_args(kind)))
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    return "None" if kind is NoneType else kind.__name__ if type(kind) is type else str(kind).removeprefix("typing.")
