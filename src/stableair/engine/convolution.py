"""A stacked convolution by the kernels of `kernels.py`, with its gradients: for any network that can be stacked."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from stableair.engine import kernels
from stableair.engine.stacked import LAYERS, Stacked, Tensors, as_images


def takes(layer: nn.Conv2d) -> bool:
    """Whether the kernels compute such a convolution: all channels together, and the same in height and width."""
    square = all(len({*pair}) == 1 for pair in (layer.kernel_size, layer.stride, layer.padding))
    return square and layer.groups == 1 and layer.dilation == (1, 1)


class _Convolution(torch.autograd.Function):
    """x (B, N C, H, W) and the float32 weights (N, O, C, K, K) to (B, N O, P, Q)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
        x, w = _apart(x, len(weight)), weight.movedim(2, -1).to(x.dtype).contiguous()
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.pad = stride, pad
        samples = torch.full((len(x),), x.shape[1], dtype=torch.int32, device=x.device)
        return _together(kernels.conv_forward(x, w, samples, stride, pad)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy, dx = _apart(grads[0], len(x)), None
        if ctx.needs_input_grad[0]:
            dx = _together(kernels.conv_input_grad(dy, w, x.shape[2:4], ctx.stride, ctx.pad)[0])
        dw = torch.zeros(w.shape, device=w.device)
        kernels.conv_weight_grad_sgd(dy, x, dw, None, -1.0, ctx.stride, ctx.pad)
        return dx, dw.movedim(-1, 2).contiguous(), None, None


def _apart(images: Tensor, n: int) -> Tensor:
    """(B, N C, H, W), as stacked layers have it, as the kernels do: (N, B, H, W, C)."""
    return images.unflatten(1, (n, -1)).permute(1, 0, 3, 4, 2).contiguous()


def _together(x: Tensor) -> Tensor:
    """The way back."""
    return x.permute(1, 2, 3, 0, 4).flatten(3).permute(0, 3, 1, 2)


def _conv2d(layer: nn.Conv2d, x: Tensor, n: int, own: Tensors, mask: Tensor | None) -> Tensor:
    if not takes(layer):
        return LAYERS[nn.Conv2d].function(layer, x, n, own, mask)
    x = as_images(x)
    y = _Convolution.apply(x, own["weight"], layer.stride[0], layer.padding[0])
    return y if "bias" not in own else y + own["bias"].flatten().to(y.dtype)[:, None, None]


def by_kernels(program: Stacked) -> Stacked:
    """The same program, with its convolutions computed by the kernels."""
    changed = copy.copy(program)
    changed.functions = program.functions | {nn.Conv2d: _conv2d}
    return changed
