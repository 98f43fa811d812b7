"""Run an experiment: build it, resume it, record it."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from stableair import __version__
from stableair.algorithm import Simulation, simulate
from stableair.builder import attribute_plugin_errors, build
from stableair.contracts import Dataset, Round, State
from stableair.distributed import ProcessGroup, SingleProcess, join_process_group
from stableair.errors import ResourceError, RunBusyError, StableairError
from stableair.execution import Engine, projection, with_engine
from stableair.experiment import COMPONENT_SETTINGS, Experiment
from stableair.isolation import isolated
from stableair.literals import PluginChange
from stableair.objects import as_settings
from stableair.results.callbacks import Callback
from stableair.results.environment import environment
from stableair.results.lock import LockedFolder, locked
from stableair.results.metrics import Row
from stableair.results.options import RunControl, RunOptions, observing
from stableair.results.plugins import component_sources, record_kept
from stableair.results.profiling import profiled
from stableair.results.reading import read_run
from stableair.results.recorder import RunMetadata, recorded
from stableair.results.resume import NEW_RUN, ResumePoint, check_same_data, restored_state, resume_point
from stableair.results.run import Run
from stableair.spec import passed_objects
from stableair.training.reference import threads
from stableair.validation import as_path, integer, typed


@typed
@isolated()
def run(
    experiment: Experiment,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int = 1,
    plugin_changed: PluginChange = "refuse",
    callbacks: Sequence[Callback] = (),
    data: Dataset | str | None = None,
    model: nn.Module | Callable[..., Any] | str | None = None,
    receiver: Any = None,
    server: Any = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Run an experiment, in memory or recorded in a folder.

    Args:
        experiment: The experiment to run.
        folder: Run folder; None keeps the run in memory.
        resume: Whether to continue after the last complete round in the folder. A finished run is not computed again.
        checkpoint_every: Rounds between two checkpoints.
        plugin_changed: What to do with recorded rounds of a plug-in that has changed since: "refuse" raises an error,
            "keep" uses them and records both versions, "recompute" restarts the run.
        callbacks: Observers of the run, see `Callback`.
        data: A data set in place of the experiment's. As for the three arguments below, the run records the name and a
            digest of the object, and can only be resumed with the same object.
        model: A network, whose parameters are the initial model; or a function that returns a network. The function
            gets the shape of a sample and the number of classes if it takes arguments.
        receiver: A function g -> g, or a `Rule`.
        server: A function (w, g) -> w, or a `ServerRule`.
        **options: `stop`, `patience`, `monitor`, `keep_best`, `profile`, `track`, `progress`: see `RunOptions`.

    Returns:
        The rounds and the final model.

    Raises:
        InputError: The folder holds another experiment (`other-experiment`), or a run although `resume` is false
            (`run-exists`), or results of a plug-in that has changed (`plugin-changed`) or of other Python objects
            (`object-changed`); or an argument is invalid.
        RunBusyError: Another process computes the run in this folder; the callbacks are not called.
        ResourceError: The memory is too small (`out-of-memory`).

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> experiment = sa.Experiment(data="synthetic(samples=60)", clients=3, rounds=2)
    >>> with TemporaryDirectory() as folder:
    ...     short = sa.run(experiment, folder)
    ...     longer = sa.run(experiment.with_(rounds=3), folder, resume=True)  # computes one more round
    >>> len(short), len(longer)
    (2, 3)
    >>> longer["test/accuracy"][:2] == short["test/accuracy"]
    True
    """
    integer("checkpoint_every", checkpoint_every, 1)
    settings, objects = as_settings(data=data, model=model, receiver=receiver, server=server)
    experiment = experiment.with_(**settings) if settings else experiment  # a copy would parse every spec again
    folder = None if folder is None else as_path("folder", folder)
    control = RunControl.create(options, experiment.evaluate, folder)
    with observing(callbacks, options, folder) as observer:
        try:
            again = "" if resume else "the same call with resume=True"
            with passed_objects(objects) as available, advise_on_interrupt(folder, again):
                result = _run(experiment, folder, resume, checkpoint_every, plugin_changed, control, observer)
            result = replace(result, objects=available)
        except RunBusyError:
            raise
        except StableairError as error:
            observer.end(experiment, error)
            raise
        observer.end(experiment, result)
    return result


