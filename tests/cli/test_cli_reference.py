"""`stableair list` and the help texts."""

import re
import subprocess
import sys

import pytest

import stableair as sa
from stableair.cli.reference import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_list_gives_signatures(command, kind):
    code, out, _ = command("list", kind)
    assert code == 0
    entries = list(sa.spec.REGISTRIES[kind])
    assert entries
    assert all(entry.typed_signature in out and entry.summary in out for entry in entries)


def test_list_shows_types_and_knows_every_kind(command):
    out = command("list", "receivers")[1]
    assert re.search(
        r"^  mac\(C: float \| auto, gain: bool \| None = None, pilot: int = 0\)  +Median", out, re.MULTILINE
    )
    assert set(KINDS) == set(sa.spec.REGISTRIES)


def test_list_needs_nothing_that_ran_before():
    words = [sys.executable, "-m", "stableair", "list"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in ("  rayleigh(", "  gnc(", "  momentum(", "  flat(", "  by_writer("))


def test_list_gives_everything_and_the_version_is_there(command):
    _, out, _ = command("list")
    assert all(f"{kind}\n" in out for kind in (*KINDS, "presets", "settings"))
    assert re.search(r"^  clients: int = 50 +Number of clients", out, re.MULTILINE)
    assert command("--version")[1] == f"{sa.__version__}\n"


def test_help_needs_nothing_heavy():
    code = (
        "import sys; sys.argv = ['stableair', '--help']\n"
        "from stableair.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
