"""Checkpoints: atomic writes, repair from the previous one, and refusal of damaged ones."""

import hashlib
import io
import random
import re
import shutil
import threading
from concurrent.futures import Future

import pytest
import torch

from helpers.runs import flipped, same
from stableair.errors import CorruptRunError
from stableair.results import lock
from stableair.results.checkpoint import read_checkpoint
from stableair.results.checksums import CHECKPOINT, PREVIOUS
from stableair.results.reading import load
from stableair.results.resume import DAMAGED
from stableair.runner import run


def test_an_error_of_the_checkpoint_thread_is_raised_and_nothing_is_lost(tiny, tmp_path, monkeypatch):
    real, written = lock.write_whole, []

    def full(path, content, dir_fd):
        if path.name == CHECKPOINT:
            written.append(path)
            if len(written) == 3:
                raise OSError(28, "disk full", str(path))
        real(path, content, dir_fd=dir_fd)

    monkeypatch.setattr(lock, "write_whole", full)
    with pytest.raises(OSError, match="disk full"):
        run(tiny.with_(rounds=3), tmp_path / "a")
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "a").rounds == 2
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))


def test_an_interrupt_does_not_hide_the_error_of_a_checkpoint(tiny, tmp_path, monkeypatch):
    """Ctrl-C comes while the run waits for the checkpoint after round 1, whose disk is full."""
    real, write, free, failed, calls = Future.result, lock.write_whole, threading.Event(), [], []

    def result(self, timeout=None):
        calls.append(self)
        if free.is_set() or len(calls) == 1:  # the first starts the thread
            return real(self, timeout)
        free.set()
        raise KeyboardInterrupt

    def full(path, content, dir_fd):
        if threading.current_thread() is not threading.main_thread() and not failed:
            assert free.wait(30)
            failed.append(path)
            raise OSError(28, "disk full", str(path))
        write(path, content, dir_fd=dir_fd)

    monkeypatch.setattr(Future, "result", result)
    monkeypatch.setattr(lock, "write_whole", full)
    with pytest.raises(OSError, match="disk full"):
        run(tiny, tmp_path / "a")
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "a").rounds == 1
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_of_a_checkpoint_is_repaired_and_nothing_is_overwritten(finished, tmp_path, seed, caplog):
    e, _ = finished
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = (folder / CHECKPOINT).read_bytes()
    damaged = flipped(raw, random.Random(seed).randrange(8 * len(raw)))
    (folder / CHECKPOINT).write_bytes(damaged)
    longer = e.with_(rounds=6)
    resumed = run(longer, folder, resume=True)
    assert re.search(r"checkpoint\.pt is corrupted .* resuming from the previous one, after round 3", caplog.text)
    assert same(resumed, run(longer))
    assert (folder / DAMAGED.format(1)).read_bytes() == damaged, "the damaged file is kept"
    assert same(load(folder), run(longer))


@pytest.mark.parametrize("damage", ["nothing", "something else", "half"])
def test_two_damaged_checkpoints_are_refused_and_not_changed(finished, tmp_path, damage):
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    for name in (CHECKPOINT, PREVIOUS):
        raw = (folder / name).read_bytes()
        damaged = {"nothing": b"", "something else": b"PK\x03\x04 no checkpoint", "half": raw[: len(raw) // 2]}[damage]
        (folder / name).write_bytes(damaged)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(CorruptRunError) as error:
        run(finished[0].with_(rounds=6), folder, resume=True)
    assert error.value.fields["path"] == str(folder / CHECKPOINT)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c | {"receiver": {}},
        lambda c: c | {"receiver": ()},
        lambda c: c | {"receiver": ({},)},
        lambda c: c | {"receiver": [*c["receiver"]]},
        lambda c: c | {"server": ()},
        lambda c: c | {"server": c["server"][:-1]},
        lambda c: c | {"average": (c["model"]["w"],)},
        lambda c: c | {"model": c["model"] | {"w": c["model"]["w"][:-1]}},
        lambda c: c | {"model": c["model"] | {"w": c["model"]["w"].reshape(1, -1)}},
        lambda c: c | {"model": {"w": c["model"]["w"]}},
        lambda c: c | {"model": c["model"]["w"]},
        lambda c: c | {"rounds": "4"},
        lambda c: c | {"rounds": True},
        lambda c: {k: v for k, v in c.items() if k != "clients"},
        lambda c: {"rounds": 4, "w": c["model"]["w"], "stats": c["model"]["stats"], "receiver": {}, "server": {}},
        lambda c: [c],
    ],
)
def test_a_checkpoint_of_another_structure_is_refused(finished, tmp_path, change):
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = io.BytesIO()
    torch.save(change(torch.load(folder / CHECKPOINT, weights_only=True)), raw)
    raw = raw.getvalue()
    (folder / CHECKPOINT).write_bytes(raw + f"\nsha256 {hashlib.sha256(raw).hexdigest()}\n".encode())
    (folder / PREVIOUS).unlink()
    with pytest.raises(CorruptRunError) as error:
        run(finished[0].with_(rounds=6), folder, resume=True)
    assert error.value.code == "corrupt-run"
    assert "\n" not in str(error.value)


def test_a_checkpoint_without_a_checksum_is_refused(finished, tmp_path):
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    (folder / PREVIOUS).unlink()
    (folder / CHECKPOINT).write_bytes((folder / CHECKPOINT).read_bytes().rpartition(b"\nsha256 ")[0])
    with pytest.raises(CorruptRunError) as error:
        run(finished[0].with_(rounds=6), folder, resume=True)
    assert error.value.code == "corrupt-run"


def test_a_checkpoint_can_be_read_with_torch_only(finished):
    content = torch.load(finished[1].folder / CHECKPOINT, weights_only=True)
    assert list(content) == ["rounds", "model", "receiver", "server", "average", "clients", "energies"]
    assert content["rounds"] == 4
    assert torch.equal(content["model"]["w"], finished[1].state.model.w)
