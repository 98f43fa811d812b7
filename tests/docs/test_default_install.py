"""Every command of the tutorial works with only the packages of the default install.

The other packages of this environment are hidden by an import hook in each process of a command.
"""

import os
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import ROOT
from helpers.pages import PLUGIN, TUTORIAL, blocks, commands

pytestmark = pytest.mark.slow

HOOK = """
import sys

HIDDEN = set({hidden!r})


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hide())
"""


def default_packages():
    """The names of the distributions that the default install has: the dependencies, and their dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pending = [(Requirement(line), "") for line in project["dependencies"]]
    names = {"stableair"}
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        if (requirement.marker and not requirement.marker.evaluate({"extra": extra})) or name in names:
            continue
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform
            continue
        names.add(name)
        pending += [(Requirement(line), one) for line in needed for one in ("", *requirement.extras)]
    return names


def hidden_modules():
    """The top-level modules of all other distributions."""
    default = default_packages()
    owners = metadata.packages_distributions().items()
    return sorted(module for module, names in owners if not default & set(map(canonicalize_name, names)))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(HOOK.format(hidden=hidden_modules()))
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def test_packages_of_extras_are_hidden():
    hidden = hidden_modules()
    assert {"pytest", "datasets", "tensorboard"} <= set(hidden), "there is something to hide"
    assert not {"stableair", "torch", "numpy", "optuna", "plotly", "pandas", "jinja2", "sqlalchemy"} & set(hidden)


def test_the_tutorial_needs_the_default_install_only(environment, tmp_path):
    for rule in (text for text in blocks(TUTORIAL, "python") if text.startswith(PLUGIN)):
        (tmp_path / "my_rule.py").write_text(rule)
    check = "import pandas\ntry:\n    import datasets\nexcept ImportError:\n    print('hidden')"
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "hidden"
    for line in commands(TUTORIAL):
        words = [sys.executable, "-m", *shlex.split(line, comments=True)]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stderr)
