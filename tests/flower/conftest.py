"""Fixtures of the tests of the Flower integration."""

import pytest
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import stableair as sa


@pytest.fixture(autouse=True)
def a_run(monkeypatch):
    """The ids of a run of Flower, to which messages belong."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def small(registries):
    """An experiment with unequal clients and a model with batch norm."""

    @sa.model("normed")
    def normed():
        return lambda shape, classes: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, classes)
        )

    return sa.Experiment(
        data="digits", partition="dirichlet_by_class(beta=2.0)", model="normed()", clients=4, rounds=3, local_epochs=1,
        batch_size=40, receiver="mac(C=auto)", server="momentum(beta=0.5)", average=0.5, device="cpu",
        engine="reference",
    )  # fmt: skip
