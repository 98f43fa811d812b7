"""Receivers made of receivers: one after the other, and each block of the vector on its own."""

import itertools
from typing import Any

import torch
from torch import Tensor

from stableair.checks import InputError, typed
from stableair.contracts import Metrics, Receiver, ReceiverLike, as_receiver
from stableair.receivers.rules import receiver
from stableair.vector import Layout


class Chain(Receiver):
    """Rules one after the other, each of which observes what the one before it has made."""

    def __init__(self, *rules: Receiver):
        self.rules = rules
        self.pilots = max((rule.pilots for rule in rules), default=0)

    def apply(self, g: Tensor) -> Tensor:
        for rule in self.rules:
            g = rule(g)
        return g

    def listen(self, pilot: Tensor) -> None:
        for rule in self.rules:
            rule.listen(pilot)

    def metrics(self) -> Metrics:
        """Those of all rules; what a second rule calls as the first did gets a suffix: C, C_2, ..."""
        found: Metrics = {}
        for rule in self.rules:
            for name, value in rule.metrics().items():
                names = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
                found[next(free for free in names if free not in found)] = value
        return found

    def state_dict(self) -> dict[str, Any]:
        each = {str(i): rule.state_dict() for i, rule in enumerate(self.rules)}
        return {i: state for i, state in each.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if unknown := [i for i in state if i not in map(str, range(len(self.rules)))]:
            raise InputError(f"there is no rule {unknown[0]} to remember: there are {len(self.rules)}")
        for i, rule in enumerate(self.rules):
            if str(i) in state:
                rule.load_state_dict(state[str(i)])
            elif rule.state_dict():
                raise InputError(f"the memory of rule {i} is missing")


def chain(*rules: ReceiverLike) -> Chain:
    """Rules one after the other: chain(a, b)(g) is b(a(g)); the spec is "a | b". A chain in a chain is one chain.

    >>> from stableair.receivers import clip, mac
    >>> chain(mac(1.0), clip(1.5))(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 1.5]
    """
    flat = [as_receiver(rule) for rule in rules]
    return Chain(*(inner for rule in flat for inner in (rule.rules if isinstance(rule, Chain) else [rule])))


class Blockwise(Receiver):
    """A rule that is shown the whole vector, once, and then applied to each block of it on its own."""

    def __init__(self, rule: Receiver, layout: Layout):
        self.rule, self.layout = rule, layout
        self.pilots = rule.pilots

    def observe(self, g: Tensor) -> None:
        self.rule.observe(g)

    def apply(self, g: Tensor) -> Tensor:
        return torch.cat([_like(block, self.rule.apply(block)) for block in self.layout.split(g)], dim=-1)

    def listen(self, pilot: Tensor) -> None:
        self.rule.listen(pilot)

    def metrics(self) -> Metrics:
        return self.rule.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.load_state_dict(state)


def _like(block: Tensor, out: Any) -> Tensor:
    """What a rule made of a block, which must have its shape."""
    if not isinstance(out, Tensor) or out.shape != block.shape:
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        text = f"the receiver must return a tensor of the shape it was given, {tuple(block.shape)}: got {found}"
        raise InputError(text, part="receiver")
    return out


@typed
def blockwise(rule: ReceiverLike, layout: Layout) -> Receiver:
    """A rule applied to each block of the vector on its own (the paper: layer-wise).

    Of a chain it is the chain of its rules, each blockwise; a rule that has blocks of its own already keeps them.

    >>> from stableair.receivers import mac
    >>> halves = Layout(("a", "b"), ((2,), (2,)), (0, 2, 4))
    >>> blockwise(mac(1.0), halves)(torch.tensor([0.0, 5.0, 7.0, 90.0])).tolist()
    [0.0, 1.0, 7.0, 8.0]
    """
    rule = as_receiver(rule)
    if isinstance(rule, Chain):
        return Chain(*(blockwise(inner, layout) for inner in rule.rules))
    return rule if isinstance(rule, Blockwise) else Blockwise(rule, layout)


def assemble(spec: str, layout: Layout, blocks: str) -> Chain:
    """The receiver of an experiment: each rule of "a | b" on the blocks it asks for, else on the experiment's."""
    calls = receiver.parse(spec)
    wanted = [call.arguments.get("blocks", call.entry.declared.get("blocks", blocks)) for call in calls]
    return chain(*(blockwise(as_receiver(call()), layout.merge(own)) for call, own in zip(calls, wanted, strict=True)))
