import pytest
from hypothesis import settings

from stableair.experiment import Experiment
from stableair.spec import REGISTRIES

settings.register_profile("stableair", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("stableair")


@pytest.fixture
def tiny():
    """A whole experiment in a few hundredths of a second a round."""
    return Experiment(
        data="synthetic(samples=60, classes=3, shape=(1, 2, 2))", model="mlp(width=4)", clients=5, rounds=4
    )


@pytest.fixture
def registries():
    """Whatever a test registers is forgotten after it."""
    before = {plural: dict(registry.entries) for plural, registry in REGISTRIES.items()}
    yield REGISTRIES
    for plural, entries in before.items():
        REGISTRIES[plural].entries = entries
