"""Eq. (3), the radio channel: g_k = (1/N) sum_n h_{n,k} grad f_n(w_k) + xi_k. Drawn first, applied after."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from scipy.special import gammaincinv, gammaln, i0e, i1e
from scipy.stats import poisson
from torch import Tensor

from stableair import stable
from stableair.checks import InputError, number, positive
from stableair.local import Upload
from stableair.spec import Registry
from stableair.streams import Generator, generator
from stableair.vector import NOTHING, Layout, pooled

NOISE_ON = "mean", "sum"
Fading = Callable[[int, Generator], Tensor]  # (n, source) -> (n,) float64, amplitudes
Noise = Callable[[int, Generator], Tensor]  # (d, source) -> (d,) float32

fading = Registry("fading", "fadings")
noise = Registry("noise", "noises")


class Fade(NamedTuple):
    """What the channel does in one round."""

    h: Tensor  # (N,) float64, on the host
    xi: Tensor  # (d,)
    pilot: Tensor | None = None  # noise-only symbols, where a receiver asked for them


class Received(NamedTuple):
    """What reaches the server in one round, and what it would have been."""

    g: Tensor  # (d,), faded sum and interference: Eq. (3)
    stats: Tensor  # (b,), the norm buffers of all clients together
    clean: Tensor  # (d,) float64, (1/N) sum of the unfaded payloads
    loss: Tensor  # (), mean of the clients' training losses
    pilot: Tensor | None = None  # noise-only symbols, where a receiver asked for them


@dataclass(frozen=True)
class Channel:
    """Analog over-the-air aggregation with flat fading and additive interference."""

    fading: Fading
    noise: Noise
    pilots: int = 0  # symbols a round in which no client sends
    noise_on: str = "mean"  # the interference hits the mean, as in Eq. (3), or the sum, and is then divided by N too
    norms: Layout = NOTHING  # of the norm buffers on the side link

    def draw(self, n: int, d: int, seed: int, k: int, device: torch.device | str = "cpu") -> Fade:
        """h_{n,k} and xi_k, a function of (seed, k) alone."""
        h = shaped("fading", self.fading(n, generator(seed, "fading", k)), n).double()
        xi = shaped("noise", self.noise(d, generator(seed, "noise", k, device=device)), d).float()
        pilot = self.noise(self.pilots, generator(seed, "pilot", k, device=device)) if self.pilots else None
        if self.noise_on == "sum":
            xi, pilot = xi / n, None if pilot is None else pilot / n
        return Fade(h, xi, pilot)

    def superpose(self, uploads: Iterable[Upload], fade: Fade) -> Received:
        """Eq. (3), client by client in float64, so that the chunks of the uploads do not change the sum."""
        h = fade.h.tolist()
        g, clean = torch.zeros(2, len(fade.xi), dtype=torch.float64, device=fade.xi.device)
        stats = loss = 0.0
        for upload in uploads:
            for client, update in zip(upload.clients.tolist(), upload.update, strict=True):
                g.add_(update, alpha=h[client])
                clean.add_(update)
            stats, loss = stats + upload.stats.double().sum(0), loss + upload.loss.double().sum()
            kind = upload.update.dtype
            del upload, update  # before the next is made
        n = len(h)
        g = (g / n + fade.xi).to(fade.xi.dtype)
        if g.isnan().any():
            raise InputError("the channel's noise or fading is NaN; every entry must be a number or infinite")
        return Received(g, pooled(stats / n, self.norms).to(kind), clean / n, loss / n, fade.pilot)


def shaped(what: str, out: Any, length: int) -> Tensor:
    """What a component returned, held to its contract: one tensor with `length` entries."""
    if not isinstance(out, Tensor) or out.shape != (length,):
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise InputError(f"the {what} must return a tensor of shape ({length},): got {found}")
    return out


@fading("rayleigh")
def rayleigh(mean=1, power=None) -> Fading:
    """Rayleigh amplitudes of the given mean (the paper's: 1), or with `power` of the given mean square."""
    if power is None:
        scale = positive("mean", mean) * math.sqrt(2 / math.pi)
    elif mean != 1:
        raise InputError(f"give the mean or the power, not both: got mean={mean}, power={power}")
    else:
        scale = math.sqrt(positive("power", power) / 2)
    return lambda n, source: scale * (-2 * source.uniform(n).log()).sqrt()


@fading("rician")
def rician(K, mean=1) -> Fading:
    """Rician amplitudes: a direct path K times as strong as the scattered ones; K = 0 is Rayleigh."""
    K, mean = number("K", K, 0.0, 1e6), positive("mean", mean)
    direct = math.sqrt(2 * K)  # in units of the scattered paths' standard deviation
    expected = math.sqrt(math.pi / 2) * ((1 + K) * i0e(K / 2) + K * i1e(K / 2))

    def draw(n: int, source: Generator) -> Tensor:
        in_phase, quadrature = source.normal(n, 2).unbind(-1)
        return (mean / expected) * torch.hypot(in_phase + direct, quadrature)

    return draw


@fading("nakagami")
def nakagami(m, mean=1) -> Fading:
    """Nakagami-m amplitudes, m >= 1/2; m = 1 is Rayleigh, a large m hardly fades."""
    m, mean = number("m", m, 0.5, 1e6), positive("mean", mean)
    expected = math.exp(gammaln(m + 0.5) - gammaln(m))
    return lambda n, source: (mean / expected) * torch.from_numpy(gammaincinv(m, source.uniform(n).numpy())).sqrt()


@fading("unit")
def unit() -> Fading:
    """No fading: every amplitude is 1."""
    return lambda n, source: torch.ones(n, dtype=torch.float64)


@noise("sas")
def sas(alpha=1.5, tau=0.1) -> Noise:
    """Symmetric alpha-stable interference, alpha in [0.5, 2], scale tau per entry."""
    alpha, tau = stable.check(alpha, tau)
    return lambda d, source: stable.sample(d, alpha, tau, source)


@noise("gaussian")
def gaussian(std) -> Noise:
    """Normal noise of standard deviation `std`."""
    std = number("std", std, 0.0)
    return lambda d, source: (std * source.normal(d)).float()


@noise("student_t")
def student_t(df, scale=1) -> Noise:
    """Student's t with `df` degrees of freedom, times `scale`: power-law tails, finite variance from df > 2."""
    df, scale = positive("df", df), number("scale", scale, 0.0)

    def draw(d: int, source: Generator) -> Tensor:
        u, v = source.uniform(d, 2).unbind(-1)  # Bailey's polar method (1994)
        return (scale * (df * torch.expm1(-2 / df * u.log())).sqrt() * (2 * math.pi * v).cos()).float()

    return draw


@noise("middleton")
def middleton(A, gamma, std=1) -> Noise:
    """Middleton's class A: impulses of index A over a Gaussian background of `gamma` times their power; std in all."""
    A, gamma, std = number("A", A, 1e-6, 1e3), positive("gamma", gamma), number("std", std, 0.0)
    count = torch.arange(int(A + 12 * math.sqrt(A)) + 30)  # interferers at work at once; more never are
    cumulative = torch.from_numpy(poisson.cdf(count.numpy(), A))
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
