"""Algorithm 1, line by line, and what is observed in each round."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from stableair.checks import InputError, Note, typed
from stableair.contracts import Channel, Metrics, Received, Receiver, Round, Rule, Train, Update, check_shape
from stableair.vector import NOTHING, Layout, State, powers


@dataclass(frozen=True)
class Simulation:
    """The parts of Algorithm 1. Each is a callable: a faster or a different one takes its place from outside."""

    n: int  # clients
    seed: int
    start: State  # w_0
    layout: Layout
    train: Train
    channel: Channel
    receive: Receiver
    update: Update
    evaluate: Callable[[State], Metrics]
    participants: Callable[[int], Tensor]  # k -> (m,), the clients of round k in the order in which they are added up
    labels: np.ndarray | None = None  # (n, classes), samples of each class at each client: for the record
    files: dict[str, str] = field(default_factory=dict)  # the data files that were read and their SHA-256: likewise
    snr_blocks: Layout = NOTHING  # the blocks whose SNR is recorded beside that of the whole

    @property
    def rules(self) -> dict[str, Rule]:
        """What may remember something from round to round."""
        average = self.evaluate if isinstance(self.evaluate, Rule) else Rule()
        return {"receiver": self.receive, "server": self.update, "average": average}


@typed
def simulate(sim: Simulation, state: State, rounds: int, start: int = 0) -> Iterator[Round]:
    """Algorithm 1 from round `start` to `rounds`, a Round at a time."""
    for k in range(start, rounds):
        who = sim.participants(k)  # the clients of round k
        fade = sim.channel.draw(sim.n, who, len(state.w), sim.seed, k, state.w.device)  # h_{n,k}, xi_k
        got = sim.channel.superpose(sim.train(state, k, who), fade)  # Eq. (3)
        if not got.senders:  # nobody was heard: the model, the receiver and the server stay as they are
            warnings.warn(f"round {k}: nobody was heard; the model stays as it is", Note, stacklevel=2)
            yield Round(k, state, sim.evaluate(state) | observe(got, None, sim.snr_blocks) | reported(sim))
            continue
        g = receive(sim.receive, got)  # MAC, Eqs. (5)-(8)
        state = State(sim.update(state.w, g), got.stats)  # Eq. (4)
        yield Round(k, state, sim.evaluate(state) | observe(got, g, sim.snr_blocks) | reported(sim))


def receive(rule: Receiver, got: Received) -> Tensor:
    """What the receiver makes of the sum, after it has heard the round's pilots: (d,)."""
    if got.pilot is not None:
        rule.listen(got.pilot)
    return check_shape("receiver", rule(got.g), len(got.g)).to(got.g.dtype)


def observe(got: Received, g: Tensor | None, blocks: Layout = NOTHING) -> Metrics:
    """What the round looked like, g being what the receiver made of it, if it was given anything.

    The SNR is the paper's, 20 log10(norm(clean) / norm(xi)), None without noise; and that of each of the blocks.
    """
    signal, noise = got.clean.norm().item(), got.noise.double().norm().item()  # squares of impulses overflow float32
    return {
        "train/loss": got.loss.item() if got.senders else None,
        "channel/snr_db": 20 * math.log10(signal / noise) if signal > 0 and 0 < noise < math.inf else None,
        "gradient/norm": signal,
        "clip/fraction": None if g is None else (g != got.g).double().mean().item(),
        "channel/senders": got.senders,
        "channel/uses": got.uses,
    } | {f"channel/snr_db/{name or 'model'}": ratio for name, ratio in snr(got.clean, got.noise, blocks).items()}


def snr(clean: Tensor, noise: Tensor, blocks: Layout) -> Metrics:
    """10 log10(P_b(clean) / P_b(xi)) in dB of each block b, by its name; None without signal or without noise.

    P_b is the power in a block (`vector.powers`): those of all blocks add up to the whole vector's.
    """
    if not blocks.names:
        return {}
    pairs = zip(blocks.names, powers(clean, blocks).tolist(), powers(noise, blocks).tolist(), strict=True)
    return {name: 10 * math.log10(p / q) if p > 0 and 0 < q < math.inf else None for name, p, q in pairs}


def reported(sim: Simulation) -> Metrics:
    """What the rules tell of themselves, as `receiver/...` and `server/...`."""
    told: Metrics = {}
    for kind, rule in sim.rules.items():
        try:
            told |= {f"{kind}/{name}": None if v is None else float(v) for name, v in rule.metrics().items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"the metrics of the {kind} must be numbers by name: {error}", part=kind) from error
    return told
