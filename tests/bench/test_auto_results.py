"""bench/auto_results.py: the digest of the rule, the noiseless reference, and the distribution of differences."""

import importlib

import pytest

import stableair as sa
from helpers import ROOT
from helpers.isolation import restored_registries

RULE = '''
"""A module."""

def rule(g):
    """A rule."""
    return 2 * g  # twice
'''


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("auto_results")


@pytest.mark.parametrize(("old", "new"), [("A rule", "Any rule"), ("# twice", ""), ('    """A rule."""\n', "")])
def test_docstrings_and_comments_do_not_change_the_digest(bench, old, new):
    assert bench.rule_digest(RULE.replace(old, new)) == bench.rule_digest(RULE)


def test_code_changes_the_digest(bench):
    assert bench.rule_digest(RULE.replace("2 * g", "3 * g")) != bench.rule_digest(RULE)


def test_the_noiseless_run_has_the_same_fading_and_neither_noise_nor_receiver(bench):
    noisy = sa.Experiment(rounds=30, fading="rayleigh(mean=2)")
    noiseless = noisy.with_(**bench.overrides(bench.NOISELESS))
    assert noiseless == noisy.with_(noise="none()", receiver="none()")
    assert noisy.with_(**bench.overrides(bench.AUTO)) == noisy.with_(receiver="mac(C=auto)")


def test_a_pattern_runs_without_its_noise():
    with restored_registries(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        patterns = importlib.import_module("auto_patterns")
        patch.setattr(patterns, "ROUNDS", 3)
        loud, other = patterns.PATTERNS["0.03 and 3 in turn"], patterns.PATTERNS["from 3 to 0.1 at round 15"]
        assert (loud.data, loud.change) == (other.data, other.change)
        names = "0.03 and 3 in turn", "from 3 to 0.1 at round 15"
        patch.setattr(patterns, "PATTERNS", {name: patterns.PATTERNS[name]._replace(turn=2) for name in names})
        scores = {
            receiver: [patterns.score(patterns.Job(name, receiver, "test", 0)) for name in names]
            for receiver in (patterns.NOISELESS, "mac(C=3)")
        }
    assert len(set(scores["noiseless"])) == 1
    assert len(set(scores["mac(C=3)"])) == 2


@pytest.mark.parametrize(("fixed", "helps"), [([50, 60, 70], False), ([53, 61, 73], True), ([50, 60, 76], False)])
def test_noise_helps_where_a_fixed_threshold_exceeds_the_noiseless_run_by_more_than_its_error(bench, fixed, helps):
    assert bench.Comparison([50, 60, 70], fixed, [0, 0, 0]).noise_helps() == helps


def test_the_distribution_separates_settings_where_noise_helps(bench):
    def comparison(gap, gain):
        """A comparison with these values of auto - fixed and of fixed - noiseless."""
        return bench.Comparison([50.0, 60.0], [50 + gain, 60.2 + gain], [50 + gain + gap, 60.2 + gain + gap])

    some = [comparison(-9.0, +5.0), comparison(-3.0, -5.0), comparison(+1.0, -5.0)]
    _, _, every, limited = bench.distribution("held-out", some).splitlines()
    assert every.split(" | ")[1:4] == ["3", "-3.67", "-9.0"]
    assert limited.split(" | ")[1:4] == ["2", "-1.00", "-3.0"]
    assert [line.rstrip(" |").split(" | ")[-2:] for line in (every, limited)] == [["2 (67%)", "2"], ["1 (50%)", "1"]]


def test_a_loss_is_certain_beyond_two_standard_errors(bench):
    assert bench.certainly_below([-4.0, -5.0, -6.0])
    assert not bench.certainly_below([-1.0, -5.0, -9.0])
    assert not bench.certainly_below([-1.9, -1.9, -1.9])
    assert bench.loss([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == "-5.0 ± 0.6 (!)"
    assert bench.loss([1.0, 2.0, 3.0], [3.0, 4.0, 5.0]) == "-2.0 ± 0.0"
