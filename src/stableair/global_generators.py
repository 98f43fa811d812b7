"""The global generators of torch, numpy and Python.

Their numbers depend on the order of all calls in the process. A component that draws from them gives other numbers in a
resumed run, in a repeated run, and next to another method. Components draw from the `source` of the round instead.
"""

import logging
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

log = logging.getLogger("stableair")

ADVICE = {"channel": "draw from the argument source, as in source.normal(d)"}
DEFAULT_ADVICE = "draw from sa.streams.generator(seed, name, k)"


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators by name."""
    states: dict[str, Any] = {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }
    if device.type == "cuda":
        states["torch's generator of the GPU"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


@contextmanager
def warning_of_draws(kind: str, device: torch.device, k: int) -> Iterator[None]:
    """Log a warning in round 0 if the component draws from a global generator.

    Args:
        kind: The component, for the warning.
        device: The device of the component's tensors.
        k: Zero-based index of the round.
    """
    if k:
        yield
        return
    before = generator_states(device)
    yield
    after = generator_states(device)
    for name in (name for name in before if after[name] != before[name]):
        problem = f"the {kind} draws from {name}, so this run cannot be repeated or resumed exactly"
        log.warning("%s: %s", problem, ADVICE.get(kind, DEFAULT_ADVICE))
