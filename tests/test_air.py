"""Power, and interference and fading with memory and place: the limits in which their laws are known."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats

from components import EXAMPLES
from stableair import stable
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.channels.fading import GaussMarkov
from stableair.channels.flat import Flat
from stableair.channels.kinds import fading, noise, power
from stableair.channels.noise import NEAREST, field_law
from stableair.channels.power import inverse_power, turning
from stableair.checks import InputError, Note
from stableair.contracts import Upload
from stableair.paper.air_plots import PICTURES
from stableair.participants import participation
from stableair.runner import run
from stableair.streams import generator

SIGMAS = 4.5  # standard errors that a statistic may be off


def draw(spec, d, k=0, stream="noise"):
    return noise.one(spec)()(d, generator(0, stream, k))


def amplitudes(spec, n, k=0):
    return fading.one(spec)()(n, generator(0, "fading", k))


def assert_mean(x, expected):
    assert abs(x.mean().item() - expected) < SIGMAS * x.std().item() / len(x) ** 0.5


def assert_stable(x, alpha, tau):
    cdf = lambda z: stable.cdf(torch.from_numpy(z), alpha, tau).numpy()  # noqa: E731
    assert stats.kstest(x.double().numpy(), cdf).pvalue > 1e-3


# ------------------------------------------------------------------------------------------------------- bursts, field


@pytest.mark.parametrize(("alpha", "length"), [(0.5, 1), (1, 7), (1.5, 1), (1.5, 40), (1.95, 3), (2, 5)])
def test_an_entry_of_a_burst_is_stable_whatever_the_length(alpha, length):
    xi = draw(f"bursts(alpha={alpha}, tau=0.3, length={length})", 40_000 * length)
    assert_stable(xi[length // 2 :: length], alpha, 0.3)  # one of each burst: they are independent


@pytest.mark.parametrize("alpha", [0.8, 1.5, 2])
def test_the_entries_of_a_burst_share_their_strength_and_bursts_do_not(alpha):
    tau, length = 0.5, 4
    x = draw(f"bursts(alpha={alpha}, tau={tau}, length={length})", 800_000).double().reshape(-1, length)
    for t in ([1.0, 1, 1, 1], [2, 0, -1, 0.5], [0, 3, 0, 3]):
        t = torch.tensor(t).double()
        assert_mean((x @ t).cos(), math.exp(-(tau**alpha) * t.square().sum() ** (alpha / 2)))
    across = x[:-1:2, -1] + x[1::2, 0]  # the last of one burst and the first of the next: two independent entries
    assert_mean(across.cos(), math.exp(-2 * tau**alpha))


def test_a_burst_that_is_longer_than_the_vector_is_one_gaussian_vector():
    x = draw("bursts(alpha=1.2, length=10_000_000)", 50_000).double()
    assert stats.kstest((x / x.std()).numpy(), stats.norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize("spec", ["bursts(length=3)", "field(density=0.1, hold=2)"])
def test_a_vector_drawn_in_pieces_is_the_one_drawn_at_once(spec, monkeypatch):
    whole = draw(spec, 10_000)
    monkeypatch.setattr("stableair.streams._PIECE", 1000)
    assert torch.equal(draw(spec, 10_000), whole)


@pytest.mark.parametrize("exponent", [2.2, 3, 4, 5, 8])
def test_a_field_is_stable_with_the_parameters_it_says(exponent):
    alpha, tau = field_law(density=0.2, exponent=exponent, power=2)
    assert alpha == 4 / exponent
    assert_stable(draw(f"field(density=0.2, exponent={exponent}, power=2)", 200_000), alpha, tau)


@pytest.mark.parametrize("exponent", [4, 6])
def test_the_law_of_a_field_is_that_of_points_thrown_into_the_plane(exponent):
    """The slow truth: a disc with 300 interferers on average, each with a normal amplitude."""
    rng, density, fields, mean = np.random.default_rng(0), 0.1, 20_000, 300
    far = math.sqrt(mean / (math.pi * density))
    count = rng.poisson(mean, fields)
    there = np.arange(count.max()) < count[:, None]
    r = far * np.sqrt(rng.uniform(size=there.shape))
    xi = (there * r ** (-exponent / 2) * rng.normal(size=there.shape)).sum(1)
    assert_stable(torch.from_numpy(xi), *field_law(density, exponent))


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1, 1.3, 1.6, 1.8, 1.95])
def test_the_gaussian_remainder_of_a_field_moves_its_characteristic_function_by_less_than_one_in_ten_thousand(alpha):
    """Given the arrival y of the last interferer that is summed, those before it are uniform on (0, y)."""
    b, law = alpha / 2, stats.gamma(NEAREST)
    y = np.geomspace(*law.ppf([1e-12, 1 - 1e-12]), 4001)
    weight = law.pdf(y) * y * math.log(y[1] / y[0])
    errors = []
    for exact in np.exp(-np.geomspace(1e-3, 20, 60)):  # what the characteristic function is to be
        s = (-math.log(exact) / special.gamma(1 - b)) ** (1 / b) * y ** (-1 / b)
        before = np.exp(-s) - s**b * special.gamma(1 - b) * special.gammaincc(1 - b, s)  # E exp(-s u^(-1/b))
        ours = weight * before.clip(1e-300) ** (NEAREST - 1) * np.exp(-s - s * y / (1 / b - 1))
        errors.append(abs(ours.sum() - exact))
    assert max(errors) < 1e-4


def test_the_places_of_a_field_are_held_and_its_amplitudes_are_new():
    """Within `hold` entries the field is a burst: the same joint law, and so the one of `bursts`."""
    alpha, tau = field_law(density=0.1, exponent=3)
    x = draw("field(density=0.1, exponent=3, hold=4)", 400_000).double().reshape(-1, 4) / tau
    t = torch.tensor([1.0, -0.5, 0.5, 0.3]).double()
    assert_mean((x @ t).cos(), math.exp(-(t.square().sum() ** (alpha / 2))))


def test_a_field_of_more_power_or_density_is_louder():
    one = draw("field(density=0.1)", 1000)
    torch.testing.assert_close(draw("field(density=0.1, power=9)", 1000), 3 * one)
    torch.testing.assert_close(draw("field(density=0.2)", 1000), 2 * one)  # tau is as density^(1/alpha), alpha is 1


# --------------------------------------------------------------------------------------------------------------- markov


def bad_rounds(p, q, rounds, seed=0):
    chain = noise.one(f"markov(good='none()', bad='gaussian(std=1)', p={p}, q={q})")()
    return np.array([bool(chain(2, generator(seed, "noise", k)).any()) for k in range(rounds)])


@pytest.mark.parametrize(("p", "q"), [(0.1, 0.3), (0.02, 0.03), (0.9, 0.8), (1, 1), (0.5, 0.5), (1, 0.2), (0, 0.5)])
def test_looking_back_gives_what_walking_from_round_zero_does(p, q):
    u = [generator(3, "markov", k).uniform(1).item() for k in range(150)]
    walked = [u[0] < p / (p + q)]
    for x in u[1:]:
        walked.append(x < (1 - q if walked[-1] else p))
    assert bad_rounds(p, q, 150, seed=3).tolist() == walked


def test_the_chain_is_stationary_and_its_runs_have_the_lengths_it_says():
    p, q, rounds = 0.1, 0.3, 3000
    bad = bad_rounds(p, q, rounds)
    share, kept = p / (p + q), 1 - p - q
    error = math.sqrt(share * (1 - share) / rounds * (1 + kept) / (1 - kept))
    assert abs(bad.mean() - share) < SIGMAS * error
    turns = np.flatnonzero(np.diff(bad.astype(int))) + 1
    lengths, first = np.diff(turns), bad[turns[0]]
    for run_lengths, leaving in ((lengths[::2], q if first else p), (lengths[1::2], p if first else q)):
        error = math.sqrt(1 - leaving) / leaving / len(run_lengths) ** 0.5  # of the mean of a geometric law
        assert abs(run_lengths.mean() - 1 / leaving) < SIGMAS * error
    begun = np.array([bad_rounds(p, q, 1, seed)[0] for seed in range(500)])  # round 0 is as any other
    assert abs(begun.mean() - share) < SIGMAS * math.sqrt(share * (1 - share) / 500)


def test_pilots_are_sent_in_the_state_of_their_round_and_a_state_is_its_noise_bit_for_bit():
    chain = "markov(good='sas(tau=0.1)', bad='gaussian(std=1)', p=0.4, q=0.4)"
    channel = Flat(fading.one("unit()")(), noise.one(chain)(), pilots=5)
    for k in range(6):
        fade = channel.draw(1, torch.arange(1), 8, seed=0, k=k)
        state = "gaussian(std=1)" if torch.equal(fade.xi, draw("gaussian(std=1)", 8, k)) else "sas(tau=0.1)"
        assert torch.equal(fade.xi, draw(state, 8, k))
        assert torch.equal(fade.pilot, draw(state, 5, k, "pilot"))


# ------------------------------------------------------------------------------------------------------------ block, ar


def test_a_block_of_rounds_is_constant_and_the_next_is_new():
    h = torch.stack([amplitudes("block(rounds=3)", 50_000, k) for k in range(7)])
    assert torch.equal(h[0], h[2])
    assert torch.equal(h[3], h[5])
    assert torch.equal(h[3], amplitudes("rayleigh()", 50_000, k=1))  # the second block
    assert abs(torch.corrcoef(h[[2, 3]])[0, 1]) < SIGMAS / 50_000**0.5


def heard(channel, n, d, k=0, seed=0):
    """With what the entries of each of n clients are heard: (n, d)."""
    fade = channel.draw(n, torch.arange(n), d, seed, k)
    rows = []
    for client in range(n):
        sent = Upload(torch.tensor([client]), torch.ones(1, d), torch.zeros(1, 0), torch.zeros(1))
        rows.append(channel.accumulate([sent], fade).faded)
    return torch.stack(rows)


def test_a_block_of_entries_has_an_amplitude_of_its_own():
    channel = Flat(fading.one("block(of='rician(K=1)', entries=10)")(), noise.one("none()")())
    h = heard(channel, 4, 200_005)
    blocks = h[:, :200_000].reshape(4, -1, 10)
    assert (blocks == blocks[..., :1]).all()
    first = blocks[..., 0]
    assert (first[:, 1:] != first[:, :-1]).all()
    law = stats.rice(b=math.sqrt(2))
    assert stats.kstest(first.flatten().numpy() * law.mean(), law.cdf).pvalue > 1e-3
    assert torch.corrcoef(first).triu(1).abs().max() < SIGMAS / 20_000**0.5  # no two clients are alike
    assert torch.equal(h[:, 0], channel.draw(4, torch.arange(4), 1, 0, 0).h)
    assert not torch.equal(h, heard(channel, 4, 200_005, k=1))


def test_a_block_of_rounds_and_entries_holds_for_both():
    channel = Flat(fading.one("block(rounds=2, entries=3)")(), noise.one("none()")())
    first, second, third = (heard(channel, 2, 10, k) for k in range(3))
    assert torch.equal(first, second)
    assert (first != third).all()


def test_a_block_as_long_as_the_vector_is_the_fading_within(tiny):
    plain, long = (build(tiny.with_(fading=f)) for f in ("rayleigh()", "block(of='rayleigh()', entries=1000)"))
    for a, b in zip(simulate(plain, plain.start, 2), simulate(long, long.start, 2), strict=True):
        torch.testing.assert_close(a.state.w, b.state.w)


def test_a_gauss_markov_stream_is_its_recursion():
    a, n = 0.8, 5
    path = generator(0, "fading", 0).normal(n)
    for k in range(1, 400):  # and what it leaves out is beneath the rounding
        path = a * path + math.sqrt(1 - a * a) * generator(0, "fading", k).normal(n)
        if k in (1, 2, 30, 399):
            torch.testing.assert_close(GaussMarkov(generator(0, "fading", k), a).normal(n), path, rtol=0, atol=1e-14)
    assert len(GaussMarkov(generator(0, "fading", 399), a).weights) < 42 / (1 - a)


@pytest.mark.parametrize("a", [0, 0.6, 0.95, 1])
def test_slow_fading_forgets_as_it_says(a):
    """|c|^2 of a complex Gauss-Markov process has the correlation a^(2 lag)."""
    n = 40_000
    first, *later = (amplitudes(f"ar(a={a})", n, k).square() for k in (2, 3, 5, 12))
    for lag, power_later in zip((1, 3, 10), later, strict=True):
        found = torch.corrcoef(torch.stack([first, power_later]))[0, 1].item()
        assert abs(found - a ** (2 * lag)) < SIGMAS * 3 / n**0.5  # its error is at most about 3 / sqrt(n)


@pytest.mark.parametrize(
    ("of", "law"),
    [
        ("rayleigh(power=1)", stats.rayleigh(scale=math.sqrt(0.5))),
        ("rician(K=2)", stats.rice(b=2, scale=1 / stats.rice(b=2).mean())),
        ("nakagami(m=3)", stats.nakagami(3, scale=1 / stats.nakagami(3).mean())),
    ],
)
def test_slow_fading_has_the_law_of_the_fading_within(of, law):
    assert stats.kstest(amplitudes(f"ar(a=0.9, of='{of}')", 50_000, k=6).numpy(), law.cdf).pvalue > 1e-3


# ---------------------------------------------------------------------------------------------------------------- power


def over(rule, fade="unit()", xi="gaussian(std=1)", **parts):
    return Flat(fading.one(fade)(), noise.one(xi)(), power.one(rule)(), noise_on="sum", **parts)


def received(channel, update, k=0, seed=0):
    who = torch.arange(len(update))
    fade = channel.draw(len(update), who, update.shape[1], seed, k)
    return channel.superpose([Upload(who, update, torch.zeros(len(who), 0), torch.ones(len(who)))], fade), fade


def test_limit_is_its_formula():
    update = torch.randn(5, 40)
    got, fade = received(over("limit(P=3)", "rayleigh()", pilots=7), update)
    p = 3 * 40 / update.double().norm(dim=1).max() ** 2
    exact = (fade.h[:, None] * update.double()).mean(0) + fade.xi.double() / (5 * p.sqrt())
    torch.testing.assert_close(got.g, exact.float())
    torch.testing.assert_close(got.pilot, (fade.pilot / (5 * p.sqrt())).float())


def test_under_a_limit_the_sum_scales_as_the_payloads_and_nothing_else():
    update, channel = torch.randn(4, 30), over("limit(P=0.1)", "rayleigh()", "sas()", pilots=9)
    one, other = received(channel, update)[0], received(channel, 1000 * update)[0]
    torch.testing.assert_close(other.g, 1000 * one.g, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(other.pilot, 1000 * one.pilot)
    free, louder = received(replace(channel, power=power.one("none()")()), update)[0], received(channel, update)[0]
    assert not torch.allclose(free.g, louder.g)


@pytest.mark.parametrize("rule", ["limit(P=1e30)", "inversion(P=1e30, threshold=0.1)"])
def test_power_without_bound_is_noiseless(rule):
    update = torch.randn(6, 30)
    loud, silent = (received(over(rule, "rayleigh()", xi), update)[0] for xi in ("sas(tau=3)", "none()"))
    torch.testing.assert_close(loud.g, silent.g)


@pytest.mark.parametrize("receiver", ["none()", "mac(C=auto)"])
@pytest.mark.parametrize("rule", ["limit(P=1)", "inversion(P=1, threshold=0.05)"])
def test_at_equal_power_gradient_and_delta_are_one(tiny, rule, receiver):
    base = tiny.with_(power=rule, channel="flat(noise_on=sum)", receiver=receiver, noise="sas(tau=0.5)")

    def rounds(**changes):
        sim = build(base.with_(**changes))
        return list(simulate(sim, sim.start, 4))

    for a, b in zip(rounds(payload="gradient"), rounds(payload="delta"), strict=True):
        torch.testing.assert_close(a.state.w, b.state.w, rtol=1e-3, atol=1e-4)
        assert a.metrics["channel/snr_db"] == pytest.approx(b.metrics["channel/snr_db"], abs=1e-3)
    gradient, delta = (rounds(payload=payload, power="none()")[-1].state.w for payload in ("gradient", "delta"))
    assert not torch.allclose(gradient, delta, rtol=1e-2, atol=1e-2)  # without a rule they are not


@pytest.mark.parametrize("rule", ["limit(P=1)", "inversion(P=1, threshold=0.1)"])
def test_interference_on_the_mean_is_refused(tiny, rule):
    with pytest.raises(InputError, match=r"on the sum of the payloads: add channel='flat\(noise_on=sum\)'$"):
        build(tiny.with_(power=rule))


def test_inversion_is_its_formula():
    """A client of h^2 < t is left out of everything; the others arrive unfaded; the noise has the power it must."""
    update, t, P = torch.randn(30, 40), 0.5, 2.0
    update[:15] *= 10
    got, fade = received(over(f"inversion(P={P}, threshold={t})", "rayleigh(power=1)", pilots=7), update)
    active = fade.h.square() >= t
    assert 5 < active.sum() < 28
    scale = update[active].double().norm(dim=1).max() / 40**0.5 / math.sqrt(P / special.exp1(t)) / active.sum()
    torch.testing.assert_close(got.g, (update[active].double().mean(0) + scale * fade.xi).float())
    torch.testing.assert_close(got.pilot, (scale * fade.pilot).float())
    torch.testing.assert_close(got.clean, update[active].double().mean(0))
    assert got.senders == got.divisor == active.sum()


@pytest.mark.parametrize("t", [0.01, 0.3, 2.0])
def test_what_inversion_takes_is_known_for_rayleigh_fading(t):
    """In closed form, by the mean of 10^6 draws, and for both ways to say how strong the fading is."""
    known = {"rayleigh(power=1)": special.exp1(t), "rayleigh()": math.pi / 4 * special.exp1(math.pi * t / 4)}
    for spec, expected in known.items():
        assert inverse_power(fading.one(spec)(), t) == pytest.approx(expected, rel=1e-12)
        drawn = inverse_power(fading.one(spec)().draw, t)  # its draws alone
        assert drawn == pytest.approx(expected, abs=SIGMAS * (special.expn(2, t) / t / 1e6) ** 0.5 * 1.3)


@pytest.mark.parametrize(("spec", "t"), [("nakagami(m=2, mean=2)", 0.8), ("unit()", 0.9), ("unit()", 1.1)])
def test_other_closed_forms_agree_with_draws(spec, t):
    law = fading.one(spec)()
    assert inverse_power(law, t) == pytest.approx(inverse_power(law.draw, t), rel=5e-3)


def test_an_estimate_of_another_law_than_the_channel_is_averaged_over():
    """Without fading h_hat is csi + sqrt(1 - csi^2) e on a circle, and the mean of 1/h_hat^2 is 1 / |2 csi^2 - 1|."""
    assert inverse_power(fading.one("unit()")(), 1e-3, csi=0.95) == pytest.approx(1 / (2 * 0.95**2 - 1), rel=0.01)
    same = inverse_power(fading.one("rayleigh(power=1)")().draw, 0.2, csi=0.6)  # two complex Gaussians make another
    assert same == pytest.approx(special.exp1(0.2), rel=0.01)


@pytest.mark.parametrize(
    ("rule", "fade"),
    [
        ("inversion(P=1, threshold=0)", "rayleigh()"),
        ("inversion(P=1, threshold=0)", "rician(K=3)"),
        ("inversion(P=1, threshold=0)", "nakagami(m=1)"),
        ("inversion(P=1, threshold=0)", "ar(a=0.5)"),
        ("inversion(P=1, threshold=0)", "block(rounds=2)"),
        ("inversion(P=1, threshold=0, csi=0.9)", "unit()"),
    ],
)
def test_inverting_every_channel_is_refused_where_it_takes_power_without_bound(tiny, rule, fade):
    with pytest.raises(InputError, match=r"threshold must be positive, such as 0\.1: got 0, and inverting"):
        build(tiny.with_(power=rule, fading=fade, channel="flat(noise_on=sum)"))


@pytest.mark.parametrize("fade", ["unit()", "nakagami(m=2)", "block(of='nakagami(m=2)', rounds=3)"])
def test_inverting_every_channel_is_allowed_where_it_does_not(fade):
    assert len(received(over("inversion(P=1, threshold=0)", fade), torch.ones(9, 5))[1].gains) == 9


def gains(rule, fade="rayleigh(power=1)", n=100_000, k=0):
    channel = over(rule, fade, "none()")
    found = channel.draw(n, torch.arange(n), 1, seed=0, k=k).gains
    return torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float64)


@pytest.mark.parametrize(("csi", "t"), [(0.9, 0.2), (0.5, 0.5), (0, 1.0), (1, 0.3)])
def test_who_knows_its_channel_by_csi_is_heard_with_csi(csi, t):
    n = 100_000
    active, found = gains(f"inversion(P=1, threshold={t}, csi={csi})", n=n)
    assert abs(len(active) / n - math.exp(-t)) < SIGMAS * math.sqrt(math.exp(-t) * (1 - math.exp(-t)) / n)
    everybody = torch.zeros(n, dtype=torch.float64)
    everybody[active] = found
    assert_mean(everybody, csi * math.exp(-t))
    if csi == 1:
        torch.testing.assert_close(found, torch.ones_like(found))
    else:
        assert_mean(found, csi)
        var = (1 - csi**2) / 2 * math.exp(t) * special.exp1(t)  # of Re(e / h_hat), given that it is active
        assert found.var().item() == pytest.approx(var, rel=0.03)


@pytest.mark.parametrize("phase", [0.3, 1.5, 4.0])
def test_a_phase_error_costs_what_it_says(phase):
    law = math.sin(phase) / phase, math.exp(-(phase**2) / 2)
    for phase_law, factor in zip(("uniform", "gaussian"), law, strict=True):
        for csi in (1, 0.8):
            rule = f"inversion(P=1, threshold=0.5, csi={csi}, phase={phase}, phase_law={phase_law})"
            assert_mean(gains(rule)[1], csi * factor)


def test_a_carrier_offset_turns_from_entry_to_entry():
    """Each client by itself: its first entry as without it, and then Re(c exp(2 pi j eps i))."""
    rule, d = "inversion(P=1, threshold=0.1, csi=0.8, phase=1, cfo={})", 50
    still, turned = (heard(over(rule.format(cfo), "rayleigh()", "none()"), 20, d) for cfo in (0, 0.02))
    torch.testing.assert_close(turned[:, 0], still[:, 0])
    loud = still.any(1)
    torch.testing.assert_close(turned.any(1), loud)
    sums = turned[loud][:, 2:] + turned[loud][:, :-2]  # cos(x + e) + cos(x - e) = 2 cos(e) cos(x)
    turn = (sums / (2 * turned[loud][:, 1:-1])).median(1).values.acos() / (2 * math.pi)
    assert (turn <= 0.02).all()
    assert turn.std() > 0.002
    torch.testing.assert_close(sums, 2 * (2 * math.pi * turn[:, None]).cos() * turned[loud][:, 1:-1])


def test_phase_errors_and_carrier_offsets_go_either_way():
    """Their mean cosine would be the same on one side alone; what two impairments do together would not."""
    channel = over("inversion(P=1, threshold=0, phase=1, cfo=0.01)", "unit()", "none()")
    found = channel.draw(4000, torch.arange(4000), 1, seed=0, k=0).gains
    _, phases, turns = torch.tensor([gain.args for gain in found.values()]).T
    for drawn, most in ((phases, 1), (turns, 0.01)):
        assert stats.kstest(drawn.numpy(), stats.uniform(-most, 2 * most).cdf).pvalue > 1e-3


def test_far_along_a_long_vector_a_carrier_still_turns_exactly():
    found = turning(2.0, 0.3, 0.25, 11_000_001, torch.device("cpu"))[-4:]
    i = np.arange(11_000_001 - 4, 11_000_001) % 4
    np.testing.assert_allclose(found.numpy(), 2 * np.cos(0.3 + np.pi / 2 * i), atol=1e-7)


def test_a_gain_does_not_depend_on_who_else_takes_part_nor_on_the_other_impairments():
    n = 30
    channel = over("inversion(P=1, threshold=0.2, csi=0.9, phase=0.5)", "rayleigh()", "none()")
    everybody = channel.draw(n, torch.arange(n), 5, seed=0, k=3).gains
    some = channel.draw(n, torch.tensor([7, 2, 21]), 5, seed=0, k=3).gains
    assert some == {client: everybody[client] for client in (7, 2, 21) if client in everybody}
    rule = "inversion(P=1, threshold=0.1, csi={}, phase=0.5)"
    (_, unsure), (_, sure) = (gains(rule.format(csi), "unit()", n) for csi in (0.999, 1))
    torch.testing.assert_close(unsure, sure, rtol=0, atol=0.1)  # the phases are the same


def test_everybody_silenced_is_an_empty_round(tiny):
    e = tiny.with_(power="inversion(P=1, threshold=100)", channel="flat(noise_on=sum)", receiver="mac(C=auto)")
    with pytest.warns(Note, match="round 1: nobody was heard; the model stays as it is"):
        result = run(e.with_(rounds=2))
    assert [r["channel/senders"] for r in result.rounds] == [0, 0]
    assert result.rounds[0]["test/loss"] == result.rounds[1]["test/loss"]


@pytest.mark.parametrize("rule", ["limit(P=1)", "inversion(P=1, threshold=100)"])
def test_infinite_interference_beside_nothing_sent_is_none(rule):
    channel, who = over(rule, "rayleigh()"), torch.arange(3)
    fade = channel.draw(3, who, 4, 0, 0)._replace(xi=torch.tensor([math.inf, -math.inf, 1.0, 0.0]))
    nothing = Upload(who, torch.zeros(3, 4), torch.zeros(3, 0), torch.zeros(3))
    assert channel.superpose([nothing], fade).g.tolist() == [0.0] * 4


def test_inversion_needs_one_amplitude_a_client(tiny):
    e = tiny.with_(power="inversion(P=1, threshold=1)", channel="flat(noise_on=sum)", fading="block(entries=5)")
    with pytest.raises(InputError, match="inversion needs one amplitude a client and round"):
        build(e)


def test_limit_goes_with_fading_along_the_vector():
    update = torch.randn(3, 20)
    channel = over("limit(P=1)", "block(entries=4)")
    got, fade = received(channel, update)
    p = 20 / update.double().norm(dim=1).max() ** 2
    exact = (heard(channel, 3, 20) * update).mean(0) + fade.xi / (3 * p.sqrt())
    torch.testing.assert_close(got.g, exact.float())


# ------------------------------------------------------------------------------------------------------------ contracts

PARTS = [
    *({"power": spec, "channel": "flat(noise_on=sum)"} for spec in EXAMPLES["powers"]),
    *({"noise": spec} for spec in EXAMPLES["noises"]),
    *({"fading": spec} for spec in EXAMPLES["fadings"]),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: next(iter(part.values())))
def test_every_part_is_resumed_and_takes_any_chunk_and_any_clients(tiny, part, registries):
    participation("most")(lambda: lambda n, source: source.permutation(n)[: n - 1])
    e = tiny.with_(**part, participation="most()")
    sim = build(e)
    whole = list(simulate(sim, sim.start, 4))
    again = build(e.with_(chunk=2))
    assert torch.equal(list(simulate(again, whole[1].state, 4, start=2))[-1].state.w, whole[-1].state.w)
    everybody, some = (sim.channel.draw(5, who, 20, 0, 2) for who in (torch.arange(5), torch.tensor([3, 1])))
    assert torch.equal(some.h, everybody.h[[3, 1]])
    assert torch.equal(some.xi, everybody.xi)


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS, ids=lambda part: next(iter(part.values())))
def test_every_part_is_the_same_on_a_gpu(tiny, part, cuda):
    here, there = (list(simulate(sim := build(tiny.with_(**part, device=d)), sim.start, 2)) for d in ("cpu", cuda))
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.state.w.cpu(), a.state.w, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("registry", "text", "said"),
    [
        (noise, "bursts(length=0)", "length must be at least 1: got 0"),
        (noise, "bursts(alpha=2.1)", r"alpha must be in \[0.5, 2\]"),
        (noise, "field(density=0)", "density must be positive"),
        (noise, "field(density=1, exponent=2)", "exponent must be above 2, .* and at most 8: got 2"),
        (noise, "field(density=1, exponent=9)", "exponent must be above 2"),
        (noise, "field(density=1, hold=0.5)", "hold must be a whole number"),
        (noise, "field(density=1, power=inf)", "power must be positive and finite"),
        (noise, "markov(p=0, q=0)", "p and q are both 0"),
        (noise, "markov(p=1.2)", r"p must be in \[0, 1\]"),
        (noise, "markov(good='sos()')", r"noise markov\(good='sos\(\)'\): noise 'sos' is unknown; did you mean 'sas'"),
        (noise, "markov(bad='sas(tua=1)')", "sas has no argument 'tua'; did you mean 'tau'"),
        (noise, "markov(bad='sas(tau=-1)')", r"noise sas\(tau=-1\): tau must be at least 0|tau must be in"),
        (noise, "markov(bad=3)", "noise must be a spec such as"),
        (noise, "markov(bad='sas() | sas()')", "only receivers can be chained"),
        (noise, "markov(bad='markov()')", "markov cannot stand within another noise"),
        (fading, "block()", "say how long a block is: rounds=10, entries=1000, or both"),
        (fading, "block(rounds=0)", "rounds must be at least 1"),
        (fading, "block(entries=1.5)", "entries must be a whole number"),
        (fading, "block(of='rayliegh()', rounds=2)", "fading 'rayliegh' is unknown; did you mean 'rayleigh'"),
        (fading, "block(of='block(rounds=2)', rounds=2)", "cannot stand within another fading"),
        (fading, "ar(a=1.1)", r"a must be in \[0, 1\]"),
        (fading, "ar(a=0.5, of='block(rounds=2)')", "cannot stand within another fading"),
        (power, "limit(P=0)", "P must be positive"),
        (power, "inversion(P=1, threshold=-1)", "threshold must be at least 0"),
        (power, "inversion(P=1, threshold=1, csi=1.1)", r"csi must be in \[0, 1\]"),
        (power, "inversion(P=1, threshold=1, phase=-1)", "phase must be at least 0"),
        (power, "inversion(P=1, threshold=1, phase_law=normal)", "phase_law: 'normal' is unknown"),
        (power, "inversion(P=1, threshold=1, cfo=1)", r"cfo must be in \[0, 0.5\]"),
        (power, "inversion(P=1)", "missing a required argument: 'threshold'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(registry, text, said):
    with pytest.raises(InputError, match=said) as error:
        registry.one(text)()
    assert "\n" not in str(error.value)


def test_without_fading_an_imperfect_estimate_makes_the_mean_gain_larger():
    """E[1 / (csi + sqrt(1 - csi^2) e)] over the circle is 1 / csi: that the mean gain is csi is Rayleigh's alone."""
    found = gains("inversion(P=1, threshold=0.01, csi=0.9)", "unit()")[1]
    assert_mean(found, 1 / 0.9)


def test_the_page_shows_a_picture_of_every_part_of_the_air():
    page = (Path(__file__).parent.parent / "docs/air.md").read_text()
    before = {"none", "sas", "gaussian", "student_t", "middleton", "rayleigh", "rician", "nakagami", "unit"}
    for name in {entry.name for registry in (power, noise, fading) for entry in registry} - before:
        assert name in PICTURES
        assert f"stableair air {name}\n" in page
        assert f"(images/air-{name}.png)" in page


def test_a_picture_is_written_where_it_is_asked_for(command, tmp_path):
    assert command("air", "bursts", "-o", "b.pdf") == (0, "b.pdf\n", "")
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
