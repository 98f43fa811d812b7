"""The radio channel, Eq. (3): fading, interference, transmit power, superposition. Draw first, apply after."""

from stableair.channels import aggregators, digital, fading, flat, modulation, noise, power, waveform

__all__ = ["aggregators", "digital", "fading", "flat", "modulation", "noise", "power", "waveform"]
