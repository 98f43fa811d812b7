"""Transmit power: what a client does to its payload before it sends it, and how strong the noise is beside it.

P is the mean power an entry. Beside a rule that keeps to one, the interference is on the sum of the payloads.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stableair.channels.kinds import Fading, Law, power
from stableair.channels.superposition import Total
from stableair.checks import InputError, choice, number, positive
from stableair.contracts import Gain, check_shape
from stableair.streams import Generator, box_muller, generator

PHASE_LAWS = "uniform", "gaussian"
DRAWS = 1_000_000  # for the mean of a fading that is not known in closed form


class Power:
    """A power rule; by default it changes nothing.

    A client of fading h_n is heard with gain(h_n) in place of h_n: g = (1/N) sum_n gain(h_n) u_n + noise(xi).
    """

    on_sum = False  # whether the interference has to be on the sum of the payloads, and not on their mean

    def under(self, fading: Fading) -> "Power":
        """The rule as it is under that fading, which it may refuse."""
        return self

    def gains(self, h: Tensor, who: Tensor, seed: int, k: int) -> dict[int, Gain]:
        """What arrives of the payload of each client in `who` (m,), given the fading h (n,) of all n in round k.

        A client that is not in it keeps silent. Whatever else is drawn is drawn for all n.
        """
        arriving = check_shape("power", self.gain(h[who]), len(who))
        return dict(zip(who.tolist(), arriving.tolist(), strict=True))

    def gain(self, h: Tensor) -> Tensor:
        """What arrives of each sender's payload, given its fading: (m,) -> (m,)."""
        return h

    def noise(self, xi: Tensor, total: Total) -> Tensor:
        """The interference beside the payloads, once all of them are known: (d,) -> (d,)."""
        return xi


@power("none")
def none() -> Power:
    """No power rule: payloads are sent as they are, and the interference does not depend on them (the paper's).

    >>> none().gain(Tensor([0.5, 2.0])).tolist()
    [0.5, 2.0]
    """
    return Power()


@dataclass(frozen=True)
class Limit(Power):
    """All clients send with one factor sqrt(p_k), which the server takes out again; see `limit`."""

    P: float
    on_sum = True

    def noise(self, xi: Tensor, total: Total) -> Tensor:
        return _times(xi, total.largest / math.sqrt(self.P * len(total.clean)))


@power("limit")
def limit(P: float) -> Power:
    """A limit on the power: all payloads are sent with one factor, such that the largest has mean power P an entry.

    p_k = P d / max_n |u_n|^2 and g = (1/N) sum_n h_n u_n + z / (N sqrt(p_k)), z being the interference on the sum:
    COTAF (Sery, Shlezinger, Cohen and Eldar, 2021, arXiv 2009.12787). Needs channel=flat(noise_on=sum).

    >>> from stableair.channels.flat import flat
    >>> from stableair.contracts import Fade, Upload
    >>> still = flat(noise_on="sum")(fading=None, noise=None, power=limit(P=4))
    >>> fade = Fade(0, torch.arange(2), torch.ones(2), torch.tensor([1.0, 0.0]))
    >>> sent = Upload(fade.clients, torch.tensor([[6.0, 0.0], [0.0, 8.0]]), torch.zeros(2, 0), torch.zeros(2))
    >>> still.superpose([sent], fade).g.tolist()  # p = 4 x 2 / 64, and 3 + 1 / (2 sqrt(p)) is 3 + sqrt(2)
    [4.41421365737915, 4.0]
    """
    return Limit(positive("P", P))


@dataclass(frozen=True)
class Inversion(Power):
    """Each client divides its payload by what it takes its channel to be; see `inversion`."""

    P: float
    threshold: float
    csi: float
    phase: float
    phase_law: str
    cfo: float
    fading: Fading | None = None
    inverse: float = math.nan  # E[1/h_hat^2; h_hat^2 >= threshold] under that fading
    on_sum = True

    def under(self, fading: Fading) -> "Inversion":
        if fading is self.fading:
            return self
        if isinstance(fading, Law) and fading.entries:
            raise InputError("inversion needs one amplitude a client and round, not one for every block of entries")
        inverse = inverse_power(fading, self.threshold, self.csi)
        if math.isinf(inverse):
            raise InputError(
                f"inversion: threshold must be positive, such as 0.1: got {self.threshold:g}, and inverting the "
                "weakest channels of this fading takes power without bound"
            )
        return replace(self, fading=fading, inverse=inverse)

    def gains(self, h: Tensor, who: Tensor, seed: int, k: int) -> dict[int, Gain]:
        assert self.fading, "a channel asks its power rule what it is under its fading"
        source = partial(generator, seed)
        h_hat = estimate(h, self.fading, self.csi, source("csi", k), source("csi phase", k))
        u = source("phase", k).uniform(len(h), 2)
        offset = self.phase * (2 * u[:, 0] - 1 if self.phase_law == "uniform" else box_muller(u))
        heard = torch.polar(torch.ones_like(h), offset) * h / h_hat
        turns = self.cfo * (2 * source("cfo", k).uniform(len(h)) - 1)
        active = who[(h_hat.abs() ** 2 >= self.threshold)[who]]
        if not self.cfo:
            return dict(zip(active.tolist(), heard[active].real.tolist(), strict=True))
        parts = torch.stack([heard.abs(), heard.angle(), turns], 1)[active].tolist()
        return {n: partial(turning, *own) for n, own in zip(active.tolist(), parts, strict=True)}

    def noise(self, xi: Tensor, total: Total) -> Tensor:
        return _times(xi, total.largest * math.sqrt(self.inverse / (self.P * len(total.clean))))


