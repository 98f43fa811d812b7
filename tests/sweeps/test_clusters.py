"""The script for SLURM, and a Ray cluster."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import stableair as sa
from helpers.runs import recorded_metrics
from helpers.sweeps import PLAN, SRC, WORDS, alive, children, recorded_rounds, start_command, wait_until
from stableair.errors import MissingExtraError, ResourceError
from stableair.results.lock import LOCK
from stableair.results.reading import load
from stableair.sweeps import clusters
from stableair.sweeps.plans import expand_plan, parse_plan


def test_ray_and_parallel_exclude_each_other(tmp_path):
    with pytest.raises(sa.InputError) as error:
        sa.sweep(PLAN, tmp_path / "s", parallel=2, ray="auto")
    assert error.value.code == "parallel-and-ray"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins for SLURM: an sbatch that stores its script, and an srun that runs its command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "sbatch": f'cp "$1" {tmp_path}/script.sh; echo Submitted batch job 77',
        "srun": 'while [ "${1#--}" != "$1" ]; do case $1 in --output|--error) shift;; esac; shift; done; exec "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "script.sh"


@pytest.mark.slow
def test_slurm_gets_an_array_of_processes_that_share_the_sweep(slurm, tmp_path):
    options = {"partition": "gpu", "time": 90, "gpus_per_node": 1, "cpus_per_task": 4}
    assert sa.submit(PLAN, tmp_path / "s", jobs=2, options=options) == "77"
    script = slurm.read_text()
    for line in "array=0-1%2", "partition=gpu", "time=90", "gpus-per-node=1", "cpus-per-task=4", "job-name=stableair":
        assert f"#SBATCH --{line}\n" in script
    for i in (0, 1):  # run the tasks as SLURM would
        ids = {"SLURM_JOB_ID": f"{77 + i}", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": f"{i}"}
        more = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
        env = os.environ | {"PYTHONPATH": str(SRC), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a"} | ids | more
        subprocess.run(["bash", slurm], check=True, env=env, capture_output=True)
    for experiment in expand_plan(PLAN):
        assert recorded_metrics(load(tmp_path / "s" / experiment.name)) == recorded_metrics(sa.run(experiment))
    again = clusters.RequeuedJob.create(expand_plan(PLAN), tmp_path / "s").checkpoint()
    assert isinstance(again.function, clusters.RequeuedJob), (
        "a job that reaches its time limit is queued again unchanged"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--slurm-option", "partiton=gpu"], "partiton"), (["--slurm-option", "gpu"], "'gpu' is not key=value")],
)
def test_a_wrong_option_of_slurm_is_refused_in_one_line(words, expected, slurm, command, tmp_path):
    code, _, errors = command("sweep", *WORDS, "--slurm", *words, "--out", "s")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert expected in errors
    assert not slurm.exists()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("module", "extra", "start"),
    [("submitit", "slurm", clusters.submit), ("ray", "ray", lambda plan, folder: sa.sweep(plan, folder, ray="auto"))],
)
def test_a_missing_extra_raises_before_anything_is_written(module, extra, start, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as error:
        start([tiny], tmp_path / "s")
    assert error.value.fields == {"module": module, "extra": extra}
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_server_that_is_no_ray_cluster_is_refused_within_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "CONNECT_TIMEOUT", 6)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ResourceError, match="is not a Ray cluster"):
            sa.sweep(PLAN, tmp_path / "s", ray=address)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def ray_cluster(tmp_path_factory):
    """A cluster of two CPUs on this machine: its address, and the id of its head process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("r")
    sockets = tempfile.mkdtemp(prefix="sa-ray-", dir="/tmp")  # for sockets, whose paths must be short
    words = f"start --head --port {port} --num-cpus 2 --include-dashboard false --disable-usage-stats --block"
    log = (folder / "log").open("wb")
    code = "from ray.scripts.scripts import main; main()"
    head = subprocess.Popen(
        [sys.executable, "-c", code, *shlex.split(words), "--temp-dir", sockets],
        stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_until(lambda: b"Ray runtime started" in (folder / "log").read_bytes())
    yield f"127.0.0.1:{port}", head.pid
    processes = descendants(head.pid)
    head.terminate()
    head.wait(30)
    wait_until(lambda: not any(map(alive, processes)), 30)
    log.close()
    shutil.rmtree(sockets, ignore_errors=True)


def descendants(pid):
    direct = children(pid)
    return [*direct, *(one for child in direct for one in descendants(child))]


@pytest.mark.slow
def test_a_ray_task_whose_worker_is_killed_continues_from_its_checkpoint(ray_cluster, tmp_path):
    address, head = ray_cluster
    words = [*WORDS, "rounds=60", "--seeds", "2"]
    sweep = start_command("sweep", *words, "--out", tmp_path / "s", "--ray", address)
    folder = wait_until(lambda: next((path for path in (tmp_path / "s").glob("*") if recorded_rounds(path) > 5), None))
    lock = (folder / LOCK).stat().st_ino
    workers = [pid for pid in descendants(head) if lock in open_files(pid)]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    out, errors = sweep.communicate(timeout=240)
    assert (sweep.returncode, errors) == (0, "")
    experiments = expand_plan(parse_plan(WORDS) | {"rounds": 60, "seeds": 2})
    assert len(re.findall(r"^\d/4  .*60 rounds", out, re.MULTILINE)) == 4, "Ray also prints that a worker died"
    for experiment in experiments:
        found = load(tmp_path / "s" / experiment.name)
        assert recorded_metrics(found) == recorded_metrics(sa.run(experiment))
        assert (len(found.environments) == 2) == (found.folder == folder), "only the killed experiment was restarted"
    assert load(folder).environments[1]["first_round"] > 0, "from its checkpoint"


def open_files(pid):
    try:
        return [os.stat(path).st_ino for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()]
    except OSError:
        return []
