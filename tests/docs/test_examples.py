"""The examples run unchanged, each in a separate interpreter and folder, and write no files."""

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
NOTEBOOKS = {"quickstart.ipynb": 2, "own_parts.ipynb": 1}  # notebook: number of its pictures
ROWS = {  # the first column, a run with a receiver, and a run without one, which must be less accurate
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
    """The output of a new interpreter, which must exit with code 0 and leave the folder empty."""
    package = str(Path(stableair.__file__).parents[1])  # the path may be relative, and the folder is another
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "MPLBACKEND": "Agg", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


def table(text):
    """The first number of each row by the name of the row, in the order of the rows."""
    return {name: float(value) for name, value in re.findall(r"^(\S.*?) +([01]\.\d{3})\b", text, re.MULTILINE)}


@pytest.mark.parametrize("name", ROWS)
def test_the_script_prints_its_table(name, tmp_path):
    rows, repaired, unrepaired = ROWS[name]
    found = table(run([EXAMPLES / name], tmp_path))
    assert list(found) == rows
    assert all(0 <= accuracy <= 1 for accuracy in found.values())
    assert found[repaired] > found[unrepaired] + 0.05


def pictures(cells):
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))


def printed(cells):
    """The accuracies that the cells print, by name."""
    return table("".join("".join(out.get("text", "")) for cell in cells for out in cell.get("outputs", [])))


def printed_lines(cells):
    """The number of lines that each cell prints."""
    return {cell.id: sum(out.get("text", "").count("\n") for out in cell.get("outputs", [])) for cell in cells}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs_and_contains_its_outputs(name, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(book)
    stored = json.dumps(book.cells)
    assert pictures(book.cells) == NOTEBOOKS[name]
    assert all(cell.outputs for cell in book.cells if cell.cell_type == "code")
    assert not re.search(r"/(home|root|tmp|work|Users|opt|usr)/|[A-Z]:\\\\", stored), "no local path"
    recorded, lines = printed(book.cells), printed_lines(book.cells)
    monkeypatch.setenv("PYTHONPATH", str(Path(stableair.__file__).absolute().parents[1]))
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert pictures(book.cells) >= NOTEBOOKS[name]
    assert printed(book.cells).keys() == recorded.keys()
    assert printed_lines(book.cells) == lines, "the stored output is that of the present version"
    if name == "quickstart.ipynb":
        found = printed(book.cells)
        assert list(found) == ["no channel", "mac(C=1)", "no repair", "smooth(C=1)"]
        assert found["mac(C=1)"] > found["no repair"] + 0.05
    assert not list(tmp_path.iterdir())


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {*ROWS, *NOTEBOOKS}