def _times(xi: Tensor, factor: float) -> Tensor:
    """The interference that much louder: none of it, infinite or not, where nothing was sent that it could disturb."""
    return xi * factor if factor else torch.zeros_like(xi)


def estimate(h: Tensor, fading: Fading, csi: float, errors: Generator, phases: Generator) -> Tensor:
    """h_hat = csi h + sqrt(1 - csi^2) e: (n,) -> (n,) complex, h being turned to the real axis.

    e is of h's law; that the phases of h and e are uniform and independent leaves the one between them uniform.
    """
    e = torch.polar(fading(len(h), errors), 2 * math.pi * phases.uniform(len(h)))
    return csi * h + math.sqrt(1 - csi * csi) * e


def inverse_power(fading: Fading, threshold: float, csi: float = 1.0) -> float:
    """E[1/h_hat^2; h_hat^2 >= threshold]: in closed form where there is one, else the mean of 10^6 draws.

    Where there is none, a threshold of 0 is taken for one at which it diverges.

    >>> from stableair.channels.fading import rayleigh
    >>> round(inverse_power(rayleigh(power=1), threshold=0.1), 6)  # E_1(0.1)
    1.822924
    """
    if isinstance(fading, Law) and fading.inverse and (fading.gaussian or csi == 1):
        return fading.inverse(threshold)
    if threshold <= 0:
        return math.inf
    h, errors, phases = (generator(0, f"inversion {what}", 0) for what in ("h", "csi", "csi phase"))
    square = estimate(fading(DRAWS, h).double(), fading, csi, errors, phases).abs() ** 2
    return ((square >= threshold) / square).mean().item()


def turning(amplitude: float, phase: float, turn: float, d: int, device: torch.device) -> Tensor:
    """amplitude cos(phase + 2 pi turn i) at the entries i = 0 ... d-1: (d,) float64."""
    i = torch.arange(d, dtype=torch.float64, device=device)
    return i.mul_(2 * math.pi * turn).add_(phase).cos_().mul_(amplitude)


@power("inversion")
def inversion(
    P: float,
    threshold: float,
    csi: float = 1,
    phase: float = 0,
    phase_law: Literal["uniform", "gaussian"] = "uniform",
    cfo: float = 0,
) -> Power:
    """Truncated channel inversion: whoever has h^2 >= threshold divides by h, the others keep silent.

    g = (1/|A|) sum_A u_n + s_k z / (|A| sqrt(rho)) with A the active clients, s_k^2 = max_A |u_n|^2 / d, z the
    interference on the sum and rho = P / E[1/h^2; h^2 >= threshold], so that a client's power is P at most, on average
    over its fading: broadband analog aggregation (Zhu, Wang and Huang, 2020, arXiv 1812.11494).

    A client that knows h imperfectly goes by h_hat = csi h + sqrt(1 - csi^2) e, with e of h's law and both of uniform
    phase: who is active, the division and rho follow h_hat. Entry i arrives with the gain
    Re(exp(j phi_n(i)) h_n / h_hat_n), phi_n(i) = phi_n + 2 pi eps_n i: a phase error phi_n uniform in [-phase, phase]
    or Gaussian of that deviation, in radians, and a carrier offset eps_n uniform in [-cfo, cfo], in turns an entry.
    Under Rayleigh fading the mean gain is csi times sin(phase) / phase, or exp(-phase^2 / 2). Needs
    channel=flat(noise_on=sum).

    >>> from stableair.channels.fading import unit
    >>> rule = inversion(P=1, threshold=0.5, phase=0.1).under(unit())
    >>> gains = rule.gains(torch.tensor([0.2, 1.0, 2.0]).double(), torch.arange(3), seed=0, k=0)
    >>> {n: round(gain, 2) for n, gain in gains.items()}  # client 0 keeps silent, the others arrive alike
    {1: 1.0, 2: 1.0}
    """
    return Inversion(
        positive("P", P),
        number("threshold", threshold, 0.0),
        number("csi", csi, 0.0, 1.0),
        number("phase", phase, 0.0),
        choice("phase_law", phase_law, PHASE_LAWS),
        number("cfo", cfo, 0.0, 0.5),
    )
