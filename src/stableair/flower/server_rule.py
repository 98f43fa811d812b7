"""Conversion of a Flower strategy to the server's step of Algorithm 1."""

from collections.abc import Callable
from typing import Any

import torch
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy
from torch import Tensor

from stableair.contracts import Memory, Metrics, ServerRule
from stableair.errors import InputError

# Strategies that use only the mean of the replies.
MEAN_STRATEGIES = FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam, FedYogi
STRATEGY_MEMORY = "m_t", "v_t", "momentum_vector"  # the attributes that these strategies keep between rounds


def check_uses_mean(strategy: Strategy) -> Strategy:
    """Return a strategy that uses only the mean of the replies.

    Over the air the server receives only the sum of the replies.

    Raises:
        InputError: The strategy compares individual replies.
    """
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        text = (
            f"OverTheAir wraps a strategy: got the class {strategy.__name__}; pass an instance: {strategy.__name__}()"
        )
        raise InputError(text, code="wrong-type")
    if not isinstance(strategy, Strategy):
        text = f"OverTheAir wraps a strategy of flwr.serverapp.strategy: got {type(strategy).__name__}"
        raise InputError(text, code="wrong-type")
    base = next(kind for kind in type(strategy).__mro__ if "aggregate_train" in vars(kind))
    if base not in MEAN_STRATEGIES and not getattr(strategy, "over_the_air", False):
        why = "over the air the server receives only their sum, and the strategy gets one reply"
        fix = f"use one of {', '.join(kind.__name__ for kind in MEAN_STRATEGIES)} and a receiver such as mac(C=auto)"
        custom = "a custom strategy that works with one reply sets over_the_air = True"
        name = type(strategy).__name__
        text = f"{name} compares the replies of the clients: {why}; {fix}; {custom}"
        raise InputError(text, code="needs-replies", strategy=name)
    return strategy


def describe_strategy(strategy: Strategy) -> str:
    """Return a strategy's class and its float attributes, such as `FedAdam(beta_1=0.9, eta=0.1)`.

    Attributes that FedAvg also has are omitted.
    """
    numbers = {name: value for name, value in vars(strategy).items() if isinstance(value, float)}
    names = sorted(numbers.keys() - {"fraction_train", "fraction_evaluate"})
    return f"{type(strategy).__name__}({', '.join(f'{name}={numbers[name]:g}' for name in names)})"


def server_step(rule: ServerRule, strategy: Strategy, aggregate: Callable[[Tensor], Tensor]) -> ServerRule:
    """Return a server rule: Eq. (4), followed by the step of a Flower strategy on the new model.

    A strategy keeps its moments in attributes. The rule sets them from its memory before each call and reads them back
    after it, so that the step is a pure function of its arguments. A strategy without moments adds nothing to the
    memory, so `sa.run` can continue a run of FedAvg.

    Args:
        rule: The server's step of Eq. (4).
        strategy: The strategy, for its moments.
        aggregate: The strategy's aggregation of one reply, the model (d,) -> (d,).
    """

    def without_moments(w: Tensor, g: Tensor, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        moved, memory, metrics = rule.apply(w, g, memory)
        return aggregate(moved).to(w), memory, metrics

    if not any(hasattr(strategy, name) for name in STRATEGY_MEMORY):
        return ServerRule(without_moments, rule.init)

    def apply(w: Tensor, g: Tensor, memory: Memory) -> tuple[Tensor, Memory, Metrics]:
        moved, inner, metrics = rule.apply(w, g, memory["rule"])
        for name in STRATEGY_MEMORY:
            if hasattr(strategy, name):
                setattr(strategy, name, _to_arrays(memory["strategy"].get(name)))
        moved = aggregate(moved).to(w)
        return moved, {"rule": inner, "strategy": _moments(strategy)}, metrics

    def init(like: Tensor) -> Memory:
        return {"rule": rule.init(like), "strategy": _moments(strategy)}

    return ServerRule(apply, init)


def _moments(strategy: Strategy) -> Memory:
    """Return the moments that a strategy keeps between rounds, as tensors."""
    moments = {name: getattr(strategy, name, None) for name in STRATEGY_MEMORY}
    return {name: _to_tensors(value) for name, value in moments.items() if value}


def _to_tensors(arrays: Any) -> Any:
    """Copy a dict or list of arrays into tensors."""
    if isinstance(arrays, dict):
        return {name: torch.tensor(array) for name, array in arrays.items()}
    return [torch.tensor(array) for array in arrays]


def _to_arrays(tensors: Any) -> Any:
    """Return the inverse of `_to_tensors`; None stays None."""
    if isinstance(tensors, dict):
        return {name: t.cpu().numpy().copy() for name, t in tensors.items()}
    return None if tensors is None else [t.cpu().numpy().copy() for t in tensors]
