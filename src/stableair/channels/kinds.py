"""The four kinds of component that a channel is made of, and what each returns."""

from collections.abc import Callable

from torch import Tensor

from stableair.contracts import Channel
from stableair.spec import Registry
from stableair.streams import Generator

Fading = Callable[[int, Generator], Tensor]  # (n, source) -> (n,) float64, amplitudes
Noise = Callable[[int, Generator], Tensor]  # (d, source) -> (d,) float32
Make = Callable[..., Channel]  # (fading, noise, power, pilots, norms, divisor) -> the channel

fading = Registry("fading", "fadings")
noise = Registry("noise", "noises")
power = Registry("power", "powers")
channel = Registry("channel", "channels")
