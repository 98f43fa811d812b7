"""Fading: the amplitude h_{n,k} with which client n is heard in round k.

A fading draws the amplitudes of all n clients of a round at once: (n, source) -> (n,) float64. It has mean 1 unless one
says otherwise, so that Eq. (3) is the clients' mean in expectation. One that depends on earlier rounds keeps nothing:
it is a function of (seed, round) and looks back along the stream.
"""

import math
from dataclasses import replace

import torch
from scipy.special import exp1, gammaincc, gammaincinv, gammaln, i0e, i1e
from torch import Tensor

from stableair.channels.kinds import Fading, Law, fading, inner
from stableair.checks import InputError, number, positive, whole
from stableair.streams import Generator, box_muller, first_bits, open_unit


@fading("rayleigh")
def rayleigh(mean: float = 1, power: float | None = None) -> Fading:
    """Rayleigh amplitudes of the given mean (the paper's: 1), or with `power` of the given mean square.

    h = s sqrt(-2 log u) with u uniform on (0, 1): P(h > x) = exp(-x^2 / 2 s^2), mean s sqrt(pi / 2), mean square 2 s^2.
    Returns (n, source) -> (n,).

    >>> from stableair.streams import generator
    >>> h = rayleigh()(100_000, generator(0, "fading", 0))
    >>> round(h.mean().item(), 2), round(h.var().item(), 2)  # 1 and 4 / pi - 1
    (1.0, 0.27)
    """
    if power is None:
        scale = positive("mean", mean) * math.sqrt(2 / math.pi)
    elif mean != 1:
        raise InputError(f"give the mean or the power, not both: got mean={mean}, power={power}")
    else:
        scale = math.sqrt(positive("power", power) / 2)
    square = 2 * scale * scale  # infinite, where scale**2 would be an error

    def inverse(t: float) -> float:
        return float(exp1(t / square)) / square if t > 0 else math.inf

    return Law(lambda n, source: scale * (-2 * source.uniform(n).log()).sqrt(), inverse, gaussian=True)


@fading("rician")
def rician(K: float, mean: float = 1) -> Fading:
    """Rician amplitudes: a direct path K times as strong as the scattered ones; K = 0 is Rayleigh.

    h = c |sqrt(2 K) + x + i y| with x, y standard normal (Rice, 1945). c makes the mean what it is to be: without it
    the mean is sqrt(pi / 2) e^(-K/2) ((1 + K) I_0(K / 2) + K I_1(K / 2)). Returns (n, source) -> (n,).

    >>> from stableair.streams import generator
    >>> h = rician(K=1e6)(1000, generator(0, "fading", 0))
    >>> bool((h - 1).abs().max() < 0.01)  # hardly anything is scattered
    True
    """
    K, mean = number("K", K, 0.0, 1e6), positive("mean", mean)
    direct = math.sqrt(2 * K)  # in units of the scattered paths' standard deviation
    expected = math.sqrt(math.pi / 2) * ((1 + K) * i0e(K / 2) + K * i1e(K / 2))

    def draw(n: int, source: Generator) -> Tensor:
        in_phase, quadrature = source.normal(n, 2).unbind(-1)
        return (mean / expected) * torch.hypot(in_phase + direct, quadrature)

    return draw


@fading("nakagami")
def nakagami(m: float, mean: float = 1) -> Fading:
    """Nakagami-m amplitudes, m >= 1/2; m = 1 is Rayleigh, a large m hardly fades.

    h = c sqrt(X) with X of the gamma law of shape m (Nakagami, 1960), drawn by its quantile function. c makes the mean
    what it is to be: without it the mean is Gamma(m + 1/2) / Gamma(m). Returns (n, source) -> (n,).

    >>> from stableair.streams import generator
    >>> h = nakagami(m=0.5)(100_000, generator(0, "fading", 0))  # the absolute value of a normal variable
    >>> round(h.mean().item(), 2), round(h.var().item(), 2)  # 1 and pi / 2 - 1
    (1.0, 0.57)
    """
    m, mean = number("m", m, 0.5, 1e6), positive("mean", mean)
    scale = mean / math.exp(gammaln(m + 0.5) - gammaln(m))

    def draw(n: int, source: Generator) -> Tensor:
        return scale * torch.from_numpy(gammaincinv(m, source.uniform(n).cpu().numpy())).sqrt().to(source.device)

    def inverse(t: float) -> float:
        return float(gammaincc(m - 1, t / scale / scale)) / (m - 1) / scale / scale

    return Law(draw, inverse if m > 1 else None)


