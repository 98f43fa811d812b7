"""The queue of the reproduction, and the verdicts on its page."""

import shlex
import sys

import pytest

from helpers import ROOT
from stableair.experiment import Experiment, from_words
from stableair.paper import published_runs
from stableair.results.checksums import CHECKPOINT
from stableair.results.reading import load
from stableair.results.run import Run

sys.path.insert(0, str(ROOT / "bench"))
import publish
import reproduce
import verdicts

from helpers.callbacks import Hooks


def run_with(*accuracies, seed=0, diverged=False):
    """A run with these accuracies; the loss is one minus the accuracy."""
    rows = [{"round": k, "test/accuracy": accuracy, "test/loss": 1 - accuracy} for k, accuracy in enumerate(accuracies)]
    if diverged:
        rows.append({"round": len(rows), "test/accuracy": None, "test/loss": None, "diverged": True})
    return Run(Experiment(seed=seed, rounds=len(rows)).to_record(), rows)


@pytest.fixture
def queue(tiny, monkeypatch):
    """Two short runs instead of the queue."""
    jobs = [reproduce.Job("first", tiny.with_(rounds=4)), reproduce.Job("second", tiny.with_(rounds=2, seed=1))]
    monkeypatch.setattr(reproduce, "jobs", lambda folder: iter(jobs))
    return jobs


def names(folder):
    return [job.name for job in reproduce.missing(folder)]


def test_the_queue_has_the_order_of_the_plan(tmp_path):
    order = [job.name for job in reproduce.jobs(reproduce.FOLDER)]
    start = order.index("cifar100-ideal-seed0")
    assert order[start : start + 3] == ["cifar100-ideal-seed0", "cifar100-noisy-seed0", "cifar100-search-mac"]
    later = ["cifar10-noniid-C0.05-seed0", "cifar10-noniid-alpha1.2-seed0", "cifar10-gnc-seed1", "femnist-ideal-seed1",
             "cifar100-ideal-seed1", "cifar10-ideal-seed2", "cifar10-noniid-tau0.2-C0.26-seed0", "choice-sum-seed0",
             "cifar10-noniid-tau0.3-search-mac", "gap-120-rounds-seed0", "cifar10-auto-seed0"]  # fmt: skip
    positions = [start + 2, *map(order.index, later)]
    assert positions == sorted(positions)
    auto = [job.experiment.receiver == "mac(C=auto)" for job in reproduce.jobs(reproduce.FOLDER)]
    assert auto == sorted(auto), "the runs with C=auto are last"
    assert "cifar10-mac-seed0" not in [job.name for job in reproduce.jobs(tmp_path)], "its threshold is not known yet"


def test_runs_of_another_length_are_different_jobs():
    gap = reproduce.gap_curves(reproduce.FOLDER)
    assert gap["120 rounds"].id() == gap["start: tau = 0.3"].id()
    wanted = [job.name for job in reproduce.jobs(reproduce.FOLDER) if job.experiment == gap["120 rounds"]]
    assert wanted == ["gap-120-rounds-seed0"]
    assert gap["server learning rate halved"].server == "sgd(lr=0.015)"


def test_an_interrupted_run_continues_from_its_checkpoint(queue, tmp_path, monkeypatch, capsys):
    real, rounds = reproduce.run, []

    def stop(row):
        if row["round"] == 1:
            raise KeyboardInterrupt

    def interrupted(*args, callbacks, **options):
        return real(*args, callbacks=[*callbacks, Hooks(round=stop)], **options)

    monkeypatch.setattr(reproduce, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reproduce.run_missing(tmp_path, [""], 1)
    assert (tmp_path / "first" / CHECKPOINT).exists()
    assert names(tmp_path) == ["first", "second"]
    monkeypatch.setattr(
        reproduce,
        "run",
        lambda *args, callbacks, **o: real(*args, callbacks=[*callbacks, Hooks(round=rounds.append)], **o),
    )
    assert reproduce.run_missing(tmp_path, [""], 1) == {}
    assert [row["round"] for row in rounds] == [2, 3, 0, 1]
    assert names(tmp_path) == []
    assert not list(tmp_path.rglob("checkpoint*"))
    assert "engine stacked, fp32" in capsys.readouterr().out
    plain = real(queue[0].experiment)
    assert load(tmp_path / "first")["test/loss"] == plain["test/loss"]


def test_no_run_starts_when_the_time_is_up(queue, tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 40))  # seconds
    monkeypatch.setattr(reproduce.time, "perf_counter", lambda: next(clock))
    reproduce.run_missing(tmp_path, [""], 1)
    assert names(tmp_path) == ["second"]


def test_a_run_that_needs_the_reference_loop_is_refused_and_the_others_continue(tmp_path, monkeypatch, tiny):
    slow = reproduce.Job("slow", tiny.with_(precision="bf16"))  # which no engine computes on a CPU
    monkeypatch.setattr(reproduce, "jobs", lambda folder: iter([slow, reproduce.Job("fast", tiny.with_(rounds=1))]))
    started = []
    real = reproduce.run
    monkeypatch.setattr(reproduce, "run", lambda one, *args, **o: (started.append(one.engine), real(one, *args, **o)))
    assert list(reproduce.run_missing(tmp_path, [""], 1)) == ["slow"]
    assert started == ["fast", "fast"], "with an engine that refuses the model instead of using the reference"
    assert names(tmp_path) == ["slow"]


