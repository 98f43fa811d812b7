"""Fading: the amplitude h_{n,k} with which client n is heard in round k."""

import math

import torch
from scipy.special import gammaincinv, gammaln, i0e, i1e
from torch import Tensor

from stableair.channels.kinds import Fading, fading
from stableair.checks import InputError, number, positive
from stableair.streams import Generator


@fading("rayleigh")
def rayleigh(mean: float = 1, power: float | None = None) -> Fading:
    """Rayleigh amplitudes of the given mean (the paper's: 1), or with `power` of the given mean square."""
    if power is None:
        scale = positive("mean", mean) * math.sqrt(2 / math.pi)
    elif mean != 1:
        raise InputError(f"give the mean or the power, not both: got mean={mean}, power={power}")
    else:
        scale = math.sqrt(positive("power", power) / 2)
    return lambda n, source: scale * (-2 * source.uniform(n).log()).sqrt()


@fading("rician")
def rician(K: float, mean: float = 1) -> Fading:
    """Rician amplitudes: a direct path K times as strong as the scattered ones; K = 0 is Rayleigh."""
    K, mean = number("K", K, 0.0, 1e6), positive("mean", mean)
    direct = math.sqrt(2 * K)  # in units of the scattered paths' standard deviation
    expected = math.sqrt(math.pi / 2) * ((1 + K) * i0e(K / 2) + K * i1e(K / 2))

    def draw(n: int, source: Generator) -> Tensor:
        in_phase, quadrature = source.normal(n, 2).unbind(-1)
        return (mean / expected) * torch.hypot(in_phase + direct, quadrature)

    return draw


@fading("nakagami")
def nakagami(m: float, mean: float = 1) -> Fading:
    """Nakagami-m amplitudes, m >= 1/2; m = 1 is Rayleigh, a large m hardly fades."""
    m, mean = number("m", m, 0.5, 1e6), positive("mean", mean)
    expected = math.exp(gammaln(m + 0.5) - gammaln(m))
    return lambda n, source: (mean / expected) * torch.from_numpy(gammaincinv(m, source.uniform(n).numpy())).sqrt()


@fading("unit")
def unit() -> Fading:
    """No fading: every amplitude is 1."""
    return lambda n, source: torch.ones(n, dtype=torch.float64)
