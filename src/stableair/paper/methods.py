"""The four methods that the paper compares; all other settings of their experiments are equal."""

from collections.abc import Callable
from typing import NamedTuple

from stableair.errors import InputError
from stableair.experiment import IDEAL, Experiment


class Method(NamedTuple):
    """The settings that define a method."""

    label: str
    settings: dict[str, str]  # {} is replaced by the threshold
    threshold: str = ""  # the argument of the receiver to search; empty: none

    @property
    def receiver(self) -> str:
        return self.settings["receiver"]

    @property
    def key(self) -> str:
        """The dotted key of the threshold, such as "receiver.C"."""
        return f"receiver.{self.threshold}"


METHODS = {
    "ideal": Method("ideal", IDEAL),
    "mac": Method("MAC", {"receiver": "mac(C={})"}, "C"),
    "gnc": Method("GNC", {"receiver": "gnc(max_norm={})"}, "max_norm"),
    "noisy": Method("noisy", {"receiver": "none()"}),
}
LABELS = {name: method.label for name, method in METHODS.items()}


def method_of(experiment: Experiment) -> str:
    """Return the name of the first method whose components an experiment has, with any threshold.

    >>> method_of(Experiment(receiver="gnc(max_norm=7)"))
    'gnc'
    """
    for name, method in METHODS.items():
        components = {setting: spec.partition("(")[0] for setting, spec in method.settings.items()}
        if all(experiment.calls(setting)[0].name == component for setting, component in components.items()):
            return name
    text = f"receiver={experiment.receiver} is not one of the paper's methods: {', '.join(METHODS)}"
    raise InputError(text, code="unknown-method", value=experiment.receiver, allowed=list(METHODS))


def experiments(base: Experiment, tune: Callable[[str], Experiment]) -> dict[str, Experiment]:
    """Return the experiment of each method, by name.

    Args:
        base: The settings that all methods share.
        tune: Returns the experiment of a method that has a threshold.

    >>> seven = experiments(Experiment(), lambda name: Experiment(receiver=METHODS[name].receiver.format(7)))
    >>> [experiment.receiver for experiment in seven.values()]
    ['none()', 'mac(C=7)', 'gnc(max_norm=7)', 'none()']
    """
    return {name: tune(name) if method.threshold else base.with_(**method.settings) for name, method in METHODS.items()}
