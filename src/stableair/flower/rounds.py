"""Rounds of Algorithm 1 whose uploads are the replies of Flower's nodes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from stableair.algorithm import Simulation, simulate
from stableair.builder import receiving_side, start_state
from stableair.contracts import Metrics, Round, State
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.flower.arrays import flat
from stableair.flower.round_replies import RoundReplies
from stableair.memory import non_finite_parts
from stableair.schedules import share_in_round
from stableair.training.local_training import payload_scale
from stableair.vector import ModelState

Evaluate = Callable[[ModelState, ModelState | None], Metrics]


def no_evaluation(model: ModelState, averaged: ModelState | None) -> Metrics:
    """Return no metrics."""
    return {}


def payload_scales(e: Experiment) -> Callable[[int], float]:
    """Return the factor from a difference of weights to the payload, as a function of the round."""
    share = e.call("lr_decay")()
    return lambda k: payload_scale(e.payload, e.lr * share_in_round(share, k))


def remote_simulation(e: Experiment, replies: RoundReplies) -> Simulation:
    """Build the server part of Algorithm 1; the clients hold the model and the data."""
    arrays, layout, norms = replies.expected[:3]
    side = receiving_side(e, layout, norms)
    return Simulation(
        n=e.clients,
        seed=e.seed,
        start=start_state(ModelState(flat(arrays, layout), flat(arrays, norms)), side),
        layout=layout,
        train=replies.uploads,
        **side._asdict(),
        evaluate=no_evaluation,
        participants=replies.senders,
    )


def rounds_from_replies(
    sim: Simulation, state: State, ks: Iterable[int], replies: RoundReplies, last_row: dict[str, Any]
) -> Iterator[Round]:
    """Run Algorithm 1. The caller must read the replies of a round before it takes the round from the iterator.

    A state is checked before it is evaluated and adopted. Each round has all metrics of the earlier rounds, with the
    value None if the round lacks a metric.

    Args:
        sim: The parts of the algorithm.
        state: The state before the first of these rounds.
        ks: The rounds.
        replies: The replies of the current round.
        last_row: The last recorded row, for its metrics; empty for a new run.
    """
    without_evaluation = replace(sim, evaluate=no_evaluation)
    names: Metrics = dict.fromkeys(name for name in last_row if name not in ("round", "seconds"))
    for k in ks:
        adopted, metrics = _finite_round(without_evaluation, state, k, replies)
        averaged = sim.average(state.average, adopted.model)[1] if sim.average else None
        replies.numbers.bind(replies.used)
        state = adopted._replace(clients=replies.numbers.memory() or adopted.clients)
        metrics = sim.evaluate(state.model, averaged) | metrics
        if any(reply.loss is None for reply in replies.used):
            metrics["train/loss"] = replies.mean_loss()
        names |= dict.fromkeys(metrics)
        yield Round(k, state, names | metrics)


def _finite_round(sim: Simulation, state: State, k: int, replies: RoundReplies) -> tuple[State, Metrics]:
    """Compute round k; drop replies that make the state non-finite, the largest payload first.

    If the state is non-finite with every choice of replies, the interference is the cause and all replies are used.
    """
    before = non_finite_parts(state)
    by_norm = sorted(replies.valid, key=lambda reply: torch.linalg.vector_norm(reply.update, dtype=torch.float64))
    for count in range(len(by_norm), 0, -1):
        replies.select(by_norm[:count])
        if not replies.used:  # fewer than `enough` replies: no single reply is the cause
            break
        new = _attempt(sim, state, k)
        if new and non_finite_parts(new.state) <= before:
            overflow = "its weights are too large: the model or the memory of a component would not be finite"
            replies.faults |= {reply.node: overflow for reply in by_norm[count:]}
            return new.state, new.metrics
    replies.select(replies.valid)
    _, new_state, metrics = next(simulate(sim, state, k + 1, k))
    return new_state, metrics


def _attempt(sim: Simulation, state: State, k: int) -> Round | None:
    """Compute round k with the selected replies; None if their sum cannot be computed."""
    try:
        return next(simulate(sim, state, k + 1, k))
    except InputError as error:
        if error.code != "nan-in-channel":
            raise
        return None
