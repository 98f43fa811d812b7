"""Transmit power rules: the link of each client, and the scale of the interference relative to the payloads.

P is the mean power per real dimension of the transmitted signal. Rules with a power limit require the interference on
the sum of the payloads.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stableair.channels.registries import power
from stableair.contracts import Fading, FadingLaw, Transmission
from stableair.errors import InputError
from stableair.streams import Generator, box_muller, generator
from stableair.validation import choice, number, positive
from stableair.vector import check_shape

PHASE_LAWS = "uniform", "gaussian"
DRAWS = 1_000_000  # for means without a closed form


class Power:
    """Base class of the power rules; the base class changes nothing.

        g = (1/N) (sum_n a_n u_n + noise_scale(max_n |u_n|, d) z)

    a_n are the gains of the clients that transmit, and z is the interference on the sum. A rule that only changes the
    amplitude of a client overrides `gain`.
    """

    needs_noise_on_sum = False  # whether the interference must be on the sum of the payloads, not on their mean

    @property
    def rotations(self) -> tuple[str, ...]:
        """Arguments of the rule that rotate a client's signal: "phase" by one angle, "cfo" along the vector."""
        return ()

    @property
    def adapts_to_fading(self) -> bool:
        """Whether a client's transmission depends on its fading: the rule overrides `gain` or `transmissions`."""
        return type(self).gain is not Power.gain or type(self).transmissions is not Power.transmissions

    def for_fading(self, fading: Fading) -> "Power":
        """Return the rule for this fading; raise InputError if the rule does not support it."""
        return self

    def transmissions(self, h: Tensor, clients: Tensor, seed: int, k: int) -> dict[int, Transmission]:
        """Links of the clients that transmit in round k.

        In the base class every client has the gain gain(h). Its energy per energy of the payload is (gain(h) / h)^2.

        Args:
            h: Amplitudes of all n clients, (n,).
            clients: The participants, (m,).
            seed: Seed of the experiment.
            k: The round. A rule that draws random numbers draws them for all n clients.

        Returns:
            A link for each client that transmits; the others are not received.
        """
        amplitudes = h[clients]
        gains = check_shape("power", self.gain(amplitudes), len(clients))
        energies = torch.where(gains == amplitudes, 1.0, gains / amplitudes) ** 2
        return dict(zip(clients.tolist(), map(Transmission, gains.tolist(), energies.tolist()), strict=True))

    def gain(self, h: Tensor) -> Tensor:
        """Effective gain of a client, given its amplitude: (m,) -> (m,)."""
        return h

    def noise_scale(self, max_norm: float, d: int) -> float:
        """Scale of the interference relative to the payloads: 1 / sqrt(p_k) if the clients multiply by sqrt(p_k).

        Args:
            max_norm: Largest norm of a transmitted payload; on a waveform sqrt(E / T) for its largest energy E, see
                `Waveform`. 0 if nothing was sent.
            d: Entries of a payload.

        Returns:
            The scale. With 0, the interference is left out.
        """
        return 1.0


@power("none")
def none() -> Power:
    """No power rule, as in the paper: payloads are transmitted without scaling.

    The scale of the interference does not depend on the payloads. A symbol of the digital channel has modulus 1.

    Returns:
        The rule.

    >>> none().gain(Tensor([0.5, 2.0])).tolist()
    [0.5, 2.0]
    """
    return Power()


@dataclass(frozen=True)
class Limit(Power):
    """All clients multiply by one factor sqrt(p_k), and the server divides by it; see `limit`."""

    P: float
    needs_noise_on_sum = True

    def noise_scale(self, max_norm: float, d: int) -> float:
        """max_n |u_n| / sqrt(P d)."""
        return max_norm / math.sqrt(self.P * d)


