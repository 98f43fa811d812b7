"""Texts that fit into a width."""

import pytest

from stableair.results.wrapping import shorten, text_width, wrap

TEXT = "markov(good='sas(tau=0.1)', bad='sas(tau=2)', p=0.2, q=0.5), mac(C=auto)"


@pytest.mark.parametrize("width", [120, 150, 200])
def test_lines_are_full_but_not_too_wide(width):
    lines = wrap(TEXT, width, 8).splitlines()
    assert " ".join(" ".join(lines).split()) == TEXT
    assert all(text_width(line, 8) <= width for line in lines)
    assert len(lines) <= text_width(TEXT, 8) / width + 2


def test_a_text_that_fits_is_unchanged():
    assert wrap(TEXT, text_width(TEXT, 8), 8) == TEXT
    assert shorten(TEXT, text_width(TEXT, 8), 8) == TEXT


def test_a_word_wider_than_a_line_is_broken_only_if_allowed():
    assert "".join(wrap("quantile_clip(q=0.9)", 40, 8, indent="").split()) == "quantile_clip(q=0.9)"
    assert text_width(wrap("quantile_clip(q=0.9)", 40, 8), 8) <= 40
    assert wrap("quantile_clip(q=0.9)", 40, 8, break_words=False) == "quantile_clip(q=0.9)"


def test_a_formula_is_as_wide_as_it_is_drawn():
    assert text_width(r"$\alpha$", 8) < text_width(r"\alpha", 8) / 2


def test_a_shortened_text_keeps_its_start_and_its_end():
    short = shorten(TEXT, 100, 8)
    assert 90 < text_width(short, 8) <= 100
    start, end = short.split("…")
    assert TEXT.startswith(start) and TEXT.endswith(end) and abs(len(start) - len(end)) <= 1
