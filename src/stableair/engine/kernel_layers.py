"""Layers of a stacked network computed by Triton kernels: convolutions, group norms, and SGD steps.

Between these layers, images keep the shape (N, B, C, H, W) with the memory layout (N, B, H, W, C) of the kernels.
Entry-wise functions and pooling keep this layout, so that no copies are needed.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stableair.engine import kernels
from stableair.engine.stacked import FusedStep, Stacked, Tensors, as_vectors


def clients_first(n: int, x: Tensor) -> Tensor:
    """Convert images (N, B, C, H, W) or (B, N C, H, W) to (N, B, C, H, W) in the kernels' memory layout."""
    if x.ndim == 4:
        x = x.unflatten(1, (n, -1)).transpose(0, 1)
    return _channels_first(_channels_last(x))


def _channels_last(x: Tensor) -> Tensor:
    """(N, B, C, H, W) -> (N, B, H, W, C), contiguous; also for weights (N, O, C, K, K)."""
    return x.movedim(2, -1).contiguous()


def _channels_first(x: Tensor) -> Tensor:
    """(N, B, H, W, C) -> (N, B, C, H, W), in the same memory."""
    return x.movedim(-1, 2)


class _Convolution(torch.autograd.Function):
    """x (N, B, C, H, W) and the weights (N, O, C, K, K) to (N, B, O, P, Q)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
        x, w = _channels_last(x), _channels_last(weight.to(x.dtype))
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.pad = stride, pad
        samples = torch.full((len(x),), x.shape[1], dtype=torch.int32, device=x.device)
        y, _ = kernels.conv_forward(x, w, samples, stride, pad)
        return _channels_first(y).data  # not a view: a layer that works in place may follow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), dy, dx, dw = ctx.saved_tensors, _channels_last(grads[0]), None, None
        if ctx.needs_input_grad[0]:
            dx = _channels_first(kernels.conv_input_grad(dy, w, x.shape[2:4], ctx.stride, ctx.pad)[0])
        if ctx.needs_input_grad[1]:
            sums = torch.zeros(w.shape, device=w.device)
            kernels.conv_weight_grad_sgd(dy, x, sums, None, -1.0, ctx.stride, ctx.pad)  # lr=-1 adds the gradient
            dw = _channels_first(sums)
        return dx, dw, None, None


class _GroupNorm(torch.autograd.Function):
    """x (N, B, C, H, W), gamma and beta (N, C) to the normalised images (N, B, C, H, W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> Tensor:
        x = _channels_last(x)
        y, moments = kernels.group_norm(x, gamma, beta, groups, eps)
        ctx.save_for_backward(x, gamma, *moments)
        ctx.groups = groups
        return _channels_first(y).data  # not a view: a layer that works in place may follow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, *moments = ctx.saved_tensors
        moments = kernels.ImageMoments(*moments)
        dx, sums = kernels.group_norm_grad(_channels_last(grads[0]), x, gamma, moments, ctx.groups)
        return _channels_first(dx), sums[:, 1], sums[:, 0], None, None


def conv2d(layer: nn.Conv2d, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    """Compute a convolution as a stacked layer: see `stacked_layer`."""
    convolve: Any = _Convolution.apply
    y: Tensor = convolve(clients_first(n, x), tensors["weight"], layer.stride[0], layer.padding[0])
    return y if "bias" not in tensors else y + tensors["bias"][:, None, :, None, None].to(y.dtype)


def _conv_step(layer: nn.Conv2d, weights: Tensor, x: Tensor, dy: Tensor, lr: float, operand: Tensor | None) -> None:
    assert isinstance(layer.padding, tuple)  # checked by `_unsupported_option`
    weights = weights.movedim(2, -1)  # a view: the step must change the weights in place
    operand = None if operand is None else operand.movedim(2, -1)
    x, dy = _channels_last(x), _channels_last(dy)
    kernels.conv_weight_grad_sgd(dy, x, weights, operand, lr, layer.stride[0], layer.padding[0])


def _dense_step(layer: nn.Linear, weights: Tensor, x: Tensor, dy: Tensor, lr: float, operand: Tensor | None) -> None:
    """Take the step of a dense layer as a 1 x 1 convolution of images with one pixel."""
    x, dy = (t.contiguous()[:, :, None, None] for t in (x, dy))
    weights, *copy = (t[:, :, None, None] for t in (weights, operand) if t is not None)
    kernels.conv_weight_grad_sgd(dy, x, weights, copy[0] if copy else None, lr, 1, 0)


CONVOLUTION = FusedStep(clients_first, _conv_step, by_kernels=True)
DENSE = FusedStep(as_vectors, _dense_step, by_kernels=True)


def group_norm(layer: nn.GroupNorm, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    """Compute a group norm as a stacked layer: see `stacked_layer`."""
    norm: Any = _GroupNorm.apply
    y: Tensor = norm(clients_first(n, x), tensors["weight"], tensors["bias"], layer.num_groups, layer.eps)
    return y


def kernel_convolutions(program: Stacked) -> list[str]:
    """Return the convolutions of a program that the kernels support: not grouped, not dilated, and square."""
    return [name for name, layer in _convolutions(program).items() if not _unsupported_option(layer)]


def other_convolutions(program: Stacked) -> dict[str, str]:
    """Return the convolutions of a program that the kernels do not support, each with its unsupported option."""
    return {name: option for name, layer in _convolutions(program).items() if (option := _unsupported_option(layer))}


def kernel_group_norms(program: Stacked) -> list[str]:
    """Return the group norms of a program that the kernels support: with weights and at most 128 channels per group."""
    norms = ((name, layer) for name, layer in program.layers.items() if type(layer) is nn.GroupNorm)
    return [
        name
        for name, layer in norms
        if layer.affine and layer.num_channels // layer.num_groups <= kernels.LARGEST_GROUP
    ]


def _convolutions(program: Stacked) -> dict[str, nn.Conv2d]:
    return {name: layer for name, layer in program.layers.items() if type(layer) is nn.Conv2d}


def _unsupported_option(layer: nn.Conv2d) -> str:
    """Return the option of a convolution that the kernels do not support, or ""."""
    if layer.groups != 1:
        return f"groups={layer.groups}"
    if layer.dilation != (1, 1):
        return f"dilation={layer.dilation}"
    sides = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding")}
    uneven = (f"{name}={side}" for name, side in sides.items() if not isinstance(side, tuple) or len({*side}) != 1)
    return next(uneven, "")


def by_kernels(program: Stacked) -> Stacked:
    """Return the program with kernels for its convolutions and group norms, and for the steps of dense layers."""
    changed = copy.copy(program)
    convolutions = kernel_convolutions(program)
    norms = dict.fromkeys(kernel_group_norms(program), group_norm)
    changed.functions = program.functions | dict.fromkeys(convolutions, conv2d) | norms
    changed.fused = dict.fromkeys(program.fused, DENSE) | dict.fromkeys(convolutions, CONVOLUTION)
    changed.has_kernels = True
    return changed


def try_kernels(device: torch.device) -> None:
    """Compute a small convolution and its gradients with the largest tiles; raise if the kernels do not run."""
    with torch.cuda.device(device):
        x, w = (torch.ones(1, *shape, 128, device=device, dtype=torch.bfloat16) for shape in ((2, 16, 16), (128, 3, 3)))
        samples = torch.full((1,), 2, device=device, dtype=torch.int32)
        y, _ = kernels.conv_forward(x, w, samples, 1, 1)
        kernels.conv_input_grad(y, w, (16, 16), 1, 1)
        kernels.conv_weight_grad_sgd(y, x, w.float(), w, 0.0, 1, 1)
        torch.cuda.synchronize()
