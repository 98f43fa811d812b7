"""How a run is computed: its engine, the number of clients that it trains at once, and its projected duration."""

import logging
import time
from dataclasses import replace
from typing import Any

import torch

from stableair.algorithm import Simulation
from stableair.distributed import ProcessGroup, SingleProcess
from stableair.engine import EngineChoice, accelerate, choose
from stableair.errors import InputError
from stableair.experiment import Experiment
from stableair.training.reference import Reference

log = logging.getLogger("stableair")

Engine = dict[str, Any]  # record of how a run is computed: engine, precision, chunk, why, ranks
TIMED_STEPS = 3  # local steps from which the duration of a slow run is projected
CHUNKS_OVER_RANKS = 4  # the clients are split into this many chunks; independent of the number of ranks


def with_engine(
    sim: Simulation, experiment: Experiment, environment: dict[str, Any], ranks: SingleProcess | ProcessGroup
) -> tuple[Simulation, Engine]:
    """Replace the reference trainer of a simulation by the engine of its experiment.

    A resumed run keeps the engine of its last rounds, so that it is bit-identical to an uninterrupted run. If that
    engine cannot compute the model here, for example because Triton is missing, another engine continues the run.

    Args:
        sim: The simulation, with the reference trainer.
        experiment: Its experiment, for the settings engine, precision, chunk and rounds.
        environment: The environment that computed the last rounds; empty for a new run.
        ranks: The processes that compute the run.

    Returns:
        The simulation with the trainer of the engine, and the engine as it is recorded.
    """
    if experiment.engine == "reference":
        return _with_reference(sim, experiment, ranks)
    recorded, obstacles = _recorded_choice(sim, experiment, environment), [""]
    if recorded:
        recorded = _for_ranks(recorded, sim, ranks)
        fast, obstacle = _try(sim, recorded)
        obstacles = ranks.all_gather_objects(obstacle)  # all ranks continue with the same engine
        if not any(obstacles):
            return fast, recorded.record()
    chosen = choose(sim, experiment.engine, experiment.precision, experiment.chunk, experiment.rounds)
    if ranks.size > 1 and not experiment.chunk:  # independent of the number of ranks: it may change the last bits
        fitting = min(ranks.all_gather_objects(chosen.chunk))  # the ranks may have different free memory
        chosen = chosen._replace(chunk=min(fitting, -(-sim.n // CHUNKS_OVER_RANKS)))
    chosen = _for_ranks(chosen, sim, ranks)
    if any(obstacles):
        text = "%s; engine %s continues the run, and the last bits of its rounds may differ"
        log.warning(text, next(filter(None, obstacles)), chosen.engine)
    return accelerate(sim, chosen), chosen.record()


def _with_reference(
    sim: Simulation, experiment: Experiment, ranks: SingleProcess | ProcessGroup
) -> tuple[Simulation, Engine]:
    """Return the simulation with the reference engine, as the experiment requests.

    Raises:
        InputError: The experiment sets another precision (`unsupported-precision`).
    """
    if experiment.precision not in ("auto", "fp32"):
        text = f"engine=reference computes in fp32: leave out precision={experiment.precision}"
        raise InputError(text, code="unsupported-precision", name="precision", value=experiment.precision)
    if sim.start.model.w.is_cuda:
        log.warning("engine=reference trains one client after the other, which is slow on a GPU: try engine=auto")
    chunk = getattr(sim.train, "chunk", sim.n)
    if ranks.size > 1 and isinstance(sim.train, Reference):
        chunk = _equal_chunks(sim, ranks.size)
        sim = replace(sim, train=replace(sim.train, chunk=chunk))
    return sim, EngineChoice("reference", "fp32", chunk, "as requested").record()


def _recorded_choice(sim: Simulation, experiment: Experiment, environment: dict[str, Any]) -> EngineChoice | None:
    """Return the engine of an environment; None if it records none, or if the settings or the device exclude it."""
    if not {"engine", "precision", "chunk"} <= environment.keys():
        return None
    engine, precision = environment["engine"], environment["precision"]
    same_kind = (environment.get("device") == "cpu") == (sim.start.model.w.device.type == "cpu")
    allowed = (experiment.engine == "auto" or engine != "reference") and experiment.precision in ("auto", precision)
    if not same_kind or not allowed:
        return None
    return EngineChoice(
        engine, precision, min(experiment.chunk or environment["chunk"], sim.n), "as in the earlier rounds"
    )


def _for_ranks(choice: EngineChoice, sim: Simulation, ranks: SingleProcess | ProcessGroup) -> EngineChoice:
    """Return the choice for a rank: every engine that trains one client after the other becomes the reference."""
    if ranks.size == 1 or choice.engine not in ("reference", "processes"):  # the chunk does not change their bits
        return choice
    return EngineChoice("reference", choice.precision, _equal_chunks(sim, ranks.size), "the ranks share the clients")


def _try(sim: Simulation, choice: EngineChoice) -> tuple[Simulation, str]:
    """Try an engine: return the simulation, and the reason why the engine cannot compute it, or ""."""
    try:
        return accelerate(sim, choice), ""
    except InputError as error:
        return sim, str(error)


def projection(sim: Simulation, rounds: int, engine: Engine) -> dict[str, float]:
    """Project the duration of a run with the reference engine from the first local steps of one client.

    Returns:
        {"projected_seconds": ..., "projected_rounds": rounds}; empty for every other engine, whose first round takes
        little time, and if no client takes part in round 0.
    """
    if engine["engine"] != "reference" or not isinstance(sim.train, Reference):
        return {}
    work, clients = sim.train.work, sim.participants(0).tolist()
    if not clients:
        return {}
    first = [work.parts[clients[0]][: TIMED_STEPS * work.batch_size]]
    trainer = Reference(replace(work, parts=first, epochs=1))
    for _ in range(2):  # the first pass is a warm-up
        start = time.perf_counter()
        trainer.train(sim.start.model, 0, torch.tensor([0])).update.sum().item()  # waits for the GPU
        elapsed = time.perf_counter() - start
    steps = sum(work.steps(n) for n in clients)
    return {"projected_seconds": elapsed / trainer.work.steps(0) * steps * rounds, "projected_rounds": rounds}


def _equal_chunks(sim: Simulation, ranks: int) -> int:
    """Return the number of clients per chunk that gives all ranks about the same work."""
    most = getattr(sim.train, "chunk", sim.n)
    share = -(-sim.n // ranks)
    return -(-share // -(-share // most))
