"""Results of the paper and of the stable law: Lemma 1, Theorem 1, and the best threshold.

Some formulas of the paper contain errors. For these, form="printed" selects the formula of the paper, and
form="corrected" the formula that follows from its proof. docs/theory.md derives the corrected forms.
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
MAX_RELATIVE_ERROR = 0.1  # of the leading-order clipping probability; above it, the exact probability is used
P = ParamSpec("P")
T = TypeVar("T")


class ValueWithNotes(NamedTuple):
    """A value, and notes such as the name of a violated condition."""

    value: float  # the value itself
    notes: tuple[str, ...] = ()  # violated conditions and approximations, in words


def tail_constant(alpha: float) -> float:
    """Tail constant C_alpha of the stable law, which Lemma 1 leaves out.

        P(|X| > x) ~ C_alpha (tau / x)^alpha,    C_alpha = (2 / pi) Gamma(alpha) sin(pi alpha / 2)

    Args:
        alpha: Tail index, in [0.5, 2].

    Returns:
        C_alpha, which vanishes at alpha = 2.

    >>> round(tail_constant(1.5), 3)
    0.399
    """
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
    - "corrected": 1 - C_alpha (tau / (C - sqrt2 G))^alpha, to leading order, with the `tail_constant` and the range of
      the gradient. If the relative error of the clipping probability exceeds 0.1, as for C below about 8 tau and for
      alpha = 2, the value is the exact one, and a note reports it.
    - "exact": P(|xi| <= C - sqrt2 G). This is a lower bound: between C - sqrt2 G and C + sqrt2 G the gradient decides
      whether an entry is clipped.

    Args:
        C: Clipping threshold, above 0.
        alpha: Tail index of the interference, in [0.5, 2].
        tau: Scale of the interference, at least 0.
        G: Bound on the norm of every client's gradient.
        form: "printed", "corrected" or "exact".

    Returns:
        The probability, with notes on violated conditions.

    Raises:
        InputError: A number is too large or too small to compute with (`float-overflow`).

    >>> for form in FORMS:
    ...     print(form, round(unclipped(C=1.0, alpha=1.5, tau=0.1, form=form).value, 4))
    printed 0.9684
    corrected 0.9874
    exact 0.9867
    >>> unclipped(C=0.5, alpha=1.5, tau=0.1, G=1.0).notes
    ('C > sqrt2 G is violated: 0.5 <= 1.41421',)
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

    - "printed": 2 gap / (K p (2 - eta L) eta) + eta^2 d L / 2 (p (C / sqrt2 - G)^2 + (1 - p) C^2), with p as printed.
    - "corrected": 2 gap / (K p (2 - eta L) eta) + eta d L B / (p (2 - eta L)), with the exact p and B = p (C - sqrt2
      G)^2 + (1 - p) C^2.

    Args:
        rounds: Number of rounds K.
        C: Clipping threshold, above 0.
        alpha: Tail index of the interference, in [0.5, 2].
        tau: Scale of the interference, at least 0.
        eta: Step size.
        L: Smoothness of the objective.
        G: Bound on the norm of every client's gradient.
        d: Number of entries of the gradient.
        gap: f(w_0) - f(w*).
        form: "printed" or "corrected".

    Returns:
        The bound, with notes on violated conditions; inf if there is no bound.

    Raises:
        InputError: A number is too large or too small to compute with (`float-overflow`).

    >>> value, notes = bound(100, C=1.0, alpha=1.5, tau=0.1, eta=0.03, L=10.0, G=0.5, d=100)
    >>> round(value, 2), notes
    (4.09, ())
    >>> value, notes = bound(100, C=1.0, alpha=1.5, tau=0.1, eta=0.3, L=10.0, G=0.5, d=100)
    >>> value, notes[0]
    (inf, 'eta < 2 / L is violated: 0.3 >= 0.2')
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
    """Return n equally likely values that represent the law, and their scores: (n,), (n,)."""
    x = stable.quantile((torch.arange(n, dtype=torch.float64) + 0.5) / n, alpha)
    return x, stable.score(x, alpha)


@_within_floats
def efficacy(rule: ReceiverLike, alpha: float, tau: float = 1.0, n: int = 100_001) -> float:
    """Efficacy (E psi')^2 / E psi^2 of a rule psi under SaS(alpha, tau).

    The efficacy measures how much of a weak signal the rule preserves, relative to the interference: the SNR of an
    entry after the rule is the efficacy times its squared signal. E psi' is computed as E[psi score], which needs no
    derivative of the rule. A rule that is linear in an impulse (none, gnc) has efficacy 0 below alpha = 2; a finite n
    gives a small number.

    Args:
        rule: Receiver psi, (n,) -> (n,).
        alpha: Tail index of the interference, in [0.5, 2].
        tau: Scale of the interference, above 0.
        n: Number of equally likely values that represent the law.

    Returns:
        The efficacy, at most `fisher(alpha, tau)`.

    Raises:
        InputError: The rule returns a tensor of another shape (`wrong-shape`), or a number is too large or too small to
            compute with (`float-overflow`).

    >>> from stableair.receivers import cauchy, sign
    >>> [round(efficacy(rule, alpha=1), 3) for rule in (clip(0.5), sign(1.0), cauchy(1.0))]  # cauchy(1.0) is optimal
    [0.437, 0.405, 0.5]
    """
    x, score = _strata(number("alpha", alpha, *stable.ALPHA), integer("n", n, 1, MAX_STRATA))
    psi = check_shape("rule", as_receiver(rule)(positive("tau", tau) * x), n)
    return ((psi * score).mean() / tau).square().item() / psi.square().mean().item()


@_within_floats
def fisher(alpha: float, tau: float = 1.0, n: int = 100_001) -> float:
    """Fisher information E score^2 of the location of SaS(alpha, tau), the highest efficacy of any rule.

    Args:
        alpha: Tail index of the interference, in [0.5, 2].
        tau: Scale of the interference, above 0.
        n: Number of equally likely values that represent the law.

    Returns:
        The Fisher information.

    Raises:
        InputError: A number is too large or too small to compute with (`float-overflow`).

    >>> round(fisher(alpha=1, tau=1.0), 3)  # Cauchy: 1 / (2 tau^2)
    0.5
    """
    _, score = _strata(number("alpha", alpha, *stable.ALPHA), integer("n", n, 1, MAX_STRATA))
    return score.square().mean().item() / positive("tau", tau) ** 2


def best_threshold(alpha: float) -> float:
    """Threshold C* in units of tau whose clipping has the highest efficacy for a weak signal.

    Args:
        alpha: Tail index of the interference, in [0.5, 2].

    Returns:
        C* / tau; inf for the normal law, alpha = 2.

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
