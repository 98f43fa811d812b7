"""Models: each factory returns what makes a module for inputs (c, h, w) and a number of classes."""

from collections.abc import Callable
from itertools import pairwise
from math import prod

from torch import nn

from stableair.checks import whole
from stableair.spec import Registry

Model = Callable[[tuple[int, ...], int], nn.Module]  # (shape of an input, classes) -> module

model = Registry("model", "models")


@model("logistic")
def logistic() -> Model:
    """Multinomial logistic regression."""
    return lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


@model("mlp")
def mlp(width=200, depth=1) -> Model:
    """A perceptron with `depth` hidden layers of `width` units."""
    width, depth = whole("width", width, 1), whole("depth", depth, 1)

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        sides = [prod(shape), *[width] * depth]
        hidden = [layer for i, o in pairwise(sides) for layer in (nn.Linear(i, o), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))

    return build
