"""Interference: xi_k, one draw per entry of the vector in round k.

A noise draws the d entries of a round: (d, source) -> (d,) float32, on the source's device. A noise with memory has no
state: it is a function of (seed, round) and recomputes earlier rounds from the stream.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from scipy.special import gamma, pdtr
from torch import Tensor

from stableair import stable
from stableair.channels.registries import make_nested, noise
from stableair.contracts import Noise, NoiseLaw, Samples
from stableair.errors import InputError
from stableair.streams import Generator, in_pieces
from stableair.validation import integer, number, positive


def _independent(alpha: float, tau: float, draw: Noise) -> NoiseLaw:
    """Return the law of independent SaS(alpha, tau) entries; complex samples are drawn with `stable.isotropic`.

    A sample is the output of a filter of unit energy. With s samples per unit of time, its scale is
    tau s^(1/2 - 1/alpha): the density of the interference in time does not depend on s.
    """

    def samples(source: Generator, oversampling: int, scale: float) -> Samples:
        tau_s = tau * scale * oversampling ** (1 / 2 - 1 / alpha)
        return lambda first, last: stable.isotropic(last - first, alpha, tau_s, source.ahead(4 * first))

    def combined_scale(source: Generator, weights: Tensor) -> float:
        return weights.abs().pow(alpha).sum().pow(1 / alpha).item()

    return NoiseLaw(draw, samples, combined_scale)


@noise("sas", scale="tau")
def sas(alpha: float = 1.5, tau: float = 0.1) -> Noise:
    """Symmetric alpha-stable interference, as in the paper.

        E exp(i t xi) = exp(-|tau t|^alpha)    (drawn after Chambers, Mallows and Stuck, 1976)

    Args:
        alpha: Tail index, in [0.5, 2]: 1 is the Cauchy law, 2 the normal law of variance 2 tau^2.
        tau: Scale of an entry, at least 0.

    Returns:
        The noise, (d, source) -> (d,) float32.

    Raises:
        InputError: alpha or tau is out of range.

    >>> from stableair.streams import generator
    >>> xi = sas(alpha=1, tau=0.3)(100_000, generator(0, "noise", 0))
    >>> round((xi.abs() < 0.3).double().mean().item(), 2)  # half of a Cauchy law lies within its scale
    0.5
    """
    alpha, tau = stable.check(alpha, tau)
    return _independent(alpha, tau, lambda d, source: stable.sample(d, alpha, tau, source))


@noise("gaussian", scale="std")
def gaussian(std: float) -> Noise:
    """Normal noise of standard deviation `std`.

        xi = std z,    z ~ N(0, 1)

    Args:
        std: Standard deviation of an entry, at least 0.

    Returns:
        The noise, (d, source) -> (d,) float32.

    Raises:
        InputError: std is negative or not finite.

    >>> from stableair.streams import generator
    >>> round(gaussian(std=2)(100_000, generator(0, "noise", 0)).std().item(), 1)
    2.0
    """
    std = number("std", std, 0.0)
    return _independent(2.0, std / math.sqrt(2), lambda d, source: (std * source.normal(d)).float())


@noise("student_t", scale="scale")
def student_t(df: float, scale: float = 1) -> Noise:
    """Student's t, with power-law tails; the variance is finite for df > 2.

        xi = scale sqrt(df (u^(-2/df) - 1)) cos(2 pi v),    u, v uniform on (0, 1)    (Bailey, 1994)

    Args:
        df: Degrees of freedom, above 0; P(|xi| > x) falls like x^-df.
        scale: Factor of the law, at least 0.

    Returns:
        The noise, (d, source) -> (d,) float32.

    Raises:
        InputError: df or scale is out of range.

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


