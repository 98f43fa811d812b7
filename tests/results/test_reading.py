"""Runs read from their folders."""

import json

import pytest

import stableair as sa
from helpers.errors import refused
from stableair.errors import CorruptRunError
from stableair.results.checksums import CLIENTS, EXPERIMENT
from stableair.results.reading import find, load, runs_from, with_metric
from stableair.results.run import Run
from stableair.runner import run


def made(accuracy, **settings):
    rows = [{"round": k, "test/accuracy": a} for k, a in enumerate(accuracy)]
    return Run(sa.Experiment(**settings).to_dict(), rows)


@pytest.mark.parametrize("labels", [3, [], [[]], [[1, 2], [3]], [[1, -2]], [[1.5]], [[True]], [["1"]], [3]])
def test_damaged_label_counts_are_refused(tiny, tmp_path, labels):
    folder = run(tiny.with_(rounds=1), tmp_path / "a").folder
    (folder / CLIENTS).write_text(json.dumps({"labels": labels}))
    with pytest.raises(CorruptRunError) as error:
        load(folder)
    assert error.value.fields["path"] == folder / CLIENTS


def test_load_returns_all_runs_below_a_folder(tiny, tmp_path, caplog):
    for seed in (0, 1):
        run(tiny.with_(seed=seed, rounds=1), tmp_path / f"seed{seed}")
    assert [one.settings["seed"] for one in load(tmp_path)] == [0, 1]
    assert load(tmp_path / "seed1").settings["seed"] == 1
    (tmp_path / "seed0" / EXPERIMENT).write_text("{")
    (only,) = load(tmp_path)
    assert only.folder == tmp_path / "seed1"
    assert "seed0" in caplog.text, "a warning names the run that is left out"


def test_runs_without_the_metric_are_returned_separately():
    runs = [made([0.5]), made([])]
    assert with_metric(runs, "test/accuracy") == (runs[:1], runs[1:])


def test_a_metric_may_be_missing_in_the_first_round():
    """No client was received in it, or the run was continued with a profile."""
    run = made([0.5, 0.6])
    run.rounds[1]["receiver/C"] = 1.0
    assert with_metric([run], "receiver/C") == ([run], [])


def test_bad_sources_and_metrics_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for folders in ([tmp_path / "missing"], [tmp_path / "empty"], []):
        refused("no-run", find, folders)
    for source in (3, [3]):
        refused("wrong-type", runs_from, source)
    assert refused("unknown-metric", with_metric, [made([1])], "accuracy").fields["recorded"] == ["test/accuracy"]
    refused("unknown-metric", with_metric, [made([])], "test/accuracy")


def test_a_run_that_is_passed_several_times_is_used_once(tiny, tmp_path):
    short, long = (run(tiny.with_(rounds=rounds), tmp_path / str(rounds)) for rounds in (1, 2))
    other = run(tiny.with_(seed=1, rounds=1))
    runs, left_out = runs_from([short, other, short, tmp_path / "2", long])
    assert sorted((one.settings["seed"], len(one)) for one in runs) == [(0, 2), (1, 1)]
    assert f"{tmp_path / '1'}: the same run as {tmp_path / '2'}" in left_out
