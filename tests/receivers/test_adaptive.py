import math

import numpy as np
import pytest
import torch

import stableair as sa
from helpers.components import RepeatedReceiver
from helpers.rounds import D, noise, received_rounds, signal
from stableair import theory
from stableair.channels.fading import unit
from stableair.channels.flat import Flat
from stableair.channels.noise import sas
from stableair.errors import InputError
from stableair.receivers import assemble, cauchy, clip, mac, receiver
from stableair.receivers.adaptive import ALPHAS, BEST_C, BEST_K, doublings, myriad
from stableair.vector import Layout

LAYOUT = Layout(("a", "b", "c"), ((D - 11,), (10,), (1,)), (0, D - 11, D - 1, D))


@pytest.mark.parametrize("alpha", [0.55, 0.93, 1.25, 1.55, 1.83, 1.97])
def test_the_tables_contain_the_best_thresholds(alpha):
    between = lambda table: math.exp(np.interp(alpha, ALPHAS, np.log(table)))  # noqa: E731
    best = theory.efficacy(clip(theory.best_threshold(alpha)), alpha)
    assert theory.efficacy(clip(between(BEST_C)), alpha) > 0.999 * best
    K = between(BEST_K)
    at = [theory.efficacy(lambda g, K=K, f=f: myriad(g, f * K), alpha) for f in (0.7, 1.0, 1.4)]
    assert at[1] > max(at[0], at[2]), "the maximum is at K"
    assert at[1] > 0.98 * theory.fisher(alpha)


def test_auto_estimates_the_noise_and_the_threshold_for_a_weak_signal():
    rule = RepeatedReceiver(mac("auto"))
    for k in range(4):
        rule(noise(1.5, 0.1, k) + signal(0.01))
    metrics = rule.metrics
    assert metrics["alpha"] == pytest.approx(1.5, abs=0.03)
    assert metrics["tau"] == pytest.approx(0.1, rel=0.03)
    assert metrics["C"] == pytest.approx(0.125, rel=0.05)
    assert metrics["gain"] == pytest.approx(theory.unclipped(metrics["C"], 1.5, 0.1).value, abs=0.01)


def test_the_gain_restores_the_signal():
    weak = signal(0.02)
    out = [mac(*how)(noise() + weak) for how in (("auto",), ("auto", False), (0.125, True), (0.125,))]
    kept = [((y @ weak) / (weak @ weak)).item() for y in out]
    assert kept[0] == pytest.approx(1, abs=0.05)
    assert kept[2] == pytest.approx(1, abs=0.05)
    assert kept[1] == pytest.approx(0.61, abs=0.05)
    assert kept[3] == pytest.approx(0.61, abs=0.05)


def test_a_fixed_threshold_without_gain_is_the_rule_of_the_paper():
    g = noise()
    assert torch.equal(mac(0.1, gain=False)(g), mac(0.1)(g))
    assert not isinstance(mac(0.1), sa.Rule), "a plain function without memory"


def test_scores_of_doublings_are_standard_normal_without_a_signal():
    laws = [(noise(1.2, k=2 * k, d=2000), noise(1.2, k=2 * k + 1, d=2000)) for k in range(300)]
    _, alignment, less, more = np.moveaxis([doublings(x.double(), r.double(), 0.06)[:6] for x, r in laws], -1, 0)
    for scores in (alignment, more - less):
        assert np.abs(scores.mean(0)).max() < 4.5 / 300**0.5
        assert np.abs(scores.var(0) - 1).max() < 0.5


def test_a_strong_signal_raises_the_threshold_and_a_weak_one_does_not():
    def threshold(std):
        rule = RepeatedReceiver(mac("auto"))
        for k in range(4):
            rule(noise(1.5, 0.1, k) + signal(std))
        return rule.metrics["C"]

    assert threshold(0.01) < 0.2
    heavy = 0.05 * signal(1.0) ** 3  # within one round, its tails look like noise
    rule = RepeatedReceiver(mac("auto"))
    outs = [rule(heavy + noise(1.5, 0.001, k)) for k in range(4)]
    lost = [(out - heavy).norm() / heavy.norm() for out in outs]
    assert lost[-1] < 0.5 * lost[0], "the second round separates signal and noise"


def test_auto_leaves_constant_blocks_unchanged():
    for g in (torch.zeros(50), torch.full((50,), 3.0), torch.tensor([2.0])):
        assert torch.equal(mac("auto")(g), g)


def test_auto_keeps_tiny_and_constant_blocks():
    g = noise()
    g[-11:-1] = 7.0
    g[-1] = -5.0
    rule = RepeatedReceiver(assemble(receiver.parse("mac(C=auto)"), LAYOUT, "tensor"))
    out = rule(g)
    assert out[-11:].tolist() == [7.0] * 10 + [-5.0]
    assert rule.metrics["C"] == pytest.approx(0.125, rel=0.1), "the threshold comes from the whole vector"


