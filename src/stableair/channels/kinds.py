"""The kinds of component that a channel is made of, and what each returns."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from stableair.checks import InputError
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

# Parts of a channel, named in its own spec.
basis = Registry("basis", "bases")
quantizer = Registry("quantizer", "quantizers")
aggregator = Registry("aggregator", "aggregators")

Part = TypeVar("Part")


def part(registry: Registry, text: str, kind: type[Part]) -> Part:
    """What the spec within a spec stands for, which must be of its kind."""
    made = registry.one(text)()
    if not isinstance(made, kind):
        raise InputError(f"{registry.kind} {text} must return {kind.__name__}: got {type(made).__name__}")
    return made
