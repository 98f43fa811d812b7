"""Runs compared, stopped, and started in other processes."""

import os
import subprocess
import sys
from contextlib import contextmanager

import torch


def recorded_metrics(result):
    """All recorded metrics except the seconds."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rounds]


def same(one, other):
    """Whether two runs have the same metrics and the same model, bit for bit."""
    return recorded_metrics(one) == recorded_metrics(other) and torch.equal(one.state.model.w, other.state.model.w)


class Stop(Exception):
    pass


def stop_after(k):
    """A function of `Callback.round` that raises Stop after round k."""

    def on_round(row):
        if row["round"] == k:
            raise Stop

    return on_round


@contextmanager
def started(code, *words):
    """A Python process that is killed at the end of the context."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def flipped(raw, bit):
    """The bytes with one flipped bit."""
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
