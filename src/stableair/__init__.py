"""Federated learning over the air under heavy-tailed interference. `import stableair as sa`."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "mac": "receiver", "gnc": "receiver", "clip": "receiver", "none": "receiver", "chain": "receiver",
    "blockwise": "receiver", "Experiment": "experiment", "build": "experiment",
    "run": "record", "load": "record", "dataset": "data", "model": "models", "fading": "channel", "noise": "channel",
    "InputError": "checks", "load_plugin": "spec",
}  # fmt: skip
_MODULES = ("receiver", "partition", "server", "stable", "streams", "theory")  # the first three are decorators too

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: `stableair --help` needs no torch."""
    if name in _HOME:
        return getattr(import_module(f"stableair.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"stableair.{name}")
    raise AttributeError(f"module 'stableair' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
