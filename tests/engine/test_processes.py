"""Clients trained by worker processes."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.engine import uploads
from stableair.builder import build
from stableair.engine import EngineChoice, accelerate
from stableair.errors import InputError, ResourceError
from stableair.training.reference import Reference
from stableair.vector import state


def test_processes_equal_the_reference_bit_for_bit(tiny):
    sim = build(tiny.with_(partition="dirichlet_by_class(1)"))
    fast = accelerate(sim, EngineChoice("processes", "fp32", 2, "")).train
    for k in (0, 3):
        expected, got = uploads(replace(sim.train, chunk=2), sim.start.model, k), uploads(fast, sim.start.model, k)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert [len(u.clients) for u in fast(sim.start.model, 0, sim.participants(0))] == [2, 2, 1]


def test_replies_to_an_interrupted_round_are_not_read_later(tiny, monkeypatch):
    sim = build(tiny)
    fast = accelerate(sim, EngineChoice("processes", "fp32", 5, "")).train
    list(fast(sim.start.model, 0, torch.arange(5)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(fast._pool.pipes[0]), "recv", interrupt)
        list(fast(sim.start.model, 1, torch.arange(5)))
    expected, got = uploads(replace(sim.train, chunk=5), sim.start.model, 2), uploads(fast, sim.start.model, 2)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def interrupt(pipe):
    raise KeyboardInterrupt


def test_a_killed_worker_is_reported_in_one_line(tiny):
    fast = accelerate(build(tiny), EngineChoice("processes", "fp32", 2, "")).train
    list(fast(build(tiny).start.model, 0, torch.arange(5)))
    for process in fast._pool.processes:
        process.kill()
        process.join()
    with pytest.raises(ResourceError) as error:
        list(fast(build(tiny).start.model, 1, torch.arange(5)))
    assert error.value.code == "worker-ended"
    assert "\n" not in str(error.value)


@pytest.mark.slow  # a refusal that reaches the parent is tested below
def test_an_unexpected_error_of_a_worker_is_reported(tiny):
    sim = build(tiny)
    wrong = Reference(replace(sim.train.work, parts=[torch.tensor([0, 10**6])] * 2))
    fast = accelerate(replace(sim, train=wrong, n=2), EngineChoice("processes", "fp32", 2, "")).train
    with pytest.raises(InputError) as error:
        list(fast(sim.start.model, 0, torch.arange(2)))
    assert (error.value.code, error.value.fields) == ("worker-failed", {"round": 0})
    assert "IndexError: " in str(error.value)


def test_an_input_error_of_a_worker_is_raised_in_the_parent(tiny):
    sim = build(tiny)
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3))
    single = Reference(replace(sim.train.work, module=module, parts=[torch.arange(4), torch.arange(1)]))
    with pytest.raises(InputError) as error:
        fast = accelerate(replace(sim, train=single, n=2), EngineChoice("processes", "fp32", 2, "")).train
        list(fast(state(module), 2, torch.arange(2)))
    assert (error.value.code, error.value.fields) == ("client-cannot-train", {"round": 2, "client": 1})


PARENT = """
import sys, torch, stableair as sa
from dataclasses import replace
from stableair.engine import EngineChoice, accelerate
from stableair.builder import build
if __name__ == "__main__":
    e = sa.Experiment(data="synthetic(samples=20, shape=(1, 2, 2))", clients=2, device="cpu")
    sim = accelerate(build(e), EngineChoice("processes", "fp32", 2, ""))
    list(sim.train(sim.start.model, 0, torch.arange(sim.n)))
    print(*[process.pid for process in sim.train._pool.processes], flush=True)
    if sys.argv[1] == "stay":
        sys.stdin.read()
"""


@pytest.mark.parametrize("end", [pytest.param("leave", marks=pytest.mark.slow), "killed"])
def test_the_workers_exit_with_their_parent(tmp_path, end):
    (tmp_path / "parent.py").write_text(PARENT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, str(tmp_path / "parent.py"), "stay" if end == "killed" else "go"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) >= 1
        if end == "killed":
            parent.kill()
        parent.wait(timeout=30)
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
