"""Transmit power: limits, channel inversion, and imperfect knowledge of the channel."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from helpers.channels import SIGMAS, assert_mean, entry_gains, flat_channel, received, transmissions
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.channels.power import Power, estimate, mean_inverse_square, rotating_gain
from stableair.channels.registries import channel as channels
from stableair.channels.registries import fading, noise, power
from stableair.contracts import FadingLaw, Upload
from stableair.errors import InputError
from stableair.runner import run
from stableair.streams import generator


def test_limit_follows_its_formula():
    update = torch.randn(5, 40)
    got, draw = received(flat_channel("limit(P=3)", "rayleigh()", pilots=7), update)
    p = 3 * 40 / update.double().norm(dim=1).max() ** 2
    exact = (draw.h[:, None] * update.double()).mean(0) + draw.xi.double() / (5 * p.sqrt())
    torch.testing.assert_close(got.g, exact.float())
    torch.testing.assert_close(got.pilot, (draw.pilot / (5 * p.sqrt())).float())


def test_under_a_limit_all_received_values_scale_with_the_payloads():
    update, channel = torch.randn(4, 30), flat_channel("limit(P=0.1)", "rayleigh()", "sas()", pilots=9)
    one, other = received(channel, update)[0], received(channel, 1000 * update)[0]
    torch.testing.assert_close(other.g, 1000 * one.g, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(other.pilot, 1000 * one.pilot)
    unlimited, limited = (
        received(replace(channel, power=power.one("none()")()), update)[0],
        received(channel, update)[0],
    )
    assert not torch.allclose(unlimited.g, limited.g)


@pytest.mark.parametrize("rule", ["limit(P=1e30)", "inversion(P=1e30, threshold=0.1)"])
def test_unlimited_power_is_noiseless(rule):
    update = torch.randn(6, 30)
    noisy, noiseless = (received(flat_channel(rule, "rayleigh()", xi), update)[0] for xi in ("sas(tau=3)", "none()"))
    torch.testing.assert_close(noisy.g, noiseless.g)


@pytest.mark.parametrize("receiver", ["none()", "mac(C=auto)"])
@pytest.mark.parametrize("rule", ["limit(P=1)", "inversion(P=1, threshold=0.05)"])
def test_with_a_power_rule_gradient_and_delta_give_the_same_trajectory(tiny, rule, receiver):
    base = tiny.with_(power=rule, channel="flat(noise_on=sum)", receiver=receiver, noise="sas(tau=0.5)")

    def rounds(**changes):
        sim = build(base.with_(**changes))
        return list(simulate(sim, sim.start, 4))

    for a, b in zip(rounds(payload="gradient"), rounds(payload="delta"), strict=True):
        torch.testing.assert_close(a.state.model.w, b.state.model.w, rtol=1e-3, atol=1e-4)
        assert a.metrics["channel/snr_db"] == pytest.approx(b.metrics["channel/snr_db"], abs=1e-3)
    gradient, delta = (rounds(payload=payload, power="none()")[-1].state.model.w for payload in ("gradient", "delta"))
    assert not torch.allclose(gradient, delta, rtol=1e-2, atol=1e-2)  # without a power rule they differ


@pytest.mark.parametrize("rule", ["limit(P=1)", "inversion(P=1, threshold=0.1)"])
def test_interference_on_the_mean_is_refused(tiny, rule):
    with pytest.raises(InputError) as error:
        build(tiny.with_(power=rule))
    assert error.value.code == "noise-not-on-sum"


def test_inversion_follows_its_formula():
    """Clients with h^2 < t do not transmit; the others arrive unfaded; the interference has the documented scale."""
    update, t, P = torch.randn(30, 40), 0.5, 2.0
    update[:15] *= 10
    got, draw = received(flat_channel(f"inversion(P={P}, threshold={t})", "rayleigh(power=1)", pilots=7), update)
    active = draw.h.square() >= t
    assert 5 < active.sum() < 28
    scale = update[active].double().norm(dim=1).max() / 40**0.5 / math.sqrt(P / special.exp1(t)) / active.sum()
    torch.testing.assert_close(got.g, (update[active].double().mean(0) + scale * draw.xi).float())
    torch.testing.assert_close(got.pilot, (scale * draw.pilot).float())
    torch.testing.assert_close(got.clean, update[active].double().mean(0))
    assert got.senders == got.divisor == active.sum()


@pytest.mark.parametrize("t", [0.01, 0.3, 2.0])
def test_the_power_of_inversion_is_exact_for_rayleigh_fading(t):
    """The closed form and the mean of 10^6 draws, for fading of a given power and of a given mean."""
    known = {"rayleigh(power=1)": special.exp1(t), "rayleigh()": math.pi / 4 * special.exp1(math.pi * t / 4)}
    for spec, expected in known.items():
        assert mean_inverse_square(fading.one(spec)(), t) == pytest.approx(expected, rel=1e-12)
        drawn = mean_inverse_square(fading.one(spec)().draw, t)  # from draws only
        assert drawn == pytest.approx(expected, abs=SIGMAS * (special.expn(2, t) / t / 1e6) ** 0.5 * 1.3)


@pytest.mark.parametrize(
    ("spec", "t"),
    [
        ("nakagami(m=2, mean=2)", 0.8), ("nakagami(m=0.5)", 0.3), ("nakagami(m=0.7, mean=3)", 0.8),
        ("nakagami(m=1)", 0.2), ("rician(K=0)", 0.1), ("rician(K=3, mean=2)", 0.5), ("rician(K=1e6)", 0.7),
        ("unit()", 0.9), ("unit()", 1.1),
    ],
)  # fmt: skip
def test_other_closed_forms_agree_with_draws(spec, t):
    law = fading.one(spec)()
    assert mean_inverse_square(law, t) == pytest.approx(mean_inverse_square(law.draw, t), rel=5e-3)


@pytest.mark.parametrize("t", [1e-9, 1e-4, 0.02, 0.5, 3.0])
@pytest.mark.parametrize(
    "spec",
    [
        "nakagami(m=0.5)", "nakagami(m=0.7, mean=3)", "nakagami(m=0.999)", "nakagami(m=1.5)",
        "rician(K=0.3)", "rician(K=4, mean=3)", "rician(K=90)",
    ],
)  # fmt: skip
def test_the_power_of_inversion_is_the_integral_of_the_density(spec, t):
    """int f(h) / h^2 dh with scipy's density f, in u = log h: small thresholds, which draws rarely reach, included."""
    name, arguments = spec[:-1].split("(")
    shape, mean = (float(part.split("=")[1]) for part in [*arguments.split(", "), "mean=1"][:2])
    unit_scale = stats.nakagami(shape) if name == "nakagami" else stats.rice(math.sqrt(2 * shape))
    scale = mean / unit_scale.mean()
    f = lambda u: unit_scale.pdf(math.exp(u) / scale) / scale * math.exp(-u)  # noqa: E731
    low, high = math.log(t) / 2, math.log(40 * mean)
    points = np.linspace(low, high, 60)
    expected = sum(integrate.quad(f, a, b, epsabs=0)[0] for a, b in itertools.pairwise(points))
    assert mean_inverse_square(fading.one(spec)(), t) == pytest.approx(expected, rel=1e-7, abs=1e-30)


