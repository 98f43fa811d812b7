"""Profiles: the seconds of each step, and the same bits."""

import time

import pytest
import torch

import stableair as sa
from helpers.errors import refused
from helpers.words import words_of
from stableair.results import profiling
from stableair.results.profiling import PEAK, SECONDS, STEPS, Stopwatch, profile_rows

NAMES = [SECONDS.format(name) for name in (*STEPS, "recording")]


def test_a_profiled_run_keeps_its_bits(tiny, tmp_path):
    e = tiny.with_(average=0.5, receiver="mac(C=auto)", server="momentum(lr=0.1)")
    plain, run = sa.run(e), sa.run(e, tmp_path, profile=True)
    assert [{k: v for k, v in row.items() if k in plain.rounds[0] and k != "seconds"} for row in run.rounds] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in plain.rounds
    ]
    assert torch.equal(run.state.model.w, plain.state.model.w)
    assert {*NAMES, PEAK} == run.rounds[0].keys() - plain.rounds[0].keys()


def test_the_steps_are_within_the_seconds_of_the_round(tiny):
    run = sa.run(tiny, profile=True)
    for row in run.rounds:
        assert 0 < sum(row[SECONDS.format(step)] for step in STEPS) <= row["seconds"]
    assert run["seconds/recording"][0] is None
    assert min(run["seconds/recording"][1:]) > 0
    rows = profile_rows(run)
    assert [name for name, _, _ in rows] == [*STEPS, "recording", "other"]
    assert sum(share for _, _, share in rows) == pytest.approx(1)
    assert profile_rows(sa.run(tiny)) == []


def test_the_seconds_of_a_nested_step_are_not_added_twice(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    with watch.measure("channel"), watch.measure("training"):
        pass
    assert (watch.seconds["channel"], watch.seconds["training"]) == (1.0 + 4.0, 2.0)


@pytest.mark.parametrize(
    ("step", "setting"), [("receiver", "receiver"), ("server", "server"), ("channel", "noise"), ("training", "model")]
)
def test_seconds_are_assigned_to_the_step_that_used_them(step, setting, tiny, registries):
    def slow(value):
        time.sleep(0.02)
        return value

    class SlowModel(torch.nn.Linear):
        def forward(self, x):
            return super().forward(slow(x.flatten(1)))

    sa.receiver("slow_receiver")(lambda: slow)
    sa.server("slow_server")(lambda: sa.ServerRule(lambda w, g, memory: (slow(w) - g, memory, {})))
    sa.noise("slow_noise")(lambda: lambda d, source: slow(torch.zeros(d)))
    sa.model("slow_model")(lambda: lambda shape, classes: SlowModel(4, classes))
    e = tiny.with_(rounds=1, engine="reference", clients=2, **{setting: f"slow_{setting}()"})
    (row,) = sa.run(e, profile=True).rounds
    assert row[SECONDS.format(step)] > 0.02


def test_a_run_may_continue_without_a_profile(tiny, tmp_path):
    sa.run(tiny.with_(rounds=2), tmp_path, profile=True)
    run = sa.run(tiny, tmp_path, resume=True)
    assert run["seconds/training"][2:] == [None, None]
    assert len(profile_rows(run)) == 7
    refused("wrong-type", sa.run, tiny, profile=1)


def test_the_command_prints_the_profile(command, tiny):
    code, out, _ = command("run", *words_of(tiny), "--profile", "-o", "a")
    assert code == 0
    assert all(name in out for name in (*STEPS, "recording", "peak memory: "))
    assert "evaluation" not in command("run", *words_of(tiny), "-o", "b")[1]
