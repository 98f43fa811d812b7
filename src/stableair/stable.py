"""The symmetric alpha-stable law SaS(alpha, tau), with the characteristic function exp(-|tau t|^alpha).

alpha = 2 is the normal law N(0, 2 tau^2), alpha = 1 the Cauchy law. Below 2 the tails fall like |x|^-alpha, and the
variance is infinite. Everything is computed in float64, for inputs of any dtype.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import gammaln
from torch import Tensor

from stableair import streams
from stableair.errors import InputError
from stableair.validation import integer, number, positive, short_repr, typed

ALPHA = 0.5, 2.0  # supported range

_PIECE = 1 << 16  # entries drawn at once on a CPU: the temporaries stay in cache
_PIECE_GPU = 1 << 24


def check(alpha: float, tau: float) -> tuple[float, float]:
    """Check the parameters of the law.

    Args:
        alpha: Tail index, in [0.5, 2].
        tau: Scale, finite and at least 0.

    Returns:
        alpha and tau as floats.

    >>> check(2, 0)
    (2.0, 0.0)
    """
    return number("alpha", alpha, *ALPHA), number("tau", tau, 0.0, torch.finfo(torch.float64).max)


@typed
def from_uniform(u: Tensor, v: Tensor, alpha: float, tau: float) -> Tensor:
    """Transform two independent uniform variables into an SaS(alpha, tau) variable.

    After Chambers, Mallows and Stuck (1976): with theta = pi (u - 1/2) and W = -log v,

        X = tau sin(alpha theta) / cos(theta)^(1/alpha) * (cos((1 - alpha) theta) / W)^((1 - alpha)/alpha)

    The far tail comes from theta near +-pi/2. The function keeps the distance p of u from the nearer end of (0, 1)
    instead of theta: cos(theta) = sin(pi p) would otherwise lose all its digits.

    Args:
        u: Uniform numbers on (0, 1), of any shape, float64.
        v: Uniform numbers on (0, 1), independent of u, of the same shape.
        alpha: Tail index, in [0.5, 2].
        tau: Scale, at least 0.

    Returns:
        Samples of the shape of u, float64.

    >>> u, v = torch.tensor([0.25, 0.75]).double(), torch.tensor([0.3, 0.3]).double()
    >>> from_uniform(u, v, alpha=1, tau=2).numpy().round(9)
    array([-2.,  2.])
    """
    _check_same_shape(u, v)
    alpha, tau = check(alpha, tau)
    p = torch.minimum(u, 1 - u)
    theta = (0.5 - p).mul_(math.pi)
    # Compute both powers with one exponential, in place, for speed.
    power = (p * math.pi).sin_().log_().mul_(-1 / alpha)
    if alpha != 1:
        power += ((1 - alpha) * theta).cos_().div_(v.log().neg_()).log_().mul_((1 - alpha) / alpha)
    return (alpha * theta).sin_().mul_(power.exp_()).mul_(tau).copysign_(u - 0.5)


@typed
def sample(
    shape: int | tuple[int, ...],
    alpha: float,
    tau: float,
    generator: streams.Generator | torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw independent samples of SaS(alpha, tau).

        E exp(i t X) = exp(-|tau t|^alpha)

    The samples are drawn in float64 and cast to `dtype` last. Float32 uniforms are not enough: at the size of a model,
    a 24-bit uniform hits the end of its interval about once per vector, which creates false impulses, and its grid
    truncates the true tail.

    Args:
        shape: Shape of the result, or the length of a vector.
        alpha: Tail index, in [0.5, 2].
        tau: Scale, at least 0.
        generator: Source of the random numbers; by default torch's global generator.
        dtype: Floating-point dtype of the result.
        device: Device of the result; by default the device of the generator.

    Returns:
        Samples of this shape, dtype and device.

    Raises:
        InputError: The numbers cannot be drawn on this device (`cannot-draw`).

    >>> x = sample((2, 50_000), alpha=1, tau=3.0, generator=streams.generator(0, "noise", 0))
    >>> round((x.abs() < 3).double().mean().item(), 2)  # half of a Cauchy law is within its scale
    0.5
    """
    alpha, tau = check(alpha, tau)
    shape = tuple(integer("shape", side, 0) for side in (shape if isinstance(shape, tuple | list) else (shape,)))
    if not dtype.is_floating_point:
        text = f"dtype must be real, such as torch.float32: got {dtype}"
        raise InputError(text, code="wrong-type", name="dtype", value=dtype)
    try:
        device = torch.device(device or ("cpu" if generator is None else generator.device))
    except (RuntimeError, TypeError):
        text = f"device must be a name such as 'cpu' or 'cuda:0': got {short_repr(device)}"
        raise InputError(text, code="unknown-device", name="device", value=device) from None
    x = torch.empty(integer("the number of entries", math.prod(shape)), dtype=dtype, device=device)

    def fill(piece: Tensor, start: int, source: streams.Generator | torch.Generator | None) -> None:
        u, v = streams.uniform((len(piece), 2), source, device).unbind(-1)
        piece.copy_(from_uniform(u, v, alpha, tau))

    if isinstance(generator, streams.Generator):
        streams.in_pieces(fill, x, 2, generator)
    else:
        for piece in x.split(_PIECE if device.type == "cpu" else _PIECE_GPU):
            fill(piece, 0, generator)
    return x.reshape(shape)


