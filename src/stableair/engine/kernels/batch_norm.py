"""Batch norm, ReLU and shortcut of every client, and their gradients."""

# The parameters of a @triton.jit function are pointers and compile-time constants, which have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stableair.engine.kernels.tiles import in_range, tile_side
from stableair.engine.launch import launch

Affine = tuple[Tensor, Tensor]  # scale and shift: (N, C) each


class Norm(NamedTuple):
    """A batch norm of every client: (N, C) each."""

    gamma: Tensor
    beta: Tensor
    running_mean: Tensor
    running_var: Tensor


class Moments(NamedTuple):
    """Moments of a layer in a step, and its batch norm as y -> scale y + shift: (N, C) each."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor

    @property
    def affine(self) -> Affine:
        return self.scale, self.shift


@triton.jit
def normalised_tile(y, mean, rstd, n, c, offsets, mask, column_mask, C: tl.constexpr):
    """The normalised y of a tile."""
    centred = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
    centred -= tl.load(mean + n * C + c, mask=column_mask, other=0.0)[None, :]
    return centred * tl.load(rstd + n * C + c, mask=column_mask, other=0.0)[None, :]


@triton.jit
def store_grad_sums(
    g, y, mean, rstd, partial, at, n, c, offsets, mask, column_mask, C: tl.constexpr, TILES: tl.constexpr
):
    """The sums over a tile of g, and of g times the normalised y, for the gradients of a norm."""
    product = g * normalised_tile(y, mean, rstd, n, c, offsets, mask, column_mask, C)
    partial += (n * TILES + at) * 2 * C + c
    tl.store(partial, tl.sum(g, 0), mask=column_mask)
    tl.store(partial + C, tl.sum(product, 0), mask=column_mask)


TILE_ROWS = 64  # rows of a tile in entry-wise kernels


@triton.jit
def _entry_offsets(M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Rows, channels and offsets of a program's entries, and the masks of valid entries and channels."""
    n = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    column_mask = in_range(c, C, BC)
    offsets = n * M * C + m[:, None] * C + c[None, :]
    mask = in_range(m, M, BM)[:, None] & column_mask[None, :]
    return n, m, c, offsets, mask, column_mask


def _elementwise_grid(y: Tensor) -> tuple[int, int, int, tuple[int, int, int]]:
    """Rows and channels of a layer, the channels of a tile, and the grid of its tiles."""
    n, c = y.shape[0], y.shape[-1]
    rows, block = y[0].numel() // c, tile_side(c, 64)
    return rows, c, block, (triton.cdiv(rows, TILE_ROWS), triton.cdiv(c, block), n)