@noise("middleton", scale="std")
def middleton(A: float, gamma: float, std: float = 1) -> Noise:
    """Middleton's class A: impulses and a Gaussian background.

        xi | m ~ N(0, std^2 (m / A + gamma) / (1 + gamma)),    m ~ Poisson(A)    (Middleton, 1977)

    Args:
        A: Impulsive index, the mean number m of active interferers, in [1e-6, 1000].
        gamma: Power of the background relative to that of the impulses, above 0.
        std: Standard deviation of an entry, at least 0.

    Returns:
        The noise, (d, source) -> (d,) float32.

    Raises:
        InputError: An argument is out of range.

    >>> from stableair.streams import generator
    >>> xi = middleton(A=0.1, gamma=0.01)(100_000, generator(0, "noise", 0))
    >>> round((xi.abs() < 0.3).double().mean().item(), 2)  # mostly the background, of standard deviation 0.1
    0.91
    """
    A, gamma, std = number("A", A, 1e-6, 1e3), positive("gamma", gamma), number("std", std, 0.0)
    count = torch.arange(int(A + 12 * math.sqrt(A)) + 30)  # active interferers; larger numbers do not occur in float64
    cumulative = torch.from_numpy(pdtr(count.numpy(), A))  # distribution function of the Poisson law
    deviation = std * ((count.double() / A + gamma) / (1 + gamma)).sqrt()

    def draw(d: int, source: Generator) -> Tensor:
        u, a, b = source.uniform(d, 3).unbind(-1)
        active = torch.searchsorted(cumulative.to(u.device), u.contiguous()).clamp_(max=len(count) - 1)
        return (deviation.to(u.device)[active] * (-2 * a.log()).sqrt() * (2 * math.pi * b).cos()).float()

    return draw


@noise("bursts", scale="tau")
def bursts(alpha: float = 1.5, tau: float = 0.1, length: int = 100) -> Noise:
    """Interference in bursts: entries are SaS(alpha, tau), and all entries of a burst share one strength.

        xi_i = sqrt(A_b) n_i,    n_i ~ N(0, 2 tau^2),    E exp(-s A) = exp(-s^(alpha/2))

    This is the sub-Gaussian vector of Samorodnitsky and Taqqu (1994), with one A_b per burst, drawn after Kanter
    (1975). Within a burst, E exp(i sum_i t_i xi_i) = exp(-tau^alpha (sum_i t_i^2)^(alpha/2)). For alpha = 2, A = 1
    and the law is Gaussian. The first burst starts at entry 0.

    Args:
        alpha: Tail index, in [0.5, 2].
        tau: Scale of an entry, at least 0.
        length: Number of consecutive entries of a burst.

    Returns:
        The noise, (d, source) -> (d,) float32.

    Raises:
        InputError: An argument is out of range.

    >>> from stableair.streams import generator
    >>> xi = bursts(alpha=1, tau=0.3, length=10)(100_000, generator(0, "noise", 0))
    >>> round((xi.abs() < 0.3).double().mean().item(), 2)  # half of a Cauchy law lies within its scale
    0.5
    """
    (alpha, tau), length = stable.check(alpha, tau), integer("length", length, 1)

    def deviations(m: int, source: Generator) -> Tensor:
        u, v = source.uniform(m, 2).unbind(-1)
        return stable.subordinator(u, v, alpha).sqrt_().mul_(math.sqrt(2) * tau)

    return _in_bursts(length, deviations, 2)