def _check_same_shape(u: Tensor, v: Tensor) -> None:
    if not u.is_floating_point() or not v.is_floating_point() or u.shape != v.shape:
        shapes = f"{u.dtype} {tuple(u.shape)} and {v.dtype} {tuple(v.shape)}"
        raise InputError(f"u and v must be real and of the same shape: got {shapes}", code="wrong-shape", name="u, v")


@typed
def subordinator(u: Tensor, v: Tensor, alpha: float) -> Tensor:
    """Transform two independent uniform variables into a one-sided stable variable A (Kanter, 1975).

    sqrt(A) n is SaS(alpha, tau) for a normal n of variance 2 tau^2. With a = alpha/2, theta = pi u and W = -log v,

        A = sin(a theta) / sin(theta)^(1/a) * (sin((1 - a) theta) / W)^((1 - a)/a),    E exp(-s A) = exp(-s^(alpha/2))

    Args:
        u: Uniform numbers on (0, 1), of any shape, float64.
        v: Uniform numbers on (0, 1), independent of u, of the same shape.
        alpha: Tail index of the product, in [0.5, 2]; for 2, A is 1.

    Returns:
        Samples of A of the shape of u, float64.

    >>> subordinator(torch.tensor([0.3, 0.9]).double(), torch.tensor([0.2, 0.5]).double(), alpha=2).tolist()
    [1.0, 1.0]
    """
    _check_same_shape(u, v)
    a = check(alpha, 1.0)[0] / 2
    if a == 1:
        return torch.ones_like(u)
    theta = math.pi * u
    sine = (math.pi * torch.minimum(u, 1 - u)).sin_()  # accurate near pi, which gives the impulses
    logarithm = (((1 - a) * theta).sin_() / -v.log()).log_().mul_((1 - a) / a)
    return logarithm.sub_(sine.log_().div_(a)).exp_().mul_((a * theta).sin_())


@typed
def isotropic(n: int, alpha: float, tau: float, source: streams.Generator) -> Tensor:
    """Draw complex samples of the isotropic law whose real and imaginary parts are SaS(alpha, tau).

        E exp(i Re(conj(w) Z)) = exp(-(tau |w|)^alpha)

    Z is sqrt(A) times a complex normal variable of variance 2 tau^2 in each part, with A from `subordinator`. The parts
    are not independent: an impulse is large in both. A sample takes four positions of the source.

    Args:
        n: Number of samples.
        alpha: Tail index, in [0.5, 2].
        tau: Scale of each part, at least 0.
        source: Source of the random numbers; advanced by 4 n positions.

    Returns:
        Samples, (n,) complex128.

    >>> z = isotropic(50_000, 1, 3.0, streams.generator(0, "noise", 0))
    >>> [round((x.abs() < 3).double().mean().item(), 2) for x in (z.real, (z * 1j**0.5).real)]  # at any angle
    [0.5, 0.5]
    """
    alpha, tau = check(alpha, tau)
    u, v, w, turn = source.uniform(integer("n", n, 0), 4).unbind(-1)
    radius = subordinator(u, v, alpha).mul_(w.log().neg_()).sqrt_().mul_(2 * tau)
    return torch.polar(radius, turn * (2 * math.pi))


