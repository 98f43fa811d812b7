"""bench/step_profile.py: times of the kernels of a step, and of the first round of a process."""

import importlib

import pytest

from helpers import ROOT


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("step_profile")


def test_the_profile_has_the_products_of_a_step(bench, tiny):
    profiled = bench.train(tiny.with_(local_epochs=2, batch_size=4))  # 5 clients with 12 samples each
    assert profiled.steps == 2 * 3
    assert profiled.engine == "stacked, fp32"
    assert len(profiled.rounds) == bench.ROUNDS
    products = [each for each in profiled.kernels if each.name == "aten::baddbmm"]
    assert [each.calls for each in products] == [2 * profiled.steps], "one product per dense layer and step"


def test_the_table_lists_the_slowest_kernels_and_the_sum_of_the_others(bench):
    kernels = [bench.Kernel("slow", 8.0, 4), bench.Kernel("fast", 2.0, 2), bench.Kernel("faster", 1.0, 6)]
    lines = bench.table(bench.Profile("kernels, bf16", 2, [1.0], kernels), most=1).splitlines()
    assert lines[2:] == ["| `slow` | 4.000 | 2.0 |", "| 2 other kernels | 1.500 | 4.0 |"]


def test_the_first_round_is_timed_in_two_processes_with_one_cache(bench, monkeypatch):
    caches = []

    def run(command, env, **options):
        caches.append(env["TRITON_CACHE_DIR"])
        seconds = [9.0, 2.0, 1.0] if len(caches) == 1 else [3.0, 2.0, 1.0]
        return bench.subprocess.CompletedProcess(command, 0, f"a note\n{seconds}\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    assert bench.first_rounds("digits") == [8.0, 2.0]
    assert len(set(caches)) == 1
