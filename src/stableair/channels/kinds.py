"""The kinds of component that a channel is made of, and what each returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stableair.checks import InputError
from stableair.contracts import Channel
from stableair.spec import Registry
from stableair.streams import Generator

Fading = Callable[[int, Generator], Tensor]  # (n, source) -> (n,) float64, amplitudes; a `Law` where more is known
Noise = Callable[[int, Generator], Tensor]  # (d, source) -> (d,) float32
Make = Callable[..., Channel]  # (fading, noise, power, pilots, norms, divisor) -> the channel


@dataclass(frozen=True)
class Law:
    """A fading of whose law something is known; it is called as any other."""

    draw: Callable[[int, Generator], Tensor]
    inverse: Callable[[float], float] | None = None  # t -> E[1/h^2; h^2 >= t] in closed form, inf where it diverges
    gaussian: bool = False  # whether with a uniform phase it is complex Gaussian, so that a mixture of two is like one
    entries: int | None = None  # entries of the vector for which an amplitude holds; None for all of them

    def __call__(self, n: int, source: Generator) -> Tensor:
        return self.draw(n, source)

    def along(self, first: float, d: int, source: Generator) -> Tensor:
        """One client's amplitude at each of d entries, given its first and a stream of its own: (d,)."""
        length = self.entries or d
        later = self.draw(-(-d // length) - 1, source)
        return torch.cat([later.new_tensor([first]), later]).repeat_interleave(length)[:d]


fading = Registry("fading", "fadings")
noise = Registry("noise", "noises")
power = Registry("power", "powers")
channel = Registry("channel", "channels")

# Parts of a channel, named in its own spec.
basis = Registry("basis", "bases")
quantizer = Registry("quantizer", "quantizers")
aggregator = Registry("aggregator", "aggregators")

Part = TypeVar("Part")


def inner(registry: Registry, text: str, but: tuple[str, ...] = ()) -> Any:
    """The component that a spec within a spec stands for, made; those named in `but` cannot be within another."""
    call = registry.one(text)
    if call.entry.name in but:
        raise InputError(
            f"{call.entry.name} cannot stand within another {registry.kind}; give one without a memory of its own"
        )
    return call()


def part(registry: Registry, text: str, kind: type[Part]) -> Part:
    """The component that a spec within a spec stands for, which must be of its kind."""
    made = inner(registry, text)
    if not isinstance(made, kind):
        raise InputError(f"{registry.kind} {text} must return {kind.__name__}: got {type(made).__name__}")
    return made
