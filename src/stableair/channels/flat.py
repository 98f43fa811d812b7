"""Eq. (3), the radio channel: g_k = (1/N) sum_n h_{n,k} grad f_n(w_k) + xi_k."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from stableair.channels.kinds import Fading, Law, Make, Noise, channel
from stableair.channels.power import Power
from stableair.channels.superposition import Total, accumulate, side_link
from stableair.checks import InputError, choice
from stableair.contracts import Fade, Received, Upload, check_shape
from stableair.streams import generator
from stableair.vector import NOTHING, Layout

NOISE_ON = "mean", "sum"


@dataclass(frozen=True)
class Flat:
    """Analog over-the-air aggregation with flat fading and additive interference.

    Given the payloads u_n (d,) of the senders, their gains h_n and the interference xi (d,), the server receives
    g = (1/N) sum_n h_n u_n + xi (d,), or with noise_on="sum" g = (1/N) (sum_n h_n u_n + xi). N is the number of clients
    that sent, or the divisor. The side link has neither fading nor interference: stats (b,) and the loss () are plain
    means. Where nobody sent, g is the interference alone.
    """

    fading: Fading
    noise: Noise
    power: Power = field(default_factory=Power)
    pilots: int = 0  # symbols a round in which no client sends
    norms: Layout = NOTHING  # of the norm buffers on the side link
    divisor: float | None = None  # of the sum, where it is not the number of clients that sent
    noise_on: str = "mean"  # the interference hits the mean, as in Eq. (3), or the sum, and is then divided by N too

    def __post_init__(self) -> None:
        if self.power.on_sum and self.noise_on != "sum":
            raise InputError(
                "this power rule needs the interference on the sum of the payloads: add channel='flat(noise_on=sum)'"
            )
        object.__setattr__(self, "power", self.power.under(self.fading))

    def draw(self, n: int, who: Tensor, d: int, seed: int, k: int, device: torch.device | str = "cpu") -> Fade:
        """h_{n,k} (m,) of the clients `who` (m,) and xi_k (d,), functions of (seed, k) and of the client alone.

        All n amplitudes are drawn and those of `who` taken: what a client meets does not depend on who else takes part.
        """
        h = check_shape("fading", self.fading(n, generator(seed, "fading", k)), n).double()
        xi = check_shape("noise", self.noise(d, generator(seed, "noise", k, device=device)), d).float()
        pilot = None
        if self.pilots:
            drawn = self.noise(self.pilots, generator(seed, "pilot", k, device=device))
            pilot = check_shape("noise", drawn, self.pilots).float()
        gains = self.power.gains(h, who, seed, k)
        if isinstance(self.fading, Law) and self.fading.entries:
            gains = {client: partial(self._along, self.fading, h[client].item(), seed, k, client) for client in gains}
        return Fade(k, who, h[who], xi, pilot, gains)

    def _along(self, law: Law, first: float, seed: int, k: int, client: int, d: int, device: torch.device) -> Tensor:
        """The gains of a client whose fading changes along the vector: (d,)."""
        return self.power.gain(law.along(first, d, generator(seed, "fading", k, client, device=device)))

    def superpose(self, uploads: Iterable[Upload], fade: Fade) -> Received:
        """Eq. (3): accumulate, reduce, finish. Chunks of (m, d) payloads -> g (d,)."""
        return self.finish(self.reduce(self.accumulate(uploads, fade), fade), fade)

    def accumulate(self, uploads: Iterable[Upload], fade: Fade) -> Total:
        """sum_n h_n u_n (d,), sum_n u_n (d,) and their like, in float64."""
        gains = fade.gains
        if gains is None:
            gains = dict(zip(fade.clients.tolist(), fade.h.tolist(), strict=True))
        return accumulate(uploads, gains, len(fade.xi), fade.k, fade.xi.device)

    def reduce(self, total: Total, fade: Fade) -> Total:
        """The total over all processes; here there is one."""
        return total

    def finish(self, total: Total, fade: Fade) -> Received:
        """Divide by the number of senders or the divisor, add the interference, round to float32."""
        n = self.divisor or max(total.senders, 1)
        xi, pilot = (self._beside(noise, total) for noise in (fade.xi, fade.pilot))
        if self.noise_on == "sum":
            xi, pilot = xi / n, None if pilot is None else pilot / n
        g = (total.faded / n + xi).to(xi.dtype)  # Eq. (3)
        if g.isnan().any():
            part = "noise" if fade.xi.isnan().any() else "fading"
            text = "the channel's noise or fading is NaN; every entry must be a number or infinite"
            raise InputError(text, part=part)
        stats, loss = side_link(total, self.norms)
        uses = (len(g) + self.pilots) / 2  # two real entries a complex symbol
        return Received(g, stats, total.clean / n, loss, xi, total.senders, n, pilot, uses)

    def _beside(self, noise: Tensor | None, total: Total) -> Any:
        """The interference beside the payloads, as the power rule has it; pilots are scaled as it is."""
        if noise is None:
            return None
        return check_shape("power", self.power.noise(noise, total), len(noise)).to(noise.dtype)


@channel("flat")
def flat(noise_on: Literal["mean", "sum"] = "mean") -> Make:
    """Eq. (3): one amplitude a client and round, interference on the mean of the payloads, or with "sum" on their sum.

    >>> flat()(fading=lambda n, source: torch.ones(n), noise=lambda d, source: torch.zeros(d)).noise_on
    'mean'
    """
    return partial(Flat, noise_on=choice("noise_on", noise_on, NOISE_ON))
