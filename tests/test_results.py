import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import stableair as sa
from stableair.results import folder as record
from stableair.results.folder import CHECKPOINT, CLIENTS, ENVIRONMENT, EXPERIMENT, ROUNDS, load, run
from stableair.streams import generator


def numbers(result):
    """Every recorded number but the seconds."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.rounds]


def same(one, other):
    return numbers(one) == numbers(other) and torch.equal(one.state.w, other.state.w)


class Stop(Exception):
    pass


def stop_after(k):
    def on_round(row):
        if row["round"] == k:
            raise Stop

    return on_round


def test_a_run_is_a_folder(tiny, tmp_path):
    result = run(tiny, tmp_path / "a" / "b")
    assert sorted(p.name for p in result.folder.iterdir()) == [CHECKPOINT, CLIENTS, ENVIRONMENT, EXPERIMENT, ROUNDS]
    assert np.sum(result.labels, 1).tolist() == [12] * 5
    assert np.sum(result.labels) == 60
    assert sa.Experiment.read(result.folder / EXPERIMENT) == tiny
    lines = [json.loads(line) for line in (result.folder / ROUNDS).read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert list(lines[0]) == [
        "round", "test/accuracy", "test/loss", "train/loss", "channel/snr_db", "gradient/norm",
        "clip/fraction", "seconds",
    ]  # fmt: skip
    assert json.loads((result.folder / ENVIRONMENT).read_text())[0]["torch"] == torch.__version__
    assert same(load(result.folder), result)
    assert same(run(tiny), result), "in memory it is the same run"


def test_load_gives_columns_and_a_data_frame(tiny, tmp_path):
    result = load(run(tiny, tmp_path / "a").folder)
    assert len(result) == len(result["test/loss"]) == 4
    assert result.to_pandas()["test/loss"].tolist() == result["test/loss"]
    assert result.experiment == tiny
    with pytest.raises(sa.InputError, match="metric 'accuracy' was not recorded; there are round, test/accuracy"):
        result["accuracy"]
    with pytest.raises(sa.InputError, match="holds no run"):
        load(tmp_path)
    (tmp_path / EXPERIMENT).write_text('{"data": ["digits"]}')
    with pytest.raises(sa.InputError, match="is corrupted: no data, partition"):
        load(tmp_path)


@pytest.mark.parametrize("server", ["sgd()", "momentum()"])
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_stopped_and_resumed_equals_uninterrupted(tiny, tmp_path, server, every, k):
    tiny = tiny.with_(server=server)
    with pytest.raises(Stop):
        run(tiny, tmp_path / "a", checkpoint_every=every, on_round=stop_after(k))
    computed = []
    resumed = run(
        tiny, tmp_path / "a", resume=True, checkpoint_every=every, on_round=lambda row: computed.append(row["round"])
    )
    assert computed[0] == k + 1, "what has been told of is complete, and nothing is computed again"
    assert same(resumed, run(tiny))
    assert same(load(tmp_path / "a"), run(tiny))
    assert [e["first_round"] for e in json.loads((tmp_path / "a" / ENVIRONMENT).read_text())] == [0, k + 1]


@pytest.mark.gpu
def test_resumed_on_a_gpu(tiny, tmp_path, cuda):
    tiny = tiny.with_(server="momentum()", device=cuda)
    with pytest.raises(Stop):
        run(tiny, tmp_path / "a", on_round=stop_after(2))
    resumed, whole = run(tiny, tmp_path / "a", resume=True), run(tiny)
    assert numbers(resumed) == numbers(whole)
    assert torch.equal(resumed.state.w, whole.state.w)


class FadingOut:
    """A receiver with a memory that it changes in place: it halves its output every round."""

    interrupted_at = None

    def __init__(self):
        self.scale = torch.ones(1)

    def observe(self, g):
        self.scale *= 0.5
        if self.scale.item() == FadingOut.interrupted_at:
            raise Stop

    def __call__(self, g):
        return g * self.scale

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]

    def metrics(self):
        return {"scale": self.scale.item()}


@pytest.mark.parametrize("every", [1, 100])
def test_the_memory_of_a_receiver_is_resumed(tiny, tmp_path, registries, monkeypatch, every):
    sa.receiver("fading_out")(FadingOut)
    tiny = tiny.with_(receiver="fading_out()")
    monkeypatch.setattr(FadingOut, "interrupted_at", 0.125)  # in round 2, after the memory has changed
    with pytest.raises(Stop):
        run(tiny, tmp_path / "a", checkpoint_every=every)
    monkeypatch.undo()
    resumed = run(tiny, tmp_path / "a", resume=True)
    assert resumed["receiver/scale"] == [0.5, 0.25, 0.125, 0.0625]
    assert same(resumed, run(tiny))


def test_resume_starts_where_there_is_nothing(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    begun = tmp_path / "begun"  # a run that ended before its first round was complete
    begun.mkdir()
    (begun / EXPERIMENT).write_text(tiny.to_json())
    (begun / ROUNDS).write_text('{"round": 0, "test/accu')
    whole = run(tiny)
    for folder in (tmp_path / "missing", tmp_path / "empty", begun):
        assert same(run(tiny, folder, resume=True), whole)


def test_a_finished_run_is_not_computed_again_but_extended(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    for rounds in (4, 2):
        again = run(
            tiny.with_(rounds=rounds), tmp_path / "a", resume=True, on_round=lambda row: pytest.fail("computed")
        )
        assert len(again) == 4
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()} == before
    longer = tiny.with_(rounds=6)
    assert same(run(longer, tmp_path / "a", resume=True), run(longer))
    assert load(tmp_path / "a").experiment == longer


def test_a_folder_that_holds_a_run_is_refused(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    with pytest.raises(sa.InputError, match="already holds this run; add --resume"):
        run(tiny, tmp_path / "a")
    for resume in (True, False):
        with pytest.raises(sa.InputError, match="holds another experiment, with another clients, receiver"):
            run(tiny.with_(receiver="mac(C=9)", clients=4), tmp_path / "a", resume=resume)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before


def test_lines_beyond_the_checkpoint_are_computed_again(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    earlier = run(tiny.with_(rounds=2), tmp_path / "b")
    lines = (tmp_path / "a" / ROUNDS).read_text()
    (earlier.folder / ROUNDS).write_text(lines[: lines.rindex("{") + 20])  # killed within round 3, its line cut short
    assert same(run(tiny, earlier.folder, resume=True), load(tmp_path / "a"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (EXPERIMENT, b"{", "experiment.json is corrupted"),
        (EXPERIMENT, b'{"cliets": 3}', "not an experiment this version knows"),
        (EXPERIMENT, b"[1]", "is corrupted"),
        (CHECKPOINT, b"", "checkpoint.pt is corrupted"),
        (CHECKPOINT, b"PK\x03\x04 not a checkpoint", "checkpoint.pt is corrupted"),
        (CHECKPOINT, None, "checkpoint.pt is corrupted"),
        (ROUNDS, b"", "rounds.jsonl is corrupted: 0 rounds, but checkpoint.pt is after 4"),
        (ROUNDS, b'{"round": 0}\n{"round": 7}\n', "rounds.jsonl is corrupted in line 2"),
        (ROUNDS, b"nonsense\n", "rounds.jsonl is corrupted in line 1"),
        (ENVIRONMENT, b"{", "environment.json is corrupted"),
    ],
)
def test_a_corrupted_folder_is_named_and_left_as_it_is(tiny, tmp_path, name, content, said):
    folder = run(tiny, tmp_path / "a").folder
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(sa.InputError, match=said):
        run(tiny.with_(rounds=5), folder, resume=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_bad_input_writes_nothing(tiny, tmp_path):
    with pytest.raises(sa.InputError):
        run(tiny.with_(clients=1000), tmp_path / "a")
    with pytest.raises(sa.InputError, match="checkpoint_every must be at least 1"):
        run(tiny, tmp_path / "a", checkpoint_every=0)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(sa.InputError, match="cannot write to"):
            run(tiny, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_model_that_is_no_longer_finite_ends_its_run(tiny, tmp_path, registries):
    @sa.noise("burst")
    def burst(at):
        draws = iter(range(100))
        return lambda d, source: torch.tensor([math.inf if next(draws) == at else 0.01] + [0.01] * (d - 1))

    result = run(tiny.with_(noise="burst(at=2)", receiver="none()"), tmp_path / "a")
    assert result.diverged == load(result.folder).diverged == 2
    assert len(result) == 3
    assert {name: value for name, value in result.rounds[-1].items() if name != "seconds" and value is not None} == {
        "round": 2, "diverged": True,
    }, "of a model that is gone nothing is recorded"  # fmt: skip
    assert result.state.w.isfinite().all(), "the last good checkpoint is kept"
    assert record._read_checkpoint(result.folder).rounds == 2
    again = run(tiny.with_(noise="burst(at=2)", receiver="none()", rounds=9), result.folder, resume=True)
    assert again.diverged == 2
    survived = run(tiny.with_(noise="burst(at=2)", receiver="mac(C=1)"), tmp_path / "b")
    assert survived.diverged is None, "MAC takes an infinite entry"
    assert "diverged" not in result.to_pandas()
    at_once = run(tiny.with_(noise="burst(at=0)", receiver="none()"), tmp_path / "c")
    assert at_once["test/accuracy"] == [None]
    assert at_once.diverged == 0


def test_clients_that_overflow_later_on_mean_divergence_and_at_first_an_error(tiny, tmp_path, registries):
    @sa.noise("push")
    def push():
        return lambda d, source: torch.full((d,), -1e30)

    far = tiny.with_(noise="push()", receiver="none()", model="mlp(width=4, depth=3)")
    result = run(far, tmp_path / "a", checkpoint_every=100)
    assert result.diverged == 1, "the server's model is still finite, but no client can train from it"
    assert record._read_checkpoint(tmp_path / "a").rounds == 1
    assert load(tmp_path / "a").diverged == 1
    assert run(far, tmp_path / "a", resume=True).diverged == 1

    with pytest.raises(sa.InputError, match="round 0: client 0 uploaded a non-finite update"):
        run(tiny.with_(lr=1e38), tmp_path / "b")
    assert not (tmp_path / "b").exists(), "what failed before its first round leaves nothing"


def test_the_last_good_state_is_written_before_the_line_that_ends_a_run(tiny, tmp_path, registries, monkeypatch):
    sa.noise("burst")(lambda: lambda d, source: torch.full((d,), math.inf if source.key == last else 0.0))
    last, append, kept = generator(0, "noise", 2).key, record._append, []

    def watched(path, row):
        kept.append((row.get("diverged"), (tmp_path / "a" / CHECKPOINT).exists()))
        append(path, row)

    monkeypatch.setattr(record, "_append", watched)
    run(tiny.with_(noise="burst()", receiver="none()"), tmp_path / "a", checkpoint_every=100)
    assert kept == [(None, False), (None, False), (True, True)]


def test_a_second_process_is_kept_out(tiny, tmp_path):
    run(tiny.with_(rounds=1), tmp_path / "a")

    def meanwhile(row):
        with pytest.raises(sa.InputError, match="another process is at work"):
            run(tiny, tmp_path / "a", resume=True)

    run(tiny, tmp_path / "a", resume=True, on_round=meanwhile)


def test_files_of_a_run_without_its_experiment_are_not_overwritten(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    (tmp_path / "a" / EXPERIMENT).unlink()
    for resume in (True, False):
        with pytest.raises(sa.InputError, match="holds a run without its"):
            run(tiny, tmp_path / "a", resume=resume)


def test_a_state_that_cannot_be_read_back_is_refused_at_once(tiny, tmp_path, registries):
    @sa.server("odd")
    class Odd:
        def __call__(self, w, g):
            return w

        def state_dict(self):
            return {"x": np.float64(1.0)}

    with pytest.raises(sa.InputError, match="state_dict of the receiver or the server rule cannot be saved"):
        run(tiny.with_(server="odd()"), tmp_path / "a")


def test_plugins_are_recorded(tiny, tmp_path, registries):
    (tmp_path / "mine.py").write_text("x = 1\n")
    sa.load_plugin(tmp_path / "mine.py")
    run(tiny, tmp_path / "a")
    (here,) = json.loads((tmp_path / "a" / ENVIRONMENT).read_text())
    assert here["plugins"][str(tmp_path / "mine.py")] == hashlib.sha256(b"x = 1\n").hexdigest()


CHILD = """
import sys
import stableair as sa
sa.run(sa.Experiment.read(sys.argv[1]), sys.argv[2], resume=True, on_round=lambda row: print(row["round"], flush=True))
"""
CLI = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background it is ignored
from stableair.cli.main import main
main()
"""