@fading("unit")
def unit() -> Fading:
    """No fading: every amplitude is 1.

    h = 1. Returns (n, source) -> (n,).

    >>> from stableair.streams import generator
    >>> unit()(3, generator(0, "fading", 0)).tolist()
    [1.0, 1.0, 1.0]
    """
    return Law(
        lambda n, source: torch.ones(n, dtype=torch.float64, device=source.device), inverse=lambda t: float(t <= 1)
    )


@fading("block", specs={"of": fading})
def block(of: str = "rayleigh()", rounds: int | None = None, entries: int | None = None) -> Fading:
    """Block fading: another fading, given as a spec in quotes, held for some rounds, or new after so many entries.

    h_{n,k} is the amplitude of block floor(k / rounds); with `entries` the vector is cut as well, and client n has an
    amplitude of its own in each piece of so many entries. The law of an amplitude is that of the other fading. Returns
    (n, source) -> (n,), with `entries` the amplitudes at the first entry.

    >>> from stableair.streams import generator
    >>> h = [block(rounds=3)(1, generator(0, "fading", k)).item() for k in range(6)]
    >>> h[0] == h[1] == h[2] != h[3] == h[4] == h[5]
    True
    """
    if rounds is None and entries is None:
        raise InputError("say how long a block is: rounds=10, entries=1000, or both")
    one, held = inner(fading, of, but=("block",)), whole("rounds", 1 if rounds is None else rounds, 1)
    known = one if isinstance(one, Law) else Law(one)
    length = None if entries is None else whole("entries", entries, 1)
    return replace(known, draw=lambda n, source: one(n, source.at(source.round // held)), entries=length)


@fading("ar", specs={"of": fading})
def ar(a: float, of: str = "rayleigh()") -> Fading:
    """Fading that changes slowly: the scattered part of another, given as a spec in quotes, is a Gauss-Markov process.

    c_k = a c_{k-1} + sqrt(1 - a^2) z_k with z_k complex Gaussian and c_0 = z_0, over the rounds k; then E c_k c_j^* is
    a^|k-j| E |c|^2. The amplitude is that of the other fading with c_k for its Gaussian part: |c_k| to scale for
    Rayleigh, a direct path beside c_k for Rician; a fading drawn from uniform numbers gets exp(-|c_k|^2) of them. The
    law of an amplitude in a round is that of the other fading. Returns (n, source) -> (n,).

    >>> from stableair.streams import generator
    >>> near, far = (ar(0.99)(10_000, generator(0, "fading", k)) for k in (1, 200))
    >>> first = ar(0.99)(10_000, generator(0, "fading", 0))
    >>> [round(torch.corrcoef(torch.stack([first, h]))[0, 1].item(), 1) for h in (near, far)]
    [1.0, 0.0]
    """
    a, one = number("a", a, 0.0, 1.0), inner(fading, of, but=("ar", "block"))
    law = one if isinstance(one, Law) else Law(one)
    return replace(law, draw=lambda n, source: one(n, GaussMarkov(source, a)))


class GaussMarkov(Generator):
    """A stream whose normal numbers are those of its round and of all before it: x_k = a x_{k-1} + sqrt(1 - a^2) z_k.

    x_k is the sum of a^(k-j) sqrt(1 - a^2) z_j over the rounds j, with a^k z_0 for the first. Terms of a weight below
    2^-60 are left out: they are beneath the rounding of the others. So a round looks back 42 / (1 - a) rounds at most.
    """

    def __init__(self, source: Generator, a: float):
        super().__init__(source.key, source.device, source.name)
        weights = [a ** (self.round - j) * (math.sqrt(1 - a * a) if j else 1.0) for j in range(self.round + 1)]
        self.weights = {j: weight for j, weight in enumerate(weights) if weight > 2.0**-60}

    def normal(self, *shape: int) -> Tensor:
        """Standard normal in float64, each correlated with its like of earlier rounds."""
        start, stop = self.position, self.position + 2 * math.prod(shape)
        self.position = stop
        total = torch.zeros(math.prod(shape), dtype=torch.float64)
        rounds = torch.tensor(list(self.weights))
        for some in rounds.split(max((1 << 20) // stop, 1)):  # so many that their numbers stay small in memory
            bits = first_bits([self.at(j) for j in some.tolist()], stop)[:, start:]
            weights = torch.tensor([self.weights[j] for j in some.tolist()], dtype=torch.float64)
            total += (weights[:, None] * box_muller(open_unit(bits).unflatten(-1, (-1, 2)))).sum(0)
        return total.reshape(shape).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform on (0, 1), from the modulus of a complex Gaussian number each."""
        return self.normal(*shape, 2).square().sum(-1).mul_(-0.5).exp_()
