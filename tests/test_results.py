import hashlib
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import stableair as sa
from stableair.checks import Note
from stableair.contracts import Round
from stableair.results import checkpoint
from stableair.results import folder as record
from stableair.results.checkpoint import read_checkpoint
from stableair.results.folder import commit
from stableair.results.run import Run, group, load
from stableair.results.sealed import CHECKPOINT, CLIENTS, ENVIRONMENT, EXPERIMENT, PREVIOUS, ROUNDS
from stableair.runner import run
from stableair.streams import generator
from stableair.vector import State


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
    assert sorted(p.name for p in result.folder.iterdir()) == [
        PREVIOUS, CHECKPOINT, CLIENTS, ENVIRONMENT, EXPERIMENT, ROUNDS,
    ]  # fmt: skip
    assert np.sum(result.labels, 1).tolist() == [12] * 5
    assert np.sum(result.labels) == 60
    assert sa.Experiment.read(result.folder / EXPERIMENT) == tiny
    lines = [json.loads(line) for line in (result.folder / ROUNDS).read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert list(lines[0]) == [
        "round", "test/accuracy", "test/loss", "train/loss", "channel/snr_db", "gradient/norm",
        "clip/fraction", "channel/senders", "channel/uses", "seconds", "checksum",
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
    with pytest.raises(sa.InputError, match="already holds this run; resume=True goes on"):
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
        (EXPERIMENT, b'{"cliets": 3}', "experiment.json is corrupted: no data, partition"),
        (EXPERIMENT, b"[1]", "is corrupted"),
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
    assert read_checkpoint(result.folder).rounds == 2
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
    assert read_checkpoint(tmp_path / "a").rounds == 1
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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=env) as process:
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
    done = read_checkpoint(tmp_path / "a").rounds
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
    real, written = checkpoint.write_whole, []

    def full(path, content):
        if path.name == CHECKPOINT:
            written.append(path)
            if len(written) == 3:
                raise OSError(28, "disk full", str(path))
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(OSError, match="disk full"):
        run(tiny.with_(rounds=3), tmp_path / "a")
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "a").rounds == 2
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))


def test_an_interrupt_does_not_hide_that_a_checkpoint_failed(tiny, tmp_path, monkeypatch):
    """Ctrl-C comes while the run waits for the checkpoint after round 1, whose disk is full."""
    real, write, free, failed, calls = Future.result, checkpoint.write_whole, threading.Event(), [], []

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
    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(OSError, match="disk full"):
        run(tiny, tmp_path / "a")
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "a").rounds == 1
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))


