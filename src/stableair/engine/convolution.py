"""Stacked convolutions and their gradients with the kernels of `kernels.py`, for any network that can be stacked."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stableair.engine import kernels
from stableair.engine.stacked import Stacked, Tensors, as_images


class _Convolution(torch.autograd.Function):
    """x (N, B, H, W, C) and the float32 weights (N, O, C, K, K) to (N, B, P, Q, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
        w = weight.movedim(2, -1).to(x.dtype).contiguous()
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.pad = stride, pad
        samples = torch.full((len(x),), x.shape[1], dtype=torch.int32, device=x.device)
        return kernels.conv_forward(x, w, samples, stride, pad)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), dy, dx, dw = ctx.saved_tensors, grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            dx, _ = kernels.conv_input_grad(dy, w, x.shape[2:4], ctx.stride, ctx.pad)
        if ctx.needs_input_grad[1]:
            sums = torch.zeros(w.shape, device=w.device)
            kernels.conv_weight_grad_sgd(dy, x, sums, None, -1.0, ctx.stride, ctx.pad)  # lr=-1 adds the gradient
            dw = sums.movedim(-1, 2).contiguous()
        return dx, dw, None, None


def _to_kernel_layout(images: Tensor, n: int) -> Tensor:
    """Convert images of stacked layers to the layout of the kernels: (B, N C, H, W) -> (N, B, H, W, C)."""
    return images.unflatten(1, (n, -1)).permute(1, 0, 3, 4, 2).contiguous()


def _to_stacked_layout(x: Tensor) -> Tensor:
    """Invert `_to_kernel_layout`: (N, B, H, W, C) -> (B, N C, H, W)."""
    return x.permute(1, 2, 3, 0, 4).flatten(3).permute(0, 3, 1, 2)


def conv2d(layer: nn.Conv2d, x: Tensor, n: int, tensors: Tensors, mask: Tensor | None) -> Tensor:
    """Compute a convolution as a stacked layer: see `stacked_layer`."""
    stride, pad = layer.stride[0], layer.padding[0]
    convolve: Any = _Convolution.apply
    y = _to_stacked_layout(convolve(_to_kernel_layout(as_images(x), n), tensors["weight"], stride, pad))
    return y if "bias" not in tensors else y + tensors["bias"].flatten().to(y.dtype)[:, None, None]


def kernel_convolutions(program: Stacked) -> list[str]:
    """Return the convolutions of a program that the kernels support: not grouped, not dilated, and square."""
    return [name for name, layer in _convolutions(program).items() if not _unsupported_option(layer)]


def other_convolutions(program: Stacked) -> dict[str, str]:
    """Return the convolutions of a program that the kernels do not support, each with its unsupported option."""
    return {name: option for name, layer in _convolutions(program).items() if (option := _unsupported_option(layer))}


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
    """Return the program with its convolutions computed by the kernels."""
    changed = copy.copy(program)
    changed.functions = program.functions | dict.fromkeys(kernel_convolutions(program), conv2d)
    return changed


def try_kernels(device: torch.device) -> None:
    """Compute a small convolution and its gradients with the largest tiles; raises if the kernels do not run."""
    with torch.cuda.device(device):
        x, w = (torch.ones(1, *shape, 128, device=device, dtype=torch.bfloat16) for shape in ((2, 16, 16), (128, 3, 3)))
        samples = torch.full((1,), 2, device=device, dtype=torch.int32)
        y, _ = kernels.conv_forward(x, w, samples, 1, 1)
        kernels.conv_input_grad(y, w, (16, 16), 1, 1)
        kernels.conv_weight_grad_sgd(y, x, w.float(), w, 0.0, 1, 1)
        torch.cuda.synchronize()
