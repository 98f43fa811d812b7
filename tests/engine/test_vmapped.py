"""Networks that the vmapped engine supports and the stacked engine does not."""

import pytest
import torch
from torch import nn

from helpers.engine import Attentive, assert_uploads_agree, simulation_of
from stableair.engine import accelerate, choose
from stableair.engine.equivalence import checked_program
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.vmapped import without_vmap_fallback


class Crossed(nn.Module):
    """A network whose output for a sample depends on the other samples."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc(x + x.mean(0))


class Doubled(nn.Module):
    """A network that differs between training and evaluation."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 3)

    def forward(self, x):
        y = self.fc(x.flatten(1))
        return y - 3 * y if self.training else y - y


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(192, 3)),
         "layer 0 is a Conv2d with padding_mode=circular"),
        (nn.Sequential(nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 3)), "layer 1 is a LayerNorm"),
        (Attentive(), r"it calls .transpose"),
        (Doubled().eval(), "it calls sub"),
        (Crossed(), "it calls .mean|it takes a mean"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
         "layer 2 is a BatchNorm1d"),
    ],
    ids=["padding", "layer norm", "attention", "training mode", "coupled samples", "batch norm of vectors"],
)  # fmt: skip
def test_a_model_that_cannot_be_stacked_is_vmapped(module, reason):
    sim = simulation_of(module.double(), (10, 4, 7))  # no batch of one sample, which a batch norm of vectors refuses
    with pytest.raises(Unsupported, match=reason):
        checked_program(Stacked, sim.train.work)
    choice = choose(sim, "auto")
    assert choice.engine == "vmapped"
    assert_uploads_agree(sim.train, accelerate(sim, choice).train, sim.start.model)


def test_the_private_switch_of_vmap_exists_and_is_restored():
    """If this fails, torch has changed: `without_vmap_fallback` needs the new switch, or vmapped runs become slow."""
    switch = torch._C._functorch._is_vmap_fallback_enabled
    before = switch()
    with without_vmap_fallback():
        assert not switch()
    assert switch() == before
