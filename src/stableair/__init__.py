"""Federated learning over the air under heavy-tailed interference. `import stableair as sa`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same for editors and type checkers
    from stableair import models as models
    from stableair import nn as nn
    from stableair import stable as stable
    from stableair import streams as streams
    from stableair import theory as theory
    from stableair.algorithm import Simulation as Simulation
    from stableair.algorithm import simulate as simulate
    from stableair.builder import build as build
    from stableair.channels.kinds import aggregator as aggregator
    from stableair.channels.kinds import basis as basis
    from stableair.channels.kinds import channel as channel
    from stableair.channels.kinds import fading as fading
    from stableair.channels.kinds import noise as noise
    from stableair.channels.kinds import power as power
    from stableair.channels.kinds import quantizer as quantizer
    from stableair.checks import InputError as InputError
    from stableair.comparisons import compare as compare
    from stableair.contracts import Receiver as Receiver
    from stableair.contracts import Rule as Rule
    from stableair.contracts import Update as Update
    from stableair.data.partitions import partition as partition
    from stableair.data.sets import dataset as dataset
    from stableair.engine import accelerate as accelerate
    from stableair.experiment import Experiment as Experiment
    from stableair.models import model as model
    from stableair.paper.figures import figure as figure
    from stableair.participants import participation as participation
    from stableair.receivers.compose import blockwise as blockwise
    from stableair.receivers.compose import chain as chain
    from stableair.receivers.medians import median as median
    from stableair.receivers.rules import blank as blank
    from stableair.receivers.rules import cauchy as cauchy
    from stableair.receivers.rules import clip as clip
    from stableair.receivers.rules import gnc as gnc
    from stableair.receivers.rules import mac as mac
    from stableair.receivers.rules import none as none
    from stableair.receivers.rules import quantile_clip as quantile_clip
    from stableair.receivers.rules import receiver as receiver
    from stableair.receivers.rules import sign as sign
    from stableair.receivers.rules import tanh_clip as tanh_clip
    from stableair.results.folder import Circumstances as Circumstances
    from stableair.results.folder import recorded as recorded
    from stableair.results.folder import resume_point as resume_point
    from stableair.results.plot import plot as plot
    from stableair.results.report import report as report
    from stableair.results.run import Run as Run
    from stableair.results.run import load as load
    from stableair.runner import run as run
    from stableair.searches import search as search
    from stableair.servers import server as server
    from stableair.spec import load_plugin as load_plugin
    from stableair.sweeps.processes import sweep as sweep

__version__ = "0.2.0"

# Where each public name lives; it is loaded when it is asked for, so that `import stableair` takes no time.
_HOME = {
    "Experiment": "experiment", "InputError": "checks", "load_plugin": "spec",
    "build": "builder", "Simulation": "algorithm", "simulate": "algorithm", "accelerate": "engine",
    "run": "runner", "Run": "results.run", "load": "results.run", "search": "searches",
    "sweep": "sweeps.processes", "compare": "comparisons",
    "recorded": "results.folder", "resume_point": "results.folder", "Circumstances": "results.folder",
    "figure": "paper.figures", "plot": "results.plot", "report": "results.report",
    "Rule": "contracts", "Receiver": "contracts", "Update": "contracts",
    "median": "receivers.medians", "chain": "receivers.compose", "blockwise": "receivers.compose",
    "mac": "receivers.rules", "gnc": "receivers.rules", "clip": "receivers.rules", "none": "receivers.rules",
    "cauchy": "receivers.rules", "blank": "receivers.rules", "sign": "receivers.rules",
    "quantile_clip": "receivers.rules", "tanh_clip": "receivers.rules",
    "receiver": "receivers.rules", "server": "servers", "model": "models", "dataset": "data.sets",
    "partition": "data.partitions", "participation": "participants",
    "basis": "channels.kinds", "quantizer": "channels.kinds", "aggregator": "channels.kinds",
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
