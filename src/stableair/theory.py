"""The paper's results and consequences of the stable law: Lemma 1, Theorem 1, and the best threshold.

Where the paper has a slip, form="printed" is the paper's formula and form="corrected" the one that its proof gives;
docs/theory.md derives the corrected form.
"""

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from stableair import stable
from stableair.contracts import ReceiverLike
from stableair.errors import InputError
from stableair.receivers import as_receiver, clip
from stableair.validation import choice, integer, number, positive
from stableair.vector import check_shape

FORMS = "printed", "corrected", "exact"
MAX_STRATA = 10_000_000
MAX_RELATIVE_ERROR = 0.1  # of the leading-order clipping probability; beyond it the exact one is used
P = ParamSpec("P")
T = TypeVar("T")


class ValueWithNotes(NamedTuple):
    """A value with notes on it, such as a violated condition."""

    value: float
    notes: tuple[str, ...] = ()


def tail_constant(alpha: float) -> float:
    """C_alpha of P(|X| > x) ~ C_alpha (tau / x)^alpha, which Lemma 1 leaves out: 0.399 at alpha = 1.5."""
    alpha = number("alpha", alpha, *stable.ALPHA)
    return 2 / math.pi * math.gamma(alpha) * math.sin(math.pi * alpha / 2)


def _within_floats(function: Callable[P, T]) -> Callable[P, T]:
    """Raise an InputError instead of an overflow or a division by zero."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ArithmeticError:
            text = f"{function.__name__}: these numbers are too large or too small to compute with"
            raise InputError(text, code="float-overflow", function=function.__name__) from None

    return guarded


@_within_floats
def unclipped(C: float, alpha: float, tau: float, G: float = 0.0, form: str = "exact") -> ValueWithNotes:
    """Lemma 1: the probability p_C that an entry stays unclipped at threshold C.

    - "printed": 1 - (tau / C)^alpha.
    - "corrected": 1 - C_alpha (tau / (C - sqrt2 G))^alpha, to leading order, with the tail constant and the gradient's
      range. Where the relative error of the clipping probability exceeds 0.1, as for C below about 8 tau and for
      alpha = 2, the value is the exact one, and a note reports it.
    - "exact": P(|xi| <= C - sqrt2 G). This is a lower bound: between C - sqrt2 G and C + sqrt2 G it depends on the
      gradient whether an entry is clipped.

    Args:
        C: Threshold.
        alpha: Tail index of the interference.
        tau: Scale of the interference.
        G: Bound on the norm of every client's gradient.
        form: "printed", "corrected" or "exact".
    """
    C, G = positive("C", C), number("G", G, 0.0)
    alpha, tau = stable.check(alpha, tau)
    choice("form", form, FORMS)
    margin = C - math.sqrt(2) * G
    notes: tuple[str, ...] = () if margin > 0 else (f"C > sqrt2 G is violated: {C:g} <= {math.sqrt(2) * G:g}",)
    if form == "printed":
        p = 1 - (tau / C) ** alpha
        if p < 0:
            notes += (f"not a probability: the printed form requires C far above tau = {tau:g}, and C is {C:g}",)
        return ValueWithNotes(p, notes)
    if margin <= 0:
        return ValueWithNotes(0.0, notes)
    clipped = 2 * stable.sf(torch.tensor(margin, dtype=torch.float64), alpha, tau).item() if tau else 0.0
    if form == "corrected":
        leading = tail_constant(alpha) * (tau / margin) ** alpha
        if abs(leading - clipped) <= max(MAX_RELATIVE_ERROR * clipped, 1e-12):
            return ValueWithNotes(1 - leading, notes)
        notes += (f"the exact value: the leading order, {1 - leading:g}, is too inaccurate here",)
    return ValueWithNotes(1 - clipped, notes)


@_within_floats
def bound(
    rounds: int, C: float, alpha: float, tau: float, eta: float, L: float, G: float, d: int, gap: float = 1.0,
    form: str = "corrected",
) -> ValueWithNotes:  # fmt: skip
    """Theorem 1: the bound on the mean over the rounds of E|grad f(w_k)|^2.

    - "printed": 2 gap / (K p (2 - eta L) eta) + eta^2 d L / 2 (p (C / sqrt2 - G)^2 + (1 - p) C^2), p as printed.
    - "corrected": 2 gap / (K p (2 - eta L) eta) + eta d L B / (p (2 - eta L)), p exact,
      B = p (C - sqrt2 G)^2 + (1 - p) C^2.

    Args:
        rounds: Number of rounds K.
        C: Threshold.
        alpha: Tail index of the interference.
        tau: Scale of the interference.
        eta: Step size.
        L: Smoothness of the objective.
        G: Bound on the norm of every client's gradient.
        d: Number of entries.
        gap: f(w_0) - f(w*).
        form: "printed" or "corrected".
    """
    rounds, d = integer("rounds", rounds, 1), integer("d", d, 1)
    eta, L, G, gap = positive("eta", eta), positive("L", L), number("G", G, 0.0), number("gap", gap, 0.0)
    choice("form", form, FORMS[:2])
    p, notes = unclipped(C, alpha, tau, G, "printed" if form == "printed" else "exact")
    if eta * L >= 2:
        notes += (f"eta < 2 / L is violated: {eta:g} >= {2 / L:g}",)
    if p <= 0 or eta * L >= 2:
        return ValueWithNotes(math.inf, (*notes, "there is no bound"))
    start = 2 * gap / (rounds * p * (2 - eta * L) * eta)
    if form == "printed":
        return ValueWithNotes(start + eta**2 * d * L / 2 * (p * (C / math.sqrt(2) - G) ** 2 + (1 - p) * C**2), notes)
    B = p * (C - math.sqrt(2) * G) ** 2 + (1 - p) * C**2
    return ValueWithNotes(start + eta * d * L * B / (p * (2 - eta * L)), notes)


@lru_cache(maxsize=32)
def _strata(alpha: float, n: int) -> tuple[Tensor, Tensor]:
    """Represent the law by n equally likely values; return the values and their scores: (n,), (n,)."""
    x = stable.quantile((torch.arange(n, dtype=torch.float64) + 0.5) / n, alpha)
    return x, stable.score(x, alpha)


@_within_floats
def efficacy(rule: ReceiverLike, alpha: float, tau: float = 1.0, n: int = 100_001) -> float:
    """(E psi')^2 / E psi^2 of a rule under SaS(alpha, tau): the weak signal that it preserves, relative to the noise.

    The SNR of an entry after the rule is the efficacy times its squared signal. E psi' is computed as E[psi score],
    which needs no derivative of the rule. A rule that is linear in an impulse (none, gnc) has efficacy 0 below
    alpha = 2; a finite n gives a small number.

    Args:
        rule: Receiver psi, (n,) -> (n,).
        alpha: Tail index of the interference.
        tau: Scale of the interference.
        n: Number of strata that represent the law.
    """
    x, score = _strata(number("alpha", alpha, *stable.ALPHA), integer("n", n, 1, MAX_STRATA))
    psi = check_shape("rule", as_receiver(rule)(positive("tau", tau) * x), n)
    return ((psi * score).mean() / tau).square().item() / psi.square().mean().item()


@_within_floats
def fisher(alpha: float, tau: float = 1.0, n: int = 100_001) -> float:
    """The Fisher information E score^2, the highest efficacy of any rule."""
    _, score = _strata(number("alpha", alpha, *stable.ALPHA), integer("n", n, 1, MAX_STRATA))
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
    result = minimize_scalar(lambda log_C: -efficacy(clip(math.exp(log_C)), alpha), bounds=(-7, 3), method="bounded")
    return math.exp(result.x)
