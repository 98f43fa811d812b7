import pytest
import torch
from hypothesis import settings

from stableair.experiment import Experiment
from stableair.spec import REGISTRIES

settings.register_profile("stableair", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("stableair")


@pytest.fixture
def tiny():
    """A whole experiment in a few hundredths of a second a round."""
    data = "synthetic(samples=60, classes=3, shape=(1, 2, 2))"
    return Experiment(data=data, model="mlp(width=4)", clients=5, rounds=4, device="cpu")


@pytest.fixture
def cuda():
    """For tests marked gpu."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.fixture
def registries():
    """Whatever a test registers is forgotten after it."""
    before = {plural: dict(registry.entries) for plural, registry in REGISTRIES.items()}
    yield REGISTRIES
    for plural, entries in before.items():
        REGISTRIES[plural].entries = entries
