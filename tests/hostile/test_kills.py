"""Processes that are killed at any moment: their runs are resumed, and the results are equal bit for bit."""

import multiprocessing
import os
import random
import signal

import pytest
import torch

import stableair as sa
from helpers.runs import recorded_metrics
from helpers.sweeps import recorded_rounds, wait_until
from stableair.errors import StableairError
from stableair.experiment import Experiment
from stableair.results.reading import load

pytestmark = pytest.mark.slow  # errors and attacks of users; each test prints the number of its attempts

TINY = Experiment(
    data="synthetic(samples=60, classes=3, shape=(1, 2, 2))", model="mlp(width=4)", clients=5, rounds=12, device="cpu"
)
STATES = {  # components with different memories, and rare checkpoints
    "none": TINY,
    "receiver": TINY.with_(receiver="mac(C=auto) | gnc(max_norm=20)"),
    "server": TINY.with_(server="momentum(beta=0.5)", engine="reference"),
    "rare checkpoints": TINY.with_(receiver="cauchy(K=auto)", partition="dirichlet_by_class(1)"),
}
KILLS = 3  # of each kind


CONTEXT = multiprocessing.get_context("forkserver")  # children of a process that has imported torch and has no threads
CONTEXT.set_forkserver_preload(["stableair.runner", "stableair.searches", "stableair.results.report", "optuna"])


def child(seconds, work, *args):
    """Do the work in this process, which SIGALRM kills after some seconds without any clean-up."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        WORKS[work](*args)
    except StableairError:
        os._exit(2)
    os._exit(0)


def start_process(seconds, work, *args):
    process = CONTEXT.Process(target=child, args=(seconds, work, *args))
    process.start()
    return process


def killed_after(seconds, work, *args):
    """Whether the process was killed before the work was complete."""
    process = start_process(seconds, work, *args)
    process.join()
    return process.exitcode < 0


WORKS = {
    "run": lambda experiment, folder, every: sa.run(experiment, folder, resume=True, checkpoint_every=every),
    "start": sa.run,
    "search": lambda base, spaces, folder: sa.search(base, spaces, folder, trials=4),
    "plot": lambda folder, out: sa.plot([folder], out=out),
    "report": lambda folder, out: sa.report([folder], out),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_run_killed_at_any_moment_is_resumed_to_the_same_bits(kind, tmp_path):
    experiment, every = STATES[kind], 5 if kind == "rare checkpoints" else 1
    whole, rng = sa.run(experiment), random.Random(kind)
    killed = resumed = 0
    while killed < KILLS:
        folder = tmp_path / str(resumed)
        for _ in range(3):  # a run is killed up to three times before it may finish
            killed += killed_after(rng.uniform(0.01, 0.6), "run", experiment, folder, every)
        again = sa.run(experiment, folder, resume=True, checkpoint_every=every)
        assert recorded_metrics(again) == recorded_metrics(whole) == recorded_metrics(load(folder))
        assert torch.equal(again.state.model.w, whole.state.model.w)
        assert not [path for path in folder.iterdir() if path.name == ".lock"]
        resumed += 1
    print(f"\n{kind}: {killed} kills, {resumed} runs resumed bit for bit")


def test_a_search_killed_at_any_moment_finds_the_same(tmp_path):
    base, spaces = TINY.with_(rounds=4), {"receiver.C": "0.001:10:log"}
    whole = sa.search(base, spaces, tmp_path / "whole", trials=4)
    rng, killed, attempts = random.Random(0), 0, 0
    while killed < KILLS:
        folder = tmp_path / str(attempts)
        for _ in range(2):
            killed += killed_after(rng.uniform(0.01, 0.6), "search", base, spaces, folder)
        assert sa.search(base, spaces, folder, trials=4).trials == whole.trials
        attempts += 1
    print(f"\nsearches: {killed} kills, {attempts} found the same")


@pytest.mark.parametrize("what", ["plot", "report"])
def test_an_output_whose_writer_is_killed_is_the_old_or_the_new_file(what, tmp_path):
    sa.run(TINY, tmp_path / "run")
    out = tmp_path / {"plot": "a.png", "report": "a.html"}[what]
    WORKS[what](tmp_path / "run", out)
    good, rng, killed = out.read_bytes(), random.Random(1), 0
    while killed < KILLS:
        killed += killed_after(rng.uniform(0.02, 0.6), what, tmp_path / "run", out)
        content = out.read_bytes()
        assert content[:8] == good[:8]
        assert content[-8:] == good[-8:], "the file is complete"
        assert abs(len(content) - len(good)) < 200, "the file contains the time"
    print(f"\n{what}: {killed} kills, the file was always complete")


def test_two_runs_never_share_a_folder(tmp_path):
    """Pairs that start on one new folder at the same moment: one runs, the other is refused or finds it finished."""
    done = 0
    for pair in range(4):
        folder = tmp_path / str(pair)
        processes = [start_process(60, "start", TINY, folder) for _ in range(2)]
        for process in processes:
            process.join()
        codes = sorted(process.exitcode for process in processes)
        assert codes == [0, 2], codes
        assert recorded_metrics(load(folder)) == recorded_metrics(sa.run(TINY))
        done += 1
    print(f"\n{done} pairs, one run each")


def test_a_process_that_was_killed_leaves_no_lock(tmp_path):
    folder = tmp_path / "a"
    process = start_process(600, "start", TINY.with_(rounds=100_000), folder)
    wait_until(lambda: recorded_rounds(folder))
    process.kill()
    process.join()
    assert len(sa.run(TINY, folder, resume=True)) >= 12
