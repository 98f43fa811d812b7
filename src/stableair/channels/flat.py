"""Eq. (3), the radio channel: g_k = (1/N) sum_n h_{n,k} grad f_n(w_k) + xi_k."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stableair.channels.fading import amplitudes_along
from stableair.channels.power import Power
from stableair.channels.registries import channel
from stableair.channels.superposition import NOISE_ON, WholeVector, accumulate, amplitudes, finish, fit_power
from stableair.contracts import (
    Accumulated,
    ChannelFactory,
    Fading,
    FadingLaw,
    FlatDraw,
    Gain,
    Noise,
    PowerRule,
    Received,
    Reduction,
    Transmission,
    Upload,
)
from stableair.errors import InputError
from stableair.memory import unchanged
from stableair.streams import generator
from stableair.validation import choice
from stableair.vector import NOTHING, Layout, check_shape


@dataclass(frozen=True)
class Flat:
    """Analog over-the-air aggregation with flat fading and additive interference.

    From the payloads u_n (d,) of the senders, their gains h_n and the interference xi (d,), the server receives
    g = (1/N) sum_n h_n u_n + xi (d,), or with noise_on="sum" g = (1/N) (sum_n h_n u_n + xi). N is the number of
    senders, or the divisor. The side link has neither fading nor interference: stats (b,) and the loss () are plain
    means. Without senders, g is the interference alone. A complex gain of a power rule multiplies the complex symbols
    u_2i + j u_2i+1.

    Args:
        fading: Amplitudes of the clients.
        noise: The interference.
        power: Transmit power rule.
        pilots: Noise-only symbols per round.
        norms: Layout of the norm buffers on the side link.
        divisor: Divisor of the sum; None for the number of senders.
        noise_on: "mean" adds the interference to the mean, as in Eq. (3); "sum" adds it to the sum.
        reduction: Distribution of the sum over processes. A subclass that overrides `superpose` must apply it.

    Raises:
        InputError: The power rule needs the interference on the sum ("noise-not-on-sum"), or does not support the
            fading ("unsupported-fading", "unbounded-power").
    """

    fading: Fading
    noise: Noise
    power: PowerRule = field(default_factory=Power)
    pilots: int = 0
    norms: Layout = NOTHING
    divisor: float | None = None
    noise_on: str = "mean"
    reduction: Reduction = field(default_factory=WholeVector)

    def __post_init__(self) -> None:
        object.__setattr__(self, "power", fit_power(self.power, self.fading, self.noise_on, "flat"))
        if self._block_fading() and self.power.adapts_to_fading:
            text = (
                "the power rule adapts to the fading, which changes along the vector: choose power=limit or none, or "
            )
            raise InputError(f"{text}leave out entries=... of the fading", code="unsupported-fading", setting="fading")

    def with_reduction(self, reduction: Reduction) -> "Flat":
        """Return the same channel, with the sums distributed over processes.

        Args:
            reduction: The distribution of the sums.

        Returns:
            The channel; its `superpose` expects uploads that hold this process's slice.
        """
        return replace(self, reduction=reduction)

    def draw(self, n: int, clients: Tensor, d: int, seed: int, k: int, device: torch.device | str = "cpu") -> FlatDraw:
        """Draw h_{n,k} (m,) of the participants `clients` (m,), and xi_k (d,).

        The channel draws the amplitudes of all n clients and then selects the participants: a client's amplitude is a
        function of (seed, k, client), independent of the other participants.

        Args:
            n: Number of all clients.
            clients: The participants, (m,).
            d: Entries of a payload.
            seed: Seed of the experiment.
            k: The round.
            device: Device of the interference.

        Returns:
            The draw, a function of (seed, k).

        Raises:
            InputError: A component breaks its contract ("wrong-shape", "wrong-dtype", "changed-in-place").
        """
        h = amplitudes(self.fading, n, seed, k)
        xi = self._noise(d, "noise", seed, k, device)
        with unchanged("noise", xi):  # a noise may reuse the tensor that it returned
            pilot = self._noise(self.pilots, "pilot", seed, k, device) if self.pilots else None
        with unchanged("power", h, clients):
            transmissions = self.power.transmissions(h, clients, seed, k)
        if law := self._block_fading():
            transmissions = {
                client: Transmission(_gain_along(law, h[client].item(), seed, k, client), sent.energy)
                for client, sent in transmissions.items()
            }
        return FlatDraw(k, clients, h[clients], xi, pilot, transmissions)

    def _noise(self, entries: int, stream: str, seed: int, k: int, device: torch.device | str) -> Tensor:
        """Draw interference from a stream of round k: (entries,) float32."""
        drawn = self.noise(entries, generator(seed, stream, k, device=device))
        return check_shape("noise", drawn, entries).float()

    def _block_fading(self) -> FadingLaw | None:
        """Return the fading if it changes along the vector."""
        return self.fading if isinstance(self.fading, FadingLaw) and self.fading.block_length else None

    def superpose(self, uploads: Iterable[Upload], draw: FlatDraw) -> Received:
        """Apply Eq. (3): chunks of (m, d) payloads -> g (d,).

        Args:
            uploads: Chunks of uploads with payloads (m, d). The result does not depend on the size of the chunks.
            draw: The random state of the round.

        Returns:
            The received sum g (d,), the noise-free reference, and the resources of the round.

        Raises:
            InputError: The interference or a gain is NaN ("nan-in-channel").
            NonFiniteUpload: An upload is not finite.
        """
        d = len(draw.xi)
        total = self.reduce(self.accumulate(uploads, draw), d)
        symbols = (d + 1) // 2 + (self.pilots + 1) // 2  # a zero completes an odd number of entries
        return finish(self, total, draw, symbols)

    def accumulate(self, uploads: Iterable[Upload], draw: FlatDraw) -> Accumulated:
        """Compute sum_n h_n u_n and sum_n u_n over this process's slice of the vector, in float64."""
        transmissions = draw.transmissions
        if transmissions is None:
            transmissions = dict(zip(draw.clients.tolist(), map(Transmission, draw.h.tolist()), strict=True))
        d = len(draw.xi)
        return accumulate(uploads, transmissions, d, draw.k, draw.xi.device, self.reduction.slice(d))

    def reduce(self, total: Accumulated, d: int) -> Accumulated:
        """Assemble the sums over the whole vector from the slices of all processes."""
        faded, clean = self.reduction.assemble(total.faded, total.clean, d=d)
        return total._replace(faded=faded, clean=clean)


def _gain_along(law: FadingLaw, first: float, seed: int, k: int, client: int) -> Gain:
    """Return the gains of a client whose fading changes along the vector."""

    def gain(d: int, device: torch.device) -> Tensor:
        return amplitudes_along(law, first, d, generator(seed, "fading", k, client, device=device))

    return gain


@channel("flat", uses=("fading", "noise", "power", "pilots"))
def flat(noise_on: Literal["mean", "sum"] = "mean") -> ChannelFactory:
    """Eq. (3): one amplitude per client and round, and interference on the mean of the payloads.

    Args:
        noise_on: "mean" for g = (1/N) sum_n h_n u_n + xi; "sum" for g = (1/N) (sum_n h_n u_n + xi), which power rules
            with a power limit require.

    Returns:
        A factory of the channel.

    Raises:
        InputError: `noise_on` is unknown ("unknown-value").

    >>> flat()(fading=lambda n, source: torch.ones(n), noise=lambda d, source: torch.zeros(d)).noise_on
    'mean'
    """
    return partial(Flat, noise_on=choice("noise_on", noise_on, NOISE_ON))
