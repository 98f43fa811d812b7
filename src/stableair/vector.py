"""A model as one flat vector, which the channel transmits, and the names of its blocks."""

from collections.abc import Callable, Iterable
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from stableair.errors import InputError
from stableair.literals import Blocks
from stableair.validation import choice


class Layout(NamedTuple):
    """The blocks of a flat vector: block i is v[offsets[i]:offsets[i + 1]], of shape shapes[i]."""

    names: tuple[str, ...]  # name of each block
    shapes: tuple[tuple[int, ...], ...]  # shape of each block
    offsets: tuple[int, ...]  # start of each block, and d at the end

    def split(self, v: Tensor) -> tuple[Tensor, ...]:
        """Split a vector into one view per block: (..., d) -> a tuple of (..., size of the block)."""
        return v.split([stop - start for start, stop in pairwise(self.offsets)], dim=-1)

    def map(self, function: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """Apply a function to each block of a vector: (..., d) -> (..., d).

        Raises:
            InputError: The function does not return a tensor of the shape of the block (`wrong-shape`).
        """
        return torch.cat([_same_shape(block, function(block)) for block in self.split(v)], dim=-1)

    def merge(self, blocks: str) -> "Layout":
        """Return the layout in coarser blocks.

        Args:
            blocks: "tensor" for the same blocks, "layer" for one block per layer, or "model" for a single block.
        """
        if choice("blocks", blocks, get_args(Blocks)) == "tensor":
            return self
        if blocks == "model":
            return make_layout([("model", (self.offsets[-1],))])
        sizes = zip(self.names, map(prod, self.shapes), strict=True)
        layers = groupby(sizes, lambda block: block[0].rpartition(".")[0])  # the module that owns the tensor
        return make_layout((name, (sum(size for _, size in rows),)) for name, rows in layers)


def make_layout(blocks: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    """Build the layout of a vector from the names and shapes of its blocks.

    Args:
        blocks: Name and shape of each block, in the order of the vector.

    Returns:
        The layout.

    >>> make_layout([("weight", (2, 3)), ("bias", (2,))]).offsets
    (0, 6, 8)
    """
    blocks = tuple(blocks)
    names, shapes = tuple(name for name, _ in blocks), tuple(shape for _, shape in blocks)
    return Layout(names, shapes, tuple(accumulate(map(prod, shapes), initial=0)))


def _same_shape(block: Tensor, out: Any) -> Tensor:
    """Return the output of a receiver for a block; it must have the shape of the block."""
    if not isinstance(out, Tensor) or out.shape != block.shape:
        actual = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        text = f"the receiver must return a tensor of the shape of its input, {tuple(block.shape)}: got {actual}"
        raise InputError(text, code="wrong-shape", setting="receiver")
    return out


NOTHING = Layout((), (), (0,))  # a vector without entries
RUNNING = "running_mean", "running_var"  # names of the norm statistics in torch's layers


def powers(v: Tensor, blocks: Layout) -> Tensor:
    """Sum the squares of the entries in each of m blocks.

    The sums are in float64, since squares of impulses overflow float32.

    Args:
        v: The vector, (d,).
        blocks: Layout of the vector.

    Returns:
        Sums of squares, (m,) float64.

    >>> powers(torch.tensor([3.0, 4.0, 1.0]), make_layout([("a", (2,)), ("b", (1,))])).tolist()
    [25.0, 1.0]
    """
    return torch.stack([block.double().square().sum() for block in blocks.split(v)])


def check_shape(kind: str, out: Any, length: int) -> Tensor:
    """Check that a component returned one real vector of this length.

    Args:
        kind: The component's setting, such as "noise".
        out: Return value of the component.
        length: Required number of entries.

    Returns:
        `out`, unchanged.

    Raises:
        InputError: `out` is not a tensor of shape (length,) (`wrong-shape`), or not of a floating-point dtype
            (`wrong-dtype`).

    >>> check_shape("noise", torch.zeros(2), 3)
    Traceback (most recent call last):
    stableair.errors.InputError: the noise must return a tensor of shape (3,): got shape (2,)
    """
    if not isinstance(out, Tensor) or out.shape != (length,):
        actual = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        text = f"the {kind} must return a tensor of shape ({length},): got {actual}"
        raise InputError(text, code="wrong-shape", setting=kind, expected=(length,), actual=actual)
    if not out.is_floating_point():
        text = f"the {kind} must return real numbers, such as float32: got {out.dtype}"
        raise InputError(text, code="wrong-dtype", setting=kind, actual=str(out.dtype))
    return out


class ModelState(NamedTuple):
    """A model as the server broadcasts it: parameters and norm buffers."""

    w: Tensor  # (d,), parameters
    stats: Tensor  # (b,), norm buffers


def parameters(module: nn.Module) -> Layout:
    """Layout of a module's parameter vector, one block per parameter tensor.

    Args:
        module: The module.

    Returns:
        The layout, in the order of `module.parameters()`.

    >>> parameters(nn.Linear(3, 2))
    Layout(names=('weight', 'bias'), shapes=((2, 3), (2,)), offsets=(0, 6, 8))
    """
    return make_layout((name, tuple(p.shape)) for name, p in module.named_parameters())


def buffers(module: nn.Module) -> Layout:
    """Layout of a module's vector of norm buffers, which are its floating-point buffers.

    A buffer with infinite or NaN entries, such as a causal mask, is a constant: it is neither sent nor averaged.
    Running means and variances are always norm buffers; if they are not finite, the run has diverged.

    Args:
        module: The module.

    Returns:
        The layout, in the order of `module.named_buffers()`.

    >>> buffers(nn.BatchNorm2d(4)).names
    ('running_mean', 'running_var')
    """
    return make_layout((name, tuple(b.shape)) for name, b in module.named_buffers() if _is_norm_buffer(name, b))


def _is_norm_buffer(name: str, buffer: Tensor) -> bool:
    if not buffer.is_floating_point():
        return False
    return name.rpartition(".")[2] in RUNNING or bool(buffer.isfinite().all())


def _variances(norms: Layout) -> list[tuple[slice, slice]]:
    """Return the slices of each running mean and its running variance in a vector of norm buffers."""
    slices = {name: slice(*ends) for name, ends in zip(norms.names, pairwise(norms.offsets), strict=True)}
    of_means = {name.removesuffix("running_var") + "running_mean": name for name in norms.names}
    return [(slices[mean], slices[var]) for mean, var in of_means.items() if mean in slices and mean != var]


def moments(stats: Tensor, norms: Layout) -> Tensor:
    """Convert norm buffers to a form that can be averaged: var + mean^2 replaces each variance.

    Args:
        stats: Norm buffers, (..., b).
        norms: Layout of the norm buffers.

    Returns:
        The moments, (..., b) float64. They may share the memory of `stats`.

    >>> norms = buffers(nn.BatchNorm2d(1))
    >>> moments(torch.tensor([3.0, 1.0]), norms).tolist()  # mean 3, variance 1
    [3.0, 10.0]
    """
    stats = stats.double()  # not a copy if stats is already float64
    stats = stats.clone() if (pairs := _variances(norms)) else stats
    for mean, var in pairs:
        stats[..., var] += stats[..., mean].square()
    return stats


def pooled(average: Tensor, norms: Layout) -> Tensor:
    """Compute the norm buffers of all clients together from the average of their `moments`.

    Args:
        average: Average of the moments, (..., b).
        norms: Layout of the norm buffers.

    Returns:
        Norm buffers, (..., b). The variances include the spread of the means.

    >>> norms = buffers(nn.BatchNorm2d(1))
    >>> clients = torch.tensor([[3.0, 1.0], [5.0, 1.0]])  # mean and variance at two clients
    >>> pooled(moments(clients, norms).mean(0), norms).tolist()
    [4.0, 2.0]
    """
    stats = average.clone()
    for mean, var in _variances(norms):
        stats[..., var] = (stats[..., var] - stats[..., mean].square()).clamp_(min=0)
    return stats


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def state(module: nn.Module) -> ModelState:
    """Copy the parameters and norm buffers of a module into two flat vectors.

    Args:
        module: The module.

    Returns:
        The parameters (d,) and the norm buffers (b,).

    >>> [len(v) for v in state(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))]
    [12, 4]
    """
    w = _flat(module.parameters())
    return ModelState(w, _flat([w[:0], *_norm_buffers(module)]))  # w[:0] sets the device if there are no buffers


def _views(tensors: list[Tensor], v: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    for tensor, part in zip(tensors, v.split([t.numel() for t in tensors]), strict=True):
        yield tensor, part.view(tensor.shape)


@torch.no_grad()
def load(module: nn.Module, state: ModelState) -> None:
    """Copy parameters and norm buffers into a module.

    Args:
        module: The module; it is changed in place.
        state: Parameters (d,) and norm buffers (b,).

    Raises:
        InputError: The module has another number of entries (`wrong-model`).

    >>> module = nn.Linear(1, 1)
    >>> load(module, ModelState(torch.tensor([2.0, 0.5]), torch.zeros(0)))
    >>> module(torch.tensor([3.0])).item()
    6.5
    """
    parameters: list[Tensor] = list(module.parameters())
    for tensors, v in ((parameters, state.w), (_norm_buffers(module), state.stats)):
        if (size := sum(t.numel() for t in tensors)) != len(v):
            text = f"the module has {size:,} entries, the state has {len(v):,}: it belongs to another model"
            raise InputError(text, code="wrong-model", expected=len(v), actual=size)
        for tensor, view in _views(tensors, v):
            tensor.copy_(view)


def _norm_buffers(module: nn.Module) -> list[Tensor]:
    return [module.get_buffer(name) for name in buffers(module).names]


def attach(module: nn.Module, state: ModelState, grad: Tensor | None = None, norms: Layout | None = None) -> None:
    """Make a module's parameters, norm buffers and gradients views of flat vectors, without a copy.

    Afterwards, a backward pass adds into `grad`, and a change of `state.w` changes the module.

    Args:
        module: The module; it is changed in place.
        state: Parameters (d,) and norm buffers (b,).
        grad: Gradient (d,); None leaves the gradients unchanged.
        norms: Layout of the norm buffers; by default determined from their current values.

    >>> module, w = nn.Linear(1, 1), torch.tensor([2.0, 0.5])
    >>> attach(module, ModelState(w, torch.zeros(0)))
    >>> _ = w.fill_(1.0)
    >>> module.weight.item()
    1.0
    """
    norms = buffers(module) if norms is None else norms
    for parameter, view in _views(list(module.parameters()), state.w):
        parameter.data = view
    for buffer, view in _views([module.get_buffer(name) for name in norms.names], state.stats):
        buffer.data = view
    if grad is not None:
        for parameter, view in _views(list(module.parameters()), grad):
            parameter.grad = view
