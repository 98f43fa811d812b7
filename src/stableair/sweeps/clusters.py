"""Sweeps on a cluster: SLURM jobs or Ray tasks. All machines must share the folder of the sweep."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from stableair.builder import check_channels
from stableair.errors import InputError, ResourceError, RunBusyError, StableairError
from stableair.experiment import Experiment
from stableair.literals import PluginChange
from stableair.optional import require
from stableair.results.callbacks import Callback
from stableair.results.lock import check_writable
from stableair.results.options import RunControl, RunOptions, observing, without_display
from stableair.results.reading import read_run
from stableair.runner import run
from stableair.sweeps.plans import Plan, check_no_objects, expand_plan, replace_objects
from stableair.sweeps.workers import POLLING_INTERVAL, Job, Outcome, trim
from stableair.validation import as_path, integer, number

PORT_TIMEOUT = 5  # seconds within which a port must answer
CONNECT_TIMEOUT = 20  # seconds within which a Ray cluster must accept the connection
RETRIES = 20  # largest number of restarts of a task whose worker died, or of a job at its time limit
SBATCH_TIMEOUT = 60  # seconds within which sbatch must answer
KILL_AFTER = 5  # seconds after which a hanging sbatch is killed
TIMED_OUT = 124, 137, -9  # exit codes of the command `timeout`
MINUTES = 60  # time limit of a SLURM job; it is queued again afterwards

# ------------------------------------------------------------------------------------------------------------- SLURM


class RequeuedJob(Job):
    """A job that SLURM queues again at the time limit; it then continues from the checkpoints."""

    def checkpoint(self) -> Any:
        """Return the job for a new submission; submitit calls this method at the time limit."""
        return require("submitit.helpers", extra="slurm").DelayedSubmission(self)


def submit(
    plan: Plan | str | Path | Iterable[Experiment],
    folder: str | Path,
    *,
    jobs: int = 1,
    options: Mapping[str, Any] | None = None,
    plugin_changed: PluginChange = "refuse",
    **run_options: Unpack[RunOptions],
) -> str:
    """Submit SLURM jobs that compute a sweep together. `stableair sweep --slurm` calls this function.

    The jobs are one array. Each job computes the next experiment that is neither finished nor locked. A job that
    reaches its time limit is queued again and continues from its checkpoints. [Sweeps](../sweeps.md#slurm) has the
    details.

    Args:
        plan: As for `sweep`.
        folder: Folder of the run folders, on a disk that all machines share; SLURM's logs are in its subfolder slurm.
        jobs: Number of jobs.
        options: Options of SLURM, such as `{"partition": "gpu", "time": 120, "gpus_per_node": 1}`. The time limit is in
            minutes; default: 60.
        plugin_changed: As for `run`.
        **run_options: `stop`, `patience`, `monitor`, `keep_best`, `profile`, `track`: see `RunOptions`.

    Returns:
        The id of the job array.

    Raises:
        InputError: The plan or an option is invalid (`slurm-options`), the channel of an experiment cannot work, or a
            setting is a Python object (`object-needs-process`).
        MissingExtraError: submitit is not installed.
        ResourceError: SLURM is not available, rejects the jobs (`slurm`) or does not answer (`slurm-timeout`).

    ```python
    plan = {"receiver": ["mac(C=1)", "none()"], "seeds": 5}
    slurm = {"partition": "gpu", "gpus_per_node": 1}
    job = sa.submit(plan, "runs/sweep", jobs=4, options=slurm)
    ```
    """
    submitit = require("submitit", extra="slurm")
    experiments, folder = expand_plan(replace_objects(plan)[0]), as_path("folder", folder)
    check_no_objects(experiments)
    integer("jobs", jobs, 1, 1000)
    for split in {one.evaluate for one in experiments}:
        RunControl.create(run_options, split, folder)
    check_channels(experiments)
    check_writable(folder)
    logs = folder / "slurm"
    try:
        executor = submitit.SlurmExecutor(folder=logs, max_num_timeout=RETRIES)
        executor.update_parameters(**{"time": MINUTES, "job_name": "stableair"} | dict(options or {}))
        with _limit_sbatch(submitit.SlurmExecutor), executor.batch():
            job = RequeuedJob.create(experiments, folder, plugin_changed, run_options)
            submitted = [executor.submit(job) for _ in range(jobs)]
    except (ValueError, TypeError, NameError) as error:
        raise InputError(f"SLURM options: {' '.join(str(error).split())}", code="slurm-options") from None
    except (RuntimeError, submitit.core.utils.UncompletedJobError) as error:  # no srun here, or sbatch failed
        if getattr(error.__cause__, "returncode", 0) in TIMED_OUT:
            text = f"sbatch did not answer within {SBATCH_TIMEOUT} s: check SLURM with sinfo; no job was submitted"
            raise ResourceError(text, code="slurm-timeout", seconds=SBATCH_TIMEOUT) from None
        raise ResourceError(f"SLURM rejects the job: {' '.join(str(error).split())}", code="slurm") from None
    return str(submitted[0].job_id).partition("_")[0]


@contextmanager
def _limit_sbatch(executor: Any) -> Iterator[None]:
    """Run sbatch under the command `timeout`, since submitit waits for it without a limit."""
    command = executor._make_submission_command
    limit = ["timeout", f"--kill-after={KILL_AFTER}", str(SBATCH_TIMEOUT)]
    executor._make_submission_command = lambda self, file: [*limit, *command(self, file)]
    try:
        yield
    finally:
        executor._make_submission_command = command


# --------------------------------------------------------------------------------------------------------------- Ray


def run_on_ray(
    experiments: list[Experiment],
    folder: Path,
    address: str,
    *,
    cpus: float,
    gpus: float,
    plugin_changed: PluginChange = "refuse",
    options: RunOptions | None = None,
    observer: Callback,
) -> dict[str, Outcome]:
    """Run each experiment as a task of a Ray cluster.

    Ray restarts a task whose worker died; the task continues from its checkpoint.

    Args:
        experiments: The experiments.
        folder: Folder of the run folders; all machines of the cluster must share it.
        address: HOST:PORT of the head of the cluster, or "auto" on a machine of the cluster.
        cpus: CPUs of each task.
        gpus: GPUs of each task; may be a fraction.
        plugin_changed: As for `run`.
        options: As for `sweep`.
        observer: `end` is called for each experiment.

    Returns:
        The outcomes by the name of the experiment.
    """
    ray = require("ray", extra="ray")
    needs = {"CPU": number("cpus", cpus, 0), "GPU": number("gpus", gpus, 0)}
    check_writable(folder)
    _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        _check_resources(ray.nodes(), needs)
        folder.mkdir(parents=True, exist_ok=True)
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(_compute)
        return _compute_all(ray, task, experiments, folder, plugin_changed, options, observer)
    finally:
        ray.shutdown()  # stops the tasks that are still running


def _compute(job: Job) -> StableairError | None:
    """Run the experiment of a job; the body of a Ray task. Returns its error, or None."""
    (experiment,) = job.experiments()
    try:
        with observing((), job.options, Path(job.folder)) as trackers:
            run(
                experiment, Path(job.folder) / experiment.name, resume=True, plugin_changed=job.plugin_changed,
                callbacks=[trackers], **without_display(job.options),
            )  # fmt: skip
    except StableairError as error:
        return error
    return None


def _compute_all(
    ray: Any, task: Any, experiments: list[Experiment], folder: Path, plugin_changed: PluginChange,
    options: RunOptions | None, observer: Callback,
) -> dict[str, Outcome]:  # fmt: skip
    """Submit a task for each experiment; submit it again if a process outside the cluster has locked its folder."""

    def submit_task(one: Experiment) -> Any:
        job = Job.create([one], folder, plugin_changed, options)
        return task.remote(job._replace(plugins=[str(Path(file).absolute()) for file in job.plugins]))

    outcomes: dict[str, Outcome] = {}
    pending = {submit_task(one): one for one in experiments}
    while pending:
        (finished,), _ = ray.wait(list(pending))
        one = pending.pop(finished)
        try:
            error = ray.get(finished)
        except ray.exceptions.RayError as failure:
            error = ResourceError(f"Ray: {str(failure).strip().rpartition(chr(10))[2]}", code="ray-task")
        if isinstance(error, RunBusyError):
            time.sleep(POLLING_INTERVAL)
            pending[submit_task(one)] = one
            continue
        outcomes[one.name] = error or _load(one, folder)
        observer.end(one, outcomes[one.name])
    return outcomes


def _load(experiment: Experiment, folder: Path) -> Outcome:
    """Return the run of a finished task, read on this machine."""
    try:
        return trim(read_run(folder / experiment.name), experiment)
    except StableairError as error:
        text = f"the run was computed, but is not visible here: all machines must share {folder} ({error.message})"
        return error.with_message(text)


def _check_address(address: str) -> None:
    """Check that a Ray cluster answers at the address, since Ray itself would retry for minutes."""
    advice = "start one with `ray start --head`"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or not port.isdecimal() or "/" in address:
            text = f"the address of a Ray cluster is HOST:PORT of its head, or auto: got {address!r}"
            raise InputError(text, code="ray-address")
        try:
            socket.create_connection((host, int(port)), timeout=PORT_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            raise ResourceError(f"no Ray cluster answers at {address} ({error}); {advice}", code="no-ray") from None
    code = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR')"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=CONNECT_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        text = f"the server at {address} is not a Ray cluster, or the cluster hangs; {advice}"
        raise ResourceError(text, code="no-ray") from None
    if tried.returncode:
        why = tried.stderr.strip().rpartition("\n")[2]
        raise ResourceError(f"no Ray cluster at {address}: {why}; {advice}", code="no-ray")


def _check_resources(nodes: list[dict[str, Any]], needs: dict[str, float]) -> None:
    """Check that a machine of the cluster has the resources of a task."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(all(node.get(kind, 0) >= size for kind, size in needs.items()) for node in alive):
        wanted = " and ".join(f"{kind}s {size:g}" for kind, size in needs.items())
        raise ResourceError(f"no machine of the Ray cluster has the {wanted} that a task needs", code="ray-resources")
