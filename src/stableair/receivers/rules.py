"""Receivers, Eqs. (5)-(8): rules that repair the received sum. A rule is a pure function (..., d) -> (..., d)."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from stableair.contracts import ReceiverLike
from stableair.errors import InputError
from stableair.literals import Blocks
from stableair.receivers.adaptive import adaptive_cauchy, adaptive_mac, mac_with_gain, myriad
from stableair.receivers.median import median
from stableair.spec import Registry
from stableair.validation import choice, float32, integer, number, positive, short_repr

receiver = Registry("receiver", "receivers")

# Pilots of mac(C=auto). The threshold that follows from p pilots keeps a share of the best threshold's efficacy
# (`theory.efficacy`), on average over 1,000 samples: for alpha = 0.8, 1, 1.5 and 1.8 a share of 0.28, 0.43, 0.77 and
# 0.91 with p = 2, of 0.81, 0.83, 0.87 and 0.92 with p = 10, of 0.95, 0.96, 0.96 and 0.97 with p = 50. A single
# pilot has no spread, so that nothing would be clipped. With 10^6 pilots the error of the threshold is below 1 %.
MIN_PILOTS, MAX_PILOTS = 50, 1_000_000


@receiver("mac")
def mac(C: float | Literal["auto"], gain: bool | None = None, pilot: int = 0) -> ReceiverLike:
    """Median anchored clipping (Alg. 1, Eqs. 6-8): clip each entry to within C of the median.

        m = med(g),    g_i -> m + clip(g_i - m, [-C, C])

    C="auto" estimates the interference in every round, from the received vector or from pilots, and sets the threshold
    from the estimate. It shortens the step in rounds with unusually strong interference. When the steps make no more
    progress, it shortens them in all rounds.

    Args:
        C: Clipping threshold, above 0; inf clips nothing, "auto" estimates the threshold.
        gain: Whether to divide the clipped part by its expected derivative, so that the step does not depend on C. The
            derivative is the share of unclipped entries, or for "auto" the share of the signal that passes. None: only
            for "auto".
        pilot: Noise-only symbols per round from which "auto" estimates the interference, at least 50; 0 for the
            received vector itself.

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> mac(1.0)(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 2.0]
    """
    threshold = None if isinstance(C, str) and C == "auto" else positive("C", C, finite=False, otherwise="or auto")
    if gain is not None and not isinstance(gain, bool):
        text = f"gain must be True or False: got {short_repr(gain)}"
        raise InputError(text, code="wrong-type", name="gain", value=gain)
    _check_pilots(pilot, auto=threshold is None)
    if threshold is None:
        return adaptive_mac(gain is not False, pilot)
    if gain:
        return mac_with_gain(threshold)
    if math.isinf(threshold):
        return none()

    def apply(g: Tensor) -> Tensor:
        m = median(g)  # the anchor, taken before clipping
        return g.clamp(m - threshold, m + threshold)  # Eqs. 6-8 in one step: unclipped entries stay bit-identical

    return apply


def _check_pilots(pilots: int, auto: bool) -> None:
    """Refuse pilots without C=auto, and a number of pilots that is too small to estimate the noise from."""
    if not integer("pilot", pilots, 0, MAX_PILOTS):
        return
    if not auto:
        text = f"pilot={pilots} requires C=auto: a fixed threshold uses no pilots"
        raise InputError(text, code="conflicting-arguments", name="pilot", value=pilots)
    if pilots < MIN_PILOTS:
        text = f"pilot must be at least {MIN_PILOTS} to estimate the noise, or 0 for no pilots: got {pilots}"
        raise InputError(text, code="out-of-range", name="pilot", value=pilots, low=MIN_PILOTS, high=MAX_PILOTS)


@receiver("clip")
def clip(C: float) -> ReceiverLike:
    """Clipping anchored at zero: clip each entry to within C of zero (MAC without its median).

        g_i -> max(-C, min(g_i, C))    (Huber, 1964)

    Args:
        C: Clipping threshold, above 0; inf clips nothing.

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> clip(1.0)(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 1.0]
    """
    C = float32("C", positive("C", C, finite=False))
    return lambda g: g.clamp(-C, C)


@receiver("gnc", blocks="model")
def gnc(max_norm: float, blocks: Blocks = "model") -> ReceiverLike:
    """Gradient norm clipping: scale the vector down to a norm of at most max_norm.

        g -> g min(1, max_norm / |g|)    (Pascanu, Mikolov and Bengio, 2013)

    With infinite entries the result is not NaN: it points in the direction of the infinite entries, which is the limit
    for growing entries.

    Args:
        max_norm: Largest norm of the result, above 0.
        blocks: Blocks of an experiment's model that are scaled separately: each "tensor", each "layer", or the whole
            "model" at once.

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> gnc(1.0)(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    max_norm = positive("max_norm", max_norm)
    choice("blocks", blocks, get_args(Blocks))

    def apply(g: Tensor) -> Tensor:
        spikes = g.isinf()
        spiked = spikes.any(dim=-1, keepdim=True)
        direction = torch.where(spiked, spikes * g.sign(), g)
        norm = direction.double().norm(dim=-1, keepdim=True)  # in float32 the square of an impulse overflows
        short = ~spiked & (norm <= max_norm)
        return torch.where(short, g, (direction * (max_norm / norm)).to(g.dtype))

    return apply


@receiver("cauchy")
def cauchy(K: float | Literal["auto"]) -> ReceiverLike:
    """Score function of the Cauchy law, x / (1 + (x / K)^2), which suppresses entries far beyond K.

        g_i -> g_i / (1 + (g_i / K)^2)    (myriad filter; Gonzalez and Arce, 2001)

    Args:
        K: Scale, above 0; the result is largest for entries of size K. "auto" estimates K in every round from the
            received vector.

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> cauchy(1.0)(torch.tensor([0.0, 1.0, -2.0, math.inf])).tolist()
    [0.0, 0.5, -0.4000000059604645, 0.0]
    """
    if isinstance(K, str) and K == "auto":
        return adaptive_cauchy()
    scale = positive("K", K, otherwise="or auto")
    return lambda g: myriad(g, scale)


@receiver("blank")
def blank(C: float) -> ReceiverLike:
    """Blanking: set each entry beyond C to zero.

        g_i -> g_i if |g_i| <= C, else 0

    Args:
        C: Blanking threshold, above 0.

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> blank(1.0)(torch.tensor([0.5, 1.0, -90.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    C = positive("C", C)
    return lambda g: torch.where(g.abs() > C, 0, g)


@receiver("sign")
def sign(step: float) -> ReceiverLike:
    """Keep only the sign of each entry: every entry becomes -step, 0 or step.

        g_i -> step sign(g_i)    (signSGD; Bernstein et al., 2018)

    Args:
        step: Size of the entries of the result, above 0.

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> sign(0.5)(torch.tensor([0.0, 1.0, -90.0])).tolist()
    [0.0, 0.5, -0.5]
    """
    step = positive("step", step)
    return lambda g: step * g.sign()


@receiver("quantile_clip")
def quantile_clip(q: float) -> ReceiverLike:
    """Clipping anchored at zero with the q-quantile of the magnitudes of the entries as threshold.

        g_i -> max(-C, min(g_i, C)),    C = the floor(q d)-th smallest of |g_1|, ..., |g_d|

    Args:
        q: Share of the entries that are not clipped, in [0, 1].

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> quantile_clip(0.75)(torch.tensor([0.5, 1.0, -2.0, 90.0])).tolist()
    [0.5, 1.0, -2.0, 2.0]
    """
    q = number("q", q, 0.0, 1.0)

    def apply(g: Tensor) -> Tensor:
        # torch.quantile refuses more than 2^24 entries
        C = g.abs().kthvalue(max(1, math.floor(q * g.shape[-1])), dim=-1, keepdim=True).values
        return g.clamp(-C, C)

    return apply


@receiver("tanh_clip")
def tanh_clip(C: float) -> ReceiverLike:
    """Smooth clipping anchored at zero: C tanh(g / C).

        g_i -> C tanh(g_i / C)

    Args:
        C: Largest magnitude of the result, above 0.

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> tanh_clip(2.0)(torch.tensor([0.0, -90.0, math.inf])).tolist()
    [0.0, -2.0, 2.0]
    """
    C = positive("C", C)
    return lambda g: C * (g / C).tanh()


@receiver("none")
def none() -> ReceiverLike:
    """No repair: return the received sum unchanged.

        g -> g

    Returns:
        The receiver, (..., d) -> (..., d).

    >>> none()(torch.tensor([0.0, 1.0, -90.0])).tolist()
    [0.0, 1.0, -90.0]
    """
    return lambda g: g
