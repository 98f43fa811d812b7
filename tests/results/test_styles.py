"""Styles of pictures: sizes, fonts, colours and labels."""

import re

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import stableair as sa
from stableair.results import plot
from stableair.results.curves import line_looks
from stableair.results.grouping import group
from stableair.results.run import Run


def made(accuracy, **settings):
    rows = [{"round": k, "test/accuracy": a} for k, a in enumerate(accuracy)]
    return Run(sa.Experiment().with_(**settings).to_record(), rows)


GRID = [made([0.1, 0.2 + C / 100], receiver=f"mac(C={C})", seed=seed) for C in (10, 2, 5) for seed in (0, 1)]


def names(figure):
    legend = figure.axes[0].get_legend() or figure.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def code_of(call, *args, **options):
    with pytest.raises(sa.InputError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return error.value.code


@pytest.mark.parametrize("style", ["screen", "paper"])
@pytest.mark.parametrize("options", [{}, {"x": "receiver.C"}], ids=["rounds", "argument"])
def test_a_pdf_has_truetype_fonts_only(tmp_path, style, options):
    sa.plot(GRID, out=tmp_path / "a.pdf", style=style, labels=None if options else ["α", "τ = 1", "$C$"], **options)
    content = (tmp_path / "a.pdf").read_bytes()
    kinds = set(re.findall(rb"/Subtype /(Type3|TrueType|CIDFontType2|Type1)\b", content))
    assert kinds and kinds <= {b"TrueType", b"CIDFontType2"}


def test_a_plot_does_not_change_the_settings_of_matplotlib(tmp_path):
    before = dict(matplotlib.rcParams)
    sa.plot(GRID, out=tmp_path / "a.pdf", style="paper", size=(2, 2))
    assert dict(matplotlib.rcParams) == before


def test_the_paper_style_fits_a_column_of_a_journal():
    figure = sa.plot(GRID, style="paper")
    assert tuple(figure.get_size_inches()) == (3.5, 2.4)
    assert figure.axes[0].xaxis.label.get_fontsize() == 8
    assert names(figure) == ["mac(C=2)", "mac(C=5)", "mac(C=10)"], "the caption states the number of seeds"
    assert not (figure.axes[0].get_legend() or figure.legends[0]).get_title().get_text()


def test_the_size_is_the_argument_or_the_setting_of_matplotlib():
    many = [made([0.5, 0.4 + n / 100], clients=n) for n in range(1, 15)]  # their legend is below the axes
    assert tuple(sa.plot(many, size=(3, 2)).get_size_inches()) == (3, 2)
    with matplotlib.rc_context({"figure.figsize": (5, 5)}):
        assert tuple(sa.plot(many).get_size_inches()) == (5, 5)
    assert sa.plot(many).get_size_inches()[1] > 4.8, "the figure grows with the legend"
    assert code_of(sa.plot, GRID, size=(3, 0)) == "out-of-range"
    assert code_of(sa.plot, GRID, size=(3,)) == "wrong-type"


def test_labels_are_in_the_order_of_the_legend():
    figure = sa.plot(GRID, labels=["two", "five", "ten"])
    assert names(figure) == ["two", "five", "ten"]
    assert [line.get_ydata()[1] for line in figure.axes[0].lines] == pytest.approx([0.22, 0.25, 0.3])
    with pytest.raises(sa.InputError) as error:
        sa.plot(GRID, labels=["two"])
    assert (error.value.code, error.value.fields["lines"]) == ("label-count", ["mac(C=2)", "mac(C=5)", "mac(C=10)"])


def test_existing_axes_are_used():
    figure = Figure(figsize=(8, 3))
    left, right = figure.subplots(1, 2)
    assert sa.plot(GRID, ax=left) is figure
    sa.plot(GRID, x="receiver.C", ax=right)
    assert (len(left.lines), list(right.lines[0].get_xdata())) == (3, [2, 5, 10])
    assert tuple(figure.get_size_inches()) == (8, 3)
    assert code_of(sa.plot, GRID, ax=left, size=(3, 2)) == "size-and-ax"


def test_lines_are_equally_wide_and_in_numerical_order_with_sequential_colours():
    axes = sa.plot(GRID).axes[0]
    assert len({line.get_linewidth() for line in axes.lines}) == 1
    lightness = [np.dot(to_rgb(line.get_color()), (0.2126, 0.7152, 0.0722)) for line in axes.lines]
    assert lightness == sorted(lightness)
    assert lightness[0] < lightness[-1] - 0.3


def test_colours_show_an_order_only_where_there_is_one():
    receivers = [made([0.5], receiver=one) for one in ("mac(C=1)", "clip(C=1)", "none()")]
    plain = line_looks(group(receivers))
    assert len({look["linestyle"] for look in plain.values()}) == 3
    ordered = line_looks(group(GRID + receivers[2:]))
    assert len({str(look["linestyle"]) for look in ordered.values()}) == 4, "lines differ in grey"
    assert ordered["none()"]["color"] not in [ordered[f"mac(C={C})"]["color"] for C in (2, 5, 10)]
    both = [made([0.5], receiver=f"{name}(C={C})") for name in ("mac", "clip") for C in (1, 2, 3)]
    assert len({str(look["linestyle"]) for look in line_looks(group(both)).values()}) == 6, "a value occurs twice"


def relative_luminance(colour):
    """The relative luminance of WCAG, for contrasts."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return np.dot(linear, (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize("lines", [3, 6, 9])
def test_ordered_lines_are_visible_on_paper(lines):
    looks = line_looks(group([made([0.5], receiver=f"mac(C={C})") for C in range(1, lines + 1)]))
    assert all(1.05 / (relative_luminance(look["color"]) + 0.05) > 2.6 for look in looks.values())
    assert len({str(look["linestyle"]) for look in looks.values()}) == (lines if lines <= 6 else 1)


def test_the_dark_style_has_light_text_on_a_dark_background():
    figure = sa.plot(GRID, style="dark")
    axes = figure.axes[0]
    assert max(to_rgb(figure.get_facecolor())) < 0.25
    for text in (axes.xaxis.label, axes.title, (axes.get_legend() or figure.legends[0]).get_texts()[0]):
        assert min(to_rgb(text.get_color())) > 0.8
    assert all(max(to_rgb(line.get_color())) > 0.45 for line in axes.lines)


def test_a_picture_for_print_has_more_pixels_per_inch(tmp_path):
    from PIL import Image

    widths = {}
    for style in plot.DPI:
        sa.plot(GRID, out=tmp_path / f"{style}.png", style=style, size=(2, 2))
        widths[style] = Image.open(tmp_path / f"{style}.png").width
    assert widths == {"screen": 300, "dark": 300, "paper": 800}


def test_unknown_styles_and_bands_are_refused():
    assert code_of(sa.plot, GRID, style="ieee") == "wrong-type"
    assert code_of(sa.plot, GRID, band="iqr") == "wrong-type"
