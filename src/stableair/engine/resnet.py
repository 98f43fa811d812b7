"""The ResNets by hand: forward, backward and update of every client in the kernels of `kernels.py`.

The same work as the stacked way, without its slices, layout changes and stored weight gradients. For batch norm and
full batches; anything else is stacked.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stableair.engine import kernels
from stableair.engine.kernels import Moments, Norm
from stableair.engine.trainer import Worker
from stableair.local import Reference
from stableair.models import ResNet
from stableair.vector import State

DOT = {"fp32": "ieee", "tf32": "tf32", "bf16": "ieee"}  # how products of float32 round; of bfloat16 they are exact


class Conv(NamedTuple):
    """A convolution of every client and the norm after it."""

    weight: Tensor  # (N, O, K, K, C) float32
    copy: Tensor | None  # the same in bfloat16, which the products read
    norm: Norm
    stride: int
    pad: int
    momentum: float
    eps: float

    @property
    def read(self) -> Tensor:
        return self.weight if self.copy is None else self.copy


class Layer(NamedTuple):
    """What the backward pass needs of a convolution: its input, its output and the moments of its norm."""

    x: Tensor
    y: Tensor
    moments: Moments


def fits(module: nn.Module) -> bool:
    """Whether this is the way for a module: one of our ResNets, with batch norm."""
    return isinstance(module, ResNet) and isinstance(module.bn1, nn.BatchNorm2d)


class ResNetWorker(Worker):
    """The memory and the step of N clients with full batches of B."""

    def __init__(self, reference: Reference, precision: str, n: int, b: int):
        super().__init__(reference, precision, n, b)
        module, self.dot = reference.module, DOT[precision]
        self.images = reference.data.train.x.permute(0, 2, 3, 1).contiguous()  # as they are stored, where from a file
        self.stem = self._conv("conv1", "bn1")
        self.blocks = [
            tuple(self._conv(f"{name}.{conv}", f"{name}.{norm}") for conv, norm in _pairs(block))
            for name, block in module.named_modules()
            if type(block).__name__ == "Block"
        ]
        self.head = self.p["fc.weight"], self.p["fc.bias"]

    def _conv(self, conv: str, norm: str) -> Conv:
        layer, after = (self.reference.module.get_submodule(name) for name in (conv, norm))
        weight = self.p[f"{conv}.weight"]  # (N, O, C, K, K): its memory is laid out anew, O K K C
        n, o, c, k, _ = weight.shape
        weight = torch.empty(n, o, k, k, c, device=weight.device)
        self.p[f"{conv}.weight"] = weight.permute(0, 1, 4, 2, 3)
        kept = Norm(*(self.p[f"{norm}.{key}"] for key in ("weight", "bias")),
                    *(self.stats[f"{norm}.{key}"] for key in ("running_mean", "running_var")))  # fmt: skip
        copy = torch.empty_like(weight, dtype=torch.bfloat16) if self.dtype == torch.bfloat16 else None
        return Conv(weight, copy, kept, layer.stride[0], layer.padding[0], after.momentum, after.eps)

    def _convs(self) -> Iterator[Conv]:
        yield self.stem
        for block in self.blocks:
            yield from block

    def load(self, state: State) -> None:
        super().load(state)
        for conv in self._convs():
            if conv.copy is not None:
                conv.copy.copy_(conv.weight)

    @torch.no_grad()
    def step(self) -> None:
        """One local step of every client."""
        x = ((self.images[self.index].float() - self.mean.flatten()) / self.std.flatten()).to(self.dtype)
        layers = [self._forward(self.stem, x)]
        a = kernels.normalise(layers[0].y, layers[0].moments[2:])
        entries, outputs = [], [a]
        for first, second, *shortcut in self.blocks:
            one = self._forward(first, a)
            two = self._forward(second, kernels.normalise(one.y, one.moments[2:]))
            aside = self._forward(shortcut[0], a) if shortcut else None
            rest, affine = (aside.y, aside.moments[2:]) if aside else (a, None)
            a = kernels.normalise(two.y, two.moments[2:], rest, affine)
            entries.append((one, two, aside))
            outputs.append(a)
        da = self._classify(a)
        for block, (one, two, aside), out in zip(self.blocks[::-1], entries[::-1], outputs[:0:-1], strict=True):
            da = self._back(block, one, two, aside, out, da)
        part = kernels.gather(da, outputs[0], layers[0].y, layers[0].moments)
        sums = kernels.descend_norm(part, self.stem.norm, self.lr)
        self._update(self.stem, kernels.spread(da, outputs[0], layers[0].y, layers[0].moments, sums), x)

    def _forward(self, conv: Conv, x: Tensor) -> Layer:
        y, part = kernels.forward(x, conv.read, conv.stride, conv.pad, self.dot)
        rows = y[0].numel() // y.shape[-1]
        return Layer(x, y, kernels.settle(part, conv.norm, rows, conv.momentum, conv.eps))

    def _classify(self, a: Tensor) -> Tensor:
        """Pool, classify, and send the gradient of the mean cross-entropy back: the gradient of a."""
        weight, bias = self.head
        n, b, h, w, c = a.shape
        features = a.float().mean((2, 3))  # (N, B, C)
        logits = torch.baddbmm(bias[:, None], features, weight.transpose(1, 2))
        y = self.reference.data.train.y[self.index]
        chances = logits.log_softmax(2)
        self.loss.sub_(chances.gather(2, y[..., None]).mean((1, 2)))
        slope = (chances.exp() - nn.functional.one_hot(y, logits.shape[2])) / b
        back = (slope @ weight) / (h * w)
        weight.baddbmm_(slope.transpose(1, 2), features, alpha=-self.lr)
        bias.sub_(slope.sum(1), alpha=self.lr)
        return back[:, :, None, None].expand(n, b, h, w, c).to(self.dtype).contiguous()

    def _back(
        self, block: tuple[Conv, ...], one: Layer, two: Layer, aside: Layer | None, out: Tensor, da: Tensor
    ) -> Tensor:
        """The gradient of a block's input from that of its output, and a step on everything in it."""
        first, second, *shortcut = block
        part = kernels.gather(da, out, two.y, two.moments, store=True)  # da is now g: what both branches get
        dy = kernels.spread(da, None, two.y, two.moments, kernels.descend_norm(part, second.norm, self.lr))
        inner = self._through(second, dy, two.x)
        self._update(second, dy, two.x)
        more = da
        if aside:
            part = kernels.gather(da, None, aside.y, aside.moments)
            dy = kernels.spread(da, None, aside.y, aside.moments, kernels.descend_norm(part, shortcut[0].norm, self.lr))
            more = self._through(shortcut[0], dy, aside.x)
            self._update(shortcut[0], dy, aside.x)
        part = kernels.gather(inner, two.x, one.y, one.moments)
        dy = kernels.spread(inner, two.x, one.y, one.moments, kernels.descend_norm(part, first.norm, self.lr))
        back = self._through(first, dy, one.x, add=more)
        self._update(first, dy, one.x)
        return back

    def _through(self, conv: Conv, dy: Tensor, x: Tensor, add: Tensor | None = None) -> Tensor:
        return kernels.input_gradient(dy, conv.read, x.shape[2:4], conv.stride, conv.pad, add, self.dot)

    def _update(self, conv: Conv, dy: Tensor, x: Tensor) -> None:
        kernels.descend(dy, x, conv.weight, conv.copy, self.lr, conv.stride, conv.pad, self.dot)


def _pairs(block: nn.Module) -> list[tuple[str, str]]:
    """The convolutions of a block and their norms, by name."""
    own = [("conv1", "bn1"), ("conv2", "bn2")]
    return own if isinstance(block.downsample, nn.Identity) else [*own, ("downsample.0", "downsample.1")]
