import subprocess
import sys

import pytest

import stableair as sa
from stableair.errors import InputError, MissingExtraError, RunBusyError
from stableair.results import trackers
from stableair.results.lock import locked


def tracked(name, experiment, folder):
    return sa.run(experiment, folder, resume=True, callbacks=[trackers.tracker(name, folder)])


def test_tensorboard_gets_every_round(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = tracked("tensorboard", tiny, tmp_path / "a")
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard" / tiny.name))
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
    assert len(mlflow.search_runs(search_all_experiments=True, output_format="list")) == 2, (
        "another folder is another run"
    )
    assert seen.data.params["receiver"] == tiny.receiver
    history = mlflow.MlflowClient().get_metric_history(seen.info.run_id, "test/accuracy")
    assert [(m.step, m.value) for m in history] == list(enumerate(result["test/accuracy"]))


def test_wandb_gets_every_round(tiny, tmp_path, monkeypatch):
    """With a stand-in for wandb, which needs an account or a server."""
    import wandb

    logged = {}

    class StandIn:
        def finish(self):
            logged["finished"] = True

        def log(self, metrics, step):
            logged[step] = metrics

    def init(**settings):
        logged["settings"] = settings
        return StandIn()

    monkeypatch.setattr(wandb, "init", init)
    result = tracked("wandb", tiny, tmp_path / "a")
    assert [logged[k]["test/accuracy"] for k in range(4)] == result["test/accuracy"]
    assert logged["settings"]["config"] == tiny.to_dict()
    assert logged["settings"]["id"].startswith(tiny.name)
    assert logged["finished"]


def test_a_tracker_that_fails_is_named_and_the_run_continues(tiny, tmp_path, monkeypatch, caplog):
    import mlflow

    def broken(*_):
        raise RuntimeError("no such server\nand more")

    monkeypatch.setattr(mlflow, "set_experiment", broken)
    assert len(tracked("mlflow", tiny, tmp_path / "a")) == 4
    assert caplog.messages == ["tracker mlflow failed: no such server; the run continues without it"]


def test_unknown_and_missing_trackers_are_refused_before_anything_is_computed(monkeypatch):
    with pytest.raises(InputError) as error:
        trackers.tracker("tensorbord", "a")
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "tracker")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError) as error:
        sa.WandB("a")
    assert error.value.fields == {"module": "wandb", "extra": "wandb"}


def test_optional_packages_are_imported_only_when_used(tiny, tmp_path):
    code = (
        "import json, sys, stableair as sa\n"
        f"e = sa.Experiment(**json.loads({tiny.to_json()!r}))\n"
        "sa.run(e, callbacks=[sa.Callback()])\n"
        "loaded = {'tensorboard', 'wandb', 'mlflow', 'optuna', 'plotly', 'datasets'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_tracker_observes_many_experiments(tmp_path, tiny):
    one, other = tiny.with_(rounds=1), tiny.with_(rounds=1, receiver="none()")
    sa.sweep([one, other], tmp_path, callbacks=[sa.TensorBoard(tmp_path)])
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == sorted([one.name, other.name])


def test_a_tracker_is_closed_when_the_next_run_starts_or_by_hand(tmp_path, tiny):
    """After an exception other than StableairError, `end` is not called."""
    closed = []

    class RecordingTracker(trackers.TensorBoard):
        def _close(self):
            closed.append(True)
            super()._close()

    class Broken(sa.Callback):
        def round(self, experiment, row):
            raise KeyboardInterrupt

    tracker = RecordingTracker(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sa.run(tiny, callbacks=[tracker, Broken()])
    assert (closed, tracker.active) == ([], True)
    sa.run(tiny.with_(rounds=1), callbacks=[tracker])
    assert (closed, tracker.active) == ([True, True], False)
    tracker.close()
    assert closed == [True, True]


@pytest.mark.parametrize("wrong", [[print], [sa.Callback], sa.Callback(), 3])
def test_invalid_callbacks_are_refused(wrong, tiny):
    with pytest.raises(InputError) as error:
        sa.run(tiny, callbacks=wrong)
    assert error.value.code in ("not-a-callback", "wrong-type")


def test_callbacks_see_the_run_in_order(tiny, tmp_path):
    events = []

    class Watch(sa.Callback):
        def start(self, experiment, engine):
            events.append((experiment.seed, set(engine) >= {"engine", "precision", "chunk", "why", "ranks"}))

        def round(self, experiment, row):
            recorded = sa.load(tmp_path / "a").rounds
            events.append((row["round"], len(recorded)))

        def end(self, experiment, outcome):
            events.append(outcome)

    result = sa.run(tiny, tmp_path / "a", callbacks=[Watch()])
    assert events == [(0, True), (0, 1), (1, 2), (2, 3), (3, 4), result]
    events.clear()
    with pytest.raises(InputError) as error:
        sa.run(tiny, tmp_path / "a", callbacks=[Watch()])
    assert events == [error.value]
    events.clear()
    with locked(tmp_path / "a"), pytest.raises(RunBusyError):
        sa.run(tiny, tmp_path / "a", resume=True, callbacks=[Watch()])
    assert events == []
