"""Check Theorem 1: run Algorithm 1 on a problem with known constants and compare with both forms of the bound."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from stableair.algorithm import Simulation, simulate
from stableair.channels.fading import unit
from stableair.channels.flat import Flat
from stableair.channels.noise import sas
from stableair.contracts import State, Upload
from stableair.participants import everybody, participants
from stableair.receivers import as_receiver, mac
from stableair.servers import as_server_rule, sgd
from stableair.streams import generator
from stableair.theory import FORMS, bound
from stableair.validation import integer
from stableair.vector import Layout, ModelState


class Check(NamedTuple):
    """A measurement on a problem with known constants, and both forms of the bound of Theorem 1."""

    alpha: float  # tail index of the interference
    tau: float  # scale of the interference
    C: float  # threshold of MAC
    eta: float  # step size
    measured: float  # mean over rounds and repeats of |grad f(w_k)|^2
    error: float  # its standard error over the repeats
    printed: float  # the bound as printed
    corrected: float  # the bound as corrected


CHECKS = (
    *((1.5, 0.01, 1.6, eta) for eta in (0.3, 0.1, 0.03, 0.01)),
    (1.5, 0.01, 2.5, 0.03),
    (1.5, 0.03, 1.8, 0.03),
    (1.1, 0.01, 1.8, 0.03),
    (1.9, 0.01, 1.6, 0.03),
)  # (alpha, tau, C, eta): the cases of `stableair theory --check`


@dataclass(frozen=True)
class PseudoHuber:
    """The losses f_n(w) = sqrt(1 + |w - a_n|^2) - 1 of n clients: their gradients and Hessians have norms of at most 1.

    The centres a_n come in pairs +-a, so that the optimum of the mean loss is at zero.
    """

    centres: Tensor  # (n, d)

    @classmethod
    def random(cls, n: int, d: int, seed: int) -> Self:
        """Draw the centres; an odd n is rounded down."""
        half = 0.1 * generator(seed, "check").normal(n // 2, d)
        return cls(torch.cat([half, -half]))

    def losses(self, w: Tensor) -> Tensor:
        """Compute the loss of each client: (d,) -> (n,)."""
        return (1 + (w - self.centres).square().sum(1)).sqrt() - 1

    def train(self, state: ModelState, k: int, clients: Tensor) -> Iterator[Upload]:
        """Upload the exact gradient of every client."""
        w, n = state.w.double(), len(self.centres)
        gradients = (w - self.centres) / (1 + self.losses(w))[:, None]
        yield Upload(torch.arange(n), gradients, torch.zeros(n, 0), self.losses(w))

    def simulation(self, seed: int, alpha: float, tau: float, C: float, eta: float) -> Simulation:
        """Build Algorithm 1 with these losses and without fading, whose variance the proof omits."""
        n, d = self.centres.shape
        return Simulation(
            n=n,
            seed=seed,
            start=State(ModelState(torch.full((d,), 0.5 / math.sqrt(d)), torch.zeros(0))),
            layout=Layout(("w",), ((d,),), (0, d)),
            train=self.train,
            channel=Flat(unit(), sas(alpha, tau)),
            receiver=as_receiver(mac(C)),
            server=as_server_rule(sgd(eta)),
            evaluate=lambda model, averaged: {},
            participants=participants(everybody(), [1] * n, seed),
        )


def check(
    alpha: float, tau: float, C: float, eta: float, *, d: int = 100, clients: int = 10, rounds: int = 400,
    repeats: int = 5, seed: int = 0,
) -> Check:  # fmt: skip
    """Run Algorithm 1 with exact gradients on pseudo-Huber losses, and compare with Theorem 1.

    The losses f_n(w) = sqrt(1 + |w - a_n|^2) - 1 have the constants L = G = 1.

    Args:
        alpha: Tail index of the interference.
        tau: Scale of the interference.
        C: Threshold of MAC.
        eta: Step size.
        d: Number of entries.
        clients: Number of clients, at least 2; an odd number is rounded down.
        rounds: Rounds of each repeat.
        repeats: Number of independent repeats, at least 2, for the standard error.
        seed: Seed of the first repeat.

    Returns:
        The mean of |grad f(w_k)|^2 over rounds and repeats, its standard error, and the bounds.

    Raises:
        InputError: There are fewer than two clients or repeats (`out-of-range`).

    >>> result = check(1.5, 0.01, 1.6, eta=0.1, d=10, rounds=20, repeats=2)
    >>> result.measured < result.corrected
    True
    """
    integer("clients", clients, 2)
    integer("repeats", repeats, 2)
    problem = PseudoHuber.random(clients, d, seed)
    sim = problem.simulation(seed, alpha, tau, C, eta)
    measured = []
    for repeat in range(repeats):
        trajectory = simulate(replace(sim, seed=seed + repeat), sim.start, rounds)
        measured.append(sum(cast(float, r.metrics["gradient/norm"]) ** 2 for r in trajectory) / rounds)
    means = torch.tensor(measured, dtype=torch.float64)
    gap = (problem.losses(sim.start.model.w.double()) - problem.losses(torch.zeros(d))).mean().item()
    printed, corrected = (bound(rounds, C, alpha, tau, eta, 1, 1, d, gap, form).value for form in FORMS[:2])
    return Check(alpha, tau, C, eta, means.mean().item(), means.std().item() / math.sqrt(repeats), printed, corrected)