@triton.jit
def _bn_relu(
    y, scale, shift, shortcut, shortcut_scale, shortcut_shift, out, M: tl.constexpr, C: tl.constexpr,
    SHORTCUT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out = relu(scale y + shift [+ shortcut, or + scale' shortcut + shift']), per client and channel."""
    n, _, c, offsets, mask, column_mask = _entry_offsets(M, C, BM, BC)
    value = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.load(scale + n * C + c, mask=column_mask, other=0.0)[None, :]
    value += tl.load(shift + n * C + c, mask=column_mask, other=0.0)[None, :]
    if SHORTCUT > 0:
        other = tl.load(shortcut + offsets, mask=mask, other=0.0).to(tl.float32)
        if SHORTCUT > 1:
            other = other * tl.load(shortcut_scale + n * C + c, mask=column_mask, other=0.0)[None, :]
            other += tl.load(shortcut_shift + n * C + c, mask=column_mask, other=0.0)[None, :]
        value += other
    tl.store(out + offsets, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask=mask)


def bn_relu(y: Tensor, affine: Affine, shortcut: Tensor | None = None, shortcut_affine: Affine | None = None) -> Tensor:
    """relu(scale y + shift + shortcut): (N, B, P, Q, C). With `shortcut_affine`, the shortcut is normalised too."""
    out, (rows, c, block, grid) = torch.empty_like(y), _elementwise_grid(y)
    kind = 0 if shortcut is None else 1 if shortcut_affine is None else 2
    shortcut = y if shortcut is None else shortcut
    affines = *affine, shortcut, *(shortcut_affine or affine)
    launch(_bn_relu, grid, y, *affines, out, rows, c, kind, TILE_ROWS, block)
    return out


@triton.jit
def _relu_grad_sums(
    da, a, y, mean, rstd, g, partial, M: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """g = da where a > 0; and the sums of g and of g times the normalised y of each tile."""
    n, _, c, offsets, mask, column_mask = _entry_offsets(M, C, BM, BC)
    value = tl.load(da + offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(tl.load(a + offsets, mask=mask, other=0.0) > 0, value, 0.0)
    tl.store(g + offsets, value.to(g.dtype.element_ty), mask=mask)
    store_grad_sums(value, y, mean, rstd, partial, tl.program_id(0), n, c, offsets, mask, column_mask, C, TILES)


def relu_grad_sums(da: Tensor, a: Tensor, y: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """g = da where a > 0, and each tile's sums of g and of g yhat: (N, tiles, 2, C)."""
    g, (rows, c, block, grid) = torch.empty_like(da), _elementwise_grid(y)
    partial = torch.empty(grid[2], grid[0], 2, c, device=y.device, dtype=torch.float32)
    sizes = rows, c, grid[0], TILE_ROWS, block
    launch(_relu_grad_sums, grid, da, a, y, moments.mean, moments.rstd, g, partial, *sizes)
    return g, partial


@triton.jit
def _bn_input_grad(
    g, y, mean, rstd, factor, sums, samples, dy, PIXELS: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dy = factor (g - sum g / M - yhat sum(g yhat) / M): the gradient of batch norm with respect to its input."""
    n, m, c, offsets, mask, column_mask = _entry_offsets(M, C, BM, BC)
    count = tl.load(samples + n) * PIXELS
    normalised = normalised_tile(y, mean, rstd, n, c, offsets, mask, column_mask, C)
    share = 1.0 / tl.maximum(count, 1).to(tl.float32)
    first = tl.load(sums + n * 2 * C + c, mask=column_mask, other=0.0)[None, :] * share
    second = tl.load(sums + n * 2 * C + C + c, mask=column_mask, other=0.0)[None, :] * share
    out = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32) - first - normalised * second
    out = out * tl.load(factor + n * C + c, mask=column_mask, other=0.0)[None, :]
    tl.store(dy + offsets, tl.where((m < count)[:, None], out, 0.0).to(dy.dtype.element_ty), mask=mask)


def bn_input_grad(g: Tensor, y: Tensor, moments: Moments, sums: Tensor, samples: Tensor) -> Tensor:
    """The gradient of batch norm with respect to its input, from the sums of `bn_affine_sgd`: (N, B, P, Q, C)."""
    dy, (rows, c, block, grid) = torch.empty_like(y), _elementwise_grid(y)
    sizes = rows // y.shape[1], rows, c, TILE_ROWS, block
    launch(_bn_input_grad, grid, g, y, *moments[:3], sums, samples, dy, *sizes)
    return dy


@triton.jit
def _sum_tiles(partial, n, c, C: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """The sum of the tiles' two sums, in a fixed order."""
    first, second = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
    for t0 in range(0, TILES, BT):
        t = t0 + tl.arange(0, BT)
        mask = (t < TILES)[:, None] & (c < C)[None, :]
        at = partial + (n * TILES + t)[:, None] * 2 * C + c[None, :]
        first += tl.load(at, mask=mask, other=0.0)
        second += tl.load(at + C, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _bn_finalize(
    partial, gamma, beta, running_mean, running_var, samples, mean, rstd, scale, shift, momentum, eps,
    PIXELS: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean and variance from the tiles' sums; updates the running statistics; the norm as scale and shift.

    A client without samples keeps its running statistics. Its scale and shift are zero, so that its activations cannot
    grow from layer to layer.
    """
    n, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    column_mask = c < C
    first, second = _sum_tiles(partial, n, c, C, TILES, BT, BC)
    count = (tl.load(samples + n) * PIXELS).to(tl.float32)
    has_samples = count > 0
    average = first / tl.maximum(count, 1.0)
    variance = tl.maximum(second / tl.maximum(count, 1.0) - average * average, 0.0)
    inverse = tl.where(has_samples, 1.0 / tl.sqrt(variance + eps), 0.0)
    at, rate = n * C + c, tl.where(has_samples, momentum, 0.0)
    old = tl.load(running_mean + at, mask=column_mask, other=0.0)
    tl.store(running_mean + at, old + rate * (average - old), mask=column_mask)
    old = tl.load(running_var + at, mask=column_mask, other=0.0)
    unbiased = variance * count / tl.maximum(count - 1.0, 1.0)
    tl.store(running_var + at, old + rate * (unbiased - old), mask=column_mask)
    factor = tl.load(gamma + at, mask=column_mask, other=0.0) * inverse
    tl.store(mean + at, average, mask=column_mask)
    tl.store(rstd + at, inverse, mask=column_mask)
    tl.store(scale + at, factor, mask=column_mask)
    offset = tl.load(beta + at, mask=column_mask, other=0.0) - factor * average
    tl.store(shift + at, tl.where(has_samples, offset, 0.0), mask=column_mask)


def bn_finalize(partial: Tensor, norm: Norm, samples: Tensor, pixels: int, momentum: float, eps: float) -> Moments:
    """The moments of a layer from its partial sums (N, tiles, 2, C); updates the running statistics."""
    n, count, _, c = partial.shape
    out = [torch.empty(n, c, device=partial.device) for _ in range(4)]
    grid = triton.cdiv(c, 32), n
    tile = tile_side(count, 64), 32
    launch(_bn_finalize, grid, partial, *norm, samples, *out, momentum, eps, pixels, c, count, *tile)
    return Moments(*out)


@triton.jit
def _bn_affine_sgd(
    partial, gamma, beta, sums, lr, C: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """Add the sums of all tiles, which are the gradients of gamma and beta, and take an SGD step on both."""
    n, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    column_mask = c < C
    first, second = _sum_tiles(partial, n, c, C, TILES, BT, BC)
    tl.store(sums + n * 2 * C + c, first, mask=column_mask)
    tl.store(sums + n * 2 * C + C + c, second, mask=column_mask)
    at = n * C + c
    tl.store(gamma + at, tl.load(gamma + at, mask=column_mask, other=0.0) - lr * second, mask=column_mask)
    tl.store(beta + at, tl.load(beta + at, mask=column_mask, other=0.0) - lr * first, mask=column_mask)


def bn_affine_sgd(partial: Tensor, norm: Norm, lr: float) -> Tensor:
    """Take an SGD step on gamma and beta, in place; return the sums of g and g yhat, (N, 2, C)."""
    n, count, _, c = partial.shape
    sums = torch.empty(n, 2, c, device=partial.device)
    grid = triton.cdiv(c, 32), n
    launch(_bn_affine_sgd, grid, partial, norm.gamma, norm.beta, sums, lr, c, count, tile_side(count, 64), 32)
    return sums
