"""Run an experiment: build it, choose an engine, resume it, record it."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stableair import __version__
from stableair.algorithm import Simulation, simulate
from stableair.builder import build, own_parts_named
from stableair.checks import InputError, place, typed, whole
from stableair.contracts import Round
from stableair.experiment import Experiment
from stableair.local import Reference, threads
from stableair.ranks import joined
from stableair.results.folder import (
    Circumstances,
    ResumePoint,
    environment,
    locked,
    recorded,
    restored,
    resume_point,
)
from stableair.results.run import Row, Run, load
from stableair.results.sealed import read_environments

Engine = dict[str, Any]  # how a run is computed: engine, precision, chunk, why, ranks
QUARTERS = 4  # chunks in which the clients are dealt out to several ranks, whatever their number

__all__ = ["resume_point", "run"]


@typed
def run(
    experiment: Experiment,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int = 1,
    on_round: Callable[[Row], Any] | None = None,
    on_start: Callable[[Engine], Any] | None = None,
) -> Run:
    """Run an experiment, in memory or recorded in a folder; `on_round` sees each round's numbers as they come.

    `on_start` is told once how it is computed: the engine, its precision, the clients at a time, and why so.
    With `resume` it goes on from the last complete round in the folder, and a finished run is not computed again.
    """
    whole("checkpoint_every", checkpoint_every, 1)
    folder = None if folder is None else place("folder", folder)
    with ExitStack() as stack, enough_memory():
        ranks = stack.enter_context(joined(experiment.id(), __version__))  # one process, or those of torchrun
        begin, past = ranks.first(lambda: _opened(folder, experiment, resume, stack))
        if folder and (begin.rounds >= experiment.rounds or begin.diverged):
            return ranks.first(lambda: load(folder))
        if past:
            stack.enter_context(threads(past[-1].get("threads")))
        sim, engine = _with_engine(ranks.every(lambda: build(experiment)), experiment, past, ranks.size)
        engine |= {"ranks": ranks.size}
        if past and past[-1].get("data", sim.files) != sim.files:
            raise InputError(f"{folder} was begun with other data files: {past[-1]['data']}, now {sim.files}")
        if on_start and ranks.rank == 0:
            on_start(engine)
        start = restored(sim.start, sim.rules, begin.checkpoint, folder)
        sim = ranks.share(sim)
        about = Circumstances(
            experiment,
            environment(start.w.device) | {"data": sim.files} | engine,
            None if sim.labels is None else sim.labels.tolist(),
            sim.rules,
            lambda: getattr(sim.train, "chunk", None),
        )
        rows, final = begin.rows[: begin.rounds], begin.checkpoint.state if begin.checkpoint else None
        path = _named(simulate(sim, start, experiment.rounds, start=begin.rounds), experiment)
        kept = folder if ranks.rank == 0 else None
        with closing(recorded(path, kept, about, begin, checkpoint_every)) as rounds:
            try:
                for _, state, row in rounds:
                    rows.append(row)
                    final = final if row.get("diverged") else state
                    if on_round and ranks.rank == 0:
                        on_round(row)
            except torch.cuda.OutOfMemoryError:
                fewer = max(1, engine["chunk"] // 2)
                raise InputError(f"the device is out of memory; chunk={fewer} needs less, or take device=cpu") from None
        rows = ranks.first(lambda: rows)  # only the first has evaluated
        ranks.tell(len(rows) - begin.rounds)
    return Run(experiment.to_record(), rows, folder, final)


def _opened(
    folder: Path | None, experiment: Experiment, resume: bool, stack: ExitStack
) -> tuple[ResumePoint, list[dict[str, Any]]]:
    """Where the run in a folder stands, and what it was computed with so far; it stays locked with the stack."""
    if folder is None:
        return ResumePoint([], None), []
    stack.enter_context(locked(folder))
    begin = resume_point(folder, experiment, resume)
    return begin, read_environments(folder) if begin.rounds else []


def _named(rounds: Iterator[Round], experiment: Experiment) -> Iterator[Round]:
    """The rounds; whatever goes wrong in a component of the user's own is told with its file and line."""
    with own_parts_named(experiment):
        yield from rounds


@contextmanager
def enough_memory() -> Iterator[None]:
    """What does not fit into the memory is one line, wherever it is found out."""
    try:
        yield
    except MemoryError:
        raise InputError("there is not enough memory for an experiment of this size") from None
    except RuntimeError as error:  # torch has no class for it on a CPU
        if not re.search("allocate memory|out of memory|Storage size calculation", str(error)):
            raise
        raise InputError("there is not enough memory for an experiment of this size") from None


def _with_engine(
    sim: Simulation, experiment: Experiment, past: list[dict[str, Any]], ranks: int = 1
) -> tuple[Simulation, Engine]:
    """The simulation as the engine of choice computes it; a run that has begun goes on as it began."""
    e = experiment
    plain = {"engine": "reference", "precision": "fp32", "chunk": getattr(sim.train, "chunk", sim.n)}
    if e.engine == "reference":
        if e.precision not in ("auto", "fp32"):
            raise InputError(f"engine=reference computes in fp32: leave out precision={e.precision}")
        if ranks > 1 and isinstance(sim.train, Reference):
            chunk = _equal_chunks(sim, ranks)
            sim, plain = replace(sim, train=replace(sim.train, chunk=chunk)), plain | {"chunk": chunk}
        return sim, plain | {"why": "as asked for"}
    try:
        from stableair.engine import EngineChoice, accelerate, choose
    except ModuleNotFoundError as error:  # the engine is a leaf: without it all works, slowly
        if error.name != "stableair.engine":
            raise
        if e.engine == "fast":
            raise InputError("engine fast is not there: this installation has no stableair.engine") from None
        return sim, plain | {"why": "there is no other"}
    before = past[-1] if past else {}
    same_kind = (before.get("device") == "cpu") == (sim.start.w.device.type == "cpu")
    if same_kind and plain.keys() <= before.keys() and _allows(e, before["engine"], before["precision"]):
        chunk = min(e.chunk or before["chunk"], sim.n)
        chosen = EngineChoice(before["engine"], before["precision"], chunk, "as the rounds before")
    else:
        chosen = choose(sim, e.engine, e.precision, e.chunk, e.rounds)
        if ranks > 1 and not e.chunk:  # one that does not depend on their number: it may change the last bits
            chosen = chosen._replace(chunk=min(chosen.chunk, -(-sim.n // QUARTERS)))
    if ranks > 1 and chosen.engine in ("reference", "processes"):  # where it changes none
        chosen = chosen._replace(engine="reference", chunk=_equal_chunks(sim, ranks))
    return accelerate(sim, chosen), chosen._asdict()


def _equal_chunks(sim: Simulation, ranks: int) -> int:
    """How many clients each rank trains at a time, so that all have about the same to do."""
    most = getattr(sim.train, "chunk", sim.n)
    share = -(-sim.n // ranks)
    return -(-share // -(-share // most))


def _allows(e: Experiment, engine: str, precision: str) -> bool:
    """Whether a run that was computed so may go on so, with what is asked for now."""
    return (e.engine == "auto" or engine != "reference") and e.precision in ("auto", precision)
