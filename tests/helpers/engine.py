"""Trainers over small data, and networks for the tests of the engine."""

from dataclasses import replace

import torch
from torch import nn

import stableair as sa
import stableair.engine
from stableair.builder import build
from stableair.contracts import State
from stableair.data.datasets import synthetic
from stableair.engine.stacked import Stacked
from stableair.engine.trainer import StackedTrainer
from stableair.models import ResNet, model
from stableair.participants import everybody, participants
from stableair.training.local_training import LocalTraining
from stableair.training.reference import Reference
from stableair.vector import state

MODELS = ["logistic()", "mlp(width=5, depth=2)", "cnn(width=7)", "batch", "group"]
NORMS = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(4, channels)}


def reference(module, data, sizes, device="cpu", **changes):
    """A trainer over clients of the given sizes."""
    parts = [part.to(device) for part in torch.arange(sum(sizes)).split(sizes)]
    settings = {"epochs": 2, "batch_size": 4, "lr": 0.03, "payload": "gradient", "seed": 3}
    return Reference(LocalTraining(module.to(device), data.to(device), parts, **settings | changes))


def network(spec, shape=(3, 8, 8), classes=3):
    """A network of the registry; for the name of a norm, a small ResNet with this norm."""
    torch.manual_seed(0)
    if spec in NORMS:
        return ResNet(shape[0], (1, 2), classes, NORMS[spec], first=8)
    return model.one(spec)()(shape, classes)


def all_clients(train):
    """All clients, in the order of summation."""
    return participants(everybody(), train.work.sizes, seed=0)(0)


def uploads(train, start, k=0):
    """The uploads of a round, sorted by client."""
    sent = (upload[:4] for upload in train(start, k, all_clients(train)))  # without the norm, which only ranks use
    clients, *rest = map(torch.cat, zip(*sent, strict=True))
    assert all(len(column) == len(clients) for column in rest)
    order = clients.argsort().to(rest[0].device)
    return [column[order] for column in rest]


def stacked(slow, chunk=4, precision="fp32"):
    return StackedTrainer(slow.work, Stacked(slow.work.module), precision, chunk)


def assert_uploads_agree(slow, fast, start, tolerance=1e-9, k=0):
    for a, b in zip(uploads(slow, start, k), uploads(fast, start, k), strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * a.norm(), (a - b).norm() / a.norm()


def simulation_of(module, sizes=(8,)):
    """A simulation whose model is this module."""
    train = reference(module, synthetic(samples=sum(sizes), classes=3, shape=(3, 8, 8)), list(sizes))
    return replace(build(sa.Experiment(device="cpu")), train=train, n=len(sizes), start=State(state(module)))


class Reused(nn.Module):
    """Two dense layers that are called twice, `first` on the input and without a bias, and an unused one."""

    def __init__(self):
        super().__init__()
        self.first, self.narrow, self.again = nn.Linear(192, 192, bias=False), nn.Linear(192, 6), nn.Linear(6, 6)
        self.relu, self.fc, self.idle = nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.narrow(self.first(torch.tanh(self.first(x.flatten(1)))))
        x = self.relu(self.again(self.relu(self.again(x))))
        self.idle(x)
        return self.fc(x)


class Attentive(nn.Module):
    """A network of layers that are not stacked."""

    def __init__(self):
        super().__init__()
        self.query, self.norm, self.fc = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = x.flatten(1, 2)
        return self.fc(self.norm(x + torch.softmax(self.query(x) @ x.transpose(1, 2), -1) @ x).mean(1))


def recorded_engines(folder):
    import json

    return json.loads((folder / "environment.json").read_text())
