"""Eqs. (5)-(8): what the server does to the sum it received. A rule is a pure function (..., d) -> (..., d)."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stableair.checks import InputError, choice, number, positive, whole
from stableair.spec import registry
from stableair.vector import BLOCKS, Layout

Receiver = Callable[[Tensor], Tensor]  # (..., d) -> (..., d), never in place

receiver = registry("receiver", "receivers", __name__)


def median(g: Tensor) -> Tensor:
    """Eq. (5), the vector median: the median entry, the lower of the middle two for even d. (..., d) -> (..., 1).

    >>> median(torch.tensor([9.0, 1.0, 3.0, 2.0])).item()
    2.0
    """
    if g.is_cuda:  # there torch.median takes many times as long as sorting, which puts NaN last
        ordered = g.sort(dim=-1).values
        last, middle = ordered[..., -1:], ordered[..., (g.shape[-1] - 1) // 2, None]
        return torch.where(last.isnan(), last, middle)
    return g.median(dim=-1, keepdim=True).values


@receiver("mac")
def mac(C, gain=None, pilot=0) -> Receiver:
    """Median anchored clipping (Alg. 1, Eqs. 6-8): pull each entry to within C of the median.

    C="auto" estimates the interference from what is received, or from `pilot` noise-only symbols a round, and sets the
    threshold from that. With gain=True (the default of "auto" alone) the clipped part is divided by its expected
    derivative, the share of unclipped entries, so that the step no longer depends on C.

    >>> mac(1.0)(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 2.0]
    """
    automatic = isinstance(C, str) and C == "auto"
    C = C if automatic else positive("C", C, finite=False, otherwise="or auto")
    if gain not in (None, True, False):
        raise InputError(f"gain must be True or False: got {gain!r}")
    if whole("pilot", pilot, 0) and not automatic:
        raise InputError(f"pilot={pilot} goes with C=auto only")
    if automatic or gain:
        from stableair.adaptive import AdaptiveMac

        return AdaptiveMac(C, gain is not False, pilot)
    if math.isinf(C):
        return none()

    def apply(g: Tensor) -> Tensor:
        m = median(g)  # the anchor, taken before clipping
        return g.clamp(m - C, m + C)  # Eqs. 6-8 in one step: what is not clipped stays bit-identical

    return apply


@receiver("clip")
def clip(C) -> Receiver:
    """Clipping anchored at zero: pull each entry to within C of zero (MAC without its median).

    >>> clip(1.0)(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 1.0]
    """
    C = positive("C", C, finite=False)
    return lambda g: g.clamp(-C, C)


@receiver("gnc", blocks="model")
def gnc(max_norm, blocks="model") -> Receiver:
    """Gradient norm clipping: scale the vector down to a norm of at most max_norm.

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
def cauchy(K) -> Receiver:
    """The score of the Cauchy law, x / (1 + (x / K)^2): entries far beyond K hardly count; K="auto" from the noise."""
    from stableair.adaptive import AdaptiveCauchy, myriad

    if isinstance(K, str) and K == "auto":
        return AdaptiveCauchy()
    K = positive("K", K, otherwise="or auto")
    return lambda g: myriad(g, K)


@receiver("blank")
def blank(C) -> Receiver:
    """Blanking: set each entry beyond C to zero."""
    C = positive("C", C)
    return lambda g: torch.where(g.abs() > C, 0, g)


@receiver("sign")
def sign(step) -> Receiver:
    """Keep the sign alone: every entry becomes -step, 0 or step."""
    step = positive("step", step)
    return lambda g: step * g.sign()


@receiver("quantile_clip")
def quantile_clip(q) -> Receiver:
    """Clip at zero with the q-quantile of the entries' own magnitudes as threshold."""
    q = number("q", q, 0.0, 1.0)

    def apply(g: Tensor) -> Tensor:
        # torch.quantile refuses more than 2^24 entries
        C = g.abs().kthvalue(max(1, math.floor(q * g.shape[-1])), dim=-1, keepdim=True).values
        return g.clamp(-C, C)

    return apply


@receiver("tanh_clip")
def tanh_clip(C) -> Receiver:
    """Smooth clipping at zero: C tanh(g / C)."""
    C = positive("C", C)
    return lambda g: C * (g / C).tanh()


@receiver("none")
def none() -> Receiver:
    """Take the received sum as it is."""
    return lambda g: g


class chain:
    """Rules one after the other: chain(a, b)(g) is b(a(g)); the spec is "a | b".

    >>> chain(mac(1.0), clip(1.5))(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 1.5]
    """

    def __init__(self, *rules: Receiver):
        self.rules = rules

    def __call__(self, g: Tensor) -> Tensor:
        for rule in self.rules:
            g = rule(g)
        return g

    def state_dict(self) -> dict[str, Any]:
        return {str(i): rule.state_dict() for i, rule in enumerate(self.rules) if hasattr(rule, "state_dict")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, inner in state.items():
            self.rules[int(i)].load_state_dict(inner)

    def listen(self, pilot: Tensor) -> None:
        """Hand the round's noise-only symbols to the rules that asked for them."""
        for rule in self.rules:
            if hasattr(rule, "listen"):
                rule.listen(pilot)

    def metrics(self) -> dict[str, float]:
        return {k: v for rule in self.rules if hasattr(rule, "metrics") for k, v in rule.metrics().items()}


class blockwise:
    """A rule applied to each block of the vector on its own (the paper: layer-wise).

    Where the rule has `observe(g)`, it is shown the whole vector once before the blocks, which then go to its
    `apply` if it has one.
    """

    def __init__(self, rule: Receiver, layout: Layout):
        self.rule, self.layout = rule, layout
        for name in ("state_dict", "load_state_dict", "metrics", "listen"):
            if hasattr(rule, name):
                setattr(self, name, getattr(rule, name))

    def __call__(self, g: Tensor) -> Tensor:
        if hasattr(self.rule, "observe"):
            self.rule.observe(g)
        apply = getattr(self.rule, "apply", self.rule)
        return torch.cat([apply(block) for block in self.layout.split(g)], dim=-1)


def assemble(spec: str, layout: Layout, blocks: str) -> chain:
    """The receiver of an experiment: each rule of "a | b" on the blocks it asks for, else on the experiment's."""

    def rules() -> Iterable[Receiver]:
        for call in receiver.parse(spec):
            wanted = call.arguments.get("blocks", call.entry.declared.get("blocks", blocks))
            yield blockwise(call(), layout.merge(wanted))

    return chain(*rules())