@contextmanager
def started(code, *words):
    """A Python process that ends with the test, whatever happens in it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def test_killed_at_random_and_resumed_equals_uninterrupted(tiny, tmp_path):
    tiny = tiny.with_(rounds=60, server="momentum()")
    (tmp_path / "e.json").write_text(tiny.to_json())
    chance = random.Random(0)
    for patience in (chance.randint(1, 15), chance.randint(1, 15)):
        with started(CHILD, tmp_path / "e.json", tmp_path / "killed") as process:
            for _ in range(patience):
                assert process.stdout.readline(), process.stderr.read()
            spin = chance.randint(0, 20_000)  # and then a little further, to a point within a round
            while spin and process.poll() is None:
                spin -= 1
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, "it was killed at work"
    assert 0 < len(load(tmp_path / "killed")) < 60
    assert same(run(tiny, tmp_path / "killed", resume=True), run(tiny))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_after_a_consistent_write(tiny, tmp_path, sent, code):
    settings = [f"{k}={v}" for k, v in tiny.with_(rounds=100_000).to_dict().items()]
    words = ["run", *settings, "--out", str(tmp_path / "a"), "--checkpoint-every", "1000"]
    with started(CLI, *words) as process:
        for _ in range(6):  # the engine, and five rounds
            assert process.stdout.readline(), process.stderr.read()
        process.send_signal(sent)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "--resume goes on from there" in errors
    assert "Traceback" not in errors
    done = record._read_checkpoint(tmp_path / "a").rounds
    assert done >= 4, "no complete round is lost, however rare the checkpoints"
    longer = tiny.with_(rounds=done + 2)
    assert same(run(longer, tmp_path / "a", resume=True), run(longer))


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    record.write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        record.write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_checkpoint_that_cannot_be_written_aside_is_said_and_nothing_is_lost(tiny, tmp_path, monkeypatch):
    real, written = record.write_whole, []

    def full(path, content):
        if path.name == CHECKPOINT:
            written.append(path)
            if len(written) == 3:
                raise OSError(28, "disk full", str(path))
        real(path, content)

    monkeypatch.setattr(record, "write_whole", full)
    with pytest.raises(OSError, match="disk full"):
        run(tiny.with_(rounds=3), tmp_path / "a")
    monkeypatch.undo()
    assert record._read_checkpoint(tmp_path / "a").rounds == 2
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))


def test_an_interrupt_does_not_hide_that_a_checkpoint_failed(tiny, tmp_path, monkeypatch):
    """Ctrl-C comes while the run waits for the checkpoint after round 1, whose disk is full."""
    real, write, free, failed, calls = Future.result, record.write_whole, threading.Event(), [], []

    def result(self, timeout=None):
        calls.append(self)
        if free.is_set() or len(calls) == 1:  # the first starts the thread
            return real(self, timeout)
        free.set()
        raise KeyboardInterrupt

    def full(path, content):
        if threading.current_thread() is not threading.main_thread() and not failed:
            assert free.wait(30)
            failed.append(path)
            raise OSError(28, "disk full", str(path))
        write(path, content)

    monkeypatch.setattr(Future, "result", result)
    monkeypatch.setattr(record, "write_whole", full)
    with pytest.raises(OSError, match="disk full"):
        run(tiny, tmp_path / "a")
    monkeypatch.undo()
    assert record._read_checkpoint(tmp_path / "a").rounds == 1
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))
