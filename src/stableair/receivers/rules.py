"""Eqs. (5)-(8): what the server does to the sum it received. A rule is a pure function (..., d) -> (..., d)."""

import math
from typing import Literal

import torch
from torch import Tensor

from stableair.checks import InputError, choice, number, positive, shown, whole
from stableair.choices import BLOCKS
from stableair.contracts import ReceiverLike
from stableair.receivers.adaptive import AdaptiveCauchy, AdaptiveMac, myriad
from stableair.receivers.medians import median
from stableair.spec import Registry

receiver = Registry("receiver", "receivers")


@receiver("mac")
def mac(C: float | Literal["auto"], gain: bool | None = None, pilot: int = 0) -> ReceiverLike:
    """Median anchored clipping (Alg. 1, Eqs. 6-8): pull each entry to within C of the median.

    m = med(g); g_i -> m + clip(g_i - m, [-C, C]): (..., d) -> (..., d).

    C="auto" estimates the interference from what is received, or from `pilot` noise-only symbols a round, sets the
    threshold from that, lets a round count less whose noise is far beyond the usual, and shortens steps that go too
    far. With gain=True (the default of "auto" alone) the clipped part is divided by its expected derivative, the share
    of unclipped entries ("auto": of the signal that passes), so that the step no longer depends on C.

    >>> mac(1.0)(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 2.0]
    """
    threshold = None if isinstance(C, str) and C == "auto" else positive("C", C, finite=False, otherwise="or auto")
    if gain is not None and not isinstance(gain, bool):
        raise InputError(f"gain must be True or False: got {shown(gain)}")
    if whole("pilot", pilot, 0) and threshold is not None:
        raise InputError(f"pilot={pilot} goes with C=auto only")
    if threshold is None or gain:
        return AdaptiveMac(threshold, gain is not False, pilot)
    if math.isinf(threshold):
        return none()

    def apply(g: Tensor) -> Tensor:
        m = median(g)  # the anchor, taken before clipping
        return g.clamp(m - threshold, m + threshold)  # Eqs. 6-8 in one step: what is not clipped stays bit-identical

    return apply


@receiver("clip")
def clip(C: float) -> ReceiverLike:
    """Clipping anchored at zero: pull each entry to within C of zero (MAC without its median).

    g_i -> max(-C, min(g_i, C)) (Huber, 1964): (..., d) -> (..., d).

    >>> clip(1.0)(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 1.0]
    """
    C = positive("C", C, finite=False)
    return lambda g: g.clamp(-C, C)


@receiver("gnc", blocks="model")
def gnc(max_norm: float, blocks: Literal["tensor", "layer", "model"] = "model") -> ReceiverLike:
    """Gradient norm clipping: scale the vector down to a norm of at most max_norm.

    g -> g min(1, max_norm / |g|) (Pascanu, Mikolov and Bengio, 2013): (..., d) -> (..., d).

    In an experiment it takes the whole vector, or with blocks="tensor" or "layer" each block on its own. An infinite
    entry leaves the direction of the infinite entries alone, the limit of ever larger ones (and not NaN).

    >>> gnc(1.0)(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    max_norm = positive("max_norm", max_norm)
    choice("blocks", blocks, BLOCKS)

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
    """The score of the Cauchy law, x / (1 + (x / K)^2): entries far beyond K hardly count; K="auto" from the noise.

    g_i -> g_i / (1 + (g_i / K)^2), as in the myriad filter (Gonzalez and Arce, 2001): (..., d) -> (..., d).

    >>> cauchy(1.0)(torch.tensor([0.0, 1.0, -2.0, math.inf])).tolist()
    [0.0, 0.5, -0.4000000059604645, 0.0]
    """
    if isinstance(K, str) and K == "auto":
        return AdaptiveCauchy()
    scale = positive("K", K, otherwise="or auto")
    return lambda g: myriad(g, scale)


@receiver("blank")
def blank(C: float) -> ReceiverLike:
    """Blanking: set each entry beyond C to zero.

    g_i -> g_i where |g_i| <= C, else 0: (..., d) -> (..., d).

    >>> blank(1.0)(torch.tensor([0.5, 1.0, -90.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    C = positive("C", C)
    return lambda g: torch.where(g.abs() > C, 0, g)


@receiver("sign")
def sign(step: float) -> ReceiverLike:
    """Keep the sign alone: every entry becomes -step, 0 or step.

    g_i -> step sign(g_i), as in signSGD (Bernstein et al., 2018): (..., d) -> (..., d).

    >>> sign(0.5)(torch.tensor([0.0, 1.0, -90.0])).tolist()
    [0.0, 0.5, -0.5]
    """
    step = positive("step", step)
    return lambda g: step * g.sign()


@receiver("quantile_clip")
def quantile_clip(q: float) -> ReceiverLike:
    """Clip at zero with the q-quantile of the entries' own magnitudes as threshold.

    g_i -> max(-C, min(g_i, C)) with C the floor(q d)-th smallest of |g_1|, ..., |g_d|: (..., d) -> (..., d).

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
    """Smooth clipping at zero: C tanh(g / C).

    g_i -> C tanh(g_i / C): (..., d) -> (..., d).

    >>> tanh_clip(2.0)(torch.tensor([0.0, -90.0, math.inf])).tolist()
    [0.0, -2.0, 2.0]
    """
    C = positive("C", C)
    return lambda g: C * (g / C).tanh()


@receiver("none")
def none() -> ReceiverLike:
    """Take the received sum as it is.

    g -> g: (..., d) -> (..., d).

    >>> none()(torch.tensor([0.0, 1.0, -90.0])).tolist()
    [0.0, 1.0, -90.0]
    """
    return lambda g: g
