"""Layers that a user registers with `stacked_layer`."""

import pytest
import torch
from torch import nn

from helpers.engine import assert_uploads_agree, simulation_of
from stableair.engine import EngineChoice, accelerate, choose, stacked_layer
from stableair.engine.stacked import LAYERS, Unsupported, as_vectors
from stableair.errors import InputError


@pytest.fixture
def layers():
    """The registered layers, which are restored after the test."""
    before = dict(LAYERS)
    yield LAYERS
    LAYERS.clear()
    LAYERS.update(before)


class Gain(nn.Module):
    """A custom layer, with a parameter that is not called weight or bias, and a norm."""

    def __init__(self):
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.linspace(0.5, 2, 192)), nn.LayerNorm(192)

    def forward(self, x):
        return self.gain * self.inner(x)


def stacked_gain(layer, x, n, tensors, mask):
    x = as_vectors(n, x)
    x = (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, unbiased=False) + layer.inner.eps).rsqrt()
    gain, weight, bias = (tensors[key][:, None].to(x.dtype) for key in ("gain", "inner.weight", "inner.bias"))
    return gain * (weight * x + bias)


def test_a_custom_layer_is_stacked_after_its_registration(layers):
    sim = simulation_of(nn.Sequential(nn.Flatten(), Gain(), nn.Linear(192, 3)).double(), (9, 4, 7))
    assert choose(sim, "auto").engine == "vmapped"
    assert stacked_layer(Gain)(stacked_gain) is stacked_gain
    choice = choose(sim, "auto")
    assert choice.engine == "stacked"
    assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model)


def test_a_registered_layer_with_wrong_results_is_not_stacked(layers):
    sim = simulation_of(nn.Sequential(nn.Flatten(), Gain(), nn.Linear(192, 3)).double(), (9, 4, 7))
    stacked_layer(Gain)(lambda layer, x, *rest: 1.1 * stacked_gain(layer, x, *rest))
    with pytest.raises(Unsupported, match="its results differ"):
        accelerate(sim, EngineChoice("stacked", "fp32", 3, ""))
    assert choose(sim, "auto").engine == "vmapped"


class Centred(nn.Module):
    """A layer that mixes the samples of a batch."""

    def forward(self, x):
        return x - x.mean(0)


def stacked_centred(layer, x, n, tensors, mask):
    x = as_vectors(n, x)
    present = x.new_ones(x.shape[:2]) if mask is None else mask
    return x - (x * present[..., None]).sum(1, keepdim=True) / present.sum(1).clamp(min=1)[:, None, None]


@pytest.mark.parametrize("declared", [True, False])
def test_a_layer_that_mixes_samples_gets_the_mask_or_is_not_stacked(layers, declared):
    """Some batches are short: their padding must have no effect."""
    sim = simulation_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 5), Centred(), nn.Linear(5, 3)).double(), (9, 4, 7))
    stacked_layer(Centred, mixes_samples=declared)(stacked_centred)
    choice = choose(sim, "auto")
    assert choice.engine == ("stacked" if declared else "vmapped")
    assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model)


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ((nn.Linear,), "name-taken"),
        ((nn.ReLU,), "name-taken"),
        ((Centred, nn.Conv2d), "name-taken"),
        ((), "wrong-type"),
        ((stacked_gain,), "wrong-type"),
        ((int,), "wrong-type"),
    ],
    ids=["known", "elementwise", "one of two", "none", "a function", "no layer"],
)
def test_layers_that_cannot_be_registered_are_refused(layers, kinds, code):
    before = dict(LAYERS)
    with pytest.raises(InputError) as error:
        stacked_layer(*kinds)(stacked_gain)
    assert error.value.code == code
    assert before == LAYERS, "nothing is registered"


def test_a_cell_of_a_notebook_may_register_its_layer_again(layers):
    first, second = (lambda layer, x, n, tensors, mask: x for _ in range(2))
    first.__module__ = second.__module__ = "__main__"
    for function in (first, second):
        stacked_layer(Centred)(function)
    assert LAYERS[Centred].function is second