def test_auto_gives_finite_values_for_infinite_entries():
    g = noise()
    g[3], g[5] = math.inf, -math.inf
    rule = RepeatedReceiver(mac("auto"))
    assert rule(g).isfinite().all()
    assert rule(g).isfinite().all()


@pytest.mark.parametrize("rule", [mac("auto"), cauchy("auto")], ids=["mac", "cauchy"])
def test_the_memory_is_saved_and_restored(rule, tmp_path):
    one, other, strong = RepeatedReceiver(rule), RepeatedReceiver(rule), 0.05 * signal(1.0) ** 3
    for k in range(4):
        one((-1) ** k * strong + noise(k=k))  # every round from the second on overshoots
    torch.save(one.memory, tmp_path / "memory.pt")
    other.memory = torch.load(tmp_path / "memory.pt", weights_only=True)
    for k in (4, 5):
        assert torch.equal(one(strong + noise(k=k)), other(strong + noise(k=k)))
        assert one.metrics == other.metrics
    assert not torch.equal(rule(strong + noise(k=6)), other(strong + noise(k=6))), "the memory matters"


def test_pilots_give_the_noise_if_the_signal_is_stronger(tiny):
    with_pilots = tiny.with_(receiver="mac(C=auto, pilot=20000)", noise="sas(alpha=1.3, tau=0.05)")
    last = sa.run(with_pilots).rounds[-1]
    assert last["receiver/alpha"] == pytest.approx(1.3, abs=0.05)
    assert last["receiver/tau"] == pytest.approx(0.05, rel=0.05)
    without = sa.run(tiny.with_(receiver="mac(C=auto)", noise="sas(alpha=1.3, tau=0.05)")).rounds[-1]
    assert without["receiver/tau"] > 0.1, "here the signal is stronger than the noise"


def test_auto_with_noiseless_pilots_is_the_identity(tiny):
    quiet = tiny.with_(noise="none()")
    auto, plain = (sa.run(quiet.with_(receiver=r)) for r in ("mac(C=auto, pilot=100)", "none()"))
    assert auto["clip/fraction"] == [0.0] * 4
    assert torch.allclose(auto.state.model.w, plain.state.model.w, atol=1e-6)


def test_the_reference_is_clipped_too():
    strong = signal(0.2)
    scores = doublings((strong + noise(1.1, 0.1, 0)).double(), (strong + noise(1.1, 0.1, 1)).double(), 0.1)
    assert scores[0][1] > 10, "impulses in an unclipped reference would mask the signal"


def test_pilots_are_separate_symbols():
    fade = Flat(unit(), sas(1.5, 0.1), pilots=100).draw(3, torch.arange(3), 200, 0, 0)
    assert fade.pilot.shape == (100,)
    assert not torch.equal(fade.pilot, fade.xi[:100])


