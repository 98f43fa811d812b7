"""One process at a time works in a run folder."""

import pytest

from helpers.callbacks import Hooks
from helpers.runs import same, started
from stableair.errors import ResourceError, RunBusyError
from stableair.results import lock
from stableair.results.reading import load
from stableair.runner import run


def test_a_second_run_in_the_same_folder_is_refused(tiny, tmp_path):
    run(tiny.with_(rounds=1), tmp_path / "a")

    def meanwhile(row):
        with pytest.raises(RunBusyError) as error:
            run(tiny, tmp_path / "a", resume=True)
        assert error.value.code == "run-busy"

    run(tiny, tmp_path / "a", resume=True, callbacks=[Hooks(round=meanwhile)])


STARTER = """
import sys
import stableair as sa
from stableair.errors import ResourceError, RunBusyError
print("ready", flush=True)
sys.stdin.readline()
try:
    sa.run(sa.Experiment.read(sys.argv[1]), sys.argv[2])
    print("done")
except (sa.InputError, RunBusyError) as error:
    print(error.code)
"""


@pytest.mark.parametrize("attempts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_of_two_processes_that_start_on_a_new_folder_one_runs(tiny, tmp_path, attempts):
    (tmp_path / "e.json").write_text(tiny.with_(rounds=40).to_json())
    for attempt in range(attempts):
        folder = tmp_path / f"r{attempt}"
        with (
            started(STARTER, tmp_path / "e.json", folder) as one,
            started(STARTER, tmp_path / "e.json", folder) as other,
        ):
            for process in (one, other):
                assert process.stdout.readline() == "ready\n"
            for process in (one, other):
                process.stdin.write("go\n")
                process.stdin.flush()
            outputs = sorted(process.communicate(timeout=60)[0].strip() for process in (one, other))
        assert outputs[1] == "done" or outputs[0] == "done", outputs
        assert {"run-busy", "run-exists"} & set(outputs), outputs
        assert same(load(folder), run(tiny.with_(rounds=40)))


def test_a_disk_without_locks_is_logged_once_and_the_run_continues(tiny, tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refused)
    assert len(run(tiny, tmp_path / "a")) == 4
    assert caplog.text.count("is on a disk without file locks") == 1


def test_a_lock_file_that_is_always_replaced_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.LockedFolder, "is_in_place", lambda folder: False)
    with pytest.raises(ResourceError) as error, lock.locked(tmp_path / "a"):
        pass
    assert error.value.code == "folder-replaced"
