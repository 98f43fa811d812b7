"""Interference: xi_k, one draw for every entry of the vector in round k.

A noise draws the d entries of a round: (d, source) -> (d,) float32, on the source's device.
"""

import math
from dataclasses import dataclass

import torch
from scipy.special import pdtr
from torch import Tensor

from stableair import stable
from stableair.channels.kinds import Noise, noise
from stableair.checks import number, positive
from stableair.streams import Generator


@dataclass(frozen=True)
class Stable:
    """Interference of a stable law, which has complex samples too: `stable.isotropic(n, alpha, tau, source)`."""

    alpha: float
    tau: float
    draw: Noise

    def __call__(self, d: int, source: Generator) -> Tensor:
        return self.draw(d, source)


@noise("sas")
def sas(alpha: float = 1.5, tau: float = 0.1) -> Noise:
    """Symmetric alpha-stable interference, alpha in [0.5, 2], scale tau per entry.

    E exp(i t xi) = exp(-|tau t|^alpha), drawn after Chambers, Mallows and Stuck (1976). Returns (d, source) -> (d,).

    >>> from stableair.streams import generator
    >>> xi = sas(alpha=1, tau=0.3)(100_000, generator(0, "noise", 0))
    >>> round((xi.abs() < 0.3).double().mean().item(), 2)  # half of a Cauchy law lies within its scale
    0.5
    """
    alpha, tau = stable.check(alpha, tau)
    return Stable(alpha, tau, lambda d, source: stable.sample(d, alpha, tau, source))


@noise("gaussian")
def gaussian(std: float) -> Noise:
    """Normal noise of standard deviation `std`.

    xi = std z with z standard normal. Returns (d, source) -> (d,).

    >>> from stableair.streams import generator
    >>> round(gaussian(std=2)(100_000, generator(0, "noise", 0)).std().item(), 1)
    2.0
    """
    std = number("std", std, 0.0)
    return Stable(2.0, std / math.sqrt(2), lambda d, source: (std * source.normal(d)).float())


@noise("student_t")
def student_t(df: float, scale: float = 1) -> Noise:
    """Student's t with `df` degrees of freedom, times `scale`: power-law tails, finite variance from df > 2.

    xi = scale sqrt(df (u^(-2/df) - 1)) cos(2 pi v) with u, v uniform on (0, 1): the polar method of Bailey (1994).
    Returns (d, source) -> (d,).

    >>> from stableair.streams import generator
    >>> xi = student_t(df=1, scale=0.3)(100_000, generator(0, "noise", 0))
    >>> round((xi.abs() < 0.3).double().mean().item(), 2)  # df = 1 is the Cauchy law
    0.5
    """
    df, scale = positive("df", df), number("scale", scale, 0.0)

    def draw(d: int, source: Generator) -> Tensor:
        u, v = source.uniform(d, 2).unbind(-1)
        return (scale * (df * torch.expm1(-2 / df * u.log())).sqrt() * (2 * math.pi * v).cos()).float()

    return draw


@noise("middleton")
def middleton(A: float, gamma: float, std: float = 1) -> Noise:
    """Middleton's class A: impulses of index A over a Gaussian background of `gamma` times their power; std in all.

    Given m, of the Poisson law of mean A, xi is normal with variance std^2 (m / A + gamma) / (1 + gamma)
    (Middleton, 1977). Returns (d, source) -> (d,).

    >>> from stableair.streams import generator
    >>> xi = middleton(A=0.1, gamma=0.01)(100_000, generator(0, "noise", 0))
    >>> round((xi.abs() < 0.3).double().mean().item(), 2)  # mostly the background, of standard deviation 0.1
    0.91
    """
    A, gamma, std = number("A", A, 1e-6, 1e3), positive("gamma", gamma), number("std", std, 0.0)
    count = torch.arange(int(A + 12 * math.sqrt(A)) + 30)  # interferers at work at once; more never are
    cumulative = torch.from_numpy(pdtr(count.numpy(), A))  # of the Poisson law
    deviation = std * ((count.double() / A + gamma) / (1 + gamma)).sqrt()

    def draw(d: int, source: Generator) -> Tensor:
        u, a, b = source.uniform(d, 3).unbind(-1)
        active = torch.searchsorted(cumulative.to(u.device), u.contiguous()).clamp_(max=len(count) - 1)
        return (deviation.to(u.device)[active] * (-2 * a.log()).sqrt() * (2 * math.pi * b).cos()).float()

    return draw


@noise("none")
def none() -> Noise:
    """No interference.

    xi = 0. Returns (d, source) -> (d,).

    >>> from stableair.streams import generator
    >>> none()(2, generator(0, "noise", 0)).tolist()
    [0.0, 0.0]
    """
    return Stable(2.0, 0.0, lambda d, source: torch.zeros(d, device=source.device))