@pytest.mark.parametrize(
    ("spec", "csi"),
    [("nakagami(m=1)", 1), ("nakagami(m=1)", 0.6), ("nakagami(m=0.9999999999)", 1), ("rician(K=0)", 0.6)],
)
def test_laws_that_equal_rayleigh_fading_have_its_power(spec, csi):
    for t in (1e-12, 1e-3, 0.4):
        expected = mean_inverse_square(fading.one("rayleigh()")(), t)
        assert mean_inverse_square(fading.one(spec)(), t, csi) == pytest.approx(expected, rel=1e-7)


def test_an_estimate_that_has_another_law_than_the_channel_is_averaged_over_draws():
    """Without fading h_hat is csi + sqrt(1 - csi^2) e on a circle, and the mean of 1/h_hat^2 is 1 / |2 csi^2 - 1|."""
    assert mean_inverse_square(fading.one("unit()")().draw, 1e-3, csi=0.95) == pytest.approx(
        1 / (2 * 0.95**2 - 1), rel=0.01
    )
    rayleigh = mean_inverse_square(fading.one("rayleigh(power=1)")().draw, 0.2, csi=0.6)
    assert rayleigh == pytest.approx(special.exp1(0.2), rel=0.01)


@pytest.mark.parametrize(
    ("rule", "fades"),
    [
        ("inversion(P=1, threshold=0)", "rayleigh()"),
        ("inversion(P=1, threshold=0)", "rician(K=3)"),
        ("inversion(P=1, threshold=0)", "nakagami(m=1)"),
        ("inversion(P=1, threshold=0)", "ar(a=0.5)"),
        ("inversion(P=1, threshold=0)", "block(rounds=2)"),
        ("inversion(P=1, threshold=0, csi=0.9)", "nakagami(m=2)"),  # csi h and the error can cancel
        ("inversion(P=1, threshold=0, csi=0.6)", "two_to_three()"),
        ("inversion(P=1, threshold=0, csi=0.7071067811865475)", "unit()"),
        ("inversion(P=1, threshold=0, csi=0.7071067811865476)", "unit()"),
        ("inversion(P=1, threshold=0)", "nakagami(m=0.5)"),
        ("inversion(P=1, threshold=0)", "rician(K=1e6)"),
    ],
)
def test_inversion_without_a_threshold_is_refused_if_its_power_is_unbounded(tiny, registries, rule, fades):
    fading("two_to_three")(lambda: two_to_three)
    with pytest.raises(InputError) as error:
        build(tiny.with_(power=rule, fading=fades, channel="flat(noise_on=sum)"))
    assert error.value.code == "unbounded-power"


