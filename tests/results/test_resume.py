"""A stopped, killed or crashed run is resumed bit for bit."""

import json
import os
import random
import signal

import pytest
import torch

import stableair as sa
from helpers.callbacks import Hooks
from helpers.runs import Stop, recorded_metrics, same, started, stop_after
from stableair.results import lock
from stableair.results.checkpoint import read_checkpoint
from stableair.results.checksums import ENVIRONMENT, EXPERIMENT, ROUNDS, seal
from stableair.results.reading import load
from stableair.runner import run


@pytest.mark.parametrize("server", [pytest.param("sgd()", marks=pytest.mark.slow), "momentum()"])
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_stopped_and_resumed_equals_uninterrupted(tiny, tmp_path, server, every, k):
    tiny = tiny.with_(server=server)
    with pytest.raises(Stop):
        run(tiny, tmp_path / "a", checkpoint_every=every, callbacks=[Hooks(round=stop_after(k))])
    computed = []
    resumed = run(
        tiny,
        tmp_path / "a",
        resume=True,
        checkpoint_every=every,
        callbacks=[Hooks(round=lambda row: computed.append(row["round"]))],
    )
    assert computed[0] == k + 1, "reported rounds are complete and are not computed again"
    assert same(resumed, run(tiny))
    assert same(load(tmp_path / "a"), run(tiny))
    assert [e["first_round"] for e in json.loads((tmp_path / "a" / ENVIRONMENT).read_text())] == [0, k + 1]


def test_a_run_of_an_earlier_version_with_another_spelling_is_resumed(tiny, tmp_path):
    """Earlier versions recorded `none` as well as `none()`."""
    tiny = tiny.with_(receiver="none()", model="logistic()")
    with pytest.raises(Stop):
        run(tiny, tmp_path / "a", callbacks=[Hooks(round=stop_after(1))])
    record = json.loads((tmp_path / "a" / EXPERIMENT).read_text())
    record = {key: value for key, value in record.items() if key != "checksum"}
    spellings = {"receiver": "none", "model": "logistic", "power": "none", "server": "sgd"}
    (tmp_path / "a" / EXPERIMENT).write_bytes(seal(record | spellings))
    with pytest.raises(sa.InputError) as error:
        run(tiny.with_(clients=3), tmp_path / "a", resume=True)
    assert error.value.fields["settings"] == ["clients"]
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))
    assert (load(tmp_path / "a").experiment, load(tmp_path / "a").settings) == (tiny, tiny.to_dict())


@pytest.mark.gpu
def test_a_resumed_run_on_a_gpu_equals_an_uninterrupted_one(tiny, tmp_path, cuda):
    tiny = tiny.with_(server="momentum()", device=cuda)
    with pytest.raises(Stop):
        run(tiny, tmp_path / "a", callbacks=[Hooks(round=stop_after(2))])
    resumed, whole = run(tiny, tmp_path / "a", resume=True), run(tiny)
    assert recorded_metrics(resumed) == recorded_metrics(whole)
    assert torch.equal(resumed.state.model.w, whole.state.model.w)


class FadingOut:
    """A receiver with memory: it halves its output every round."""

    interrupted_at = None

    def init(self, like):
        return {"scale": like.new_ones(1)}

    def apply(self, received, memory):
        scale = memory["scale"] * 0.5
        if scale.item() == FadingOut.interrupted_at:
            raise Stop
        return received.g * scale, {"scale": scale}, {"scale": scale.item()}


@pytest.mark.parametrize("every", [1, 100])
def test_the_memory_of_a_receiver_is_resumed(tiny, tmp_path, registries, monkeypatch, every):
    sa.receiver("fading_out")(FadingOut)
    tiny = tiny.with_(receiver="fading_out()")
    monkeypatch.setattr(FadingOut, "interrupted_at", 0.125)  # in round 2
    with pytest.raises(Stop):
        run(tiny, tmp_path / "a", checkpoint_every=every)
    monkeypatch.undo()
    resumed = run(tiny, tmp_path / "a", resume=True)
    assert resumed["receiver/scale"] == [0.5, 0.25, 0.125, 0.0625]
    assert same(resumed, run(tiny))