@power("limit")
def limit(P: float) -> Power:
    """Power limit: one factor scales all payloads so that the largest is transmitted with mean power P.

        p_k = P d / max_n |u_n|^2,    g = (1/N) sum_n h_n u_n + z / (N sqrt(p_k))

    z is the interference on the sum. This is COTAF (Sery, Shlezinger, Cohen and Eldar, 2021, arXiv 2009.12787). Analog
    channels need noise_on=sum. A symbol of the digital channel has the power 2 P.

    On channel waveform, E_n / T replaces |u_n|^2. E_n is the energy of the modulated and precoded payload, and T is the
    units of time per complex symbol: 1 + prefix / n for OFDM, 1 for pulses and Hadamard codes. The largest signal then
    has the energy P d T, because the prefix is transmitted with the same power.

    Args:
        P: Mean power of the largest signal per real dimension, which is per entry without a prefix.

    Returns:
        The rule.

    Raises:
        InputError: P is not positive ("out-of-range").

    >>> from stableair.channels.flat import flat
    >>> from stableair.contracts import FlatDraw, Upload
    >>> channel = flat(noise_on="sum")(fading=None, noise=None, power=limit(P=4))
    >>> draw = FlatDraw(0, torch.arange(2), torch.ones(2), torch.tensor([1.0, 0.0]))
    >>> sent = Upload(draw.clients, torch.tensor([[6.0, 0.0], [0.0, 8.0]]), torch.zeros(2, 0), torch.zeros(2))
    >>> channel.superpose([sent], draw).g.tolist()  # p = 4 x 2 / 64, and 3 + 1 / (2 sqrt(p)) is 3 + sqrt(2)
    [4.41421365737915, 4.0]
    """
    return Limit(positive("P", P))


@dataclass(frozen=True)
class Inversion(Power):
    """Each client divides its payload by its estimate of its channel; see `inversion`."""

    P: float
    threshold: float
    csi: float
    phase: float
    phase_law: str
    cfo: float
    fading: Fading | None = None
    mean_inverse_square: float = math.nan  # E[1/h_hat^2; h_hat^2 >= threshold] of this fading
    needs_noise_on_sum = True

    @property
    def rotations(self) -> tuple[str, ...]:
        return tuple(name for name in ("phase", "cfo") if getattr(self, name))

    def for_fading(self, fading: Fading) -> "Inversion":
        if fading is self.fading:
            return self
        if isinstance(fading, FadingLaw) and fading.block_length:
            text = "inversion needs one amplitude per client and round, not one per block of entries"
            raise InputError(text, code="unsupported-fading")
        mean = mean_inverse_square(fading, self.threshold, self.csi)
        if not mean:
            smaller = 0.1 * mean_square(fading)
            text = (
                f"inversion: threshold={self.threshold:g} is larger than the power gain of every client with this "
                f"fading, so that no client would transmit: choose a smaller threshold, such as {smaller:.2g}"
            )
            raise InputError(text, code="no-senders", name="threshold", value=self.threshold)
        if math.isinf(mean):
            text = (
                f"inversion: threshold must be positive, such as 0.1: got {self.threshold:g}; with this fading, "
                "the estimate of a channel can be arbitrarily small, so that its inversion needs unbounded power"
            )
            raise InputError(text, code="unbounded-power", name="threshold", value=self.threshold)
        return replace(self, fading=fading, mean_inverse_square=mean)

    def transmissions(self, h: Tensor, clients: Tensor, seed: int, k: int) -> dict[int, Transmission]:
        """Links of the clients above the threshold: gains exp(j phi_n) h_n / h_hat_n, energies 1 / |h_hat_n|^2."""
        assert self.fading, "a channel calls for_fading first"
        source = partial(generator, seed)
        h_hat = estimate(h, self.fading, self.csi, source("csi", k), source("csi phase", k))
        u = source("inversion phase", k).uniform(len(h), 2)  # the stream "phase" belongs to the channel
        phase = self.phase * (2 * u[:, 0] - 1 if self.phase_law == "uniform" else box_muller(u))
        effective = torch.polar(torch.ones_like(h), phase) * h / h_hat
        offsets = self.cfo * (2 * source("cfo", k).uniform(len(h)) - 1)
        square = h_hat.abs() ** 2
        active = clients[(square >= self.threshold)[clients]]
        parts = zip(active.tolist(), *(x[active].tolist() for x in (effective, offsets, 1 / square)), strict=True)
        return {
            client: Transmission(partial(rotating_gain, gain, offset) if self.cfo else gain, energy)
            for client, gain, offset, energy in parts
        }

    def noise_scale(self, max_norm: float, d: int) -> float:
        """s_k / sqrt(rho) with s_k = max_n |u_n| / sqrt(d)."""
        return max_norm * math.sqrt(self.mean_inverse_square / (self.P * d))


