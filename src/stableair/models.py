"""Models: each factory returns a function (shape of an input, number of classes) -> module.

The module maps a batch of inputs to logits: (m, c, h, w) -> (m, classes).
"""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from stableair.errors import InputError
from stableair.spec import Registry
from stableair.validation import choice, integer

Model = Callable[[tuple[int, ...], int], nn.Module]  # (shape of an input, classes) -> module

MAX_DEPTH = 1000  # hidden layers

model = Registry("model", "models")


@model("logistic")
def logistic() -> Model:
    """Multinomial logistic regression.

        x -> W x + b

    Returns:
        A function (shape of an input, classes) -> module; the module maps (m, ...) to logits (m, classes).

    >>> logistic()((1, 8, 8), 10)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    return lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


@model("mlp")
def mlp(width: int = 200, depth: int = 1) -> Model:
    """Multilayer perceptron with `depth` hidden layers of `width` units.

        x_0 = x,    x_l = relu(W_l x_{l-1} + b_l),    logits = W x_depth + b

    Args:
        width: Units of a hidden layer.
        depth: Number of hidden layers, from 1 to 1000.

    Returns:
        A function (shape of an input, classes) -> module; the module maps (m, ...) to logits (m, classes).

    >>> [tuple(p.shape) for p in mlp(width=20, depth=2)((1, 8, 8), 10).parameters()]
    [(20, 64), (20,), (20, 20), (20,), (10, 20), (10,)]
    """
    width, depth = integer("width", width, 1), integer("depth", depth, 1, MAX_DEPTH)

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        sides = [prod(shape), *[width] * depth]
        hidden = [layer for i, o in pairwise(sides) for layer in (nn.Linear(i, o), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))

    return build


@model("cnn")
def cnn(width: int = 2048) -> Model:
    """Convolutional network with two 5 x 5 layers and one dense layer: 6,603,710 entries for FEMNIST.

    It is the network of LEAF (Caldas et al., 2018): convolutions with 32 and 64 channels, each followed by max-pooling,
    for images of at least 4 x 4.

    Args:
        width: Units of the dense layer.

    Returns:
        A function (shape of an input, classes) -> module; the module maps (m, c, h, w) to logits (m, classes).

    >>> import torch
    >>> with torch.device("meta"):  # shapes only
    ...     module = cnn()((1, 28, 28), 62)
    >>> sum(p.numel() for p in module.parameters())
    6603710
    """
    width = integer("width", width, 1)

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, breadth = _image("cnn", shape, least=4)
        return nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * (height // 4) * (breadth // 4), width), nn.ReLU(), nn.Linear(width, classes),
        )  # fmt: skip

    return build


@model("resnet18")
def resnet18(norm: Literal["batch", "group"] = "batch", init: Literal["torch", "he"] = "torch") -> Model:
    """ResNet-18 with the stem for CIFAR (3 x 3, no max-pooling): 11,173,962 entries for CIFAR-10.

    He et al. (2016), for images of at least 8 x 8.

    Args:
        norm: Normalisation: "batch", or "group" with 32 groups (Wu and He, 2018).
        init: Initial weights of the convolutions: "torch" for torch's default, or "he" for N(0, 2 / fan-out) (He et
            al., 2015).

    Returns:
        A function (shape of an input, classes) -> module; the module maps (m, c, h, w) to logits (m, classes).

    >>> import torch
    >>> with torch.device("meta"):  # shapes only
    ...     module = resnet18()((3, 32, 32), 10)
    >>> sum(p.numel() for p in module.parameters())
    11173962
    """
    return _resnet("resnet18", (2, 2, 2, 2), norm, init)


@model("resnet34")
def resnet34(norm: Literal["batch", "group"] = "batch", init: Literal["torch", "he"] = "torch") -> Model:
    """ResNet-34 with the stem for CIFAR (3 x 3, no max-pooling): 21,328,292 entries for CIFAR-100.

    Like `resnet18`, with 3, 4, 6 and 3 blocks instead of two each.

    Args:
        norm: Normalisation: "batch", or "group" with 32 groups.
        init: Initial weights of the convolutions: "torch" for torch's default, or "he" for N(0, 2 / fan-out).

    Returns:
        A function (shape of an input, classes) -> module; the module maps (m, c, h, w) to logits (m, classes).

    >>> import torch
    >>> with torch.device("meta"):  # shapes only
    ...     module = resnet34()((3, 32, 32), 100)
    >>> sum(p.numel() for p in module.parameters())
    21328292
    """
    return _resnet("resnet34", (3, 4, 6, 3), norm, init)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,  # the clients send its running means and variances over the side link
    "group": lambda channels: nn.GroupNorm(32, channels),  # no buffers, and no coupling between samples
}


INITS = "torch", "he"  # torch's default, or He's normal law by the fan-out of each convolution


def _resnet(name: str, depths: tuple[int, ...], norm: str, init: str) -> Model:
    make_norm, he = NORMS[choice("norm", norm, NORMS)], choice("init", init, INITS) == "he"

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        module = ResNet(_image(name, shape, least=8)[0], depths, classes, make_norm)
        for layer in module.modules():
            if he and isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return module

    return build


def _image(name: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        text = f"{name} needs images of at least {least} x {least}: got inputs of shape {tuple(shape)}"
        raise InputError(text, code="image-too-small", name=name, shape=tuple(shape), least=least)
    return shape


class ResNet(nn.Module):
    """Residual network of He et al. (2016) with the stem for images of 32 x 32.

    The parameters are named as in torchvision.

    Args:
        channels: Channels of an image.
        depths: Number of blocks of each stage.
        classes: Number of classes.
        norm: Makes the normalisation of a layer from its number of channels.
        first: Channels of the first stage; each further stage has twice as many.
    """

    def __init__(
        self, channels: int, depths: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module], first: int = 64
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, first, 3, padding=1, bias=False)
        self.bn1 = norm(first)
        self.stages, width = len(depths), first
        for stage, depth in enumerate(depths):
            blocks = []
            for i in range(depth):
                out, stride = first * 2**stage, 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(width, out, stride, norm))
                width = out
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images: (m, c, h, w) -> (m, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


class Block(nn.Module):
    """Residual block of two 3 x 3 convolutions: relu(F(x) + S(x)).

    S is the identity, or a 1 x 1 convolution if the shapes differ.

    Args:
        width: Channels of the input.
        out: Channels of the output.
        stride: Stride of the first convolution.
        norm: Makes the normalisation of a layer from its number of channels.
    """

    def __init__(self, width: int, out: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.bn1 = norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = norm(out)
        self.downsample = (
            nn.Identity()
            if stride == 1 and width == out
            else nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), norm(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block: (m, width, h, w) -> (m, out, h / stride, w / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))
