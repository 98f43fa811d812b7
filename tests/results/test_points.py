"""Plots of a metric against an argument."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from scipy import stats

import stableair as sa
from stableair.results.points import settled
from stableair.results.run import Run


def made(accuracy, metric="test/accuracy", **settings):
    rows = [{"round": k, metric: a} for k, a in enumerate(accuracy)]
    return Run(sa.Experiment().with_(**settings).to_record(), rows)


def grid(*values, **more):
    """Three seeds at each value of C; the accuracy is 0.1, 0.2 and 0.6 above a tenth of the position of the value."""
    return [
        made([0.0, i / 10 + a], receiver=f"mac(C={C})", seed=seed, **more)
        for i, C in enumerate(values)
        for seed, a in enumerate((0.1, 0.2, 0.6))
    ]


def bars(axes):
    """The half lengths of the error bars of a line."""
    (container,) = axes.containers
    return [np.ptp(segment[:, 1]) / 2 for segment in container[2][0].get_segments()]


def names(axes):
    legend = axes.get_legend() or axes.figure.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def test_a_point_is_the_mean_over_the_seeds_at_its_value():
    axes = sa.plot(grid(10, 0.1, 1), x="receiver.C").axes[0]
    (line,) = axes.lines[:1]
    assert list(line.get_xdata()) == [0.1, 1, 10]
    np.testing.assert_allclose(line.get_ydata(), [0.4, 0.5, 0.3])
    assert line.get_marker() == "o"
    assert axes.get_xlabel() == "clipping threshold $C$"


@pytest.mark.parametrize(
    ("band", "factor"), [("std", 1), ("sem", 1 / 3**0.5), ("ci95", stats.t.ppf(0.975, 2) / 3**0.5)]
)
def test_bars_and_bands_show_the_spread_over_seeds(band, factor):
    half = factor * np.std([0.1, 0.2, 0.6], ddof=1)
    np.testing.assert_allclose(bars(sa.plot(grid(1, 2), x="receiver.C", band=band).axes[0]), [half] * 2)
    (collection,) = sa.plot(grid(1), band=band).axes[0].collections
    assert np.ptp(collection.get_paths()[0].vertices[:, 1][-3:]) > 0
    last = [y for x, y in collection.get_paths()[0].vertices if x == 2]
    assert (min(last), max(last)) == (pytest.approx(0.3 - half), pytest.approx(0.3 + half))


@pytest.mark.parametrize(
    ("values", "scale"),
    [((0.01, 0.1, 1), "log"), ((0.1, 0.2, 0.3), "linear"), ((1, 100), "log"), (range(1, 40, 5), "linear")],
)
def test_the_axis_is_linear_or_logarithmic_by_its_values(values, scale):
    assert sa.plot(grid(*values), x="receiver.C").axes[0].get_xscale() == scale


def test_runs_without_a_number_are_horizontal_lines_and_the_legend_is_in_order():
    ideal = {"fading": "unit()", "noise": "none()", "receiver": "none()"}
    runs = [made([0.0, 0.7], **ideal), *grid(1, 2), *grid("auto"), made([0.0, 0.6], receiver="none()")]
    axes = sa.plot(runs, x="receiver.C", style="dark").axes[0]
    assert names(axes) == ["mac (3 seeds)", "ideal", "none()", "mac(C=auto) (3 seeds)"]
    heights = {line.get_label(): set(line.get_ydata()) for line in axes.lines[1:]}
    assert (heights["ideal"], heights["none()"]) == ({0.7}, {0.6})
    labelled = sa.plot(runs, x="receiver.C", labels=["MAC", "I", "N", "A"]).axes[0]
    assert names(labelled) == ["MAC", "I", "N", "A"]
    assert [line.get_label() for line in labelled.lines if set(line.get_ydata()) == {0.6}] == ["N"]


def test_several_lines_have_sequential_colours_if_they_are_ordered():
    runs = [run for tau in (0.3, 0.1, 0.2) for run in grid(1, 2, **{"noise.tau": tau})]
    axes = sa.plot(runs, x="receiver.C").axes[0]
    assert [name.split(" (3")[0] for name in names(axes)] == [f"sas(tau={tau})" for tau in (0.1, 0.2, 0.3)]
    lines = [line for line in axes.lines if line.get_label() in names(axes)]
    green = [to_rgb(line.get_color())[1] for line in lines]
    assert green == sorted(green), "in viridis, the green channel increases"
    assert len({line.get_linestyle() for line in lines}) == 3, "lines differ in grey"


def receivers(*specs, **more):
    """Two seeds of each receiver."""
    return [made([0.5 + seed / 10], receiver=spec, seed=seed, **more) for spec in specs for seed in (0, 1)]


def ticks(axes):
    return dict(zip(axes.get_xticks(), (text.get_text() for text in axes.get_xticklabels()), strict=True))


def test_texts_are_on_an_axis_of_texts_without_a_line_between_them():
    axes = sa.plot(receivers("mac(C=2)", "none()"), x="receiver").axes[0]
    assert list(axes.lines[0].get_xdata()) == [0, 1]
    assert ticks(axes) == {0: "mac(C=2)", 1: "none()"}
    assert axes.lines[0].get_linestyle() == "None"


def test_lines_on_an_axis_of_texts_are_beside_each_other():
    """Points and error bars at the same position would hide each other."""
    noises = ["markov(p=0.2)", "sas(tau=0.5)", "sas(tau=0.7)"]
    axes = sa.plot(
        [run for noise in noises for run in receivers("mac(C=2)", "none()", noise=noise)], x="receiver"
    ).axes[0]
    assert names(axes) == ["markov (2 seeds)", "sas(tau=0.5) (2 seeds)", "sas(tau=0.7) (2 seeds)"]
    points = np.array([line.get_xdata() for line in axes.lines if line.get_marker() == "o"])
    bars = np.array([[segment[0, 0] for segment in each[2][0].get_segments()] for each in axes.containers])
    np.testing.assert_allclose(points.mean(axis=0), [0, 1])
    assert (np.diff(points, axis=0) >= 0.1 - 1e-9).all()
    np.testing.assert_allclose(points, bars)


LONG = "markov(good='sas(alpha=1.8, tau=0.2)', bad='student_t(df=3, scale=2)', p=0.2, q=0.4)"
OTHER = "markov(good='sas(alpha=1.7, tau=0.2)', bad='sas(alpha=1.2, tau=2)', p=0.3, q=0.5)"


@pytest.mark.parametrize("style", ["screen", "paper"])
@pytest.mark.parametrize(
    ("noises", "labels"),
    [
        (["sas(tau=0.5)", "none()"], ["sas(tau=0.5)", "none()"]),
        (["markov(bad='sas(tau=2)', p=0.3)", "none()"], ["markov(bad='sas(tau=2)',\np=0.3)", "none()"]),
        ([LONG, OTHER, "none()"], ["1", "2", "3"]),
    ],
    ids=["short", "two lines", "numbers"],
)
def test_texts_of_any_length_leave_the_axes_their_size(noises, labels, style):
    usual = sa.plot(grid(1, 2), x="receiver.C", style=style)
    figure = sa.plot([run for noise in noises for run in receivers("none()", noise=noise)], x="noise", style=style)
    sizes = []
    for each in (usual, figure):
        each.draw_without_rendering()
        sizes.append(np.array(each.axes[0].get_window_extent().size))
    assert (sizes[1] > 0.75 * sizes[0]).all()
    axes = figure.axes[0]
    assert list(ticks(axes).values()) == labels
    explained = " ".join(axes.get_xlabel().split())
    assert explained == ("noise" if labels[0] != "1" else f"noise 1: {LONG} 2: {OTHER} 3: none()")
    inside = axes.get_tightbbox()
    assert 0 <= inside.x0 < inside.x1 <= figure.bbox.width
    assert 0 <= inside.y0 < inside.y1 <= figure.bbox.height


def test_texts_that_fit_only_rotated_are_rotated():
    axes = sa.plot(receivers(*(f"quantile_clip(q=0.{i})" for i in range(1, 8))), x="receiver").axes[0]
    assert [text.get_rotation() for text in axes.get_xticklabels()] == [25] * 7


def test_a_run_that_diverged_has_accuracy_0_and_no_other_metric():
    for metric, value in (("test/accuracy", 0.0), ("validation/accuracy", 0.0), ("test/loss", math.nan)):
        run = made([0.5, None], metric)
        run.rounds[-1]["diverged"] = True
        np.testing.assert_equal(settled(run, metric), value)
    assert settled(made([0.0] * 10 + [0.4, 0.6] * 5), "test/accuracy") == pytest.approx(0.5)
    assert math.isnan(settled(made([None, None], "channel/snr_db"), "channel/snr_db")), "no interference, no SNR"


def test_an_unknown_argument_is_refused():
    with pytest.raises(sa.InputError) as error:
        sa.plot(grid(1, 2), x="receiver.D")
    assert (error.value.code, error.value.fields["allowed"]) == (
        "unknown-x",
        ["round", "receiver.C", "seed"],
    )