def estimate(h: Tensor, fading: Fading, csi: float, errors: Generator, phases: Generator) -> Tensor:
    """h_hat = csi h + sqrt(1 - csi^2) e: (n,) -> (n,) complex, where h is real.

    e has the law of h. The phases of h and e are uniform and independent, so their difference is also uniform.
    """
    e = torch.polar(fading(len(h), errors), 2 * math.pi * phases.uniform(len(h)))
    return csi * h + math.sqrt(1 - csi * csi) * e


def mean_square(fading: Fading) -> float:
    """E h^2: in closed form if there is one, else the mean of 10^6 draws.

    >>> from stableair.channels.fading import rayleigh
    >>> round(mean_square(rayleigh(power=3)), 9)
    3.0
    """
    if isinstance(fading, FadingLaw) and fading.mean_square is not None:
        return fading.mean_square
    return fading(DRAWS, generator(0, "mean square", 0)).square().mean().item()


def mean_inverse_square(fading: Fading, threshold: float, csi: float = 1.0) -> float:
    """Compute E[1/h_hat^2; h_hat^2 >= threshold]: in closed form if there is one, else as the mean of 10^6 draws.

    Args:
        fading: Law of h and of the error e.
        threshold: Smallest h_hat^2 of a client that transmits.
        csi: Weight of h in h_hat, see `estimate`.

    Returns:
        The mean. It is infinite for a threshold of 0 if |h_hat| can be arbitrarily small, because the density of h_hat
        at 0 is positive then. |h_hat| has a positive lower bound if the supports of csi h and sqrt(1 - csi^2) e do not
        overlap. Without a declared support, an amplitude can be arbitrarily small.

    >>> from stableair.channels.fading import rayleigh
    >>> round(mean_inverse_square(rayleigh(power=1), threshold=0.1), 6)  # E_1(0.1)
    1.822924
    """
    law = fading if isinstance(fading, FadingLaw) else FadingLaw(fading)
    if law.mean_inverse_square and (law.complex_gaussian or csi in (0, 1)):
        return law.mean_inverse_square(threshold)
    low, high = law.support
    error = math.sqrt(1 - csi * csi)
    if low == high:
        return constant_mean_inverse_square(csi * low, error * low, threshold)
    smallest = max(a * low - (b * high if b else 0.0) for a, b in ((csi, error), (error, csi)))  # value of |h_hat|
    if threshold <= 0 and smallest <= 0:
        return math.inf
    h, errors, phases = (generator(0, f"inversion {what}", 0) for what in ("h", "csi", "csi phase"))
    amplitudes = fading(DRAWS, h).to(torch.float64, copy=True)  # a fading may reuse the tensor that it returned
    square = estimate(amplitudes, fading, csi, errors, phases).abs() ** 2
    return ((square >= threshold) / square).mean().item()


def constant_mean_inverse_square(a: float, b: float, threshold: float) -> float:
    """E[1/r^2; r^2 >= threshold] with r = |a + b exp(j phi)|, phi uniform: the estimate of a constant amplitude.

    With r^2 = (a + b)^2 - 4 a b sin(phi / 2)^2 and T = tan(phi_t / 2), r(phi_t)^2 = threshold, the mean is
    2 arctan(T |a - b| / (a + b)) / (pi |a^2 - b^2|).

    >>> round(constant_mean_inverse_square(2.0, 1.0, threshold=0), 9)  # 1 / |a^2 - b^2|
    0.333333333
    """
    gap = abs(a - b) if abs(a - b) > 1e-12 * (a + b) else 0.0  # r can be 0 if a and b are equal up to rounding
    smallest, largest = gap**2, (a + b) ** 2
    if threshold > largest:
        return 0.0
    ratio = gap / (a + b)
    limit = math.sqrt((largest - threshold) / (threshold - smallest)) if threshold > smallest else math.inf
    return 2 / math.pi / largest * (math.atan(ratio * limit) / ratio if ratio else limit)


