"""Received vectors with a known signal and stable noise, for the tests of adaptive receivers."""

import torch

from helpers.components import RepeatedReceiver
from stableair import stable
from stableair.streams import generator

D = 100_000


def noise(alpha=1.5, tau=0.1, k=0, d=D):
    return stable.sample(d, alpha, tau, generator(0, "noise", k))


def signal(std, d=D):
    return std * generator(0, "signal").normal(d).float()


def received_rounds(rule, taus, std=0.05, d=20_000):
    """Apply a rule to rounds with these scales of the noise and the same signal.

    Returns:
        The outputs (rounds, d), and the metrics of each round.
    """
    rule = RepeatedReceiver(rule)
    rounds = [(rule(noise(1.5, tau, k, d) + signal(std, d)), rule.metrics) for k, tau in enumerate(taus)]
    return torch.stack([out for out, _ in rounds]), [seen for _, seen in rounds]
