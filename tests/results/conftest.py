"""A finished run that several test modules damage or read."""

import pytest

import stableair as sa
from stableair.runner import run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with a memory in its receiver and its server."""
    data = "synthetic(samples=60, classes=3, shape=(1, 2, 2))"
    e = sa.Experiment(data=data, model="mlp(width=4)", clients=5, rounds=4, device="cpu", server="momentum()")
    return e.with_(receiver="mac(C=auto)"), run(e.with_(receiver="mac(C=auto)"), tmp_path_factory.mktemp("runs") / "a")
