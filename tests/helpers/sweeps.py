"""A small sweep, and processes of the command that compute it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import stableair as sa

SETTINGS = {
    "data": "synthetic(samples=60, classes=3, shape=(1, 2, 2))", "model": "mlp(width=4)", "clients": 5, "device": "cpu",
}  # fmt: skip
PLAN = SETTINGS | {"rounds": 3, "receiver": ["mac(C=1)", "none()"]}
WORDS = [f"{key}={value}" for key, value in SETTINGS.items()] + ["receiver=mac(C=1),none()"]
SRC = Path(sa.__file__).absolute().parents[1]


def begun(*words, **more):
    """A real process of the command; what it says is piped."""
    env = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"} | more.pop("env", {})
    words = [sys.executable, "-m", "stableair", *map(str, words)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **more)


def until(happens, seconds=60):
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return found


def rounds(folder):
    file = folder / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def children(pid):
    found = [path.parent for path in Path("/proc").glob("[0-9]*/stat") if f" {pid} " in after_name(path)]
    return [int(path.name) for path in found]


def after_name(path):
    """The state and the parent of a process."""
    try:
        return " ".join(path.read_text().rpartition(")")[2].split()[:2]) + " "
    except OSError:
        return ""


def alive(pid):
    return not after_name(Path(f"/proc/{pid}/stat")).startswith(("Z", "X")) and Path(f"/proc/{pid}").exists()
