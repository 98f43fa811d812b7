"""Named sets of settings: the paper's set-ups, and set-ups on the embedded data."""

from typing import Any

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
