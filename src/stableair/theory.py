"""What the paper derives, and what follows from the stable law: Lemma 1, Theorem 1, and the best threshold.

Each function names its equation. Where the paper has a slip, form="printed" is the paper's formula and
form="corrected" the one that its own argument gives; docs/theory.md derives the second from the first.
"""

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from stableair import stable
from stableair.checks import InputError, choice, number, positive, whole
from stableair.contracts import ReceiverLike, as_receiver, check_shape
from stableair.receivers import clip

FORMS = "printed", "corrected", "exact"
MOST_STRATA = 10_000_000
OFF = 0.1  # by what share the leading order may miss how often an entry is clipped
P = ParamSpec("P")
T = TypeVar("T")


class Stated(NamedTuple):
    """A value, and what has to be said about it: a condition it breaks, a range it leaves."""

    value: float
    notes: tuple[str, ...] = ()


def tail_constant(alpha: float) -> float:
    """C_alpha of P(|X| > x) ~ C_alpha (tau / x)^alpha, which Lemma 1 leaves out: 0.399 at alpha = 1.5."""
    alpha = number("alpha", alpha, *stable.ALPHA)
    return 2 / math.pi * math.gamma(alpha) * math.sin(math.pi * alpha / 2)


def _within_floats(function: Callable[P, T]) -> Callable[P, T]:
    """Numbers so large or small that a float does not hold what is made of them are refused."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ArithmeticError:
            raise InputError(f"{function.__name__}: these numbers are too large or too small to compute with") from None

    return guarded


@_within_floats
def unclipped(C: float, alpha: float, tau: float, G: float = 0.0, form: str = "exact") -> Stated:
    """Lemma 1: the probability p_C that an entry stays unclipped at threshold C.

    "printed": 1 - (tau / C)^alpha.  "corrected": 1 - C_alpha (tau / (C - sqrt2 G))^alpha, to leading order, with the
    tail constant and the gradient's range; where this misses the clipped share by a tenth or more, as it does for C
    below some 8 tau and for alpha = 2, the value is the law's own, and a note says so.  "exact": the law's own,
    P(|xi| <= C - sqrt2 G). It is a lower bound: up to C + sqrt2 G an entry may be kept, it depends on the gradient.
    """
    C, G = positive("C", C), number("G", G, 0.0)
    alpha, tau = stable.check(alpha, tau)
    choice("form", form, FORMS)
    room = C - math.sqrt(2) * G
    notes: tuple[str, ...] = () if room > 0 else (f"C > sqrt2 G is broken: {C:g} <= {math.sqrt(2) * G:g}",)
    if form == "printed":
        p = 1 - (tau / C) ** alpha
        if p < 0:
            notes += (f"no probability: the printed form holds for C far above tau = {tau:g} only, and C is {C:g}",)
        return Stated(p, notes)
    if room <= 0:
        return Stated(0.0, notes)
    clipped = 2 * stable.sf(torch.tensor(room, dtype=torch.float64), alpha, tau).item() if tau else 0.0
    if form == "corrected":
        leading = tail_constant(alpha) * (tau / room) ** alpha
        if abs(leading - clipped) <= max(OFF * clipped, 1e-12):
            return Stated(1 - leading, notes)
        notes += (f"the law's own: to leading order it would be {1 - leading:g}, which is too far from it here",)
    return Stated(1 - clipped, notes)


@_within_floats
def bound(
    rounds: int, C: float, alpha: float, tau: float, eta: float, L: float, G: float, d: int, gap: float = 1.0,
    form: str = "corrected",
) -> Stated:  # fmt: skip
    """Theorem 1: the bound on the mean over the rounds of E|grad f(w_k)|^2, where gap is f(w_0) - f(w*).

    "printed": 2 gap / (K p (2 - eta L) eta) + eta^2 d L / 2 (p (C / sqrt2 - G)^2 + (1 - p) C^2), p as printed.
    "corrected": 2 gap / (K p (2 - eta L) eta) + eta d L B / (p (2 - eta L)), p exact,
    B = p (C - sqrt2 G)^2 + (1 - p) C^2.
    """
    rounds, d = whole("rounds", rounds, 1), whole("d", d, 1)
    eta, L, G, gap = positive("eta", eta), positive("L", L), number("G", G, 0.0), number("gap", gap, 0.0)
    choice("form", form, FORMS[:2])
    p, notes = unclipped(C, alpha, tau, G, "printed" if form == "printed" else "exact")
    if eta * L >= 2:
        notes += (f"eta < 2 / L is broken: {eta:g} >= {2 / L:g}",)
    if p <= 0 or eta * L >= 2:
        return Stated(math.inf, (*notes, "no bound follows"))
    start = 2 * gap / (rounds * p * (2 - eta * L) * eta)
    if form == "printed":
        return Stated(start + eta**2 * d * L / 2 * (p * (C / math.sqrt(2) - G) ** 2 + (1 - p) * C**2), notes)
    B = p * (C - math.sqrt(2) * G) ** 2 + (1 - p) * C**2
    return Stated(start + eta * d * L * B / (p * (2 - eta * L)), notes)


@lru_cache(maxsize=32)
def _strata(alpha: float, n: int) -> tuple[Tensor, Tensor]:
    """The law as n equally likely values, and the score at each."""
    x = stable.quantile((torch.arange(n, dtype=torch.float64) + 0.5) / n, alpha)
    return x, stable.score(x, alpha)


@_within_floats
def efficacy(rule: ReceiverLike, alpha: float, tau: float = 1.0, n: int = 100_001) -> float:
    """(E psi')^2 / E psi^2 of a rule under SaS(alpha, tau): the weak signal it keeps against the noise it lets in.

    The signal-to-noise ratio of an entry after the rule is this times its squared signal. E psi' is E[psi score], so
    that no derivative of the rule is needed. A rule that is linear in an impulse (none, gnc) has efficacy 0 below
    alpha = 2; the finite n shows it as a small number.
    """
    x, score = _strata(number("alpha", alpha, *stable.ALPHA), whole("n", n, 1, MOST_STRATA))
    psi = check_shape("rule", as_receiver(rule)(positive("tau", tau) * x), n)
    return ((psi * score).mean() / tau).square().item() / psi.square().mean().item()


@_within_floats
def fisher(alpha: float, tau: float = 1.0, n: int = 100_001) -> float:
    """The Fisher information E score^2: no rule has a higher efficacy."""
    _, score = _strata(number("alpha", alpha, *stable.ALPHA), whole("n", n, 1, MOST_STRATA))
    return score.square().mean().item() / positive("tau", tau) ** 2


def best_threshold(alpha: float) -> float:
    """C*(alpha) in units of tau: the threshold whose clipping has the highest efficacy; infinite for the normal law.

    >>> round(best_threshold(1.5), 2)
    1.25
    """
    return _best_threshold(number("alpha", alpha, *stable.ALPHA))


@lru_cache(maxsize=64)
def _best_threshold(alpha: float) -> float:
    if alpha == 2:
        return math.inf
    found = minimize_scalar(lambda log_C: -efficacy(clip(math.exp(log_C)), alpha), bounds=(-7, 3), method="bounded")
    return math.exp(found.x)
