import os
import signal
import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import settings

from stableair.cli import main as cli
from stableair.data import hub
from stableair.experiment import Experiment
from stableair.spec import PLUGINS, REGISTRIES

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # tests call nobody
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted where there is no GPU; read when Triton is imported

settings.register_profile("stableair", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("stableair")


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts what runs in the background deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory):
    """A data folder with noise in the form of the real sets; nobody's own folder is touched."""
    before, os.environ[hub.VARIABLE] = os.environ.get(hub.VARIABLE), str(tmp_path_factory.mktemp("data"))
    rng = np.random.default_rng(0)
    sets = {"cifar10": (10, (32, 32, 3)), "cifar100": (100, (32, 32, 3)), "femnist": (62, (28, 28, 1))}
    other = hub.Source("someone/images", "image", "label", "who")
    for name, (classes, shape) in sets.items() | {(other.name, (4, (10, 12, 3)))}:
        tensors = {}
        for split, n in (("train", 100), ("test", 60)):
            tensors[f"{split}.x"] = rng.integers(256, size=(n, *shape), dtype=np.uint8)
            tensors[f"{split}.y"] = rng.permutation(n) % classes
            if classes in (62, 4):
                tensors[f"{split}.writer"] = rng.permutation(n) % 8
        hub.write(name, tensors, hub.NAMED.get(name, other))
    yield hub.folder()
    os.environ.pop(hub.VARIABLE) if before is None else os.environ.update({hub.VARIABLE: before})


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


@contextmanager
def forgotten():
    """Whatever is registered within is forgotten after it."""
    before = {plural: dict(registry.entries) for plural, registry in REGISTRIES.items()}
    plugins = dict(PLUGINS)
    yield REGISTRIES
    for plural, entries in before.items():
        REGISTRIES[plural].entries = entries
    PLUGINS.clear()
    PLUGINS.update(plugins)


@pytest.fixture
def registries():
    """Whatever a test registers is forgotten after it."""
    with forgotten() as known:
        yield known


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, registries):
    """Run a command line in an empty folder: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() sets its own
    monkeypatch.setenv(cli.DEBUG, "0")
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}

    def invoke(*words):
        monkeypatch.setattr(sys, "argv", ["stableair", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    yield invoke
    for one, handler in handlers.items():
        signal.signal(one, handler)