def _in_bursts(length: int, deviations: Callable[[int, Generator], Tensor], each: int) -> NoiseLaw:
    """Return normal entries with one standard deviation per burst of `length` entries.

    The deviation of a burst uses `each` positions of the source. The i-th pilot has the deviation of the i-th entry of
    its round, so a burst that is longer than the vector affects the pilots, too. In time, a burst lasts `length` units
    of time, and its samples are complex normal. For fixed bursts, their variance does not depend on the number of
    samples per unit of time.
    """

    def strengths(first: int, last: int, source: Generator) -> Tensor:
        """Standard deviations of the bursts first ... last - 1 of a round."""
        if source.name is not None and source.name[1] == "pilot":
            source = source.at(source.round, "noise")

        def fill(piece: Tensor, start: int, advanced: Generator) -> None:
            piece.copy_(deviations(len(piece), advanced))

        out = torch.empty(last - first, dtype=torch.float64, device=source.device)
        return in_pieces(fill, out, each, source.ahead(each * first))

    def draw(d: int, source: Generator) -> Tensor:
        strength = strengths(0, -(-d // length), source)
        pilots = source.name is not None and source.name[1] == "pilot"

        def fill(piece: Tensor, start: int, advanced: Generator) -> None:
            burst = torch.arange(start, start + len(piece), device=piece.device) // length
            piece.copy_(advanced.normal(len(piece)).mul_(strength[burst]))

        normals = source if pilots else source.ahead(each * len(strength))
        return in_pieces(fill, torch.empty(d, device=source.device), 2, normals)

    def samples(source: Generator, oversampling: int, scale: float) -> Samples:
        duration, normals = length * oversampling, source.substream("samples")

        def window(first: int, last: int) -> Tensor:
            earliest = first // duration
            strength = strengths(earliest, -(-last // duration), source)
            burst = torch.arange(first, last, device=source.device) // duration - earliest
            u, v = normals.ahead(2 * first).uniform(last - first, 2).unbind(-1)
            return torch.polar(strength[burst] * (scale * (-2 * u.log()).sqrt()), 2 * math.pi * v)

        return window

    return NoiseLaw(draw, samples)


NEAREST = 16  # interferers of a field that are summed individually
LARGEST = 1e9  # limit of the density and power of a field, to avoid overflow


@noise("field")
def field(density: float, exponent: float = 4, hold: int = 1, power: float = 1) -> Noise:
    """A Poisson field of interferers whose power falls as r^-exponent.

        xi_i = sum_j r_j^(-exponent/2) B_ij    (Win, Pinto and Shepp, 2009)

    r_j are the distances of a Poisson process in the plane, and B_ij are normal amplitudes, new in every entry. xi_i is
    SaS(alpha, tau) with alpha = 4 / exponent; `field_law` gives tau.

    The numbers pi density r_j^2 are the arrivals of a Poisson process of rate 1. The nearest 16 interferers are summed
    individually. The sum of all others is replaced by a Gaussian whose variance is the mean for this distance of the
    sixteenth interferer. This changes the characteristic function by less than 1e-4 everywhere, for every exponent.

    Args:
        density: Interferers per unit of area, above 0.
        exponent: Exponent of the path loss of the power, in (2, 8].
        hold: Number of consecutive entries for which the interferers keep their positions.
        power: Variance of the amplitudes B, above 0.

    Returns:
        The noise, (d, source) -> (d,) float32.

    Raises:
        InputError: An argument is out of range.

    >>> from stableair.streams import generator
    >>> xi, (alpha, tau) = field(density=0.1)(100_000, generator(0, "noise", 0)), field_law(density=0.1)
    >>> alpha, round((xi.abs() < tau).double().mean().item(), 2)  # the Cauchy law, half of it within its scale
    (1.0, 0.5)
    """
    alpha, _ = field_law(density, exponent, power)
    scale = math.sqrt(power) * (math.pi * density) ** (1 / alpha)

    def deviations(m: int, source: Generator) -> Tensor:
        arrivals = source.uniform(m, NEAREST).log_().neg_().cumsum(-1)
        beyond = arrivals[:, -1] ** (1 - 2 / alpha) / (2 / alpha - 1)  # mean variance of all later arrivals
        return (arrivals.pow_(-2 / alpha).sum(-1) + beyond).sqrt_().mul_(scale)

    return _in_bursts(integer("hold", hold, 1), deviations, NEAREST)


def field_law(density: float, exponent: float = 4, power: float = 1) -> tuple[float, float]:
    """Compute the stable law of the interference of a field.

        alpha = 4 / exponent,    tau^alpha = pi density E|B|^alpha Gamma(1 - alpha) cos(pi alpha / 2)

    The last two factors are pi / 2 at alpha = 1.

    Args:
        density: Interferers per unit of area, above 0.
        exponent: Exponent of the path loss of the power, in (2, 8].
        power: Variance of the amplitudes B, above 0.

    Returns:
        alpha and tau.

    Raises:
        InputError: An argument is out of range.

    >>> alpha, tau = field_law(density=1, exponent=4)
    >>> alpha, round(tau / (math.pi * math.sqrt(2 / math.pi) * math.pi / 2), 9)  # E|B| of a standard normal B
    (1.0, 1.0)
    """
    density, power = (
        number(name, positive(name, value), high=LARGEST) for name, value in (("density", density), ("power", power))
    )
    if not 2 < number("exponent", exponent) <= 8:
        text = f"exponent must be above 2, where the sum is finite, and at most 8: got {exponent:g}"
        raise InputError(text, code="out-of-range", name="exponent", value=exponent)
    alpha = 4 / exponent
    moment = (2 * power) ** (alpha / 2) * gamma((1 + alpha) / 2) / math.sqrt(math.pi)  # E|B|^alpha
    tail = math.pi / 2 if alpha == 1 else gamma(1 - alpha) * math.cos(math.pi * alpha / 2)
    return alpha, float((math.pi * density * moment * tail) ** (1 / alpha))


@noise("markov", specs={"good": noise, "bad": noise})
def markov(good: str = "sas(tau=0.1)", bad: str = "sas(tau=3)", p: float = 0.1, q: float = 0.5) -> Noise:
    """A Markov chain of good and bad rounds, with one interference for each state.

        P(good -> bad) = p,    P(bad -> good) = q    (Gilbert, 1960; Elliott, 1963)

    Round 0 is bad with the stationary probability p / (p + q). On average, 1 / p consecutive rounds are good, and 1 / q
    consecutive rounds are bad.

    Args:
        good: Spec of the interference in good rounds, without memory over the rounds.
        bad: Spec of the interference in bad rounds.
        p: Probability that a bad round follows a good one, in [0, 1].
        q: Probability that a good round follows a bad one, in [0, 1].

    Returns:
        The noise, (d, source) -> (d,) float32.

    Raises:
        InputError: A spec is invalid, p or q is out of range, or both are 0.

    >>> from stableair.streams import generator
    >>> draw = markov("none()", "gaussian(std=1)", p=0.5, q=0.5)
    >>> [bool(draw(3, generator(0, "noise", k)).any()) for k in range(8)]  # which rounds are bad
    [False, False, False, True, True, True, False, True]
    """
    p, q = number("p", p, 0.0, 1.0), number("q", q, 0.0, 1.0)
    if p + q == 0:
        text = "p and q must not both be 0: the chain would have no unique stationary law"
        raise InputError(text, code="conflicting-arguments")
    in_good, in_bad = (make_nested(noise, text, excluded=("markov",)) for text in (good, bad))

    def is_bad(source: Generator) -> bool:
        """Whether the round of the source is bad; payloads and pilots have the same state.

        Round j is bad if u_j < p after a good round, or u_j < 1 - q after a bad one. If u_j is below or above both
        bounds, the previous state does not matter: the search goes back to the last such round, which gives the same
        result as a simulation from round 0.
        """
        low, high = min(p, 1 - q), max(p, 1 - q)
        flipped = False
        for j in range(source.round, 0, -1):
            u = source.at(j, "markov").uniform(1).item()
            if not low <= u < high:
                return (u < low) != flipped
            flipped ^= p > 1 - q  # between the bounds the state is kept, or flipped if p > 1 - q
        return (source.at(0, "markov").uniform(1).item() < p / (p + q)) != flipped

    def of_state(method: str) -> Callable[..., Any] | None:
        """Return a method that calls the noise of the round's state; None if one of the noises lacks it."""
        good, bad = (getattr(one, method, None) for one in (in_good, in_bad))
        return good and bad and (lambda source, *arguments: (bad if is_bad(source) else good)(source, *arguments))

    def draw(d: int, source: Generator) -> Tensor:
        return (in_bad if is_bad(source) else in_good)(d, source)

    return NoiseLaw(draw, of_state("samples"), of_state("combined_scale"))


@noise("none")
def none() -> Noise:
    """No interference.

        xi = 0

    Returns:
        The noise, (d, source) -> (d,) float32.

    >>> from stableair.streams import generator
    >>> none()(2, generator(0, "noise", 0)).tolist()
    [0.0, 0.0]
    """
    return _independent(2.0, 0.0, lambda d, source: torch.zeros(d, device=source.device))
