"""Triton kernels for many clients at once: convolutions, batch norm, group norm, and their gradients.

Activations are (N, B, H, W, C), weights (N, O, K, K, C), all contiguous, so that no operand is sliced or transposed in
memory. Products accumulate in float32. No kernel adds atomically: the same input gives the same bits.

A batch holds up to B samples; `samples` (N,) is the number of samples of each client in this step. The other rows are
padding: the sums exclude them, and their gradients are zero.
"""

from stableair.engine.kernels.batch_norm import (
    Moments,
    Norm,
    bn_affine_sgd,
    bn_finalize,
    bn_input_grad,
    bn_relu,
    relu_grad_sums,
)
from stableair.engine.kernels.convolutions import (
    Activation,
    choose_tile,
    conv_forward,
    conv_input_grad,
    conv_weight_grad_sgd,
)
from stableair.engine.kernels.group_norm import LARGEST_GROUP, ImageMoments, group_norm, group_norm_grad

__all__ = [
    "LARGEST_GROUP",
    "Activation",
    "ImageMoments",
    "Moments",
    "Norm",
    "bn_affine_sgd",
    "bn_finalize",
    "bn_input_grad",
    "bn_relu",
    "choose_tile",
    "conv_forward",
    "conv_input_grad",
    "conv_weight_grad_sgd",
    "group_norm",
    "group_norm_grad",
    "relu_grad_sums",
]
