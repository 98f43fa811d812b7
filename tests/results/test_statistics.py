"""The statistics of reports and comparisons."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import stableair as sa
from stableair.results import statistics
from stableair.results.statistics import (
    MIN_SEEDS,
    compare_groups,
    confidence_interval,
    equal_differences,
    holm,
    linear_mean,
    mean_and_std,
    p_value,
    paired_difference,
    snrs,
)

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def samples(n, seed=0):
    rng = np.random.default_rng(seed)
    level = 0.7 + 0.1 * rng.standard_normal(n)  # differs between seeds by more than the methods do
    return level, level - 0.02 + 0.002 * rng.standard_normal(n)


def test_mean_and_std_ignore_missing_values():
    table = np.array([[1.0, math.nan, math.nan], [2.0, 4.0, math.nan], [6.0, 8.0, math.nan]])
    mean, std = mean_and_std(table)
    np.testing.assert_allclose(mean, [3, 6, math.nan])
    np.testing.assert_allclose(std, [np.std([1, 2, 6], ddof=1), np.std([4, 8], ddof=1), 0])


@pytest.mark.parametrize("n", [5, 6, 20])
def test_a_pair_agrees_with_scipy(n):
    first, second = samples(n)
    pair = paired_difference(("a", "b"), first, second)
    expected = stats.ttest_rel(first, second)
    assert (pair.better, pair.worse, pair.seeds) == ("a", "b", n)
    assert pair.difference == pytest.approx(np.mean(first - second))
    assert pair.difference / pair.error == pytest.approx(expected.statistic)
    assert pair.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert pair.p == pytest.approx(expected.pvalue)


def test_the_better_one_comes_first_in_any_order():
    first, second = samples(6)
    assert paired_difference(("a", "b"), first, second) == paired_difference(("b", "a"), second, first)


def test_one_seed_has_no_uncertainty_and_few_seeds_have_no_p():
    assert paired_difference(("a", "b"), [0.5], [0.25]) == ("a", "b", 1, 0.25, None, None, None)
    few = paired_difference(("a", "b"), *samples(MIN_SEEDS - 1))
    assert few.p is None
    assert few.interval[0] < few.difference < few.interval[1]


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.05])
def test_differences_equal_up_to_rounding_have_no_p_value(shift):
    first = np.array([0.3, 0.6, 0.7, 0.8, 0.9, 0.45])
    second = first - shift
    assert (np.ptp(first - second) > 0) == (shift > 0), "the last bits of the differences differ"
    assert equal_differences(first, second)
    assert p_value(first, second) is None
    pair = paired_difference(("a", "b"), first, second)
    assert (pair.p, pair.mark, pair.error) == (None, "", 0)
    assert pair.interval == (pair.difference, pair.difference)
    assert pair.difference == pytest.approx(shift)


def test_the_smallest_real_difference_has_a_p():
    """One of 10,000 test images, in one of ten rounds of one seed."""
    first = np.array([0.3, 0.6, 0.7, 0.8, 0.9])
    second = first - 0.1
    second[0] -= 1e-5
    assert not equal_differences(first, second)
    assert p_value(first, second) == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert p_value(first, second) < 1e-10


def test_an_interval_has_its_nominal_coverage():
    rng, n, repeats = np.random.default_rng(0), 5, 2000
    draws = rng.standard_normal((repeats, n))
    intervals = (confidence_interval(d.mean(), d.std(ddof=1) / n**0.5, n) for d in draws)
    covered = sum(low <= 0 <= high for low, high in intervals)
    assert abs(covered / repeats - 0.95) < 4 * (0.95 * 0.05 / repeats) ** 0.5


def test_holm_against_a_manual_computation():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06]), "3 p, 2 p, 1 p, never falling"
    assert holm([0.01, None, 0.5]) == [pytest.approx(0.02), None, pytest.approx(0.5)]
    assert holm([0.01, None, 0.5], tests=3) == [pytest.approx(0.03), None, 1.0], "a planned test counts"
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(P_VALUES)
def test_holm_is_between_no_correction_and_bonferroni(p_values):
    corrected = holm(p_values)
    m = len(p_values)
    assert all(p <= c <= min(1, m * p) for p, c in zip(p_values, corrected, strict=True))
    assert min(corrected) == min(1, m * min(p_values)), "the smallest p-value is multiplied by m"
    order = np.argsort(p_values, kind="stable")
    assert all(np.diff(np.array(corrected)[order]) >= 0), "the order is kept"


def test_holm_seldom_marks_equal_methods():
    """Without a difference, some pair of a family is marked in at most 5 % of the comparisons."""
    rng, marked, repeats = np.random.default_rng(1), 0, 200
    for _ in range(repeats):
        draws = rng.standard_normal((4, 5))
        p_values = [p_value(draws[i], draws[j]) for i in range(4) for j in range(i)]
        marked += any(p < statistics.SIGNIFICANCE for p in holm(p_values))
    assert marked / repeats < 0.05 + 3 * (0.05 * 0.95 / repeats) ** 0.5


def test_the_mean_snr_in_db_and_of_the_linear_mean():
    run = sa.Run({}, [{"round": k, "channel/snr_db": db} for k, db in enumerate((-10.0, -30.0, None))])
    assert snrs([run]) == [-10, -30]
    assert snrs([run, run], 1) == [-10, -10]
    assert linear_mean([-10, -30]) == pytest.approx(10 * math.log10(0.0505))


def made(accuracy, **settings):
    rows = [{"round": k, "test/accuracy": a, "diverged": a is None} for k, a in enumerate(accuracy)]
    return sa.Run(sa.Experiment(**settings).to_dict(), rows)


def test_a_run_that_diverged_later_than_the_other_run_ended_has_still_diverged():
    short, wild = made([0.2, 0.4]), made([0.5, 0.6, 0.7, None], receiver="none()")
    (pair,) = compare_groups({"short": [short], "wild": [wild]}, "test/accuracy")
    assert (pair.better, pair.difference) == ("short", pytest.approx(short.settled("test/accuracy")))


def test_a_pair_of_few_seeds_is_no_test_of_the_family():
    rng = np.random.default_rng(0)
    groups = {
        name: [made([a], receiver=f"mac(C={i + 1})", seed=seed) for seed, a in enumerate(rng.normal(0.5, 0.02, n))]
        for i, (name, n) in enumerate({"a": 6, "b": 6, "few": 3}.items())
    }
    found = {frozenset((pair.better, pair.worse)): pair for pair in compare_groups(groups, "test/accuracy")}
    raw = p_value(*([run.settled("test/accuracy") for run in groups[name]] for name in "ab"))
    assert found[frozenset("ab")].p == pytest.approx(raw), "the only test of three pairs"
    assert found[frozenset(("a", "few"))].p is None
