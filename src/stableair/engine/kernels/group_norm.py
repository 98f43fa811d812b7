"""Group norm of every client, and its gradients."""

# The parameters of a @triton.jit function are pointers and compile-time constants, which have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stableair.engine.kernels.tiles import in_range, tile_side
from stableair.engine.launch import launch

LARGEST_GROUP = 128  # channels of a group that the kernels of group norm support: a program holds whole groups


@triton.jit
def _group_sums(values, c, GROUP: tl.constexpr):
    """Sum over the group of each channel: (BC,) -> (BC,)."""
    same = (c // GROUP)[:, None] == (c // GROUP)[None, :]
    return tl.sum(tl.where(same, values[None, :], 0.0), 1)


@triton.jit
def _image_channels(C: tl.constexpr, TAKE: tl.constexpr, BC: tl.constexpr):
    """Return a program's image and channels, and the mask of valid channels; TAKE channels are whole groups."""
    image, column = tl.program_id(0).to(tl.int64), tl.arange(0, BC)
    c = tl.program_id(1) * TAKE + column
    return image, c, (column < TAKE) & (c < C)


@triton.jit
def _image_rows(m0, c, column_mask, PIXELS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """Return the offsets of the pixels m0 ... m0 + BM - 1 in an image, and the mask of valid entries."""
    m = m0 + tl.arange(0, BM)
    return m[:, None] * C + c[None, :], in_range(m, PIXELS, BM)[:, None] & column_mask[None, :]


@triton.jit
def _group_norm(
    x, gamma, beta, y, mean, rstd, eps, B, PIXELS: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
    TAKE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = gamma (x - mean) rstd + beta, with the mean and variance of each image and group."""
    image, c, column_mask = _image_channels(C, TAKE, BC)
    client = image // B
    x += image * PIXELS * C
    y += image * PIXELS * C
    origin = tl.load(x + c, mask=column_mask, other=0.0).to(tl.float32)  # differences to it sum more exactly
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for m0 in range(0, PIXELS, BM):
        offsets, mask = _image_rows(m0, c, column_mask, PIXELS, C, BM)
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - origin[None, :], 0.0)
        first += value
        second += value * value
    difference = tl.sum(first, 0) / PIXELS
    variance = tl.sum(second, 0) / PIXELS - difference * difference  # of each channel
    average = _group_sums(origin + difference, c, GROUP) / GROUP
    offset = origin + difference - average
    variance = _group_sums(variance + offset * offset, c, GROUP) / GROUP
    inverse = 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + eps)
    tl.store(mean + image * C + c, average, mask=column_mask)
    tl.store(rstd + image * C + c, inverse, mask=column_mask)
    scale = tl.load(gamma + client * C + c, mask=column_mask, other=0.0) * inverse
    shift = tl.load(beta + client * C + c, mask=column_mask, other=0.0) - scale * average
    for m0 in range(0, PIXELS, BM):
        offsets, mask = _image_rows(m0, c, column_mask, PIXELS, C, BM)
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + offsets, (value * scale[None, :] + shift[None, :]).to(y.dtype.element_ty), mask=mask)


class ImageMoments(NamedTuple):
    """Moments of a group norm for each image and channel: (N, B, C) each."""

    mean: Tensor
    rstd: Tensor


def _group_tile(x: Tensor, groups: int) -> tuple[tuple[int, int], tuple[int, int, int, int, int, int]]:
    """Return the grid of a group norm, and its constants: pixels, channels (all, of a group, of a program), tile."""
    n, b, h, w, c = x.shape
    group = c // groups
    take = group * max(1, 64 // group)
    tile = tile_side(h * w, 64), triton.next_power_of_2(take)
    return (n * b, triton.cdiv(c, take)), (h * w, c, group, take, *tile)


def group_norm(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> tuple[Tensor, ImageMoments]:
    """Compute a group norm of every client: y (N, B, H, W, C), and its moments; gamma, beta: (N, C) float32."""
    y, moments = torch.empty_like(x), [torch.empty(*x.shape[:2], x.shape[-1], device=x.device) for _ in range(2)]
    grid, sizes = _group_tile(x, groups)
    launch(_group_norm, grid, x, gamma, beta, y, *moments, eps, x.shape[1], *sizes)
    return y, ImageMoments(*moments)


@triton.jit
def _group_norm_grad(
    dy, x, gamma, mean, rstd, dx, sums, B, PIXELS: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
    TAKE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = rstd (gamma dy - S(gamma dy) - xhat S(gamma dy xhat)), where S is the mean over a group of an image.

    Also stores the sums of dy and of dy xhat over each image, which are the gradients of beta and gamma.
    """
    image, c, column_mask = _image_channels(C, TAKE, BC)
    average = tl.load(mean + image * C + c, mask=column_mask, other=0.0)[None, :]
    inverse = tl.load(rstd + image * C + c, mask=column_mask, other=0.0)[None, :]
    factor = tl.load(gamma + (image // B) * C + c, mask=column_mask, other=0.0)
    dy += image * PIXELS * C
    x += image * PIXELS * C
    dx += image * PIXELS * C
    first, second = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for m0 in range(0, PIXELS, BM):
        offsets, mask = _image_rows(m0, c, column_mask, PIXELS, C, BM)
        slope = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        normalised = (tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - average) * inverse
        first += slope
        second += slope * normalised
    of_beta, of_gamma = tl.sum(first, 0), tl.sum(second, 0)
    tl.store(sums + image * 2 * C + c, of_beta, mask=column_mask)
    tl.store(sums + image * 2 * C + C + c, of_gamma, mask=column_mask)
    constant = (_group_sums(factor * of_beta, c, GROUP) / (PIXELS * GROUP))[None, :]
    linear = (_group_sums(factor * of_gamma, c, GROUP) / (PIXELS * GROUP))[None, :]
    for m0 in range(0, PIXELS, BM):
        offsets, mask = _image_rows(m0, c, column_mask, PIXELS, C, BM)
        slope = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        normalised = (tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) - average) * inverse
        out = inverse * (factor[None, :] * slope - constant - normalised * linear)
        tl.store(dx + offsets, out.to(dx.dtype.element_ty), mask=mask)


def group_norm_grad(dy: Tensor, x: Tensor, gamma: Tensor, moments: ImageMoments, groups: int) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a group norm's input (N, B, H, W, C), and of beta and gamma (N, 2, C)."""
    dx, sums = torch.empty_like(x), torch.empty(*x.shape[:2], 2, x.shape[-1], device=x.device)
    grid, sizes = _group_tile(x, groups)
    launch(_group_norm_grad, grid, dy, x, gamma, *moments, dx, sums, x.shape[1], *sizes)
    return dx, sums.sum(1)
