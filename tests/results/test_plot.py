import math

import numpy as np
import pytest
from matplotlib.figure import Figure

import stableair as sa
from stableair.results import plot
from stableair.results.curves import curves
from stableair.results.grouping import group
from stableair.results.reading import find
from stableair.results.run import Run
from stableair.results.styles import LINES, drawing_style


def made(accuracy, **settings):
    rows = [{"round": k, "test/accuracy": a} for k, a in enumerate(accuracy)]
    return Run(sa.Experiment(**settings).to_dict(), rows)


def texts(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_runs_that_differ_only_in_the_seed_are_one_line_with_a_band():
    groups = group([made([0.1, 0.2], seed=0), made([0.3, 0.4], seed=1, rounds=7), made([0.5], receiver="none()")])
    assert {name: len(runs) for name, runs in groups.items()} == {"mac(C=1)": 2, "none()": 1}
    axes = curves(groups).axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.2, 0.3])
    assert list(axes.lines[0].get_xdata()) == [1, 2], "the first round is 1"
    (band,) = axes.collections
    low, high = band.get_paths()[0].vertices[:, 1].min(), band.get_paths()[0].vertices[:, 1].max()
    assert (low, high) == (pytest.approx(0.2 - 0.02**0.5), pytest.approx(0.3 + 0.02**0.5))  # one standard deviation
    assert texts(axes.figure) == ["mac(C=1) (2 seeds)", "none()"]


def test_a_legend_shows_names_that_begin_with_an_underscore():
    runs = [made([0.1, 0.2]), made([0.3, 0.4], receiver="none()")]
    assert texts(sa.plot(runs, labels=["_mine", "other"])) == [" _mine", "other"]


def test_the_default_metric_is_the_accuracy_on_the_data_of_the_evaluation():
    searched = Run(sa.Experiment(evaluate="validation").to_dict(), [{"round": 0, "validation/accuracy": 0.25}])
    for axes in (searched.plot(ax=Figure().subplots()), sa.plot(searched).axes[0]):
        assert (axes.get_ylabel(), list(axes.lines[0].get_ydata())) == ("validation accuracy", [0.25])
    planned = Run(sa.Experiment().to_dict(), [])  # not started, so it does not determine the metric
    assert sa.plot([planned, searched]).axes[0].get_ylabel() == "validation accuracy"
    assert sa.plot([searched, made([0.5])]).axes[0].get_ylabel() == "test accuracy"


def test_a_legend_does_not_cover_a_line():
    calm, wild = ([0.5] * 40, [0.0, 1.0] * 20)  # the second one fills the whole axes
    runs = {name: [made(accuracy)] for name, accuracy in (("calm", calm), ("wild", wild))}
    assert curves({"calm": runs["calm"]}).axes[0].get_legend()
    crowded = curves(runs)
    assert crowded.axes[0].get_legend() is None
    (outside,) = crowded.legends
    assert [text.get_text() for text in outside.get_texts()] == ["calm", "wild"]


def test_a_diverged_run_ends_with_a_cross_and_a_note_in_the_legend():
    run = made([0.1, 0.2, math.nan])
    run.rounds[-1] |= {"test/accuracy": None, "diverged": True}
    axes = curves({"noisy": [run]}).axes[0]
    assert texts(axes.figure) == ["noisy, diverged at round 3"]
    line, cross = axes.lines
    assert np.isnan(line.get_ydata()[2])
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (2, 0.2), "at the last complete round"


def test_runs_of_different_length_are_averaged_over_the_rounds_that_exist():
    axes = curves({"a": [made([0.2, 0.4, 0.6]), made([0.4], seed=1)]}).axes[0]
    assert texts(curves({"a": [made([1]), made([1], chunk=3)]})) == ["a"], "one seed twice is not two seeds"
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.3, 0.4, 0.6])