def pdf(x: Tensor, alpha: float, tau: float = 1.0) -> Tensor:
    """Probability density of SaS(alpha, tau).

        pdf(x) = (1 / pi) int_0^inf cos(x t) exp(-(tau t)^alpha) dt

    Args:
        x: Points, of any shape.
        alpha: Tail index, in [0.5, 2].
        tau: Scale, above 0.

    Returns:
        Densities at the points, float64.

    >>> round(math.pi * pdf(torch.tensor(1.0), alpha=1).item(), 9)  # Cauchy: 1 / (pi (1 + x^2))
    0.5
    """
    law, z, tau = _standard(x, alpha, tau)
    return law.log_pdf(z.abs()).exp() / tau


def sf(x: Tensor, alpha: float, tau: float = 1.0) -> Tensor:
    """Survival function P(X > x) of SaS(alpha, tau), accurate far into the tail.

    For large x it is the sum over k = 1, 2, ... of (Bergstrom, 1952)

        (-1)^(k + 1) Gamma(k alpha) / k! sin(pi k alpha / 2) (x / tau)^(-k alpha) / pi

    Args:
        x: Points, of any shape.
        alpha: Tail index, in [0.5, 2].
        tau: Scale, above 0.

    Returns:
        Probabilities, float64.

    >>> x = torch.tensor(1e12, dtype=torch.float64)
    >>> round((math.pi * x * sf(x, alpha=1)).item(), 9)  # Cauchy: 1 / (pi x)
    1.0
    """
    law, z, _ = _standard(x, alpha, tau)
    tail = law.log_sf(z.abs()).exp()
    return torch.where(z < 0, 1 - tail, tail)


def cdf(x: Tensor, alpha: float, tau: float = 1.0) -> Tensor:
    """Cumulative distribution function P(X <= x) of SaS(alpha, tau).

    Args:
        x: Points, of any shape.
        alpha: Tail index, in [0.5, 2].
        tau: Scale, above 0.

    Returns:
        Probabilities, float64.

    >>> cdf(torch.tensor([-1.0, 0.0, 1.0]), alpha=1).numpy().round(9)  # Cauchy
    array([0.25, 0.5 , 0.75])
    """
    return sf(-_real("x", x), alpha, tau)


def score(x: Tensor, alpha: float, tau: float = 1.0) -> Tensor:
    """Score -pdf'(x) / pdf(x) of SaS(alpha, tau), the optimal nonlinearity for a weak signal.

    It is x / (2 tau^2) for the normal law and 2 x / (tau^2 + x^2) for the Cauchy law.

    Args:
        x: Points, of any shape.
        alpha: Tail index, in [0.5, 2].
        tau: Scale, above 0.

    Returns:
        Scores at the points, float64.

    >>> score(torch.tensor([1.0, 3.0]), alpha=1).numpy().round(6)
    array([1. , 0.6])
    """
    law, z, tau = _standard(x, alpha, tau)
    return law.score(z.abs()) * z.sign() / tau


def quantile(p: Tensor, alpha: float, tau: float = 1.0) -> Tensor:
    """Quantiles of SaS(alpha, tau): the x with P(X <= x) = p.

    Args:
        p: Probabilities in [0, 1], of any shape.
        alpha: Tail index, in [0.5, 2].
        tau: Scale, above 0.

    Returns:
        Quantiles, float64.

    >>> quantile(torch.tensor([0.5, 0.75]), alpha=1, tau=2.0).numpy().round(6)
    array([0., 2.])
    """
    law, p, _ = _standard(p, alpha, 1.0)
    tau = positive("tau", tau)
    if not ((p >= 0) & (p <= 1)).all():
        raise InputError("p must be in [0, 1]", code="out-of-range", name="p", low=0, high=1)
    extreme = torch.minimum(p, 1 - p)  # below 1e-100 the first term of the series is exact
    tail = extreme.clamp_min(1e-100)
    z = law.start(tail)
    for _ in range(6):  # Newton's method on the logarithm of the tail: in z near the centre, in log z in the tail
        excess, slope = law.log_sf(z) - tail.log(), (law.log_pdf(z) - law.log_sf(z)).exp()
        z = torch.where(z < 1, (z + excess / slope).clamp_min(0), z * (excess / (slope * z)).exp())
    z = torch.where(extreme < tail, law.start(extreme), z)
    return tau * torch.where(p < 0.5, -z, z)


def _standard(x: Tensor, alpha: float, tau: float) -> tuple["_Law", Tensor, float]:
    """Return the law of scale 1, x / tau, and tau."""
    alpha, tau = number("alpha", alpha, *ALPHA), positive("tau", tau)
    z = _real("x", x) / tau
    if z.isnan().any():
        raise InputError("x must not be NaN", code="not-finite", name="x")
    return _law(alpha), z, tau


