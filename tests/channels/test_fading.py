"""Block fading and slow fading: their distributions in known limits."""

import math

import pytest
import torch
from scipy import stats

from helpers.channels import SIGMAS, amplitudes, entry_gains
from helpers.components import EXAMPLES
from stableair.algorithm import simulate
from stableair.builder import build
from stableair.channels.fading import GaussMarkov
from stableair.channels.flat import Flat
from stableair.channels.registries import fading, noise
from stableair.streams import generator


def test_the_fading_is_constant_within_a_block_of_rounds_only():
    h = torch.stack([amplitudes("block(rounds=3)", 50_000, k) for k in range(7)])
    assert torch.equal(h[0], h[2])
    assert torch.equal(h[3], h[5])
    assert torch.equal(h[3], amplitudes("rayleigh()", 50_000, k=1))  # the second block
    assert abs(torch.corrcoef(h[[2, 3]])[0, 1]) < SIGMAS / 50_000**0.5


def test_a_block_of_entries_has_a_separate_amplitude():
    channel = Flat(fading.one("block(of='rician(K=1)', entries=10)")(), noise.one("none()")())
    h = entry_gains(channel, 4, 200_005)
    blocks = h[:, :200_000].reshape(4, -1, 10)
    assert (blocks == blocks[..., :1]).all()
    first = blocks[..., 0]
    assert (first[:, 1:] != first[:, :-1]).all()
    law = stats.rice(b=math.sqrt(2))
    assert stats.kstest(first.flatten().numpy() * law.mean(), law.cdf).pvalue > 1e-3
    assert torch.corrcoef(first).triu(1).abs().max() < SIGMAS / 20_000**0.5  # clients are independent
    assert torch.equal(h[:, 0], channel.draw(4, torch.arange(4), 1, 0, 0).h)
    assert not torch.equal(h, entry_gains(channel, 4, 200_005, k=1))


def test_a_block_of_rounds_and_entries_has_one_amplitude():
    channel = Flat(fading.one("block(rounds=2, entries=3)")(), noise.one("none()")())
    first, second, third = (entry_gains(channel, 2, 10, k) for k in range(3))
    assert torch.equal(first, second)
    assert (first != third).all()


@pytest.mark.parametrize("inner", ["rayleigh()", "ar(0.9)"])
def test_a_block_as_long_as_the_vector_equals_the_inner_fading(tiny, inner):
    plain, long = (build(tiny.with_(fading=f)) for f in (inner, f"block(of='{inner}', entries=1000000)"))
    for a, b in zip(simulate(plain, plain.start, 2), simulate(long, long.start, 2), strict=True):
        torch.testing.assert_close(a.state.model.w, b.state.model.w)


def test_a_gauss_markov_stream_equals_its_recursion():
    a, n = 0.8, 5
    state = generator(0, "fading", 0).normal(n)
    for k in range(1, 400):  # the truncated terms are below the rounding error
        state = a * state + math.sqrt(1 - a * a) * generator(0, "fading", k).normal(n)
        if k in (1, 2, 30, 399):
            torch.testing.assert_close(GaussMarkov(generator(0, "fading", k), a).normal(n), state, rtol=0, atol=1e-14)
    assert len(GaussMarkov(generator(0, "fading", 399), a).weights) < 42 / (1 - a)


OF_AR = ["ar(a=0.9, of='rician(K=2)')", "ar(a=0.99, of='nakagami(m=2)')"]


@pytest.mark.parametrize("spec", [*EXAMPLES["fadings"], *OF_AR])
def test_an_amplitude_does_not_depend_on_the_number_of_clients(spec, monkeypatch):
    for k in (0, 40):
        monkeypatch.setattr("stableair.channels.fading.CHUNK", 1 << 20)
        whole = amplitudes(spec, 70, k)
        for n in range(1, 70):
            assert torch.equal(amplitudes(spec, n, k), whole[:n])
        monkeypatch.setattr("stableair.channels.fading.CHUNK", 1000)  # fewer rounds at a time
        assert torch.equal(amplitudes(spec, 70, k), whole)


@pytest.mark.parametrize("a", [0, 0.6, 0.95, 1])
def test_slow_fading_has_its_documented_correlation(a):
    """|c|^2 of a complex Gauss-Markov process has the correlation a^(2 lag)."""
    n = 40_000
    first, *later = (amplitudes(f"ar(a={a})", n, k).square() for k in (2, 3, 5, 12))
    for lag, power_later in zip((1, 3, 10), later, strict=True):
        correlation = torch.corrcoef(torch.stack([first, power_later]))[0, 1].item()
        assert abs(correlation - a ** (2 * lag)) < SIGMAS * 3 / n**0.5  # its error is at most about 3 / sqrt(n)


@pytest.mark.parametrize(
    ("of", "law"),
    [
        ("rayleigh(power=1)", stats.rayleigh(scale=math.sqrt(0.5))),
        ("rician(K=2)", stats.rice(b=2, scale=1 / stats.rice(b=2).mean())),
        ("nakagami(m=3)", stats.nakagami(3, scale=1 / stats.nakagami(3).mean())),
    ],
)
def test_slow_fading_has_the_distribution_of_the_inner_fading(of, law):
    assert stats.kstest(amplitudes(f"ar(a=0.9, of='{of}')", 50_000, k=6).numpy(), law.cdf).pvalue > 1e-3
