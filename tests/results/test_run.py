"""Runs: columns, data frames, pictures."""

import pytest

import stableair as sa
from helpers.runs import started
from stableair.errors import CorruptRunError
from stableair.results.checksums import EXPERIMENT
from stableair.results.reading import load
from stableair.results.run import Run
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