def test_runs_are_found_below_a_folder_and_pictures_written(tiny, tmp_path):
    for seed in (0, 1):
        sa.run(tiny.with_(seed=seed), tmp_path / "runs" / f"seed{seed}")
    found, unreadable = find([tmp_path / "runs", tmp_path / "runs" / "seed0"])
    assert (len(found), unreadable) == (2, []), "each once"
    figure = curves(group(found), "channel/snr_db")
    assert figure.axes[0].get_ylabel() == "SNR in dB"
    for name in ("a.png", "below/a.pdf"):
        assert plot.save(figure, tmp_path / name).stat().st_size > 1000


def code_of(call, *args):
    """The code of the InputError that a call raises."""
    with pytest.raises(sa.InputError) as error:
        call(*args)
    return error.value.code


def test_invalid_input_is_refused(tmp_path):
    assert code_of(curves, {"a": [made([])]}) == "no-rounds"
    figure = curves({"a": [made([1])]})
    assert code_of(plot.save, figure, tmp_path / "picture") == "unknown-format"
    assert code_of(plot.save, figure, tmp_path / "a.docx") == "unknown-format"
    (tmp_path / "file").write_text("")
    assert code_of(plot.save, figure, tmp_path / "file" / "a.png") == "cannot-write"


def test_curves_differ_in_colour_and_line_style():
    axes = curves({str(n): [made([0.1, 0.2])] for n in range(20)}).axes[0]
    looks = {(line.get_color(), line._unscaled_dash_pattern[1] or line.get_linestyle()) for line in axes.lines}
    assert len(looks) == 20
    assert len({dash for _, dash in looks}) == len(LINES)
    assert axes.get_xlim()[0] > 0, "there is no round 0"


def test_a_large_loss_makes_the_axis_logarithmic_and_many_lines_put_the_legend_below():
    runs = [made([1.0], clients=n) for n in range(1, 9)]
    for run in runs:
        run.rounds[0]["test/loss"] = 10.0 ** run.settings["clients"]
    figure = curves(group(runs), "test/loss")
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_legend() is None
    assert len(figure.legends[0].get_texts()) == 8


@pytest.mark.parametrize(("style", "width"), [("screen", 6.4), ("paper", 3.5)])
def test_long_names_put_the_legend_below_in_lines_as_wide_as_the_figure(style, width):
    name = ", ".join(f"setting{i}=value{i}" for i in range(12))
    with drawing_style(style):
        figure = curves({"short": [made([0.1, 0.2])], name: [made([0.2, 0.3], clients=5)]})
        usual = curves({"short": [made([0.1, 0.2])]})
    assert figure.axes[0].get_legend() is None
    _, long = (text.get_text() for text in figure.legends[0].get_texts())
    assert " ".join(long.split()) == name
    for each in (figure, usual):
        each.draw_without_rendering()
    legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert figure.get_figwidth() == width
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.width, "it is not cut at the edges"
    assert legend.width > 0.7 * figure.bbox.width, "it uses the width"
    assert legend.y1 < axes.y0
    assert axes.width > 0.8 * figure.bbox.width
    usual_height = usual.axes[0].get_window_extent().height
    assert axes.height > 0.9 * usual_height, "the figure is higher, not the axes smaller"


def test_names_too_long_for_a_chosen_size_are_shortened_with_a_warning(caplog):
    runs = [made([0.1, 0.2 + i / 10], noise=f"sas(tau={i})") for i in range(1, 8)]
    long = [f"a name of many words that does not fit into one line, number {i}" for i in range(7)]
    figure = sa.plot(runs, size=(3.5, 3), labels=long)
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert all("…" in text and text.endswith(f"number {i}") for i, text in enumerate(shown))
    assert caplog.text.count("labels are shortened") == 1
    assert tuple(figure.get_size_inches()) == (3.5, 3)


def test_a_legend_does_not_cover_a_line_between_two_points():
    """The lines have points at the left and right edges only."""
    crossing = {str(y): [made([y, 1 - y])] for y in np.linspace(0, 1, 6)}
    assert curves(crossing).axes[0].get_legend() is None