def test_pilots_do_not_change_the_noise(tiny):
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
def test_auto_costs_little_accuracy_without_noise(channel):
    base = sa.Experiment(rounds=25, device="cpu", **channel)
    auto, plain = (sa.run(base.with_(receiver=r))["test/accuracy"][-1] for r in ("mac(C=auto)", "none()"))
    assert auto > plain - 0.02


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mac()", "mac needs C"),
        ("mac(C=automatic)", "C must be a number or auto: got 'automatic'"),
        ("mac(C=1, gain=2)", "gain must be True or False"), ("mac(C=1, pilot=5)", "pilot=5 requires C=auto"),
        ("mac(C=auto, pilot=-1)", "pilot must be at least 0"), ("cauchy(K=0)", "K must be positive"),
        ("cauchy(K=a)", "K must be a number or auto"), ("quantile_clip(q=1.5)", "q must be in"),
        ("sign(step=0)", "must be"),
        ("blank(C=-1)", "must be"), ("tanh_clip(C=nan)", "must be"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        sa.Experiment(receiver=text)


def test_pilots_need_a_channel():
    with pytest.raises(InputError) as error:
        mac("auto", pilot=50)(noise())
    assert error.value.code == "no-pilots"


def test_a_burst_does_not_lengthen_the_step():
    out, seen = received_rounds(mac("auto"), [0.1] * 5 + [30.0] + [0.1] * 2)
    lengths, weak = out.norm(dim=1), signal(0.05, 20_000)
    assert lengths[5] < 2 * lengths[4], "without the weight it would be 300 times as long"
    assert seen[5]["step"] < 0.02
    assert [s["step"] for s in seen[:5] + seen[6:]] == pytest.approx([1] * 7, abs=0.05)
    assert ((out[6:] @ weak) / (weak @ weak)).tolist() == pytest.approx([1, 1], abs=0.1), (
        "the next rounds are not affected"
    )


def test_without_gain_a_burst_has_little_weight():
    out, _ = received_rounds(mac("auto", gain=False), [0.1] * 5 + [30.0])
    assert out[5].norm() < 2 * out[4].norm()


def test_the_signal_is_tracked_across_rounds_with_strong_noise():
    rule, estimates = RepeatedReceiver(mac("auto")), []
    for k, (std, tau) in enumerate([(0.02, 0.1)] * 10 + [(0.06, 0.1)] * 3 + [(0.06, 3.0)] * 5):
        rule(noise(1.5, tau, k, 20_000) + signal(std, 20_000))
        estimates.append(rule.memory["signal"])
    assert estimates[9] == pytest.approx(0.02**2, rel=0.3)
    assert estimates[12:] == pytest.approx([0.06**2] * 6, rel=0.3), "three rounds after the growth, and in strong noise"


def test_the_reference_consists_of_rounds_with_little_noise():
    rule, weak = RepeatedReceiver(mac("auto")), signal(0.05, 20_000)
    for k, tau in enumerate([1.0, 1.0, 0.01, 1.0, 1.0]):
        rule(noise(1.5, tau, k, 20_000) + weak)
    assert torch.cosine_similarity(rule.memory["before"].clamp(-0.2, 0.2), weak, dim=0) > 0.8


def test_rounds_without_noise_are_not_used_as_reference():
    rule, weak = RepeatedReceiver(mac("auto", pilot=100)), signal(0.05, 2000)
    for k in range(4):
        g = torch.zeros(2000) if k < 2 else weak + noise(1.5, 0.001, k, 2000)
        rule(g, pilot=noise(k=k, d=100))
    assert torch.cosine_similarity(rule.memory["before"], weak, dim=0) > 0.9


@pytest.mark.parametrize(("old", "new"), [(0.1, 1.0), (1.0, 0.1)])
def test_auto_adapts_to_a_permanent_change_at_once(old, new):
    _, seen = received_rounds(mac("auto"), [old] * 6 + [new] * 3)
    for s in seen[6:]:
        assert s["tau"] == pytest.approx(new, rel=0.15)
        assert s["C"] == pytest.approx(1.255 * new, rel=0.25)
        assert s["gain"] == pytest.approx(0.61, abs=0.1)


def test_the_gain_is_that_of_the_signal():
    heavy = 0.05 * signal(1.0, 20_000) ** 3  # a tenth of its entries hold nearly all of it
    rule = RepeatedReceiver(mac("auto"))
    for k in range(8):
        out = rule(heavy + noise(1.5, 0.1, k, 20_000))
    passed = (out @ heavy / (heavy @ heavy)).item()
    x = heavy + noise(1.5, 0.1, 7, 20_000)
    by_share = (mac(rule.metrics["C"], gain=True)(x) @ heavy / (heavy @ heavy)).item()
    assert by_share < 0.92, "the share of unclipped entries is not that of the signal"
    assert passed == pytest.approx(1, abs=0.05)


def test_a_round_with_little_noise_does_not_raise_the_threshold_of_a_round_with_much_noise():
    heavy = 0.01 * signal(1.0, 20_000) ** 3
    rule, C = RepeatedReceiver(mac("auto")), []
    for k in range(10):
        rule(heavy + noise(1.5, 1.0 if k % 3 == 2 else 0.001, k, 20_000))
        C.append(rule.metrics["C"])
    assert max(C[2::3]) < 1.5 * 1.255


def test_a_zero_vector_stays_zero_with_strong_pilots():
    rule = RepeatedReceiver(mac("auto", pilot=100))
    assert rule(torch.zeros(50), pilot=noise(d=100)).tolist() == [0.0] * 50
    assert rule.metrics["step"] == pytest.approx(1)


def test_a_sparse_signal_is_detected_beyond_octaves_of_noise():
    """The first doublings of C admit more noise than signal; the best threshold lies ten octaves higher."""
    sparse = torch.zeros(20_000)
    sparse[:40] = 100 * signal(1.0, 40)
    rule = RepeatedReceiver(mac("auto"))
    for k in range(5):
        g = sparse + noise(1.1, 0.1, k, 20_000)
        out = rule(g)
    best = max(torch.cosine_similarity(g.clamp(-C, C), sparse, dim=0) for C in 2.0 ** torch.arange(-4, 12))
    assert torch.cosine_similarity(out, sparse, dim=0) > best - 0.05


@pytest.mark.parametrize("alpha", [0.8, 1.5, 1.9])
def test_noise_without_a_signal_does_not_raise_the_threshold(alpha):
    rule, raised = RepeatedReceiver(mac("auto")), 0
    for k in range(30):
        rule(noise(alpha, 1.0, k, 2000))
        raised += rule.metrics["C"] > 1.5 * theory.best_threshold(alpha)
    assert raised <= 3


@pytest.mark.parametrize("spec", ["mac(C=auto)", "mac(C=auto, gain=False)", "mac(C=0.1, gain=True)"])
def test_the_clip_fraction_counts_clipped_entries(tiny, spec):
    run = sa.run(tiny.with_(receiver=spec, noise="sas(alpha=1.5, tau=1)"))
    assert all(0.0 < fraction < 0.99 for fraction in run["clip/fraction"]), "the gain changes every entry"
    assert "receiver/clipped" not in run.rounds[0]
