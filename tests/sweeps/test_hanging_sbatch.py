"""The submission fails with one line if sbatch hangs."""

import os
import time
from pathlib import Path

import pytest

import stableair as sa
from stableair.errors import ResourceError
from stableair.sweeps import clusters

pytest.importorskip("submitit")


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """An sbatch that does not answer and ignores SIGTERM; its process id is in a file."""
    (tmp_path / "bin").mkdir()
    texts = {"sbatch": f"trap '' TERM; echo $$ > {tmp_path}/pid; while true; do sleep 0.1; done", "srun": "true"}
    for name, text in texts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(clusters, "SBATCH_TIMEOUT", 1)
    monkeypatch.setattr(clusters, "KILL_AFTER", 1)
    return tmp_path / "pid"


def state(process):
    """The state of a process, as /proc shows it; "" if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("jobs", [1, 2])
def test_submission_ends_and_sbatch_is_killed(tiny, tmp_path, hanging, jobs):
    start = time.monotonic()
    with pytest.raises(ResourceError) as error:
        sa.submit([tiny], tmp_path / "s", jobs=jobs)
    assert (error.value.code, error.value.fields) == ("slurm-timeout", {"seconds": 1})
    assert time.monotonic() - start < 30
    while state(hanging.read_text().strip()) not in ("", "Z"):  # exited, but its parent may not have waited for it
        assert time.monotonic() - start < 30
        time.sleep(0.1)


def test_command_prints_one_line(tmp_path, hanging, command):
    code, _, errors = command("sweep", "rounds=1", "--slurm", "--out", "s")
    assert (code, errors.count("\n")) == (2, 1), errors
    assert "sbatch did not answer within 1 s" in errors
