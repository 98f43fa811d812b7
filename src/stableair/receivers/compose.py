"""Compositions of receivers: chains, and receivers that work on each block of the vector."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from stableair.components import as_rule
from stableair.contracts import Memory, Metrics, ReceiverLike, Reception, Rule
from stableair.memory import unchanged
from stableair.spec import Call
from stableair.validation import typed
from stableair.vector import Layout


def as_receiver(rule: ReceiverLike) -> Rule:
    """Convert a receiver to a `Rule`.

    Args:
        rule: A Rule; an object with its methods `apply` and `init`; or a function (..., d) -> (..., d), which is
            applied to each block.

    Returns:
        The rule.

    Raises:
        InputError: The argument is not a receiver (`wrong-type`).

    >>> import torch
    >>> as_receiver(torch.sign)(torch.tensor([3.0, -2.0])).tolist()
    [1.0, -1.0]
    """

    def from_function(function: Callable[[Tensor], Tensor]) -> Rule:
        return Rule(lambda received, memory: (received.blocks.map(function, received.g), memory, {}))

    return as_rule("receiver", rule, Rule, from_function)


def chain(*rules: ReceiverLike) -> Rule:
    """Apply receivers one after the other: chain(a, b)(g) is b(a(g)), and its spec is "a | b".

    A chain within a chain is flattened. The memory is a tuple with one entry per receiver. All receivers of a chain
    share the pilots of the round.

    Args:
        *rules: Receivers, in the order in which they are applied.

    Returns:
        The chain, a receiver.

    >>> import torch
    >>> from stableair.receivers import clip, mac
    >>> chain(mac(1.0), clip(1.5))(torch.tensor([0.0, 1.0, 90.0])).tolist()
    [0.0, 1.0, 1.5]
    """
    single = [as_receiver(rule) for rule in rules]
    parts = tuple(part for rule in single for part in ([rule] if rule.parts is None else rule.parts))

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        memories: list[Memory] = []
        metrics: list[Metrics] = []
        for part, before in zip(parts, memory, strict=True):
            with unchanged("receiver", received, before, memories):  # a part may return its memory as its output
                g, after, seen = part.apply(received, before)
            received = received._replace(g=g)
            memories.append(after)
            metrics.append(seen)
        return received.g, tuple(memories), _numbered(metrics)

    return Rule(
        apply,
        init=lambda like: tuple(part.init(like) for part in parts),
        pilots=max((part.pilots for part in parts), default=0),
        parts=parts,
    )


def _numbered(every: Iterable[Metrics]) -> Metrics:
    """Merge the metrics of several rules; repeated names get a number: C, C_2, ..."""
    numbered: Metrics = {}
    for metrics in every:
        for name, value in metrics.items():
            names = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
            numbered[next(free for free in names if free not in numbered)] = value
    return numbered


@typed
def blockwise(rule: ReceiverLike, layout: Layout) -> Rule:
    """Bind a receiver to the blocks of a layout (in the paper: layer-wise).

    The receivers of a chain are bound one by one. A receiver that is already bound keeps its blocks.

    Args:
        rule: The receiver.
        layout: The blocks of the vector.

    Returns:
        A receiver that works on each block separately.

    >>> import torch
    >>> from stableair.receivers import mac
    >>> halves = Layout(("a", "b"), ((2,), (2,)), (0, 2, 4))
    >>> blockwise(mac(1.0), halves)(torch.tensor([0.0, 5.0, 7.0, 90.0])).tolist()
    [0.0, 1.0, 7.0, 8.0]
    """
    bound = as_receiver(rule)
    if bound.parts is not None:
        return chain(*(blockwise(part, layout) for part in bound.parts))
    if bound.blocks is not None:
        return bound

    def apply(received: Reception, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        return bound.apply(received._replace(blocks=layout), memory)

    return replace(bound, apply=apply, blocks=layout)


def assemble(calls: Iterable[Call], layout: Layout, blocks: str) -> Rule:
    """Build the receiver of an experiment: a chain of rules, each bound to its blocks.

    Args:
        calls: The parsed rules of "a | b".
        layout: The blocks of the model, one per tensor.
        blocks: The experiment's setting: "tensor", "layer" or "model". The argument `blocks` of a rule has precedence.

    Returns:
        The receiver.
    """
    rules = []
    for call in calls:
        wanted = call.arguments.get("blocks", call.entry.declared.get("blocks", blocks))
        rules.append(blockwise(as_receiver(call()), layout.merge(wanted)))
    return chain(*rules)
