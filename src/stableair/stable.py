"""The symmetric alpha-stable law SaS(alpha, tau), characteristic function exp(-|tau t|^alpha).

alpha = 2 is the normal law N(0, 2 tau^2), alpha = 1 the Cauchy law; below 2 the tails fall like |x|^-alpha, and the
variance is infinite.
"""

import math

import torch
from torch import Tensor

from stableair import streams
from stableair.checks import number

ALPHA = 0.5, 2.0  # the range in which everything here is tested

_PIECE = {"cpu": 1 << 15}  # entries drawn at once: on a CPU the temporaries stay in cache
_PIECE_ELSEWHERE = 1 << 24


def check(alpha: float, tau: float) -> tuple[float, float]:
    """(alpha, tau) as floats, refused outside alpha in [0.5, 2], tau in [0, inf)."""
    return number("alpha", alpha, *ALPHA), number("tau", tau, 0.0, torch.finfo(torch.float64).max)


def from_uniform(u: Tensor, v: Tensor, alpha: float, tau: float) -> Tensor:
    """SaS(alpha, tau) from two independent uniforms on (0, 1), after Chambers, Mallows and Stuck (1976).

    With theta = pi (u - 1/2) and W = -log v, in float64,
    X = tau sin(alpha theta) / cos(theta)^(1/alpha) * (cos((1 - alpha) theta) / W)^((1 - alpha)/alpha).

    u, v: (...) float64 -> (...) float64. The far tail comes from theta near +-pi/2; its distance p from the end
    of the interval is kept instead of theta, because cos(theta) = sin(pi p) would otherwise lose all its digits.

    >>> from_uniform(torch.tensor(0.75).double(), torch.tensor(0.3).double(), alpha=1, tau=2).item()   # 2 tan(pi/4)
    2.0
    """
    p = torch.minimum(u, 1 - u)
    theta = math.pi * (0.5 - p)
    x = (alpha * theta).sin() * (math.pi * p).sin().pow(-1 / alpha)
    if alpha != 1:
        x *= (((1 - alpha) * theta).cos() / -v.log()).pow((1 - alpha) / alpha)
    return tau * torch.where(u < 0.5, -x, x)


def sample(
    shape: int | tuple[int, ...],
    alpha: float,
    tau: float,
    generator: streams.Generator | torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """I.i.d. entries of SaS(alpha, tau): `shape` in `dtype`, drawn in float64 and cast last.

    Float32 uniforms would not do: at the size of a model a 24-bit uniform hits the end of its interval about once a
    vector, which makes impulses that do not exist, and its grid cuts those that do.
    """
    alpha, tau = check(alpha, tau)
    device = torch.device(device or getattr(generator, "device", "cpu"))
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    x = torch.empty(math.prod(shape), dtype=dtype, device=device)
    for piece in x.split(_PIECE.get(device.type, _PIECE_ELSEWHERE)):
        u, v = streams.uniform((len(piece), 2), generator, device).unbind(-1)
        piece.copy_(from_uniform(u, v, alpha, tau))
    return x.reshape(shape)
