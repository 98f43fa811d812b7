import importlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import stableair as sa
from helpers import ROOT
from helpers.components import RepeatedReceiver
from helpers.isolation import forgotten
from stableair import stable, theory
from stableair.channels.fading import unit
from stableair.channels.flat import Flat
from stableair.channels.noise import sas
from stableair.errors import InputError
from stableair.receivers import assemble, cauchy, clip, mac, receiver
from stableair.receivers.adaptive import ALPHAS, BEST_C, BEST_K, doublings, myriad
from stableair.streams import generator
from stableair.vector import Layout

D = 100_000
LAYOUT = Layout(("a", "b", "c"), ((D - 11,), (10,), (1,)), (0, D - 11, D - 1, D))


def noise(alpha=1.5, tau=0.1, k=0, d=D):
    return stable.sample(d, alpha, tau, generator(0, "noise", k))


def signal(std, d=D):
    return std * generator(0, "signal").normal(d).float()


@pytest.mark.parametrize("alpha", [0.55, 0.93, 1.25, 1.55, 1.83, 1.97])
def test_the_tables_hold_the_best_thresholds(alpha):
    between = lambda table: math.exp(np.interp(alpha, ALPHAS, np.log(table)))  # noqa: E731
    best = theory.efficacy(clip(theory.best_threshold(alpha)), alpha)
    assert theory.efficacy(clip(between(BEST_C)), alpha) > 0.999 * best
    K = between(BEST_K)
    at = [theory.efficacy(lambda g, K=K, f=f: myriad(g, f * K), alpha) for f in (0.7, 1.0, 1.4)]
    assert at[1] > max(at[0], at[2]), "the maximum lies at K"
    assert at[1] > 0.98 * theory.fisher(alpha)


def test_auto_finds_the_law_and_the_threshold_of_a_weak_signal():
    rule = RepeatedReceiver(mac("auto"))
    for k in range(4):
        rule(noise(1.5, 0.1, k) + signal(0.01))
    seen = rule.metrics
    assert seen["alpha"] == pytest.approx(1.5, abs=0.03)
    assert seen["tau"] == pytest.approx(0.1, rel=0.03)
    assert seen["C"] == pytest.approx(0.125, rel=0.05)
    assert seen["gain"] == pytest.approx(theory.unclipped(seen["C"], 1.5, 0.1).value, abs=0.01)


def test_the_gain_puts_the_signal_back():
    weak = signal(0.02)
    out = [mac(*how)(noise() + weak) for how in (("auto",), ("auto", False), (0.125, True), (0.125,))]
    kept = [((y @ weak) / (weak @ weak)).item() for y in out]
    assert kept[0] == pytest.approx(1, abs=0.05)
    assert kept[2] == pytest.approx(1, abs=0.05)
    assert kept[1] == pytest.approx(0.61, abs=0.05)
    assert kept[3] == pytest.approx(0.61, abs=0.05)


def test_a_number_without_gain_is_the_papers_rule():
    g = noise()
    assert torch.equal(mac(0.1, gain=False)(g), mac(0.1)(g))
    assert not isinstance(mac(0.1), sa.Rule), "a plain function without memory"


def test_doublings_are_standard_normal_without_a_signal():
    laws = [(noise(1.2, k=2 * k, d=2000), noise(1.2, k=2 * k + 1, d=2000)) for k in range(300)]
    turned, less, more = np.moveaxis([doublings(x.double(), r.double(), 0.06)[:6] for x, r in laws], -1, 0)
    for scores in (turned, more - less):
        assert np.abs(scores.mean(0)).max() < 4.5 / 300**0.5
        assert np.abs(scores.var(0) - 1).max() < 0.5


def test_a_strong_signal_lifts_the_threshold_and_a_weak_one_does_not():
    def threshold(std):
        rule = RepeatedReceiver(mac("auto"))
        for k in range(4):
            rule(noise(1.5, 0.1, k) + signal(std))
        return rule.metrics["C"]

    assert threshold(0.01) < 0.2
    heavy = 0.05 * signal(1.0) ** 3  # in one round its tails look like noise
    rule = RepeatedReceiver(mac("auto"))
    outs = [rule(heavy + noise(1.5, 0.001, k)) for k in range(4)]
    lost = [(out - heavy).norm() / heavy.norm() for out in outs]
    assert lost[-1] < 0.5 * lost[0], "the second round tells signal from noise"


def test_auto_leaves_alone_what_does_not_vary():
    for g in (torch.zeros(50), torch.full((50,), 3.0), torch.tensor([2.0])):
        assert torch.equal(mac("auto")(g), g)


