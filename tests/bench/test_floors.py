"""bench/floors.py: lower bounds on the products and bytes of a step."""

import importlib

import pytest
import torch

from helpers import ROOT
from stableair.experiment import Experiment
from stableair.workloads import WORKLOADS


@pytest.fixture
def floors(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("floors")


DATA = "synthetic(samples=20, classes=3, shape=(1, 4, 4))"


def experiment(model, clients=2):
    return Experiment(data=DATA, model=model, clients=clients, batch_size=5)


def test_a_dense_layer_in_closed_form(floors):
    """16 inputs, 3 outputs, 5 samples: a product forward, and one for the gradient of the weights."""
    flops, size = floors.step_costs(experiment("logistic()"))
    assert flops == 2 * 2 * (2 * 5 * 16 * 3)
    assert size == 2 * (14 * (16 * 3 + 3) + 6 * 5 * 16)


def test_a_hidden_layer_also_has_a_gradient_of_its_input(floors):
    flops, size = floors.step_costs(experiment("mlp(width=7)", clients=1))
    assert flops == 2 * (2 * 5 * 16 * 7) + 3 * (2 * 5 * 7 * 3)
    assert size == 14 * (17 * 7 + 8 * 3) + 6 * 5 * (16 + 2 * 7)


def test_a_tensor_that_two_layers_read_is_counted_once(floors, registries):
    import stableair as sa

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 3), torch.nn.Linear(16, 3)

        def forward(self, x):
            x = x.flatten(1)
            return self.first(x) + self.second(x)

    @sa.model("twice")
    def twice():
        return lambda shape, classes: Twice()

    once, both = (floors.step_costs(experiment(model, clients=1))[1] for model in ("logistic()", "twice()"))
    assert both == once + 14 * (16 * 3 + 3)


def test_the_time_is_the_maximum_of_both_bounds(floors, monkeypatch):
    monkeypatch.setitem(WORKLOADS, "cnn", experiment("logistic()"))
    row = floors.table(["cnn"], 4, 1e-6, 1e-6).splitlines()[-1].split(" | ")
    assert row[1] == "4"
    assert float(row[-1].rstrip(" |")) == max(float(row[3]), float(row[5])) > 0
