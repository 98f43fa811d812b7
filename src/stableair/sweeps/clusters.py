"""A sweep on a cluster: processes that SLURM starts, or the tasks of Ray. All of them must share the sweep's folder."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from stableair.checks import InputError, number, whole
from stableair.experiment import Experiment
from stableair.results.folder import Busy, check_writable
from stableair.results.run import Run, load
from stableair.runner import run
from stableair.sweeps.cooperative import WAIT, Job, Outcome, all_finished, of_a_sweep
from stableair.sweeps.plans import Plan, planned

ANSWERS = 5  # seconds that a port has to answer
CONNECTS = 20  # seconds that a Ray cluster has to take us in
RETRIES = 20  # times that a task or a job is started again when its worker dies or its time is over
MINUTES = 60  # of a SLURM job, until it is queued again

# ------------------------------------------------------------------------------------------------------------- SLURM


class Shift(Job):
    """A job that SLURM may end when its time is over: it is queued again and goes on from the checkpoints."""

    def checkpoint(self) -> Any:
        return _submitit().helpers.DelayedSubmission(self)


def submit(
    plan: Plan | str | Path | Iterable[Experiment],
    folder: str | Path,
    *,
    jobs: int = 1,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Write and submit an array of so many SLURM jobs, each a process that takes part; returns its number.

    options: SLURM's own, such as {"partition": "gpu", "time": 120, "gpus_per_node": 1, "cpus_per_task": 4}.
    """
    submitit = _submitit()
    experiments, folder = planned(plan), Path(folder)
    whole("jobs", jobs, 1, 1000)
    check_writable(folder)
    logs = folder / "slurm"
    try:
        executor = submitit.SlurmExecutor(folder=logs, max_num_timeout=RETRIES)
        executor.update_parameters(**{"time": MINUTES, "job_name": "stableair"} | dict(options or {}))
        with executor.batch():
            submitted = [executor.submit(Shift.of(experiments, folder)) for _ in range(jobs)]
    except (ValueError, TypeError, NameError) as error:
        raise InputError(f"SLURM's options: {' '.join(str(error).split())}") from None
    except (RuntimeError, submitit.core.utils.UncompletedJobError) as error:  # no srun here, or sbatch said no
        raise InputError(f"SLURM takes no job: {' '.join(str(error).split())}") from None
    return str(submitted[0].job_id).partition("_")[0]


def _submitit() -> ModuleType:
    try:
        import submitit
        import submitit.helpers
    except ImportError:
        raise InputError("SLURM jobs need submitit: pip install 'stableair[slurm]'") from None
    return submitit


# --------------------------------------------------------------------------------------------------------------- Ray


def sweep_on_ray(
    plan: Plan | str | Path | Iterable[Experiment],
    folder: str | Path,
    address: str = "auto",
    *,
    cpus: float = 1,
    gpus: float = 0,
    done: Callable[[Experiment, Outcome], Any] = lambda experiment, outcome: None,
) -> list[Run]:
    """Run all experiments of a plan, each a task of a Ray cluster with so many CPUs and GPUs (a GPU may be shared).

    address: HOST:PORT of the cluster's head, or auto on a machine of it. A task whose worker dies is started again and
    goes on from its checkpoint.
    """
    ray = _ray()
    experiments, folder = planned(plan), Path(folder)
    needs = {"CPU": number("cpus", cpus, 0), "GPU": number("gpus", gpus, 0)}
    check_writable(folder)
    _check_answer(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        _check_room(ray.nodes(), needs)
        folder.mkdir(parents=True, exist_ok=True)
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(_compute)
        return all_finished(experiments, _compute_all(ray, task, experiments, folder, done))
    finally:
        ray.shutdown()  # tasks that are at work end with it


def _compute(job: Job) -> str:
    """What a task does; returns "" when the run is finished, "busy", or what is wrong."""
    (experiment,) = job.experiments()
    try:
        run(experiment, Path(job.folder) / experiment.name, resume=True)
    except Busy:
        return "busy"
    except InputError as error:
        return str(error)
    return ""


def _compute_all(
    ray: Any, task: Any, experiments: list[Experiment], folder: Path, done: Callable[[Experiment, Outcome], Any]
) -> dict[str, Outcome]:
    """How each experiment ended; one that a process outside the cluster is at is asked for again."""

    def start(one: Experiment) -> Any:
        job = Job.of([one], folder)
        return task.remote(job._replace(plugins=[str(Path(file).absolute()) for file in job.plugins]))

    outcomes: dict[str, Outcome] = {}
    waiting = {start(one): one for one in experiments}
    while waiting:
        (ended,), _ = ray.wait(list(waiting))
        one = waiting.pop(ended)
        try:
            said = ray.get(ended)
        except ray.exceptions.RayError as error:
            said = f"Ray: {str(error).strip().rpartition(chr(10))[2]}"
        if said == "busy":
            time.sleep(WAIT)
            waiting[start(one)] = one
            continue
        outcomes[one.name] = InputError(said) if said else _fetched(one, folder)
        done(one, outcomes[one.name])
    return outcomes


def _fetched(experiment: Experiment, folder: Path) -> Outcome:
    """The run as this machine sees it."""
    try:
        return of_a_sweep(load(folder / experiment.name), experiment)
    except InputError as error:
        return InputError(f"computed, but not seen from here: do all machines share {folder}? ({error})")


def _check_answer(address: str) -> None:
    """Refuse an address at which there is no Ray cluster; Ray itself would try for minutes."""
    advice = "start one with `ray start --head`"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or not port.isdecimal() or "/" in address:
            raise InputError(f"a Ray cluster's address is HOST:PORT of its head, or auto: got {address!r}")
        try:
            socket.create_connection((host, int(port)), timeout=ANSWERS).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"no Ray cluster answers at {address} ({error}); {advice}") from None
    code = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR')"
    try:
        tried = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=CONNECTS)
    except subprocess.TimeoutExpired:
        raise InputError(f"what answers at {address} is no Ray cluster, or it is stuck; {advice}") from None
    if tried.returncode:
        why = tried.stderr.strip().rpartition("\n")[2]
        raise InputError(f"no Ray cluster at {address}: {why}; {advice}")


def _check_room(nodes: list[dict[str, Any]], needs: dict[str, float]) -> None:
    """Refuse a task that no machine of the cluster could ever take."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(all(node.get(kind, 0) >= size for kind, size in needs.items()) for node in alive):
        wanted = " and ".join(f"{kind}s {size:g}" for kind, size in needs.items())
        raise InputError(f"no machine of the Ray cluster has room for a task, which takes {wanted}")


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise InputError("a Ray cluster needs Ray: pip install 'stableair[ray]'") from None
    return ray
