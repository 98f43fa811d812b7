"""Sweeps: many experiments in this process, in several worker processes of this machine, or on a Ray cluster.

A worker process reads its job from standard input, and exits when its standard input closes. So it exits with the
process that started it.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, Unpack, get_args

import torch
from torch import nn

import stableair
from stableair.builder import check_channels
from stableair.contracts import Dataset
from stableair.errors import InputError, StableairError
from stableair.experiment import Experiment
from stableair.literals import PluginChange
from stableair.results.callbacks import Callback
from stableair.results.grouping import Sweep
from stableair.results.lock import check_writable, has_locks
from stableair.results.options import RunControl, RunOptions, observing
from stableair.runner import advise_on_interrupt
from stableair.spec import passed_objects
from stableair.sweeps.clusters import run_on_ray
from stableair.sweeps.plans import Plan, check_no_objects, expand_plan, replace_objects, with_objects
from stableair.sweeps.workers import Job, Outcome, collect_runs, run_unlocked
from stableair.validation import as_path, choice, integer, short_repr

log = logging.getLogger("stableair")

EXIT_SECONDS = 20  # seconds within which a worker process must exit


def sweep(
    plan: Plan | str | Path | Iterable[Experiment],
    folder: str | Path = "runs",
    *,
    parallel: int = 1,
    ray: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    plugin_changed: PluginChange = "refuse",
    callbacks: Sequence[Callback] = (),
    data: Dataset | str | None = None,
    model: nn.Module | Callable[..., Any] | str | None = None,
    receiver: Any = None,
    server: Any = None,
    **options: Unpack[RunOptions],
) -> Sweep:
    """Run all experiments of a plan, each in a subfolder. `stableair sweep` calls this function.

    Other processes may compute the same plan in the same folder, on this or another machine: they share the work. A
    finished run is not computed again. If the channel of an experiment cannot work, the sweep is refused before
    anything is computed. If an experiment fails later, the others are computed before the error is raised.

    Args:
        plan: Settings, each with one value or a list, such as `{"receiver": ["mac(C=1)", "none()"], "seeds": 3}`; a
            .toml file with such a plan; or experiments. Values of `data`, `model`, `receiver` and `server` may be
            Python objects, as for `run`.
        folder: Folder of the run folders.
        parallel: Number of processes on this machine.
        ray: Address HOST:PORT of a Ray cluster, or "auto", to run each experiment as a task there. All machines of the
            cluster must share the folder.
        cpus: CPUs of each Ray task.
        gpus: GPUs of each Ray task; 0.5 lets two tasks share a GPU.
        plugin_changed: As for `run`.
        callbacks: Observers. `start` and `round` are called for the experiments that this process computes, `end` for
            all experiments.
        data: A data set for all experiments, as for `run`. Python objects exist in this process only: with them,
            `parallel` must be 1.
        model: A network for all experiments.
        receiver: A receiver for all experiments.
        server: A server for all experiments.
        **options: As for `run`, see `RunOptions`.

    Returns:
        The runs in the order of the plan, without their models. `load` reads a run with its model.

    Raises:
        InputError: The plan is invalid, the channel of an experiment cannot work, an object replaces several values of
            the plan (`object-and-plan`), or other processes would need the object (`object-needs-process`).
        StableairError: An experiment failed; the class is the class of the first error.
        MissingExtraError: `ray` is set, but Ray is not installed.

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> small = {"data": "synthetic(samples=60)", "clients": 3, "rounds": 2}
    >>> plan = {**small, "receiver": ["mac(C=1)", "none()"], "seeds": 2}
    >>> with TemporaryDirectory() as folder:
    ...     runs = sa.sweep(plan, folder)
    >>> [(run.settings["receiver"], run.settings["seed"]) for run in runs]
    [('mac(C=1)', 0), ('mac(C=1)', 1), ('none()', 0), ('none()', 1)]
    """
    plan, in_plan = replace_objects(plan)
    experiments, objects = with_objects(expand_plan(plan), data=data, model=model, receiver=receiver, server=server)
    folder = as_path("folder", folder)
    if integer("parallel", parallel, 1, 1000) > 1 or ray is not None:
        check_no_objects(experiments)
    choice("plugin_changed", plugin_changed, get_args(PluginChange))
    for split in {one.evaluate for one in experiments}:
        RunControl.create(options, split, folder)
    if ray is not None:
        _check_ray(ray, parallel)
    with passed_objects({**in_plan, **objects}):
        check_channels(experiments)
    with (
        passed_objects({**in_plan, **objects}),
        advise_on_interrupt(folder),
        observing(callbacks, options, folder, len(experiments)) as observer,
    ):
        if ray is None:
            outcomes = _run_here(experiments, folder, parallel, plugin_changed, options, observer)
        else:
            outcomes = run_on_ray(
                experiments, folder, ray, cpus=cpus, gpus=gpus, plugin_changed=plugin_changed, options=options,
                observer=observer,
            )  # fmt: skip
    return collect_runs(experiments, outcomes)


def _check_ray(ray: str, parallel: int) -> None:
    """Refuse an address of a wrong type, and `parallel` in addition to Ray."""
    if not isinstance(ray, str):
        text = f"ray must be the address of a Ray cluster, HOST:PORT or auto: got {short_repr(ray)}"
        raise InputError(text, code="wrong-type", name="ray", value=ray)
    if parallel > 1:
        text = "parallel and ray exclude each other: Ray sets the number of tasks; leave out parallel"
        raise InputError(text, code="parallel-and-ray")


def _run_here(
    experiments: list[Experiment], folder: Path, processes: int, plugin_changed: PluginChange, options: RunOptions,
    observer: Callback,
) -> dict[str, Outcome]:  # fmt: skip
    """Run the experiments in this process and in worker processes; return the outcomes by name."""
    check_writable(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        job = Job.create(experiments, folder, plugin_changed, options)
        with _workers(min(processes, len(experiments)) - 1, experiments, job):
            outcomes = run_unlocked(experiments, folder, [observer], plugin_changed, options)
            return {one.name: outcome for one, outcome in outcomes}
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # if it is empty


@contextmanager
def _workers(number: int, experiments: list[Experiment], job: Job) -> Iterator[None]:
    """Start worker processes, and divide the threads and GPUs of the machine among them and this process."""
    if not number:
        yield
        return
    if "WORLD_SIZE" in os.environ:
        text = "torchrun's processes compute one experiment together: leave out parallel, or torchrun"
        raise InputError(text, code="parallel-and-torchrun")
    if not has_locks(Path(job.folder)):
        text = f"{job.folder} is on a disk without file locks, which several processes need: leave out parallel"
        raise InputError(text, code="no-file-locks", path=job.folder)
    threads = torch.get_num_threads()
    share = max(1, threads // (number + 1))
    processes = [_worker(assign_gpu(i, experiments) | {"OMP_NUM_THREADS": str(share)}) for i in range(1, number + 1)]
    try:
        torch.set_num_threads(share)
        for process in processes:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
        yield
    finally:
        torch.set_num_threads(threads)
        _stop_workers(processes)


def _worker(environment: dict[str, str]) -> Any:
    package = str(Path(stableair.__file__).absolute().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment | {"PYTHONPATH": path},
    )


def assign_gpu(number: int, experiments: list[Experiment]) -> dict[str, str]:
    """Return the environment variable that gives a worker process one GPU.

    The result is empty with a single GPU, or if an experiment sets a device.
    """
    gpus = torch.cuda.device_count()
    if gpus < 2 or any(one.device not in ("auto", "cuda") for one in experiments):
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": names[number % gpus]}


def _stop_workers(processes: list[Any]) -> None:
    """Stop the worker processes and wait for their exit; all complete rounds are on the disk."""
    for process in processes:
        with suppress(BrokenPipeError):
            process.stdin.close()
    for process in processes:
        try:
            code = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            log.warning("a worker process exited with code %d", code)


def _stop_at_end_of(stdin: Any) -> None:
    """Stop this worker when its standard input closes.

    Its standard input closes when the process that started it exits or no longer needs it.
    """
    stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that started this one
    signal.signal(signal.SIGTERM, _interrupt)
    with suppress(KeyboardInterrupt, StableairError):  # the process that started this one reports the same error
        job = Job(*json.loads(sys.stdin.buffer.readline()))
        Thread(target=_stop_at_end_of, args=[sys.stdin.buffer], daemon=True).start()
        job()
    os._exit(0)  # the thread may still read, and Python would wait for it


if __name__ == "__main__":
    main()
