"""Fading: the amplitude h_{n,k} of client n in round k.

A fading draws the amplitudes of all n clients of a round at once: (n, source) -> (n,) float64. Its mean is 1 by
default, so that Eq. (3) is the clients' mean in expectation. A fading with memory has no state: it is a function of
(seed, round) and recomputes earlier rounds from the stream.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from scipy.special import exp1, gamma, gammaincc, gammaincinv, gammaln, i0e, i1e, xlogy
from torch import Tensor

from stableair.channels.registries import fading, make_nested
from stableair.contracts import Fading, FadingLaw
from stableair.errors import InputError
from stableair.streams import Generator, box_muller, first_bits, open_unit
from stableair.validation import integer, number, positive


@fading("rayleigh")
def rayleigh(mean: float = 1, power: float | None = None) -> Fading:
    """Rayleigh amplitudes, the paper's fading.

        h = s sqrt(-2 log u),    u uniform on (0, 1),    P(h > x) = exp(-x^2 / 2 s^2)

    The mean is s sqrt(pi / 2), the mean square 2 s^2.

    Args:
        mean: Mean amplitude, above 0; 1 in the paper.
        power: Mean square of the amplitude, above 0, in place of the mean.

    Returns:
        The fading, (n, source) -> amplitudes (n,) float64.

    Raises:
        InputError: An argument is out of range, or both are given.

    >>> from stableair.streams import generator
    >>> h = rayleigh()(100_000, generator(0, "fading", 0))
    >>> round(h.mean().item(), 2), round(h.var().item(), 2)  # 1 and 4 / pi - 1
    (1.0, 0.27)
    """
    if power is None:
        scale = positive("mean", mean) * math.sqrt(2 / math.pi)
    elif mean != 1:
        text = f"set the mean or the power, not both: got mean={mean}, power={power}"
        raise InputError(text, code="conflicting-arguments")
    else:
        scale = math.sqrt(positive("power", power) / 2)
    square = 2 * scale * scale  # overflows to inf, where scale**2 would raise an error

    def mean_inverse_square(t: float) -> float:
        return float(exp1(t / square)) / square if t > 0 else math.inf

    def draw(n: int, source: Generator) -> Tensor:
        return scale * (-2 * source.uniform(n).log()).sqrt()

    return FadingLaw(draw, mean_inverse_square, complex_gaussian=True, mean_square=square)


@fading("rician")
def rician(K: float, mean: float = 1) -> Fading:
    """Rician amplitudes: a direct path in addition to the scattered paths; K = 0 is Rayleigh.

        h = c |sqrt(2 K) + x + i y|,    x, y ~ N(0, 1)    (Rice, 1945)

    The factor c sets the mean; without it the mean is sqrt(pi / 2) e^(-K/2) ((1 + K) I_0(K / 2) + K I_1(K / 2)).

    Args:
        K: Power of the direct path relative to the power of the scattered paths, in [0, 1e6].
        mean: Mean amplitude, above 0.

    Returns:
        The fading, (n, source) -> amplitudes (n,) float64.

    Raises:
        InputError: An argument is out of range.

    >>> from stableair.streams import generator
    >>> h = rician(K=1e6)(1000, generator(0, "fading", 0))
    >>> bool((h - 1).abs().max() < 0.01)  # the direct path dominates
    True
    """
    K, mean = number("K", K, 0.0, 1e6), positive("mean", mean)
    direct = math.sqrt(2 * K)  # in units of the scattered paths' standard deviation
    scale = float(mean / (math.sqrt(math.pi / 2) * ((1 + K) * i0e(K / 2) + K * i1e(K / 2))))

    def draw(n: int, source: Generator) -> Tensor:
        in_phase, quadrature = source.normal(n, 2).unbind(-1)
        return scale * torch.hypot(in_phase + direct, quadrature)

    def mean_inverse_square(t: float) -> float:
        """h^2 / 2 c^2 has the gamma law of shape 1 + j, with j of the Poisson law of mean K."""
        if t <= 0:
            return math.inf
        j = np.arange(max(0, int(K - 12 * math.sqrt(K)) - 40), int(K + 12 * math.sqrt(K)) + 40)
        weights = np.exp(xlogy(j, K) - K - gammaln(j + 1))
        x, above = t / (2 * scale * scale), np.maximum(j, 1)
        means = np.where(j > 0, gammaincc(above, x) / above, exp1(x))
        return float(weights @ means / weights.sum()) / (2 * scale * scale)

    return FadingLaw(draw, mean_inverse_square, complex_gaussian=K == 0, mean_square=2 * (K + 1) * scale * scale)


@fading("nakagami")
def nakagami(m: float, mean: float = 1) -> Fading:
    """Nakagami-m amplitudes: m = 1 is Rayleigh fading, and a large m means little fading.

        h = c sqrt(X),    X ~ Gamma(m)    (Nakagami, 1960)

    X is drawn with the quantile function of the gamma law of shape m. The factor c sets the mean; without it the mean
    is Gamma(m + 1/2) / Gamma(m).

    Args:
        m: Shape, in [0.5, 1e6].
        mean: Mean amplitude, above 0.

    Returns:
        The fading, (n, source) -> amplitudes (n,) float64.

    Raises:
        InputError: An argument is out of range.

    >>> from stableair.streams import generator
    >>> h = nakagami(m=0.5)(100_000, generator(0, "fading", 0))  # the absolute value of a normal variable
    >>> round(h.mean().item(), 2), round(h.var().item(), 2)  # 1 and pi / 2 - 1
    (1.0, 0.57)
    """
    m, mean = number("m", m, 0.5, 1e6), positive("mean", mean)
    scale = mean / math.exp(gammaln(m + 0.5) - gammaln(m))

    def draw(n: int, source: Generator) -> Tensor:
        return scale * torch.from_numpy(gammaincinv(m, source.uniform(n).cpu().numpy())).sqrt().to(source.device)

    def mean_inverse_square(t: float) -> float:
        return gamma_mean_inverse(m, t / scale / scale) / scale / scale

    return FadingLaw(draw, mean_inverse_square, complex_gaussian=m == 1, mean_square=m * scale * scale)


def gamma_mean_inverse(m: float, x: float) -> float:
    """E[1/X; X >= x] for X of the gamma law of shape m: Gamma(m - 1, x) / Gamma(m).

    >>> round(gamma_mean_inverse(2, 0.5), 6), round(gamma_mean_inverse(1, 0.5), 6)  # exp(-x) and E_1(x)
    (0.606531, 0.559774)
    """
    if m <= 1 and x <= 0:
        return math.inf
    if abs(m - 1) < 1e-8:
        return float(exp1(x))
    if m > 1:
        return float(gammaincc(m - 1, x)) / (m - 1)
    return max(0.0, float(x ** (m - 1) * math.exp(-x) / gamma(m) - gammaincc(m, x)) / (1 - m))  # recurrence in m


@fading("unit")
def unit() -> Fading:
    """No fading: every amplitude is 1.

        h = 1

    Returns:
        The fading, (n, source) -> amplitudes (n,) float64.

    >>> from stableair.streams import generator
    >>> unit()(3, generator(0, "fading", 0)).tolist()
    [1.0, 1.0, 1.0]
    """

    def draw(n: int, source: Generator) -> Tensor:
        return torch.ones(n, dtype=torch.float64, device=source.device)

    return FadingLaw(draw, mean_square=1.0, support=(1.0, 1.0))


@fading("block", specs={"of": fading})
def block(of: str = "rayleigh()", rounds: int | None = None, entries: int | None = None) -> Fading:
    """Block fading: another fading, constant over blocks of rounds, of entries, or of both.

        h_{n,k} = h'_{n, floor(k / rounds)}

    With `entries`, client n has an independent amplitude in each block of entries of the vector as well. Each amplitude
    has the law of the other fading.

    Args:
        of: Spec of the other fading.
        rounds: Rounds of a block; by default 1.
        entries: Entries of a block; by default the whole vector.

    Returns:
        The fading, (n, source) -> amplitudes (n,) float64. With `entries`, these are the amplitudes of the first block.

    Raises:
        InputError: Neither length is given, a length is below 1, or the spec is invalid.

    >>> from stableair.streams import generator
    >>> h = [block(rounds=3)(1, generator(0, "fading", k)).item() for k in range(6)]
    >>> h[0] == h[1] == h[2] != h[3] == h[4] == h[5]
    True
    """
    if rounds is None and entries is None:
        raise InputError("set the length of a block: rounds=10, entries=1000, or both", code="missing-argument")
    block_rounds = integer("rounds", 1 if rounds is None else rounds, 1)
    length = None if entries is None else integer("entries", entries, 1)
    law = _law(make_nested(fading, of, excluded=("block",)))

    def draw(n: int, source: Generator) -> Tensor:
        return law(n, source.at(source.round // block_rounds))

    return replace(law, draw=draw, block_length=length)


def _law(one: Fading) -> FadingLaw:
    return one if isinstance(one, FadingLaw) else FadingLaw(one)


def amplitudes_along(law: FadingLaw, first: float, d: int, source: Generator) -> Tensor:
    """Draw the amplitude of one client at each of d entries.

    Args:
        law: A fading with a new amplitude after every `block_length` entries.
        first: Amplitude of the first block.
        d: Number of entries.
        source: Stream of this client.

    Returns:
        The amplitudes, (d,).

    >>> from stableair.streams import generator
    >>> h = amplitudes_along(block(entries=2), 0.5, 5, generator(0, "fading", 0, 7))
    >>> h[0].item(), bool(h[1] == h[0] != h[2] == h[3])
    (0.5, True)
    """
    length = min(law.block_length or d, d)  # a block may be longer than the vector: limit the memory
    later = law(-(-d // length) - 1, source)
    return torch.cat([later.new_tensor([first]), later]).repeat_interleave(length)[:d]


@fading("ar", specs={"of": fading})
def ar(a: float, of: str = "rayleigh()") -> Fading:
    """Slowly changing fading: its scattered part is a Gauss-Markov process over the rounds.

        c_k = a c_{k-1} + sqrt(1 - a^2) z_k,    c_0 = z_0,    E c_k c_j^* = a^|k-j| E |c|^2

    z_k is complex Gaussian, and c_k is the Gaussian part of the fading `of`: the amplitude is proportional to |c_k| for
    Rayleigh, and Rician adds a direct path to c_k. A fading drawn from uniform numbers uses exp(-|c_k|^2) as uniform
    numbers. In each round the amplitude has the law of the fading `of`. A client's amplitude does not depend on the
    number of clients.

    Args:
        a: Correlation of successive rounds, in [0, 1].
        of: Spec of the other fading.

    Returns:
        The fading, (n, source) -> amplitudes (n,) float64.

    Raises:
        InputError: a is out of range, or the spec is invalid.

    >>> from stableair.streams import generator
    >>> near, far = (ar(0.99)(10_000, generator(0, "fading", k)) for k in (1, 200))
    >>> first = ar(0.99)(10_000, generator(0, "fading", 0))
    >>> [round(torch.corrcoef(torch.stack([first, h]))[0, 1].item(), 1) for h in (near, far)]
    [1.0, 0.0]
    """
    a, law = number("a", a, 0.0, 1.0), _law(make_nested(fading, of, excluded=("ar", "block")))
    return replace(law, draw=lambda n, source: law(n, GaussMarkov(source, a)))


CHUNK = 1 << 20  # random numbers of all rounds that are computed at once, to limit the memory


class GaussMarkov(Generator):
    """A stream whose normal numbers are a Gauss-Markov process over the rounds.

        x_k = a x_{k-1} + sqrt(1 - a^2) z_k = a^k z_0 + sum_{j=1}^k a^(k-j) sqrt(1 - a^2) z_j

    Terms with a weight below 2^-60 are dropped: they are smaller than the rounding errors of the other terms. So at
    most 42 / (1 - a) rounds are recomputed.

    Args:
        source: Stream of the round k, from which earlier rounds are recomputed.
        a: Correlation of successive rounds, in [0, 1].

    >>> from stableair.streams import generator
    >>> first, later = (GaussMarkov(generator(0, "fading", k), a=1.0).normal(3) for k in (0, 5))
    >>> first.equal(later)
    True
    """

    def __init__(self, source: Generator, a: float):
        super().__init__(source.key, source.device, source.name)
        weights = [a ** (self.round - j) * (math.sqrt(1 - a * a) if j else 1.0) for j in range(self.round + 1)]
        self.weights = {j: weight for j, weight in enumerate(weights) if weight > 2.0**-60}

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers in float64, correlated with the numbers at their positions in earlier rounds."""
        start, stop = self.position, self.position + 2 * math.prod(shape)
        self.position = stop
        total = torch.zeros(math.prod(shape), dtype=torch.float64)
        rounds = torch.tensor(list(self.weights))
        for chunk in rounds.split(max(CHUNK // max(stop, 1), 1)):
            bits = first_bits([self.at(j) for j in chunk.tolist()], stop)[:, start:]
            weights = torch.tensor([self.weights[j] for j in chunk.tolist()], dtype=torch.float64)
            terms = weights[:, None] * box_muller(open_unit(bits).unflatten(-1, (-1, 2)))
            total = sum(terms, total)  # in this order for any shape: torch.sum depends on the shape in the last bit
        return total.reshape(shape).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers on (0, 1), each from the modulus of a complex Gaussian number."""
        return self.normal(*shape, 2).square().sum(-1).mul_(-0.5).exp_()