def _run(
    experiment: Experiment, folder: Path | None, resume: bool, checkpoint_every: int, plugin_changed: PluginChange,
    control: RunControl, observer: Callback,
) -> Run:  # fmt: skip
    """Run the experiment; the observer is called at its start and after each round."""
    with ExitStack() as stack, out_of_memory_as_error():
        ranks = stack.enter_context(join_process_group(_settings_of_rank(experiment, folder)))
        lock: LockedFolder | None = None  # only on rank 0, which writes the folder

        def open_folder() -> ResumePoint:
            nonlocal lock
            if folder is None:
                return NEW_RUN
            lock = stack.enter_context(locked(folder))
            return resume_point(folder, experiment, resume, plugin_changed)

        previous = ranks.broadcast_from_main(open_folder)
        done = previous.rows[: previous.rounds]
        if folder and (len(done) >= experiment.rounds or previous.diverged or control.stops(done)):
            if lock:
                record_kept(lock, experiment, previous.environments)
                control.record_stopped(lock, done)
            return ranks.broadcast_from_main(lambda: read_run(folder))
        stack.enter_context(threads(previous.environment.get("threads")))
        sim, engine = _prepare(experiment, previous, ranks, folder)
        ranks.check_agreement({name: engine[name] for name in ("engine", "precision", "chunk")} | {"data": sim.files})
        with attribute_plugin_errors(experiment):
            projected = projection(sim, experiment.rounds - previous.rounds, engine) if ranks.size == 1 else {}
        observer.start(experiment, engine | projected)
        state = restored_state(sim.start, previous.checkpoint, folder)
        sim = ranks.shard(sim)
        algorithm = profiled if control.profile else simulate
        rounds = _attributed(algorithm(sim, state, experiment.rounds, start=previous.rounds), experiment)
        metadata = _metadata(experiment, sim, engine | control.record() | control.record_best(lock, previous))
        with (
            closing(recorded(rounds, lock, metadata, previous, checkpoint_every)) as recording,
            _advise_on_chunk(engine),
        ):
            observed = control.observed(recording, lock, previous, ranks.broadcast_from_main)
            rows, final = _collect(observed, experiment, previous, observer)
        rows = ranks.broadcast_from_main(lambda: rows)  # only the main process has evaluated
        ranks.log_traffic(len(rows) - previous.rounds)
    return Run(experiment.to_record(), rows, folder, final, rule=None if folder else control.rule)


def _settings_of_rank(experiment: Experiment, folder: Path | None) -> dict[str, Any]:
    """Values that must be the same on every rank; ranks may use different GPUs and different paths."""
    components = {name: experiment.calls(name) for name in COMPONENT_SETTINGS}
    written_out = {name: " | ".join(str(call.full()) for call in calls) for name, calls in components.items()}
    return (
        experiment.to_dict()
        | written_out
        | {
            "device": experiment.device.partition(":")[0],
            "recorded": folder is not None,
            "threads": torch.get_num_threads(),
            "plug-ins": sorted(f"{name} {source['version']}" for name, source in component_sources(experiment).items()),
            "stableair": __version__,
            "torch": torch.__version__,
        }
    )


def _prepare(
    experiment: Experiment, previous: ResumePoint, ranks: SingleProcess | ProcessGroup, folder: Path | None
) -> tuple[Simulation, Engine]:
    """Build the simulation and choose its engine; refuse data files that have changed since the run was started."""
    sim = ranks.run_on_every_rank(lambda: build(experiment))
    check_same_data(previous, sim.files, folder)
    sim, engine = with_engine(sim, experiment, previous.environment, ranks)
    return sim, engine | {"ranks": ranks.size}


def _metadata(experiment: Experiment, sim: Simulation, engine: Engine) -> RunMetadata:
    return RunMetadata(
        experiment,
        environment(sim.start.model.w.device) | {"data": sim.files} | engine,
        None if sim.labels is None else sim.labels.tolist(),
        lambda: getattr(sim.train, "chunk", None),
    )


def _collect(
    rounds: Iterator[Round], experiment: Experiment, previous: ResumePoint, observer: Callback
) -> tuple[list[Row], State | None]:
    """Run the rounds, and return the rows of the whole run and its last finite state."""
    rows, final = previous.rows[: previous.rounds], previous.checkpoint.state if previous.checkpoint else None
    for _, state, row in rounds:
        rows.append(row)
        final = final if row.get("diverged") else state
        observer.round(experiment, row)
    return rows, final


@contextmanager
def advise_on_interrupt(folder: Path | None, again: str = "the same call") -> Iterator[None]:
    """Add a note to the traceback of Ctrl-C: how to continue.

    Args:
        folder: The folder of the rounds; None for rounds in memory, without a note.
        again: The call that continues; "" for no note about a folder with rounds.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if folder and not folder.exists():
            interrupt.add_note(f"nothing was recorded in {folder}")
        elif folder and again:
            interrupt.add_note(f"{folder} holds every complete round; {again} continues from there")
        raise


@contextmanager
def _advise_on_chunk(engine: Engine) -> Iterator[None]:
    """Raise a ResourceError that suggests a smaller chunk if the GPU runs out of memory."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        text = f"the device is out of memory; chunk={max(1, engine['chunk'] // 2)} needs less, or use device=cpu"
        raise ResourceError(text, code="out-of-memory") from None


def _attributed(rounds: Iterator[Round], experiment: Experiment) -> Iterator[Round]:
    """Yield the rounds; raise an error in a user's component with its file and line."""
    with attribute_plugin_errors(experiment):
        yield from rounds


@contextmanager
def out_of_memory_as_error() -> Iterator[None]:
    """Raise a ResourceError if the machine runs out of memory."""
    text = "not enough memory for an experiment of this size"
    try:
        yield
    except MemoryError:
        raise ResourceError(text, code="out-of-memory") from None
    except RuntimeError as error:  # torch has no error class for this on a CPU
        if not re.search("allocate memory|out of memory|Storage size calculation", str(error)):
            raise
        raise ResourceError(text, code="out-of-memory") from None
