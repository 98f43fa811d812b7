"""The ResNets by hand: forward, backward and update of every client in the kernels of `kernels.py`.

The same work as the stacked way, without its slices, layout changes and stored weight gradients. For batch norm;
anything else is stacked.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stableair.contracts import Work
from stableair.engine import kernels
from stableair.engine.kernels import Behind, Moments, Norm
from stableair.engine.worker import Worker
from stableair.models import Block, ResNet
from stableair.vector import State

PARTS = {ResNet, Block, nn.Sequential, nn.Identity, nn.Conv2d, nn.BatchNorm2d, nn.Linear}


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

    def first(self, m: int) -> "Conv":
        """That of the first m clients, in the same memory."""
        copy = None if self.copy is None else self.copy[:m]
        return self._replace(weight=self.weight[:m], copy=copy, norm=Norm(*(t[:m] for t in self.norm)))


class Layer(NamedTuple):
    """What the backward pass needs of a convolution: its input, its output and the moments of its norm."""

    x: Tensor
    y: Tensor
    moments: Moments


def fits(module: nn.Module) -> bool:
    """Whether this is the way for a module: one of our ResNets as it is, with batch norm, all of it learning."""
    return (
        type(module) is ResNet
        and type(module.fc) is nn.Linear
        and all(type(layer) in PARTS and getattr(layer, "affine", True) for layer in module.modules())
        and all(p.requires_grad for p in module.parameters())
    )


class ResNetWorker(Worker):
    """The memory and the step of N clients."""

    def __init__(self, work: Work, precision: str, n: int):
        super().__init__(work, precision, n)
        module = work.module
        self.stem = self._conv("conv1", "bn1")
        self.blocks = [
            [self._conv(f"{name}.{conv}", f"{name}.{norm}") for conv, norm in _pairs(block)]
            for name, block in module.named_modules()
            if isinstance(block, Block)
        ]
        self.head = self.p["fc.weight"], self.p["fc.bias"]

    def _conv(self, conv: str, norm: str) -> Conv:
        layer, after = (self.work.module.get_submodule(name) for name in (conv, norm))
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
    def step(self, m: int) -> None:
        index, weight = self.index[:m], self.weight[:m]
        self.samples = (weight > 0).sum(1, dtype=torch.int32)
        stem, blocks = self.stem.first(m), [[conv.first(m) for conv in block] for block in self.blocks]
        start = self._forward(stem, self.inputs(m).movedim(2, -1).contiguous())
        a = kernels.normalise(start.y, start.moments[2:])
        passed, behind = [], [Behind([start[1:]], a)]
        for first, second, *shortcut in blocks:
            one = self._forward(first, a)
            two = self._forward(second, kernels.normalise(one.y, one.moments[2:]))
            aside = self._forward(shortcut[0], a) if shortcut else None
            rest, affine = (aside.y, aside.moments[2:]) if aside else (a, None)
            a = kernels.normalise(two.y, two.moments[2:], rest, affine)
            passed.append((one, two, aside))
            behind.append(Behind([layer[1:] for layer in (two, aside) if layer], a))
        g, parts = self._classify(behind.pop(), index, weight)
        for block, layers in zip(blocks[::-1], passed[::-1], strict=True):
            g, parts = self._back(block, layers, g, parts, behind.pop())
        self._update(stem, start, self._before(stem, start, g, parts[0]))

    def _forward(self, conv: Conv, x: Tensor) -> Layer:
        y, part = kernels.forward(x, conv.read, self.samples, conv.stride, conv.pad)
        pixels = y.shape[2] * y.shape[3]
        return Layer(x, y, kernels.settle(part, conv.norm, self.samples, pixels, conv.momentum, conv.eps))

    def _classify(self, top: Behind, index: Tensor, share: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Pool, classify, take a step, and send the gradient of the mean cross-entropy back behind the last relu."""
        a, (weight, bias) = top.a, (t[: len(index)] for t in self.head)
        features = a.float().mean((2, 3))  # (N, B, C)
        logits = torch.baddbmm(bias[:, None], features, weight.transpose(1, 2))
        y = self.work.data.train.y[index]
        chances = logits.log_softmax(2)
        self.loss[: len(index)].sub_((chances.gather(2, y[..., None]).squeeze(2) * share).sum(1))
        slope = (chances.exp() - nn.functional.one_hot(y, logits.shape[2])) * share[..., None]
        back = (slope @ weight) / (a.shape[2] * a.shape[3])
        weight.baddbmm_(slope.transpose(1, 2), features, alpha=-self.lr)
        bias.sub_(slope.sum(1), alpha=self.lr)
        da = back[:, :, None, None].expand_as(a).to(self.dtype).contiguous()
        each = [kernels.gather(da, a, y, moments) for y, moments in top.layers]
        return each[0][0], [part for _, part in each]

    def _back(
        self, block: list[Conv], layers: tuple[Layer, Layer, Layer | None], g: Tensor, parts: list[Tensor],
        behind: Behind,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """From the gradient behind a block's last relu to that behind its input, with a step on all that is passed."""
        (first, second, *shortcut), (one, two, aside) = block, layers
        inner, (part,) = self._through(second, two, g, parts[0], behind=Behind([one[1:]]))
        more = self._through(shortcut[0], aside, g, parts[1])[0] if aside else g
        return self._through(first, one, inner, part, more, behind)

    def _through(
        self, conv: Conv, layer: Layer, g: Tensor, part: Tensor, add: Tensor | None = None, behind: Behind | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Back through a norm and its convolution; then both take their step."""
        dy = self._before(conv, layer, g, part)
        size = layer.x.shape[2:4]
        out = kernels.input_gradient(dy, conv.read, size, conv.stride, conv.pad, add, behind)
        self._update(conv, layer, dy)
        return out

    def _before(self, conv: Conv, layer: Layer, g: Tensor, part: Tensor) -> Tensor:
        """The gradient of a norm's input from that of its output; the norm takes its step."""
        sums = kernels.descend_norm(part, conv.norm, self.lr)
        return kernels.spread(g, layer.y, layer.moments, sums, self.samples)

    def _update(self, conv: Conv, layer: Layer, dy: Tensor) -> None:
        kernels.descend(dy, layer.x, conv.weight, conv.copy, self.lr, conv.stride, conv.pad)


def _pairs(block: Block) -> list[tuple[str, str]]:
    """The convolutions of a block and their norms, by name."""
    own = [("conv1", "bn1"), ("conv2", "bn2")]
    return own if isinstance(block.downsample, nn.Identity) else [*own, ("downsample.0", "downsample.1")]


def trial(device: torch.device) -> None:
    """One small convolution there and back with the largest tiles: raises what stands in the way of the kernels."""
    with torch.cuda.device(device):
        x, w = (torch.ones(1, *shape, 128, device=device, dtype=torch.bfloat16) for shape in ((2, 16, 16), (128, 3, 3)))
        samples = torch.full((1,), 2, device=device, dtype=torch.int32)
        y, _ = kernels.forward(x, w, samples, 1, 1)
        kernels.input_gradient(y, w, (16, 16), 1, 1)
        kernels.descend(y, x, w.float(), w, 0.0, 1, 1)
        torch.cuda.synchronize()
