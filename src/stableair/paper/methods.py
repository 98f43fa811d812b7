"""The four methods that the paper compares: everything else about an experiment is the same for all of them."""

from collections.abc import Callable
from typing import NamedTuple

from stableair.experiment import IDEAL, Experiment


class Method(NamedTuple):
    """What makes an experiment one of the four."""

    label: str
    settings: dict[str, str]  # with {} where its threshold stands
    threshold: str = ""  # the argument of its receiver that has to be found

    @property
    def receiver(self) -> str:
        return self.settings["receiver"]

    @property
    def key(self) -> str:
        """The setting that its threshold is: receiver.C."""
        return f"receiver.{self.threshold}"


METHODS = {
    "ideal": Method("ideal", IDEAL),
    "mac": Method("MAC", {"receiver": "mac(C={})"}, "C"),
    "gnc": Method("GNC", {"receiver": "gnc(max_norm={})"}, "max_norm"),
    "noisy": Method("noisy", {"receiver": "none()"}),
}
LABELS = {name: method.label for name, method in METHODS.items()}


def experiments(base: Experiment, tuned: Callable[[str], Experiment]) -> dict[str, Experiment]:
    """An experiment for each method; `tuned(method)` is that of one whose threshold has to be found.

    >>> found = experiments(Experiment(), lambda name: Experiment(receiver=METHODS[name].receiver.format(7)))
    >>> [experiment.receiver for experiment in found.values()]
    ['none()', 'mac(C=7)', 'gnc(max_norm=7)', 'none()']
    """
    return {
        name: tuned(name) if method.threshold else base.with_(**method.settings) for name, method in METHODS.items()
    }
