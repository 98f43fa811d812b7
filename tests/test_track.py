import subprocess
import sys

import pytest

import stableair as sa
from stableair.checks import InputError, Note
from stableair.results import track


def tracked(kind, experiment, folder):
    with track.track(kind, experiment, folder) as tell:
        return sa.run(experiment, folder, resume=True, on_round=tell)


def test_tensorboard_gets_every_round(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = tracked("tensorboard", tiny, tmp_path / "a")
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    for metric in ("test/accuracy", "channel/snr_db", "clip/fraction"):
        assert [e.step for e in events.Scalars(metric)] == [0, 1, 2, 3]
        assert [e.value for e in events.Scalars(metric)] == pytest.approx(result[metric], rel=1e-6)


def test_mlflow_gets_every_round_and_a_resumed_run_is_the_same_one(tiny, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'ml.db'}")
    tracked("mlflow", tiny.with_(rounds=2), tmp_path / "a")
    result = tracked("mlflow", tiny, tmp_path / "a")
    (seen,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    tracked("mlflow", tiny, tmp_path / "b")
    assert len(mlflow.search_runs(search_all_experiments=True, output_format="list")) == 2, "elsewhere it is another"
    assert seen.data.params["receiver"] == tiny.receiver
    history = mlflow.MlflowClient().get_metric_history(seen.info.run_id, "test/accuracy")
    assert [(m.step, m.value) for m in history] == list(enumerate(result["test/accuracy"]))


def test_wandb_gets_every_round(tiny, tmp_path, monkeypatch):
    """Against a stand-in: the real one wants an account or a service of its own."""
    import wandb

    logged = {}

    class Stand:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            logged["ended"] = True

        def log(self, metrics, step):
            logged[step] = metrics

    def init(**settings):
        logged["settings"] = settings
        return Stand()

    monkeypatch.setattr(wandb, "init", init)
    result = tracked("wandb", tiny, tmp_path / "a")
    assert [logged[k]["test/accuracy"] for k in range(4)] == result["test/accuracy"]
    assert logged["settings"]["config"] == tiny.to_dict()
    assert logged["settings"]["id"].startswith(tiny.name)
    assert logged["ended"]


def test_a_tracker_that_fails_is_named_and_the_run_goes_on(tiny, tmp_path, monkeypatch):
    import mlflow

    def broken(*_):
        raise RuntimeError("no such server\nand more")

    monkeypatch.setattr(mlflow, "set_experiment", broken)
    with pytest.warns(Note, match=r"^tracker mlflow failed in round 0: no such server; the run goes on without it$"):
        assert len(tracked("mlflow", tiny, tmp_path / "a")) == 4


def test_unknown_and_missing_trackers_are_refused_before_anything_is_computed(monkeypatch):
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        track.check_installed("tensorbord")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'stableair\[wandb\]'"):
        track.check_installed("wandb")
    track.check_installed(None)


def test_nothing_is_imported_unless_asked_for(tiny, tmp_path):
    code = (
        "import json, sys, stableair as sa\n"
        "from stableair.results.track import track\n"
        f"e = sa.Experiment(**json.loads({tiny.to_json()!r}))\n"
        "with track(None, e, None) as tell: sa.run(e, on_round=tell)\n"
        "loaded = {'tensorboard', 'wandb', 'mlflow', 'optuna', 'plotly', 'datasets'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
