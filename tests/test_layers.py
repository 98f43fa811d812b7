"""The layers of the package, as pyproject.toml declares them for import-linter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stableair
from helpers import ROOT

SOURCE = Path(stableair.__file__).parent


def lint_imports(source):
    """Check the contracts of pyproject.toml on the package in the folder `source`."""
    command = [Path(sys.executable).parent / "lint-imports", "--config", ROOT / "pyproject.toml", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)


def test_the_package_keeps_its_layers():
    done = lint_imports(SOURCE.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("streams.py", "from stableair import runner", "stableair.streams -> stableair.runner"),
        ("servers.py", "def f():\n    import stableair.engine", "stableair.servers -> stableair.engine"),
        ("channels/power.py", "from stableair.channels import flat", "No cycles, also within a package BROKEN"),
        ("searches.py", "from stableair.engine import choose", "The engine is chosen in one place BROKEN"),
        ("unplaced.py", "", "stableair.unplaced"),
    ],
    ids=["upward", "upward in a function", "cycle", "engine", "no layer"],
)
def test_a_broken_contract_is_found(module, line, broken, tmp_path):
    shutil.copytree(SOURCE, tmp_path / "stableair", ignore=shutil.ignore_patterns("published", "__pycache__"))
    path = tmp_path / "stableair" / module
    path.write_text((path.read_text("utf-8") if path.exists() else "") + f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stderr
    assert broken in " ".join(done.stdout.split())


def test_scipy_stats_is_not_loaded_before_it_is_needed():
    parts = "channels", "builder", "runner", "searches", "theory", "paper.figures", "results.report", "nn"
    load = "; ".join(f"import stableair.{part}" for part in parts)
    code = f"import sys; {load}; assert 'scipy.stats' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
