"""A small sweep, and processes that compute it."""

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


def start_command(*words, **options):
    """Start the command in a separate process; its output is piped."""
    env = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    words = [sys.executable, "-m", "stableair", *map(str, words)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)


def wait_until(condition, seconds=60):
    """Wait until a condition is true, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not true within {seconds} s"
        time.sleep(0.02)
    return value


def recorded_rounds(folder):
    """Number of lines of rounds.jsonl."""
    file = folder / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def children(pid):
    processes = [path.parent for path in Path("/proc").glob("[0-9]*/stat") if f" {pid} " in state_and_parent(path)]
    return [int(path.name) for path in processes]


def state_and_parent(path):
    """State and parent of a process, from its file /proc/PID/stat; "" if there is none."""
    try:
        return " ".join(path.read_text().rpartition(")")[2].split()[:2]) + " "
    except OSError:
        return ""


def alive(pid):
    return not state_and_parent(Path(f"/proc/{pid}/stat")).startswith(("Z", "X")) and Path(f"/proc/{pid}").exists()
