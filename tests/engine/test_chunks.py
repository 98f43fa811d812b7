"""How many clients are trained at a time, and what happens when memory is short."""

import pytest
import torch

import stableair as sa
import stableair.engine
from helpers.callbacks import Hooks
from helpers.engine import recorded_engines, uploads
from stableair.builder import build
from stableair.engine import EngineChoice, accelerate
from stableair.engine.worker import StackedWorker
from stableair.errors import ResourceError
from stableair.evaluation import Evaluate


def test_the_chunk_does_not_change_a_run_beyond_rounding(tiny):
    one, all_ = (sa.run(tiny.with_(engine="fast", chunk=chunk)) for chunk in (1, 5))
    torch.testing.assert_close(one.state.model.w, all_.state.model.w, rtol=1e-5, atol=1e-6)


def scarce(monkeypatch, most=2):
    """No memory for more than that many clients; returns how many were tried."""
    real, asked = StackedWorker.__call__, []

    def worker(self, state, plan, clients):
        asked.append(len(clients))
        if len(self.loss) > most:
            raise torch.cuda.OutOfMemoryError
        return real(self, state, plan, clients)

    monkeypatch.setattr(StackedWorker, "__call__", worker)
    return asked


def test_a_chunk_that_memory_has_halved_is_recorded_and_kept(tiny, tmp_path, monkeypatch, caplog):
    scarce(monkeypatch)
    sa.run(tiny.with_(rounds=2), tmp_path / "a")
    assert "out of memory: training 2 clients at a time" in caplog.text
    monkeypatch.undo()
    assert [e["chunk"] for e in recorded_engines(tmp_path / "a")] == [2]
    told = []
    sa.run(tiny, tmp_path / "a", resume=True, callbacks=[Hooks(start=told.append)])
    assert (told[0]["chunk"], told[0]["why"]) == (2, "as in the earlier rounds")


def test_out_of_memory_elsewhere_is_one_line(tiny, monkeypatch):
    monkeypatch.setattr(Evaluate, "__call__", lambda *_: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError()))
    with pytest.raises(ResourceError) as error:
        sa.run(tiny)
    assert error.value.code == "out-of-memory"


def test_out_of_memory_halves_the_chunk_and_repeats_it(tiny, monkeypatch, caplog):
    fast = accelerate(build(tiny), EngineChoice("stacked", "fp32", 4, "")).train
    asked = scarce(monkeypatch)
    start = build(tiny).start.model
    got = uploads(fast, start)
    assert "out of memory: training 2 clients at a time from now on" in caplog.text
    assert asked == [4, 2, 2, 1], "nothing is done twice, nobody left out"
    assert len(fast._worker.loss) == 2, "and its memory is given back"
    monkeypatch.undo()
    expected = uploads(accelerate(build(tiny), EngineChoice("stacked", "fp32", 2, "")).train, start)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    scarce(monkeypatch, most=0)
    with pytest.raises(ResourceError) as error:
        list(fast(start, 0, torch.arange(5)))
    assert error.value.code == "out-of-memory"
