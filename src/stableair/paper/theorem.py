"""Theorem 1 checked: Algorithm 1 on a problem whose constants are known, beside both forms of the bound."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from stableair.algorithm import Simulation, simulate
from stableair.channels.fading import unit
from stableair.channels.flat import Flat
from stableair.channels.noise import sas
from stableair.checks import whole
from stableair.contracts import Upload, as_receiver, as_update
from stableair.participants import everybody, participants
from stableair.receivers import mac
from stableair.servers import sgd
from stableair.streams import generator
from stableair.theory import FORMS, bound
from stableair.vector import Layout, State


class Check(NamedTuple):
    """Theorem 1 on a problem whose L, G and optimum are known: what was measured, and both bounds."""

    alpha: float
    tau: float
    C: float
    eta: float
    measured: float  # mean over rounds and repeats of |grad f(w_k)|^2
    error: float  # its standard error over the repeats
    printed: float
    corrected: float


CHECKS = (
    *((1.5, 0.01, 1.6, eta) for eta in (0.3, 0.1, 0.03, 0.01)),
    (1.5, 0.01, 2.5, 0.03),
    (1.5, 0.03, 1.8, 0.03),
    (1.1, 0.01, 1.8, 0.03),
    (1.9, 0.01, 1.6, 0.03),
)  # (alpha, tau, C, eta): what the command line checks


def check(
    alpha: float, tau: float, C: float, eta: float, *, d: int = 100, clients: int = 10, rounds: int = 400,
    repeats: int = 5, seed: int = 0,
) -> Check:  # fmt: skip
    """Run Algorithm 1 with exact gradients on pseudo-Huber losses, L = G = 1, and compare with Theorem 1.

    f_n(w) = sqrt(1 + |w - a_n|^2) - 1 has gradients shorter than 1 and a Hessian of at most 1. The a_n come in pairs
    +-a, so that the optimum of f is at zero. No fading: the proof leaves its variance out.
    """
    whole("clients", clients, 2)
    whole("repeats", repeats, 2)
    half = 0.1 * generator(seed, "check").normal(clients // 2, d)
    centres = torch.cat([half, -half])

    def losses(w: Tensor) -> Tensor:
        return (1 + (w - centres).square().sum(1)).sqrt() - 1

    def train(state: State, k: int, clients: Tensor) -> Iterator[Upload]:
        w = state.w.double()
        gradients = (w - centres) / (1 + losses(w))[:, None]
        yield Upload(torch.arange(len(centres)), gradients, torch.zeros(len(centres), 0), losses(w))

    start = State(torch.full((d,), 0.5 / math.sqrt(d)), torch.zeros(0))
    sim = Simulation(
        n=len(centres),
        seed=seed,
        start=start,
        layout=Layout(("w",), ((d,),), (0, d)),
        train=train,
        channel=Flat(unit(), sas(alpha, tau)),
        receive=as_receiver(mac(C)),
        update=as_update(sgd(eta)),
        evaluate=lambda state: {},
        participants=participants(everybody(), [1] * len(centres), seed),
    )
    measured = []
    for repeat in range(repeats):
        path = simulate(replace(sim, seed=seed + repeat), start, rounds)
        measured.append(sum(cast(float, r.metrics["gradient/norm"]) ** 2 for r in path) / rounds)
    means = torch.tensor(measured, dtype=torch.float64)
    gap = (losses(start.w.double()) - losses(torch.zeros(d))).mean().item()
    printed, corrected = (bound(rounds, C, alpha, tau, eta, 1, 1, d, gap, form).value for form in FORMS[:2])
    return Check(alpha, tau, C, eta, means.mean().item(), means.std().item() / math.sqrt(repeats), printed, corrected)
