"""Eqs. (5)-(8): what the server does to the sum it received. A rule is a pure function (..., d) -> (..., d)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from stableair.checks import choice, positive
from stableair.spec import registry
from stableair.vector import BLOCKS, Layout

Receiver = Callable[[Tensor], Tensor]  # (..., d) -> (..., d), never in place

receiver = registry("receiver", "receivers", __name__)


def median(g: Tensor) -> Tensor:
    """Eq. (5), the vector median: the median entry, the lower of the middle two for even d. (..., d) -> (..., 1).

    >>> median(torch.tensor([9.0, 1.0, 3.0, 2.0])).item()
    2.0
    """
    return g.median(dim=-1, keepdim=True).values


@receiver("mac")
def mac(C) -> Receiver:
    """Median anchored clipping (Alg. 1, Eqs. 6-8): pull each entry to within C of the median.

    >>> mac(1.0)(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 2.0]
    """
    C = positive("C", C, finite=False)

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

    def metrics(self) -> dict[str, float]:
        return {k: v for rule in self.rules if hasattr(rule, "metrics") for k, v in rule.metrics().items()}


class blockwise:
    """A rule applied to each block of the vector on its own (the paper: layer-wise).

    Where the rule has `observe(g)`, it is shown the whole vector once before the blocks.
    """

    def __init__(self, rule: Receiver, layout: Layout):
        self.rule, self.layout = rule, layout
        for name in ("state_dict", "load_state_dict", "metrics"):
            if hasattr(rule, name):
                setattr(self, name, getattr(rule, name))

    def __call__(self, g: Tensor) -> Tensor:
        if hasattr(self.rule, "observe"):
            self.rule.observe(g)
        return torch.cat([self.rule(block) for block in self.layout.split(g)], dim=-1)


def assemble(spec: str, layout: Layout, blocks: str) -> chain:
    """The receiver of an experiment: each rule of "a | b" on the blocks it asks for, else on the experiment's."""

    def rules() -> Iterable[Receiver]:
        for call in receiver.parse(spec):
            wanted = call.arguments.get("blocks", call.entry.declared.get("blocks", blocks))
            yield blockwise(call(), layout.merge(wanted))

    return chain(*rules())