def rotating_gain(gain: complex, cfo: float, d: int, device: torch.device) -> Tensor:
    """gain exp(2 pi j cfo i) at the complex symbols i = 0, 1, ... of d entries: (ceil(d / 2),) complex128."""
    i = torch.arange(-(-d // 2), dtype=torch.float64, device=device)
    return torch.polar(torch.ones_like(i), i.mul_(2 * math.pi * cfo)).mul_(gain)


@power("inversion")
def inversion(
    P: float,
    threshold: float,
    csi: float = 1,
    phase: float = 0,
    phase_law: Literal["uniform", "gaussian"] = "uniform",
    cfo: float = 0,
) -> Power:
    """Truncated channel inversion: clients with h^2 >= threshold divide by h, the others do not transmit.

        g = (1/|A|) sum_A u_n + s_k z / (|A| sqrt(rho)),    s_k^2 = max_A |u_n|^2 / d,
        rho = P / E[1/h^2; h^2 >= threshold]

    A is the set of active clients, and z is the interference on the sum. This choice of rho limits the power of each
    client, averaged over its fading, to P. The rule is broadband analog aggregation (Zhu, Wang and Huang, 2020, arXiv
    1812.11494). On channel waveform, E_n / T replaces |u_n|^2, as for `limit`.

    A client with imperfect channel knowledge uses h_hat = csi h + sqrt(1 - csi^2) e in place of h. e has the law of h,
    and both have uniform phases. The active clients, the division and rho then follow from h_hat.

    Two entries form a complex symbol c_i = u_2i + j u_2i+1. The symbol arrives with the gain exp(j phi_n(i)) h_n /
    h_hat_n, where phi_n(i) = phi_n + 2 pi eps_n i. The phase error phi_n is uniform in [-phase, phase], or Gaussian
    with the standard deviation `phase`. The carrier offset eps_n is uniform in [-cfo, cfo]. The real and the imaginary
    part of the received symbol are the two entries, so the entries of a symbol leak into each other. Under Rayleigh
    fading the mean gain is csi sin(phase) / phase for uniform phase errors, and csi exp(-phase^2 / 2) for Gaussian
    ones.

    Analog channels need noise_on=sum. A symbol of the digital channel has the power 2 rho / |h_hat_n|^2.

    Args:
        P: Largest mean power of a client per real dimension.
        threshold: Smallest h_hat^2 of a client that transmits.
        csi: Correlation of the estimate with the channel, from 0 to 1.
        phase: Largest uniform phase error, or standard deviation of the Gaussian phase error, in radians.
        phase_law: "uniform" or "gaussian".
        cfo: Largest carrier frequency offset, in cycles per complex symbol. Channel waveform refuses it: it has
            carrier offsets per unit of time.

    Returns:
        The rule.

    Raises:
        InputError: An argument is out of its range ("out-of-range"). For a fading, `for_fading` raises
            "unbounded-power", "no-senders" or "unsupported-fading".

    >>> from stableair.channels.fading import unit
    >>> rule = inversion(P=1, threshold=0.5).for_fading(unit())
    >>> sent = rule.transmissions(torch.tensor([0.2, 1.0, 2.0]).double(), torch.arange(3), seed=0, k=0)
    >>> {n: (one.gain, one.energy) for n, one in sent.items()}  # client 0 does not transmit
    {1: ((1+0j), 1.0), 2: ((1+0j), 0.25)}
    """
    return Inversion(
        positive("P", P),
        number("threshold", threshold, 0.0),
        number("csi", csi, 0.0, 1.0),
        number("phase", phase, 0.0),
        choice("phase_law", phase_law, PHASE_LAWS),
        number("cfo", cfo, 0.0, 0.5),
    )
