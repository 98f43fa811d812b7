"""Triton kernels for many clients at once: each client's convolution is one batch of an implicit matrix product.

Activations are (N, B, H, W, C), weights (N, O, K, K, C), all contiguous, so that no operand is sliced or transposed in
memory. Products accumulate in float32. No kernel adds atomically: the same input gives the same bits.

A batch has room for B samples; `samples` (N,) says how many each client has in this step. What is computed of the
others is never counted, and their gradients are zero.
"""

from itertools import product
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


class Tile(NamedTuple):
    """How a matrix product is cut: the rows and columns of a program, the depth of a piece of its sum, its pipeline."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def _side(length: int, most: int) -> int:
    """The side of a tile: as long as there is something to fill it, a power of two from 16 on."""
    return min(most, max(16, triton.next_power_of_2(length)))


def tile(rows: int, columns: int, depth: int, long: bool, dtype: torch.dtype) -> Tile:
    """The tile of a product with `rows` rows and so on, whose sum is `long` or not; from a search on an H200.

    A rule, and no search at run time: a run gives the same bits wherever it goes on.
    """
    if long:  # few outputs and a long sum: a weight gradient
        most = (64, 128, 64) if columns > 64 and depth > 256 else (64, 64, 32)
    else:
        most = (128 if rows > 256 else 64, 128, 64)
    if dtype == torch.float32:
        most = (*most[:2], 32)
    r, c, d = (_side(*pair) for pair in zip((rows, columns, depth), most, strict=True))
    return Tile(r, c, d, 4, 5 if d == 32 else 4 if r * c <= 8192 else 3)


@triton.jit
def _below(i, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """i < LIMIT; where blocks fill it, that is known before the kernel runs, and loads stay wide."""
    if LIMIT % BLOCK == 0:
        return tl.full((BLOCK,), True, tl.int1)
    else:
        return i < LIMIT


@triton.jit
def _forward(
    x, w, y, part, samples, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, o] = sum over taps and channels of x[m + tap, c] w[o, tap, c]; and of each tile the sums of y and y^2."""
    at, n = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m, o = at * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    M: tl.constexpr = B * P * Q
    PIECES: tl.constexpr = (C + BK - 1) // BK
    b, p, q = m // (P * Q), m // Q % P, m % Q
    here, known = _below(m, M, BM), _below(o, O, BN)
    x += n * B * H * W * C
    w += n * O * K * K * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for piece in range(K * K * PIECES):
        tap, c = piece // PIECES, piece % PIECES * BK + tl.arange(0, BK)
        deep = _below(c, C, BK)
        h, v = p * STRIDE + tap // K - PAD, q * STRIDE + tap % K - PAD
        inside = here & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        place = ((b * H + h) * W + v) * C
        left = tl.load(x + place[:, None] + c[None, :], mask=inside[:, None] & deep[None, :], other=0.0)
        place = o[None, :] * (K * K * C) + tap * C + c[:, None]
        right = tl.load(w + place, mask=known[None, :] & deep[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    tl.store(
        y + n * M * O + m[:, None] * O + o[None, :], sums.to(y.dtype.element_ty), mask=here[:, None] & known[None, :]
    )
    counted = tl.where((m < tl.load(samples + n) * (P * Q))[:, None], sums, 0.0)
    part += (n * tl.num_programs(0) + at) * 2 * O + o
    tl.store(part, tl.sum(counted, 0), mask=known)
    tl.store(part + O, tl.sum(counted * counted, 0), mask=known)


def forward(
    x: Tensor, w: Tensor, samples: Tensor, stride: int, pad: int, cut: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """A convolution of every client: y (N, B, P, Q, O), and each tile's sums of y and y^2, (N, tiles, 2, O)."""
    n, b, h, width, c = x.shape
    o, k = w.shape[1], w.shape[2]
    p, q = ((side + 2 * pad - k) // stride + 1 for side in (h, width))
    y = x.new_empty(n, b, p, q, o)
    cut = cut or tile(b * p * q, o, c, False, x.dtype)
    grid = triton.cdiv(b * p * q, cut.rows), triton.cdiv(o, cut.columns), n
    part = torch.empty(n, grid[0], 2, o, device=x.device, dtype=torch.float32)
    _forward[grid](x, w, y, part, samples, b, h, width, p, q, c, o, k, stride, pad, *cut[:3],
                   num_warps=cut.warps, num_stages=cut.stages)  # fmt: skip
    return y, part


@triton.jit
def _hat(y, mean, rstd, n, c, place, kept, known, C: tl.constexpr):
    """The normalised y of a tile."""
    centred = tl.load(y + place, mask=kept, other=0.0).to(tl.float32)
    centred -= tl.load(mean + n * C + c, mask=known, other=0.0)[None, :]
    return centred * tl.load(rstd + n * C + c, mask=known, other=0.0)[None, :]


@triton.jit
def _sums(g, y, mean, rstd, part, at, n, c, place, kept, known, C: tl.constexpr, TILES: tl.constexpr):
    """Of a tile the sums of g, and of g times the normalised y: what a norm's gradients need."""
    product = g * _hat(y, mean, rstd, n, c, place, kept, known, C)
    part += (n * TILES + at) * 2 * C + c
    tl.store(part, tl.sum(g, 0), mask=known)
    tl.store(part + C, tl.sum(product, 0), mask=known)


@triton.jit
def _input_gradient(
    dy, w, dx, add, a, y, mean, rstd, scale, shift, part, y2, mean2, rstd2, part2, B: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, O: tl.constexpr, K: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, ADD: tl.constexpr,
    RELU: tl.constexpr, NORMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dx[m, c] = sum over taps and outputs of dy[(m - tap) / stride, o] w[o, tap, c], plus what else flows there.

    Of the pixels whose row is ROW and whose column is COLUMN modulo the stride: they meet the same taps, and so no
    product with zero is made.
    """
    n = tl.program_id(2).to(tl.int64)
    HS: tl.constexpr = (H + STRIDE - 1) // STRIDE
    WS: tl.constexpr = (W + STRIDE - 1) // STRIDE
    M: tl.constexpr = B * HS * WS
    TILES: tl.constexpr = (M + BM - 1) // BM
    PIECES: tl.constexpr = (O + BK - 1) // BK
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    b, h, v = m // (HS * WS), m // WS % HS * STRIDE + ROW, m % WS * STRIDE + COLUMN
    here, known = _below(m, M, BM), _below(c, C, BN)
    if H % STRIDE != 0 or W % STRIDE != 0:
        here = here & (h < H) & (v < W)
    FIRST_H: tl.constexpr = (ROW + PAD) % STRIDE
    FIRST_V: tl.constexpr = (COLUMN + PAD) % STRIDE
    TAPS_H: tl.constexpr = (K - FIRST_H + STRIDE - 1) // STRIDE
    TAPS_V: tl.constexpr = (K - FIRST_V + STRIDE - 1) // STRIDE
    dy += n * B * P * Q * O
    w += n * O * K * K * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for piece in range(TAPS_H * TAPS_V * PIECES):
        tap, o = piece // PIECES, piece % PIECES * BK + tl.arange(0, BK)
        deep = _below(o, O, BK)
        kh, kw = FIRST_H + tap // TAPS_V * STRIDE, FIRST_V + tap % TAPS_V * STRIDE
        up, back = h + PAD - kh, v + PAD - kw
        p, q = up // STRIDE, back // STRIDE
        inside = here & (up >= 0) & (back >= 0) & (p < P) & (q < Q)
        place = ((b * P + p) * Q + q) * O
        left = tl.load(dy + place[:, None] + o[None, :], mask=inside[:, None] & deep[None, :], other=0.0)
        place = o[:, None] * (K * K * C) + (kh * K + kw) * C + c[None, :]
        right = tl.load(w + place, mask=deep[:, None] & known[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    kept = here[:, None] & known[None, :]
    place = n * B * H * W * C + ((b * H + h) * W + v)[:, None] * C + c[None, :]
    if ADD:
        sums += tl.load(add + place, mask=kept, other=0.0).to(tl.float32)
    if RELU == 1:  # by the norm itself: a > 0 where scale y + shift > 0
        before = tl.load(y + place, mask=kept, other=0.0).to(tl.float32)
        before = before * tl.load(scale + n * C + c, mask=known, other=0.0)[None, :]
        sums = tl.where(before + tl.load(shift + n * C + c, mask=known, other=0.0)[None, :] > 0, sums, 0.0)
    if RELU == 2:
        sums = tl.where(tl.load(a + place, mask=kept, other=0.0) > 0, sums, 0.0)
    g = sums.to(dx.dtype.element_ty)
    tl.store(dx + place, g, mask=kept)
    at = (ROW * STRIDE + COLUMN) * TILES + tl.program_id(0)
    if NORMS > 0:
        _sums(sums, y, mean, rstd, part, at, n, c, place, kept, known, C, STRIDE * STRIDE * TILES)
    if NORMS > 1:
        _sums(sums, y2, mean2, rstd2, part2, at, n, c, place, kept, known, C, STRIDE * STRIDE * TILES)


class Behind(NamedTuple):
    """What lies behind an input on the way back: relu, and one norm or the two of a block with a shortcut."""

    layers: list[tuple[Tensor, Moments]]  # the norms' inputs and moments
    a: Tensor | None = None  # the relu's output; None where it is relu(scale y + shift) of the only norm


def input_gradient(
    dy: Tensor, w: Tensor, shape: tuple[int, int], stride: int, pad: int, add: Tensor | None = None,
    behind: Behind | None = None, cut: Tile | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The gradient with respect to the input of a convolution, (N, B, *shape, C), plus `add`.

    With `behind` it is led on through the relu, and each norm gets its sums, as from `gather`.
    """
    n, b, p, q, o = dy.shape
    k, c = w.shape[2], w.shape[4]
    dx = dy.new_empty(n, b, *shape, c)
    rows = b * triton.cdiv(shape[0], stride) * triton.cdiv(shape[1], stride)
    cut = cut or tile(rows, c, o, False, dy.dtype)
    grid = triton.cdiv(rows, cut.rows), triton.cdiv(c, cut.columns), n
    layers = behind.layers if behind else []
    parts = [torch.empty(n, grid[0] * stride**2, 2, c, device=dy.device, dtype=torch.float32) for _ in layers]
    relu = 0 if behind is None else 1 if behind.a is None else 2
    (y, moments), (y2, moments2) = [*layers, (dx, (dx,) * 4), (dx, (dx,) * 4)][:2]
    part, part2 = [*parts, dx, dx][:2]
    for row, column in product(range(stride), repeat=2):
        _input_gradient[grid](
            dy, w, dx, dx if add is None else add, behind.a if relu == 2 else dx, y, *moments, part, y2, *moments2[:2],
            part2, b, *shape, p, q, c, o, k, stride, pad, row, column, add is not None, relu, len(layers), *cut[:3],
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return dx, parts


@triton.jit
def _descend(
    dy, x, w, copy, lr, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, COPY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """w[o, tap, c] -= lr sum over m of dy[m, o] x[m + tap, c]; the gradient itself is never stored."""
    n, tap = tl.program_id(2).to(tl.int64), tl.program_id(1)
    kh, kw = tap // K, tap % K
    across = tl.cdiv(C, BN)
    o = tl.program_id(0) // across * BM + tl.arange(0, BM)
    c = tl.program_id(0) % across * BN + tl.arange(0, BN)
    M: tl.constexpr = B * P * Q
    known_o, known_c = _below(o, O, BM), _below(c, C, BN)
    dy += n * M * O
    x += n * B * H * W * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for m0 in range(0, M, BK):
        m = m0 + tl.arange(0, BK)
        here = _below(m, M, BK)
        b, p, q = m // (P * Q), m // Q % P, m % Q
        h, v = p * STRIDE + kh - PAD, q * STRIDE + kw - PAD
        inside = here & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        left = tl.load(dy + m[:, None] * O + o[None, :], mask=here[:, None] & known_o[None, :], other=0.0)
        place = ((b * H + h) * W + v) * C
        right = tl.load(x + place[:, None] + c[None, :], mask=inside[:, None] & known_c[None, :], other=0.0)
        sums = tl.dot(tl.trans(left), right, sums, input_precision="ieee")
    place = n * O * K * K * C + o[:, None] * (K * K * C) + tap * C + c[None, :]
    kept = known_o[:, None] & known_c[None, :]
    new = tl.load(w + place, mask=kept, other=0.0) - lr * sums
    tl.store(w + place, new, mask=kept)
    if COPY:
        tl.store(copy + place, new.to(copy.dtype.element_ty), mask=kept)


def descend(
    dy: Tensor, x: Tensor, w: Tensor, copy: Tensor | None, lr: float, stride: int, pad: int,
    cut: Tile | None = None,
) -> None:  # fmt: skip
    """A step of SGD on a convolution's float32 weights, in place; `copy` is what the products read of them."""
    n, b, p, q, o = dy.shape
    _, _, h, width, c = x.shape
    k = w.shape[2]
    cut = cut or tile(o, c, b * p * q, True, dy.dtype)
    grid = triton.cdiv(o, cut.rows) * triton.cdiv(c, cut.columns), k * k, n
    target = w if copy is None else copy
    _descend[grid](dy, x, w, target, lr, b, h, width, p, q, c, o, k, stride, pad, copy is not None, *cut[:3],
                   num_warps=cut.warps, num_stages=cut.stages)  # fmt: skip


ROWS = 64  # of the tiles of what works entry by entry


@triton.jit
def _place(M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """A program's rows, channels and entries, and which of them there are."""
    n = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    known = _below(c, C, BC)
    return n, m, c, n * M * C + m[:, None] * C + c[None, :], _below(m, M, BM)[:, None] & known[None, :], known


def _entries(y: Tensor) -> tuple[int, int, int, tuple[int, int, int]]:
    """Rows and channels of a layer, the channels of a tile, and the grid of its tiles."""
    n, c = y.shape[0], y.shape[-1]
    rows, block = y[0].numel() // c, _side(c, 64)
    return rows, c, block, (triton.cdiv(rows, ROWS), triton.cdiv(c, block), n)


@triton.jit
def _normalise(
    y, scale, shift, rest, rest_scale, rest_shift, out, M: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out = relu(scale y + shift [+ rest, or + scale' rest + shift']), per client and channel."""
    n, _, c, place, kept, known = _place(M, C, BM, BC)
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
    out, (rows, c, block, grid) = torch.empty_like(y), _entries(y)
    kind = 0 if rest is None else 1 if rest_affine is None else 2
    _normalise[grid](y, *affine, y if rest is None else rest, *(rest_affine or affine), out, rows, c, kind, ROWS, block)
    return out


@triton.jit
def _gather(
    da, a, y, mean, rstd, g, part, M: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """g = da where a > 0; and of each tile the sums of g and of g times the normalised y."""
    n, _, c, place, kept, known = _place(M, C, BM, BC)
    value = tl.load(da + place, mask=kept, other=0.0).to(tl.float32)
    value = tl.where(tl.load(a + place, mask=kept, other=0.0) > 0, value, 0.0)
    tl.store(g + place, value.to(g.dtype.element_ty), mask=kept)
    _sums(value, y, mean, rstd, part, tl.program_id(0), n, c, place, kept, known, C, TILES)


def gather(da: Tensor, a: Tensor, y: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """g = da where a > 0, and each tile's sums of g and of g yhat: (N, tiles, 2, C)."""
    g, (rows, c, block, grid) = torch.empty_like(da), _entries(y)
    part = torch.empty(grid[2], grid[0], 2, c, device=y.device, dtype=torch.float32)
    _gather[grid](da, a, y, moments.mean, moments.rstd, g, part, rows, c, grid[0], ROWS, block)
    return g, part


@triton.jit
def _spread(
    g, y, mean, rstd, factor, sums, samples, dy, PIXELS: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dy = factor (g - sum g / M - yhat sum(g yhat) / M): the gradient of batch norm with respect to its input."""
    n, m, c, place, kept, known = _place(M, C, BM, BC)
    count = tl.load(samples + n) * PIXELS
    hat = _hat(y, mean, rstd, n, c, place, kept, known, C)
    share = 1.0 / tl.maximum(count, 1).to(tl.float32)
    first = tl.load(sums + n * 2 * C + c, mask=known, other=0.0)[None, :] * share
    second = tl.load(sums + n * 2 * C + C + c, mask=known, other=0.0)[None, :] * share
    out = tl.load(g + place, mask=kept, other=0.0).to(tl.float32) - first - hat * second
    out = out * tl.load(factor + n * C + c, mask=known, other=0.0)[None, :]
    tl.store(dy + place, tl.where((m < count)[:, None], out, 0.0).to(dy.dtype.element_ty), mask=kept)


def spread(g: Tensor, y: Tensor, moments: Moments, sums: Tensor, samples: Tensor) -> Tensor:
    """The second half of batch norm's gradient."""
    dy, (rows, c, block, grid) = torch.empty_like(y), _entries(y)
    _spread[grid](g, y, *moments[:3], sums, samples, dy, rows // y.shape[1], rows, c, ROWS, block)
    return dy


@triton.jit
def _added(part, n, c, C: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """The tiles' two sums added up, in the same order always."""
    first, second = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
    for t0 in range(0, TILES, BT):
        t = t0 + tl.arange(0, BT)
        kept = (t < TILES)[:, None] & (c < C)[None, :]
        at = part + (n * TILES + t)[:, None] * 2 * C + c[None, :]
        first += tl.load(at, mask=kept, other=0.0)
        second += tl.load(at + C, mask=kept, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _settle(
    part, gamma, beta, running_mean, running_var, samples, mean, rstd, scale, shift, momentum, eps,
    PIXELS: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean and variance from the tiles' sums; the running ones; and the norm as scale and shift.

    Where a client has no sample nothing moves, and its norm is zero, so that nothing can grow from layer to layer.
    """
    n, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    first, second = _added(part, n, c, C, TILES, BT, BC)
    count = (tl.load(samples + n) * PIXELS).to(tl.float32)
    there = count > 0
    average = first / tl.maximum(count, 1.0)
    variance = tl.maximum(second / tl.maximum(count, 1.0) - average * average, 0.0)
    inverse = tl.where(there, 1.0 / tl.sqrt(variance + eps), 0.0)
    at, moved = n * C + c, tl.where(there, momentum, 0.0)
    old = tl.load(running_mean + at, mask=known, other=0.0)
    tl.store(running_mean + at, old + moved * (average - old), mask=known)
    old = tl.load(running_var + at, mask=known, other=0.0)
    unbiased = variance * count / tl.maximum(count - 1.0, 1.0)
    tl.store(running_var + at, old + moved * (unbiased - old), mask=known)
    factor = tl.load(gamma + at, mask=known, other=0.0) * inverse
    tl.store(mean + at, average, mask=known)
    tl.store(rstd + at, inverse, mask=known)
    tl.store(scale + at, factor, mask=known)
    offset = tl.load(beta + at, mask=known, other=0.0) - factor * average
    tl.store(shift + at, tl.where(there, offset, 0.0), mask=known)


def settle(part: Tensor, norm: Norm, samples: Tensor, pixels: int, momentum: float, eps: float) -> Moments:
    """The moments of a layer from its partial sums (N, tiles, 2, C); the running ones move along."""
    n, count, _, c = part.shape
    out = [torch.empty(n, c, device=part.device) for _ in range(4)]
    grid = triton.cdiv(c, 32), n
    _settle[grid](part, *norm, samples, *out, momentum, eps, pixels, c, count, _side(count, 64), 32)
    return Moments(*out)


@triton.jit
def _descend_norm(
    part, gamma, beta, sums, lr, C: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """The tiles' sums added up, and a step of SGD on gamma and beta, whose gradients they are."""
    n, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    known = c < C
    first, second = _added(part, n, c, C, TILES, BT, BC)
    tl.store(sums + n * 2 * C + c, first, mask=known)
    tl.store(sums + n * 2 * C + C + c, second, mask=known)
    at = n * C + c
    tl.store(gamma + at, tl.load(gamma + at, mask=known, other=0.0) - lr * second, mask=known)
    tl.store(beta + at, tl.load(beta + at, mask=known, other=0.0) - lr * first, mask=known)


def descend_norm(part: Tensor, norm: Norm, lr: float) -> Tensor:
    """A step of SGD on a norm, in place; returns the sums of g and g yhat, (N, 2, C)."""
    n, count, _, c = part.shape
    sums = torch.empty(n, 2, c, device=part.device)
    grid = triton.cdiv(c, 32), n
    _descend_norm[grid](part, norm.gamma, norm.beta, sums, lr, c, count, _side(count, 64), 32)
    return sums
