"""Processes that end at any moment: what is there is resumed, and the result is the same bit for bit."""

import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch

import stableair as sa
from helpers.runs import recorded_metrics
from stableair.errors import StableairError
from stableair.experiment import Experiment
from stableair.results.checksums import EXPERIMENT
from stableair.results.reading import load

pytestmark = pytest.mark.slow  # what an unlucky or a hostile user does; each test prints how often it tried

TINY = Experiment(
    data="synthetic(samples=60, classes=3, shape=(1, 2, 2))", model="mlp(width=4)", clients=5, rounds=12, device="cpu"
)
STATES = {  # four kinds of memory: none, the receiver's, the server's, and norm buffers
    "none": TINY,
    "receiver": TINY.with_(receiver="mac(C=auto) | gnc(max_norm=20)"),
    "server": TINY.with_(server="momentum(beta=0.5)", engine="reference"),
    "rare checkpoints": TINY.with_(receiver="cauchy(K=auto)", partition="dirichlet_by_class(1)"),
}
KILLS = 3  # of each kind


CONTEXT = multiprocessing.get_context("forkserver")  # children of a process that has torch and no threads of its own
CONTEXT.set_forkserver_preload(["stableair.runner", "stableair.searches", "stableair.results.report", "optuna"])


def child(seconds, work, *args):
    """The work in a process that the system ends after so many seconds: at once, with nothing cleaned up."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        WORKS[work](*args)
    except StableairError:
        os._exit(2)
    os._exit(0)


def begun(seconds, work, *args):
    process = CONTEXT.Process(target=child, args=(seconds, work, *args))
    process.start()
    return process


def ended_after(seconds, work, *args):
    """Whether the work was ended before it was done."""
    process = begun(seconds, work, *args)
    process.join()
    return process.exitcode < 0


WORKS = {
    "run": lambda experiment, folder, every: sa.run(experiment, folder, resume=True, checkpoint_every=every),
    "begin": sa.run,
    "search": lambda base, spaces, folder: sa.search(base, spaces, folder, trials=4),
    "plot": lambda folder, out: sa.plot([folder], out=out),
    "report": lambda folder, out: sa.report([folder], out),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_run_killed_at_any_moment_is_resumed_to_the_same_bits(kind, tmp_path):
    experiment, every = STATES[kind], 5 if kind == "rare checkpoints" else 1
    whole, chance = sa.run(experiment), random.Random(kind)
    killed = resumed = 0
    while killed < KILLS:
        folder = tmp_path / str(resumed)
        for _ in range(3):  # a run is killed up to three times before it is let go on
            killed += ended_after(chance.uniform(0.01, 0.6), "run", experiment, folder, every)
        again = sa.run(experiment, folder, resume=True, checkpoint_every=every)
        assert recorded_metrics(again) == recorded_metrics(whole) == recorded_metrics(load(folder))
        assert torch.equal(again.state.model.w, whole.state.model.w)
        assert not [path for path in folder.iterdir() if path.name == ".lock"]
        resumed += 1
    print(f"\n{kind}: {killed} kills, {resumed} runs resumed bit for bit")


def test_a_search_killed_at_any_moment_finds_the_same(tmp_path):
    base, spaces = TINY.with_(rounds=4), {"receiver.C": "0.001:10:log"}
    whole = sa.search(base, spaces, tmp_path / "whole", trials=4)
    chance, killed = random.Random(0), 0
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        for _ in range(2):
            killed += ended_after(chance.uniform(0.1, 1.5), "search", base, spaces, folder)
        assert sa.search(base, spaces, folder, trials=4).trials == whole.trials
    print(f"\nsearches: {killed} kills, 3 found the same")


@pytest.mark.parametrize("what", ["plot", "report"])
def test_a_picture_or_page_killed_while_it_is_written_is_the_old_one_or_the_new(what, tmp_path):
    sa.run(TINY, tmp_path / "run")
    out = tmp_path / {"plot": "a.png", "report": "a.html"}[what]
    WORKS[what](tmp_path / "run", out)
    good, chance, killed = out.read_bytes(), random.Random(1), 0
    for _ in range(5):
        killed += ended_after(chance.uniform(0.02, 0.6), what, tmp_path / "run", out)
        now = out.read_bytes()
        assert now[:8] == good[:8]
        assert now[-8:] == good[-8:], "it has its end"
        assert abs(len(now) - len(good)) < 200, "the time of day is in it"
    print(f"\n{what}: {killed} kills, never a torn file")


def test_two_runs_never_share_a_folder(tmp_path):
    """Pairs that start on one new folder at the same moment: one runs, the other is refused or finds it finished."""
    done = 0
    for pair in range(4):
        folder = tmp_path / str(pair)
        pair_of = [begun(60, "begin", TINY, folder) for _ in range(2)]
        for process in pair_of:
            process.join()
        codes = sorted(process.exitcode for process in pair_of)
        assert codes == [0, 2], codes
        assert recorded_metrics(load(folder)) == recorded_metrics(sa.run(TINY))
        done += 1
    print(f"\n{done} pairs, one run each")


def test_a_process_that_was_killed_leaves_no_lock(tmp_path):
    assert ended_after(0.5, "begin", TINY.with_(rounds=100_000), tmp_path / "a")
    folder = Path(tmp_path / "a")
    assert not (folder / EXPERIMENT).exists() or len(sa.run(TINY, folder, resume=True)) >= 12