def test_a_search_stops_between_trials_and_continues_without_a_checkpoint(tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(reproduce, "TRIALS", 3)
    job = reproduce.Job("search", tiny.with_(rounds=2), "MAC")
    with pytest.raises(reproduce.OutOfTimeError):
        job.compute(tmp_path, lambda: True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("search/*/rounds.jsonl")}
    assert len(before) == 1
    assert not job.done(tmp_path)
    job.compute(tmp_path)
    assert job.done(tmp_path)
    assert job.best(tmp_path).keys() == {"receiver.C"}
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()), "not computed again"


def test_runs_of_an_earlier_version_are_published_until_they_are_replaced(tmp_path, tiny):
    reproduce.run(tiny.with_(rounds=2), tmp_path / "version-0.2" / "one")
    reproduce.run(tiny.with_(rounds=1), tmp_path / "search" / "trial")
    (tmp_path / "search" / "search.json").write_text("{}")
    assert list(publish.finished_runs(tmp_path)) == ["version-0.2/one"]
    reproduce.run(tiny.with_(rounds=2), tmp_path / "one")
    assert list(publish.finished_runs(tmp_path)) == ["one"]


@pytest.mark.parametrize("name", [name for name in publish.NAMES if published_runs.is_published(name)])
def test_the_command_of_a_run_gives_its_experiment_and_its_commit_is_known(name):
    for title, about in publish._described(name).items():
        experiment = Experiment.from_record(about["experiment"])
        program, verb, *words = shlex.split(publish.command(experiment, publish.preset_of(name)))
        again = from_words(words)
        assert (program, verb, again.id(), again.rounds) == ("stableair", "run", experiment.id(), experiment.rounds)
        assert all(entry["commit"] for entry in about["environment"]), title


def test_differences_are_paired_by_seed():
    """The mean over both seeds of Ideal would give another value."""
    curves = {"Ideal": [run_with(0.9, 0.9), run_with(0.5, 0.5, seed=1)], "MAC": [run_with(0.8, 0.8)]}
    row = verdicts.Judge(curves, {}).above("claim", "Ideal", "MAC")
    assert row == ("claim", "Ideal compared with MAC: +10.0 points", "holds, seed 0")
    loss = verdicts.Judge(curves, {}).higher_loss("claim", "MAC", "Ideal")
    assert (loss.seen, loss.verdict) == ("loss 0.200 with MAC, 0.100 with Ideal", "holds, seed 0")


def test_a_second_seed_that_contradicts_the_first_is_in_the_verdict():
    curves = {
        "Ideal": [run_with(0.9, 0.9), run_with(0.5, 0.5, seed=1)],
        "MAC": [run_with(0.8, 0.8), run_with(0.55, 0.55, seed=1)],
    }
    row = verdicts.Judge(curves, {}).above("claim", "Ideal", "MAC")
    assert row.seen == "Ideal compared with MAC: +10.0 and -5.0 points"
    assert row.verdict == "**mixed**: holds with seed 0, does not with seed 1"
    row = verdicts.Judge(curves, {}).kept("claim", "MAC", "Ideal")
    assert row.verdict == "**mixed**: holds within 3 points with seed 1, does not with seed 0"


def test_a_run_that_diverged_decides_its_seed_only():
    noisy = [run_with(0.5, 0.7, 0.5, 0.7), run_with(0.9, 0.9, 0.9, seed=1, diverged=True)]
    calm = [run_with(0.8, 0.81, 0.8, 0.81), run_with(0.8, 0.81, 0.8, 0.81, seed=1)]
    judge = verdicts.Judge({"Noisy": noisy, "MAC": calm}, {})
    ended = "Noisy diverged at round 4 with seed 1"
    gain = f"MAC compared with Noisy: +20.5 points; {ended}"
    assert judge.above("", "MAC", "Noisy")[1:] == (gain, "holds, seeds 0 and 1")
    assert judge.fluctuates("", "Noisy", "MAC")[1:] == (
        f"Noisy fluctuates 20.0 times as much as MAC; {ended}", "holds, seeds 0 and 1",
    )  # fmt: skip
    assert judge.higher_loss("", "Noisy", "MAC").verdict == "holds, seeds 0 and 1"
    assert judge.higher_loss("", "MAC", "Noisy").verdict == "**does not hold**, seeds 0 and 1"


def test_every_verdict_of_the_page_names_its_seeds():
    rows = [line.split(" | ") for line in publish.section("summary", "").splitlines()[2:]]
    assert len(rows) > 15
    for *_, seen, found in rows:
        assert "seed" in found or ("not run yet" in seen and found == "– |")
    ours = [claim for fig, claim, *_ in rows if "4(b)" in fig and "one C" in claim]
    assert len(ours) == 1
    assert "(ours)" in ours[0]
