"""Forward pass, backward pass and update of a ResNet for all clients, with Triton kernels.

The results equal those of the stacked program up to rounding. The kernels avoid slices, layout changes and stored
weight gradients. They support only ResNets with batch norm; other networks use the stacked program.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stableair.engine import kernels
from stableair.engine.kernels import Activation, Moments, Norm
from stableair.engine.worker import Worker
from stableair.models import Block, ResNet
from stableair.training.local_training import LocalTraining
from stableair.vector import ModelState

LAYER_TYPES = {ResNet, Block, nn.Sequential, nn.Identity, nn.Conv2d, nn.BatchNorm2d, nn.Linear}


class Conv(NamedTuple):
    """A convolution of every client and the norm after it."""

    weight: Tensor  # (N, O, K, K, C) float32
    copy: Tensor | None  # the weights in bfloat16, for matrix products
    norm: Norm
    stride: int
    pad: int
    momentum: float
    eps: float

    @property
    def operand(self) -> Tensor:
        """The weights in the precision of the matrix products."""
        return self.weight if self.copy is None else self.copy

    def first(self, m: int) -> "Conv":
        """Return the convolution of the first m clients, as views of the same memory."""
        copy = None if self.copy is None else self.copy[:m]
        return self._replace(weight=self.weight[:m], copy=copy, norm=Norm(*(t[:m] for t in self.norm)))


class Saved(NamedTuple):
    """Tensors saved for the backward pass of a convolution: its input, its output and the moments of its norm."""

    x: Tensor
    y: Tensor
    moments: Moments

    @property
    def norm(self) -> tuple[Tensor, Moments]:
        """The norm's input and moments."""
        return self.y, self.moments


class SavedBlock(NamedTuple):
    """Tensors saved for the backward pass of a block."""

    first: Saved
    second: Saved
    shortcut: Saved | None


def supports(module: nn.Module) -> bool:
    """Whether the kernels support a module: a plain ResNet with batch norm and no frozen parameters."""
    return (
        type(module) is ResNet
        and type(module.fc) is nn.Linear
        and all(type(layer) in LAYER_TYPES and getattr(layer, "affine", True) for layer in module.modules())
        and all(p.requires_grad for p in module.parameters())
    )


