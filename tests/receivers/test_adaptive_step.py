"""The step of mac(C=auto): the noise budget, and the test of progress that reduces it."""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch

import stableair as sa
from helpers import ROOT
from helpers.components import RepeatedReceiver
from helpers.isolation import restored_registries
from helpers.rounds import noise, received_rounds, signal
from stableair.receivers import mac
from stableair.receivers.adaptive import CURVATURE, CUT, PFLUG_ROUNDS, MacTracker


def steps(metrics):
    return [each["step"] for each in metrics]


def descent(rule, curvature, taus=(1.0,) * 80, shift=0.0, d=2000):
    """Minimise curvature |w - v|^2 / 2 by w - g with g = curvature (w - v) + xi; v is 0, from round 80 on `shift`.

    Returns:
        The last w (d,), and the steps of all rounds.
    """
    rule, w, steps_taken = RepeatedReceiver(rule), signal(1.0, d), []
    for k, tau in enumerate(taus):
        v = signal(shift, d) if k >= 80 else 0.0
        w = w - rule(curvature * (w - v) + noise(1.5, tau, k, d))
        steps_taken.append(rule.metrics.get("step", 1.0))
    return w, steps_taken


def overshooting(rule, rounds=20, d=2000, std=1.0):
    """Apply a rule to rounds whose signal changes its sign each time."""
    rule = RepeatedReceiver(rule)
    for k in range(rounds):
        rule((-1) ** k * signal(std, d) + noise(1.5, 1.0, k, d))
        yield rule


def test_a_round_with_more_noise_is_weighted_by_the_inverse_of_its_energy():
    _, seen = received_rounds(mac("auto"), [0.1] * 10 + [3.0, 6.0], std=0.001, d=200_000)
    assert seen[10]["step"] == pytest.approx(1 / 30**2, rel=0.3)
    assert seen[11]["step"] == pytest.approx(seen[10]["step"] * 1.9 / 4, rel=0.3), (
        "the usual noise has grown by 900^0.1"
    )


def test_a_stronger_signal_allows_more_noise():
    _, seen = received_rounds(mac("auto"), [0.03] * 5 + [0.3], std=0.1)
    assert seen[5]["step"] == 1, "a hundred times the usual noise, and less than 300 times the energy of the signal"
    _, seen = received_rounds(mac("auto"), [0.1] * 10 + [30.0], std=0.05)
    energy = 22.0 * 10**2  # of the clipped noise, per entry
    assert seen[-1]["step"] == pytest.approx((0.05**2 / CURVATURE + 0.022) / energy, rel=0.4)


def test_a_signal_of_few_entries_allows_less_noise():
    """The curvature per entry grows as 1 / d: a tenth of the entries, a tenth of the noise."""
    large, small = (received_rounds(mac("auto"), [0.03] * 9 + [3.0], std=0.2, d=d)[1] for d in (3000, 300))
    assert small[-1]["step"] < 0.2 * large[-1]["step"]


def test_a_signal_allows_less_noise_after_cuts():
    rule, taken = RepeatedReceiver(mac("auto")), []
    for k in range(10):
        rule(signal(0.2, 2000) + noise(1.5, 1.0, k, 2000))
    memory = rule.memory
    for share in (1.0, 0.1):
        rule.memory = memory | {"budget": share * math.exp(memory["log_noise"])}
        rule(signal(0.2, 2000) + noise(1.5, 30.0, 10, 2000))
        taken.append(rule.metrics["step"])
    assert taken[0] < 1
    assert taken[1] == pytest.approx(0.1 * taken[0])


@pytest.mark.parametrize("curvature", [0.8, 3.0])
def test_the_step_decreases_if_only_noise_moves_the_model(curvature):
    """With full steps, |w| stays large, and diverges for curvature 3."""
    w, taken = descent(mac("auto"), curvature)
    plain, _ = descent(mac(1.255, gain=True), curvature)
    assert taken[0] == pytest.approx(1)
    assert taken[-1] < 0.5
    assert w.norm() < 0.8 * plain.norm()