@pytest.mark.parametrize("csi", [1, 0.9])
@pytest.mark.parametrize(
    ("fades", "smaller"), [("unit()", 0.1), ("rayleigh(power=0.01)", 0.001), ("two_to_three()", 0.63)]
)
def test_an_inversion_in_which_no_client_transmits_is_refused(tiny, registries, fades, smaller, csi):
    fading("two_to_three")(lambda: two_to_three)
    base = tiny.with_(fading=fades, channel="flat(noise_on=sum)")
    with pytest.raises(InputError) as error:
        build(base.with_(power=f"inversion(P=1, threshold=50, csi={csi})"))
    assert (error.value.code, error.value.fields["name"]) == ("no-senders", "threshold")
    assert str(error.value).endswith(f"choose a smaller threshold, such as {smaller}")
    build(base.with_(power=f"inversion(P=1, threshold={smaller}, csi={csi})"))


@pytest.mark.parametrize("method", ["gains", "noise"])
def test_a_power_rule_written_for_version_0_2_is_refused(tiny, registries, method):
    power("old")(type("Old", (Power,), {method: lambda self, *_: None}))
    with pytest.raises(InputError) as error:
        build(tiny.with_(power="old()", channel="flat(noise_on=sum)"))
    assert (error.value.code, error.value.fields["name"]) == ("renamed-method", method)


two_to_three = FadingLaw(lambda n, source: 2 + source.uniform(n), support=(2.0, 3.0))


@pytest.mark.parametrize(
    ("csi", "fades"),
    [
        (1, "unit()"),
        (0.9, "unit()"),
        (0.1, "ar(a=0.5, of='unit()')"),
        (1, "nakagami(m=2)"),
        (0, "nakagami(m=2)"),
        (1, "block(of='nakagami(m=2)', rounds=3)"),
        (0.9, "two_to_three()"),
        (0.2, "two_to_three()"),
        (1, "at_least_two()"),
    ],
)
def test_inversion_without_a_threshold_is_allowed_if_its_power_is_bounded(registries, csi, fades):
    fading("two_to_three")(lambda: two_to_three)
    fading("at_least_two")(lambda: replace(two_to_three, support=(2.0, math.inf)))
    channel = flat_channel(f"inversion(P=1, threshold=0, csi={csi})", fades)
    assert len(received(channel, torch.ones(9, 5))[1].transmissions) == 9
    h, errors, phases = (generator(7, name, 0) for name in "hep")
    square = estimate(channel.fading.draw(10**5, h), channel.fading, csi, errors, phases).abs().square()
    assert channel.power.mean_inverse_square == pytest.approx((1 / square).mean().item(), rel=0.02)


@pytest.mark.parametrize("csi", [0, 0.3, 0.5**0.5, 0.9, 1])
@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 1.0, 1.5, 2.1])
def test_the_power_to_invert_an_estimate_of_a_constant_is_its_integral_over_the_phase(csi, t):
    error = math.sqrt(1 - csi * csi)
    phases = (np.arange(10**6) + 0.5) * math.pi / 10**6
    square = np.abs(csi + error * np.exp(1j * phases)) ** 2
    if t or abs(csi - error) > 1e-9:
        expected = (1 / square[square >= t - 1e-12]).sum() / 10**6
        assert mean_inverse_square(fading.one("unit()")(), t, csi) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    else:
        assert mean_inverse_square(fading.one("unit()")(), t, csi) > 1e7


