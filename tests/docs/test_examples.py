"""The examples run as they stand, each in an interpreter and a folder of its own, and write nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stableair
from helpers import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
ROWS = {  # what stands in the first column, the repaired run that must be above the bare one, and that bare one
    "noisy_training.py": (
        ["no noise", "noise, no repair", "clip_grad_norm_(10)", "clip_grad_norm_(30)", "clip_grad_norm_(100)",
         "clip_grad_mac_(C=0.1)", "clip_grad_mac_(C=0.3)", "clip_grad_mac_(C=1)"],
        "clip_grad_mac_(C=0.3)", "noise, no repair",
    ),
    "own_receiver.py": (["mac(C=1)", "reset(C=1)", "reset(C=3)", "none()"], "reset(C=3)", "none()"),
    "flower_stock.py": (["mac(C=auto)", "none()"], "mac(C=auto)", "none()"),
    "own_channel_noise.py": (["mac(C=1)", "mac(C=auto)", "none()"], "mac(C=auto)", "none()"),
}  # fmt: skip


def run(words, folder):
    """What a fresh interpreter prints; it must end well and leave the folder empty."""
    package = str(Path(stableair.__file__).parents[1])  # the path may be relative, and the folder is another
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "MPLBACKEND": "Agg", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


def table(text):
    """The first number of each row by what stands before it, in the order of the rows."""
    return {name: float(value) for name, value in re.findall(r"^(\S.*?) +([01]\.\d{3})\b", text, re.MULTILINE)}


@pytest.mark.parametrize("name", ROWS)
def test_the_script_prints_its_table(name, tmp_path):
    rows, repaired, bare = ROWS[name]
    found = table(run([EXAMPLES / name], tmp_path))
    assert list(found) == rows
    assert all(0 <= accuracy <= 1 for accuracy in found.values())
    assert found[repaired] > found[bare] + 0.05


def test_the_notebook_runs_and_holds_no_outputs(tmp_path):
    book = json.loads(NOTEBOOK.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    cells = book["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    found = table(run(["-c", "\n".join("".join(cell["source"]) for cell in code)], tmp_path))
    assert list(found) == ["no channel", "mac(C=1)", "no repair", "smooth(C=1)"]
    assert found["mac(C=1)"] > found["no repair"] + 0.05


def test_every_example_is_here():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {*ROWS, NOTEBOOK.name}