def test_resume_starts_a_new_run_in_an_empty_folder(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    incomplete = tmp_path / "incomplete"  # a run that was killed in its first round
    incomplete.mkdir()
    (incomplete / EXPERIMENT).write_text(tiny.to_json())
    (incomplete / ROUNDS).write_text('{"round": 0, "test/accu')
    whole = run(tiny)
    for folder in (tmp_path / "missing", tmp_path / "empty", incomplete):
        assert same(run(tiny, folder, resume=True), whole)


def test_a_finished_run_is_not_computed_again_but_extended(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    for rounds in (4, 2):
        again = run(
            tiny.with_(rounds=rounds),
            tmp_path / "a",
            resume=True,
            callbacks=[Hooks(round=lambda row: pytest.fail("computed"))],
        )
        assert len(again) == 4
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()} == before
    longer = tiny.with_(rounds=6)
    assert same(run(longer, tmp_path / "a", resume=True), run(longer))
    assert load(tmp_path / "a").experiment == longer


def test_a_folder_that_holds_a_run_is_refused(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    with pytest.raises(sa.InputError) as error:
        run(tiny, tmp_path / "a")
    assert (error.value.code, error.value.hint) == ("run-exists", "resume")
    for resume in (True, False):
        with pytest.raises(sa.InputError) as error:
            run(tiny.with_(receiver="mac(C=9)", clients=4), tmp_path / "a", resume=resume)
        assert error.value.code == "other-experiment"
        assert error.value.fields["settings"] == ["clients", "receiver"]
        assert "clients: 5 in the folder, 4 now; receiver: mac(C=1) in the folder, mac(C=9) now; " in str(error.value)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before


def test_lines_beyond_the_checkpoint_are_computed_again(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    earlier = run(tiny.with_(rounds=2), tmp_path / "b")
    lines = (tmp_path / "a" / ROUNDS).read_text()
    (earlier.folder / ROUNDS).write_text(lines[: lines.rindex("{") + 20])  # killed within round 3, its line cut short
    assert same(run(tiny, earlier.folder, resume=True), load(tmp_path / "a"))


CHILD = """
import sys
import stableair as sa
class Printed(sa.Callback):
    def round(self, experiment, row):
        print(row["round"], flush=True)
sa.run(sa.Experiment.read(sys.argv[1]), sys.argv[2], resume=True, callbacks=[Printed()])
"""
CLI = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
from stableair.cli.main import main
main()
"""


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_random_and_resumed_equals_uninterrupted(tiny, tmp_path, kills):
    tiny = tiny.with_(rounds=60, server="momentum()")
    (tmp_path / "e.json").write_text(tiny.to_json())
    rng = random.Random(0)
    for rounds in (rng.randint(1, 15) for _ in range(kills)):
        with started(CHILD, tmp_path / "e.json", tmp_path / "killed") as process:
            for _ in range(rounds):
                assert process.stdout.readline(), process.stderr.read()
            spin = rng.randint(0, 20_000)  # wait until a random time within a round
            while spin and process.poll() is None:
                spin -= 1
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, "it was killed during the run"
    assert 0 < len(load(tmp_path / "killed")) < 60
    assert same(run(tiny, tmp_path / "killed", resume=True), run(tiny))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_leave_a_consistent_run(tiny, tmp_path, sent, code):
    settings = [f"{k}={v}" for k, v in tiny.with_(rounds=100_000).to_dict().items()]
    words = ["run", *settings, "--out", str(tmp_path / "a"), "--checkpoint-every", "1000"]
    with started(CLI, *words) as process:
        for _ in range(6):  # the engine, and five rounds
            assert process.stdout.readline(), process.stderr.read()
        process.send_signal(sent)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "continue with --resume" in errors
    assert "Traceback" not in errors
    assert "resume=True" not in errors, "the command prints one advice"
    done = read_checkpoint(tmp_path / "a").rounds
    assert done >= 4, "no complete round is lost, even with rare checkpoints"
    longer = tiny.with_(rounds=done + 2)
    assert same(run(longer, tmp_path / "a", resume=True), run(longer))


@pytest.mark.parametrize(
    ("folder", "options", "notes"), [("a", {}, 1), (None, {}, 0), ("a", {"resume": True}, 0)], ids=str
)
def test_the_traceback_of_ctrl_c_names_the_folder_and_how_to_continue(tiny, tmp_path, folder, options, notes):
    def interrupt(_):
        raise KeyboardInterrupt

    path = folder and tmp_path / folder
    with pytest.raises(KeyboardInterrupt) as stop:
        run(tiny, path, callbacks=[Hooks(round=interrupt)], **options)
    advice = getattr(stop.value, "__notes__", [])
    assert len(advice) == notes
    assert all(str(path) in note and "resume=True" in note for note in advice)


@pytest.mark.parametrize("resume", [False, True])
def test_ctrl_c_before_the_first_round_says_that_nothing_was_recorded(tiny, tmp_path, resume):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stop:
        run(tiny, tmp_path / "a", model=interrupt, resume=resume)
    assert stop.value.__notes__ == [f"nothing was recorded in {tmp_path / 'a'}"]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda e, folder, hooks: sa.sweep([e, e.with_(seed=1)], folder, callbacks=hooks),
        lambda e, folder, hooks: sa.search(e, {"receiver.C": "1,2"}, folder, callbacks=hooks),
        lambda e, folder, hooks: sa.compare([e, e.with_(receiver="none()")], folder, callbacks=hooks),
    ],
    ids=["sweep", "search", "compare"],
)
def test_the_traceback_of_ctrl_c_in_many_runs_says_that_the_same_call_continues(call, tiny, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stop:
        call(tiny, tmp_path, [Hooks(round=interrupt)])
    (note,) = stop.value.__notes__
    assert note == f"{tmp_path} holds every complete round; the same call continues from there"
    call(tiny, tmp_path, [])


@pytest.mark.parametrize("after", range(12))
def test_a_crash_at_any_write_can_be_resumed(tiny, tmp_path, monkeypatch, after):
    """The process is killed at the n-th write, append or rename of a run."""
    tiny = tiny.with_(rounds=3, server="momentum()")
    remaining = after

    def crashing(real):
        def call(*args, **kwargs):
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise KeyboardInterrupt  # neither this call nor a later one writes
            return real(*args, **kwargs)

        return call

    for module, name in ((os, "replace"), (lock.LockedFolder, "append")):
        monkeypatch.setattr(module, name, crashing(getattr(module, name)))
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "a")
    monkeypatch.undo()
    assert same(run(tiny, tmp_path / "a", resume=True), run(tiny))


def test_a_resumed_run_uses_its_first_number_of_threads(tiny, tmp_path):
    """The number of threads changes the last bits of sums in a large model."""
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        run(tiny.with_(rounds=1), tmp_path / "a")
        torch.set_num_threads(1)
        run(tiny, tmp_path / "a", resume=True, callbacks=[Hooks(start=lambda _: seen.append(torch.get_num_threads()))])
        assert (seen, torch.get_num_threads()) == ([2], 1)
    finally:
        torch.set_num_threads(before)
