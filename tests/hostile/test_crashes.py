"""Crashes and full disks at every write, flush and rename: the next process continues."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest

import stableair as sa
from helpers.runs import recorded_metrics
from stableair.data import hub
from stableair.experiment import Experiment

pytestmark = pytest.mark.slow  # errors and attacks of users; each test prints the number of its attempts

TINY = Experiment(
    data="synthetic(samples=60, classes=3, shape=(1, 2, 2))", model="mlp(width=4)", clients=5, rounds=2, device="cpu",
    local_epochs=1, server="momentum()",
)  # fmt: skip
CALLS = "open", "fsync", "replace", "mkdir", "unlink", "rmdir"  # the functions of os that change the disk


class Crash(BaseException):
    """The process is killed: nothing after this call is executed."""


@contextmanager
def crashing(monkeypatch, after=10**9, error=None):
    """After some calls, all calls that change the disk fail; or, with an error, one call that needs disk space."""
    calls = []

    def wrapped(name, real):
        def call(*args, **kwargs):
            changes = name != "open" or (len(args) > 1 and args[1] & (os.O_WRONLY | os.O_RDWR))
            if changes and (error is None or name in ("open", "fsync")):
                calls.append(name)
                if len(calls) > after and (error is None or len(calls) == after + 1):
                    raise error or Crash
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield calls


def count_calls(monkeypatch, work, **options):
    """Number of calls of the work that change the disk."""
    with crashing(monkeypatch, **options) as calls:
        work()
    return len(calls)


def test_a_run_continues_after_a_crash_at_any_point(monkeypatch, tmp_path):
    whole = recorded_metrics(sa.run(TINY))
    n = count_calls(monkeypatch, lambda: sa.run(TINY, tmp_path / "whole"))
    for after in range(n):
        folder = tmp_path / str(after)
        with crashing(monkeypatch, after), pytest.raises(Crash):
            sa.run(TINY, folder)
        assert recorded_metrics(sa.run(TINY, folder, resume=True)) == whole
        assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "whole")), "no temporary file is left"
    print(f"\nrun: {n} crashes, {n} resumed to the same metrics")
    assert n > 20


def test_a_search_continues_after_a_crash_at_any_point(monkeypatch, tmp_path):
    def search(folder):
        return sa.search(TINY.with_(rounds=1), {"receiver.C": "0.01:10:log"}, folder, trials=2)

    found = []
    n = count_calls(monkeypatch, lambda: found.append(search(tmp_path / "whole")))
    for after in range(0, n, 3):  # the trials are runs, which crash at every point above
        folder = tmp_path / str(after)
        with crashing(monkeypatch, after), pytest.raises(Crash):
            search(folder)
        assert search(folder).trials == found[0].trials
        assert sa.load(next(folder.glob("synthetic*"))).rounds
    print(f"\nsearch: {len(range(0, n, 3))} crashes, all found the same")
    assert n > 30


IMAGES = {"x": np.arange(48, dtype=np.uint8).reshape(4, 2, 2, 3), "y": np.arange(4) % 2}
SOURCE = hub.Source("someone/pictures", "image", "label")


@pytest.fixture
def prepare(monkeypatch, tmp_path):
    """A function that prepares a made-up data set in an empty data folder."""
    monkeypatch.setenv(hub.VARIABLE, str(tmp_path / "data"))
    monkeypatch.setattr(hub, "_fetch", lambda *_: {"train": None, "test": None})
    monkeypatch.setattr(hub, "columns", lambda *_, **__: dict(IMAGES))
    yield lambda again=False: hub.prepare("pictures", SOURCE, again=again)


@pytest.mark.parametrize("again", [False, True])
def test_a_preparation_is_repaired_after_a_crash_at_any_point(monkeypatch, tmp_path, prepare, again):
    if again:
        prepare()
    n = count_calls(monkeypatch, lambda: prepare(again))
    for after in range(n):
        shutil.rmtree(tmp_path / "data")
        if again:
            prepare()
        with crashing(monkeypatch, after), pytest.raises(Crash):
            prepare(again)
        prepare()
        tensors, _ = hub.read("pictures", SOURCE)
        assert np.array_equal(tensors["train.x"].numpy(), IMAGES["x"])
        assert hub.description_file("pictures").exists(), "the file has a description, so it is checked"
    print(f"\npreparation{' over an older one' if again else ''}: {n} crashes, {n} repaired")
    assert n > 5


def left_behind(folder):
    return [path.name for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_a_full_disk_is_named_and_leaves_no_temporary_file(monkeypatch, tmp_path):
    """Every call that needs disk space fails once, with the error of a full disk."""
    whole = recorded_metrics(sa.run(TINY))
    n = count_calls(monkeypatch, lambda: sa.run(TINY, tmp_path / "whole"), error=OSError(28, "No space left on device"))
    for after in range(n):
        folder, full = tmp_path / str(after), OSError(28, "No space left on device")
        with crashing(monkeypatch, after, full), pytest.raises((OSError, sa.InputError)) as error:
            sa.run(TINY, folder)
        assert str(tmp_path) in str(error.value), "the error names the file"
        assert "No space left" in str(error.value)
        assert left_behind(tmp_path) == []
        assert recorded_metrics(sa.run(TINY, folder, resume=True)) == whole
    print(f"\nfull disk: {n} times, each named its file")


def test_a_full_file_system_is_reported(tmp_path, monkeypatch):
    """A real file system of 200 kB without free space."""
    (small := tmp_path / "small").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "none", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        sa.run(TINY, small / "run")
        sa.plot(small / "run", out=small / "a.png")
        before = (small / "a.png").read_bytes()
        (small / "filler").write_bytes(bytes(200_000 - 4096 * (sum(1 for _ in small.rglob("*")) + 25)))
        with pytest.raises((OSError, sa.InputError), match="No space left on device"):
            sa.run(TINY.with_(rounds=500, model="mlp(width=400)"), small / "longer")
        for write in (
            lambda: sa.plot(small / "run", out=small / "a.png"),
            lambda: sa.report(small / "run", small / "a.html"),
        ):
            with pytest.raises(sa.InputError, match=f"cannot write {small}/a.*No space left on device"):
                write()
        assert (small / "a.png").read_bytes() == before, "the old picture is kept"
        assert left_behind(small) == []
    finally:
        subprocess.run(["umount", small], check=True)
