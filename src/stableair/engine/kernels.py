"""Triton kernels for many clients at once: convolutions, batch norm, group norm, and their gradients.

Each client's convolution is one batch of an implicit matrix product.

Activations are (N, B, H, W, C), weights (N, O, K, K, C), all contiguous, so that no operand is sliced or transposed in
memory. Products accumulate in float32. No kernel adds atomically: the same input gives the same bits.

A batch holds up to B samples; `samples` (N,) is the number of samples of each client in this step. The other rows are
padding: the sums exclude them, and their gradients are zero.
"""

# The parameters of a @triton.jit function are pointers and compile-time constants, which have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stableair.engine.launch import Tile, launch

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


def _tile_side(length: int, max_side: int) -> int:
    """Return the side of a tile: a power of two, at least 16 and at most `max_side`."""
    return min(max_side, max(16, triton.next_power_of_2(length)))


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
    r, c, d = (_tile_side(*pair) for pair in zip((rows, columns, depth), max_sides, strict=True))
    return Tile(r, c, d, 4, 5 if d == 32 else 4 if r * c <= 8192 else 3)


@triton.jit
def _in_range(i, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """i < LIMIT; a constant if LIMIT is a multiple of BLOCK, which allows wide loads."""
    if LIMIT % BLOCK == 0:
        return tl.full((BLOCK,), True, tl.int1)
    else:
        return i < LIMIT


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
    row_mask, column_mask = _in_range(m, M, BM), _in_range(o, O, BN)
    x += n * B * H * W * C
    w += n * O * K * K * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for piece in range(K * K * PIECES):
        tap, c = piece // PIECES, piece % PIECES * BK + tl.arange(0, BK)
        depth_mask = _in_range(c, C, BK)
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
def _normalised_tile(y, mean, rstd, n, c, offsets, mask, column_mask, C: tl.constexpr):
    """The normalised y of a tile."""
    centred = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
    centred -= tl.load(mean + n * C + c, mask=column_mask, other=0.0)[None, :]
    return centred * tl.load(rstd + n * C + c, mask=column_mask, other=0.0)[None, :]


@triton.jit
def _store_grad_sums(
    g, y, mean, rstd, partial, at, n, c, offsets, mask, column_mask, C: tl.constexpr, TILES: tl.constexpr
):
    """The sums over a tile of g, and of g times the normalised y, for the gradients of a norm."""
    product = g * _normalised_tile(y, mean, rstd, n, c, offsets, mask, column_mask, C)
    partial += (n * TILES + at) * 2 * C + c
    tl.store(partial, tl.sum(g, 0), mask=column_mask)
    tl.store(partial + C, tl.sum(product, 0), mask=column_mask)


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
    row_mask, column_mask = _in_range(m, M, BM), _in_range(c, C, BN)
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
        depth_mask = _in_range(o, O, BK)
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
        _store_grad_sums(sums, y, mean, rstd, partial, at, n, c, offsets, mask, column_mask, C, ALL)
    if NORMS > 1:
        _store_grad_sums(sums, y2, mean2, rstd2, partial2, at, n, c, offsets, mask, column_mask, C, ALL)


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
    row_mask, column_mask = _in_range(o, O, BM), _in_range(c, C, BN)
    dy += n * M * O
    x += n * B * H * W * C
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for m0 in range(0, M, BK):
        m = m0 + tl.arange(0, BK)
        depth_mask = _in_range(m, M, BK)
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


TILE_ROWS = 64  # rows of a tile in entry-wise kernels


@triton.jit
def _entry_offsets(M: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Rows, channels and offsets of a program's entries, and the masks of valid entries and channels."""
    n = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    column_mask = _in_range(c, C, BC)
    offsets = n * M * C + m[:, None] * C + c[None, :]
    mask = _in_range(m, M, BM)[:, None] & column_mask[None, :]
    return n, m, c, offsets, mask, column_mask


def _elementwise_grid(y: Tensor) -> tuple[int, int, int, tuple[int, int, int]]:
    """Rows and channels of a layer, the channels of a tile, and the grid of its tiles."""
    n, c = y.shape[0], y.shape[-1]
    rows, block = y[0].numel() // c, _tile_side(c, 64)
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
    _store_grad_sums(value, y, mean, rstd, partial, tl.program_id(0), n, c, offsets, mask, column_mask, C, TILES)


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
    normalised = _normalised_tile(y, mean, rstd, n, c, offsets, mask, column_mask, C)
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
    tile = _tile_side(count, 64), 32
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
    launch(_bn_affine_sgd, grid, partial, norm.gamma, norm.beta, sums, lr, c, count, _tile_side(count, 64), 32)
    return sums


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
    return m[:, None] * C + c[None, :], _in_range(m, PIXELS, BM)[:, None] & column_mask[None, :]


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
    tile = _tile_side(h * w, 64), triton.next_power_of_2(take)
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