# ----------------------------------------------------------------------------------------------------------- checksums


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with a memory in its receiver and its server."""
    data = "synthetic(samples=60, classes=3, shape=(1, 2, 2))"
    e = sa.Experiment(data=data, model="mlp(width=4)", clients=5, rounds=4, device="cpu", server="momentum()")
    return e.with_(receiver="mac(C=auto)"), run(e.with_(receiver="mac(C=auto)"), tmp_path_factory.mktemp("runs") / "a")


def flipped(raw, bit):
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.parametrize("name", [EXPERIMENT, ENVIRONMENT, CLIENTS, ROUNDS])
def test_every_flipped_bit_of_a_text_file_is_one_line(finished, tmp_path, name):
    """In a sample over the file, and all of the bytes at its end, where the checksum is."""
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = (folder / name).read_bytes()
    bits = [*range(0, 8 * len(raw), 41), *range(8 * (len(raw) - 60), 8 * len(raw))]
    unnoticed = []
    for bit in bits:
        (folder / name).write_bytes(flipped(raw, bit))
        try:
            load(folder)
            unnoticed.append(bit)
        except sa.InputError as error:
            assert "\n" not in str(error)
            assert name in str(error)
    assert not unnoticed, [flipped(raw, bit)[bit // 8 - 10 : bit // 8 + 10] for bit in unnoticed]


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_of_a_checkpoint_is_repaired_and_nothing_is_overwritten(finished, tmp_path, seed):
    e, _ = finished
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = (folder / CHECKPOINT).read_bytes()
    damaged = flipped(raw, random.Random(seed).randrange(8 * len(raw)))
    (folder / CHECKPOINT).write_bytes(damaged)
    longer = e.with_(rounds=6)
    with pytest.warns(Note, match=r"checkpoint\.pt is corrupted .* going on from the one before it, after round 3"):
        resumed = run(longer, folder, resume=True)
    assert same(resumed, run(longer))
    assert (folder / record.DAMAGED.format(1)).read_bytes() == damaged, "it is kept, for whoever wants to look"
    assert same(load(folder), run(longer))


@pytest.mark.parametrize("damage", ["nothing", "something else", "half"])
def test_two_damaged_checkpoints_are_one_line_and_left_as_they_are(finished, tmp_path, damage):
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    for name in (CHECKPOINT, PREVIOUS):
        raw = (folder / name).read_bytes()
        damaged = {"nothing": b"", "something else": b"PK\x03\x04 no checkpoint", "half": raw[: len(raw) // 2]}[damage]
        (folder / name).write_bytes(damaged)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(sa.InputError, match=r"checkpoint\.pt is corrupted"):
        run(finished[0].with_(rounds=6), folder, resume=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c | {"receiver": {}},
        lambda c: c | {"server": {}},
        lambda c: c | {"receiver": {"0": {}}},
        lambda c: c | {"w": c["w"][:-1]},
        lambda c: c | {"w": c["w"].reshape(1, -1)},
        lambda c: c | {"rounds": "4"},
        lambda c: c | {"rounds": True},
        lambda c: c | {"receiver": [1]},
        lambda c: {k: v for k, v in c.items() if k != "stats"},
        lambda c: [c],
    ],
)
def test_a_checkpoint_made_by_hand_is_held_to_its_form(finished, tmp_path, change):
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    content = change(read_checkpoint(folder)._asdict())
    raw = io.BytesIO()
    torch.save(content, raw)
    raw = raw.getvalue()
    (folder / CHECKPOINT).write_bytes(raw + f"\nsha256 {hashlib.sha256(raw).hexdigest()}\n".encode())
    (folder / PREVIOUS).unlink()
    with pytest.raises(sa.InputError, match=r"checkpoint\.pt is corrupted") as told:
        run(finished[0].with_(rounds=6), folder, resume=True)
    assert "\n" not in str(told.value)


def test_a_checkpoint_can_still_be_read_with_torch_alone(finished):
    assert torch.load(finished[1].folder / CHECKPOINT, weights_only=True)["rounds"] == 4


OLD = Path(__file__).parent / "data" / "run-0.1"
NEWER = "channel/senders", "channel/uses"  # what rounds of 0.1 have not


def same_but_for_newer_metrics(one, other):
    assert not one["channel/uses"][0], "recorded by 0.1"
    older = [[{k: v for k, v in row.items() if k not in NEWER} for row in numbers(each)] for each in (one, other)]
    return older[0] == older[1] and torch.equal(one.state.w, other.state.w)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_run_names_the_commit_of_a_source_under_git_and_of_nothing_else(tmp_path, monkeypatch, request):
    """A package that was installed into somebody's repository is not of that repository's commit."""
    request.addfinalizer(commit.cache_clear)

    def seen():
        commit.cache_clear()
        return commit()

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, "-C", tmp_path, *words], check=True, capture_output=True, text=True).stdout

    source = tmp_path / "stableair" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(sa, "__file__", str(source))
    assert seen() == "", "no repository"
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    assert seen() == "", "not in it"
    git("add", ".")
    git("commit", "-m", "ours")
    assert seen() == git("rev-parse", "--short", "HEAD").strip()
    source.write_text("changed = True")
    assert seen() == git("rev-parse", "--short", "HEAD").strip() + "+"
    monkeypatch.setenv("PATH", "")
    assert seen() == "", "no git"


def test_a_folder_of_0_1_is_read_drawn_and_resumed(tmp_path):
    old = load(OLD)
    assert len(old) == 4
    assert (old.settings["channel"], old.experiment.channel) == ("flat()", "flat()")
    assert sa.plot([OLD], out=tmp_path / "old.png").axes[0].lines
    folder = shutil.copytree(OLD, tmp_path / "a")
    longer = old.experiment.with_(rounds=6)
    assert same_but_for_newer_metrics(run(longer, folder, resume=True), run(longer))
    assert len(load(folder)) == 6
    assert [e["stableair"] for e in load(folder).environments] == ["0.1.0", sa.__version__]


def test_a_folder_of_0_1_that_is_killed_just_after_it_is_resumed_can_still_be_resumed(tmp_path, monkeypatch):
    """Its checkpoint has a checksum before anything else of the folder says that it must have one."""
    folder = shutil.copytree(OLD, tmp_path / "a")
    longer = load(OLD).experiment.with_(rounds=6)
    real = record.write_whole

    def killed(path, content):
        real(path, content)
        if path.name == EXPERIMENT:
            raise KeyboardInterrupt

    monkeypatch.setattr(record, "write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        run(longer, folder, resume=True)
    monkeypatch.undo()
    assert same_but_for_newer_metrics(run(longer, folder, resume=True), run(longer))


@pytest.mark.parametrize("after", range(12))
def test_a_crash_at_any_write_can_be_resumed(tiny, tmp_path, monkeypatch, after):
    """The process ends at the n-th write, append or rename of a run: what is there is never in the way."""
    tiny = tiny.with_(rounds=3, server="momentum()")
    left = after

    def crashing(real):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt  # from here on nothing is written: neither by this call nor by a later one
            return real(*args, **kwargs)

        return call

    for module, name in ((os, "replace"), (record, "_append")):
        monkeypatch.setattr(module, name, crashing(getattr(module, name)))
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "a")
    monkeypatch.undo()
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))


STARTER = """
import sys
import stableair as sa
print("ready", flush=True)
sys.stdin.readline()
try:
    sa.run(sa.Experiment.read(sys.argv[1]), sys.argv[2])
    print("done")
