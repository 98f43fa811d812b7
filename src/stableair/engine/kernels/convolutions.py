"""Convolutions of every client and their gradients, as implicit matrix products: one batch of a product per client."""

# The parameters of a @triton.jit function are pointers and compile-time constants, which have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stableair.engine.kernels.batch_norm import Moments, store_grad_sums
from stableair.engine.kernels.tiles import in_range, tile_side
from stableair.engine.launch import Tile, launch


def choose_tile(rows: int, columns: int, depth: int, long: bool, dtype: torch.dtype) -> Tile:
    """Choose the tile of a matrix product (rows, depth) x (depth, columns); the rules come from a search on an H200.

    There is no autotuning at run time, so that a resumed run gives the same bits on another machine. `long` is for
    weight gradients: their depth, the samples and pixels of a batch, is much larger than their rows and columns.
    """
    if long:
        max_sides = (64, 128, 64) if columns > 64 and depth > 256 else (64, 64, 32)
    else:
        max_sides = (128 if rows > 256 else 64, 128, 64)
    if dtype == torch.float32:
        max_sides = (*max_sides[:2], 32)
    r, c, d = (tile_side(*pair) for pair in zip((rows, columns, depth), max_sides, strict=True))
    return Tile(r, c, d, 4, 5 if d == 32 else 4 if r * c <= 8192 else 3)


