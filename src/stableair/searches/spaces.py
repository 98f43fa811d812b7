"""Search spaces: a range of numbers, or a list of values, for each searched setting."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stableair.errors import InputError
from stableair.experiment import EXECUTION, TYPES, Experiment
from stableair.spec import format_value, literal
from stableair.validation import short_repr, type_name

DIGITS = 3  # significant digits of a searched number: C=0.134 is precise enough
RESOLUTION = 100  # smallest number of values in a range after rounding; a narrow range gets more digits


class Range(NamedTuple):
    """A search space of numbers from low to high.

    >>> from stableair.searches import Range
    >>> str(Range(0.01, 10, log=True))  # the same range as a text
    '0.01:10:log'
    """

    low: float  # lowest value
    high: float  # highest value
    log: bool = False  # whether values are evenly spaced on a logarithmic scale; requires low above 0
    int: bool = False  # whether only whole numbers are allowed

    def suggest(self, trial: Any, key: str) -> float:
        """Return the value for an Optuna trial: a whole number, or a number rounded within the range."""
        if self.int:
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log)
        return self.rounded(trial.suggest_float(key, self.low, self.high, log=self.log))

    def rounded(self, value: float) -> float:
        """Return a value rounded to three significant digits, or to more in a narrow range, within the range.

        >>> Range(0.01, 10, log=True).rounded(0.123456)
        0.123
        >>> Range(0.9991, 0.9999).rounded(0.999123456)
        0.999123
        """
        if not value:
            return value
        width = max(math.log(self.high) - math.log(self.low), math.ulp(1.0)) if self.log else self.high - self.low
        magnitude = math.log10(abs(value))
        step = math.log10(width) - math.log10(RESOLUTION) + (magnitude if self.log else 0.0)  # as a power of ten
        digits = max(DIGITS, 1 + math.floor(magnitude) - math.floor(step))
        return self._inside(float(f"{value:.{min(digits, 17)}g}"))

    def at(self, share: float) -> float:
        """Return the value at a fraction of the way from low to high.

        >>> Range(0.01, 1, log=True).at(0.5), Range(1, 9, int=True).at(0.5)
        (0.1, 5)
        """
        low, high = self.low, self.high
        value = low ** (1 - share) * high**share if self.log else low + share * (high - low)
        return self._inside(round(value) if self.int else value)

    def ends(self) -> tuple[float, float]:
        """Return the lowest and the highest value."""
        return (int(self.low), int(self.high)) if self.int else (self.low, self.high)

    def _inside(self, value: float) -> float:
        low, high = self.ends()
        return min(max(value, low), high)

    def __str__(self) -> str:
        options = [*(["log"] if self.log else []), *(["int"] if self.int else [])]
        return ":".join([format_value(self.low), format_value(self.high), *options])


class OneOf(NamedTuple):
    """A search space of several values.

    >>> from stableair.searches import OneOf
    >>> str(OneOf((1, 2, 5)))  # the same space as a text
    '1,2,5'
    """

    values: tuple[Any, ...]  # the values to try

    def suggest(self, trial: Any, key: str) -> Any:
        """Return the value for an Optuna trial."""
        return trial.suggest_categorical(key, self.values)

    def at(self, share: float) -> Any:
        """Return the value at a fraction of the way from the first to the last value."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def ends(self) -> tuple[Any, ...]:
        """Return all values."""
        return self.values

    def __str__(self) -> str:
        return ",".join(map(str, self.values))


Space = Range | OneOf


