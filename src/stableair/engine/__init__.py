"""The fast engine, a leaf: `accelerate` gives an equal simulation with faster callables."""

from dataclasses import replace
from typing import NamedTuple

import torch

from stableair.checks import InputError, choice
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.trainer import PRECISIONS, StackedTrainer
from stableair.local import Reference
from stableair.simulate import Simulation

__all__ = ["PRECISIONS", "Choice", "Unsupported", "accelerate", "choose"]


class Choice(NamedTuple):
    """How a run is computed, and why so; a resumed run is computed the same way."""

    engine: str  # "stacked" or "reference"
    precision: str
    chunk: int
    why: str

    def __str__(self) -> str:
        return f"engine {self.engine}, {self.precision}, {self.chunk} clients at a time: {self.why}"


def choose(sim: Simulation, engine: str, precision: str = "auto", chunk: int = 0) -> Choice:
    """The fastest engine for the model and the device, or the one that is asked for."""
    place = sim.start.w.device.type
    try:
        Stacked(sim.train.module)
        obstacle = ""
    except Unsupported as error:
        obstacle = str(error)
    if engine == "fast" and obstacle:
        raise InputError(f"engine fast cannot take this model: {obstacle}; engine=auto takes the next best")
    precision = "fp32" if precision == "auto" else precision  # as exact as the reference, until it is told otherwise
    if obstacle or engine == "auto":  # auto stays with the reference until a benchmark and its resumption say otherwise
        if precision != "fp32":
            raise InputError(f"precision {precision} needs the fast engine: {obstacle or 'engine=fast'}")
        why = obstacle or "one client after the other; engine=fast trains them side by side"
        return Choice("reference", "fp32", min(chunk or sim.train.chunk, sim.n), why)
    if precision != "fp32" and place == "cpu":
        raise InputError(f"precision must be fp32 on a CPU: got {precision}")
    return Choice("stacked", precision, min(chunk or _fitting(sim), sim.n), f"the clients' models stacked, on {place}")


def _fitting(sim: Simulation) -> int:
    """How many clients fit into the free memory of the device; a first guess, halved when it proves too large."""
    if sim.start.w.device.type == "cpu":
        return sim.train.chunk
    free, _ = torch.cuda.mem_get_info(sim.start.w.device)
    each = 4 * len(sim.start.w) * 12  # weights, gradients, what is sent, and about as much again for activations
    return max(1, int(0.6 * free) // each)


def accelerate(sim: Simulation, choice_: Choice | None = None, *, compile: bool = False) -> Simulation:
    """An equal simulation whose clients train side by side."""
    if not isinstance(sim.train, Reference):
        raise InputError("accelerate needs a simulation with the reference trainer")
    how = choice_ or choose(sim, "fast")
    choice("precision", how.precision, PRECISIONS)
    if how.engine == "reference":
        return replace(sim, train=replace(sim.train, chunk=how.chunk))
    return replace(sim, train=StackedTrainer(sim.train, Stacked(sim.train.module), how.precision, how.chunk, compile))
