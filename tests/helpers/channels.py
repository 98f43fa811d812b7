"""Draws of interference and fading, and statistics of them."""

import torch
from scipy import stats

from stableair import stable
from stableair.channels.flat import Flat
from stableair.channels.registries import fading, noise, power
from stableair.contracts import Upload
from stableair.streams import generator

SIGMAS = 4.5  # allowed deviation of a statistic in standard errors


def interference(spec, d, k=0, stream="noise"):
    return noise.one(spec)()(d, generator(0, stream, k))


def amplitudes(spec, n, k=0):
    return fading.one(spec)()(n, generator(0, "fading", k))


def assert_mean(x, expected):
    assert abs(x.mean().item() - expected) < SIGMAS * x.std().item() / len(x) ** 0.5


def assert_stable(x, alpha, tau):
    cdf = lambda z: stable.cdf(torch.from_numpy(z), alpha, tau).numpy()  # noqa: E731
    assert stats.kstest(x.double().numpy(), cdf).pvalue > 1e-3


def entry_gains(channel, n, d, k=0, seed=0):
    """The gain of every entry of each of n clients: (n, d)."""
    draw = channel.draw(n, torch.arange(n), d, seed, k)
    rows = []
    for client in range(n):
        sent = Upload(torch.tensor([client]), torch.ones(1, d), torch.zeros(1, 0), torch.zeros(1))
        rows.append(channel.accumulate([sent], draw).faded)
    return torch.stack(rows)


def flat_channel(rule, fades="unit()", xi="gaussian(std=1)", **parts):
    """A flat channel with a power rule and interference on the sum."""
    return Flat(fading.one(fades)(), noise.one(xi)(), power.one(rule)(), noise_on="sum", **parts)


def received(channel, update, k=0, seed=0):
    """The received vector of a round and its draw; row n of the update is the payload of client n."""
    clients = torch.arange(len(update))
    draw = channel.draw(len(update), clients, update.shape[1], seed, k)
    upload = Upload(clients, update, torch.zeros(len(clients), 0), torch.ones(len(clients)))
    return channel.superpose([upload], draw), draw


def transmissions(rule, fades="rayleigh(power=1)", n=100_000, k=0):
    """The clients that transmit (m,), their complex gains (m,) and their energies (m,)."""
    by_client = flat_channel(rule, fades, "none()").draw(n, torch.arange(n), 1, seed=0, k=k).transmissions
    rows = [(sent.gain, sent.energy) for sent in by_client.values()]
    gains, energies = (torch.tensor(column, dtype=torch.complex128) for column in zip(*rows, strict=True))
    return torch.tensor(list(by_client)), gains, energies.real
