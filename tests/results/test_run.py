"""Run folders read again: columns, data frames, groups of runs."""

import json

import pytest

import stableair as sa
from helpers.runs import started
from stableair.errors import CorruptRunError
from stableair.results.checksums import CLIENTS, EXPERIMENT
from stableair.results.run import Run, group, load
from stableair.runner import run


def test_load_gives_columns_and_a_data_frame(tiny, tmp_path):
    result = load(run(tiny, tmp_path / "a").folder)
    assert len(result) == len(result["test/loss"]) == 4
    assert result.to_pandas()["test/loss"].tolist() == result["test/loss"]
    assert result.experiment == tiny
    with pytest.raises(sa.InputError) as error:
        result["accuracy"]
    assert (error.value.code, error.value.fields["metric"]) == ("unknown-metric", "accuracy")
    assert error.value.fields["recorded"] == list(result.rounds[0])[1:], "the number of the round is no metric"
    (tmp_path / "empty").mkdir()
    with pytest.raises(sa.InputError) as error:
        load(tmp_path / "empty")
    assert error.value.code == "no-run"
    (tmp_path / EXPERIMENT).write_text('{"data": ["digits"]}')
    with pytest.raises(CorruptRunError) as corrupt:
        load(tmp_path)
    assert (corrupt.value.code, corrupt.value.fields["path"]) == ("corrupt-run", tmp_path / EXPERIMENT)


@pytest.mark.parametrize("labels", [3, [], [[]], [[1, 2], [3]], [[1, -2]], [[1.5]], [[True]], [["1"]], [3]])
def test_damaged_label_counts_are_refused(tiny, tmp_path, labels):
    folder = run(tiny.with_(rounds=1), tmp_path / "a").folder
    (folder / CLIENTS).write_text(json.dumps({"labels": labels}))
    with pytest.raises(CorruptRunError) as error:
        load(folder)
    assert error.value.fields["path"] == folder / CLIENTS


def test_a_plot_of_a_run_folder_needs_no_torch(finished, tmp_path):
    code = (
        "import sys, stableair as sa\n"
        "run = sa.load(sys.argv[1])\n"
        "sa.plot([run], out=sys.argv[2])\n"
        "sa.plot([sys.argv[1]])\n"
        "heavy = {'torch', 'scipy.stats', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    with started(code, finished[1].folder, tmp_path / "a.png") as process:
        assert process.wait(60) == 0, process.stderr.read()
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_runs_that_differ_in_a_default_alone_are_two(finished, tmp_path):
    one = finished[0].to_record()
    other = json.loads(json.dumps(one))
    other["noise"], other["arguments"]["noise"] = "sas()", [{"alpha": 1.5, "tau": 0.7}]
    plain = one | {"noise": "sas()"}
    assert Run(plain, []).identity != Run(other, []).identity
    assert list(group([Run(plain, []), Run(other, [])])) == ["mac(C=auto)", "mac(C=auto) (2)"]
    assert Run(one, []).identity == Run(plain, []).identity, "the same thing said otherwise"


def test_load_returns_all_runs_below_a_folder(tiny, tmp_path, caplog):
    for seed in (0, 1):
        run(tiny.with_(seed=seed, rounds=1), tmp_path / f"seed{seed}")
    assert [one.settings["seed"] for one in load(tmp_path)] == [0, 1]
    assert load(tmp_path / "seed1").settings["seed"] == 1
    (tmp_path / "seed0" / EXPERIMENT).write_text("{")
    (only,) = load(tmp_path)
    assert only.folder == tmp_path / "seed1"
    assert "seed0" in caplog.text, "a warning names the run that is left out"


def test_a_run_draws_itself_into_given_axes(tiny):
    from matplotlib.figure import Figure

    result, axes = run(tiny), Figure().subplots()
    assert result.plot("train/loss", ax=axes, label="mine") is axes
    (line,) = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3, 4], result["train/loss"])
    assert (axes.get_ylabel(), line.get_label()) == ("training loss", "mine")
    with pytest.raises(sa.InputError) as error:
        result.plot(ax=3)
    assert error.value.code == "wrong-type"


def test_the_picture_of_a_run_has_a_grid_and_marks_its_divergence(tiny):
    from matplotlib.figure import Figure

    rounds = [{"round": k, "test/loss": loss} for k, loss in enumerate((3.0, 2.0, None))]
    axes = Run(tiny.to_record(), [*rounds[:2], rounds[2] | {"diverged": True}]).plot(
        "test/loss", ax=Figure().subplots()
    )
    curve, cross = axes.lines
    assert (cross.get_marker(), list(cross.get_xdata()), list(cross.get_ydata())) == ("x", [2], [2.0])
    assert cross.get_color() == curve.get_color()
    assert axes.get_xgridlines()[0].get_visible()


def test_a_run_without_axes_is_drawn_in_a_new_pyplot_figure(tiny):
    from matplotlib import pyplot

    result = run(tiny.with_(rounds=1))
    first, second = result.plot(), result.plot("test/loss")
    assert first.figure is not second.figure
    assert {first.figure.number, second.figure.number} <= set(pyplot.get_fignums())
    pyplot.close("all")
