"""The radio channel: fading, interference, transmit power, and how they make Eq. (3). Drawn first, applied after."""

from stableair.channels import fading, flat, noise, power

__all__ = ["fading", "flat", "noise", "power"]
