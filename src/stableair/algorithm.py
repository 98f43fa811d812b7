"""Algorithm 1 of the paper, line by line, and the metrics of each round."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from stableair.contracts import (
    Average,
    Channel,
    Memory,
    Metrics,
    Received,
    Reception,
    Resources,
    Round,
    Rule,
    ServerRule,
    State,
    Train,
)
from stableair.errors import InputError
from stableair.global_generators import warning_of_draws
from stableair.isolation import isolated_steps
from stableair.memory import check_memory, check_structure, map_tensors, unchanged, unchanged_uploads
from stableair.receivers.median import median
from stableair.schedules import Schedule, full_rate
from stableair.validation import short_repr, typed
from stableair.vector import NOTHING, Layout, ModelState, check_shape, powers

log = logging.getLogger("stableair")

LARGE_STEP = 4.0  # ratio of the median change to the median size of a weight, above which a warning is logged
CLIPPED = "receiver/clipped"  # recorded as clip/fraction, in place of the share of entries that the receiver changed


@dataclass(frozen=True)
class Simulation:
    """The parts of Algorithm 1, as pure functions: the same simulation always gives the same rounds.

    `sa.build` creates it from an experiment. To change a part, use `dataclasses.replace`.

    >>> import stableair as sa
    >>> sim = sa.build(sa.Experiment(data="synthetic()", clients=5, receiver="mac(C=1)"))
    >>> sim.n, len(sim.start.model.w)
    (5, 15010)
    """

    n: int  # number of clients
    seed: int  # seed of all random streams
    start: State  # state before the first round: the model w_0, and the memories of the components
    layout: Layout  # blocks of the model's parameters
    train: Train  # (model, k, clients) -> uploads: the local training
    channel: Channel  # uploads -> received sum: Eq. (3)
    receiver: Rule  # received sum -> repaired sum: Eqs. (5)-(8)
    server: ServerRule  # (model, repaired sum) -> model: Eq. (4)
    evaluate: Callable[[ModelState, ModelState | None], Metrics]  # (model, averaged model) -> metrics
    participants: Callable[[int], Tensor]  # k -> (m,), the clients of round k in the order of summation
    average: Average | None = None  # average of the model over the rounds, for the evaluation
    labels: np.ndarray | None = None  # (n, classes), number of samples of each class at each client; recorded
    files: dict[str, str] = field(default_factory=dict)  # data files and their SHA-256; recorded
    snr_blocks: Layout = NOTHING  # blocks whose SNR is recorded in addition to that of the whole vector
    server_share: Schedule = full_rate  # k -> factor of g in the server's step; 1 unless the server follows lr_decay
    bandwidth: float = 1e6  # bandwidth of the uplink, in Hz
    symbol_energy: float = 1.0  # energy of a symbol of modulus 1, in J


@typed
@isolated_steps
def simulate(sim: Simulation, state: State, rounds: int, start: int = 0) -> Iterator[Round]:
    """Run Algorithm 1 from round `start` to `rounds`, one round at a time.

    Args:
        sim: The parts of the algorithm.
        state: The state before round `start`: `sim.start`, or the state of an earlier round.
        rounds: Number of rounds of the whole run.
        start: Zero-based index of the first round.

    Yields:
        Each finished round, with its index, the state after it, and its metrics.

    Raises:
        InputError: A component returned a wrong type, shape or memory, or changed its arguments in place.

    >>> import stableair as sa
    >>> sim = sa.build(sa.Experiment(data="synthetic()", clients=5, receiver="mac(C=1)"))
    >>> for k, state, metrics in sa.simulate(sim, sim.start, rounds=2):
    ...     print(k, metrics["channel/senders"])
    0 5
    1 5
    """
    device = state.model.w.device
    for k in range(start, rounds):
        model, receiver, server, average, memories, energies = state
        clients = sim.participants(k)
        with unchanged("channel", clients), warning_of_draws("channel", device, k):
            draw = sim.channel.draw(sim.n, clients, len(model.w), sim.seed, k, device)  # h_{n,k}, xi_k
        with unchanged("channel", draw, clients), unchanged("local training", model, setting="model"):
            uploads = unchanged_uploads("channel", sim.train(model, k, clients))
            received = sim.channel.superpose(uploads, draw)  # Eq. (3)
        metrics: Metrics = {}
        g = None
        if received.senders:
            g, receiver, seen = receive(sim.receiver, received, receiver, k, sim.layout)  # MAC, Eqs. (5)-(8)
            with warning_of_draws("server", device, k):
                w, server, step = serve(sim.server, model.w, sim.server_share(k) * g, server)  # Eq. (4)
            log_divergence(k, received.g, g, w)
            log_large_step(k, model.w, w)
            model, metrics = ModelState(w, received.stats), seen | step
        else:
            log.warning("round %d: no client was received; the model stays unchanged", k)
        averaged = None
        if sim.average:
            average, averaged = sim.average(average, model)
        energies, resources = used(received.resources, energies, sim)
        state = State(model, receiver, server, average, memories, energies)
        transmission = observe(received, g, sim.snr_blocks) | resources
        yield Round(k, state, sim.evaluate(model, averaged) | transmission | metrics)


def receive(rule: Rule, received: Received, memory: Memory, k: int, blocks: Layout) -> tuple[Tensor, Memory, Metrics]:
    """Apply a receiver to the sum of a round.

    Args:
        rule: The receiver.
        received: The reception of the round.
        memory: The receiver's memory.
        k: Zero-based index of the round.
        blocks: Layout of the model's blocks.

    Returns:
        The repaired sum (d,), the new memory, and the `receiver/...` metrics.
    """
    reception = Reception(received.g, blocks, received.pilot, k)
    with unchanged("receiver", reception, memory), warning_of_draws("receiver", received.g.device, k):
        g, new_memory, metrics = _checked_triple("receiver", rule.apply(reception, map_tensors(lambda t: t, memory)))
    g = check_shape("receiver", g, len(received.g)).to(received.g.dtype)
    new_memory = check_structure("receiver", check_memory("receiver", new_memory), memory)
    named = _prefixed("receiver", metrics)
    if CLIPPED in named:
        named["clip/fraction"] = named.pop(CLIPPED)
    return g, new_memory, named


def serve(rule: ServerRule, w: Tensor, g: Tensor, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
    """Take the server's step.

    Args:
        rule: The server rule.
        w: The model, (d,).
        g: The repaired sum, (d,).
        memory: The server's memory.

    Returns:
        The new model (d,), the new memory, and the `server/...` metrics.
    """
    with unchanged("server", w, g, memory):
        new, new_memory, metrics = _checked_triple("server", rule.apply(w, g, map_tensors(lambda t: t, memory)))
    new = check_shape("server", new, len(w)).to(w.dtype)
    new_memory = check_structure("server", check_memory("server", new_memory), memory)
    return new, new_memory, _prefixed("server", metrics)


def log_divergence(k: int, received: Tensor, g: Tensor, w: Tensor) -> None:
    """Log the component that made the model non-finite, unless it was the interference.

    Args:
        k: Zero-based index of the round.
        received: The received sum, (d,).
        g: The receiver's output, (d,).
        w: The new model, (d,).
    """
    if w.isfinite().all() or not received.isfinite().all():
        return
    if g.isfinite().all():
        log.warning("round %d: the server returned NaN or infinity, although the receiver's output is finite", k)
    else:
        log.warning("round %d: the receiver returned NaN or infinity, although the received sum is finite", k)


def log_large_step(k: int, before: Tensor, w: Tensor) -> None:
    """Log a finite first step that changes a typical weight by a multiple of its size: it can destroy the model.

    Args:
        k: Zero-based index of the round.
        before: The model before the step, (d,).
        w: The model after the step, (d,).
    """
    if k or not w.isfinite().all():
        return
    size, change = (median(t.abs()).item() for t in (before, w - before))
    if size > 0 and change > LARGE_STEP * size:
        text = "round 0: the server's step changes the median weight by %.2g, which is %.1f times its size and can "
        text += "destroy the model; a smaller learning rate of the server shortens the step"
        log.warning(text, change, change / size)


def _checked_triple(kind: str, result: object) -> tuple[Tensor, Memory, Metrics]:
    """Check that a rule's `apply` returned three values, and return them."""
    if not isinstance(result, tuple) or len(result) != 3:
        text = f"apply of the {kind} must return a tensor, its memory and its metrics: got {type(result).__name__}"
        raise InputError(text, code="wrong-type", setting=kind)
    return result