def space(key: str, text: str) -> Space | None:
    """Parse the text of a search space; None if the text is a plain value.

    Args:
        key: The searched setting, such as "receiver.C".
        text: `0.01:10:log`, `1:9:int` or `a,b,c`.

    Raises:
        InputError: The text has a colon but is not a range (`invalid-range`).

    >>> space("receiver.C", "0.01:10:log"), space("local_epochs", "1,2"), space("lr", "0.1")
    (Range(low=0.01, high=10.0, log=True, int=False), OneOf(values=(1, 2)), None)
    """
    if TYPES.get(key) is str and not re.fullmatch(r"[\w,]+", text):
        return None  # such as device=cuda:0
    low, *rest = text.split(":")
    if rest and "(" not in text:
        high, *options = rest
        if set(options) - {"log", "int"} or not _is_number(low) or not _is_number(high):
            advice = "write low:high, low:high:log or low:high:int"
            raise InputError(f"{key}={text} is not a range: {advice}", code="invalid-range", name=key, value=text)
        whole = "int" in options or TYPES.get(key) is int
        return _checked(key, Range(float(low), float(high), "log" in options, whole))
    if "," in text and "(" not in text:
        return OneOf(tuple(map(literal, text.split(","))))
    return None


def parse_spaces(base: Experiment, spaces: Mapping[str, Space | str | Sequence[Any]]) -> dict[str, Space]:
    """Return the space of each searched setting.

    A list or tuple of values is a `OneOf`. A range gets the option int if the setting or argument allows only whole
    numbers.

    Raises:
        InputError: A space is invalid (`invalid-range`, `one-value`, `empty-space`), its setting cannot be searched
            (`not-searchable`), or there is no space (`nothing-to-search`).
    """
    parsed = {key: _as_space(base, key, one) for key, one in spaces.items()}
    if fixed := [key for key in parsed if key in ("evaluate", "seed", *EXECUTION)]:
        text = f"{fixed[0]} cannot be searched: it must be the same for all trials"
        raise InputError(text, code="not-searchable", name=fixed[0])
    if not parsed:
        raise InputError("nothing to search: add a range such as receiver.C=0.01:10:log", code="nothing-to-search")
    return parsed


def _as_space(base: Experiment, key: str, value: Space | str | Sequence[Any]) -> Space:
    if isinstance(value, list) or type(value) is tuple:
        value = OneOf(tuple(value))
    if not isinstance(key, str) or not isinstance(value, str | Range | OneOf):
        text = f"{short_repr(key)} must be a range or a list of values: got {short_repr(value)}"
        raise InputError(text, code="wrong-type", name=key, value=value)
    parsed = space(key, value) if isinstance(value, str) else value
    if parsed is None:
        text = f"{key}={value} is a single value: write a range such as 0.01:10:log, or values separated by commas"
        raise InputError(text, code="one-value", name=key)
    if isinstance(parsed, Range):
        return _checked(key, parsed._replace(int=parsed.int or _takes_whole_numbers(base, key)))
    if not parsed.values:
        raise InputError(f"{key} has no values to search", code="empty-space", name=key)
    return parsed


def _takes_whole_numbers(base: Experiment, key: str) -> bool:
    """Return whether a setting, or the argument of a component of the base, is annotated as a whole number."""
    name, _, argument = key.partition(".")
    if not argument or name not in TYPES or not isinstance(getattr(base, name), str):
        return TYPES.get(name) is int
    parameters = [call.parameters[argument] for call in base.calls(name) if argument in call.parameters]
    types = [type_name(parameter.annotation).split(" | ") for parameter in parameters]
    return bool(types) and all("int" in each and "float" not in each for each in types)


def _checked(key: str, candidate: Range) -> Range:
    """Check the ends of a range: finite, in order, and whole numbers for an int range; return the range.

    Raises:
        InputError: The ends are invalid (`invalid-range`).
    """
    low, high, log, whole = candidate
    problem = ""
    if not math.isfinite(high - low):
        problem = "low, high and their difference must be finite"
    elif not low < high or (log and low <= 0):
        problem = f"low must be below high{', and above 0 for log' if log else ''}"
    elif whole and not (float(low).is_integer() and float(high).is_integer()):
        problem = "low and high must be whole numbers"
    if problem:
        raise InputError(f"{key}={candidate}: {problem}", code="invalid-range", name=key, value=str(candidate))
    return candidate


def _is_number(text: str) -> bool:
    """Return whether a text is a finite number in digits."""
    plain = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text.strip())
    return bool(plain) and math.isfinite(float(text))
