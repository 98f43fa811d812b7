"""The names of all settings, their Python types, and the registry of each component setting."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from stableair.errors import InputError
from stableair.experiment.baseline import BASELINE_SETTINGS
from stableair.spec import Registry, format_value, parse_unchecked
from stableair.validation import suggest

TYPES: dict[str, type] = {name: type(value) for name, value in BASELINE_SETTINGS.items()}
EXECUTION = "rounds", "device", "engine", "precision", "chunk"  # settings that are not part of the id

# The module and name of the registry of each component setting. A module is imported when its registry is first used.
COMPONENT_SETTINGS = {
    "data": ("stableair.data.datasets", "dataset"),
    "partition": ("stableair.data.partitions", "partition"),
    "model": ("stableair.models", "model"),
    "local": ("stableair.training.local_rules", "local"),
    "lr_decay": ("stableair.schedules", "lr_decay"),
    "participation": ("stableair.participants", "participation"),
    "power": ("stableair.channels.registries", "power"),
    "channel": ("stableair.channels.registries", "channel"),
    "fading": ("stableair.channels.registries", "fading"),
    "noise": ("stableair.channels.registries", "noise"),
    "receiver": ("stableair.receivers.rules", "receiver"),
    "server": ("stableair.servers", "server"),
}
# Likewise for the components that appear only as an argument of another component.
NESTED_COMPONENTS = {
    "basis": ("stableair.channels.registries", "basis"),
    "quantizer": ("stableair.channels.registries", "quantizer"),
    "aggregator": ("stableair.channels.registries", "aggregator"),
}


def registry(kind: str) -> Registry:
    """Return the registry of a component setting or of a nested component.

    Args:
        kind: Name of a component setting such as "noise", or of a nested component such as "basis".

    >>> registry("noise").one("sas(tau=0.2)").arguments
    {'tau': 0.2}
    """
    module, name = (COMPONENT_SETTINGS | NESTED_COMPONENTS)[kind]
    components = getattr(import_module(module), name)
    assert isinstance(components, Registry)
    return components


def check_known(settings: Mapping[str, Any], *others: str) -> None:
    """Refuse names that are neither a setting nor one of `others`.

    Args:
        settings: Values by name; the values are only used in the suggestion.
        *others: Further allowed names.

    Raises:
        InputError: A name is unknown (`unknown-setting`).
    """
    allowed = [*TYPES, *others]
    for name, value in settings.items():
        if name not in allowed:
            keys = [f"{key}={value if isinstance(value, str) else format_value(value)}" for key in dotted_keys(name)]
            advice = f"did you mean {' or '.join(keys)}?" if keys else suggest(name, allowed)
            text = f"setting {name!r} is unknown; {advice}"
            raise InputError(text, code="unknown-setting", name=name, allowed=allowed)


def dotted_keys(argument: str) -> list[str]:
    """Return the dotted keys that set an argument of a default component, or else of any component.

    >>> dotted_keys("tau"), dotted_keys("max_norm"), dotted_keys("clients")
    (['noise.tau'], ['receiver.max_norm'], [])
    """
    default = {name: str(BASELINE_SETTINGS[name]).partition("(")[0] for name in COMPONENT_SETTINGS}
    accepting = {
        name: [one.name for one in registry(name) if argument in one.parameters] for name in COMPONENT_SETTINGS
    }
    by_default = [name for name, components in accepting.items() if default[name] in components]
    return [f"{name}.{argument}" for name in by_default or [name for name, one in accepting.items() if one]]


def takes_argument(setting: str, text: Any, argument: str) -> bool:
    """Whether a component of a spec accepts an argument; the spec may be incomplete.

    >>> takes_argument("receiver", "mac | sign", "C"), takes_argument("receiver", "none()", "C")
    (True, False)
    """
    if setting not in COMPONENT_SETTINGS or not isinstance(text, str):
        return False
    try:
        names = [name for name, _ in parse_unchecked(setting, text)]
    except InputError:  # such as positional arguments
        names = [text.partition("(")[0].strip()]
    return any(argument in one.parameters or one.open for one in registry(setting) if one.name in names)