except sa.InputError as error:
    print(error)
"""


def test_of_two_processes_that_start_on_a_new_folder_one_runs(tiny, tmp_path):
    (tmp_path / "e.json").write_text(tiny.with_(rounds=40).to_json())
    for attempt in range(3):
        place = tmp_path / f"r{attempt}"
        with started(STARTER, tmp_path / "e.json", place) as one, started(STARTER, tmp_path / "e.json", place) as other:
            for process in (one, other):
                assert process.stdout.readline() == "ready\n"
            for process in (one, other):
                process.stdin.write("go\n")
                process.stdin.flush()
            said = sorted(process.communicate(timeout=60)[0].strip() for process in (one, other))
        assert said[1] == "done" or said[0] == "done", said
        assert any("another process is at work" in line or "already holds this run" in line for line in said), said
        assert same(load(place), run(tiny.with_(rounds=40)))


def test_a_folder_in_which_nothing_was_written_is_gone(tiny, tmp_path):
    with pytest.raises(sa.InputError, match="clients must be at most"):
        run(tiny.with_(clients=1000), tmp_path / "a" / "b" / "c")
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(sa.InputError, match="clients must be at most"):
        run(tiny.with_(clients=1000), tmp_path / "mine")
    assert (tmp_path / "mine").is_dir(), "what was there before stays"


def test_links_and_pipes_in_a_foreign_folder_are_not_followed(tiny, tmp_path):
    (tmp_path / "precious").write_text("mine")
    folder = run(tiny.with_(rounds=2), tmp_path / "a").folder
    (folder / ROUNDS).rename(tmp_path / "rounds")
    (folder / ROUNDS).symlink_to(tmp_path / "precious")
    with pytest.raises(sa.InputError):
        run(tiny, folder, resume=True)
    assert (tmp_path / "precious").read_text() == "mine"
    (folder / ROUNDS).unlink()
    os.mkfifo(folder / ROUNDS)
    with pytest.raises(sa.InputError, match="is not a plain file"):
        run(tiny, folder, resume=True)


def test_a_disk_without_locks_is_said_once_and_the_run_goes_on(tiny, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(record.fcntl, "flock", refused)
    with pytest.warns(Note, match="is on a disk without locks"):
        assert len(run(tiny, tmp_path / "a")) == 4


def test_any_rounds_can_be_recorded(tiny, tmp_path):
    """Whoever makes the rounds: here a generator that no simulation is behind."""
    states = [State(torch.full((3,), float(k)), torch.zeros(0)) for k in range(5)]

    def rounds(start):
        for k in range(start, 5):
            yield Round(k, states[k], {"test/accuracy": k / 10})

    about = record.Circumstances(tiny, record.environment(torch.device("cpu")))
    place = tmp_path / "a"
    some = sa.recorded(rounds(0), place, about)
    assert [next(some).metrics["test/accuracy"] for _ in range(2)] == [0.0, 0.1]
    some.close()
    begin = sa.resume_point(place, tiny, resume=True)
    assert begin.rounds == 2
    rest = list(sa.recorded(rounds(2), place, about, begin))
    assert [r.k for r in rest] == [2, 3, 4]
    found = load(place)
    assert found["test/accuracy"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert torch.equal(found.state.w, states[4].w)


def test_a_plot_of_a_run_folder_needs_no_torch(finished, tmp_path):
    code = (
        "import sys, stableair as sa\n"
        "run = sa.load(sys.argv[1])\n"
        "sa.plot([run], out=sys.argv[2])\n"
        "sa.plot([sys.argv[1]])\n"
        "heavy = {'torch', 'scipy.stats', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    with started(code, finished[1].folder, tmp_path / "a.png") as process:
        assert process.wait(60) == 0, process.stderr.read()
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_minus_that_becomes_a_line_break_is_found(finished, tmp_path):
    """One bit turns - into a carriage return, at which a line does not end."""
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    raw = (folder / ROUNDS).read_bytes()
    assert b"-" in raw
    (folder / ROUNDS).write_bytes(raw.replace(b"-", b"\r", 1))
    with pytest.raises(sa.InputError, match=r"rounds\.jsonl is corrupted in line"):
        load(folder)


def test_rounds_are_not_recorded_over_another_run(finished, tmp_path):
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    about = sa.Circumstances(finished[0].with_(seed=5), record.environment(torch.device("cpu")))
    rounds = iter([Round(0, finished[1].state, {"test/accuracy": 0.5})])
    with pytest.raises(sa.InputError, match="already holds a run; hand in its resume_point"):
        list(sa.recorded(rounds, folder, about))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_runs_that_differ_in_a_default_alone_are_two(finished, tmp_path):
    one = finished[0].to_record()
    other = json.loads(json.dumps(one))
    other["noise"], other["arguments"]["noise"] = "sas()", [{"alpha": 1.5, "tau": 0.7}]
    plain = one | {"noise": "sas()"}
    assert Run(plain, []).identity != Run(other, []).identity
    assert list(group([Run(plain, []), Run(other, [])])) == ["mac(C=auto)", "mac(C=auto) (2)"]
    assert Run(one, []).identity == Run(plain, []).identity, "the same thing said otherwise"


def test_a_resumed_run_takes_as_many_threads_as_it_began_with(tiny, tmp_path):
    """Their number changes the last bits of sums in a large model."""
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        run(tiny.with_(rounds=1), tmp_path / "a")
        torch.set_num_threads(1)
        run(tiny, tmp_path / "a", resume=True, on_start=lambda _: seen.append(torch.get_num_threads()))
        assert (seen, torch.get_num_threads()) == ([2], 1)
    finally:
        torch.set_num_threads(before)
