"""The engine of a run: recorded, kept on resumption, and replaced if it cannot continue the run."""

import json
import logging

import pytest
import torch

import stableair as sa
from helpers.engine import recorded_engines, uploads
from stableair.builder import build
from stableair.distributed import SingleProcess
from stableair.execution import with_engine
from stableair.results.checksums import ENVIRONMENT, seal

KERNELS = {"engine": "kernels", "precision": "bf16", "chunk": 2, "device": "cpu"}  # which does not support an mlp
STACKED = KERNELS | {"engine": "stacked", "precision": "fp32"}


class Ranks(SingleProcess):
    """Two ranks; the other rank reports an obstacle."""

    def __init__(self, obstacle):
        self.obstacle = obstacle

    def all_gather_objects(self, value):
        return [value, self.obstacle]


def test_the_recorded_engine_is_kept(tiny, caplog):
    with caplog.at_level(logging.WARNING, "stableair"):
        sim, engine = with_engine(build(tiny), tiny, STACKED | {"chunk": 3}, SingleProcess())
    assert (engine["engine"], engine["chunk"], sim.train.chunk) == ("stacked", 3, 3)
    assert not caplog.records


@pytest.mark.parametrize(
    ("recorded", "ranks"),
    [
        (KERNELS, SingleProcess()),
        (STACKED | {"engine": "engine of the future"}, SingleProcess()),
        (STACKED, Ranks("no")),
    ],
    ids=["unsupported", "unknown", "on another rank"],
)
def test_an_engine_that_cannot_continue_is_replaced(tiny, recorded, ranks, caplog):
    with caplog.at_level(logging.WARNING, "stableair"):
        sim, engine = with_engine(build(tiny), tiny, recorded, ranks)
    expected, new = with_engine(build(tiny), tiny, {}, SingleProcess())
    assert engine == new
    for a, b in zip(uploads(sim.train, sim.start.model), uploads(expected.train, sim.start.model), strict=True):
        assert torch.equal(a, b)
    (warning,) = caplog.messages
    assert "continues the run" in warning


def test_a_compiler_error_of_the_kernels_is_an_obstacle(tiny, monkeypatch, caplog):
    def fail(work, program):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("stableair.engine.selection.has_kernels", lambda program: True)
    monkeypatch.setattr("stableair.engine.selection._kernel_program", fail)
    _, engine = with_engine(build(tiny), tiny, KERNELS, SingleProcess())
    assert engine["engine"] == "stacked"
    assert "no compiler" in caplog.text


def test_a_run_continues_with_another_engine_and_records_it(tiny, tmp_path, caplog):
    sa.run(tiny.with_(rounds=2), tmp_path / "a")
    path = tmp_path / "a" / ENVIRONMENT
    entries = json.loads(path.read_text())
    entries[0].pop("checksum")
    path.write_bytes(seal([entries[0] | KERNELS]))
    resumed = sa.run(tiny, tmp_path / "a", resume=True)
    assert resumed["round"] == [0, 1, 2, 3]
    assert [entry["engine"] for entry in recorded_engines(tmp_path / "a")] == ["kernels", "stacked"]
    assert "continues the run" in caplog.text


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({"engine": "fast"}, {"engine": "reference"}),
        ({"precision": "fp32"}, {"precision": "bf16"}),
        ({}, {"device": "NVIDIA H200"}),
    ],
    ids=["engine", "precision", "device"],
)
def test_settings_and_device_take_precedence_over_the_record(tiny, settings, recorded, caplog):
    e = tiny.with_(**settings)
    _, engine = with_engine(build(e), e, STACKED | recorded, SingleProcess())
    assert engine == with_engine(build(e), e, {}, SingleProcess())[1]
    assert not caplog.records
