"""The waveform channel: bases, offsets, multipath, antennas, and the distribution of the filters' outputs."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from helpers.components import EXAMPLES
from stableair import stable
from stableair.builder import build
from stableair.channels import waveform as module
from stableair.channels.modulation import root_raised_cosine
from stableair.channels.registries import basis as bases
from stableair.channels.registries import channel, fading, noise, power
from stableair.contracts import Upload
from stableair.errors import InputError
from stableair.streams import generator


def build_channel(spec, fades="unit()", interference="none()", **others):
    return channel.one(spec)()(fading=fading.one(fades)(), noise=noise.one(interference)(), **others)


def waveform(basis, arguments="", **parts):
    return build_channel(f"waveform(basis='{basis}'{arguments})", **parts)


def uploads(update, clients=None):
    clients = torch.arange(len(update)) if clients is None else torch.tensor(clients)
    return [Upload(clients, update, torch.zeros(len(update), 0), torch.ones(len(update)))]


def received(air, update, draw):
    return air.superpose(uploads(update, draw.clients.tolist()), draw).g


def filters(basis, blocks=3):
    """The matched filters as a matrix: (symbols, samples)."""
    samples = torch.eye(basis.samples(blocks), dtype=torch.complex128)
    return torch.stack([basis.demodulate(r).flatten() for r in samples], 1)


def symbols(g, n):
    """Entries as complex symbols (blocks, n); an incomplete last block is dropped."""
    c = torch.view_as_complex(g[: len(g) // (2 * n) * 2 * n].double().view(-1, 2))
    return c.view(-1, n)


@pytest.mark.parametrize("spec", EXAMPLES["bases"])
def test_a_basis_is_orthonormal_and_its_filters_are_matched(spec):
    basis = bases.one(spec)()
    rows = filters(basis)
    torch.testing.assert_close(rows @ rows.mH, torch.eye(len(rows), dtype=torch.complex128), rtol=0, atol=1e-12)
    c = torch.view_as_complex(generator(0, "c").normal(len(rows), 2))
    x = basis.modulate(c.view(-1, basis.n))
    assert len(x) == basis.samples(3)
    torch.testing.assert_close(basis.demodulate(x).flatten(), c)
    if basis.length == basis.hop == basis.n or basis.n == 1:  # without a prefix, the pulses equal the filters
        torch.testing.assert_close(x, rows.mH @ c)


def test_a_pulse_is_close_to_its_root_raised_cosine():
    cosine = torch.from_numpy(root_raised_cosine((np.arange(64) - 32) / 4, 0.5))
    p = bases.one("pulse(rolloff=0.5, span=16, samples=4)")().shape.flatten()
    assert (p - cosine / cosine.norm()).norm() < 0.02


@pytest.mark.parametrize("spec", [*EXAMPLES["bases"], "ofdm(n=16, prefix=4, taps=3)"])
@pytest.mark.parametrize("d", [1, 2501])
def test_synchronised_pulses_without_phases_are_equation_3(spec, d, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 200)  # several pieces
    air, update = waveform(spec, fades="rayleigh()", interference="sas()"), torch.randn(5, d)
    draw = air.draw(5, torch.arange(5), d, seed=1, k=2)
    h = build_channel("flat()", "rayleigh()").draw(5, torch.arange(5), d, 1, 2).h
    exact = (h[:, None] * update.double()).mean(0) + draw.xi
    torch.testing.assert_close(received(air, update, draw), exact.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("spec", EXAMPLES["bases"])
def test_the_interference_is_the_matched_filters_output_of_one_sequence_of_samples(spec, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 64)
    air = waveform(spec, interference="sas(alpha=1.3, tau=0.2)")
    xi = air.draw(2, torch.arange(2), 999, seed=3, k=4).xi
    tau = 0.2 * air.basis.oversampling ** (1 / 2 - 1 / 1.3)
    z = stable.isotropic(air.basis.samples(air.basis.blocks(999)), 1.3, tau, generator(3, "noise", 4))
    exact = torch.view_as_real(air.basis.demodulate(z)).flatten()[:999]
    torch.testing.assert_close(xi, exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.8, 1.5, 2])
@pytest.mark.parametrize("spec", ["pulse()", "ofdm(n=16, prefix=4)", "hadamard(n=64)"])
def test_the_interference_of_an_entry_has_the_scale_of_its_filter(spec, alpha):
    """E exp(i t xi) = exp(-(scale t)^alpha), scale = tau_s (sum |phi|^alpha)^(1/alpha); one observation per block."""
    tau, blocks = 0.3, 3000
    air = waveform(spec, interference=f"sas(alpha={alpha}, tau={tau})")
    samples = 4 if spec == "pulse()" else 1
    scale = tau * samples ** (1 / 2 - 1 / alpha) * filters(air.basis, 1)[0].abs().pow(alpha).sum().item() ** (1 / alpha)
    if spec.startswith("hadamard"):
        assert scale == pytest.approx(tau * 64 ** (1 / alpha - 0.5))
    group = max(air.basis.n, 100)  # symbols whose mean is one observation
    xi = air.draw(1, torch.arange(1), 2 * group * blocks, seed=0, k=0).xi.double().view(blocks, -1)
    for t in (0.5 / scale, 1 / scale, 2 / scale):
        means = (t * xi).cos().mean(1)
        error = means.std() / blocks**0.5
        assert error < 0.01
        assert abs(means.mean() - math.exp(-((scale * t) ** alpha))) < 4.5 * error


@pytest.mark.parametrize("samples", [4, 8, 32])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2])
def test_the_interference_does_not_depend_on_the_sampling_rate(samples, alpha):
    """Its scale is tau (int |p(t)|^alpha dt)^(1/alpha), p the root-raised cosine of rolloff 1 in continuous time."""
    t = (np.arange(160_000) + 0.5) / 1e4 - 8
    p = 4 * np.cos(2 * np.pi * t) / (np.pi * (1 - 16 * t**2))
    scale = 0.3 * (np.abs(p) ** alpha).mean() ** (1 / alpha) * 16 ** (1 / alpha)
    air = waveform(f"pulse(rolloff=1, span=16, samples={samples})", interference=f"sas(alpha={alpha}, tau=0.3)")
    xi = air.draw(1, torch.arange(1), 60_000, seed=0, k=0).xi.double()
    measured = (-(xi / scale).cos().mean().log().item()) ** (1 / alpha)  # in units of the scale
    assert measured == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("samples", [2, 4, 8, 32])
def test_the_default_pulse_has_the_scale_of_the_documentation(samples):
    basis = bases.one(f"pulse(samples={samples})")()
    scale = basis.shape.abs().pow(1.5).sum().item() ** (1 / 1.5)
    assert scale * basis.oversampling ** (1 / 2 - 1 / 1.5) == pytest.approx(1.10, abs=0.005)


@pytest.mark.parametrize("alpha", [0.6, 1, 1.7, 2])
def test_complex_samples_are_isotropic_and_stable(alpha):
    z, n = stable.isotropic(200_000, alpha, 0.5, generator(0, "noise")), 200_000
    for w in (1, 1j, 0.6 - 0.8j, 3):
        found = (z * complex(w).conjugate()).real.cos().mean()
        assert abs(found - math.exp(-((0.5 * abs(w)) ** alpha))) < 4.5 / n**0.5
    u, v = generator(0, "A").uniform(n, 2).unbind(-1)
    A = stable.subordinator(u, v, alpha)
    for s in (0.2, 1, 5):  # the Laplace transform
        assert abs((-s * A).exp().mean() - math.exp(-(s ** (alpha / 2)))) < 4.5 * 0.5 / n**0.5


def test_the_far_tail_of_the_subordinator_is_accurate():
    """P(A > x) ~ x^(-a) / Gamma(1 - a); near u = 1, A is (pi (1 - u))^(-1/a) times a constant."""
    u = 1 - torch.tensor([2.0**-50, 2.0**-52, 2.0**-53], dtype=torch.float64)
    A = stable.subordinator(u, torch.full_like(u, 0.5), 1.5)
    torch.testing.assert_close(A[1:] / A[0], torch.tensor([4.0, 8.0]).double() ** (1 / 0.75), rtol=1e-9, atol=0)


def test_a_delay_within_the_prefix_only_rotates_the_subcarriers():
    air, update = waveform("ofdm(n=16, prefix=5)", ", timing=5"), torch.randn(1, 320)
    draw = air.draw(1, torch.arange(1), 320, 0, 0)
    for late in range(6):
        link = draw.links[0]._replace(delay=late)
        c, y = symbols(update[0], 16), symbols(received(air, update, draw._replace(links=[link])), 16)
        ramp = torch.polar(torch.ones(16), -2 * math.pi * late / 16 * torch.arange(16)).to(c)
        torch.testing.assert_close(y, c * ramp, rtol=1e-5, atol=1e-5)


def test_a_pulse_that_is_a_symbol_late_is_received_in_the_next_symbol():
    air, update = waveform("pulse(samples=4)", ", timing=1"), torch.randn(1, 200)
    draw = air.draw(1, torch.arange(1), 200, 0, 0)
    late = draw._replace(links=[draw.links[0]._replace(delay=4)])
    got = received(air, update, late)
    torch.testing.assert_close(got[2:], update[0, :-2], rtol=1e-5, atol=1e-5)
    assert got[:2].abs().max() < 1e-5


def test_all_possible_delays_are_equally_frequent():
    air = waveform("ofdm()", ", timing=3")
    delays = [link.delay for link in air.draw(4000, torch.arange(4000), 2, 0, 0).links]
    assert stats.chisquare([delays.count(i) for i in range(4)]).pvalue > 1e-3
    assert set(delays) == {0, 1, 2, 3}


def test_a_carrier_offset_rotates_each_sample_further(monkeypatch):
    monkeypatch.setattr(module, "PIECE", 64)
    air, update = waveform("hadamard(n=1)", ", cfo=0.01"), torch.randn(1, 600)
    draw = air.draw(1, torch.arange(1), 600, 0, 0)
    offset = draw.links[0].cfo
    assert 0 < abs(offset) < 0.01
    rotation = torch.polar(torch.ones(300).double(), 2 * math.pi * offset * torch.arange(300).double())
    rotated = symbols(update[0], 1)[:, 0] * rotation
    torch.testing.assert_close(symbols(received(air, update, draw), 1)[:, 0], rotated, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cfo", [0.0, 0.01])
@pytest.mark.parametrize("timing", [0, 1, 0.5])
def test_offsets_and_delays_do_not_depend_on_the_sampling_rate(cfo, timing):
    """The draws equal the draws at one sample per symbol; the sums differ by the error of the sampled pulse."""
    update, got, n = torch.randn(1, 400), [], 2000
    offsets = [link.cfo for link in waveform("hadamard()", f", cfo={cfo}").draw(n, torch.arange(n), 2, 0, 0).links]
    for samples in (4, 8, 32):
        air = waveform(f"pulse(rolloff=1, span=16, samples={samples})", f", cfo={cfo}, timing={timing}")
        links = air.draw(n, torch.arange(n), 2, 0, 0).links
        assert [link.cfo * samples for link in links] == pytest.approx(offsets)
        assert max(link.delay for link in links) == timing * samples
        draw = air.draw(1, torch.arange(1), 400, 0, 0)
        late = draw.links[0]._replace(delay=round(timing * samples))
        got.append(received(air, update, draw._replace(links=[late])))
    for other in got[1:]:
        torch.testing.assert_close(other, got[0], rtol=0, atol=0.05)


@pytest.mark.parametrize(("basis", "time"), [("pulse", 1), ("hadamard", 1), ("ofdm", 1.25)])
def test_the_refusal_of_an_offset_per_symbol_gives_the_units(basis, time):
    with pytest.raises(InputError) as error:
        waveform(basis, ", noise_on=sum", power=power.one("inversion(P=1, threshold=1, cfo=0.1)")())
    assert error.value.code == "unsupported-power"
    assert str(error.value).endswith(f"per unit of time; with this basis a complex symbol takes {time:g}")


@pytest.mark.parametrize("equalise", ["off", "phase", "full"])
def test_multipath_fades_the_subcarriers_and_a_client_may_compensate_it(equalise):
    air, update = waveform(f"ofdm(n=16, prefix=4, taps=4, equalise={equalise})"), torch.randn(1, 96)
    draw = air.draw(1, torch.arange(1), 96, 0, 0)
    response = torch.fft.fft(draw.links[0].impulse_response, 16)
    gain = {"off": response, "phase": response.abs().to(response), "full": torch.ones_like(response)}[equalise]
    torch.testing.assert_close(
        symbols(received(air, update, draw), 16), symbols(update[0], 16) * gain, rtol=1e-4, atol=1e-5
    )


def test_the_taps_of_a_multipath_channel_have_unit_total_power():
    paths = waveform("ofdm(taps=4)").draw(5000, torch.arange(5000), 2, 0, 0).links
    power = torch.stack([link.impulse_response for link in paths]).abs().square().sum(1)
    assert abs(power.mean() - 1) < 4.5 * power.std() / 5000**0.5


def test_a_uniform_phase_error_gives_the_gain_sin_x_over_x():
    a, n = 1.2, 20_000
    gains = torch.tensor([p.gain for p in waveform("ofdm()", f", phase={a}").draw(n, torch.arange(n), 2, 0, 0).links])
    assert abs(gains.real.mean() - math.sin(a) / a) < 4.5 * gains.real.std() / n**0.5
    assert abs(gains.imag.mean()) < 4.5 * gains.imag.std() / n**0.5


def test_fading_and_batches_do_not_depend_on_other_clients():
    air = waveform("ofdm(taps=3)", ", timing=4, cfo=0.1, phase=1", fades="rayleigh()", interference="sas()")
    all_clients, some = (air.draw(6, torch.tensor(clients), 10, 1, 2) for clients in ([0, 1, 2, 3, 4, 5], [4, 1]))
    for actual, expected in zip(some.links, (all_clients.links[4], all_clients.links[1]), strict=True):
        assert actual[:3] == expected[:3]
        assert torch.equal(actual.impulse_response, expected.impulse_response)
    assert torch.equal(some.xi, all_clients.xi)
    assert not torch.equal(some.xi, air.draw(6, some.clients, 10, 1, 3).xi)


# ------------------------------------------------------------------------------------------------------------ antennas


def gains(antennas, clients, rounds, fades="rayleigh(power=1)", interference="none()"):
    """The gains of the clients, (rounds, clients), and the scale of the interference, (rounds,)."""
    air = waveform("hadamard(n=1)", f", antennas={antennas}", fades=fades, interference=interference)
    found = [air.combine(clients, torch.arange(clients), 0, k) for k in range(rounds)]
    return torch.stack([gain for gain, _ in found]), torch.tensor([scale for _, scale in found])


@pytest.mark.parametrize("fades", ["rayleigh(power=2)", "rician(K=2)"])
def test_blind_combining_is_unbiased(fades):
    found, _ = gains(4, 5, 1500, fades)
    mean = found.mean(1)  # one observation a round
    assert abs(mean.real.mean() - 1) < 4.5 * mean.real.std() / 1500**0.5
    assert abs(mean.imag.mean()) < 4.5 * mean.imag.std() / 1500**0.5


def test_one_client_has_a_gamma_gain():
    found, _ = gains(4, 1, 3000)
    assert found.imag.abs().max() < 1e-12
    assert stats.kstest(found.real.flatten().numpy(), stats.gamma(4, scale=1 / 4).cdf).pvalue > 1e-3


def test_more_antennas_reduce_cross_talk_and_interference_of_alpha_above_1():
    deviation = {M: (gains(M, 5, 60)[0].mean(1) - 1).abs().square().mean().sqrt().item() for M in (16, 1024)}
    assert deviation[16] / deviation[1024] == pytest.approx(8, rel=0.4)  # as 1 / sqrt(M)
    for alpha, tolerance in ((1.5, 0.1), (1, 0.1)):
        few, many = (gains(M, 5, 60, interference=f"sas(alpha={alpha}, tau=1)")[1].mean() for M in (16, 1024))
        assert (many / few).item() == pytest.approx(64 ** (1 / alpha - 1), rel=tolerance)  # constant at alpha = 1


def test_the_combined_interference_has_the_distribution_of_the_sum_over_antennas():
    alpha, M, n = 1.4, 6, 100_000
    sas = f"sas(alpha={alpha}, tau=0.5)"
    air = waveform("hadamard(n=1)", f", antennas={M}", fades="rayleigh(power=1)", interference=sas)
    a = air._antenna_gains(3, 7, 2)
    known = a.sum(1).conj()
    z = torch.stack([stable.isotropic(n, alpha, 0.5, generator(m, "z")) for m in range(M)])
    explicit = torch.view_as_real(known @ z / (M * air.mean_square)).flatten()
    xi = air.draw(3, torch.arange(3), 2 * n, seed=7, k=2).xi
    assert stats.ks_2samp(xi[::2].numpy(), explicit[::2].numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("fades", "expected"),
    [
        ("rayleigh()", 4 / math.pi),
        ("rayleigh(power=3)", 3),
        ("rician(K=2, mean=3)", 9 * (1 + stats.rice(2).var() / stats.rice(2).mean() ** 2)),
        ("nakagami(m=0.5, mean=2)", 4 * math.pi / 2),  # the absolute value of a normal variable
        ("nakagami(m=3)", stats.nakagami(3).moment(2) / stats.nakagami(3).mean() ** 2),
        ("unit()", 1),
        ("block(of='nakagami(m=0.5)', rounds=2)", math.pi / 2),
        ("ar(a=0.9)", 4 / math.pi),
    ],
)
def test_the_mean_square_of_the_fading_is_exact(fades, expected):
    assert waveform("hadamard(n=1)", ", antennas=2", fades=fades).mean_square == pytest.approx(expected, rel=1e-12)


def test_the_mean_square_of_a_custom_fading_is_the_average_of_draws():
    air = channel.one("waveform(antennas=2)")()(fading=fading.one("rayleigh()")().draw, noise=noise.one("none()")())
    assert air.mean_square == pytest.approx(4 / math.pi, rel=0.005)


def test_the_sum_over_antennas_follows_its_formula():
    """g = Re sum_m (sum_n h_mn)^* y_m / (M N s^2), with two entries a symbol in its two parts."""
    air, update = waveform("hadamard(n=1)", ", antennas=3", fades="rayleigh(power=1)"), torch.randn(4, 10)
    draw = air.draw(4, torch.arange(4), 10, seed=5, k=1)
    a = air._antenna_gains(4, 5, 1)
    c = torch.stack([symbols(u, 1)[:, 0] for u in update])
    combined = a.sum(1).conj() @ (a @ c) / (3 * 4 * air.mean_square)
    torch.testing.assert_close(symbols(received(air, update, draw), 1)[:, 0], combined, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------- resources, errors


@pytest.mark.parametrize(
    ("spec", "uses"), [("ofdm(n=8, prefix=2)", 30), ("hadamard(n=8)", 24), ("pulse(rolloff=0.5)", 27)]
)
def test_prefix_padding_and_bandwidth_are_counted(spec, uses):
    """33 entries take 17 symbols or 3 blocks of 8 symbols."""
    air = waveform(spec)
    assert air.superpose(
        uploads(torch.ones(2, 33)), air.draw(2, torch.arange(2), 33, 0, 0)
    ).resources.symbols == pytest.approx(uses - 1.5 * spec.startswith("pulse"))


def test_pilots_are_filtered_as_the_interference_is():
    air = waveform("hadamard(n=64)", interference="sas(alpha=1, tau=0.1)", pilots=20_000)
    got = air.superpose(uploads(torch.ones(2, 100)), air.draw(2, torch.arange(2), 100, 0, 0))
    assert got.pilot.shape == (20_000,)
    _, tau = stable.estimate(got.pilot)
    assert tau == pytest.approx(0.8, rel=0.2)  # 0.1 * 64^(1/1 - 1/2)
    assert got.resources.symbols == 64 + 64 * 157


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("waveform(basis='odfm()')", ("unknown-component", "odfm")),
        ("waveform(basis='ofdm(m=3)')", ("unknown-argument", "m")),
        ("waveform(basis='ofdm(n=4, prefix=5)')", ("out-of-range", "prefix")),
        ("waveform(basis='ofdm(taps=20)')", ("out-of-range", "taps")),
        ("waveform(timing=17)", ("out-of-range", "timing")),
        ("waveform(basis='ofdm(taps=4)', timing=14)", ("out-of-range", "timing")),
        ("waveform(basis=pulse, timing=2)", ("out-of-range", "timing")),
        ("waveform(basis='pulse(samples=4)', timing=0.3)", ("out-of-range", "timing")),
        ("waveform(timing=0.5)", ("out-of-range", "timing")),
        ("waveform(timing=-1)", ("out-of-range", "timing")),
        ("waveform(basis='hadamard(n=12)')", ("not-a-power-of-two", "n")),
        ("waveform(basis='pulse(samples=1)')", ("out-of-range", "samples")),
        ("waveform(basis=3)", ("not-a-spec", None)),
        ("waveform(cfo=1)", ("out-of-range", "cfo")),
        ("waveform(antennas=2, phase=1)", ("conflicting-arguments", None)),
        ("waveform(antennas=2, basis='ofdm(taps=2)')", ("conflicting-arguments", None)),
        ("waveform(noise_on=both)", ("unknown-value", "noise_on")),
    ],
)
def test_invalid_specs_are_refused_in_one_line(text, expected):
    with pytest.raises(InputError) as error:
        channel.one(text)()
    assert (error.value.code, error.value.fields.get("name")) == expected
    assert "\n" not in str(error.value)


def test_a_custom_basis_must_return_a_basis(registries):
    bases("mine")(lambda: 3)
    with pytest.raises(InputError) as error:
        channel.one("waveform(basis=mine)")()
    assert (error.value.code, error.value.fields["actual"]) == ("wrong-type", "int")


def test_a_power_rule_without_noise_on_the_sum_is_refused_with_the_name_of_the_channel(tiny):
    for name in ("waveform", "flat"):
        with pytest.raises(InputError, match=rf"such as channel='{name}\(noise_on=sum\)'"):
            build(tiny.with_(channel=f"{name}()", power="limit(P=1)"))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"noise": "student_t(df=3)"}, "unsupported-noise"),
        ({"fading": "block(of='rayleigh()', entries=3)"}, "unsupported-fading"),
        ({"power": "limit(P=1)"}, "noise-not-on-sum"),
    ],
)
def test_unsupported_parts_are_refused(tiny, settings, code):
    with pytest.raises(InputError) as error:
        build(tiny.with_(channel="waveform()", **settings))
    assert error.value.code == code


def test_pilots_of_several_antennas_have_the_scale_of_the_interference():
    parts = {"fading": fading.one("rayleigh()")(), "noise": noise.one("gaussian(std=1)")()}
    link = channel.one("waveform('hadamard(n=16)', antennas=2)")()(**parts, pilots=20_000)
    draw = link.draw(40, torch.arange(40), 20_000, seed=0, k=0)
    assert draw.pilot.std().item() == pytest.approx(draw.xi.std().item(), rel=0.05)
    assert draw.xi.std() > 2, "the combination raises the interference"
