"""Triton kernels for many clients at once: each client's convolution is one batch of an implicit matrix product.

Activations are (N, B, H, W, C), weights (N, O, K, K, C), all contiguous, so that no operand is sliced or transposed in
memory. Products accumulate in float32. No kernel adds atomically: the same input gives the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Norm(NamedTuple):
    """A batch norm of every client: (N, C) each."""

    gamma: Tensor
    beta: Tensor
    running_mean: Tensor
    running_var: Tensor


class Moments(NamedTuple):
    """What a batch norm made of a layer in a step: (N, C) each. The norm is y -> scale y + shift."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor


def side(length: int, most: int = 64) -> int:
    """The side of a tile: as long as there is something to fill it, a power of two from 16 on."""
    return min(most, max(16, triton.next_power_of_2(length)))


@triton.jit
def _forward(
    x, w, y, part, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[m, o] = sum over taps and channels of x[m + tap, c] w[o, tap, c]; and of each tile the sums of y and y^2."""
    tile, n = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m, o = tile * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    M: tl.constexpr = B * P * Q
    b, p, q = m // (P * Q), m // Q % P, m % Q
    x += n * B * H * W * C
    w += n * O * K * K * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for kh in tl.static_range(K):
        for kw in tl.static_range(K):
            h, v = p * STRIDE + kh - PAD, q * STRIDE + kw - PAD
            inside = (m < M) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
            here = ((b * H + h) * W + v) * C
            for c0 in range(0, C, BK):
                c = c0 + tl.arange(0, BK)
                left = tl.load(x + here[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
                at = o[None, :] * (K * K * C) + (kh * K + kw) * C + c[:, None]
                right = tl.load(w + at, mask=(o < O)[None, :] & (c < C)[:, None], other=0.0)
                sums = tl.dot(left, right, sums, input_precision=PRECISION)
    kept = (m < M)[:, None] & (o < O)[None, :]
    tl.store(y + n * M * O + m[:, None] * O + o[None, :], sums.to(y.dtype.element_ty), mask=kept)
    part += (n * tl.num_programs(0) + tile) * 2 * O + o
    tl.store(part, tl.sum(sums, 0), mask=o < O)
    tl.store(part + O, tl.sum(sums * sums, 0), mask=o < O)


def forward(x: Tensor, w: Tensor, stride: int, pad: int, precision: str = "ieee") -> tuple[Tensor, Tensor]:
    """A convolution of every client: y (N, B, P, Q, O), and each tile's sums of y and y^2, (N, tiles, 2, O)."""
    n, b, h, width, c = x.shape
    o, k = w.shape[1], w.shape[2]
    p, q = ((side + 2 * pad - k) // stride + 1 for side in (h, width))
    y = x.new_empty(n, b, p, q, o)
    bm, bn = side(b * p * q, 128), side(o)
    grid = triton.cdiv(b * p * q, bm), triton.cdiv(o, bn), n
    part = torch.empty(n, grid[0], 2, o, device=x.device, dtype=torch.float32)
    _forward[grid](x, w, y, part, b, h, width, p, q, c, o, k, stride, pad, bm, bn, side(c), precision)
    return y, part


@triton.jit
def _input_gradient(
    dy, w, dx, add, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx[m, c] = sum over taps and outputs of dy[(m - tap) / stride, o] w[o, tap, c], plus what else flows there."""
    n = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    M: tl.constexpr = B * H * W
    b, h, v = m // (H * W), m // W % H, m % W
    dy += n * B * P * Q * O
    w += n * O * K * K * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for kh in tl.static_range(K):
        for kw in tl.static_range(K):
            up, left_ = h + PAD - kh, v + PAD - kw
            p, q = up // STRIDE, left_ // STRIDE
            inside = (m < M) & (up >= 0) & (left_ >= 0) & (p < P) & (q < Q)
            if STRIDE > 1:
                inside = inside & (up % STRIDE == 0) & (left_ % STRIDE == 0)
            here = ((b * P + p) * Q + q) * O
            for o0 in range(0, O, BK):
                o = o0 + tl.arange(0, BK)
                left = tl.load(dy + here[:, None] + o[None, :], mask=inside[:, None] & (o < O)[None, :], other=0.0)
                at = o[:, None] * (K * K * C) + (kh * K + kw) * C + c[None, :]
                right = tl.load(w + at, mask=(o < O)[:, None] & (c < C)[None, :], other=0.0)
                sums = tl.dot(left, right, sums, input_precision=PRECISION)
    kept = (m < M)[:, None] & (c < C)[None, :]
    place = n * M * C + m[:, None] * C + c[None, :]
    if ADD:
        sums += tl.load(add + place, mask=kept, other=0.0).to(tl.float32)
    tl.store(dx + place, sums.to(dx.dtype.element_ty), mask=kept)


def input_gradient(
    dy: Tensor, w: Tensor, shape: tuple[int, int], stride: int, pad: int, add: Tensor | None = None,
    precision: str = "ieee",
) -> Tensor:  # fmt: skip
    """The gradient with respect to the input of a convolution, (N, B, *shape, C), plus `add`."""
    n, b, p, q, o = dy.shape
    k, c = w.shape[2], w.shape[4]
    dx = dy.new_empty(n, b, *shape, c)
    bm, bn = side(b * shape[0] * shape[1], 128), side(c)
    grid = triton.cdiv(b * shape[0] * shape[1], bm), triton.cdiv(c, bn), n
    more = dx if add is None else add
    _input_gradient[grid](dy, w, dx, more, b, *shape, p, q, c, o, k, stride, pad, add is not None, bm, bn, side(o),
                          precision)  # fmt: skip
    return dx


@triton.jit
def _descend(
    dy, x, w, copy, lr, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, COPY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """w[o, tap, c] -= lr sum over m of dy[m, o] x[m + tap, c]; the gradient itself is never stored."""
    n, tap = tl.program_id(2).to(tl.int64), tl.program_id(1)
    kh, kw = tap // K, tap % K
    across = tl.cdiv(C, BN)
    o = tl.program_id(0) // across * BM + tl.arange(0, BM)
    c = tl.program_id(0) % across * BN + tl.arange(0, BN)
    M: tl.constexpr = B * P * Q
    dy += n * M * O
    x += n * B * H * W * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for m0 in range(0, M, BK):
        m = m0 + tl.arange(0, BK)
        b, p, q = m // (P * Q), m // Q % P, m % Q
        h, v = p * STRIDE + kh - PAD, q * STRIDE + kw - PAD
        inside = (m < M) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        left = tl.load(dy + m[None, :] * O + o[:, None], mask=inside[None, :] & (o < O)[:, None], other=0.0)
        here = ((b * H + h) * W + v) * C
        right = tl.load(x + here[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    place = n * O * K * K * C + o[:, None] * (K * K * C) + tap * C + c[None, :]
    kept = (o < O)[:, None] & (c < C)[None, :]
    new = tl.load(w + place, mask=kept, other=0.0) - lr * sums
    tl.store(w + place, new, mask=kept)
    if COPY:
        tl.store(copy + place, new.to(copy.dtype.element_ty), mask=kept)


def descend(
    dy: Tensor, x: Tensor, w: Tensor, copy: Tensor | None, lr: float, stride: int, pad: int, precision: str = "ieee"
) -> None:
    """A step of SGD on a convolution's float32 weights, in place; `copy` is what the products read of them."""
    n, b, p, q, o = dy.shape
    _, _, h, width, c = x.shape
    k = w.shape[2]
    bm, bn = side(o), side(c)
    grid = triton.cdiv(o, bm) * triton.cdiv(c, bn), k * k, n
    target = w if copy is None else copy
    _descend[grid](dy, x, w, target, lr, b, h, width, p, q, c, o, k, stride, pad, copy is not None, bm, bn,
                   side(b * p * q), precision)  # fmt: skip


@triton.jit
def _normalise(
    y, scale, shift, rest, rest_scale, rest_shift, out, M: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out = relu(scale y + shift [+ rest, or + scale' rest + shift']), per client and channel."""
    n = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    kept, known = (m < M)[:, None] & (c < C)[None, :], c < C
    place = n * M * C + m[:, None] * C + c[None, :]
    value = tl.load(y + place, mask=kept, other=0.0).to(tl.float32)
    value = value * tl.load(scale + n * C + c, mask=known, other=0.0)[None, :]
    value += tl.load(shift + n * C + c, mask=known, other=0.0)[None, :]
    if REST > 0:
        other = tl.load(rest + place, mask=kept, other=0.0).to(tl.float32)
        if REST > 1:
            other = other * tl.load(rest_scale + n * C + c, mask=known, other=0.0)[None, :]
            other += tl.load(rest_shift + n * C + c, mask=known, other=0.0)[None, :]
        value += other
    tl.store(out + place, tl.maximum(value, 0.0).to(out.dtype.element_ty), mask=kept)


def normalise(y: Tensor, affine: tuple[Tensor, Tensor], rest: Tensor | None = None, rest_affine=None) -> Tensor:
    """relu(scale y + shift + rest), the rest with a norm of its own where `rest_affine` is given: (N, B, P, Q, C)."""
    n, c = y.shape[0], y.shape[-1]
    rows = y[0].numel() // c
    out = torch.empty_like(y)
    block = side(c)
    grid = triton.cdiv(rows, 64), triton.cdiv(c, block), n
    kind = 0 if rest is None else 1 if rest_affine is None else 2
    _normalise[grid](y, *affine, y if rest is None else rest, *(rest_affine or affine), out, rows, c, kind, 64, block)
    return out


@triton.jit
def _back(da, a, y, mean, rstd, n, m, c, M: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr):
    """g = da where a > 0, and the normalised y, of a tile."""
    kept, known = (m < M)[:, None] & (c < C)[None, :], c < C
    place = n * M * C + m[:, None] * C + c[None, :]
    g = tl.load(da + place, mask=kept, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(tl.load(a + place, mask=kept, other=0.0) > 0, g, 0.0)
    centred = tl.load(y + place, mask=kept, other=0.0).to(tl.float32)
    centred -= tl.load(mean + n * C + c, mask=known, other=0.0)[None, :]
    return g, centred * tl.load(rstd + n * C + c, mask=known, other=0.0)[None, :]


@triton.jit
def _gather(
    da, a, y, mean, rstd, g, part, M: tl.constexpr, C: tl.constexpr, STORE: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """g = da where a > 0; and of each tile the sums of g and of g times the normalised y."""
    n = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    kept, known = (m < M)[:, None] & (c < C)[None, :], c < C
    place = n * M * C + m[:, None] * C + c[None, :]
    value, hat = _back(da, a, y, mean, rstd, n, m, c, M, C, RELU)
    if STORE:
        tl.store(g + place, value.to(g.dtype.element_ty), mask=kept)
    part += (n * tl.num_programs(0) + tl.program_id(0)) * 2 * C + c
    tl.store(part, tl.sum(value, 0), mask=known)
    tl.store(part + C, tl.sum(tl.where(kept, value * hat, 0.0), 0), mask=known)


def gather(da: Tensor, a: Tensor | None, y: Tensor, moments: Moments, store: bool = False) -> Tensor:
    """Each tile's sums of g = da where a > 0, and of g yhat: (N, tiles, 2, C); `store` puts g into da."""
    n, c = y.shape[0], y.shape[-1]
    rows, block = y[0].numel() // c, side(c)
    grid = triton.cdiv(rows, 128), triton.cdiv(c, block), n
    part = torch.empty(n, grid[0], 2, c, device=y.device, dtype=torch.float32)
    mask = da if a is None else a
    _gather[grid](da, mask, y, moments.mean, moments.rstd, da, part, rows, c, store, a is not None, 128, block)
    return part


@triton.jit
def _spread(
    g, a, y, mean, rstd, factor, sums, dy, M: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """dy = factor (g - sum g / M - yhat sum(g yhat) / M): the gradient of batch norm with respect to its input."""
    n = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    kept, known = (m < M)[:, None] & (c < C)[None, :], c < C
    place = n * M * C + m[:, None] * C + c[None, :]
    value, hat = _back(g, a, y, mean, rstd, n, m, c, M, C, RELU)
    first = tl.load(sums + n * 2 * C + c, mask=known, other=0.0)[None, :] / M
    second = tl.load(sums + n * 2 * C + C + c, mask=known, other=0.0)[None, :] / M
    out = (value - first - hat * second) * tl.load(factor + n * C + c, mask=known, other=0.0)[None, :]
    tl.store(dy + place, out.to(dy.dtype.element_ty), mask=kept)


def spread(g: Tensor, a: Tensor | None, y: Tensor, moments: Moments, sums: Tensor) -> Tensor:
    """The second half of batch norm's gradient; with `a`, g is masked by a > 0 first."""
    n, c = y.shape[0], y.shape[-1]
    rows, block = y[0].numel() // c, side(c)
    dy = torch.empty_like(y)
    grid = triton.cdiv(rows, 128), triton.cdiv(c, block), n
    mask = g if a is None else a
    _spread[grid](g, mask, y, *moments[:3], sums, dy, rows, c, a is not None, 128, block)
    return dy


@triton.jit
def _added(part, n, c, C: tl.constexpr, TILES: tl.constexpr, BC: tl.constexpr):
    """The tiles' two sums added up, in the same order always."""
    first, second = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for tile in range(TILES):
        at = part + (n * TILES + tile) * 2 * C + c
        first += tl.load(at, mask=c < C, other=0.0)
        second += tl.load(at + C, mask=c < C, other=0.0)
    return first, second


@triton.jit
def _settle(
    part, gamma, beta, running_mean, running_var, mean, rstd, scale, shift, momentum, eps, M: tl.constexpr,
    C: tl.constexpr, TILES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean and variance from the tiles' sums; the running ones; and the norm as scale and shift."""
    n, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    first, second = _added(part, n, c, C, TILES, BC)
    average = first / M
    variance = tl.maximum(second / M - average * average, 0.0)
    inverse = 1.0 / tl.sqrt(variance + eps)
    at = n * C + c
    old = tl.load(running_mean + at, mask=known, other=0.0)
    tl.store(running_mean + at, old + momentum * (average - old), mask=known)
    old = tl.load(running_var + at, mask=known, other=0.0)
    tl.store(running_var + at, old + momentum * (variance * (M / (M - 1)) - old), mask=known)
    factor = tl.load(gamma + at, mask=known, other=0.0) * inverse
    tl.store(mean + at, average, mask=known)
    tl.store(rstd + at, inverse, mask=known)
    tl.store(scale + at, factor, mask=known)
    tl.store(shift + at, tl.load(beta + at, mask=known, other=0.0) - factor * average, mask=known)


def settle(part: Tensor, norm: Norm, rows: int, momentum: float, eps: float) -> Moments:
    """The moments of a layer from its partial sums (N, tiles, 2, C); the running ones move along."""
    n, count, _, c = part.shape
    out = [torch.empty(n, c, device=part.device) for _ in range(4)]
    _settle[(triton.cdiv(c, 64), n)](part, *norm, *out, momentum, eps, rows, c, count, 64)
    return Moments(*out)


@triton.jit
def _descend_norm(part, gamma, beta, sums, lr, C: tl.constexpr, TILES: tl.constexpr, BC: tl.constexpr):
    """The tiles' sums added up, and a step of SGD on gamma and beta, whose gradients they are."""
    n, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    first, second = _added(part, n, c, C, TILES, BC)
    tl.store(sums + n * 2 * C + c, first, mask=known)
    tl.store(sums + n * 2 * C + C + c, second, mask=known)
    at = n * C + c
    tl.store(gamma + at, tl.load(gamma + at, mask=known, other=0.0) - lr * second, mask=known)
    tl.store(beta + at, tl.load(beta + at, mask=known, other=0.0) - lr * first, mask=known)


def descend_norm(part: Tensor, norm: Norm, lr: float) -> Tensor:
    """A step of SGD on a norm, in place; returns the sums of g and g yhat, (N, 2, C)."""
    n, count, _, c = part.shape
    sums = torch.empty(n, 2, c, device=part.device)
    _descend_norm[(triton.cdiv(c, 64), n)](part, norm.gamma, norm.beta, sums, lr, c, count, 64)
    return sums