@pytest.mark.parametrize(("csi", "t"), [(0.9, 0.2), (0.5, 0.5), (0, 1.0), (1, 0.3)])
def test_an_imperfect_channel_estimate_reduces_the_gain_to_csi(csi, t):
    n = 100_000
    active, gains, energies = transmissions(f"inversion(P=1, threshold={t}, csi={csi})", n=n)
    assert abs(len(active) / n - math.exp(-t)) < SIGMAS * math.sqrt(math.exp(-t) * (1 - math.exp(-t)) / n)
    gains_of_all = torch.zeros(n, dtype=torch.float64)
    gains_of_all[active] = gains.real
    assert_mean(gains_of_all, csi * math.exp(-t))
    assert_mean(energies, math.exp(t) * special.exp1(t))
    if csi == 1:
        torch.testing.assert_close(gains, torch.ones_like(gains))
    else:
        assert_mean(gains.real, csi)
        assert_mean(gains.imag, 0)
        var = (1 - csi**2) / 2 * math.exp(t) * special.exp1(t)  # of each part of e / h_hat, given that it is active
        assert gains.real.var().item() == pytest.approx(var, rel=0.03)
        assert gains.imag.var().item() == pytest.approx(var, rel=0.03)


@pytest.mark.parametrize("phase", [0.3, 1.5, 4.0])
def test_a_phase_error_costs_the_documented_gain(phase):
    law = math.sin(phase) / phase, math.exp(-(phase**2) / 2)
    for phase_law, factor in zip(("uniform", "gaussian"), law, strict=True):
        for csi in (1, 0.8):
            rule = f"inversion(P=1, threshold=0.5, csi={csi}, phase={phase}, phase_law={phase_law})"
            gains = transmissions(rule)[1]
            assert_mean(gains.real, csi * factor)
            assert_mean(gains.imag, 0)


@pytest.mark.parametrize("d", [50, 51, 1])
def test_a_carrier_offset_rotates_from_symbol_to_symbol(d):
    """Per client: its symbols, times its gain without the offset, times exp(2 pi j eps i)."""
    rule, update = "inversion(P=1, threshold=0.1, csi=0.8, phase=1, cfo={})", torch.randn(d)
    (active, gains, _), clients = transmissions(rule.format(0), "rayleigh()", 20), torch.arange(20)
    channel = flat_channel(rule.format(0.02), "rayleigh()", "none()")
    draw = channel.draw(20, clients, d, 0, 0)
    assert list(draw.transmissions) == active.tolist()
    c = np.append(update.double(), [0] * (d % 2)).view(np.complex128)
    offsets = []
    for client, gain in zip(active.tolist(), gains.tolist(), strict=True):
        offset = draw.transmissions[client].gain.args[1]
        offsets.append(offset)
        sent = Upload(torch.tensor([client]), update[None], torch.zeros(1, 0), torch.zeros(1))
        rotated = gain * c * np.exp(2j * np.pi * offset * np.arange(len(c)))
        np.testing.assert_allclose(channel.accumulate([sent], draw).faded, rotated.view(float)[:d], atol=1e-12)
    assert 0.002 < np.std(offsets) < np.max(np.abs(offsets)) <= 0.02


@pytest.mark.parametrize("phase", [0.3, 1.0])
@pytest.mark.parametrize("air", ["inversion", "waveform"])
def test_the_distortion_by_phase_errors_is_the_variance_of_the_complex_gain(air, phase):
    """E |g - m mean|^2 = Var(exp(j phi)) sum |u_n|^2 / N^2, Var = 1 - m^2, m = sin(a) / a, at the same uses."""
    n, d = 20, 2000
    if air == "inversion":
        channel = flat_channel(f"inversion(P=1, threshold=0.1, phase={phase})", "unit()", "none()")
    else:
        parts = {"fading": fading.one("unit()")(), "noise": noise.one("none()")()}
        channel = channels.one(f"waveform('hadamard(n=1)', phase={phase})")()(**parts)
    update, m = torch.randn(n, d), math.sin(phase) / phase
    errors = []
    for k in range(150):
        got, _ = received(channel, update, k)
        errors.append((got.g - m * got.clean).square().sum())
        assert got.resources.symbols == d / 2
    assert_mean(torch.stack(errors), (1 - m * m) * update.square().sum().item() / n**2)


@pytest.mark.parametrize("cfo", [0, 0.01])
def test_adding_symbols_in_pieces_changes_no_bit(cfo, monkeypatch):
    channel = flat_channel(f"inversion(P=1, threshold=0.1, csi=0.8, cfo={cfo})", "rayleigh()", "none()")
    update = torch.randn(6, 51)
    whole = received(channel, update)[0].g
    monkeypatch.setattr("stableair.channels.superposition.PIECE", 4)
    assert torch.equal(received(channel, update)[0].g, whole)