@triton.jit
def _conv_forward(
    x, w, y, partial, samples, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[m, o] = sum over taps and channels of x[m + tap, c] w[o, tap, c]; and the sums of y and y^2 of each tile."""
    at, n = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m, o = at * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    M: tl.constexpr = B * P * Q
    PIECES: tl.constexpr = (C + BK - 1) // BK
    b, p, q = m // (P * Q), m // Q % P, m % Q
    row_mask, column_mask = in_range(m, M, BM), in_range(o, O, BN)
    x += n * B * H * W * C
    w += n * O * K * K * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for piece in range(K * K * PIECES):
        tap, c = piece // PIECES, piece % PIECES * BK + tl.arange(0, BK)
        depth_mask = in_range(c, C, BK)
        h, v = p * STRIDE + tap // K - PAD, q * STRIDE + tap % K - PAD
        inside = row_mask & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        offsets = ((b * H + h) * W + v) * C
        left = tl.load(x + offsets[:, None] + c[None, :], mask=inside[:, None] & depth_mask[None, :], other=0.0)
        offsets = o[None, :] * (K * K * C) + tap * C + c[:, None]
        right = tl.load(w + offsets, mask=column_mask[None, :] & depth_mask[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    mask = row_mask[:, None] & column_mask[None, :]
    tl.store(y + n * M * O + m[:, None] * O + o[None, :], sums.to(y.dtype.element_ty), mask=mask)
    counted = tl.where((m < tl.load(samples + n) * (P * Q))[:, None], sums, 0.0)
    partial += (n * tl.num_programs(0) + at) * 2 * O + o
    tl.store(partial, tl.sum(counted, 0), mask=column_mask)
    tl.store(partial + O, tl.sum(counted * counted, 0), mask=column_mask)


def conv_forward(
    x: Tensor, w: Tensor, samples: Tensor, stride: int, pad: int, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute a convolution of every client: y (N, B, P, Q, O), and each tile's sums of y and y^2, (N, tiles, 2, O)."""
    n, b, h, width, c = x.shape
    o, k = w.shape[1], w.shape[2]
    p, q = ((side + 2 * pad - k) // stride + 1 for side in (h, width))
    y = x.new_empty(n, b, p, q, o)
    tile = tile or choose_tile(b * p * q, o, c, False, x.dtype)
    grid = triton.cdiv(b * p * q, tile.rows), triton.cdiv(o, tile.columns), n
    partial = torch.empty(n, grid[0], 2, o, device=x.device, dtype=torch.float32)
    launch(_conv_forward, grid, x, w, y, partial, samples, b, h, width, p, q, c, o, k, stride, pad, tile=tile)
    return y, partial


@triton.jit
def _conv_input_grad(
    dy, w, dx, add, a, y, mean, rstd, scale, shift, partial, y2, mean2, rstd2, partial2,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    ADD: tl.constexpr, RELU: tl.constexpr, NORMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dx[m, c] = sum over taps and outputs of dy[(m - tap) / stride, o] w[o, tap, c], plus `add`.

    Computes the pixels with row ROW and column COLUMN modulo the stride. They use the same taps, so that no products
    with zero are computed.
    """
    n = tl.program_id(2).to(tl.int64)
    HS: tl.constexpr = (H + STRIDE - 1) // STRIDE
    WS: tl.constexpr = (W + STRIDE - 1) // STRIDE
    M: tl.constexpr = B * HS * WS
    TILES: tl.constexpr = (M + BM - 1) // BM
    PIECES: tl.constexpr = (O + BK - 1) // BK
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    b, h, v = m // (HS * WS), m // WS % HS * STRIDE + ROW, m % WS * STRIDE + COLUMN
    row_mask, column_mask = in_range(m, M, BM), in_range(c, C, BN)
    if H % STRIDE != 0 or W % STRIDE != 0:
        row_mask = row_mask & (h < H) & (v < W)
    FIRST_H: tl.constexpr = (ROW + PAD) % STRIDE
    FIRST_V: tl.constexpr = (COLUMN + PAD) % STRIDE
    TAPS_H: tl.constexpr = (K - FIRST_H + STRIDE - 1) // STRIDE
    TAPS_V: tl.constexpr = (K - FIRST_V + STRIDE - 1) // STRIDE
    dy += n * B * P * Q * O
    w += n * O * K * K * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for piece in range(TAPS_H * TAPS_V * PIECES):
        tap, o = piece // PIECES, piece % PIECES * BK + tl.arange(0, BK)
        depth_mask = in_range(o, O, BK)
        kh, kw = FIRST_H + tap // TAPS_V * STRIDE, FIRST_V + tap % TAPS_V * STRIDE
        up, back = h + PAD - kh, v + PAD - kw
        p, q = up // STRIDE, back // STRIDE
        inside = row_mask & (up >= 0) & (back >= 0) & (p < P) & (q < Q)
        offsets = ((b * P + p) * Q + q) * O
        left = tl.load(dy + offsets[:, None] + o[None, :], mask=inside[:, None] & depth_mask[None, :], other=0.0)
        offsets = o[:, None] * (K * K * C) + (kh * K + kw) * C + c[None, :]
        right = tl.load(w + offsets, mask=depth_mask[:, None] & column_mask[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    mask = row_mask[:, None] & column_mask[None, :]
    offsets = n * B * H * W * C + ((b * H + h) * W + v)[:, None] * C + c[None, :]
    if ADD:
        sums += tl.load(add + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU == 1:  # recompute the mask from the norm: a > 0 where scale y + shift > 0
        before = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
        before = before * tl.load(scale + n * C + c, mask=column_mask, other=0.0)[None, :]
        sums = tl.where(before + tl.load(shift + n * C + c, mask=column_mask, other=0.0)[None, :] > 0, sums, 0.0)
    if RELU == 2:
        sums = tl.where(tl.load(a + offsets, mask=mask, other=0.0) > 0, sums, 0.0)
    g = sums.to(dx.dtype.element_ty)
    tl.store(dx + offsets, g, mask=mask)
    at = (ROW * STRIDE + COLUMN) * TILES + tl.program_id(0)
    ALL: tl.constexpr = STRIDE * STRIDE * TILES
    if NORMS > 0:
        store_grad_sums(sums, y, mean, rstd, partial, at, n, c, offsets, mask, column_mask, C, ALL)
    if NORMS > 1:
        store_grad_sums(sums, y2, mean2, rstd2, partial2, at, n, c, offsets, mask, column_mask, C, ALL)


class Activation(NamedTuple):
    """The ReLU before a convolution, of one norm or of the two norms of a block with a shortcut."""

    norms: list[tuple[Tensor, Moments]]  # the norms' inputs and moments
    output: Tensor | None = None  # output of the ReLU; None: recompute relu(scale y + shift) from the only norm


def conv_input_grad(
    dy: Tensor, w: Tensor, shape: tuple[int, int], stride: int, pad: int, add: Tensor | None = None,
    activation: Activation | None = None, tile: Tile | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Compute the gradient with respect to the input of a convolution, (N, B, *shape, C), plus `add`.

    With `activation` the gradient is also propagated through the ReLU, and the sums of `relu_grad_sums` are returned
    for each norm.
    """
    n, b, p, q, o = dy.shape
    k, c = w.shape[2], w.shape[4]
    dx = dy.new_empty(n, b, *shape, c)
    rows = b * triton.cdiv(shape[0], stride) * triton.cdiv(shape[1], stride)
    tile = tile or choose_tile(rows, c, o, False, dy.dtype)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(c, tile.columns), n
    norms, output = activation or ([], None)
    partials = [torch.empty(n, grid[0] * stride**2, 2, c, device=dy.device, dtype=torch.float32) for _ in norms]
    relu = 0 if activation is None else 1 if output is None else 2
    unused = dx, Moments(dx, dx, dx, dx)
    (y, moments), (y2, moments2) = [*norms, unused, unused][:2]
    partial, partial2 = [*partials, dx, dx][:2]
    for row, column in product(range(stride), repeat=2):
        launch(
            _conv_input_grad, grid, dy, w, dx, dx if add is None else add, dx if output is None else output, y,
            *moments, partial, y2, *moments2[:2], partial2, b, *shape, p, q, c, o, k, stride, pad, row, column,
            add is not None, relu, len(norms), tile=tile,
        )  # fmt: skip
    return dx, partials


@triton.jit
def _conv_weight_grad_sgd(
    dy, x, w, copy, lr, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, COPY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """w[o, tap, c] -= lr sum over m of dy[m, o] x[m + tap, c]; the gradient itself is never stored."""
    n, tap = tl.program_id(2).to(tl.int64), tl.program_id(1)
    kh, kw = tap // K, tap % K
    column_tiles = tl.cdiv(C, BN)
    o = tl.program_id(0) // column_tiles * BM + tl.arange(0, BM)
    c = tl.program_id(0) % column_tiles * BN + tl.arange(0, BN)
    M: tl.constexpr = B * P * Q
    row_mask, column_mask = in_range(o, O, BM), in_range(c, C, BN)
    dy += n * M * O
    x += n * B * H * W * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for m0 in range(0, M, BK):
        m = m0 + tl.arange(0, BK)
        depth_mask = in_range(m, M, BK)
        b, p, q = m // (P * Q), m // Q % P, m % Q
        h, v = p * STRIDE + kh - PAD, q * STRIDE + kw - PAD
        inside = depth_mask & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        left = tl.load(dy + m[:, None] * O + o[None, :], mask=depth_mask[:, None] & row_mask[None, :], other=0.0)
        offsets = ((b * H + h) * W + v) * C
        right = tl.load(x + offsets[:, None] + c[None, :], mask=inside[:, None] & column_mask[None, :], other=0.0)
        sums = tl.dot(tl.trans(left), right, sums, input_precision="ieee")
    offsets = n * O * K * K * C + o[:, None] * (K * K * C) + tap * C + c[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    new = tl.load(w + offsets, mask=mask, other=0.0) - lr * sums
    tl.store(w + offsets, new, mask=mask)
    if COPY:
        tl.store(copy + offsets, new.to(copy.dtype.element_ty), mask=mask)


def conv_weight_grad_sgd(
    dy: Tensor, x: Tensor, w: Tensor, copy: Tensor | None, lr: float, stride: int, pad: int,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Take an SGD step on a convolution's float32 weights, in place; also update `copy`."""
    n, b, p, q, o = dy.shape
    _, _, h, width, c = x.shape
    k = w.shape[2]
    tile = tile or choose_tile(o, c, b * p * q, True, dy.dtype)
    grid = triton.cdiv(o, tile.rows) * triton.cdiv(c, tile.columns), k * k, n
    target = w if copy is None else copy
    sizes = b, h, width, p, q, c, o, k, stride, pad, copy is not None
    launch(_conv_weight_grad_sgd, grid, dy, x, w, target, lr, *sizes, tile=tile)
