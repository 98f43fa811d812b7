"""Processes that share the work of a sweep and may be killed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stableair as sa
from helpers.callbacks import Hooks
from helpers.runs import recorded_metrics
from helpers.sweeps import PLAN, SETTINGS, SRC, WORDS, alive, children, recorded_rounds, start_command, wait_until
from stableair.cli.sweeps import ADVICE
from stableair.errors import NonFiniteUpload
from stableair.experiment import Experiment
from stableair.results import lock as folders
from stableair.results.lock import LOCK, locked
from stableair.results.reading import load
from stableair.sweeps import processes, workers
from stableair.sweeps.plans import expand_plan, parse_plan
from stableair.sweeps.workers import Job


@pytest.mark.parametrize("parallel", [1, 2])
def test_the_runs_of_a_sweep_equal_single_runs_bit_for_bit(parallel, tmp_path):
    ended = []
    runs = sa.sweep(
        PLAN, tmp_path / "s", parallel=parallel, callbacks=[Hooks(end=lambda one, _: ended.append(one.name))]
    )
    assert sorted(ended) == sorted(path.name for path in (tmp_path / "s").iterdir())
    for run, experiment in zip(runs, expand_plan(PLAN), strict=True):
        plain = sa.run(experiment)
        assert run.experiment == experiment
        assert recorded_metrics(run) == recorded_metrics(plain)
        assert torch.equal(run.state.model.w, plain.state.model.w)


@pytest.mark.slow
def test_three_sweeps_share_the_work_and_resume_the_experiment_of_a_killed_one(tmp_path):
    """Three processes on one folder. The one that has the first experiment is killed in the middle of it."""
    words = ["sweep", *WORDS, "rounds=12", "--seeds", "2", "--out", tmp_path / "s"]
    experiments = expand_plan(parse_plan(WORDS) | {"rounds": 12, "seeds": 2})
    first, *rest = (tmp_path / "s" / one.name for one in experiments)
    victim = start_command(*words)
    wait_until(lambda: recorded_rounds(first) > 3)
    victim.send_signal(signal.SIGSTOP)  # it keeps its lock and does not continue
    left_at = recorded_rounds(first)
    others = [start_command(*words) for _ in range(2)]
    wait_until(lambda: sum(recorded_rounds(folder) > 0 for folder in rest) >= 2)
    assert recorded_rounds(first) == left_at < 12, "no other process writes to a locked folder"
    victim.kill()
    victim.communicate()
    for other in others:
        out, errors = other.communicate(timeout=120)
        assert (other.returncode, errors) == (0, "")
        assert len(re.findall(r"^\d/4  ", out, re.MULTILINE)) == len(experiments), (
            "each reports all experiments as finished"
        )
    for experiment in experiments:
        found, plain = load(tmp_path / "s" / experiment.name), sa.run(experiment)
        assert recorded_metrics(found) == recorded_metrics(plain)
        assert torch.equal(found.state.model.w, plain.state.model.w)
    started = [[at["first_round"] for at in load(folder).environments] for folder in (first, *rest)]
    assert len(started[0]) == 2, "the experiment of the killed process was resumed"
    assert 0 < started[0][1] <= left_at + 1
    assert started[1:] == [[0]] * len(rest), "no other experiment was computed twice"
    assert not list(tmp_path.rglob(LOCK))


@pytest.mark.slow
def test_worker_processes_exit_with_their_parent(tmp_path):
    parent = start_command("sweep", *WORDS, "rounds=100000", "--parallel", 2, "--out", tmp_path / "s")
    wait_until(lambda: sum(recorded_rounds(path) > 0 for path in (tmp_path / "s").glob("*")) == 2)
    (worker,) = children(parent.pid)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not alive(worker))
    lengths = [len(load(path)) for path in (tmp_path / "s").iterdir() if recorded_rounds(path)]
    assert len(lengths) == 2
    assert min(lengths) > 0, "the recorded rounds can be read"


@pytest.mark.slow
def test_a_stopped_command_prints_how_to_continue_and_leaves_no_process(tmp_path):
    parent = start_command("sweep", *WORDS, "rounds=100000", "--parallel", 2, "--out", tmp_path / "s")
    wait_until(lambda: sum(recorded_rounds(path) > 1 for path in (tmp_path / "s").glob("*")) == 2)
    (worker,) = children(parent.pid)
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=60)
    assert (parent.returncode, errors) == (143, f"stopped; {ADVICE}\n")
    assert not alive(worker)
    assert not list(tmp_path.rglob(LOCK))


def test_a_locked_experiment_is_computed_after_the_others(tmp_path, monkeypatch):
    experiments = expand_plan(PLAN)
    lock = locked(tmp_path / experiments[0].name)
    lock.__enter__()
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: lock.__exit__(None, None, None))
    ended = [one.name for one, _ in workers.run_unlocked(experiments, tmp_path)]
    assert ended == [experiments[1].name, experiments[0].name]


def test_every_outcome_is_reported_once_and_a_locked_experiment_is_not_a_failure(tmp_path, monkeypatch):
    plan = PLAN | {"lr": [1e30, 0.03], "receiver": "mac(C=1)"}
    bad, good = expand_plan(plan)
    lock = locked(tmp_path / good.name)
    lock.__enter__()
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: lock.__exit__(None, None, None))
    events = []
    hooks = Hooks(
        start=lambda engine: events.append(engine["engine"]),
        round=lambda row: events.append(row["round"]),
        end=lambda one, outcome: events.append((one.name, type(outcome).__name__)),
    )
    with pytest.raises(NonFiniteUpload) as error:
        sa.sweep(plan, tmp_path, callbacks=[hooks])
    assert error.value.code == "non-finite-upload"
    ends = [event for event in events if isinstance(event, tuple)]
    assert ends == [(bad.name, "NonFiniteUpload"), (good.name, "Run")]
    assert events[-4:-1] == [0, 1, 2]
    events.clear()
    sa.sweep([good], tmp_path, callbacks=[hooks])
    assert events == [(good.name, "Run")], "a finished run has neither start nor rounds"


def test_a_failed_experiment_does_not_stop_the_others(tmp_path):
    plan = PLAN | {"lr": [1e30, 0.03], "receiver": "mac(C=1)"}
    with pytest.raises(sa.InputError) as error:
        sa.sweep(plan, tmp_path / "s")
    assert error.value.code == "non-finite-upload"
    assert [path.name for path in (tmp_path / "s").iterdir()] == [expand_plan(plan)[1].name]
    with pytest.raises(sa.InputError) as error:
        sa.sweep(plan | {"lr": 1e30}, tmp_path / "t")
    assert error.value.code == "non-finite-upload"
    assert not (tmp_path / "t").exists()


def test_an_existing_longer_run_is_truncated(tmp_path):
    (experiment,) = expand_plan(SETTINGS)
    sa.run(experiment.with_(rounds=4), tmp_path / experiment.name)
    (run,) = sa.sweep([experiment.with_(rounds=2)], tmp_path)
    assert len(run) == 2


@pytest.mark.parametrize("folder", ["/proc/x", "/proc"])
def test_a_folder_without_write_permission_is_refused_at_once(folder):
    with pytest.raises(sa.InputError) as error, locked(Path(folder)):
        pass
    assert error.value.code == "not-writable"


def test_without_locks_there_is_one_process(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    with pytest.raises(sa.InputError) as error:
        sa.sweep(PLAN, tmp_path / "s", parallel=2)
    assert error.value.code == "no-file-locks"
    assert not list(tmp_path.iterdir())
    assert len(sa.sweep(PLAN, tmp_path / "s")) == 2
    assert "disk without file locks" in caplog.text


def test_worker_processes_are_refused_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sa.InputError) as error:
        sa.sweep(PLAN, tmp_path / "s", parallel=2)
    assert error.value.code == "parallel-and-torchrun"
    assert not list(tmp_path.iterdir())


def test_each_worker_has_a_separate_gpu_unless_device_is_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [processes.assign_gpu(i, [Experiment()]).get("CUDA_VISIBLE_DEVICES") for i in range(1, 5)] == [
        "1",
        "2",
        "0",
        "1",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert processes.assign_gpu(1, [Experiment()]) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert processes.assign_gpu(1, [Experiment(), Experiment(device="cuda:1")]) == {}


def test_a_job_contains_everything_that_another_process_needs(tmp_path, registries):
    plugin = tmp_path / "mine.py"
    plugin.write_text("import stableair as sa\n@sa.receiver('twice')\ndef twice(): return lambda g: 2 * g\n")
    sa.load_plugin(plugin)
    (experiment,) = expand_plan(SETTINGS | {"rounds": 2, "receiver": "twice()"})
    job = json.dumps(Job.create([experiment], tmp_path / "s"))
    code = "import json, sys; from stableair.sweeps.workers import Job; Job(*json.loads(sys.argv[1]))()"
    subprocess.run([sys.executable, "-c", code, job], check=True, env=os.environ | {"PYTHONPATH": str(SRC)})
    assert recorded_metrics(load(tmp_path / "s" / experiment.name)) == recorded_metrics(sa.run(experiment))


def without_engine(out):
    """The output of a command without the lines about engines, which depend on the experiments it computes."""
    return [line for line in out.splitlines() if not line.startswith("engine ")]


@pytest.mark.slow
def test_two_processes_share_a_search_and_have_the_same_result(tmp_path):
    words = ["search", *WORDS[:-1], "rounds=8", "receiver.C=0.001:10:log", "--trials", 4, "--seeds", 2]
    both = [start_command(*words, "--out", tmp_path / "s") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert without_engine(outputs[0][0]) == without_engine(outputs[1][0])
    found = sa.search(
        Experiment(**SETTINGS, rounds=8), {"receiver.C": "0.001:10:log"}, tmp_path / "t", trials=4, seeds=2
    )
    recorded = json.loads((tmp_path / "s" / "search.json").read_text())["trials"]
    assert recorded == [trial._asdict() for trial in found.trials]
    starts = [len(load(path.parent).environments) for path in (tmp_path / "s").rglob("experiment.json")]
    assert starts == [1] * 8, "no round is computed twice"


@pytest.mark.slow
def test_two_processes_share_the_runs_of_a_figure(tmp_path):
    words = ["figure", "fig4c", "--smoke", "--seeds", 2, "model=logistic()", "--out", tmp_path / "s"]
    both = [start_command(*words) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted(without_engine(outputs[0][0])) == sorted(without_engine(outputs[1][0])), "in any order"
    assert [len(load(path.parent).environments) for path in (tmp_path / "s").rglob("experiment.json")] == [1] * 8
