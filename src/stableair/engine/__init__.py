"""The fast engine, a leaf: `accelerate` gives an equal simulation with faster callables."""

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import torch

from stableair.checks import InputError, choice
from stableair.engine.processes import ProcessTrainer
from stableair.engine.stacked import Stacked, Unsupported
from stableair.engine.trainer import PRECISIONS, StackedTrainer
from stableair.local import SMALL, Reference
from stableair.simulate import Simulation

__all__ = ["PRECISIONS", "Choice", "Unsupported", "accelerate", "choose"]

LARGE = 10_000_000  # entries from which a CPU's threads work together better on one client than each on its own
WORTH = 10_000_000_000  # entries times local steps in a run that repay the seconds it takes to start the processes
FEW = 10  # local steps of a client below which handing its update over takes longer than the steps
CLIENTS = 50  # to stack on a CPU; more gain nothing


class Choice(NamedTuple):
    """How a run is computed, and why so; a resumed run is computed the same way."""

    engine: str  # "reference", "stacked", "kernels" or "processes"
    precision: str
    chunk: int
    why: str


def choose(sim: Simulation, engine: str, precision: str = "auto", chunk: int = 0, rounds: int = 1) -> Choice:
    """The fastest engine for the model and the device, or the one that is asked for; bench/RECORDS.md has the times."""
    obstacle = _obstacle(sim)
    if engine == "fast" and obstacle:
        raise InputError(f"engine fast cannot take this model: {obstacle}; engine=auto takes the next best")
    if sim.start.w.device.type == "cpu":
        if precision not in ("auto", "fp32"):
            raise InputError(f"precision must be fp32 on a CPU: got {precision}")
        return _on_cpu(sim, engine, chunk, rounds, obstacle)
    precision = "fp32" if precision == "auto" else precision  # as exact as the reference, until it is told otherwise
    if obstacle or engine == "auto":  # auto stays with the reference on a GPU until its resumption has been seen exact
        if precision != "fp32":
            raise InputError(f"precision {precision} needs the fast engine: {obstacle or 'engine=fast'}")
        why = obstacle or "one client after the other; engine=fast trains them side by side"
        return Choice("reference", "fp32", min(chunk or sim.train.chunk, sim.n), why)
    return Choice("stacked", precision, min(chunk or _fitting(sim), sim.n), "the clients' models stacked, on a GPU")


def _obstacle(sim: Simulation) -> str:
    """What of the model cannot be stacked."""
    try:
        Stacked(sim.train.module)
    except Unsupported as error:
        return str(error)
    return ""


def _on_cpu(sim: Simulation, engine: str, chunk: int, rounds: int, obstacle: str) -> Choice:
    entries, cores = len(sim.start.w), _cores()
    steps = sum(sim.train.epochs * -(-len(part) // sim.train.batch_size) for part in sim.train.parts)  # in a round
    if not obstacle and entries < SMALL:
        return Choice("stacked", "fp32", min(chunk or CLIENTS, sim.n), "a small model, the clients side by side")
    chunk = min(chunk or sim.train.chunk, sim.n)
    worth = entries < LARGE and steps >= FEW * sim.n and rounds * steps * entries > WORTH
    if cores > 1 and (engine == "fast" or (entries >= SMALL and worth)):
        return Choice("processes", "fp32", chunk, f"one process on each of {cores} cores")
    return Choice("reference", "fp32", chunk, obstacle or "one client after the other")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fitting(sim: Simulation) -> int:
    """How many clients fit into the free memory of the GPU; a first guess, halved when it proves too large."""
    free, _ = torch.cuda.mem_get_info(sim.start.w.device)
    each = 4 * len(sim.start.w) * 12  # weights, gradients, what is sent, and about as much again for activations
    return max(1, int(0.6 * free) // each)


def accelerate(sim: Simulation, how: Choice | None = None) -> Simulation:
    """An equal simulation whose clients train side by side."""
    if not isinstance(sim.train, Reference):
        raise InputError("accelerate needs a simulation with the reference trainer")
    how = how or choose(sim, "fast")
    choice("precision", how.precision, PRECISIONS)
    plain = replace(sim.train, chunk=how.chunk)
    match how.engine:
        case "reference":
            return replace(sim, train=plain)
        case "processes":
            return replace(sim, train=ProcessTrainer(plain, min(_cores(), how.chunk)))
    by_hand = how.engine == "kernels"
    if by_hand and not has_kernels(sim):
        raise InputError("engine kernels is for our ResNets with batch norm, and needs Triton")
    program = Stacked(plain.module)
    return replace(sim, train=StackedTrainer(plain, program, how.precision, how.chunk, by_hand))


def has_kernels(sim: Simulation) -> bool:
    """Whether there are kernels of our own for the model."""
    if not find_spec("triton"):
        return False
    from stableair.engine.resnet import fits

    return fits(sim.train.module)