def test_each_cut_halves_the_budget_and_follows_five_full_steps():
    """With half the step, the model needs twice as many rounds to reach the noise floor."""
    weak = overshooting(mac("auto"), 120, std=0.12)  # single rounds are within three standard errors
    levels = [(budget, len([*same])) for budget, same in itertools.groupby(rule.memory["budget"] for rule in weak)]
    assert levels[0][0] == math.inf
    usual = levels[1][0] / CUT
    cuts = [(a, rounds, b) for (a, rounds), (b, _) in itertools.pairwise(levels) if b < a]
    assert len(cuts) > 2
    assert all(rounds * min(1, a / usual) >= 0.9 * PFLUG_ROUNDS for a, rounds, _ in cuts)
    assert [b / a for a, _, b in cuts[1:]] == pytest.approx([CUT] * (len(cuts) - 1))


def test_chance_alone_does_not_stop_the_training():
    """Without any signal every cut is a false alarm: the step falls as 1 / rounds, whose sum has no bound."""
    rule = RepeatedReceiver(mac("auto"))
    for k in range(150):
        rule(noise(1.5, 1.0, 450 + k, 500))
        share = rule.memory["budget"] / math.exp(rule.memory["log_noise"])
        assert share > 0.9 * PFLUG_ROUNDS / (k + 2 * PFLUG_ROUNDS)
    assert share < 1


@pytest.mark.parametrize(("std", "doubles"), [(0.12, True), (0.0, False)])
def test_significant_progress_reverses_a_cut(std, doubles):
    rule = RepeatedReceiver(mac("auto"))
    for k in range(10):
        rule(signal(std, 2000) + noise(1.5, 1.0, k, 2000))
    cut = 0.1 * math.exp(rule.memory["log_noise"])
    rule.memory |= {"budget": cut, "progress": 0.0, "since_change": 0}
    for k in range(10, 40):
        rule(signal(std, 2000) + noise(1.5, 1.0, k, 2000))
    assert (rule.memory["budget"] >= 2 * cut) == doubles


def test_early_progress_does_not_delay_the_first_cut():
    rule = RepeatedReceiver(mac("auto"))
    for k in range(120):
        sign = 1 if k < 60 else (-1) ** k
        rule(sign * signal(0.12, 2000) + noise(1.5, 1.0, k, 2000))
    assert rule.memory["budget"] < math.inf


@pytest.mark.parametrize(("std", "brake"), [(0.5, 0.5), (0.1, 1.0)])
def test_a_significant_overshoot_halves_the_step_for_some_rounds(std, brake):
    rule, brakes = RepeatedReceiver(mac("auto")), []
    for k in range(14):
        rule((-1 if k == 9 else 1) * signal(std, 2000) + noise(1.5, 1.0, k, 2000))
        brakes.append(rule.memory["brake"])
    assert brakes[9] == brake
    assert brakes[:9] == [1.0] * 9
    assert brakes[-1] == pytest.approx(1.0)
    rule.memory |= {"brake": 0.25, "budget": math.inf}
    rule(signal(0.5, 2000) + noise(1.5, 1.0, 14, 2000))
    assert rule.metrics["step"] == pytest.approx(0.25 * 1.2, rel=0.2)


@pytest.mark.parametrize("factor", [2.0**10, 2.0**-10])
def test_the_step_does_not_depend_on_the_unit(factor):
    other = RepeatedReceiver(mac("auto"))
    for k, one in enumerate(overshooting(mac("auto"), 12, d=500)):
        other(factor * ((-1) ** k * signal(1.0, 500) + noise(1.5, 1.0, k, 500)))
        assert other.metrics["step"] == pytest.approx(one.metrics["step"], rel=1e-6)
        assert other.metrics["C"] == pytest.approx(factor * one.metrics["C"], rel=1e-6)
        assert other.memory["budget"] == pytest.approx(factor**2 * one.memory["budget"], rel=1e-6)
    assert one.metrics["step"] < 1


@pytest.mark.parametrize(("tau", "shift", "least"), [(0.05, 0.0, 0.5), (1.0, 2.0, 0.3)], ids=["noise", "signal"])
def test_the_step_returns_after_a_change(tau, shift, least):
    _, taken = descent(mac("auto"), 0.8, [1.0] * 80 + [tau] * 10, shift)
    assert taken[79] < 0.1
    assert max(taken[80:]) > least


def test_overshooting_does_not_raise_the_threshold():
    """A larger threshold adds noise, which brings a negative alignment closer to zero."""
    assert max(rule.metrics["C"] for rule in overshooting(mac("auto"))) < 3


def test_the_usual_noise_adapts_to_a_permanent_change():
    _, seen = received_rounds(mac("auto"), [0.1] * 3 + [30.0] * 60, std=0.05, d=2000)
    taken = steps(seen)
    assert taken[3] < 0.01
    assert max(taken[30:]) > 0.3