def test_auto_with_tiny_and_constant_blocks():
    g = noise()
    g[-11:-1] = 7.0
    g[-1] = -5.0
    rule = RepeatedReceiver(assemble(receiver.parse("mac(C=auto)"), LAYOUT, "tensor"))
    out = rule(g)
    assert out[-11:].tolist() == [7.0] * 10 + [-5.0]
    assert rule.metrics["C"] == pytest.approx(0.125, rel=0.1), "the threshold comes from the whole vector"


def test_auto_takes_infinities():
    g = noise()
    g[3], g[5] = math.inf, -math.inf
    rule = RepeatedReceiver(mac("auto"))
    assert rule(g).isfinite().all()
    assert rule(g).isfinite().all()


@pytest.mark.parametrize("rule", [mac("auto"), cauchy("auto")], ids=["mac", "cauchy"])
def test_the_memory_is_saved_and_restored(rule, tmp_path):
    one, other, strong = RepeatedReceiver(rule), RepeatedReceiver(rule), 0.05 * signal(1.0) ** 3
    for k in range(4):
        one((-1) ** k * strong + noise(k=k))  # from the second round on they overshoot
    torch.save(one.memory, tmp_path / "memory.pt")
    other.memory = torch.load(tmp_path / "memory.pt", weights_only=True)
    for k in (4, 5):
        assert torch.equal(one(strong + noise(k=k)), other(strong + noise(k=k)))
        assert one.metrics == other.metrics
    assert not torch.equal(rule(strong + noise(k=6)), other(strong + noise(k=6))), "the memory matters"


def test_pilots_tell_the_noise_where_the_vector_cannot(tiny):
    with_pilots = tiny.with_(receiver="mac(C=auto, pilot=20000)", noise="sas(alpha=1.3, tau=0.05)")
    last = sa.run(with_pilots).rounds[-1]
    assert last["receiver/alpha"] == pytest.approx(1.3, abs=0.05)
    assert last["receiver/tau"] == pytest.approx(0.05, rel=0.05)
    without = sa.run(tiny.with_(receiver="mac(C=auto)", noise="sas(alpha=1.3, tau=0.05)")).rounds[-1]
    assert without["receiver/tau"] > 0.1, "here the signal is stronger than the noise"


def test_silent_pilots_make_it_the_identity(tiny):
    quiet = tiny.with_(noise="none()")
    auto, plain = (sa.run(quiet.with_(receiver=r)) for r in ("mac(C=auto, pilot=100)", "none()"))
    assert auto["clip/fraction"] == [0.0] * 4
    assert torch.allclose(auto.state.model.w, plain.state.model.w, atol=1e-6)


def test_the_reference_is_clipped_too():
    strong = signal(0.2)
    scores = doublings((strong + noise(1.1, 0.1, 0)).double(), (strong + noise(1.1, 0.1, 1)).double(), 0.1)
    assert scores[0][0] > 10, "unclipped, the impulses of the round before would drown the signal"


def test_pilots_are_symbols_of_their_own():
    fade = Flat(unit(), sas(1.5, 0.1), pilots=100).draw(3, torch.arange(3), 200, 0, 0)
    assert fade.pilot.shape == (100,)
    assert not torch.equal(fade.pilot, fade.xi[:100])


def test_pilots_do_not_disturb_the_noise(tiny):
    one, other = (sa.run(tiny.with_(receiver=r)) for r in ("mac(C=auto, pilot=100)", "none()"))
    assert one["channel/snr_db"][0] == other["channel/snr_db"][0]