class ResNetWorker(Worker):
    """Buffers and local training step of N clients."""

    def __init__(self, work: LocalTraining, precision: str, n: int):
        super().__init__(work, precision, n)
        self.has_kernels = True
        module = work.module
        self.stem = self._conv("conv1", "bn1")
        self.blocks = [
            [self._conv(f"{name}.{conv}", f"{name}.{norm}") for conv, norm in _conv_norm_names(block)]
            for name, block in module.named_modules()
            if isinstance(block, Block)
        ]
        self.head = self.p["fc.weight"], self.p["fc.bias"]

    def _conv(self, conv: str, norm: str) -> Conv:
        layer, batch_norm = (self.work.module.get_submodule(name) for name in (conv, norm))
        assert isinstance(layer, nn.Conv2d)  # checked by `supports`
        assert isinstance(batch_norm, nn.BatchNorm2d)
        assert isinstance(layer.padding, tuple)
        assert batch_norm.momentum is not None
        weight = self.p[f"{conv}.weight"]  # (N, O, C, K, K), stored below as (N, O, K, K, C)
        n, o, c, k, _ = weight.shape
        weight = torch.empty(n, o, k, k, c, device=weight.device)
        self.p[f"{conv}.weight"] = weight.permute(0, 1, 4, 2, 3)
        state = Norm(*(self.p[f"{norm}.{key}"] for key in ("weight", "bias")),
                    *(self.stats[f"{norm}.{key}"] for key in ("running_mean", "running_var")))  # fmt: skip
        copy = torch.empty_like(weight, dtype=torch.bfloat16) if self.dtype == torch.bfloat16 else None
        return Conv(weight, copy, state, layer.stride[0], layer.padding[0], batch_norm.momentum, batch_norm.eps)

    def convolutions(self) -> Iterator[Conv]:
        """Yield all convolutions, the stem first."""
        yield self.stem
        for block in self.blocks:
            yield from block

    def load_state(self, state: ModelState) -> None:
        super().load_state(state)
        for conv in self.convolutions():
            if conv.copy is not None:
                conv.copy.copy_(conv.weight)

    @torch.no_grad()
    def step(self, m: int) -> None:
        index, weight = self.index[:m], self.weight[:m]
        self.samples = (weight > 0).sum(1, dtype=torch.int32)
        stem, blocks = self.stem.first(m), [[conv.first(m) for conv in block] for block in self.blocks]
        start = self._conv_forward(stem, self.inputs(m).movedim(2, -1).contiguous())
        a = kernels.bn_relu(start.y, start.moments.affine)
        saved, activations = [], [Activation([start.norm], a)]
        for first, second, *shortcut in blocks:
            one = self._conv_forward(first, a)
            two = self._conv_forward(second, kernels.bn_relu(one.y, one.moments.affine))
            side = self._conv_forward(shortcut[0], a) if shortcut else None
            if side:
                a = kernels.bn_relu(two.y, two.moments.affine, side.y, side.moments.affine)
            else:
                a = kernels.bn_relu(two.y, two.moments.affine, a)
            saved.append(SavedBlock(one, two, side))
            activations.append(Activation([layer.norm for layer in (two, side) if layer], a))
        g, partials = self._classifier_step(a, activations.pop().norms, index, weight)
        for block, layers in zip(blocks[::-1], saved[::-1], strict=True):
            g, partials = self._block_backward(block, layers, g, partials, activations.pop())
        self._weight_step(stem, start, self._norm_backward(stem, start, g, partials[0]))

    def _conv_forward(self, conv: Conv, x: Tensor) -> Saved:
        y, partial = kernels.conv_forward(x, conv.operand, self.samples, conv.stride, conv.pad)
        pixels = y.shape[2] * y.shape[3]
        return Saved(x, y, kernels.bn_finalize(partial, conv.norm, self.samples, pixels, conv.momentum, conv.eps))

    def _classifier_step(
        self, a: Tensor, norms: list[tuple[Tensor, Moments]], index: Tensor, weight: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Pool, classify and update the classifier; return the gradient at the input of the last ReLU."""
        matrix, bias = (t[: len(index)] for t in self.head)
        features = a.float().mean((2, 3))  # (N, B, C)
        logits = torch.baddbmm(bias[:, None], features, matrix.transpose(1, 2))
        y = self.work.data.train.y[index]
        log_p = logits.log_softmax(2)
        self.loss[: len(index)].sub_((log_p.gather(2, y[..., None]).squeeze(2) * weight).sum(1))
        dlogits = (log_p.exp() - nn.functional.one_hot(y, logits.shape[2])) * weight[..., None]
        dfeatures = (dlogits @ matrix) / (a.shape[2] * a.shape[3])
        matrix.baddbmm_(dlogits.transpose(1, 2), features, alpha=-self.lr)
        bias.sub_(dlogits.sum(1), alpha=self.lr)
        da = dfeatures[:, :, None, None].expand_as(a).to(self.dtype).contiguous()
        each = [kernels.relu_grad_sums(da, a, y, moments) for y, moments in norms]
        return each[0][0], [partial for _, partial in each]

    def _block_backward(
        self, block: list[Conv], saved: SavedBlock, g: Tensor, partials: list[Tensor], activation: Activation
    ) -> tuple[Tensor, list[Tensor]]:
        """Propagate the gradient through a block, from its last ReLU to its input, and update its layers."""
        (first, second, *shortcut), (one, two, side) = block, saved
        inner, (partial,) = self._conv_backward(second, two, g, partials[0], activation=Activation([one.norm]))
        through_shortcut = self._conv_backward(shortcut[0], side, g, partials[1])[0] if side else g
        return self._conv_backward(first, one, inner, partial, through_shortcut, activation)

    def _conv_backward(
        self, conv: Conv, saved: Saved, g: Tensor, partial: Tensor, add: Tensor | None = None,
        activation: Activation | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Propagate the gradient through a norm and its convolution, and update both."""
        dy = self._norm_backward(conv, saved, g, partial)
        size = saved.x.shape[2], saved.x.shape[3]
        out = kernels.conv_input_grad(dy, conv.operand, size, conv.stride, conv.pad, add, activation)
        self._weight_step(conv, saved, dy)
        return out

    def _norm_backward(self, conv: Conv, saved: Saved, g: Tensor, partial: Tensor) -> Tensor:
        """Compute the gradient of a norm's input from the gradient of its output, and update the norm."""
        sums = kernels.bn_affine_sgd(partial, conv.norm, self.lr)
        return kernels.bn_input_grad(g, saved.y, saved.moments, sums, self.samples)

    def _weight_step(self, conv: Conv, saved: Saved, dy: Tensor) -> None:
        kernels.conv_weight_grad_sgd(dy, saved.x, conv.weight, conv.copy, self.lr, conv.stride, conv.pad)


def _conv_norm_names(block: Block) -> list[tuple[str, str]]:
    """Return the names of a block's convolutions and of their norms."""
    names = [("conv1", "bn1"), ("conv2", "bn2")]
    return names if isinstance(block.downsample, nn.Identity) else [*names, ("downsample.0", "downsample.1")]