def _real(name: str, x: object) -> Tensor:
    """Return real numbers of any kind as a float64 tensor."""
    try:
        tensor = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        text = f"{name} must be a tensor of real numbers: got {short_repr(x)}"
        raise InputError(text, code="wrong-type", name=name, value=x) from None
    if tensor.is_complex():
        text = f"{name} must be a tensor of real numbers: got {tensor.dtype}"
        raise InputError(text, code="wrong-type", name=name, value=tensor.dtype)
    return tensor.double()


_TAIL = 20.0  # from here on the tail series is used: twelve terms give 14 digits for every alpha
_TERMS = 12
_NODES = 2048
_FINEST = 0.02  # nodes are evenly spaced in asinh(x / _FINEST): dense at the peak, which is sharp for small alpha


class _Law(NamedTuple):
    """SaS(alpha, 1) on x >= 0: cubic Hermite tables up to _TAIL, then the tail series."""

    alpha: float
    step: float
    tables: Tensor  # (3, 2, nodes): log sf, log pdf and score; each with its value and its slope times the step
    series: Tensor  # (terms,): sf(x) = sum_k series[k - 1] x^(-k alpha)

    def log_sf(self, x: Tensor) -> Tensor:
        if self.alpha == 2:
            return torch.special.log_ndtr(-x / math.sqrt(2))
        return torch.where(x < _TAIL, self._table(0, x), self._sum(x, 0).log() - self.alpha * x.log())

    def log_pdf(self, x: Tensor) -> Tensor:
        if self.alpha == 2:
            return -x.square() / 4 - math.log(math.sqrt(4 * math.pi))
        return torch.where(x < _TAIL, self._table(1, x), self._sum(x, 1).log() - (self.alpha + 1) * x.log())

    def score(self, x: Tensor) -> Tensor:
        if self.alpha == 2:
            return x / 2
        return torch.where(x < _TAIL, self._table(2, x), self._sum(x, 2) / self._sum(x, 1) / x)

    def start(self, tail: Tensor) -> Tensor:
        """First guess of the x with sf(x) = tail: the node below x, or the first term of the tail series."""
        if self.alpha == 2:
            return -torch.special.ndtri(tail) * math.sqrt(2)
        falling = self.tables[0, 0].to(tail.device)
        node = torch.searchsorted(-falling, -tail.log()).clamp(max=_NODES - 1)
        far = (self.series[0].to(tail.device) / tail) ** (1 / self.alpha)
        return torch.where(node == _NODES - 1, far, _FINEST * (node * self.step).sinh())

    def _table(self, which: int, x: Tensor) -> Tensor:
        position = (x.clamp(max=_TAIL) / _FINEST).asinh() / self.step
        node = position.long().clamp(max=_NODES - 2)
        t = position - node
        value, slope = self.tables[which].to(x.device)
        rise = value[node + 1] - value[node]
        left, right = slope[node] - rise, rise - slope[node + 1]
        return value[node] + t * (rise + (1 - t) * (left * (1 - t) + right * t))

    def _sum(self, x: Tensor, derivative: int) -> Tensor:
        """The series of sf, pdf or minus the derivative of pdf, without its leading power of x, by Horner's rule."""
        k = torch.arange(1, _TERMS + 1, dtype=torch.float64)
        factors = (torch.ones_like(k), k * self.alpha, k * self.alpha * (k * self.alpha + 1))[derivative]
        z = x.clamp(min=1) ** -self.alpha
        total = torch.zeros_like(z)
        for coefficient in reversed((self.series * factors).tolist()):
            total = total * z + coefficient
        return total


@lru_cache(maxsize=64)
def _law(alpha: float) -> _Law:
    k = np.arange(1, _TERMS + 1)
    series = -((-1.0) ** k) * np.exp(gammaln(k * alpha) - gammaln(k + 1)) * np.sin(np.pi * k * alpha / 2) / np.pi
    step = math.asinh(_TAIL / _FINEST) / (_NODES - 1)
    if alpha == 2:  # the normal law needs no table
        return _Law(alpha, step, torch.empty(0), torch.from_numpy(series))
    y = step * np.arange(_NODES)
    x, stretch = _FINEST * np.sinh(y), step * _FINEST * np.cosh(y)  # stretch: dx per node
    tail, density, first, second = _contour(x, alpha)
    score = -first / density
    tables = [
        (np.log(tail), -density / tail * stretch),
        (np.log(density), -score * stretch),
        (score, (score**2 - second / density) * stretch),
    ]
    return _Law(alpha, step, torch.tensor(np.array(tables)), torch.from_numpy(series))