@pytest.mark.parametrize("spec", ["mac(C=auto)", 'mac(C="auto")', "mac(C=auto, pilot=50)", "cauchy(K=auto)"])
def test_a_resumed_run_equals_an_uninterrupted_one(tiny, tmp_path, spec):
    tiny = tiny.with_(receiver=spec)
    sa.run(tiny.with_(rounds=2), tmp_path / "a")
    resumed, whole = sa.run(tiny, tmp_path / "a", resume=True), sa.run(tiny)
    assert torch.equal(resumed.state.model.w, whole.state.model.w)
    assert all(resumed[name] == whole[name] for name in whole.rounds[0] if name != "seconds")
    assert {"receiver/alpha", "receiver/tau"} <= whole.rounds[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "channel",
    [
        {"fading": "unit()", "noise": "none()"},
        {"noise": "gaussian(std=0.1)"},
        {"noise": "sas(alpha=1.5, tau=0.003)"},
        {"noise": "gaussian(std=0.1)", "blocks": "layer"},
    ],
    ids=["ideal", "gaussian", "strong signal", "layer"],
)
def test_auto_does_not_break_where_nothing_needs_repair(channel):
    base = sa.Experiment(rounds=25, device="cpu", **channel)
    auto, plain = (sa.run(base.with_(receiver=r))["test/accuracy"][-1] for r in ("mac(C=auto)", "none()"))
    assert auto > plain - 0.02


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mac()", "missing a required argument: 'C'"),
        ("mac(C=automatic)", "C must be a number or auto: got 'automatic'"),
        ("mac(C=1, gain=2)", "gain must be True or False"), ("mac(C=1, pilot=5)", "pilot=5 requires C=auto"),
        ("mac(C=auto, pilot=-1)", "pilot must be at least 0"), ("cauchy(K=0)", "K must be positive"),
        ("cauchy(K=a)", "K must be a number or auto"), ("quantile_clip(q=1.5)", "q must be in"),
        ("sign(step=0)", "must be"),
        ("blank(C=-1)", "must be"), ("tanh_clip(C=nan)", "must be"),
    ],
)  # fmt: skip
def test_bad_arguments(text, said):
    with pytest.raises(InputError, match=said):
        sa.Experiment(receiver=text)


def test_pilots_need_a_channel():
    with pytest.raises(InputError) as error:
        mac("auto", pilot=50)(noise())
    assert error.value.code == "no-pilots"


def heard(rule, taus, std=0.05, d=20_000):
    """What a rule makes of rounds with these scales of the noise and the same signal: (rounds, d), and its metrics."""
    rule = RepeatedReceiver(rule)
    rounds = [(rule(noise(1.5, tau, k, d) + signal(std, d)), rule.metrics) for k, tau in enumerate(taus)]
    return torch.stack([out for out, _ in rounds]), [seen for _, seen in rounds]


def test_a_burst_does_not_lengthen_the_step():
    out, seen = heard(mac("auto"), [0.1] * 5 + [30.0] + [0.1] * 2)
    lengths, weak = out.norm(dim=1), signal(0.05, 20_000)
    assert lengths[5] < 2 * lengths[4], "unweighted it would be 300 times as long"
    assert seen[5]["counts"] < 0.01
    assert [s["counts"] for s in seen[:5] + seen[6:]] == pytest.approx([1] * 7, abs=0.05)
    assert ((out[6:] @ weak) / (weak @ weak)).tolist() == pytest.approx([1, 1], abs=0.1), "and it is forgotten at once"


def test_without_the_gain_a_burst_counts_as_little():
    out, _ = heard(mac("auto", gain=False), [0.1] * 5 + [30.0])
    assert out[5].norm() < 2 * out[4].norm()


@pytest.mark.parametrize("d", [20_000, 1200])
def test_a_loud_round_counts_by_the_square(d):
    _, seen = heard(mac("auto"), [0.1] * 10 + [3.0], d=d)
    tolerated, noise = 0.03 + min(625, d / 6) * 0.05**2, 22.0  # energies of an entry; 0.03, 22: those of clipped noise
    assert seen[-1]["counts"] == pytest.approx((tolerated / noise) ** 2, rel=0.3)


def test_the_signal_is_tracked_and_outlives_loud_rounds():
    rule, known = RepeatedReceiver(mac("auto")), []
    for k, (std, tau) in enumerate([(0.02, 0.1)] * 10 + [(0.06, 0.1)] * 3 + [(0.06, 3.0)] * 5):
        rule(noise(1.5, tau, k, 20_000) + signal(std, 20_000))
        known.append(rule.memory["signal"])
    assert known[9] == pytest.approx(0.02**2, rel=0.3)
    assert known[12:] == pytest.approx([0.06**2] * 6, rel=0.3), "three rounds after it has grown, and not forgotten"


def test_the_reference_is_made_of_the_quiet_rounds():
    rule, weak = RepeatedReceiver(mac("auto")), signal(0.05, 20_000)
    for k, tau in enumerate([1.0, 1.0, 0.01, 1.0, 1.0]):
        rule(noise(1.5, tau, k, 20_000) + weak)
    assert torch.cosine_similarity(rule.memory["before"].clamp(-0.2, 0.2), weak, dim=0) > 0.8


