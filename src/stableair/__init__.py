"""Federated learning over the air under heavy-tailed interference. `import stableair as sa`."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

# Where each public name lives; it is loaded when it is asked for, so that `import stableair` takes no time.
_HOME = {
    "Experiment": "experiment", "InputError": "checks", "load_plugin": "spec",
    "build": "builder", "Simulation": "algorithm", "simulate": "algorithm", "accelerate": "engine",
    "run": "runner", "Run": "results.run", "load": "results.run", "recorded": "results.folder", "search": "searches",
    "figure": "paper.figures", "plot": "results.plot", "report": "results.report",
    "Rule": "contracts", "Receiver": "contracts", "Update": "contracts",
    "median": "receivers.medians", "chain": "receivers.compose", "blockwise": "receivers.compose",
    "mac": "receivers.rules", "gnc": "receivers.rules", "clip": "receivers.rules", "none": "receivers.rules",
    "cauchy": "receivers.rules", "blank": "receivers.rules", "sign": "receivers.rules",
    "quantile_clip": "receivers.rules", "tanh_clip": "receivers.rules",
    "receiver": "receivers.rules", "server": "servers", "model": "models", "dataset": "data.sets",
    "partition": "data.partitions", "participation": "participants",
    "channel": "channels.kinds", "fading": "channels.kinds", "noise": "channels.kinds", "power": "channels.kinds",
}  # fmt: skip
_MODULES = "models", "nn", "stable", "streams", "theory"
__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"stableair.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"stableair.{name}")
    from stableair.spec import moved_to

    raise AttributeError(f"module 'stableair' has no attribute {name!r}{moved_to(name)}")


def __dir__() -> list[str]:
    return sorted(__all__)
