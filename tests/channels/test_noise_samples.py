"""Noises with memory as complex samples in time: distributions, bursts, oversampling, pilots, waveform channel."""

import math

import pytest
import torch

from helpers.channels import assert_mean, assert_stable
from stableair.channels import waveform as module
from stableair.channels.noise import field_law
from stableair.channels.registries import channel, fading, noise
from stableair.contracts import NoiseLaw, Upload
from stableair.errors import InputError
from stableair.streams import generator

ALPHA, TAU = 1.2, 0.4
FIELD = "field(density=0.05, exponent=3, power=2, hold={})"  # alpha = 4 / 3


def samples(spec, count, oversampling=1, stream="noise", k=0):
    return noise.one(spec)().samples(generator(0, stream, k), oversampling, 1.0)(0, count)


def waveform_channel(spec, basis="hadamard(n=1)", arguments="", fades="unit()", **others):
    parts = {"fading": fading.one(fades)(), "noise": noise.one(spec)()}
    return channel.one(f"waveform('{basis}'{arguments})")()(**parts, **others)


def law(spec):
    """(alpha, tau) of an entry."""
    return (ALPHA, TAU) if spec.startswith("bursts") else field_law(density=0.05, exponent=3, power=2)


BURSTS = f"bursts(alpha={ALPHA}, tau={TAU}, length={{}})"


@pytest.mark.parametrize("spec", [BURSTS, FIELD])
def test_a_sample_is_isotropic_and_stable(spec):
    """E exp(i Re(conj(w) z)) = exp(-(tau |w|)^alpha), from one sample of each burst."""
    alpha, tau = law(spec)
    z = samples(spec.format(3), 180_000)[1::3]
    for w in (1, 1j, 0.6 - 0.8j, 2 + 1j):
        assert_mean((z * complex(w).conjugate()).real.cos(), math.exp(-((tau * abs(w)) ** alpha)))


@pytest.mark.parametrize("oversampling", [1, 4])
@pytest.mark.parametrize("spec", [BURSTS, FIELD])
def test_samples_share_their_scale_within_a_burst_only(spec, oversampling):
    """E exp(i sum Re(conj(w_i) z_i)) = exp(-tau^alpha (sum |w_i|^2)^(alpha/2)); `length` is in units of time."""
    alpha, tau = law(spec)
    length = 4 // oversampling
    z = samples(spec.format(length), 400_000, oversampling).view(-1, 4)
    for w in ([1, 1j, 1, -1], [2, 0, -1, 0.5j], [0, 3, 0, 3 + 1j]):
        weights = torch.tensor(w, dtype=torch.complex128)
        square = weights.abs().square().sum().item()
        assert_mean((z @ weights.conj()).real.cos(), math.exp(-(tau**alpha) * square ** (alpha / 2)))
    across = (z[:-1:2, -1] + z[1::2, 0]).imag  # the last of one burst and the first of the next
    assert_mean(across.cos(), math.exp(-2 * tau**alpha))


@pytest.mark.parametrize("spec", [BURSTS.format(7), FIELD.format(5), f"markov(good='{BURSTS.format(3)}', q=0.2)"])
def test_a_window_equals_a_slice_of_the_samples_of_the_round(spec, monkeypatch):
    window = noise.one(spec)().samples(generator(0, "noise", 3), 2, 1.0)
    whole = window(0, 5000)
    monkeypatch.setattr("stableair.streams._PIECE", 100)
    for first, last in ((0, 1), (13, 14), (27, 29), (700, 4321)):
        assert torch.equal(window(first, last), whole[first:last])


def test_a_scale_multiplies_the_samples():
    for spec in (BURSTS.format(3), FIELD.format(2), "sas()"):
        one, three = (noise.one(spec)().samples(generator(0, "noise", 0), 2, c)(5, 50) for c in (1.0, 3.0))
        torch.testing.assert_close(three, 3 * one)


