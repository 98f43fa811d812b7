"""Advice on a wrong command line: a missing argument, or a setting that was written as an option or vice versa."""

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from stableair.errors import StableairError
from stableair.experiment import COMPONENT_SETTINGS, TYPES, dotted_keys, registry

# Advice for the command line by the `hint` of an error.
FLAGS = {
    "resume": "add --resume or choose another --out",
    "folder": "choose another --out",
    "settings": "repeat the settings of the folder, or choose another --out",
    "force": "add --force or choose another file",
    "plugin": "--plugin-changed=keep uses these results, --plugin-changed=recompute restarts the run",
    "component": "a custom component needs --plugin FILE.py",
    "record": "choose another --record",
    "data": "choose another --data-dir",
    "noise_on": "set channel.noise_on=sum",
}
FOLDERS = "name at least one folder of runs"
SETTINGS = "name at least one setting with several values"
# Advice for a command without its words, by the command.
WORDS = {
    "plot": f"{FOLDERS}, such as: stableair plot runs -o curves.png",
    "export": f"{FOLDERS}, such as: stableair export runs -o results.csv",
    "report": f"{FOLDERS}, such as: stableair report runs -o report.html",
    "watch": f"{FOLDERS}, such as: stableair watch runs",
    "sweep": f"{SETTINGS}, such as: stableair sweep 'receiver=mac(C=1),none()' --seeds 3",
    "compare": f"{SETTINGS}, or folders of runs, such as: stableair compare 'receiver=mac(C=1),none()'",
    "search": "name at least one setting to search, such as: stableair search digits receiver.C=0.01:10:log",
}


def with_flag(error: StableairError) -> str:
    """Return the error message, with command-line advice in place of the advice for Python."""
    flag = FLAGS.get(error.hint) or (_missing_arguments(error) if error.hint == "argument" else "")
    return f"{error.message}; {flag}" if flag else str(error)


def _missing_arguments(error: StableairError) -> str:
    """Return the advice to add the missing arguments of a component, such as `receiver.C=VALUE`; "" if it is nested."""
    setting = next((name for name in COMPONENT_SETTINGS if registry(name).kind == error.fields["kind"]), "")
    if not setting or not error.fields["value"].strip().isidentifier():  # mac(...), or a chain, is changed in its text
        return ""
    return "add " + " ".join(f"{setting}.{name}=VALUE" for name in error.fields["names"])


def advise_on_words(error: Any) -> str:
    """Return the message of typer's error about a command line; for missing words, with an example or their help."""
    if type(error).__name__ == "MissingParameter" and error.ctx and error.ctx.command.name in WORDS:
        return WORDS[error.ctx.command.name]
    if type(error).__name__ == "MissingParameter" and (help := getattr(error.param, "help", "")):
        return f"{error.format_message().rstrip('.')}: {help.rstrip('.')}"
    return re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message())  # typer and click both add it


def setting_for(error: Any, words: list[str]) -> str:
    """Return the message about an unknown option such as `--rounds 2` or `-rounds 2` that must be written as a setting.

    The result is "" if the option is not the name of a setting, or if the command takes no settings.

    Args:
        error: typer's error about an unknown option.
        words: The words of the command line.
    """
    option = _whole_option(getattr(error, "option_name", ""), words)
    name = option.lstrip("-").replace("-", "_")
    if not name or not error.ctx or all(one.name != "words" for one in error.ctx.command.params):
        return ""
    options = [str(one.name) for one in error.ctx.command.params]
    if name in options:
        return f"{option} is not an option: write --{name.replace('_', '-')}"
    keys = [name] if name.partition(".")[0] in TYPES else dotted_keys(name)
    if not keys:  # a misspelt setting, unless an option of the command is closer
        keys = [one for one in get_close_matches(name, [*options, *TYPES], n=1, cutoff=0.7) if one not in options]
    values = " or ".join(f"{key}={_value_of(option, words)}" for key in keys)
    return f"{option} is a setting: write {values}" if keys else ""


def _whole_option(option: str, words: list[str]) -> str:
    """Return the word of an unknown option: typer reads `-rounds` as `-r -o -u ...` and names only `-r`."""
    if len(option) != 2:
        return option
    return next((word.partition("=")[0] for word in words if word.startswith(option)), option)


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
