"""A run folder that is deleted, moved or replaced during the run: the old process stops and writes nothing."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import stableair as sa
from helpers import ROOT
from helpers.callbacks import Hooks
from stableair.contracts import Round
from stableair.errors import ResourceError
from stableair.results.checksums import CHECKPOINT, ENVIRONMENT, EXPERIMENT, ROUNDS
from stableair.results.lock import LOCK, locked
from stableair.results.reading import load

WAITING = """
import sys
import stableair as sa

class Waiting(sa.Callback):
    def round(self, experiment, row):
        print(row["round"], flush=True)
        sys.stdin.readline()

try:
    sa.run(sa.Experiment.read(sys.argv[1]), sys.argv[2], callbacks=[Waiting()])
    print("done")
except sa.StableairError as error:
    print(type(error).__name__, error.code)
"""


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class WaitingRun:
    """A run in another process, which waits after each round until it may compute the next one."""

    def __init__(self, file, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WAITING, file, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip

    def __enter__(self):
        assert self.process.stdout.readline() == "0\n"
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def finish(self):
        return self.process.communicate("\n" * 10, timeout=60)[0].splitlines()[-1]


@pytest.fixture
def waiting(tiny, tmp_path):
    (tmp_path / "e.json").write_text(tiny.to_json())
    with WaitingRun(tmp_path / "e.json", tmp_path / "a") as process:
        yield process


def test_a_deleted_folder_stops_the_run_and_a_new_run_may_start(tiny, tmp_path, waiting):
    shutil.rmtree(tmp_path / "a")
    with WaitingRun(tmp_path / "e.json", tmp_path / "a") as second:
        assert waiting.finish() == "ResourceError folder-replaced"
        assert (tmp_path / "a" / LOCK).exists(), "the lock of the second process stays"
        assert [row["round"] for row in load(tmp_path / "a").rounds] == [0]
        assert second.finish() == "done"
    assert torch.equal(load(tmp_path / "a").state.model.w, sa.run(tiny).state.model.w)


def test_a_folder_that_is_swapped_for_a_copy_stops_the_run(tmp_path, waiting):
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "copy").rename(tmp_path / "a")
    before = content(tmp_path / "a"), content(tmp_path / "moved")
    assert waiting.finish() == "ResourceError folder-replaced"
    assert (content(tmp_path / "a"), content(tmp_path / "moved")) == before


def test_moved_folder_is_not_created_again(tmp_path, waiting):
    (tmp_path / "a").rename(tmp_path / "moved")
    assert waiting.finish() == "ResourceError folder-replaced"
    assert not (tmp_path / "a").exists()


def test_command_line_prints_one_line(tmp_path, command, monkeypatch, tiny):
    (tmp_path / "e.json").write_text(tiny.to_json())
    real = json.dumps  # called for each row that is recorded

    def remove(*args, **kwargs):
        if "round" in args[0] and args[0]["round"] == 1:
            shutil.rmtree(tmp_path / "a", ignore_errors=True)
        return real(*args, **kwargs)

    monkeypatch.setattr(json, "dumps", remove)
    code, _, errors = command("run", "e.json", "--out", "a")
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"error: {tmp_path / 'a'} was deleted, moved or replaced")


@pytest.mark.parametrize("change", ["append", "write", "rename", "remove"])
def test_every_change_checks_the_lock_file(tmp_path, change):
    arguments = {
        "append": (ROUNDS, b"x"),
        "write": (EXPERIMENT, b"x"),
        "rename": (ROUNDS, CHECKPOINT),
        "remove": (ROUNDS,),
    }
    with locked(tmp_path / "a") as folder:
        folder.write(ROUNDS, b"old")
        (tmp_path / "a" / LOCK).rename(tmp_path / "lock")
        shutil.copy(tmp_path / "lock", tmp_path / "a" / LOCK)
        before = content(tmp_path / "a")
        with pytest.raises(ResourceError) as error:
            getattr(folder, change)(*arguments.get(change, [ROUNDS]))
        assert error.value.code == "folder-replaced"
        assert error.value.fields["path"] == str(tmp_path / "a")
        assert content(tmp_path / "a") == before
    assert (tmp_path / "a" / LOCK).exists(), "a foreign lock file is not removed"


def test_a_folder_that_is_removed_between_check_and_write_is_an_error(tmp_path, monkeypatch):
    with locked(tmp_path / "a") as folder:
        monkeypatch.setattr(type(folder), "check", lambda self: monkeypatch.undo() or shutil.rmtree(tmp_path / "a"))
        with pytest.raises(ResourceError) as error:
            folder.write(ENVIRONMENT, b"x")
    assert error.value.code == "folder-replaced"


def test_recorded_rounds_lock_their_folder(tiny, tmp_path):
    run = sa.run(tiny.with_(rounds=1), tmp_path / "a")
    rounds = sa.recorded(iter([Round(0, run.state, {})]), tmp_path / "b", sa.RunMetadata(tiny, {"stableair": "0.3"}))
    next(rounds)
    with pytest.raises(sa.RunBusyError), locked(tmp_path / "b"):
        pass
    rounds.close()
    with locked(tmp_path / "b"):
        pass


def test_change_of_the_working_folder_does_not_matter(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    sa.run(tiny, "a", callbacks=[Hooks(round=lambda row: os.chdir(tmp_path / "elsewhere"))])
    assert len(load(tmp_path / "a")) == tiny.rounds
