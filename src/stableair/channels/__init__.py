"""The radio channel: fading, interference, transmit power, and how they make Eq. (3). Drawn first, applied after."""

from stableair.channels import bases, digital, fading, flat, noise, power, waveform

__all__ = ["bases", "digital", "fading", "flat", "noise", "power", "waveform"]
