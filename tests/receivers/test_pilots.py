"""The minimum and maximum number of pilots of mac(C=auto)."""

import math

import pytest

import stableair as sa
from stableair import stable, theory
from stableair.errors import InputError
from stableair.receivers import clip, mac
from stableair.receivers.adaptive import BEST_C, NoiseEstimate
from stableair.receivers.rules import MAX_PILOTS, MIN_PILOTS
from stableair.streams import generator


@pytest.mark.parametrize("pilots", [1, 2, MIN_PILOTS - 1])
def test_too_few_pilots_are_refused_with_the_minimum_number(pilots):
    with pytest.raises(InputError) as error:
        sa.Experiment(receiver=f"mac(C=auto, pilot={pilots})")
    assert (error.value.code, error.value.fields["low"], error.value.fields["value"]) == (
        "out-of-range",
        MIN_PILOTS,
        pilots,
    )


@pytest.mark.parametrize("pilots", [0, MIN_PILOTS, MAX_PILOTS])
def test_enough_pilots_are_accepted(pilots):
    assert mac("auto", pilot=pilots).pilots == pilots


def test_the_number_of_pilots_is_bounded():
    with pytest.raises(InputError) as error:
        sa.Experiment(receiver=f"mac(C=auto, pilot={MAX_PILOTS + 1})")
    assert (error.value.code, error.value.fields["high"]) == ("out-of-range", MAX_PILOTS)


def test_pilots_with_a_fixed_threshold_are_refused():
    with pytest.raises(InputError) as error:
        mac(1.0, pilot=100)
    assert error.value.code == "conflicting-arguments"


@pytest.mark.parametrize("alpha", [1.0, 1.8])
def test_the_minimum_number_of_pilots_gives_nearly_the_best_threshold(alpha):
    """The mean efficacy is 95 % of that of the best threshold, and less than 90 % with 5 pilots."""
    source = generator(0, "pilot", 0)
    best = theory.efficacy(clip(theory.best_threshold(alpha)), alpha, n=2001)

    def mean_efficacy(pilots, samples=60):
        total = 0.0
        for _ in range(samples):
            noise = NoiseEstimate()
            noise.update(stable.sample(pilots, alpha, 1.0, source))
            total += theory.efficacy(clip(noise.best(BEST_C)), alpha, n=2001) / best
        return total / samples

    assert mean_efficacy(MIN_PILOTS) > 0.93
    assert mean_efficacy(5) < 0.91


def test_a_run_with_the_minimum_number_of_pilots_clips(tiny):
    run = sa.run(tiny.with_(receiver=f"mac(C=auto, pilot={MIN_PILOTS})", rounds=2))
    assert all(math.isfinite(C) for C in run["receiver/C"])
    assert all(fraction > 0 for fraction in run["clip/fraction"])
