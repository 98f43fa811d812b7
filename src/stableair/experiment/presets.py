"""Named sets of settings: the paper's set-ups, and set-ups on the embedded data."""

from typing import Any

from stableair.experiment.experiment import Experiment
from stableair.validation import choice

IDEAL = {"fading": "unit()", "noise": "none()", "receiver": "none()"}  # the paper's upper bound
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits"},
    "digits-noniid": {"partition": "dirichlet(beta=0.3)"},
    "demo": {"rounds": 60, "noise": "sas(alpha=1.5, tau=0.5)"},
    # The paper's set-ups. The paper gives no threshold: C = 1.3 tau is this project's choice.
    "cifar10": {"data": "cifar10", "receiver": "mac(C=0.13)", "norm_stats": "recalibrated"},
    "cifar10-noniid": {
        "data": "cifar10", "partition": "dirichlet(beta=0.3)", "receiver": "mac(C=0.13)", "norm_stats": "recalibrated",
    },
    "cifar100": {"data": "cifar100", "receiver": "mac(C=0.13)", "norm_stats": "recalibrated"},
    "femnist": {"data": "femnist", "partition": "by_writer()", "receiver": "mac(C=0.13)"},
}  # fmt: skip


def preset(name: str) -> Experiment:
    """Return the experiment of a preset; `stableair list presets` shows all presets.

    Args:
        name: Name of a preset, such as "cifar10".

    Returns:
        The experiment; its `with_` changes settings.

    Raises:
        InputError: There is no such preset (`unknown-value`).

    >>> preset("digits-noniid").with_(rounds=5)
    Experiment(partition='dirichlet(beta=0.3)', rounds=5)
    """
    return Experiment(**PRESETS[choice("preset", name, PRESETS)])
