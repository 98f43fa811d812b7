"""The workloads of `stableair bench`: experiments by name, and a network with layers of many kinds."""

from typing import Any

from torch import nn

from stableair.experiment import IDEAL, Experiment, preset
from stableair.objects import as_settings


def grouped_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network as users write them: grouped convolutions, group norm and SiLU.

    >>> sum(p.numel() for p in grouped_cnn((3, 32, 32), 10).parameters())
    60938
    """
    widths, groups = (shape[0], 64, 128, 256), (1, 4, 8)
    layers: list[nn.Module] = []
    for i, (channels, out, share) in enumerate(zip(widths, widths[1:], groups, strict=False)):
        convolution = nn.Conv2d(channels, out, 3, stride=1 if i == 0 else 2, padding=1, groups=share)
        layers += [convolution, nn.GroupNorm(8, out), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


PLUGIN, OBJECTS = as_settings(model=grouped_cnn)  # the setting, and the object for `spec.passed_objects`
IMAGES = "synthetic(samples=5000, shape=(3, 32, 32))"
SET_UPS: dict[str, dict[str, Any]] = {
    "digits": {},
    "cnn": {
        "data": "synthetic(samples=1000, shape=(1, 28, 28), classes=62)",
        "model": "cnn()",
        "clients": 10,
    },
    "resnet18": {"data": IMAGES, "model": "resnet18()", "local_epochs": 3},
    "resnet18-group": {"data": IMAGES, "model": "resnet18(norm=group)", "local_epochs": 3},
    "resnet34": {
        "data": "synthetic(samples=5000, shape=(3, 32, 32), classes=100)",
        "model": "resnet34()",
        "local_epochs": 3,
    },
    "plugin": {"data": IMAGES, "local_epochs": 3} | PLUGIN,
}
WORKLOADS = {name: Experiment(**IDEAL | settings) for name, settings in SET_UPS.items()}
# The paper's set-ups with its channel; they need the data sets.
WORKLOADS["cifar10"] = preset("cifar10-noniid")
WORKLOADS["femnist"] = preset("femnist")
