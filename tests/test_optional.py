import math
import sys
import tomllib

import pytest

from helpers import ROOT
from stableair.errors import MissingExtraError, StableairError
from stableair.optional import require


def test_an_installed_module_or_submodule_is_returned():
    assert require("math", extra="hub") is math
    assert require("importlib.util", extra="hub") is sys.modules["importlib.util"]


@pytest.mark.parametrize("module", ["no_such_package", "math.no_such_module"])
def test_a_missing_module_names_the_pip_command(module):
    with pytest.raises(MissingExtraError) as error:
        require(module, extra="slurm")
    assert (error.value.code, error.value.fields) == ("missing-extra", {"module": module, "extra": "slurm"})
    assert "pip install 'stableair[slurm]'" in str(error.value)
    assert isinstance(error.value, StableairError)
    assert isinstance(error.value, ImportError)
    assert isinstance(error.value.__cause__, ImportError), "the reason is kept"


def test_an_error_of_another_kind_while_importing_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        require("broken_package", extra="hub")


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not a checkout")
def test_every_required_extra_is_declared():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    used = {"hub", "partitioners", "flower", "slurm", "ray", "tensorboard", "wandb", "mlflow"}
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert used <= extras.keys()
    assert {part.partition('"')[0] for part in source.split('extra="')[1:]} <= extras.keys()
