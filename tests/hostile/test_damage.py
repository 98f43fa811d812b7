"""Flipped bits and truncated files, for every file that a command reads: an error in one line or the correct result."""

import random
import shutil
import warnings

import pytest
import torch

import stableair as sa
from helpers.runs import recorded_metrics
from stableair.data import hub
from stableair.errors import StableairError
from stableair.experiment import Experiment
from stableair.results.reading import find

pytestmark = pytest.mark.slow  # errors and attacks of users; each test prints the number of its attempts

TRIES = 12
TINY = Experiment(
    data="synthetic(samples=60, classes=3, shape=(1, 2, 2))", model="mlp(width=4)", clients=5, rounds=5, device="cpu",
    receiver="mac(C=auto)", server="momentum()",
)  # fmt: skip


def damaged(raw, rng):
    """The bytes with a flipped bit, a changed byte, or the end removed."""
    kind = rng.choice(["bit", "bit", "byte", "cut"])
    position = rng.randrange(len(raw))
    if kind == "cut":
        return raw[:position]
    change = 1 << rng.randrange(8) if kind == "bit" else rng.randrange(1, 256)
    return raw[:position] + bytes([raw[position] ^ change]) + raw[position + 1 :]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return sa.run(TINY, tmp_path_factory.mktemp("runs") / "a"), sa.run(TINY.with_(rounds=7))


NAMES = "experiment.json", "environment.json", "clients.json", "rounds.jsonl", "checkpoint.pt", "checkpoint.previous.pt"


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_run_is_refused_or_resumed_correctly(finished, tmp_path, name):
    rng, refused, correct = random.Random(name), 0, 0
    for i in range(TRIES):
        folder = shutil.copytree(finished[0].folder, tmp_path / str(i))
        raw = damaged((folder / name).read_bytes(), rng)
        (folder / name).write_bytes(raw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                resumed = sa.run(TINY.with_(rounds=7), folder, resume=True)
            except StableairError as error:
                assert "\n" not in str(error)
                refused += 1
                assert (folder / name).read_bytes() == raw, "a refused folder does not change"
                continue
        assert torch.equal(resumed.state.model.w, finished[1].state.model.w)
        assert resumed["test/loss"] == finished[1]["test/loss"]
        correct += 1
    print(f"\n{name}: {TRIES} damages, {refused} refused in one line, {correct} resumed to the correct bits")


@pytest.mark.parametrize("name", NAMES[:4])
def test_a_damaged_run_is_left_out_of_a_report(finished, tmp_path, name):
    rng, left_out = random.Random(name), 0
    sa.run(TINY.with_(seed=1), tmp_path / "good")
    for _ in range(TRIES):
        folder = shutil.copytree(finished[0].folder, tmp_path / "bad", dirs_exist_ok=True)
        (folder / name).write_bytes(damaged((folder / name).read_bytes(), rng))
        runs, lines = find([tmp_path])
        assert len(runs) + len(lines) == 2
        for run in runs:
            if run.settings["seed"] == 0:  # a last line cut short is a round that is not complete
                assert run["test/loss"] == finished[0]["test/loss"][: len(run)]
        left_out += len(lines)
        shutil.rmtree(folder)
    print(f"\n{name}: {TRIES} damages, {left_out} left out with a message")


def test_a_damaged_search_is_refused_or_repeated(tmp_path):
    base, spaces = TINY.with_(rounds=2), {"receiver.gain": "true,false"}
    whole = sa.search(base, spaces, tmp_path / "whole", trials=2)
    rng, refused = random.Random(0), 0
    for i in range(TRIES):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / str(i))
        path = folder / "search.json"
        path.write_bytes(damaged(path.read_bytes(), rng))
        try:
            assert sa.search(base, spaces, folder, trials=2).trials == whole.trials
        except sa.StableairError as error:
            assert "\n" not in str(error)
            refused += 1
    print(f"\nsearch.json: {TRIES} damages, {refused} refused in one line")


@pytest.mark.parametrize("ending", ["safetensors", "json"])
def test_a_damaged_data_file_is_refused_or_logged(tmp_path, ending, monkeypatch, data_folder):
    experiment = TINY.with_(data="femnist", model="logistic()", rounds=1)
    rng, refused, whole = random.Random(ending), 0, recorded_metrics(sa.run(experiment))
    for i in range(TRIES):
        folder = tmp_path / str(i)
        folder.mkdir()
        for path in data_folder.glob("femnist.*"):
            shutil.copy(path, folder)
        target = folder / f"femnist.{ending}"
        target.write_bytes(damaged(target.read_bytes(), rng))
        monkeypatch.setenv(hub.VARIABLE, str(folder))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert recorded_metrics(sa.run(experiment)) == whole
        except sa.InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused == TRIES or ending == "json", "a damaged data file is never read"
    print(f"\nfemnist.{ending}: {TRIES} damages, {refused} refused in one line")
