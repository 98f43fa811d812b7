"""The names of all settings, their Python types, and the registry of each component setting."""

from collections.abc import Iterable
from importlib import import_module

from stableair.errors import InputError
from stableair.experiment.baseline import BASELINE_SETTINGS
from stableair.spec import Registry
from stableair.validation import suggest

TYPES: dict[str, type] = {name: type(value) for name, value in BASELINE_SETTINGS.items()}
EXECUTION = "rounds", "device", "engine", "precision", "chunk"  # how a run is computed: not part of the id

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

    >>> registry("noise").one("sas(tau=0.2)").arguments
    {'tau': 0.2}
    """
    module, name = (COMPONENT_SETTINGS | NESTED_COMPONENTS)[kind]
    components = getattr(import_module(module), name)
    assert isinstance(components, Registry)
    return components


def check_known(names: Iterable[str], *others: str) -> None:
    """Refuse names that are neither a setting nor one of `others`.

    Raises:
        InputError: A name is unknown (`unknown-setting`).
    """
    allowed = [*TYPES, *others]
    for name in names:
        if name not in allowed:
            text = f"setting {name!r} is unknown; {suggest(name, allowed)}"
            raise InputError(text, code="unknown-setting", name=name, allowed=allowed)
