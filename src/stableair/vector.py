"""The air carries one flat vector: a model's parameters as a vector, and the names of its blocks."""

from collections.abc import Iterable
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stableair.checks import choice
from stableair.choices import BLOCKS


class Layout(NamedTuple):
    """Which block of a flat vector is what: block i is v[offsets[i]:offsets[i + 1]], of shape shapes[i]."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # one more than there are blocks; the last is d

    def split(self, v: Tensor) -> tuple[Tensor, ...]:
        """One view per block: (..., d) -> a tuple of (..., size of the block)."""
        return v.split([stop - start for start, stop in pairwise(self.offsets)], dim=-1)

    def merge(self, blocks: str) -> "Layout":
        """The same vector in coarser blocks: one per "tensor" (as it is), one per "layer", or the whole "model"."""
        if choice("blocks", blocks, BLOCKS) == "tensor":
            return self
        if blocks == "model":
            return _layout([("model", (self.offsets[-1],))])
        sizes = zip(self.names, map(prod, self.shapes), strict=True)
        layers = groupby(sizes, lambda block: block[0].rpartition(".")[0])  # the module that owns the tensor
        return _layout((name, (sum(size for _, size in rows),)) for name, rows in layers)


def _layout(blocks: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    blocks = tuple(blocks)
    names, shapes = tuple(name for name, _ in blocks), tuple(shape for _, shape in blocks)
    return Layout(names, shapes, tuple(accumulate(map(prod, shapes), initial=0)))


NOTHING = Layout((), (), (0,))  # a vector without entries


def powers(v: Tensor, blocks: Layout) -> Tensor:
    """The sum of squares in each of m blocks, in float64, since squares of impulses overflow float32: (d,) -> (m,)."""
    return torch.stack([block.double().square().sum() for block in blocks.split(v)])


class State(NamedTuple):
    """What the server broadcasts: parameters and norm buffers."""

    w: Tensor  # (d,)
    stats: Tensor  # (b,)


def parameters(module: nn.Module) -> Layout:
    """The blocks of a module's parameter vector, one per parameter tensor."""
    return _layout((name, tuple(p.shape)) for name, p in module.named_parameters())


def buffers(module: nn.Module) -> Layout:
    """The blocks of a module's vector of norm buffers."""
    return _layout((name, tuple(b.shape)) for name, b in module.named_buffers() if b.is_floating_point())


def _variances(norms: Layout) -> list[tuple[slice, slice]]:
    """Where in a vector of norm buffers a running mean and its variance stand, found by their names."""
    places = {name: slice(*ends) for name, ends in zip(norms.names, pairwise(norms.offsets), strict=True)}
    of_means = {name.removesuffix("running_var") + "running_mean": name for name in norms.names}
    return [(places[mean], places[var]) for mean, var in of_means.items() if mean in places and mean != var]


def moments(stats: Tensor, norms: Layout) -> Tensor:
    """Norm buffers as they can be averaged over clients, in float64: var + mean^2 in a variance's place. (..., b)."""
    stats = stats.double()  # a copy, or the tensor itself: then it must not change
    stats = stats.clone() if (pairs := _variances(norms)) else stats
    for mean, var in pairs:
        stats[..., var] += stats[..., mean].square()
    return stats


def pooled(average: Tensor, norms: Layout) -> Tensor:
    """The norm buffers of all clients together, from the average of their `moments`. (..., b)."""
    stats = average.clone()
    for mean, var in _variances(norms):
        stats[..., var] = (stats[..., var] - stats[..., mean].square()).clamp_(min=0)
    return stats


def _buffers(module: nn.Module) -> list[Tensor]:
    """Running means and variances; counters (integers) start anew with every client."""
    return [b for b in module.buffers() if b.is_floating_point()]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def state(module: nn.Module) -> State:
    """A copy of the module's parameters and norm buffers as two flat vectors."""
    w = _flat(module.parameters())
    return State(w, _flat([w[:0], *_buffers(module)]))  # a module without buffers has none on the same device


def _views(tensors: list[Tensor], v: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    for tensor, part in zip(tensors, v.split([t.numel() for t in tensors]), strict=True):
        yield tensor, part.view(tensor.shape)


def attach(module: nn.Module, state: State, grad: Tensor | None = None) -> None:
    """Make the module's parameters, norm buffers and gradients views of flat vectors, without a copy.

    From here on a backward pass adds into `grad`, and a change of `state.w` changes the module.
    """
    for parameter, view in _views(list(module.parameters()), state.w):
        parameter.data = view
    for buffer, view in _views(_buffers(module), state.stats):
        buffer.data = view
    if grad is not None:
        for parameter, view in _views(list(module.parameters()), grad):
            parameter.grad = view
