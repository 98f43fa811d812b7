import os
import shutil
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import settings

from helpers.isolation import reset_logger, restored_registries
from stableair.cli import main as cli
from stableair.data import hub
from stableair.experiment import Experiment

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # no test uses the network
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted where there is no GPU; read when Triton is imported

collect_ignore_glob = [
    "conftest.py",
    "*/conftest.py",
]  # --doctest-modules would import all of them as one module

settings.register_profile("stableair", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("stableair")


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Captured text may hold file names that are not UTF-8, which pytest-xdist cannot send."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory):
    """A data folder with random images in the format of the real sets; the user's data folder is not used."""
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
    """An experiment whose rounds take a few hundredths of a second."""
    data = "synthetic(samples=60, classes=3, shape=(1, 2, 2))"
    return Experiment(data=data, model="mlp(width=4)", clients=5, rounds=4, device="cpu")


@pytest.fixture
def cuda():
    """The CUDA device, for tests with the mark gpu."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.fixture
def registries():
    """The registries; components that the test registers are removed after it."""
    with restored_registries() as registries:
        yield registries


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, registries):
    """Run a command line in an empty folder: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() sets its own
    monkeypatch.setenv(cli.DEBUG, "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def invoke(*words):
        monkeypatch.setattr(sys, "argv", ["stableair", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    yield invoke
    reset_logger()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, driven by Selenium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,1600":
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield session
    session.quit()
