"""Interference: xi_k, one draw for every entry of the vector in round k."""

import math

import torch
from scipy.special import pdtr
from torch import Tensor

from stableair import stable
from stableair.channels.kinds import Noise, noise
from stableair.checks import number, positive
from stableair.streams import Generator


@noise("sas")
def sas(alpha: float = 1.5, tau: float = 0.1) -> Noise:
    """Symmetric alpha-stable interference, alpha in [0.5, 2], scale tau per entry."""
    alpha, tau = stable.check(alpha, tau)
    return lambda d, source: stable.sample(d, alpha, tau, source)


@noise("gaussian")
def gaussian(std: float) -> Noise:
    """Normal noise of standard deviation `std`."""
    std = number("std", std, 0.0)
    return lambda d, source: (std * source.normal(d)).float()


@noise("student_t")
def student_t(df: float, scale: float = 1) -> Noise:
    """Student's t with `df` degrees of freedom, times `scale`: power-law tails, finite variance from df > 2."""
    df, scale = positive("df", df), number("scale", scale, 0.0)

    def draw(d: int, source: Generator) -> Tensor:
        u, v = source.uniform(d, 2).unbind(-1)  # Bailey's polar method (1994)
        return (scale * (df * torch.expm1(-2 / df * u.log())).sqrt() * (2 * math.pi * v).cos()).float()

    return draw


@noise("middleton")
def middleton(A: float, gamma: float, std: float = 1) -> Noise:
    """Middleton's class A: impulses of index A over a Gaussian background of `gamma` times their power; std in all."""
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
    """No interference."""
    return lambda d, source: torch.zeros(d, device=source.device)