def _prefixed(kind: str, metrics: Metrics) -> Metrics:
    """Prefix the names of a component's metrics, as they are recorded: `receiver/C`."""
    try:
        return {f"{kind}/{name}": None if value is None else float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        text = f"the metrics of the {kind} must be a dict of numbers: {error}"
        raise InputError(text, code="wrong-type", setting=kind) from error


def observe(received: Received, g: Tensor | None, blocks: Layout = NOTHING) -> Metrics:
    """Compute the metrics of a round's transmission.

    The SNR is the paper's, 20 log10(norm(clean) / norm(xi)) in dB. It is None if the signal or the interference is
    zero, or if the interference is infinite.

    Args:
        received: The reception of the round.
        g: The receiver's output (d,); None without senders.
        blocks: Blocks whose SNR is also computed.

    Returns:
        The metrics by name.
    """
    signal = received.clean.norm().item()
    noise = received.noise.double().norm().item()  # squares of impulses overflow float32
    return {
        "train/loss": received.loss.item() if received.senders else None,
        "channel/snr_db": 20 * math.log10(signal / noise) if signal > 0 and 0 < noise < math.inf else None,
        "gradient/norm": signal,
        "clip/fraction": None if g is None else (g != received.g).double().mean().item(),
        "channel/senders": received.senders,
    } | {f"channel/snr_db/{name or 'model'}": x for name, x in snr(received.clean, received.noise, blocks).items()}


def used(resources: Resources, total: Memory, sim: Simulation) -> tuple[Memory, Metrics]:
    """Add up the energies of the clients, and compute the metrics of a round's resources.

    The mean energy is the mean over all n clients; a client that does not transmit has the energy 0.

    Args:
        resources: The resources of the round.
        total: The energies of the earlier rounds, as in `State`.
        sim: The simulation, for its number of clients, bandwidth and symbol energy.

    Returns:
        The energies after the round, and the metrics: symbols, airtime in s, energies in J, bits.

    Raises:
        InputError: An amount of the channel is not a number of at least 0, or the energies are not a dict with the
            indices of clients as keys (`wrong-type`).
    """
    symbols, bits = _amount(resources.symbols), _amount(resources.bits)
    _check_clients(resources.energies, sim.n)
    energies = {client: sim.symbol_energy * _amount(energy) for client, energy in resources.energies.items()}
    total = _with_round(total, energies, sim.n)
    return total, {
        "channel/uses": symbols,
        "channel/seconds": symbols / sim.bandwidth,
        "channel/energy_mean": math.fsum(energies.values()) / sim.n,
        "channel/energy_max": max(energies.values(), default=0.0),
        "channel/energy_total_max": None if total is None else total.max().item(),
        "channel/bits": bits,
    }


def _with_round(total: Memory, energies: Mapping[int, float], n: int) -> Memory:
    """Return the energies of all n clients after a round, in a new tensor on the host; None if they are unknown."""
    if total is None:
        return None
    before = total.cpu() if isinstance(total, Tensor) else torch.zeros(n, dtype=torch.float64)
    added = torch.tensor(list(energies.values()), dtype=torch.float64)
    return before.index_add(0, torch.tensor(list(energies), dtype=torch.int64), added)


def _check_clients(energies: object, n: int) -> None:
    """Check that the energies that a channel reports belong to clients."""
    if not isinstance(energies, Mapping) or not all(type(client) is int and 0 <= client < n for client in energies):
        text = f"the energies of the channel must be a dict, client index 0 ... {n - 1} to energy"
        text += f": got {short_repr(energies)}"
        raise InputError(text, code="wrong-type", setting="channel", expected="dict", actual=type(energies).__name__)


def _amount(value: object) -> float:
    """Check the amount of a resource that a channel returned."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        text = f"the resources of the channel must be finite numbers of at least 0: got {short_repr(value)}"
        raise InputError(text, code="wrong-type", setting="channel", expected="number", actual=type(value).__name__)
    return float(value)


def snr(clean: Tensor, noise: Tensor, blocks: Layout) -> Metrics:
    """Compute the SNR of each block, 10 log10(P_b(clean) / P_b(xi)) in dB.

    P_b is the power in block b (`vector.powers`); the powers of all blocks add up to the power of the vector.

    Args:
        clean: Mean of the unfaded payloads, (d,).
        noise: The interference, (d,).
        blocks: Layout of the blocks.

    Returns:
        The SNR of each block by its name; None under the same conditions as in `observe`.
    """
    if not blocks.names:
        return {}
    pairs = zip(blocks.names, powers(clean, blocks).tolist(), powers(noise, blocks).tolist(), strict=True)
    return {name: 10 * math.log10(p / q) if p > 0 and 0 < q < math.inf else None for name, p, q in pairs}
