"""Parsing of experiments from the words of a command line: `digits rounds=5 noise.tau=0.3`."""

import logging
from pathlib import Path
from typing import Any

from stableair.errors import InputError
from stableair.experiment.experiment import Experiment
from stableair.experiment.presets import PRESETS, preset
from stableair.experiment.settings import TYPES
from stableair.spec import literal
from stableair.validation import short_repr, suggest

log = logging.getLogger("stableair")


def from_words(words: list[str]) -> Experiment:
    """Return the experiment of the words of a command line.

    Args:
        words: Optionally a preset or a .toml or .json file first; then words of the form `key=value`.

    Raises:
        InputError: The first word is neither a preset nor a file (`unknown-preset`), or a setting is invalid.

    >>> from_words(["digits-noniid", "rounds=5", "noise.tau=0.3"]).noise
    'sas(alpha=1.5, tau=0.3)'
    """
    base = Experiment()
    if words and "=" not in words[0]:
        first, *words = words
        if first in PRESETS:
            base = preset(first)
        elif Path(first).is_file() or Path(first).suffix in (".toml", ".json"):
            base = Experiment.read(first)
        else:
            text = f"{first!r} is not a preset, a file or key=value; {suggest(first, PRESETS)}"
            raise InputError(text, code="unknown-preset", value=first, allowed=list(PRESETS))
    return base.with_(**parse_overrides(words))


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Return the settings in words of the form `key=value`; the last word of a repeated key is used.

    Raises:
        InputError: A word has no equals sign (`not-a-setting`), or a value has a wrong type (`wrong-type`).
    """
    settings: dict[str, Any] = {}
    for word in last_of_each(words):
        name, equals, text = word.partition("=")
        if not equals:
            message = f"{word!r} is not key=value; only the first word may be a preset or a file"
            raise InputError(message, code="not-a-setting", value=word)
        settings[name] = _convert(name, text)
    return settings


def last_of_each(words: list[str]) -> list[str]:
    """Remove each `key=value` that a later word with the same key replaces, and log the replacement.

    >>> last_of_each(["digits", "rounds=5", "lr=0.1", "rounds=9"])
    ['digits', 'lr=0.1', 'rounds=9']
    """
    kept: dict[str | int, str] = {}
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        before = kept.pop(name, None)
        if before is not None:
            log.info("%s is given twice: %s replaces %s", name, value[:100], before.partition("=")[2][:100])
        kept[name if equals else i] = word
    return list(kept.values())


def _convert(name: str, text: str) -> Any:
    """Convert the text of a value to the type of its setting; an argument of a component is a literal."""
    kind = TYPES.get(name, str)
    if "." in name or kind is bool:
        return literal(text)
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        message = f"{name} must be {wanted}: got {short_repr(text)}"
        raise InputError(message, code="wrong-type", name=name, value=text) from None
