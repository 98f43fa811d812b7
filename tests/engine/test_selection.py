"""The choice of the engine, for new and for resumed runs."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

import stableair as sa
import stableair.engine
from helpers.callbacks import Hooks
from helpers.engine import assert_uploads_agree, network, recorded_engines, uploads
from stableair.builder import build
from stableair.engine import EngineChoice, accelerate, choose
from stableair.engine.selection import has_kernels
from stableair.engine.stacked import Stacked
from stableair.engine.vmapped import Vmapped
from stableair.errors import InputError
from stableair.literals import Precision
from stableair.training.reference import Reference


def test_networks_with_convolutions_that_the_kernels_support():
    pytest.importorskip("triton", reason="Triton is not installed")
    grouped = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Flatten(), nn.Linear(108, 3))
    expected = {"cnn(width=7)": True, "batch": True, "group": True, "mlp(width=5)": False, "logistic()": False}
    assert {spec: has_kernels(Stacked(network(spec))) for spec in expected} == expected
    assert not has_kernels(Stacked(grouped))
    assert not has_kernels(Vmapped(network("cnn(width=7)"))), "not a stacked program"


def test_the_choice_of_the_engine_on_a_cpu(tiny, monkeypatch):
    monkeypatch.setattr("stableair.engine.selection.available_cores", lambda: 2)
    sim = build(tiny.with_(batch_size=1))  # twelve samples and five epochs a client: sixty steps
    assert choose(sim, "auto")[:3] == ("stacked", "fp32", 5)
    assert choose(sim, "fast", chunk=2)[:3] == ("stacked", "fp32", 2)

    def with_entries(d):
        return sim.start._replace(model=sim.start.model._replace(w=torch.empty(d)))

    middle = replace(sim, start=with_entries(6_600_000))
    assert choose(middle, "auto", rounds=1).engine == "reference", "too few rounds to start processes"
    assert choose(middle, "auto", rounds=1000).engine == "processes"
    quick = replace(middle, train=Reference(replace(sim.train.work, epochs=1, batch_size=6)))
    assert choose(quick, "auto", rounds=10**6).engine == "reference", "too few steps per update"
    large = replace(sim, start=with_entries(11_000_000))
    assert choose(large, "auto", rounds=1000).engine == "reference"
    assert choose(large, "fast").engine == "processes"
    dropping = nn.Sequential(nn.Dropout(0.5), sim.train.work.module)
    noisy = replace(middle, train=Reference(replace(sim.train.work, module=dropping)))
    assert choose(noisy, "fast").engine == "processes", "processes support any module"
    monkeypatch.setattr("stableair.engine.selection.available_cores", lambda: 1)
    assert choose(middle, "auto", rounds=1000).engine == "reference"
    with pytest.raises(InputError) as error:
        choose(middle, "fast")
    assert error.value.code == "no-fast-engine"


def test_invalid_arguments_are_refused(tiny):
    sim = build(tiny)
    for engine in ("auto", "fast"):
        with pytest.raises(InputError) as error:
            choose(sim, engine, "bf16")
        assert (error.value.code, error.value.fields["value"]) == ("unsupported-precision", "bf16")
    for known in ({}, {"chunk": 2}, {"work": sim.train.work}, {"work": 1, "chunk": 2}):
        plain = lambda state, k, clients: iter(())  # noqa: E731
        plain.__dict__.update(known)
        for engine in (accelerate, lambda sim: choose(sim, "auto")):
            with pytest.raises(InputError) as error:
                engine(replace(sim, train=plain))
            assert (error.value.code, error.value.fields["name"]) == ("wrong-type", "train")
    with pytest.raises(InputError) as error:
        accelerate(sim, EngineChoice("stackd", "fp32", 5, ""))
    assert (error.value.code, error.value.fields["name"]) == ("unknown-value", "engine")
    for loop in ("reference", "processes"):
        with pytest.raises(InputError) as error:
            accelerate(sim, EngineChoice(loop, "tf32", 5, ""))
        assert (error.value.code, error.value.fields["value"]) == ("unsupported-precision", "tf32")
    with pytest.raises(InputError) as error:
        sa.run(tiny.with_(engine="reference", precision="bf16"))
    assert (error.value.code, error.value.fields["name"]) == ("unsupported-precision", "precision")
    with pytest.raises(
        InputError, match="engine kernels does not support this model: it has no convolution that our kernels compute"
    ):
        accelerate(sim, EngineChoice("kernels", "bf16", 5, ""))
    with pytest.raises(InputError) as error:
        accelerate(sim, EngineChoice("kernels", "tf32", 5, ""))
    assert (error.value.code, error.value.fields["value"]) == ("unsupported-precision", "tf32")


def test_the_evaluation_rounds_as_the_training_does(tiny):
    sim = build(tiny)
    for precision in get_args(Precision):
        assert accelerate(sim, EngineChoice("stacked", precision, 5, "")).evaluate.precision == precision


def test_an_accelerated_simulation_can_be_accelerated_again(tiny):
    """The result depends on the local training only, not on the engine before."""
    sim = build(tiny)
    bf16 = accelerate(sim, EngineChoice("stacked", "bf16", 2, ""))
    for kind in ("reference", "stacked", "processes"):
        again, once = (accelerate(s, EngineChoice(kind, "fp32", 3, "")) for s in (bf16, sim))
        assert type(again.train) is type(once.train)
        assert (again.train.chunk, again.evaluate.precision) == (3, "fp32")
        if kind == "processes":  # test_processes.py compares them with the reference
            continue
        for a, b in zip(uploads(again.train, sim.start.model), uploads(once.train, sim.start.model), strict=True):
            assert torch.equal(a, b)


def test_a_custom_trainer_is_accelerated(tiny):
    class Trainer:
        work, chunk = build(tiny).train.work, 2

        def __call__(self, state, k, clients):
            yield from Reference(self.work, self.chunk)(state, k, clients)

    sim = replace(build(tiny), train=Trainer())
    assert_uploads_agree(sim.train, accelerate(sim).train, sim.start.model, 1e-5)


def test_a_simulation_with_a_custom_evaluation_is_accelerated(tiny):
    evaluate = lambda model, averaged: {"test/loss": 1.0}  # noqa: E731
    assert accelerate(replace(build(tiny), evaluate=evaluate)).evaluate is evaluate


@pytest.mark.parametrize("requested", [{"engine": "fast"}, {"precision": "fp32"}, {"engine": "auto"}])
def test_a_resumed_run_keeps_its_chunk_for_any_free_memory(tiny, tmp_path, monkeypatch, requested):
    sa.run(tiny.with_(rounds=2, **requested), tmp_path / "a")
    monkeypatch.setattr(stableair.engine.selection, "CPU_CHUNK", 2)
    engines = []
    sa.run(tiny.with_(**requested), tmp_path / "a", resume=True, callbacks=[Hooks(start=engines.append)])
    assert engines[0]["chunk"] == 5
    sa.run(
        tiny.with_(rounds=5, chunk=3, **requested), tmp_path / "a", resume=True, callbacks=[Hooks(start=engines.append)]
    )
    assert (engines[1]["chunk"], engines[1]["engine"]) == (3, "stacked"), "unless the settings request another chunk"


def test_another_chunk_is_the_same_engine(tiny, tmp_path):
    engines = []
    sa.run(tiny.with_(rounds=1, engine="reference"), tmp_path / "a")
    sa.run(tiny.with_(chunk=3), tmp_path / "a", resume=True, callbacks=[Hooks(start=engines.append)])
    assert (engines[0]["engine"], engines[0]["chunk"]) == ("reference", 3)


def test_a_run_logs_its_engine_and_a_resumed_run_keeps_it(tiny, tmp_path):
    engines = []
    slow = tiny.with_(engine="reference", chunk=2)
    sa.run(slow.with_(rounds=2), tmp_path / "a", callbacks=[Hooks(start=engines.append)])
    resumed = sa.run(
        tiny, tmp_path / "a", resume=True, callbacks=[Hooks(start=engines.append)]
    )  # auto would choose another engine for a new run
    assert [(engine["engine"], engine["chunk"]) for engine in engines] == [("reference", 2)] * 2
    whole = sa.run(slow)
    assert torch.equal(resumed.state.model.w, whole.state.model.w)
    assert resumed["test/loss"] == whole["test/loss"]
    assert [e["engine"] for e in recorded_engines(tmp_path / "a")] == ["reference", "reference"]


def test_a_slow_run_projects_the_duration_of_its_remaining_rounds(tiny, tmp_path):
    seen = []
    slow = tiny.with_(engine="reference", rounds=2)
    sa.run(slow, tmp_path / "a", callbacks=[Hooks(start=seen.append)])
    assert 0 < seen[0]["projected_seconds"] < 600
    sa.run(slow.with_(rounds=5), tmp_path / "a", resume=True, callbacks=[Hooks(start=seen.append)])
    assert [engine["projected_rounds"] for engine in seen] == [2, 3]
    sa.run(tiny.with_(rounds=2), callbacks=[Hooks(start=seen.append)])
    assert "projected_seconds" not in seen[2], "a fast engine has none"