def _contour(x: np.ndarray, alpha: float) -> np.ndarray:
    """sf, pdf and its first two derivatives at x >= 0, from their Fourier integrals to about 14 digits: (4, n).

    With t on the ray of angle phi in the complex plane, where both exp(i x t) and exp(-t^alpha) decay,
        pi pdf(x) = Re int exp(i x t) exp(-t^alpha) dt,    pi sf(x) = pi/2 - Im int expm1(i x t) exp(-t^alpha) dt/t.
    For large x these are differences of nearly equal numbers; there exp(-t^alpha) - 1 replaces exp(-t^alpha), which
    removes the terms that cancel. In u = log |t| the trapezoidal rule converges exponentially.
    """
    centre = 1.0  # the first form is used below, the second above
    sector = min(math.pi, math.pi / (2 * alpha))
    phi, h = sector / 2, math.pi * sector / 38
    decayed = max(math.log(45 / math.cos(alpha * phi)) / alpha, math.log(45 / (centre * math.sin(phi))))
    t = np.exp(np.arange(-40 / min(alpha, 1), decayed + h, h) + 1j * phi)
    out = np.empty((4, len(x)))
    for side, near in ((x < centre, True), (x >= centre, False)):
        phase = 1j * np.outer(x[side], t)
        weight = h * (np.exp(-(t**alpha)) if near else np.expm1(-(t**alpha)))
        wave = np.exp(phase)
        out[0, side] = math.pi / 2 - (np.expm1(phase) @ weight).imag if near else -(wave @ weight).imag
        for n in (1, 2, 3):  # each derivative adds a factor i t
            out[n, side] = (wave @ (weight * t * (1j * t) ** (n - 1))).real
    return out / math.pi


def estimate(x: Tensor) -> tuple[float, float]:
    """Estimate alpha and tau from the empirical characteristic function phi of a sample.

    The slope of log(-log phi(t)) over log t is alpha (Koutrouvelis, 1980). The sample is centred at its median. The
    points t = 1/8, 1/4, 1/2 and 1 over the scale of the sample need one cosine per entry, since cos(2 a) = 2 cos(a)^2 -
    1. At such small t, a weak signal in the sample changes phi little.

    Args:
        x: Sample of at least two finite entries, of any shape.

    Returns:
        The estimates of alpha and tau.

    Raises:
        InputError: The sample has fewer than two entries, an entry that is not finite, or equal entries only
            (`invalid-sample`).

    >>> x = sample(100_000, alpha=1.5, tau=0.3, generator=streams.generator(0, "noise", 0))
    >>> [round(estimated, 1) for estimated in estimate(x)]
    [1.5, 0.3]
    """
    x = x if isinstance(x, Tensor) and x.is_floating_point() else _real("x", x)
    x = x.detach().flatten()
    if x.numel() < 2 or not x.isfinite().all():
        text = f"estimate needs at least two entries, all finite: got {x.numel()} entries"
        raise InputError(text, code="invalid-sample", entries=x.numel())
    subsample = x[:: max(1, x.numel() // 100_000)].double().sort().values  # enough for a rough scale
    low, middle, high = (subsample[int(q * (len(subsample) - 1))].item() for q in (0.25, 0.5, 0.75))
    scale = (high - low) / 2 or (x.double() - middle).abs().mean().item()
    if not scale > 0:
        raise InputError("estimate needs a sample that varies: all its entries are equal", code="invalid-sample")
    sums = torch.zeros(4, dtype=torch.float64, device=x.device)
    for piece in x.split(1 << 15 if x.device.type == "cpu" else _PIECE_GPU):
        wave = ((piece - middle) / (8 * scale)).cos()
        for i in range(4):
            sums[i] += wave.sum(dtype=torch.float64)
            wave = 2 * wave.square() - 1
    t = torch.tensor([0.125, 0.25, 0.5, 1.0], dtype=torch.float64) / scale
    phi = (sums.cpu() / x.numel()).clamp(1e-6, 1 - 1e-12)
    exponent, log_t = (-phi.log()).log(), t.log()
    slope = ((log_t - log_t.mean()) * exponent).sum() / ((log_t - log_t.mean()) ** 2).sum()
    alpha = min(max(slope.item(), ALPHA[0]), ALPHA[1])
    return alpha, math.exp((exponent.mean() / alpha - log_t.mean()).item())