@pytest.mark.parametrize("length", [1, 4, 16, 64])
def test_the_interference_of_an_entry_depends_on_the_bursts_in_its_filter(length):
    """Given the bursts, an entry is normal: its scale is tau (n / length)^(1/alpha - 1/2), at least tau."""
    n, blocks = 16, 4000
    xi = waveform_channel(BURSTS.format(length), f"hadamard(n={n})").draw(1, torch.arange(1), 2 * n * blocks, 0, 0).xi
    scale = TAU * max(n / length, 1) ** (1 / ALPHA - 1 / 2)
    assert_stable(xi[3 :: 2 * n * max(length // n, 1)], ALPHA, scale)  # an entry per block or burst


@pytest.mark.parametrize("oversampling", [2, 8])
def test_the_interference_of_bursts_does_not_depend_on_the_sampling_rate(oversampling):
    """A burst is much longer than the pulse: the scale of an entry is tau."""
    link = waveform_channel(BURSTS.format(40), f"pulse(span=4, samples={oversampling})")
    assert_stable(link.draw(1, torch.arange(1), 320_000, 0, 0).xi[40::80], ALPHA, TAU)


@pytest.mark.parametrize("spec", [BURSTS.format(10_000), FIELD.format(10_000)])
def test_pilots_share_a_burst_that_is_longer_than_the_vector(spec):
    link = waveform_channel(spec, pilots=2000)
    draws = [link.draw(3, torch.arange(3), 3000, 0, k) for k in range(6)]
    scales = torch.tensor([[draw.xi.std(), draw.pilot.std()] for draw in draws])
    assert scales[:, 0].max() > 2 * scales[:, 0].min(), "the bursts differ from round to round"
    torch.testing.assert_close(scales[:, 1], scales[:, 0], rtol=0.1, atol=0)
    assert not torch.equal(draws[0].pilot, draws[0].xi[:2000]), "with separate samples"


@pytest.mark.parametrize("arguments", ["", ", antennas=3"])
def test_a_state_of_a_markov_chain_has_the_bits_of_its_noise_in_data_and_pilots(arguments):
    specs = {"good": "gaussian(std=0.1)", "bad": "sas(alpha=1.3, tau=2)"}
    chain = waveform_channel(
        f"markov(good='{specs['good']}', bad='{specs['bad']}', p=0.4, q=0.5)", arguments=arguments, pilots=9
    )
    links = {state: waveform_channel(spec, arguments=arguments, pilots=9) for state, spec in specs.items()}
    states = []
    for k in range(12):
        draws = {state: link.draw(3, torch.arange(3), 20, 5, k) for state, link in links.items()}
        draw = chain.draw(3, torch.arange(3), 20, 5, k)
        (state,) = [state for state, one in draws.items() if torch.equal(one.xi, draw.xi)]
        assert torch.equal(draws[state].pilot, draw.pilot)
        states.append(state)
    assert set(states) == {"good", "bad"}


def test_bursts_do_not_depend_on_the_division_of_the_signal_into_pieces(monkeypatch):
    link = waveform_channel(BURSTS.format(7), "pulse(samples=4)")
    whole = link.draw(2, torch.arange(2), 999, seed=3, k=4).xi
    monkeypatch.setattr(module, "PIECE", 64)
    torch.testing.assert_close(link.draw(2, torch.arange(2), 999, seed=3, k=4).xi, whole, rtol=0, atol=0)


def test_the_received_vector_is_the_mean_plus_the_interference():
    link, update = waveform_channel(BURSTS.format(20), "ofdm(n=8, prefix=2)"), torch.randn(4, 50)
    draw = link.draw(4, torch.arange(4), 50, 0, 0)
    got = link.superpose([Upload(torch.arange(4), update, torch.zeros(4, 0), torch.ones(4))], draw)
    torch.testing.assert_close(got.g, update.mean(0) + draw.xi, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "arguments"),
    [
        ("student_t(df=3)", ""),
        ("middleton(A=1, gamma=1)", ""),
        ("markov(good='student_t(df=3)')", ""),
        ("markov(bad='student_t(df=3)')", ""),
        ("mine()", ""),
        ("markov(good='mine()')", ""),
        ("bursts()", ", antennas=2"),
        ("field(density=1)", ", antennas=2"),
        ("markov(good='bursts()')", ", antennas=2"),
    ],
)
def test_a_noise_without_the_needed_samples_is_refused_with_the_alternatives(spec, arguments, registries):
    noise("mine")(lambda: lambda d, source: torch.zeros(d))
    with pytest.raises(InputError) as error:
        waveform_channel(spec, arguments=arguments)
    assert (error.value.code, error.value.setting) == ("unsupported-noise", "noise")
    assert "noise=sas" in str(error.value)


@pytest.mark.parametrize("wrong", [lambda z: z.real, lambda z: z[1:], lambda z: None])
def test_samples_of_another_shape_or_type_are_refused(wrong, registries):
    samples = noise.one("sas()")().samples
    bad = NoiseLaw(
        lambda d, source: torch.zeros(d),
        lambda source, *options: lambda first, last: wrong(samples(source, *options)(first, last)),
    )
    noise("mine")(lambda: bad)
    link = waveform_channel("mine()")
    with pytest.raises(InputError) as error:
        link.draw(2, torch.arange(2), 9, 0, 0)
    assert (error.value.code, error.value.setting) == ("wrong-shape", "noise")
