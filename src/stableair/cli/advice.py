"""Advice on a wrong command line: a setting that was written as an option, and an option as a setting."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from stableair.errors import StableairError
from stableair.experiment import TYPES, dotted_keys


def setting_for(error: Any, words: list[str]) -> str:
    """Return the advice to write an unknown option such as `--rounds 2` as a setting.

    The result is "" if the option is not the name of a setting, or if the command takes no settings.

    Args:
        error: typer's error about an unknown option.
        words: The words of the command line.
    """
    option = getattr(error, "option_name", "")
    name = option.lstrip("-").replace("-", "_")
    if not name or not error.ctx or all(one.name != "words" for one in error.ctx.command.params):
        return ""
    keys = [name] if name.partition(".")[0] in TYPES else dotted_keys(name)
    return f"write {' or '.join(f'{key}={_value_of(option, words)}' for key in keys)}" if keys else ""


def option_for(error: StableairError, words: list[str], commands: Mapping[str, Callable[..., None]]) -> str:
    """Return the advice to write an unknown setting such as `seeds=3` as an option; "" if there is none.

    Args:
        error: The error.
        words: The words of the command line.
        commands: The functions of all commands by name.
    """
    name = error.fields.get("name", "")
    command = next((commands[word] for word in words if word in commands), None)
    options = inspect.signature(command).parameters if command else {}
    if error.code != "unknown-setting" or name not in options:
        return ""
    option = f"--{name.replace('_', '-')}"
    if options[name].default is False:  # a flag
        return f"write {option}"
    return f"write {option} {next(word.partition('=')[2] for word in words if word.startswith(f'{name}='))}"


def _value_of(option: str, words: list[str]) -> str:
    """Return the value of an option: after its equals sign, or the next word."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
