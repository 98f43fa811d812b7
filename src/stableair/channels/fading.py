"""Fading: the amplitude h_{n,k} with which client n is heard in round k.

A fading draws the amplitudes of all n clients of a round at once: (n, source) -> (n,) float64. It has mean 1 unless one
says otherwise, so that Eq. (3) is the clients' mean in expectation.
"""

import math

import torch
from scipy.special import gammaincinv, gammaln, i0e, i1e
from torch import Tensor

from stableair.channels.kinds import Fading, fading
from stableair.checks import InputError, number, positive
from stableair.streams import Generator


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
    return lambda n, source: scale * (-2 * source.uniform(n).log()).sqrt()


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
    expected = math.exp(gammaln(m + 0.5) - gammaln(m))
    return lambda n, source: (mean / expected) * torch.from_numpy(gammaincinv(m, source.uniform(n).numpy())).sqrt()


@fading("unit")
def unit() -> Fading:
    """No fading: every amplitude is 1.

    h = 1. Returns (n, source) -> (n,).

    >>> from stableair.streams import generator
    >>> unit()(3, generator(0, "fading", 0)).tolist()
    [1.0, 1.0, 1.0]
    """
    return lambda n, source: torch.ones(n, dtype=torch.float64)
