"""How a run is computed: its engine, the number of clients that it trains at once, and its projected duration."""

import logging
import time
from collections.abc import Sequence
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

Engine = dict[str, Any]  # how a run is computed: engine, precision, chunk, why, ranks
TIMED_STEPS = 3  # local steps from which the duration of a slow run is projected
CHUNKS_OVER_RANKS = 4  # the clients are split into this many chunks; independent of the number of ranks


def with_engine(
    sim: Simulation, experiment: Experiment, environments: Sequence[dict[str, Any]], ranks: SingleProcess | ProcessGroup
) -> tuple[Simulation, Engine]:
    """The simulation with its engine: that of the last of the environments if possible, else the best one."""
    e = experiment
    plain = {"engine": "reference", "precision": "fp32", "chunk": getattr(sim.train, "chunk", sim.n)}
    if e.engine == "reference":
        if e.precision not in ("auto", "fp32"):
            text = f"engine=reference computes in fp32: leave out precision={e.precision}"
            raise InputError(text, code="unsupported-precision", name="precision", value=e.precision)
        if ranks.size > 1 and isinstance(sim.train, Reference):
            chunk = _equal_chunks(sim, ranks.size)
            sim, plain = replace(sim, train=replace(sim.train, chunk=chunk)), plain | {"chunk": chunk}
        return sim, plain | {"why": "as asked for"}
    before = environments[-1] if environments else {}
    same_kind = (before.get("device") == "cpu") == (sim.start.model.w.device.type == "cpu")
    if same_kind and plain.keys() <= before.keys() and _allows(e, before["engine"], before["precision"]):
        chunk = min(e.chunk or before["chunk"], sim.n)
        chosen = EngineChoice(before["engine"], before["precision"], chunk, "as the rounds before")
    else:
        chosen = choose(sim, e.engine, e.precision, e.chunk, e.rounds)
        if ranks.size > 1 and not e.chunk:  # independent of the number of ranks: the chunk may change the last bits
            fitting = min(ranks.all_gather_objects(chosen.chunk))  # the ranks may have different free memory
            chosen = chosen._replace(chunk=min(fitting, -(-sim.n // CHUNKS_OVER_RANKS)))
    if ranks.size > 1 and chosen.engine in ("reference", "processes"):  # the chunk does not change their bits
        why = "the ranks share the clients"
        chosen = chosen._replace(engine="reference", chunk=_equal_chunks(sim, ranks.size), why=why)
    return accelerate(sim, chosen), chosen.record()


def projection(sim: Simulation, rounds: int, engine: Engine) -> dict[str, float]:
    """The projected duration of a run on the reference loop, from the first local steps of one client.

    Returns:
        {"projected_seconds": ...}; empty for every other engine, whose first round takes little time.
    """
    if engine["engine"] != "reference" or not isinstance(sim.train, Reference):
        return {}
    if sim.start.model.w.is_cuda:
        log.warning("the slow reference loop computes this run on a GPU: %s", engine["why"])
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
    return {"projected_seconds": elapsed / trainer.work.steps(0) * steps * rounds}


def _equal_chunks(sim: Simulation, ranks: int) -> int:
    """Number of clients that a rank trains together, chosen so that all ranks have about the same work."""
    most = getattr(sim.train, "chunk", sim.n)
    share = -(-sim.n // ranks)
    return -(-share // -(-share // most))


def _allows(e: Experiment, engine: str, precision: str) -> bool:
    """Whether the settings of an experiment allow the engine and the precision of its earlier rounds."""
    return (e.engine == "auto" or engine != "reference") and e.precision in ("auto", precision)