@pytest.mark.parametrize(("curvature", "brakes"), [(0.5, False), (3.0, True)])
def test_steps_that_overshoot_are_shortened(curvature, brakes):
    """g = curvature w + xi, w - g: beyond a curvature of 2 whole steps diverge, here by a factor of 2 a round."""
    rule, w, shares = RepeatedReceiver(mac("auto")), signal(1.0, 2000), []
    for k in range(30):
        w = w - rule(curvature * w + noise(1.5, 0.03, k, 2000))
        shares.append(rule.metrics["brake"])
    assert w.norm() < 0.1 * signal(1.0, 2000).norm()
    assert (min(shares[:5]) < 1) == brakes, "later on there is nothing left to learn, and noise alone overshoots"


def test_one_turn_of_the_signal_is_forgotten():
    rule, strong, shares = RepeatedReceiver(mac("auto")), signal(0.1, 2000), []
    for k in range(12):
        rule((strong if k < 3 else -strong) + noise(1.5, 0.01, k, 2000))
        shares.append(rule.metrics["brake"])
    assert shares[:3] == [1] * 3
    assert shares[3] == 0.5
    assert shares[-3:] == [1] * 3


def test_silence_is_no_reference():
    rule, weak = RepeatedReceiver(mac("auto", pilot=100)), signal(0.05, 2000)
    for k in range(4):
        g = torch.zeros(2000) if k < 2 else weak + noise(1.5, 0.001, k, 2000)
        rule(g, pilot=noise(k=k, d=100))
    assert torch.cosine_similarity(rule.memory["before"], weak, dim=0) > 0.9


def test_noise_that_the_signal_outweighs_counts_in_full():
    _, seen = heard(mac("auto"), [0.03] * 5 + [0.3] * 3, std=0.1)
    assert [s["counts"] for s in seen] == [1] * 8, (
        "a hundred times the usual energy, and less than 25^2 of the signal's"
    )


@pytest.mark.parametrize(("old", "new"), [(0.1, 1.0), (1.0, 0.1)])
def test_a_permanent_change_is_followed_at_once(old, new):
    _, seen = heard(mac("auto"), [old] * 6 + [new] * 3)
    for s in seen[6:]:
        assert s["tau"] == pytest.approx(new, rel=0.15)
        assert s["C"] == pytest.approx(1.255 * new, rel=0.25)
        assert s["gain"] == pytest.approx(0.61, abs=0.1)


def test_what_is_usual_follows_a_permanent_change():
    _, seen = heard(mac("auto"), [0.1] * 3 + [30.0] * 80, d=2000)
    counts = [s["counts"] for s in seen]
    assert counts[3] < 0.01
    assert counts[-1] > 0.5
    assert all(a < b * 1.7 for a, b in pairwise(counts[3:])), "step by step"


def test_the_gain_is_the_signals_own():
    heavy = 0.05 * signal(1.0, 20_000) ** 3  # a tenth of its entries hold nearly all of it
    rule = RepeatedReceiver(mac("auto"))
    for k in range(8):
        out = rule(heavy + noise(1.5, 0.1, k, 20_000))
    passed = (out @ heavy / (heavy @ heavy)).item()
    x = heavy + noise(1.5, 0.1, 7, 20_000)
    by_share = (mac(rule.metrics["C"], gain=True)(x) @ heavy / (heavy @ heavy)).item()
    assert by_share < 0.92, "the share of unclipped entries is not that of the signal"
    assert passed == pytest.approx(1, abs=0.05)


def test_evidence_of_a_quiet_round_does_not_lift_the_threshold_of_a_loud_one():
    heavy = 0.01 * signal(1.0, 20_000) ** 3
    rule, C = RepeatedReceiver(mac("auto")), []
    for k in range(10):
        rule(heavy + noise(1.5, 1.0 if k % 3 == 2 else 0.001, k, 20_000))
        C.append(rule.metrics["C"])
    assert max(C[2::3]) < 1.5 * 1.255


def test_silence_under_loud_pilots():
    rule = RepeatedReceiver(mac("auto", pilot=100))
    assert rule(torch.zeros(50), pilot=noise(d=100)).tolist() == [0.0] * 50
    assert rule.metrics["counts"] == pytest.approx(1)


@pytest.fixture(scope="module")
def patterns():
    """bench/auto_patterns.py, whose noises and data are forgotten after it."""
    with forgotten(), pytest.MonkeyPatch.context() as patch:
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
    ],
)
def test_auto_is_within_two_points_of_the_best_fixed_threshold(name, patterns):
    """The mean of three paired seeds; the best of C = 0.1, 0.3, 1, 3 and 10, with gain and without, by hindsight."""
    mean = {
        rule: np.mean([patterns.accuracy((name, rule, seed)) for seed in range(3)])
        for rule in ("mac(C=auto)", *patterns.FIXED)
    }
    assert mean.pop("mac(C=auto)") > max(mean.values()) - 2
