"""Bursts, fields of interferers and Markov chains: their distributions in known limits."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from helpers.channels import SIGMAS, assert_mean, assert_stable, interference
from stableair.channels.flat import Flat
from stableair.channels.noise import NEAREST, field_law
from stableair.channels.registries import fading, noise
from stableair.streams import generator


@pytest.mark.parametrize(("alpha", "length"), [(0.5, 1), (1, 7), (1.5, 1), (1.5, 40), (1.95, 3), (2, 5)])
def test_an_entry_of_a_burst_is_stable_for_every_length(alpha, length):
    xi = interference(f"bursts(alpha={alpha}, tau=0.3, length={length})", 40_000 * length)
    assert_stable(xi[length // 2 :: length], alpha, 0.3)  # one entry per burst: these are independent


@pytest.mark.parametrize("alpha", [0.8, 1.5, 2])
def test_entries_share_their_scale_within_a_burst_only(alpha):
    tau, length = 0.5, 4
    x = interference(f"bursts(alpha={alpha}, tau={tau}, length={length})", 800_000).double().reshape(-1, length)
    for t in ([1.0, 1, 1, 1], [2, 0, -1, 0.5], [0, 3, 0, 3]):
        t = torch.tensor(t).double()
        assert_mean((x @ t).cos(), math.exp(-(tau**alpha) * t.square().sum() ** (alpha / 2)))
    across = x[:-1:2, -1] + x[1::2, 0]  # the last of one burst and the first of the next: two independent entries
    assert_mean(across.cos(), math.exp(-2 * tau**alpha))


def test_a_burst_that_is_longer_than_the_vector_is_one_gaussian_vector():
    x = interference("bursts(alpha=1.2, length=10_000_000)", 50_000).double()
    assert stats.kstest((x / x.std()).numpy(), stats.norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize("spec", ["bursts(alpha=0.8, length=10_000)", "field(density=0.1, hold=10_000)"])
def test_pilots_share_a_burst_that_is_longer_than_the_vector(spec):
    channel = Flat(fading.one("unit()")(), noise.one(spec)(), pilots=2000)
    draws = [channel.draw(3, torch.arange(3), 3000, 0, k) for k in range(6)]
    scales = torch.tensor([[draw.xi.std(), draw.pilot.std()] for draw in draws])
    assert scales[:, 0].max() > 3 * scales[:, 0].min(), "the bursts differ from round to round"
    torch.testing.assert_close(scales[:, 1], scales[:, 0], rtol=0.1, atol=0)
    assert not torch.equal(draws[0].pilot, draws[0].xi[:2000]), "with separate entries"


def test_pilots_without_bursts_are_independent_of_the_vector():
    one, other = (interference("sas()", 2000), noise.one("sas()")()(2000, generator(0, "pilot", 0)))
    assert abs(torch.corrcoef(torch.stack([one, other]).clamp(-0.1, 0.1))[0, 1]) < 0.1


@pytest.mark.parametrize("spec", ["bursts(length=3)", "field(density=0.1, hold=2)"])
def test_a_vector_drawn_in_pieces_equals_the_whole_draw(spec, monkeypatch):
    whole = interference(spec, 10_000)
    monkeypatch.setattr("stableair.streams._PIECE", 1000)
    assert torch.equal(interference(spec, 10_000), whole)


@pytest.mark.parametrize("exponent", [2.2, 3, 4, 5, 8])
def test_a_field_is_stable_with_its_documented_parameters(exponent):
    alpha, tau = field_law(density=0.2, exponent=exponent, power=2)
    assert alpha == 4 / exponent
    assert_stable(interference(f"field(density=0.2, exponent={exponent}, power=2)", 200_000), alpha, tau)


@pytest.mark.parametrize("exponent", [4, 6])
def test_a_field_has_the_distribution_of_a_poisson_field_in_the_plane(exponent):
    """Direct simulation: a disc with 300 interferers on average, each with a normal amplitude."""
    rng, density, fields, mean = np.random.default_rng(0), 0.1, 20_000, 300
    radius = math.sqrt(mean / (math.pi * density))
    count = rng.poisson(mean, fields)
    exists = np.arange(count.max()) < count[:, None]
    r = radius * np.sqrt(rng.uniform(size=exists.shape))
    xi = (exists * r ** (-exponent / 2) * rng.normal(size=exists.shape)).sum(1)
    assert_stable(torch.from_numpy(xi), *field_law(density, exponent))


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1, 1.3, 1.6, 1.8, 1.95])
def test_the_gaussian_remainder_of_a_field_changes_its_characteristic_function_by_less_than_1e_4(alpha):
    """Given the arrival y of the last summed interferer, the earlier ones are uniform on (0, y)."""
    b, law = alpha / 2, stats.gamma(NEAREST)
    y = np.geomspace(*law.ppf([1e-12, 1 - 1e-12]), 4001)
    weight = law.pdf(y) * y * math.log(y[1] / y[0])
    errors = []
    for exact in np.exp(-np.geomspace(1e-3, 20, 60)):  # values of the characteristic function
        s = (-math.log(exact) / special.gamma(1 - b)) ** (1 / b) * y ** (-1 / b)
        before = np.exp(-s) - s**b * special.gamma(1 - b) * special.gammaincc(1 - b, s)  # E exp(-s u^(-1/b))
        approximation = weight * before.clip(1e-300) ** (NEAREST - 1) * np.exp(-s - s * y / (1 / b - 1))
        errors.append(abs(approximation.sum() - exact))
    assert max(errors) < 1e-4


def test_a_field_keeps_its_positions_and_draws_new_amplitudes():
    """Within `hold` entries the field is a burst: it has the joint distribution of `bursts`."""
    alpha, tau = field_law(density=0.1, exponent=3)
    x = interference("field(density=0.1, exponent=3, hold=4)", 400_000).double().reshape(-1, 4) / tau
    t = torch.tensor([1.0, -0.5, 0.5, 0.3]).double()
    assert_mean((x @ t).cos(), math.exp(-(t.square().sum() ** (alpha / 2))))


def test_the_scale_of_a_field_grows_with_power_and_density():
    one = interference("field(density=0.1)", 1000)
    torch.testing.assert_close(interference("field(density=0.1, power=9)", 1000), 3 * one)
    torch.testing.assert_close(interference("field(density=0.2)", 1000), 2 * one)  # tau ~ density^(1/alpha), alpha = 1


def bad_rounds(p, q, rounds, seed=0):
    chain = noise.one(f"markov(good='none()', bad='gaussian(std=1)', p={p}, q={q})")()
    return np.array([bool(chain(2, generator(seed, "noise", k)).any()) for k in range(rounds)])


@pytest.mark.parametrize(("p", "q"), [(0.1, 0.3), (0.02, 0.03), (0.9, 0.8), (1, 1), (0.5, 0.5), (1, 0.2), (0, 0.5)])
def test_a_finite_history_gives_the_values_of_the_full_recursion(p, q):
    u = [generator(3, "markov", k).uniform(1).item() for k in range(150)]
    states = [u[0] < p / (p + q)]
    for x in u[1:]:
        states.append(x < (1 - q if states[-1] else p))
    assert bad_rounds(p, q, 150, seed=3).tolist() == states


def test_the_markov_chain_is_stationary_with_the_documented_run_lengths():
    p, q, rounds = 0.1, 0.3, 3000
    bad = bad_rounds(p, q, rounds)
    share, correlation = p / (p + q), 1 - p - q
    error = math.sqrt(share * (1 - share) / rounds * (1 + correlation) / (1 - correlation))
    assert abs(bad.mean() - share) < SIGMAS * error
    switches = np.flatnonzero(np.diff(bad.astype(int))) + 1
    lengths, first = np.diff(switches), bad[switches[0]]
    for run_lengths, leaving in ((lengths[::2], q if first else p), (lengths[1::2], p if first else q)):
        error = math.sqrt(1 - leaving) / leaving / len(run_lengths) ** 0.5  # of the mean of a geometric law
        assert abs(run_lengths.mean() - 1 / leaving) < SIGMAS * error
    first_states = np.array([bad_rounds(p, q, 1, seed)[0] for seed in range(500)])  # round 0 is stationary, too
    assert abs(first_states.mean() - share) < SIGMAS * math.sqrt(share * (1 - share) / 500)


def test_payloads_and_pilots_have_the_noise_of_the_state_of_their_round():
    chain = "markov(good='sas(tau=0.1)', bad='gaussian(std=1)', p=0.4, q=0.4)"
    channel = Flat(fading.one("unit()")(), noise.one(chain)(), pilots=5)
    for k in range(6):
        draw = channel.draw(1, torch.arange(1), 8, seed=0, k=k)
        state = "gaussian(std=1)" if torch.equal(draw.xi, interference("gaussian(std=1)", 8, k)) else "sas(tau=0.1)"
        assert torch.equal(draw.xi, interference(state, 8, k))
        assert torch.equal(draw.pilot, interference(state, 5, k, "pilot"))