def test_noiseless_training_has_no_cut(tiny):
    noiseless = sa.run(tiny.with_(rounds=12, noise="none()", receiver="mac(C=auto)"))
    assert noiseless.state.receiver[0]["budget"] == math.inf
    assert min(noiseless["receiver/step"]) == 1


def test_a_resumed_run_continues_the_budget_bit_for_bit(tiny, tmp_path):
    overshoots = tiny.with_(rounds=12, server="sgd(lr=3)", receiver="mac(C=auto)", noise="sas(alpha=1.5, tau=1)")
    whole = sa.run(overshoots)
    sa.run(overshoots.with_(rounds=9), tmp_path / "a")
    resumed = sa.run(overshoots, tmp_path / "a", resume=True)
    assert resumed.state.receiver[0]["budget"] == whole.state.receiver[0]["budget"] < math.inf
    assert torch.equal(resumed.state.model.w, whole.state.model.w)


def test_the_memory_holds_one_vector():
    *_, rule = overshooting(mac("auto"))
    vectors = [value for value in rule.memory.values() if isinstance(value, torch.Tensor)]
    assert [vector.shape for vector in vectors] == [(2000,)]


@pytest.fixture(scope="module")
def patterns():
    """bench/auto_patterns.py; its noises and data sets are removed after the tests."""
    with restored_registries(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        yield importlib.import_module("auto_patterns")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "every fifth round 3, else 0.1",
        "0.03 and 3 in turn",
        "labels permuted at round 15",
        "from 0.03 to 1 at round 10",
        "server lr 0.3, tau = 0.1",
    ],
)
def test_auto_is_within_two_points_of_the_best_fixed_threshold(name, patterns):
    """The mean of three paired seeds; the thresholds are the best of ten, in hindsight, for each of the patterns."""
    mean = {
        rule: np.mean([patterns.score(patterns.Job(name, rule, "test", seed)) for seed in range(3)])
        for rule in ("mac(C=auto)", "mac(C=0.1)", "mac(C=0.3)", "mac(C=1)", "mac(C=3)", "mac(C=1, gain=True)")
    }
    assert mean.pop("mac(C=auto)") > max(mean.values()) - 2


def test_infinite_entries_leave_the_memory_finite():
    """The same entry is infinite in every round, in the vector and in the reference."""
    rule = RepeatedReceiver(mac("auto"))
    for k in range(4):
        g = noise(1.5, 0.1, k, 2000) + signal(0.05, 2000)
        g[3] = math.inf
        assert rule(g).isfinite().all()
    assert rule.memory["before"].isfinite().all()
    assert rule.memory["before"].dtype == torch.float32, "a checkpoint holds one vector of the model's size"
    numbers = {name: value for name, value in rule.memory.items() if isinstance(value, float) and name != "budget"}
    assert all(map(math.isfinite, numbers.values())), numbers


def test_the_usual_noise_leaves_out_the_signal():
    tracker = MacTracker(rounds=2, log_noise=0.0, signal=9.0)
    tracker._step_factor(energy=10.0, d=1000, pilot=None)
    assert tracker.log_noise == pytest.approx(0.0), "10 - 9 is the usual noise again"


def test_the_evidence_is_a_decayed_sum_with_its_variance():
    rule = RepeatedReceiver(mac("auto"))
    for k in range(3):
        rule(noise(1.5, 0.1, k, 2000) + signal(0.05, 2000))
    variances = {round(sums[3], 6) for sums in rule.memory["evidence"].values()}
    assert round(1 + 0.81 + 0.81**2, 6) in variances, "of the octaves that all three rounds have"
    ages = [chosen for n in (1, 2, 3) for chosen in itertools.combinations(range(3), n)]
    assert variances <= {round(sum(0.81**age for age in chosen), 6) for chosen in ages}


@pytest.mark.parametrize(("before", "after", "passed"), [(10.0, 100.0, 0.5), (90.0, 103.0, 0.9), (100.0, 101.0, 1.0)])
def test_the_share_of_a_signal_that_passes_one_octave(before, after, passed):
    """The gain of a doubling is significant beyond three standard errors; an octave passes at least half."""
    assert MacTracker(evidence={3: (0.0, before, after, 1.0)})._passed(range(3, 4)) == pytest.approx(passed)
