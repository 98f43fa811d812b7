"""Algorithm 1, line by line, and what is observed in each round."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stableair.channel import Channel, Fade, Received, shaped
from stableair.checks import InputError
from stableair.evaluation import Metrics
from stableair.local import Trainer, Upload
from stableair.receiver import Receiver
from stableair.server import Update
from stableair.vector import Layout, State


@dataclass(frozen=True)
class Simulation:
    """The parts of Algorithm 1. Each is a callable: a faster or a different one takes its place from outside."""

    n: int
    seed: int
    start: State  # w_0
    layout: Layout
    train: Trainer
    channel: Channel
    receive: Receiver
    update: Update
    evaluate: Callable[[State], Metrics]
    labels: np.ndarray | None = None  # (n, classes), samples of each class at each client: for the record
    files: dict[str, str] = field(default_factory=dict)  # the data files that were read and their SHA-256: likewise


class Round(NamedTuple):
    """One finished round k: the state after it and what was seen of it."""

    k: int
    state: State
    metrics: Metrics


def simulate(sim: Simulation, state: State, rounds: int, start: int = 0) -> Iterator[Round]:
    """Algorithm 1 from round `start` to `rounds`, a Round at a time."""
    for k in range(start, rounds):
        fade = sim.channel.draw(sim.n, len(state.w), sim.seed, k, state.w.device)  # h_{n,k}, xi_k
        got = sim.channel.superpose(finite(sim.train(state, k), k), fade)  # Eq. (3)
        g = receive(sim.receive, got)  # MAC, Eqs. (5)-(8)
        state = State(sim.update(state.w, g), got.stats)  # Eq. (4)
        yield Round(k, state, sim.evaluate(state) | observe(got, fade, g) | _own(sim.receive))


class Overflow(InputError):
    """A client's upload of round k was not finite."""

    def __init__(self, k: int, client: int, what: str):
        why = "its data are not finite, or its local training overflowed"
        super().__init__(f"round {k}: client {client} uploaded a non-finite {what}: {why}")
        self.k = k


def finite(uploads: Iterable[Upload], k: int) -> Iterator[Upload]:
    """The uploads of round k as they come; the first that is not finite is an error with its client's name."""
    for upload in uploads:
        for what, rows in zip(("update", "norm buffer", "loss"), upload[1:], strict=True):
            rows = rows.reshape(len(upload.clients), -1)
            good = torch.linalg.vector_norm(rows, math.inf, dim=1).isfinite() if rows.numel() else rows.new_ones(1)
            if not good.all():
                raise Overflow(k, int(upload.clients[int((~good).nonzero()[0])]), what)
        yield upload
        del upload, rows  # before the next is made


def receive(rule: Receiver, got: Received) -> Tensor:
    """What the receiver makes of the sum, after it has heard the round's pilots: (d,)."""
    if got.pilot is not None:
        rule.listen(got.pilot)
    return shaped("receiver", rule(got.g), len(got.g)).to(got.g.dtype)


def observe(got: Received, fade: Fade, g: Tensor) -> Metrics:
    """What the round looked like; the SNR is the paper's, 20 log10(norm(clean) / norm(xi)), None without noise."""
    signal, noise = got.clean.norm().item(), fade.xi.double().norm().item()  # squares of impulses overflow float32
    return {
        "train/loss": got.loss.item(),
        "channel/snr_db": 20 * math.log10(signal / noise) if signal > 0 and 0 < noise < math.inf else None,
        "gradient/norm": signal,
        "clip/fraction": (g != got.g).double().mean().item(),
    }


def _own(rule: Any) -> Metrics:
    """What a rule tells of itself, as `receiver/...`."""
    told = rule.metrics() if hasattr(rule, "metrics") else {}
    return {f"receiver/{name}": None if value is None else float(value) for name, value in told.items()}
