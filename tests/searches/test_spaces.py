import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stableair as sa
from stableair.errors import InputError
from stableair.searches import OneOf, Range, search, space
from stableair.searches.spaces import parse_spaces


class ScriptedTrial:
    """An Optuna trial that returns the same share of every range."""

    def __init__(self, share):
        self.share = share

    def suggest_float(self, key, low, high, log):
        return Range(low, high, log=log).at(self.share)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.99, 1.0])
def test_rounded_values_stay_in_a_narrow_range(share):
    value = Range(0.9991, 0.9999).suggest(ScriptedTrial(share), "receiver.q")
    assert 0.9991 <= value <= 0.9999
    assert value == pytest.approx(0.9991 + share * 0.0008, abs=1e-6), "enough digits to distinguish 100 values"


@pytest.mark.parametrize(
    ("range_", "value", "rounded"),
    [
        (Range(0.01, 10, log=True), 0.123456, 0.123),
        (Range(1, 100_000, log=True), 31622.7766, 31600),
        (Range(1, 2), 1.23456, 1.23),
        (Range(0.1234, 9), 0.12345, 0.1234),
        (Range(0.1, 0.98765), 0.987649, 0.98765),
        (Range(0, 1), 0.0, 0.0),
        (Range(-2, -1), -1.23456, -1.23),
        (Range(-1e-5, 1e-5), 1.23456e-6, 1.23e-6),
    ],
)
def test_three_digits_unless_the_range_needs_more(range_, value, rounded):
    assert range_.rounded(value) == rounded


@given(
    ends=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=2, unique=True),
    share=st.floats(0, 1),
    log=st.booleans(),
)
def test_values_stay_in_their_range(ends, share, log):
    low, high = sorted(map(abs, ends)) if log else sorted(ends)
    if low == high or not math.isfinite(high - low) or (log and low <= 0):
        return
    chosen = Range(low, high, log=log)
    assert low <= chosen.at(share) <= high
    assert low <= chosen.rounded(chosen.at(share)) <= high
    assert space("receiver.C", str(chosen)) == chosen, "the text of a range contains its exact ends"


def test_a_very_wide_logarithmic_range_is_finite():
    wide = space("lr", "1e-300:1e38:log")
    assert wide.at(0.5) == pytest.approx(1e-131)
    assert wide.at(0) == 1e-300
    assert wide.at(1) == 1e38


def test_ranges_that_differ_in_the_seventh_digit_are_different_searches(tiny, tmp_path):
    base = tiny.with_(rounds=1)
    search(base, {"receiver.C": "0.12345678:1"}, tmp_path, trials=1)
    with pytest.raises(InputError) as error:
        search(base, {"receiver.C": "0.12345679:1"}, tmp_path, trials=1)
    assert error.value.code == "another-search"
    assert error.value.fields["different"] == ["receiver.C"]


@pytest.mark.parametrize(
    ("settings", "key", "whole"),
    [
        ({"participation": "sample(m=1)"}, "participation.m", True),
        ({"fading": "block(rounds=2)"}, "fading.rounds", True),  # int | None
        ({"receiver": "mac(C=1)"}, "receiver.C", False),
        ({"partition": "dirichlet(beta=1)"}, "partition.beta", False),
        ({}, "local_epochs", True),
        ({}, "lr", False),
    ],
)
@pytest.mark.parametrize("space_", ["1:5", Range(1, 5)])
def test_the_annotation_determines_integer_ranges(settings, key, whole, space_):
    assert parse_spaces(sa.Experiment(**settings), {key: space_}) == {key: Range(1, 5, int=whole)}


def test_an_annotation_in_quotes_is_evaluated(registries):
    @sa.receiver("quoted")
    def quoted(k: "int", C: "float | int" = 1):
        return lambda g: g

    base = sa.Experiment(receiver="quoted(k=1)")
    assert parse_spaces(base, {"receiver.k": "1:5"})["receiver.k"].int
    assert not parse_spaces(base, {"receiver.C": "1:5"})["receiver.C"].int


@pytest.mark.parametrize(
    ("key", "space_"),
    [
        ("participation.m", "0.5:3"),
        ("participation.m", Range(1, 2.5)),
        ("receiver.C", Range(2, 1)),
        ("receiver.C", Range(0, 1, log=True)),
        ("receiver.C", Range(0, math.inf)),
        ("receiver.C", Range(math.nan, 1)),
        ("receiver.C", "-1e308:1e308"),
    ],
)
def test_empty_ranges_are_refused(key, space_):
    with pytest.raises(InputError) as error:
        parse_spaces(sa.Experiment(participation="sample(m=1)"), {key: space_})
    assert error.value.code == "invalid-range"
    assert error.value.fields["name"] == key


def test_a_list_without_values_is_refused():
    with pytest.raises(InputError) as error:
        parse_spaces(sa.Experiment(), {"receiver.C": OneOf(())})
    assert error.value.code == "empty-space"


@pytest.mark.parametrize("values", [[0.1, 1, 10], (0.1, 1, 10)])
def test_a_list_of_values_is_a_search_space(values):
    assert parse_spaces(sa.Experiment(), {"receiver.C": values}) == {"receiver.C": OneOf((0.1, 1, 10))}


def test_an_empty_list_is_refused():
    with pytest.raises(InputError) as error:
        parse_spaces(sa.Experiment(), {"receiver.C": []})
    assert error.value.code == "empty-space"
