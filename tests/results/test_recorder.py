"""The files that a run writes, and their order."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import torch

import stableair as sa
from helpers.runs import same
from stableair.contracts import Round, State
from stableair.errors import CorruptRunError, StableairError
from stableair.results import lock
from stableair.results.checkpoint import read_checkpoint
from stableair.results.checksums import CHECKPOINT, CLIENTS, ENVIRONMENT, EXPERIMENT, PREVIOUS, ROUNDS
from stableair.results.environment import environment
from stableair.results.reading import load
from stableair.runner import run
from stableair.streams import generator
from stableair.vector import ModelState


def test_the_files_of_a_run(tiny, tmp_path):
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
        "clip/fraction", "channel/senders", "channel/uses", "channel/seconds", "channel/energy_mean",
        "channel/energy_max", "channel/energy_total_max", "channel/bits", "seconds", "checksum",
    ]  # fmt: skip
    assert json.loads((result.folder / ENVIRONMENT).read_text())[0]["torch"] == torch.__version__
    assert same(load(result.folder), result)
    assert same(run(tiny), result), "in memory it is the same run"


def test_a_metric_that_a_round_lacks_is_recorded_as_none(tiny, tmp_path, registries):
    """For example a metric of the receiver in a round without senders; the folder stays readable."""
    sa.receiver("sometimes")(lambda: sa.Rule(lambda r, memory: (r.g, memory, {"odd": 1.0} if r.k % 2 else {})))
    e = tiny.with_(receiver="sometimes()")
    result = run(e, tmp_path / "a")
    assert "receiver/odd" not in result.rounds[0]
    assert [row["receiver/odd"] for row in result.rounds[1:]] == [1.0, None, 1.0]
    assert same(load(tmp_path / "a"), result)
    run(e.with_(rounds=2), tmp_path / "b")
    assert same(run(e, tmp_path / "b", resume=True), result)


def test_bad_input_writes_nothing(tiny, tmp_path):
    with pytest.raises(sa.InputError):
        run(tiny.with_(clients=1000), tmp_path / "a")
    with pytest.raises(sa.InputError) as error:
        run(tiny, tmp_path / "a", checkpoint_every=0)
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "checkpoint_every")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(sa.InputError) as error:
            run(tiny, folder)
        assert error.value.code == "not-writable"
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
    }, "a diverged model has no metrics"  # fmt: skip
    assert result.state.model.w.isfinite().all(), "the last good checkpoint is kept"
    assert read_checkpoint(result.folder).rounds == 2
    again = run(tiny.with_(noise="burst(at=2)", receiver="none()", rounds=9), result.folder, resume=True)
    assert again.diverged == 2
    survived = run(tiny.with_(noise="burst(at=2)", receiver="mac(C=1)"), tmp_path / "b")
    assert survived.diverged is None, "MAC takes an infinite entry"
    assert "diverged" not in result.to_pandas()
    at_once = run(tiny.with_(noise="burst(at=0)", receiver="none()"), tmp_path / "c")
    assert at_once["test/accuracy"] == [None]
    assert at_once.diverged == 0


def test_an_overflow_is_an_error_in_the_first_round_and_divergence_later(tiny, tmp_path, registries):
    @sa.noise("push")
    def push():
        return lambda d, source: torch.full((d,), -1e30)

    far = tiny.with_(noise="push()", receiver="none()", model="mlp(width=4, depth=3)")
    result = run(far, tmp_path / "a", checkpoint_every=100)
    assert result.diverged == 1, "the server's model is still finite, but no client can train from it"
    assert read_checkpoint(tmp_path / "a").rounds == 1
    assert load(tmp_path / "a").diverged == 1
    assert run(far, tmp_path / "a", resume=True).diverged == 1

    with pytest.raises(sa.InputError) as error:
        run(tiny.with_(lr=1e38), tmp_path / "b")
    assert error.value.code == "non-finite-upload"
    assert not (tmp_path / "b").exists(), "a run that fails in its first round leaves no folder"


def test_the_last_good_state_is_written_before_the_line_that_ends_a_run(tiny, tmp_path, registries, monkeypatch):
    sa.noise("burst")(lambda: lambda d, source: torch.full((d,), math.inf if source.key == last else 0.0))
    last, append, kept = generator(0, "noise", 2).key, lock.LockedFolder.append, []

    def recorded_append(folder, name, line):
        kept.append((json.loads(line).get("diverged"), (tmp_path / "a" / CHECKPOINT).exists()))
        append(folder, name, line)

    monkeypatch.setattr(lock.LockedFolder, "append", recorded_append)
    run(tiny.with_(noise="burst()", receiver="none()"), tmp_path / "a", checkpoint_every=100)
    assert kept == [(None, False), (None, False), (True, True)]


def test_files_of_a_run_without_its_experiment_are_not_overwritten(tiny, tmp_path):
    run(tiny, tmp_path / "a")
    (tmp_path / "a" / EXPERIMENT).unlink()
    for resume in (True, False):
        with pytest.raises(CorruptRunError) as error:
            run(tiny, tmp_path / "a", resume=resume)
        assert error.value.code == "corrupt-run"


def test_an_empty_run_folder_is_removed(tiny, tmp_path):
    with pytest.raises(sa.InputError) as error:
        run(tiny.with_(clients=1000), tmp_path / "a" / "b" / "c")
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "clients")
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(sa.InputError) as error:
        run(tiny.with_(clients=1000), tmp_path / "mine")
    assert (error.value.code, error.value.fields["name"]) == ("out-of-range", "clients")
    assert (tmp_path / "mine").is_dir(), "an existing folder is kept"


def test_links_and_pipes_in_a_foreign_folder_are_not_followed(tiny, tmp_path):
    (tmp_path / "precious").write_text("mine")
    folder = run(tiny.with_(rounds=2), tmp_path / "a").folder
    (folder / ROUNDS).rename(tmp_path / "rounds")
    (folder / ROUNDS).symlink_to(tmp_path / "precious")
    with pytest.raises(StableairError):
        run(tiny, folder, resume=True)
    assert (tmp_path / "precious").read_text() == "mine"
    (folder / ROUNDS).unlink()
    os.mkfifo(folder / ROUNDS)
    with pytest.raises(sa.InputError) as error:
        run(tiny, folder, resume=True)
    assert (error.value.code, error.value.fields["path"]) == ("not-a-file", folder / ROUNDS)


def test_any_rounds_can_be_recorded(tiny, tmp_path):
    """Rounds from any source, here from a generator without a simulation."""
    states = [State(ModelState(torch.full((3,), float(k)), torch.zeros(0))) for k in range(5)]

    def rounds(start):
        for k in range(start, 5):
            yield Round(k, states[k], {"test/accuracy": k / 10})

    metadata = sa.RunMetadata(tiny, environment(torch.device("cpu")))
    folder = tmp_path / "a"
    first_part = sa.recorded(rounds(0), folder, metadata)
    assert [next(first_part).metrics["test/accuracy"] for _ in range(2)] == [0.0, 0.1]
    first_part.close()
    resumption = sa.resume_point(folder, tiny, resume=True)
    assert resumption.rounds == 2
    rest = list(sa.recorded(rounds(2), folder, metadata, resumption))
    assert [r.k for r in rest] == [2, 3, 4]
    found = load(folder)
    assert found["test/accuracy"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert torch.equal(found.state.model.w, states[4].model.w)


def test_rounds_are_not_recorded_over_another_run(finished, tmp_path):
    folder = shutil.copytree(finished[1].folder, tmp_path / "a")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    metadata = sa.RunMetadata(finished[0].with_(seed=5), environment(torch.device("cpu")))
    rounds = iter([Round(0, finished[1].state, {"test/accuracy": 0.5})])
    with pytest.raises(sa.InputError) as error:
        list(sa.recorded(rounds, folder, metadata))
    assert error.value.code == "run-exists"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
