"""The air carries one flat vector: a model's parameters as a vector, and the names of its blocks."""

from collections.abc import Iterable
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stableair.checks import choice

BLOCKS = "tensor", "layer", "model"


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
    names, shapes = (tuple(block[i] for block in blocks) for i in (0, 1))
    return Layout(names, shapes, tuple(accumulate(map(prod, shapes), initial=0)))


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