def test_phase_errors_and_carrier_offsets_have_symmetric_distributions():
    """One-sided errors would have the same mean cosine, but not the same effect of two impairments together."""
    channel = flat_channel("inversion(P=1, threshold=0, phase=1, cfo=0.01)", "unit()", "none()")
    by_client = channel.draw(4000, torch.arange(4000), 1, seed=0, k=0).transmissions
    gains, offsets = (torch.tensor(x) for x in zip(*(sent.gain.args for sent in by_client.values()), strict=True))
    for drawn, limit in ((gains.angle(), 1), (offsets, 0.01)):
        assert stats.kstest(drawn.numpy(), stats.uniform(-limit, 2 * limit).cdf).pvalue > 1e-3


def test_the_rotation_is_exact_at_the_end_of_a_long_vector():
    gain = rotating_gain(2 + 1j, 0.25, 22_000_001, torch.device("cpu"))
    assert len(gain) == 11_000_001
    i = np.arange(11_000_001 - 4, 11_000_001) % 4
    np.testing.assert_allclose(gain[-4:].numpy(), (2 + 1j) * 1j**i, atol=1e-7)


def test_a_gain_depends_neither_on_other_clients_nor_on_other_impairments():
    n = 30
    channel = flat_channel("inversion(P=1, threshold=0.2, csi=0.9, phase=0.5)", "rayleigh()", "none()")
    all_clients = channel.draw(n, torch.arange(n), 5, seed=0, k=3).transmissions
    some = channel.draw(n, torch.tensor([7, 2, 21]), 5, seed=0, k=3).transmissions
    assert some == {client: all_clients[client] for client in (7, 2, 21) if client in all_clients}
    rule = "inversion(P=1, threshold=0.1, csi={}, phase=0.5)"
    estimated, known = (transmissions(rule.format(csi), "unit()", n)[1] for csi in (0.999, 1))
    torch.testing.assert_close(estimated, known, rtol=0, atol=0.1)  # the phases are the same


def test_a_round_in_which_no_client_is_received_is_empty(tiny, caplog):
    e = tiny.with_(power="inversion(P=1, threshold=100)", channel="flat(noise_on=sum)", receiver="mac(C=auto)")
    result = run(e.with_(rounds=2))
    assert [record.args for record in caplog.records if record.name == "stableair"] == [(0,), (1,)], (
        "one message per round"
    )
    assert [r["channel/senders"] for r in result.rounds] == [0, 0]
    assert result.rounds[0]["test/loss"] == result.rounds[1]["test/loss"]


@pytest.mark.parametrize("rule", ["limit(P=1)", "inversion(P=1, threshold=100)"])
def test_infinite_interference_without_a_signal_gives_zero(rule):
    channel, clients = flat_channel(rule, "rayleigh()"), torch.arange(3)
    draw = channel.draw(3, clients, 4, 0, 0)._replace(xi=torch.tensor([math.inf, -math.inf, 1.0, 0.0]))
    nothing = Upload(clients, torch.zeros(3, 4), torch.zeros(3, 0), torch.zeros(3))
    assert channel.superpose([nothing], draw).g.tolist() == [0.0] * 4


def test_inversion_needs_one_amplitude_per_client(tiny):
    e = tiny.with_(power="inversion(P=1, threshold=1)", channel="flat(noise_on=sum)", fading="block(entries=5)")
    with pytest.raises(InputError) as error:
        build(e)
    assert error.value.code == "unsupported-fading"


def test_limit_supports_fading_along_the_vector():
    update = torch.randn(3, 20)
    channel = flat_channel("limit(P=1)", "block(entries=4)")
    got, draw = received(channel, update)
    p = 20 / update.double().norm(dim=1).max() ** 2
    exact = (entry_gains(channel, 3, 20) * update).mean(0) + draw.xi / (3 * p.sqrt())
    torch.testing.assert_close(got.g, exact.float())


def test_without_fading_an_imperfect_estimate_makes_the_mean_gain_larger():
    """E[1 / (csi + sqrt(1 - csi^2) e)] over the circle is 1 / csi; the mean gain is csi for Rayleigh fading only."""
    gains = transmissions("inversion(P=1, threshold=0.01, csi=0.9)", "unit()")[1]
    assert_mean(gains.real, 1 / 0.9)
    assert_mean(gains.imag, 0)
