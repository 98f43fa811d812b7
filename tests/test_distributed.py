"""A simulation in several processes of torchrun gives the results of one process, bit for bit."""

import json
import os
import pickle
import re
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

import stableair as sa
from helpers import ROOT
from helpers.isolation import restored_registries
from helpers.ranked import digest, experiments
from stableair import distributed
from stableair.distributed import ProcessGroup
from stableair.errors import NonFiniteUpload, ResourceError
from stableair.experiment import from_words
from stableair.results.reading import load

SAME = [
    "plain",
    "unequal",
    "buffers",
    "varying participation",
    "averaged",
    "whole payloads",
    "signals",
    "digital",
    "stacked",
    "local rule",
    "turning",
    "power over signals",
    "power of digital links",
    "in blocks",
]


def torchrun(ranks, *words, module=False, restarts=0, monitor_interval=0.1, **environment):
    """The completed process of a command that torchrun started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [
        f"--max-restarts={restarts}",
        f"--monitor-interval={monitor_interval}",
        *(["-m"] if module else []),
        *map(str, words),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


def ranked(ranks, task, folder, *words, **options):
    return torchrun(ranks, RANKED, task, folder, *words, **options)


RANKED = ROOT / "tests/helpers/ranked.py"


@pytest.fixture(scope="module")
def known():
    with restored_registries():
        yield experiments()


@pytest.fixture(scope="module")
def single_process(known):
    return {name: digest(sa.run(known[name])) for name in SAME}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_the_number_of_ranks_changes_no_bit(ranks, single_process, tmp_path):
    """The model, the norm buffers and all metrics; seven clients cannot be divided equally."""
    done = ranked(ranks, "digests", tmp_path / "digests.json", *SAME)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "digests.json").read_text()) == single_process
    silent = re.findall(r"round \d+: no client was received", done.stderr)
    assert silent
    assert len(silent) == len(set(silent)), "only rank 0 logs"


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mlp(8)", "resnet18()"])
def test_two_ranks_on_one_gpu_give_the_bits_of_one(model, cuda, tmp_path):
    """NCCL needs a GPU per rank, so the ranks use gloo; the engine is that of a GPU."""
    words = "data=synthetic(samples=90,classes=3,shape=(3,32,32))", "clients=7", "rounds=2", "chunk=2", "engine=fast"
    words += f"model={model}", f"device={cuda}"
    plain = sa.run(from_words(list(words)))
    done = torchrun(2, "stableair", "run", *words, "--out", tmp_path / "a", module=True)
    assert done.returncode == 0, done.stderr
    assert digest(load(tmp_path / "a")) == digest(plain)


def test_the_command_reports_missing_ranks(command, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "CONNECT_TIMEOUT", 0.1)
    code, _, errors = command("run", "rounds=1")
    assert code == 2
    assert re.match(r"error: the ranks could not connect: rank 0 does not answer at 127.0.0.1:1 .*\n$", errors)


@pytest.mark.parametrize(
    ("rank", "reason"), [("1", "rank 0 does not answer at 127.0.0.1:"), ("0", "1/2 clients joined")]
)
def test_ranks_without_their_peers_exit_with_one_line(rank, reason, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "CONNECT_TIMEOUT", 0.3)
    monkeypatch.setattr(distributed, "JOIN_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ResourceError) as error, distributed.join_process_group({}):
        pass
    assert error.value.code == "ranks-not-connected"
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_is_stopped_with_two_ranks_and_resumed_with_three_and_with_one(known, tmp_path):
    whole = sa.run(known["killed_rank"].with_(rounds=8))
    for size, rounds in ((2, 3), (3, 6), (1, 8)):
        assert ranked(size, "rounds", tmp_path / "a", rounds).returncode == 0
    assert digest(load(tmp_path / "a")) == digest(whole)
    assert [e["ranks"] for e in load(tmp_path / "a").environments] == [2, 3, 1]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_restarted_and_the_run_continues(known, tmp_path):
    done = ranked(2, "rounds", tmp_path / "a", 6, restarts=3, KILL_AFTER_RESTARTS="0")
    assert done.returncode == 0, done.stderr
    assert [e["first_round"] for e in load(tmp_path / "a").environments] == [0, 2]
    assert digest(load(tmp_path / "a")) == digest(sa.run(known["killed_rank"].with_(rounds=6)))


@pytest.mark.slow
def test_if_a_rank_is_killed_the_others_report_it_in_one_line(tmp_path):
    # torchrun looks for exited ranks every 5 s: until then, the other rank can report the error.
    done = ranked(2, "rounds", tmp_path / "a", 6, KILL_AFTER_RESTARTS="0", monitor_interval=5)
    assert done.returncode != 0
    assert "ResourceError: another rank has exited; resume the run to continue" in done.stderr
    assert len(load(tmp_path / "a")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("overflowing", "uploaded a non-finite"),
        ("out_of_memory", "rank 1: not enough memory"),
        ("not_built", "rank 1: "),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(model, reason, tmp_path):
    done = ranked(3, model, tmp_path / "a")
    assert done.returncode != 0
    kinds = "InputError: ", "NonFiniteUpload: ", "ResourceError: "
    lines = [line for line in done.stderr.splitlines() if reason in line]
    messages = {line.partition(kind)[2] for line in lines for kind in kinds if kind in line}
    assert len(messages) == 1, done.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_ranks_with_different_experiments_are_refused():
    done = ranked(2, "disagree", "-")
    assert done.returncode != 0
    assert "the ranks disagree" in done.stderr


@pytest.mark.slow
def test_only_rank_0_prints(tmp_path):
    words = "data=synthetic(samples=70,classes=3,shape=(1,2,2))", "model=mlp(4)", "clients=7", "rounds=2"
    done = torchrun(3, "stableair", "run", *words, "--out", tmp_path / "a", module=True)
    assert done.returncode == 0, done.stderr
    assert "3 ranks" in done.stdout.splitlines()[0]
    assert len(done.stdout.splitlines()) == 4
    found = load(tmp_path / "a")
    d, chunk = len(found.state.model.w), found.environments[0]["chunk"]
    waves, entries = -(-7 // (3 * chunk)), -(-d // 3)  # a wave: slices of `chunk` clients, and their loss and norm
    sent = 2 * (waves * chunk * (4 * entries + 2 * 8) + 2 * 8 * entries)  # to two other ranks; then two sums in float64
    assert f"each of 3 ranks sent {sent / 1e6:,.3g} MB per round" in done.stderr
    again = torchrun(3, "stableair", "run", *words, "--out", tmp_path / "a", module=True)
    assert again.returncode != 0
    assert [line for line in again.stderr.splitlines() if line.startswith("error:")] == [
        f"error: {tmp_path / 'a'} already holds this run; add --resume or choose another --out"
    ]
    assert len(load(tmp_path / "a")) == 2


@pytest.mark.parametrize(("size", "d"), [(1, 5), (2, 5), (3, 10), (4, 3)])
def test_the_slices_of_all_ranks_cover_the_vector(size, d):
    slices = [ProcessGroup(rank, size, torch.device("cpu")).slice(d) for rank in range(size)]
    assert torch.cat([torch.arange(d)[one] for one in slices]).tolist() == list(range(d))
    assert all(one.start % 2 == 0 or one.start == d for one in slices), "a slice divides a complex symbol"


def test_an_error_about_an_upload_can_be_pickled():
    error = pickle.loads(pickle.dumps(NonFiniteUpload(3, 5, "loss")))
    assert (str(error), error.k, error.code) == (str(NonFiniteUpload(3, 5, "loss")), 3, "non-finite-upload")
