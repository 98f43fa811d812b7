"""Errors are part of the interface: each names the value, what is allowed and the nearest match."""

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
T = TypeVar("T")


class InputError(ValueError):
    """Something the user gave is wrong; the message is one line and says what would be right.

    `hint` is a word for what would help, such as "resume" or "folder": a command line knows its option for it, and says
    that in place of the `advice`, which is for Python. `part` is the setting whose component broke its contract, such
    as "receiver": who knows where it is made can say so.
    """

    def __init__(self, message: str, hint: str = "", part: str = "", advice: str = ""):
        super().__init__(f"{message}; {advice}" if advice else message)
        self.message = message
        self.hint = hint
        self.part = part


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


def place(name: str, value: object) -> Path:
    """`value` as the path of a file or a folder; an empty text is none, though Python takes it for the current one."""
    try:
        if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
            raise InputError(f"{name} must be the path of a file or a folder: got {shown(value)}")
        path = Path(value)
        if len(os.fsencode(path)) > 4095 or any(len(os.fsencode(part)) > 255 for part in path.parts):
            raise InputError(f"{name}: a path may have 4,095 bytes, and a name in it 255: got {shown(str(value))}")
    except UnicodeEncodeError:
        raise InputError(f"{name}: no file can have the name {shown(value)}") from None
    return path


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Hold the arguments of a function to the types it declares: anything else is an InputError, before it begins.

    >>> typed(lambda x: x)(1)
    1
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        kinds = _kinds(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            many = signature.parameters[name].kind == inspect.Parameter.VAR_POSITIONAL
            for one in value if many else [value]:
                if name in kinds and not _is_a(one, kinds[name]):
                    raise InputError(f"{name} must be {in_words(kinds[name])}: got {shown(one)}")
        return function(*args, **kwargs)

    return held


@functools.cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function)


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type; what stands in brackets is not looked at, and whole numbers are real."""
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(_is_a(value, one) for one in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if origin in (int, float):
        return isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, tuple | list)
    return not isinstance(origin, type) or isinstance(value, origin)


def in_words(kind: Any) -> str:
    """A type as it is told: `float | auto`."""
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(in_words, get_args(kind)))
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    return "None" if kind is NoneType else kind.__name__ if type(kind) is type else str(kind).removeprefix("typing.")
